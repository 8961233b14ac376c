"""CacheGNS: probe the cached transform, decide, apply it or solve again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..newton_schulz.normalize import (
    computed_in,
    full_precision,
    holds,
    normalizer,
    rescale,
    restore,
    wide_batch,
)
from ..newton_schulz.products import symmetric
from ..newton_schulz.schedules import ROOT
from ..newton_schulz.solvers import GramNS, gram_transform
from ..newton_schulz.workspace import Workspace
from ..report.counters import NO_AGE, REFRESHES, Event
from .residual import exact_residual, paired_residual, random_block, sketched_residual

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
        return "resting"
    if age == NO_AGE:
        return "cold"
    if not probed(age, max_age):
        return "stale"
    return "hit" if residual <= gamma else "residual"


def probed(age: int, max_age: int | None) -> bool:
    """Whether a transform of this age is probed at all: it exists, and is not too old."""
    return age != NO_AGE and (max_age is None or age <= max_age)


@dataclass(frozen=True)
class Candidate:
    """What a probe leaves for the hit, if there is one: nothing; or the direction itself, `formed (B, n, m)`;
    or the factors `left (B, n, k)` and `right (B, k, n)` of its repair, `share (Q + left right) U`, and the
    `share (B, 1, 1)` of its length that it keeps.
    """

    formed: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    share: Tensor | None = None

    def __getitem__(self, rows: list[int] | slice) -> Candidate:
        """That of some matrices of the batch."""
        parts = (self.formed, self.left, self.right, self.share)
        return Candidate(*(None if part is None else part[rows] for part in parts))

    @staticmethod
    def gathered(places: Sequence[tuple[Candidate, int]]) -> Candidate:
        """Those of single matrices, each a place in the candidate of a batch, as one."""
        names = ("formed", "left", "right", "share")
        columns = [[(getattr(one, name), place) for one, place in places] for name in names]
        return Candidate(*(None if column[0][0] is None else gathered(column) for column in columns))


def gathered(places: Sequence[tuple[Tensor, int]]) -> Tensor:
    """`tensor[place]` of each, stacked; a view where they follow one another in one tensor.

    >>> numbers = torch.arange(4)
    >>> gathered([(numbers, 1), (numbers, 2)]).data_ptr() == numbers[1:].data_ptr()
    True
    """
    tensor, first = places[0]
    if all(one is tensor and place == first + i for i, (one, place) in enumerate(places)):
        return tensor[first : first + len(places)]
    return torch.stack([one[place] for one, place in places])


@dataclass(frozen=True)
class CacheGNS:
    """CacheGNS, Algorithm A.4. Stateless: the transform goes in and comes out.

    `probe="exact"` is the paper's: the candidate `C = Q X` is formed and its residual computed.
    `probe="sketch"` estimates the same number from `vectors` random vectors, and forms `Q X` only
    once it is accepted.

    With `clip` a cached direction is repaired before it is judged: where Q meets directions that it was never
    made for, it amplifies them, and C gets singular values far above 1. A random block Y0 of `clip n` vectors
    (None: `rank`) finds them, by the Nystrom approximation `C C^T ~ V V^T`, `V = C C^T Y0 L^-T` with
    `L L^T = Y0^T C C^T Y0`: the long columns of V are the long directions of C. With `R = (I + V^T V)^(-1/2)`
    and `Y = V R`, orthonormal where V is long, `D = C + Y (R - I) Y^T C` shortens a singular value s of V to
    between 1 and 1.16 where it is above 1.4, and leaves small ones alone. Still a transform of X,
    `Q + Y (R - I) Y^T Q`, which is used once and never kept.

    Where more directions are long than the block has vectors, D is still too long. Its largest singular value
    is about `sqrt(h)`, with h the harmonic mean of the eigenvalues of `I + V^T V`, and nearly always below
    `(1 + n / 25k + 0.9 / sqrt(k)) sqrt(h)` for k vectors (docs/beyond-the-paper.md). Where that is above
    `max_norm`, D is shortened to it: a trust region. The residual is that of D before it.

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
    clip: float | None = 0.0
    max_norm: float | None = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.fresh, GramNS):
            raise ValueError(
                f"fresh must be a GramNS, the solver that yields a transform, got {self.fresh!r}"
            )
        if self.probe not in PROBES:
            raise ValueError(f"probe must be one of {', '.join(map(repr, PROBES))}, got {self.probe!r}")
        if not (isinstance(self.vectors, int) and self.vectors >= 1):
            raise ValueError(f"vectors must be an integer >= 1, got {self.vectors!r}")
        if not (self.clip is None or (isinstance(self.clip, int | float) and 0 <= self.clip <= 1)):
            raise ValueError(f"clip must be a fraction of the rows, from 0 to 1, or None, got {self.clip!r}")
        if self.clip != 0 and (self.probe == "exact" or self.vectors < 2):
            got = f"probe={self.probe!r}, vectors={self.vectors}"
            raise ValueError(f"clip needs probe='sketch' and at least two vectors, got {got}")
        if not (self.max_norm is None or (isinstance(self.max_norm, int | float) and self.max_norm > 0)):
            raise ValueError(f"max_norm must be a number > 0 or None, got {self.max_norm!r}")

    @torch.no_grad()
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
        if transform is not None and transform.shape != (wanted := (*M.shape[:-2], n, n)):
            raise ValueError(f"transform must have shape {wanted}, got {tuple(transform.shape)}")
        scale = normalizer(U, self.fresh.eps, out=workspace.like("direction", U, computed_in(U.dtype)))
        z = random_block(n, self.columns(n), seed=seed, step=step, dtype=scale.dtype).to(U.device)
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
        """How many directions of n are clipped: `clip n`; for None n/8, and up to n/4 as long as that is few.

        How many are long depends on the gradient more than on n (docs/beyond-the-paper.md).

        >>> [CacheGNS(clip=None).rank(n) for n in (64, 256, 512, 768)]
        [16, 64, 64, 96]
        """
        return max(math.ceil(n / 8), min(n // 4, 64)) if self.clip is None else math.ceil(self.clip * n)

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
        if self.clip != 0:
            return self._clipped(U.to(Q.dtype), scale, Q, z, workspace)
        return sketched_residual(z, _scaled(Q, scale, workspace), U.to(Q.dtype)), Candidate()

    def _clipped(
        self, U: Tensor, scale: Tensor, Q: Tensor, block: Tensor, workspace: Workspace
    ) -> tuple[Tensor, Candidate]:
        """The residual of the repaired direction, `scale (Q + Y (R - I) Y^T Q) U`, which is not formed, and
        what repairs it.
        """
        k, z = self.vectors, block[:, : self.vectors]
        thin = torch.bmm(block.mT.expand(len(Q), -1, -1), Q).mul_(scale)  # z^T Q and Y0^T Q
        F = torch.bmm(thin[:, k:], U)  # Y0^T C
        W = torch.bmm(Q, torch.bmm(U, F.mT)).mul_(scale)  # C C^T Y0
        V = torch.linalg.solve_triangular(_cholesky(F, workspace), W.mT, upper=False).mT
        R = _inverse_root(V, workspace)  # (I + V^T V)^(-1/2)
        Y = torch.bmm(V, R)
        share = None if self.max_norm is None else _share(R, len(block), self.max_norm)
        R.diagonal(dim1=-2, dim2=-1).sub_(1)
        right = torch.bmm(R, torch.bmm(Y.mT, Q))
        zY = torch.bmm(z.mT.expand(len(Q), -1, -1), Y).mul_(scale)
        E = torch.baddbmm(thin[:, :k], zY, right)
        return paired_residual(z, torch.bmm(E, U)), Candidate(left=Y, right=right, share=share)

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
        if candidate.share is not None:
            gain = gain * candidate.share
        dtype = self.fresh.precision(scale)
        if not holds(dtype, self.fresh.schedule):
            dtype = Q.dtype
        direction = workspace.like("direction", U, dtype)
        if dtype == Q.dtype:
            Q = _repaired(Q, scale * gain, candidate, workspace)
            return torch.bmm(Q, U.to(dtype), out=direction)
        Q = _repaired(Q, torch.ones_like(scale), candidate, workspace).to(dtype)
        X = rescale(U, scale).to(dtype)
        return torch.bmm(Q, X, out=direction).to(scale.dtype).mul_(gain)

    def refresh(self, X: Tensor, z: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """FreshGNS: direction, new transform, and the estimated residual of that direction.

        A fresh direction's own residual is not zero. It is estimated with the random vectors under
        either probe: the exact one would cost another n x m x n product.
        """
        direction, Q = self.fresh.solve_with_transform(X, workspace)
        return direction, Q, self.recheck(direction, z)

    def recheck(self, direction: Tensor, z: Tensor) -> Tensor:
        """The estimated residual of fresh directions."""
        return sketched_residual(z[:, : self.vectors], direction)


def _repaired(Q: Tensor, factor: Tensor, candidate: Candidate, workspace: Workspace) -> Tensor:
    """`(Q + left right) factor`."""
    scaled = _scaled(Q, factor, workspace)
    if candidate.left is None or candidate.right is None:
        return scaled
    return torch.baddbmm(scaled, candidate.left, candidate.right * factor, out=scaled)


def _cholesky(F: Tensor, workspace: Workspace) -> Tensor:
    """L with `L L^T = F F^T`, and a shift that is just above rounding: it fails only where F is not finite.

    Nothing is checked on the host.
    """
    gram = symmetric(F, F.mT, workspace.square("R", F))
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    limits = torch.finfo(F.dtype)
    diagonal.add_(diagonal.sum(-1, keepdim=True).mul_(F.shape[-2] * limits.eps).add_(limits.tiny))
    L: Tensor = torch.linalg.cholesky_ex(gram).L
    return L


def _inverse_root(V: Tensor, workspace: Workspace) -> Tensor:
    """`(I + V^T V)^(-1/2)`, in the workspace."""
    G = symmetric(V.mT, V, workspace.square("R", V.mT))
    G.diagonal(dim1=-2, dim2=-1).add_(1)
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    return gram_transform(G.div_(norm), ROOT.triples, workspace).mul_(norm.rsqrt_())


def _share(R: Tensor, n: int, max_norm: float) -> Tensor:
    """The share of its length that a direction of n rows keeps, `(B, 1, 1)`, by its `(I + V^T V)^(-1/2)`."""
    k = R.shape[-1]
    inverse_root: Tensor = torch.linalg.vector_norm(R, dim=(-2, -1), keepdim=True) / math.sqrt(k)  # of h
    return (inverse_root * (max_norm / (1 + n / (25 * k) + 0.9 / math.sqrt(k)))).clamp_(max=1)


def _scaled(Q: Tensor, factor: Tensor, workspace: Workspace) -> Tensor:
    return torch.mul(Q, factor, out=workspace.square("Q", Q))


def check_gate(gamma: float, max_age: int | None) -> None:
    """Refuse a threshold or an age limit that cannot be meant."""
    if not (isinstance(gamma, int | float) and gamma >= 0):
        raise ValueError(f"gamma must be a number >= 0, got {gamma!r}")
    if max_age is not None and not (isinstance(max_age, int) and max_age >= 0):
        raise ValueError(f"max_age must be an integer >= 0 or None, got {max_age!r}")
