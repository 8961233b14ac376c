"""What orthogonalization costs, in floating-point operations, by two models.

`PaperCost` is the paper's line-by-line count (its Algorithm A.6): normalization and scalings included, the
products with the identity that open every segment charged. `ExecutedCost` is what this library multiplies:
matrix products only, 2abc for `(a x b) @ (b x c)`, as `torch.utils.flop_counter.FlopCounterMode` counts
them; no product with the identity, nothing that is linear in the entries. Neither counts anything outside
the solve. Both take a matrix of any orientation and price its wide one, `n <= m`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..newton_schulz.inverse_root import POLES
from ..newton_schulz.products import gram_flops, standard_flops, symmetric_flops

OUTCOMES = {
    "hit": "hit",  # the transform is reused
    "first": "refresh",  # there was no transform
    "expired": "refresh",  # the transform was due, and was not probed
    "rejected": "miss",  # the gate measured a residual above gamma
    "bounded": "hit",  # the transform was applied, and the step shortened
    "uncached": "baseline",  # the cheapest solve, without a cache
    "fresh": "gram",  # a solve that keeps no transform
    "non-finite": None,  # skipped: no product at all
}
"""Every outcome of one call, and the attribute of `Cost` that prices it."""


def at_least(name: str, value: object, least: int) -> None:
    """Refuse a value that is no integer of at least `least`."""
    if not (isinstance(value, int) and value >= least):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class Cost(ABC):
    """The words that both models share. K is `steps`, s is `restarts`.

    >>> PaperCost(3072, 768) == PaperCost(768, 3072)
    True
    """

    n: int
    m: int
    steps: int = 5
    restarts: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "m", "steps"):
            at_least(name, getattr(self, name), 1)
        if not (isinstance(self.restarts, int) and 0 <= self.restarts < self.steps):
            raise ValueError(f"restarts must be an integer from 0 to steps - 1, got {self.restarts!r}")
        n, m = sorted((self.n, self.m))
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "m", m)

    @property
    @abstractmethod
    def gram(self) -> int:
        """One GramNS call."""

    @property
    @abstractmethod
    def standard(self) -> int:
        """One StandardNS call."""

    @property
    @abstractmethod
    def cache(self) -> int:
        """What keeping the transform adds to `gram`: s products to compose its segments."""

    @property
    @abstractmethod
    def probing(self) -> int:
        """The residual of the cached transform on a new matrix."""

    @property
    @abstractmethod
    def hit(self) -> int:
        """A call that reuses the transform."""

    @property
    def transform(self) -> int:
        """FreshGNS, the solve that keeps its transform: `gram + cache`."""
        return self.gram + self.cache

    @property
    def refresh(self) -> int:
        """A solve for a new transform without a probe, as the first one is: `transform`."""
        return self.transform

    @property
    def miss(self) -> int:
        """A refresh after a probe: `probing + refresh`."""
        return self.probing + self.refresh

    @property
    def baseline(self) -> int:
        """The fresh solve that caching is compared with: `gram`."""
        return self.gram

    @property
    def break_even(self) -> float:
        """The hit rate above which caching pays: `(miss - baseline) / (miss - hit)`.

        Not clamped: above 1 a hit itself costs more than `baseline`, and caching never pays.
        """
        return (self.miss - self.baseline) / (self.miss - self.hit)

    def average(self, p: float) -> float:
        """The cost per call at hit rate p, the first call left out: `p hit + (1 - p) miss`."""
        if not 0 <= p <= 1:
            raise ValueError(f"p must be a hit rate from 0 to 1, got {p!r}")
        return p * self.hit + (1 - p) * self.miss

    def price_of(self, outcome: str) -> int:
        """The cost of one call with that outcome, a key of `OUTCOMES`."""
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
        attribute = OUTCOMES[outcome]
        return int(getattr(self, attribute)) if attribute else 0


@dataclass(frozen=True)
class PaperCost(Cost):
    """The paper's cost of one matrix; each docstring carries the paper's symbol.

    F_hit is `hit`, F_miss = F_norm + F_rem + Delta_probe + Delta_cache is `miss`.

    >>> cost = PaperCost(768, 3072)
    >>> cost.hit, cost.gram, cost.miss
    (7253066498, 29004595201, 37155963650)
    """

    restarts: int = 1

    @property
    def norm(self) -> int:
        """F_norm = 3nm + 1."""
        return 3 * self.n * self.m + 1

    @property
    def rest(self) -> int:
        """F_rem = (s+1) [n^2(2m-1) + nm(2n-1)] + K n^2(2n+2) + (3K-2-2s) n^2(2n+1)."""
        n, m, K, s = self.n, self.m, self.steps, self.restarts
        rectangular = (s + 1) * (n * n * (2 * m - 1) + n * m * (2 * n - 1))
        return rectangular + K * n * n * (2 * n + 2) + (3 * K - 2 - 2 * s) * n * n * (2 * n + 1)

    @property
    def gram(self) -> int:
        """F_GNS = F_norm + F_rem."""
        return self.norm + self.rest

    @property
    def standard(self) -> int:
        """F_std = F_norm + K [n^2(2m-1) + n^2(2n+2) + nm(2n-1)]: not in the paper, yet gives its table."""
        n, m = self.n, self.m
        return self.norm + self.steps * (n * n * (2 * m - 1) + n * n * (2 * n + 2) + n * m * (2 * n - 1))

    @property
    def cache(self) -> int:
        """Delta_cache = s n^2(2n-1)."""
        return self.restarts * self.n**2 * (2 * self.n - 1)

    @property
    def probing(self) -> int:
        """Delta_probe = nm(2n-1) + 2n^2 m + n^2 + n + 1."""
        n, m = self.n, self.m
        return n * m * (2 * n - 1) + 2 * n * n * m + n * n + n + 1

    @property
    def hit(self) -> int:
        """F_hit = F_norm + Delta_probe."""
        return self.norm + self.probing


@dataclass(frozen=True)
class ExecutedCost(Cost):
    """What this library multiplies for one matrix. `vectors` is the sketch's width k; 0 if exact: no recheck.

    `rank` is the number r of directions that a clipped hit may repair; `pieces` is the number of panels that
    symmetric products are computed in (`products.panels`); `cubic` is the number of steps with c = 0, which
    need no square (`Schedule.cubic`; the paper's model knows none).

    >>> cost = ExecutedCost(768, 3072)
    >>> cost.gram == 4 * 768**2 * 3072 + 34 * 768**3
    True
    """

    probe: Literal["sketch", "exact"] = "sketch"
    vectors: int = 8
    rank: int = 0
    pieces: int = 1
    cubic: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.cubic, int) and 0 <= self.cubic <= self.steps):
            raise ValueError(f"cubic must be an integer from 0 to steps, got {self.cubic!r}")
        at_least("rank", self.rank, 0)
        at_least("pieces", self.pieces, 1)
        if self.probe not in ("sketch", "exact"):
            raise ValueError(f"probe must be 'sketch' or 'exact', got {self.probe!r}")
        at_least("vectors", self.vectors, 1 if self.probe == "sketch" else 0)

    @property
    def gram(self) -> int:
        """s+1 segments of `Y Y^T` and `Q Y`; and n x n products: K for R^2, 3(K-1-s) for Q P and two of R.
        With full products 4(s+1) n^2 m + 2n^3 (K + 3(K-1-s)). Each cubic step has one product less.
        """
        return gram_flops(self.n, self.m, self.steps, self.restarts, self.pieces, self.cubic)

    @property
    def standard(self) -> int:
        """With full products K (4n^2 m + 2n^3), and 2n^3 less for each cubic step."""
        return standard_flops(self.n, self.m, self.steps, self.pieces, self.cubic)

    @property
    def baseline(self) -> int:
        """The cheaper of `gram` and `standard`."""
        return min(self.gram, self.standard)

    @property
    def cache(self) -> int:
        """s symmetric n x n products; 2s n^3 in full."""
        return self.restarts * symmetric_flops(self.n, self.n, self.pieces)

    @property
    def probing(self) -> int:
        """Sketch: k (4nm + 4n^2) + 2k^2 m. Exact: 4n^2 m, the candidate and its Gram matrix. Clipped:
        (2k + 4r) nm + (2k + 6r) n^2, and small products with r x r or k x k. Not counted: Cholesky factors
        and triangular solves.
        """
        n, m, k, r = self.n, self.m, self.vectors, self.rank
        if self.probe == "exact":
            return 4 * n * n * m
        if not r:
            return 4 * k * n * (m + n) + 2 * k * k * m
        small = 6 * r * r * n + 2 * (1 + len(POLES)) * r**3
        estimate = 4 * k * n * r + 2 * k * k * (m + n)
        return (2 * k + 4 * r) * n * m + (2 * k + 6 * r) * n * n + small + estimate

    @property
    def apply(self) -> int:
        """Q X after the probe. Sketch: 2n^2 m, and 2n^2 r to repair Q. Exact: 0, the candidate is it."""
        return 2 * self.n**2 * (self.m + self.rank) if self.probe == "sketch" else 0

    @property
    def recheck(self) -> int:
        """The residual of a fresh direction, sketched at every refresh whichever the probe: 4k nm."""
        return 4 * self.vectors * self.n * self.m

    @property
    def hit(self) -> int:
        """`probing + apply`."""
        return self.probing + self.apply

    @property
    def refresh(self) -> int:
        """`transform + recheck`."""
        return self.transform + self.recheck

    @property
    def received(self) -> int:
        """Q X with a transform that another rank has made, and its residual: `2n^2 m + recheck`."""
        return 2 * self.n**2 * self.m + self.recheck

    def price_of_copy(self, outcomes: Mapping[str, int]) -> int:
        """The cost of so many of each outcome on a rank that has a copy of the matrix, and does not own it.

        >>> cost = ExecutedCost(64, 64)
        >>> cost.price_of_copy({"hit": 1, "first": 1}) == cost.hit + cost.received
        True
        """
        hits = sum(outcomes.get(name, 0) for name in ("hit", "bounded"))
        refreshes = sum(outcomes.get(name, 0) for name in ("first", "expired"))
        solves = outcomes.get("uncached", 0)
        return hits * self.hit + refreshes * self.received + solves * 2 * self.n**2 * self.m
