"""What a solver costs on a matrix, what many calls cost, and what a whole training does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch

from ..newton_schulz.products import panels
from ..newton_schulz.solvers import GramNS, StandardNS
from .costs import Cost, ExecutedCost, PaperCost, at_least

Shape = tuple[int, int]


def executed_by(
    solver: GramNS,
    n: int,
    m: int,
    dtype: torch.dtype = torch.float32,
    *,
    probe: Literal["sketch", "exact"] = "sketch",
    vectors: int = 8,
    rank: int = 0,
) -> ExecutedCost:
    """The `ExecutedCost` cost of a matrix under a solver, with the restarts it takes for shape and dtype.

    >>> executed_by(GramNS(), 768, 768).restarts, executed_by(GramNS(), 768, 3072).restarts
    (1, 0)
    """
    n, m = sorted((n, m))
    restarts, pieces = len(solver.restarts_at(n, m, dtype)), panels(n, dtype)
    steps, cubic = solver.schedule.steps, solver.schedule.cubic
    return ExecutedCost(
        n, m, steps, restarts, probe=probe, vectors=vectors, rank=rank, pieces=pieces, cubic=cubic
    )


def paper_cost(solver: StandardNS | GramNS, n: int, m: int) -> PaperCost:
    """The paper's cost of a matrix under a solver: S = {2}, whatever restarts its precision needs.

    >>> paper_cost(GramNS(), 768, 3072) == PaperCost(768, 3072)
    True
    """
    steps = solver.schedule.steps
    return PaperCost(n, m, steps, min(1, steps - 1))


def price(cost: Cost, counters: Mapping[str, int]) -> int:
    """The cost of that many calls of each outcome.

    >>> cost = PaperCost(64, 576)
    >>> price(cost, {"first": 1, "hit": 10, "rejected": 2}) == cost.refresh + 10 * cost.hit + 2 * cost.miss
    True
    """
    for outcome, count in counters.items():
        at_least(f"counters[{outcome!r}]", count, 0)
    return sum(count * cost.price_of(outcome) for outcome, count in counters.items())


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

    `hits` goes with "cache": counters, one mapping per matrix that adds up to `steps`; or one hit rate for
    all after their first call, wrong if they hit unequally. `model` may be a `functools.partial`.

    >>> round(total(GPT2_SMALL, 30_520) / 1e15, 2)
    37.18
    >>> round(total(GPT2_LARGE, 3_814, replicas=8, solver="cache", hits=0.33) / 1e15, 2)
    468.77
    """
    at_least("steps", steps, 1)
    at_least("replicas", replicas, 1)
    costs = [model(*shape) for shape in shapes]
    if solver not in ("gram", "standard", "cache"):
        raise ValueError(f"solver must be 'gram', 'standard' or 'cache', got {solver!r}")
    if (solver == "cache") == (hits is None):
        raise ValueError(
            f"hits goes with solver='cache', and only with it, got solver={solver!r}, hits={hits!r}"
        )
    if hits is None:
        return replicas * steps * sum(cost.gram if solver == "gram" else cost.standard for cost in costs)
    if isinstance(hits, int | float):
        return replicas * sum(cost.refresh + (steps - 1) * cost.average(hits) for cost in costs)
    calls = [sum(counters.values()) for counters in hits]
    if calls != [steps] * len(costs):
        raise ValueError(f"hits must be {len(costs)} mappings of {steps} calls each, got calls {calls}")
    return replicas * sum(price(cost, counters) for cost, counters in zip(costs, hits, strict=True))


def gpt2_shapes(layers: int, width: int) -> list[Shape]:
    """GPT-2's matrices without embeddings: per block fused QKV as one, attention out, MLP in, MLP out.

    >>> gpt2_shapes(1, 768)
    [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    """
    at_least("layers", layers, 1)
    at_least("width", width, 1)
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


GPT2_SMALL = tuple(gpt2_shapes(12, 768))
"""The 48 matrices of GPT-2 Small."""

GPT2_LARGE = tuple(gpt2_shapes(36, 1280))
"""The 144 matrices of GPT-2 Large."""

RESNET18 = tuple(
    [(64, 27)]
    + [(64, 576)] * 4
    + [(128, 576), (128, 1152), (128, 64), (128, 1152), (128, 1152)]
    + [(256, 1152), (256, 2304), (256, 128), (256, 2304), (256, 2304)]
    + [(512, 2304), (512, 4608), (512, 256), (512, 4608), (512, 4608)]
    + [(10, 512)]
)
"""ResNet-18 for 32 x 32 images: 20 convolutions and the last layer, as (out, in * height * width)."""
