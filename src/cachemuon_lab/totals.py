"""What the orthogonalization of a whole run costs, and the shapes of the paper's models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from cachemuon.flops import Cost, PaperCost, check_integer, price

Shape = tuple[int, int]


def total(
    shapes: Iterable[Shape],
    steps: int,
    *,
    solver: Literal["gram", "standard", "cache"] = "gram",
    hits: float | Sequence[Mapping[str, int]] | None = None,
    replicas: int = 1,
    model: Callable[[int, int], Cost] = PaperCost,
) -> float:
    """The cost of a run: `steps` calls for every matrix, on `replicas` devices that each do all of it.

    `hits` goes with "cache": each matrix's calls by outcome; or one hit rate, after the first call.

    >>> round(total(GPT2_SMALL, 30_520) / 1e15, 2)
    37.18
    >>> round(total(GPT2_LARGE, 3_814, replicas=8, solver="cache", hits=0.33) / 1e15, 2)
    468.77
    """
    check_integer("steps", steps, 1)
    check_integer("replicas", replicas, 1)
    if solver not in ("gram", "standard", "cache"):
        raise ValueError(f"solver must be 'gram', 'standard' or 'cache', got {solver!r}")
    if (solver == "cache") == (hits is None):
        raise ValueError(
            f"hits goes with solver='cache', and only with it, got solver={solver!r}, hits={hits!r}"
        )
    costs = [model(*shape) for shape in shapes]
    if hits is None:
        return replicas * steps * sum(cost.gram if solver == "gram" else cost.standard for cost in costs)
    if isinstance(hits, int | float):
        return replicas * sum(cost.refresh + (steps - 1) * cost.average(hits) for cost in costs)
    calls = [sum(counters.values()) for counters in hits]
    if calls != [steps] * len(costs):
        raise ValueError(f"hits must be {len(costs)} mappings of {steps} calls each, got calls {calls}")
    return replicas * sum(price(cost, counters) for cost, counters in zip(costs, hits, strict=True))


def gpt2_shapes(layers: int, width: int) -> list[Shape]:
    """GPT-2's matrices without embeddings: fused QKV, attention output, MLP in, MLP out of each block.

    >>> gpt2_shapes(1, 768)
    [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    """
    check_integer("layers", layers, 1)
    check_integer("width", width, 1)
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


GPT2_SMALL, GPT2_LARGE = tuple(gpt2_shapes(12, 768)), tuple(gpt2_shapes(36, 1280))
"""The 48 matrices of GPT-2 Small, and the 144 of GPT-2 Large."""

RESNET18 = (
    (64, 27),
    *[(64, 576)] * 4,
    *((128, 576), (128, 1152), (128, 64), (128, 1152), (128, 1152)),
    *((256, 1152), (256, 2304), (256, 128), (256, 2304), (256, 2304)),
    *((512, 2304), (512, 4608), (512, 256), (512, 4608), (512, 4608)),
    (10, 512),
)
"""ResNet-18 for 32 x 32 images: 20 convolutions and the last layer, as (out, in * height * width)."""
