"""The floating-point operations of orthogonalization: by the paper's count, and as executed.

`PaperCost` is the paper's line-by-line count (Algorithm A.6), with normalization, scalings and products with
the identity. `ExecutedCost` counts the matrix products of this library, 2abc for `(a x b) @ (b x c)`, as
`torch.utils.flop_counter.FlopCounterMode` does. Both count the solve alone; `n <= m` are a matrix's sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from .cache.reuse import POLES
from .newton_schulz.products import gram_flops, panels, standard_flops, symmetric_flops
from .newton_schulz.solvers import GramNS, StandardNS

OUTCOMES = {
    "hit": "hit",  # the transform is reused
    "first": "refresh",  # there was no transform
    "expired": "refresh",  # the schedule refreshes the transform
    "rejected": "miss",  # the gate measured a residual above gamma
    "bounded": "hit",  # the transform is reused, and the step shortened
    "uncached": "baseline",  # the cheapest solve, without a cache
    "fresh": "gram",  # a solve that keeps no transform
    "non-finite": None,  # skipped: no product at all
}
"""Every outcome of a step for one matrix, and the part of `Cost` that it costs."""


def check_integer(name: str, value: object, least: int, most: float = math.inf, allowed: str = "") -> None:
    """Refuse what is no integer from least to most."""
    if not (isinstance(value, int) and least <= value <= most):
        raise ValueError(f"{name} must be an integer {allowed or f'of at least {least}'}, got {value!r}")


@dataclass(frozen=True)
class Cost(ABC):
    """The cost of every part of a step for one n x m matrix. K is `steps`, s is `restarts`.

    >>> PaperCost(3072, 768) == PaperCost(768, 3072)
    True
    """

    n: int
    m: int
    steps: int = 5
    restarts: int = 0
    gram: int = field(init=False, repr=False, compare=False)
    """A GramNS solve."""
    standard: int = field(init=False, repr=False, compare=False)
    """A StandardNS solve."""
    baseline: int = field(init=False, repr=False, compare=False)
    """The fresh solve that caching is compared with."""
    cache: int = field(init=False, repr=False, compare=False)
    """What the transform adds to `gram`: s products that compose its segments."""
    probing: int = field(init=False, repr=False, compare=False)
    """The residual of the cached transform on a new matrix."""
    recheck: int = field(init=False, repr=False, compare=False)
    """The residual of a fresh direction."""
    hit: int = field(init=False, repr=False, compare=False)
    """A call that reuses the transform."""

    def __post_init__(self) -> None:
        for name in ("n", "m", "steps"):
            check_integer(name, getattr(self, name), 1)
        check_integer("restarts", self.restarts, 0, self.steps - 1, "from 0 to steps - 1")
        n, m = sorted((self.n, self.m))
        for name, value in {"n": n, "m": m, **self._parts(n, m)}.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def _parts(self, n: int, m: int) -> dict[str, int]: ...

    @property
    def transform(self) -> int:
        """FreshGNS, the solve that keeps its transform: `gram + cache`."""
        return self.gram + self.cache

    @property
    def refresh(self) -> int:
        """A solve for a new transform, without a probe: `transform + recheck`."""
        return self.transform + self.recheck

    @property
    def miss(self) -> int:
        """A refresh after a probe: `probing + refresh`."""
        return self.probing + self.refresh

    @property
    def break_even(self) -> float:
        """The hit rate above which caching pays: `(miss - baseline) / (miss - hit)`.

        Above 1 a hit costs more than `baseline`, and caching never pays.
        """
        return (self.miss - self.baseline) / (self.miss - self.hit)

    def average(self, p: float) -> float:
        """The cost per call at hit rate p, without the first call: `p hit + (1 - p) miss`."""
        if not 0 <= p <= 1:
            raise ValueError(f"p must be a hit rate from 0 to 1, got {p!r}")
        return p * self.hit + (1 - p) * self.miss

    def price_of(self, outcome: str) -> int:
        """The cost of one call with that outcome, a key of `OUTCOMES`."""
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
        part = OUTCOMES[outcome]
        return int(getattr(self, part)) if part else 0


@dataclass(frozen=True)
class PaperCost(Cost):
    """The paper's cost of one matrix. F_hit is `hit`, F_miss is `miss`.

    >>> cost = PaperCost(768, 3072)
    >>> cost.hit, cost.gram, cost.miss
    (7253066498, 29004595201, 37155963650)
    """

    restarts: int = 1
    norm: int = field(init=False, repr=False, compare=False)
    """F_norm, the normalization."""
    rest: int = field(init=False, repr=False, compare=False)
    """F_rem, all other lines of GramNS."""

    def _parts(self, n: int, m: int) -> dict[str, int]:
        K, s = self.steps, self.restarts
        norm = 3 * n * m + 1
        segment = n**2 * (2 * m - 1) + n * m * (2 * n - 1)
        rest = (s + 1) * segment + K * n**2 * (2 * n + 2) + (3 * K - 2 - 2 * s) * n**2 * (2 * n + 1)
        probing = n * m * (2 * n - 1) + 2 * n**2 * m + n**2 + n + 1
        return {
            "norm": norm,
            "rest": rest,
            "gram": norm + rest,
            "standard": norm + K * (segment + n**2 * (2 * n + 2)),  # not in the paper, yet gives its table
            "baseline": norm + rest,
            "cache": s * n**2 * (2 * n - 1),
            "probing": probing,
            "recheck": 0,
            "hit": norm + probing,
        }


@dataclass(frozen=True)
class ExecutedCost(Cost):
    """What this library multiplies for one matrix.

    `vectors` is the number k of random vectors that estimate a residual; `rank` the number r of directions
    that a hit may clip; `pieces` the number of panels of a symmetric product (`products.panels`).
    Cholesky factors and triangular solves are not counted.

    >>> cost = ExecutedCost(768, 3072)
    >>> cost.gram == 4 * 768**2 * 3072 + 34 * 768**3
    True
    """

    probe: Literal["sketch", "exact"] = "sketch"
    vectors: int = 8
    rank: int = 0
    pieces: int = 1
    apply: int = field(init=False, repr=False, compare=False)
    """Q X after the probe. The exact probe has multiplied it already."""
    received: int = field(init=False, repr=False, compare=False)
    """Q X with a transform from another rank, and its residual."""

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 0)
        check_integer("pieces", self.pieces, 1)
        if self.probe not in ("sketch", "exact"):
            raise ValueError(f"probe must be 'sketch' or 'exact', got {self.probe!r}")
        check_integer("vectors", self.vectors, 1 if self.probe == "sketch" else 0)
        super().__post_init__()

    def _parts(self, n: int, m: int) -> dict[str, int]:
        s, k, r, exact = self.restarts, self.vectors, self.rank, self.probe == "exact"
        gram = gram_flops(n, m, self.steps, s, self.pieces)
        standard = standard_flops(n, m, self.steps, self.pieces)
        probing = 4 * n**2 * m if exact else 4 * k * n * (m + n) + 2 * k**2 * m
        if r and not exact:  # a clipped hit shares its products with the probe
            small = 6 * r**2 * n + 2 * (1 + len(POLES)) * r**3
            estimate = 4 * k * n * r + 2 * k**2 * (m + n)
            probing = (2 * k + 4 * r) * n * m + (2 * k + 6 * r) * n**2 + small + estimate
        apply, recheck = 0 if exact else 2 * n**2 * (m + r), 4 * k * n * m
        return {
            "gram": gram,
            "standard": standard,
            "baseline": min(gram, standard),
            "cache": s * symmetric_flops(n, n, self.pieces),
            "probing": probing,
            "apply": apply,
            "recheck": recheck,
            "hit": probing + apply,
            "received": 2 * n**2 * m + recheck,
        }

    def price_of_copy(self, outcome: str) -> int:
        """The cost of one call with that outcome on a rank that has a copy of the matrix but does not own it.

        >>> cost = ExecutedCost(64, 64)
        >>> cost.price_of_copy("hit") == cost.hit, cost.price_of_copy("first") == cost.received
        (True, True)
        """
        parts = {"hit": self.hit, "refresh": self.received, "baseline": 2 * self.n**2 * self.m}
        return parts.get(OUTCOMES[outcome] or "", 0)


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
    """The executed cost of a matrix under a solver, with its restarts for that shape and dtype.

    >>> executed_by(GramNS(), 768, 768).restarts, executed_by(GramNS(), 768, 3072).restarts
    (1, 0)
    """
    n, m = sorted((n, m))
    restarts, schedule = len(solver.restarts_at(n, m, dtype)), solver.schedule
    own = schedule.steps, restarts, probe, vectors, rank, panels(n, dtype)
    return ExecutedCost(n, m, *own)


def paper_cost(solver: StandardNS | GramNS, n: int, m: int) -> PaperCost:
    """The paper's cost of a matrix under a solver: with S = {2}, whatever restarts its precision needs.

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
        check_integer(f"counters[{outcome!r}]", count, 0)
    return sum(count * cost.price_of(outcome) for outcome, count in counters.items())
