"""CacheGNS: probe the cached transform, decide, apply it or solve again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .polar import GramNS, full_precision, restore, widen
from .probe import exact_residual, random_block, sketched_residual
from .stats import NO_AGE, REFRESHES, Event

PROBES = ("sketch", "exact")


def decide(*, finite: bool, age: int, residual: float, gamma: float, max_age: int | None) -> str:
    """The gate: one of `OUTCOMES`. The paper's rule is `residual <= gamma`; a NaN residual is a miss.

    `age` is the number of steps since the refresh, this one included; `NO_AGE` without a transform.

    >>> decide(finite=True, age=3, residual=0.9, gamma=2.0, max_age=None)
    'hit'
    >>> decide(finite=True, age=3, residual=0.9, gamma=2.0, max_age=2)
    'stale'
    """
    if not finite:
        return "non-finite"
    if age == NO_AGE:
        return "cold"
    if not probed(age, max_age):
        return "stale"
    return "hit" if residual <= gamma else "residual"


def probed(age: int, max_age: int | None) -> bool:
    """Whether a transform of this age is probed at all: it exists, and is not too old."""
    return age != NO_AGE and (max_age is None or age <= max_age)


@dataclass(frozen=True)
class CacheGNS:
    """CacheGNS, Algorithm A.4. Stateless: the transform goes in and comes out.

    `probe="exact"` is the paper's: the candidate `C = Q X` is formed and its residual computed.
    `probe="sketch"` estimates the same number from `vectors` random vectors, and forms `Q X` only
    once it is accepted.

    >>> solver = CacheGNS()
    >>> M = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    >>> direction, transform, event = solver(M, None, gamma=5.0)
    >>> event.reason
    'cold'
    >>> direction, transform, event = solver(M + 0.001, transform, gamma=5.0, step=1)
    >>> event.hit, event.age
    (True, 1)
    """

    fresh: GramNS = field(default_factory=GramNS)
    probe: str = "sketch"
    vectors: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.fresh, GramNS):
            raise ValueError(
                f"fresh must be a GramNS, the solver that yields a transform, got {self.fresh!r}"
            )
        if self.probe not in PROBES:
            raise ValueError(f"probe must be one of {', '.join(map(repr, PROBES))}, got {self.probe!r}")
        if not (isinstance(self.vectors, int) and self.vectors >= 1):
            raise ValueError(f"vectors must be an integer >= 1, got {self.vectors!r}")

    def __call__(
        self,
        M: Tensor,
        transform: Tensor | None,
        gamma: float,
        *,
        age: int = 0,
        max_age: int | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> tuple[Tensor, Tensor | None, Event | tuple[Event, ...]]:
        """The direction of `M (..., n, m)`, the transform to keep, and what was decided.

        `age` is that of the given transform: 0 right after its refresh. A batch is decided matrix by
        matrix and gives a tuple of events. A matrix with a NaN or Inf gets a zero direction and
        keeps its transform. This call reads its residuals on the host; the optimizers don't use it,
        but gather the residuals of all matrices first.
        """
        check_gate(gamma, max_age)
        with full_precision(M.device.type):
            return self._decided(M, transform, gamma, age, max_age, seed, step)

    def _decided(
        self,
        M: Tensor,
        transform: Tensor | None,
        gamma: float,
        age: int,
        max_age: int | None,
        seed: int,
        step: int,
    ) -> tuple[Tensor, Tensor | None, Event | tuple[Event, ...]]:
        X = widen(M, self.fresh.eps)
        B, n = X.shape[:2]
        z = random_block(n, self.vectors, seed=seed, step=step, device=X.device, dtype=X.dtype)
        finite = torch.isfinite(X).flatten(1).all(dim=1)
        next_age = NO_AGE if transform is None else age + 1
        Q = X.new_zeros(B, n, n) if transform is None else transform.reshape(B, n, n).clone()
        residual, candidate = X.new_full((B,), math.nan), None
        if probed(next_age, max_age):
            residual, candidate = self.measure(X, Q, z)
        outcomes = [
            decide(finite=ok, age=next_age, residual=err, gamma=gamma, max_age=max_age)
            for ok, err in zip(finite.tolist(), residual.tolist(), strict=True)
        ]
        direction, refreshed = torch.zeros_like(X), X.new_full((B,), math.nan)
        hits = [i for i, outcome in enumerate(outcomes) if outcome == "hit"]
        solves = [i for i, outcome in enumerate(outcomes) if outcome in REFRESHES]
        if hits:
            direction[hits] = self.apply(X[hits], Q[hits]) if candidate is None else candidate[hits]
        if solves:
            direction[solves], Q[solves], refreshed[solves] = self.refresh(X[solves], z)
        events = tuple(
            Event(outcome, err, fresh_err, 0 if outcome in REFRESHES else max(next_age, 0))
            for outcome, err, fresh_err in zip(outcomes, residual.tolist(), refreshed.tolist(), strict=True)
        )
        kept = None if transform is None and not solves else Q.reshape(*M.shape[:-2], n, n)
        return restore(direction, M), kept, events if M.ndim > 2 else events[0]

    def measure(self, X: Tensor, Q: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual of `Q X` for each matrix of a batch, and the candidate if it was formed."""
        if self.probe == "exact":
            C = self.apply(X, Q)
            return exact_residual(C), C
        return sketched_residual(z, Q, X), None

    def apply(self, X: Tensor, Q: Tensor) -> Tensor:
        """The cached direction `Q X`."""
        dtype = self.fresh.precision(X)
        return (Q.to(dtype) @ X.to(dtype)).to(X.dtype)

    def refresh(self, X: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """FreshGNS: direction, new transform, and the estimated residual of that direction.

        A fresh direction's own residual is not zero. It is estimated with the random vectors under
        either probe: the exact one would cost another n x m x n product.
        """
        direction, Q = self.fresh.solve_with_transform(X)
        return direction, Q, sketched_residual(z, direction)


def check_gate(gamma: float, max_age: int | None) -> None:
    """Refuse a threshold or an age limit that cannot be meant."""
    if not (isinstance(gamma, int | float) and gamma >= 0):
        raise ValueError(f"gamma must be a number >= 0, got {gamma!r}")
    if max_age is not None and not (isinstance(max_age, int) and max_age >= 0):
        raise ValueError(f"max_age must be an integer >= 0 or None, got {max_age!r}")
