"""What orthogonalization costs in floating-point operations: by the paper's count, and as executed."""

from .costs import OUTCOMES, Cost, ExecutedCost, PaperCost
from .totals import (
    GPT2_LARGE,
    GPT2_SMALL,
    RESNET18,
    Shape,
    executed_by,
    gpt2_shapes,
    paper_cost,
    price,
    total,
)

__all__ = [
    "GPT2_LARGE",
    "GPT2_SMALL",
    "OUTCOMES",
    "RESNET18",
    "Cost",
    "ExecutedCost",
    "PaperCost",
    "Shape",
    "executed_by",
    "gpt2_shapes",
    "paper_cost",
    "price",
    "total",
]
