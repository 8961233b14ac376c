"""Where a cache rests because it does not pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..flops.model import Executed


class Machine(NamedTuple):
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


MACHINES = {"cpu": Machine(call=1_500_000, thin=9, element=1100, matrix=11_000_000, cached=4_000_000)}
"""Two cores in float32, where 1.5 MFLOP take 7 us: `python benchmarks/prices.py`."""

ASSUMED = Machine(call=500_000_000, thin=12, element=2000, matrix=0, cached=0)
"""Every other device, of which none was measured: 5 us for a launch, 100 TFLOP/s, 2 TB/s of memory, and a
host that is ahead."""

STEP_CALLS, SOLVE_CALLS, PROBE_CALLS, CLIP_CALLS = 55, 92, 81, 89
"""How many operations every step takes, a solve beyond that, probing and applying a transform, and clipping,
by their time, from the same fit. The matrices of a batch share them."""


@dataclass(frozen=True)
class Guard:
    """The break-even guard of one shape: it sets the cache aside where it costs more than it saves.

    A matrix has a balance, in thousandths of its step with the cheapest fresh solve. A hit earns what it
    saves of that, a miss pays what it costs beyond it, so the balance falls while the hit rate is below
    break-even. At a debt of one such step the cache rests: the matrix is solved by the cheapest solver, and
    tried again after 32 steps, then 64, up to 1024, each time for half that debt; after a try that saved a
    whole one all is as in the beginning. Without such a try T steps cost about (1 + log2(T / 32) / 2) of them
    more than fresh ones. Where not even hits alone would save 10%, as those of few small matrices that are
    clipped, it always rests.

    >>> guard = Guard.of(Executed(768, 768, restarts=1))
    >>> guard.gains["hit"] > 800, guard.gains["residual"] < -150
    (True, True)
    >>> (balance, wait, interval), tries = (0, 0, 0), 0
    >>> while not wait:
    ...     balance, wait, interval = guard.after("residual", balance, wait, interval)
    ...     tries += 1
    >>> tries, wait
    (4, 32)
    """

    gains: dict[str, int]
    best: int  # the mean gain of a step if every probe hits
    saved: float  # the time of that, in FLOPs of large products that take as long

    LEAST = 100
    DEBT = 1000
    CAP = 4000  # savings that a cache may live on when it no longer hits
    INTERVALS = (32, 1024)

    @classmethod
    def of(
        cls,
        cost: Executed,
        *,
        max_age: int | None = None,
        batch: int = 1,
        device: str = "cpu",
        lagged: bool = False,
    ) -> Guard:
        """The guard for matrices of that cost, of which `batch` are worked on together on such a device.

        A lagged gate makes no probe before it solves.
        """
        call, thin, element, matrix, cached = MACHINES.get(device, ASSUMED)

        def duration(flops: int, calls: int, memory_bound: int = 0, own: int = cached) -> float:
            shared = (STEP_CALLS + calls) * call / batch
            return flops + (thin - 1) * memory_bound + shared + element * cost.n * cost.m + matrix + own

        vectors = {"exact": 0, "sketch": 2 if cost.rank else 4}[cost.probe] * cost.vectors * cost.n * cost.m
        probing = PROBE_CALLS + (CLIP_CALLS if cost.rank else 0)
        solve = duration(cost.baseline, SOLVE_CALLS, own=0)
        durations = {
            "hit": duration(cost.hit, probing, vectors),
            "cold": duration(cost.cold, SOLVE_CALLS, cost.recheck),
            "residual": duration(cost.miss, SOLVE_CALLS + probing, cost.recheck + vectors),
        }
        gains = {outcome: round(1000 * (1 - taken / solve)) for outcome, taken in durations.items()}
        if lagged:  # a refusal is of a hit that should not have been one, and gives back what that earned
            gains["residual"] = gains["cold"] - gains["hit"]
        best, mean = gains["hit"], durations["hit"]
        if max_age is not None:
            best = (max_age * best + gains["cold"]) // (max_age + 1)
            mean = (max_age * mean + durations["cold"]) / (max_age + 1)
        return cls({**gains, "stale": gains["cold"]}, best, solve - mean)

    @property
    def always_rests(self) -> bool:
        """Whether not even hits alone would pay."""
        return self.best < self.LEAST

    def resting(self, wait: int) -> bool:
        """Whether the cache is set aside: after tries that failed, or since it cannot pay."""
        return wait > 0 or self.always_rests

    def after(self, outcome: str, balance: int, wait: int, interval: int) -> tuple[int, int, int]:
        """Balance, steps still to wait, and the length of the last wait, after an outcome."""
        if outcome == "resting":
            return balance, max(wait - 1, 0), interval
        if outcome == "non-finite":
            return balance, wait, interval
        balance = min(balance + self.gains[outcome], self.CAP)
        if balance >= self.DEBT:
            interval = 0
        if balance > (-self.DEBT if interval == 0 else -self.DEBT // 2):
            return balance, 0, interval
        first, longest = self.INTERVALS
        interval = min(max(first, 2 * interval), longest)
        return 0, interval, interval
