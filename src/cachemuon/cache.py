"""CacheGNS: probe the cached transform, decide, apply it or solve again; and the guard of its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .flops import Executed
from .polar import GramNS, computed_in, full_precision, normalizer, rescale, restore, wide_batch
from .probe import exact_residual, paired_residual, random_block, sketched_residual
from .stats import NO_AGE, REFRESHES, Event
from .workspace import Workspace

PROBES = ("sketch", "exact")
GATES = ("sync", "lagged")


def decide(
    *, finite: bool, age: int, residual: float, gamma: float, max_age: int | None, resting: bool = False
) -> str:
    """The gate: one of `OUTCOMES`. The paper's rule is `residual <= gamma`; a NaN residual is a miss.

    `age` is the number of steps since the refresh, this one included; `NO_AGE` without a transform.
    `resting` says that the guard has set the cache aside.

    >>> decide(finite=True, age=3, residual=0.9, gamma=2.0, max_age=None)
    'hit'
    >>> decide(finite=True, age=3, residual=0.9, gamma=2.0, max_age=2)
    'stale'
    """
    if not finite:
        return "non-finite"
    if resting:
        return "guarded"
    if age == NO_AGE:
        return "cold"
    if not probed(age, max_age):
        return "stale"
    return "hit" if residual <= gamma else "residual"


def probed(age: int, max_age: int | None) -> bool:
    """Whether a transform of this age is probed at all: it exists, and is not too old."""
    return age != NO_AGE and (max_age is None or age <= max_age)


@dataclass(frozen=True)
class Guard:
    """The break-even guard of one shape: it sets the cache aside where it costs more than it saves.

    A matrix has a balance, in thousandths of its cheapest fresh solve. A hit earns what it saves of that
    solve, a miss pays what it costs beyond it, so the balance falls while the hit rate is below
    break-even. At a debt of one solve the cache rests: the matrix is solved by the cheapest solver, and
    tried again after 32 steps, then 64, up to 1024, each time for half a solve; after a try that saved a
    whole solve all is as in the beginning. Without such a try T steps cost about (1 + log2(T / 32) / 2)
    solves more than fresh ones. Where not even hits would pay, as those of small matrices that are clipped,
    it always rests.

    >>> guard = Guard.of(Executed(768, 768, restarts=1))
    >>> guard.gains["hit"] > 900, guard.gains["residual"] < -250
    (True, True)
    >>> (balance, wait, interval), tries = (0, 0, 0), 0
    >>> while not wait:
    ...     balance, wait, interval = guard.after("residual", balance, wait, interval)
    ...     tries += 1
    >>> tries, wait
    (4, 32)
    """

    gains: dict[str, int]

    DEBT = 1000
    CAP = 4000  # savings that a cache may live on when it no longer hits
    INTERVALS = (32, 1024)
    THIN = 8  # a FLOP of a thin product, bound by memory, takes that much longer (docs/performance.md),
    LARGEST_FEE = 300  # but for a small matrix it is not FLOPs that take the time
    CALLS = 16_000_000  # FLOPs that take as long as the many small calls of a clipped hit

    @classmethod
    def of(cls, cost: Executed, *, lagged: bool = False) -> Guard:
        """The guard for matrices of that cost. A lagged gate makes no probe before it solves."""

        def gain(price: int) -> int:
            return round(1000 * (1 - price / cost.baseline))

        thin = cost.recheck if lagged else cost.recheck + (cost.probing if cost.probe == "sketch" else 0)
        miss = max(gain((cost.cold if lagged else cost.miss) + (cls.THIN - 1) * thin), -cls.LARGEST_FEE)
        hit, cold = gain(cost.hit + (cls.CALLS if cost.rank else 0)), gain(cost.cold)
        if lagged:  # it was preceded by a hit that should not have been one, and gives back what that earned
            miss -= hit
        return cls({"hit": hit, "residual": miss, "cold": cold, "stale": cold})

    def resting(self, wait: int) -> bool:
        """Whether the cache is set aside: after tries that failed, or since not even hits would pay."""
        return wait > 0 or self.gains["hit"] <= 0

    def after(self, outcome: str, balance: int, wait: int, interval: int) -> tuple[int, int, int]:
        """Balance, steps still to wait, and the length of the last wait, after an outcome."""
        if outcome == "guarded":
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


@dataclass(frozen=True)
class Candidate:
    """What a probe leaves for the hit, if there is one: nothing; or the direction itself, `formed (B, n, m)`;
    or the factors `left (B, n, k)` and `right (B, k, n)` of its repair, `(Q + left right) U`.
    """

    formed: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return self.formed is None and self.left is None

    def __getitem__(self, rows: list[int] | slice) -> Candidate:
        """That of some matrices of the batch."""
        parts = (self.formed, self.left, self.right)
        return Candidate(*(None if part is None else part[rows] for part in parts))

    @staticmethod
    def joined(candidates: Sequence[Candidate]) -> Candidate:
        """Those of several batches as one."""
        if len(candidates) < 2:
            return candidates[0] if candidates else Candidate()
        columns = zip(*((one.formed, one.left, one.right) for one in candidates), strict=True)
        return Candidate(*(None if parts[0] is None else torch.cat(parts) for parts in columns))


@dataclass(frozen=True)
class CacheGNS:
    """CacheGNS, Algorithm A.4. Stateless: the transform goes in and comes out.

    `probe="exact"` is the paper's: the candidate `C = Q X` is formed and its residual computed.
    `probe="sketch"` estimates the same number from `vectors` random vectors, and forms `Q X` only
    once it is accepted.

    With `clip > 0` a cached direction is repaired before it is judged: where Q meets directions that it
    was never made for, it amplifies them, and C gets a few singular values far above 1. A random block of
    `clip n` vectors and one power step find their span Y; inside it C is replaced by its own polar factor:
    `D = C + Y (A - I) Y^T C` with `A Y^T C = polar(Y^T C)`. Still a transform of X, `Q + Y (A - I) Y^T Q`,
    which is used once and never kept.

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
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.fresh, GramNS):
            raise ValueError(
                f"fresh must be a GramNS, the solver that yields a transform, got {self.fresh!r}"
            )
        if self.probe not in PROBES:
            raise ValueError(f"probe must be one of {', '.join(map(repr, PROBES))}, got {self.probe!r}")
        if not (isinstance(self.vectors, int) and self.vectors >= 1):
            raise ValueError(f"vectors must be an integer >= 1, got {self.vectors!r}")
        if not (isinstance(self.clip, int | float) and 0 <= self.clip <= 1):
            raise ValueError(f"clip must be a fraction of the rows, from 0 to 1, got {self.clip!r}")
        if self.clip and (self.probe == "exact" or self.vectors < 2):
            got = f"probe={self.probe!r}, vectors={self.vectors}"
            raise ValueError(f"clip needs probe='sketch' and at least two vectors, got {got}")

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
        U, workspace = wide_batch(M), Workspace()
        B, n = U.shape[:2]
        scale = normalizer(U, self.fresh.eps, out=workspace.like("direction", U, computed_in(U.dtype)))
        z = random_block(n, self.columns(n), seed=seed, step=step, device=U.device, dtype=scale.dtype)
        next_age = NO_AGE if transform is None else age + 1
        Q = None if transform is None else transform.reshape(B, n, n)
        residual, candidate = torch.full_like(scale.flatten(), math.nan), Candidate()
        if Q is not None and probed(next_age, max_age):
            residual, candidate = self.measure(U, scale, Q, z, workspace)
        scales, residuals = torch.stack((scale.flatten(), residual)).tolist()
        outcomes = [
            decide(finite=math.isfinite(s), age=next_age, residual=err, gamma=gamma, max_age=max_age)
            for s, err in zip(scales, residuals, strict=True)
        ]
        hits = [i for i, outcome in enumerate(outcomes) if outcome == "hit"]
        solves = [i for i, outcome in enumerate(outcomes) if outcome in REFRESHES]
        refreshed = torch.full_like(residual, math.nan)
        if len(solves) == B:
            direction, Q, refreshed = self.refresh(rescale(U, scale), z, workspace)
        elif Q is not None and len(hits) == B:
            direction = self.apply(U, scale, Q, candidate, workspace)
        else:
            direction = torch.zeros_like(U, dtype=scale.dtype)
            if Q is not None:
                Q = Q.clone()
            elif solves:
                Q = direction.new_zeros(B, n, n)
            if hits and Q is not None:
                direction[hits] = self.apply(U[hits], scale[hits], Q[hits], candidate[hits], workspace)
            if solves and Q is not None:
                X = rescale(U[solves], scale[solves])
                direction[solves], Q[solves], refreshed[solves] = self.refresh(X, z, workspace)
        events = tuple(
            Event(outcome, err, fresh_err, 0 if outcome in REFRESHES else max(next_age, 0))
            for outcome, err, fresh_err in zip(outcomes, residuals, refreshed.tolist(), strict=True)
        )
        kept = None if Q is None else Q.reshape(*M.shape[:-2], n, n)
        return restore(direction, M), kept, events if M.ndim > 2 else events[0]

    def rank(self, n: int) -> int:
        """How many directions of n are clipped."""
        return math.ceil(self.clip * n)

    def columns(self, n: int) -> int:
        """The columns of the random block that matrices with n rows share: for the probe, and to clip."""
        return self.vectors + self.rank(n)

    def measure(
        self, U: Tensor, scale: Tensor, Q: Tensor, z: Tensor, workspace: Workspace
    ) -> tuple[Tensor, Candidate]:
        """The residual of `Q X`, `X = scale U`, for each matrix of a batch, and what a hit can use of that.

        `z (n, columns)` are the random vectors.
        """
        if self.probe == "exact":
            C = self.apply(U, scale, Q, Candidate(), Workspace())  # of its own: it waits for the gate
            return exact_residual(C), Candidate(formed=C)
        if self.clip:
            return self._clipped(U.to(Q.dtype), _scaled(Q, scale, workspace), z)
        return sketched_residual(z, _scaled(Q, scale, workspace), U.to(Q.dtype)), Candidate()

    def _clipped(self, U: Tensor, Q: Tensor, block: Tensor) -> tuple[Tensor, Candidate]:
        """The residual of the repaired `D = (Q + Y (A - I) Y^T Q) U`, which is not formed, and the repair."""
        z, Y0 = block.split((self.vectors, block.shape[-1] - self.vectors), dim=-1)
        E, F = (block.mT @ Q @ U).split((z.shape[-1], Y0.shape[-1]), dim=-2)  # z^T C and Y0^T C
        Y = torch.linalg.qr(Q @ (U @ F.mT)).Q  # of C C^T Y0: the directions that Q amplifies
        B = Y.mT @ Q
        S = B @ U  # Y^T C
        scale = normalizer(S, self.fresh.eps)
        # Without restarts it is right to 1e-3, however S is spiked.
        small = GramNS(self.fresh.schedule, (), self.fresh.eps, S.dtype)
        _, A = small.solve_with_transform(S * scale, Workspace())
        A.mul_(scale).diagonal(dim1=-2, dim2=-1).sub_(1)  # (A - I) S = polar(S) - S
        residual = paired_residual(z, E + (z.mT @ Y) @ A @ S)
        return residual, Candidate(left=Y, right=A @ B)

    def apply(
        self,
        U: Tensor,
        scale: Tensor,
        Q: Tensor,
        candidate: Candidate,
        workspace: Workspace,
        gain: Tensor | None = None,
    ) -> Tensor:
        """The cached direction `Q X` of `X = scale U`, repaired as the candidate says, times `gain` if given.

        In full precision the factors go into the small Q, and X is never formed.
        """
        if candidate.formed is not None:
            return candidate.formed if gain is None else candidate.formed.mul_(gain)
        gain = torch.ones_like(scale) if gain is None else gain
        dtype = self.fresh.precision(scale)
        direction = workspace.like("direction", U, dtype)
        if dtype == Q.dtype:
            Q = _repaired(_scaled(Q, scale * gain, workspace), candidate, gain)
            return torch.bmm(Q, U.to(dtype), out=direction)
        Q = _repaired(_scaled(Q, torch.ones_like(scale), workspace), candidate, 1 / scale)
        X = rescale(U, scale).to(dtype)
        return torch.bmm(Q.to(dtype), X, out=direction).to(scale.dtype).mul_(gain)

    def refresh(self, X: Tensor, z: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """FreshGNS: direction, new transform, and the estimated residual of that direction.

        A fresh direction's own residual is not zero. It is estimated with the random vectors under
        either probe: the exact one would cost another n x m x n product.
        """
        direction, Q = self.fresh.solve_with_transform(X, workspace)
        return direction, Q, sketched_residual(z[:, : self.vectors], direction)


def _repaired(Q: Tensor, candidate: Candidate, factor: Tensor) -> Tensor:
    if candidate.left is None or candidate.right is None:
        return Q
    return torch.baddbmm(Q, candidate.left, candidate.right * factor, out=Q)


def _scaled(Q: Tensor, factor: Tensor, workspace: Workspace) -> Tensor:
    return torch.mul(Q, factor, out=workspace.square("Q", Q))


def check_gate(gamma: float, max_age: int | None) -> None:
    """Refuse a threshold or an age limit that cannot be meant."""
    if not (isinstance(gamma, int | float) and gamma >= 0):
        raise ValueError(f"gamma must be a number >= 0, got {gamma!r}")
    if max_age is not None and not (isinstance(max_age, int) and max_age >= 0):
        raise ValueError(f"max_age must be an integer >= 0 or None, got {max_age!r}")
