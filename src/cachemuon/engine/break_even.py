"""Whether caching pays for a shape: a static question, of its size, how many there are, and the device."""

from __future__ import annotations

from typing import NamedTuple

from ..flops import ExecutedCost

LEAST = 0.1
"""The share of a fresh step that a cache must save to be worth its memory."""


class DeviceCosts(NamedTuple):
    """What a price in FLOPs leaves out, for one kind of device, in FLOPs of large products that take as long.

    `call`: to start one operation. `thin`: how much longer a FLOP takes in a product with a few vectors,
    which is bound by memory. `element`: momentum, norm, decay and update, for each element of a matrix.
    `matrix`, `cached`: what the host does for each matrix, and beyond that for each that is cached.
    """

    call: int
    thin: int
    element: int
    matrix: int
    cached: int


MEASURED = {"cpu": DeviceCosts(call=1_500_000, thin=9, element=1100, matrix=11_000_000, cached=4_000_000)}
"""Two cores in float32, where 1.5 MFLOP take 7 us: `python benchmarks/prices.py`."""

ASSUMED = DeviceCosts(call=500_000_000, thin=12, element=2000, matrix=0, cached=0)
"""Every other device, of which none was measured: 5 us for a launch, 100 TFLOP/s, 2 TB/s of memory, and a
host that is ahead.
"""

STEP_CALLS, SOLVE_CALLS, REUSE_CALLS, CLIP_CALLS = 55, 92, 81, 89
"""How many operations every step takes, a solve beyond that, applying a transform, and clipping, by their
time, from the same fit. The matrices of a bucket share them.
"""


def saving(cost: ExecutedCost, max_age: int | None, count: int, device: str) -> float:
    """The share of a fresh step's time that caching saves, for `count` matrices of one shape.

    A life of `max_age` reuses and one solve is compared with as many steps of the cheapest fresh solver.

    >>> saving(ExecutedCost(768, 3072), 10, count=12, device="cpu") > 0.5
    True
    >>> saving(ExecutedCost(16, 16, restarts=1, rank=4), 10, count=1, device="cpu") < 0
    True
    """
    costs = MEASURED.get(device, ASSUMED)

    def duration(flops: int, calls: int, thin: int = 0, own: int = costs.cached) -> float:
        shared = (STEP_CALLS + calls) * costs.call / count
        return flops + (costs.thin - 1) * thin + shared + costs.element * cost.n * cost.m + costs.matrix + own

    vectors = {"exact": 0, "sketch": 2 if cost.rank else 4}[cost.probe] * cost.vectors * cost.n * cost.m
    reuse_calls = REUSE_CALLS + (CLIP_CALLS if cost.rank else 0)
    fresh = duration(cost.baseline, SOLVE_CALLS, own=0)
    reused = duration(cost.hit, reuse_calls, vectors)
    refreshed = duration(cost.refresh, SOLVE_CALLS, cost.recheck)
    mean = reused if max_age is None else (max_age * reused + refreshed) / (max_age + 1)
    return 1 - mean / fresh
