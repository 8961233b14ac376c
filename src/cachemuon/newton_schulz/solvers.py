"""Solvers for the polar factor of a matrix: `polar(M) = U V^T` where `M = U S V^T`.

Solvers are frozen dataclasses without state. Each takes the raw matrix `(..., n, m)`, tall or wide,
normalizes it, and never writes to its input. The iterations run on batches `X (B, n, m)` of normalized wide
matrices, `n <= m`, in the paper's letters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .normalize import EPS, restore, widen
from .products import Workspace, full_precision, gram_flops, panels, product, standard_flops, symmetric
from .schedules import GRAM, POLAR_EXPRESS, Schedule, Triple


class Solver(ABC):
    """Base of all solvers: `solver(M)` is the approximate polar factor of M.

    `dtype` is the precision of the iteration. None means float64 for float64 input, else float32 on the CPU
    and float16 on CUDA, which errs less than bfloat16 at the same cost (docs/notebook/restarts.md). `eps` is
    added to the norm that M is divided by.
    """

    eps: float
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        if not isinstance(schedule := getattr(self, "schedule", GRAM), Schedule):
            raise ValueError(
                f"schedule must be a Schedule such as GRAM or Schedule([(a, b, c)]), got {schedule!r}"
            )
        if not (isinstance(self.eps, int | float) and math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be a number >= 0, got {self.eps!r}")
        dtype = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating point torch.dtype or None, got {dtype!r}")

    @abstractmethod
    def solve(self, X: Tensor, workspace: Workspace) -> Tensor:
        """Orthogonalize a batch `X (B, n, m)` of normalized wide matrices, in float32 or float64.

        The result is new, or lies in the workspace, under any role but "gradient", which optimizers use for
        X.
        """

    @torch.no_grad()
    def __call__(self, M: Tensor) -> Tensor:
        """Orthogonalize `M (..., n, m)`: the direction, in M's shape and dtype, without a gradient."""
        with full_precision(M.device.type):
            return restore(self.solve(widen(M, self.eps), Workspace()), M)

    def precision(self, X: Tensor) -> torch.dtype:
        """The dtype of the iteration on X."""
        if self.dtype is not None:
            return self.dtype
        if X.dtype == torch.float64:
            return torch.float64
        return torch.float16 if X.is_cuda else torch.float32


@dataclass(frozen=True)
class StandardNS(Solver):
    """StandardNS, Algorithm A.1: `X <- (a I + b A + c A^2) X` with `A = X X^T`, for each triple.

    With `POLAR_EXPRESS` it is the solver of PolarExpMuon, with `QUINTIC` that of Muon (Jordan).

    >>> D = StandardNS()(torch.eye(3, 5) * 7)
    >>> bool(torch.dist(D, torch.eye(3, 5)) < 0.3)
    True
    """

    schedule: Schedule = POLAR_EXPRESS
    eps: float = EPS
    dtype: torch.dtype | None = None

    def solve(self, X: Tensor, workspace: Workspace) -> Tensor:
        """Orthogonalize a batch of normalized wide matrices."""
        Y = X.to(self.precision(X))
        A, Z = workspace.like("A", Y, square=True), workspace.like("Z", Y, square=True)
        target, spare = workspace.like("direction", Y), workspace.like("spare", Y)
        for a, b, c in self.schedule.triples:
            A = symmetric(Y, Y.mT, A)  # (B, n, n)
            Z = symmetric(A, A, Z, plus=A, beta=b, alpha=c)
            Y = product(Z, Y, target, plus=Y, beta=a)
            target, spare = spare, target
        return Y.to(X.dtype)


@dataclass(frozen=True)
class GramNS(Solver):
    """GramNS, Algorithm A.2: the same polynomial, iterated on the n x n Gram matrix.

    `restarts` counts completed iterations: `(2,)` rebuilds the Gram matrix after the second. None means the
    measured choice (docs/notebook/restarts.md): after the second iteration and every third from there. There
    is no restart in float64, and none in float32 for n >= 512, m >= 1.5 n and at most five iterations.

    >>> from cachemuon import normalize
    >>> M = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    >>> direction, transform = GramNS().with_transform(M)
    >>> bool(torch.dist(direction, transform @ normalize(M)) < 1e-5)
    True
    """

    schedule: Schedule = GRAM
    restarts: tuple[int, ...] | None = None
    eps: float = EPS
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts is None:
            return
        last, restarts = self.schedule.steps - 1, tuple(self.restarts)
        inside = all(isinstance(k, int) and 1 <= k <= last for k in restarts)
        if not inside or sorted(set(restarts)) != list(restarts):
            raise ValueError(
                f"restarts must be increasing integers from 1 to {last} (restart after that many of the "
                f"{last + 1} iterations) or None, got {self.restarts!r}"
            )
        object.__setattr__(self, "restarts", restarts)

    def restarts_at(self, n: int, m: int, dtype: torch.dtype) -> tuple[int, ...]:
        """The restarts of an iteration in `dtype` on a wide n x m matrix."""
        if self.restarts is not None:
            return self.restarts
        steps = len(self.schedule.triples)
        wide = n >= 512 and 2 * m >= 3 * n and steps <= 5
        needless = dtype == torch.float64 or (dtype == torch.float32 and wide)
        return () if needless else tuple(range(2, steps, 3))

    def solve(self, X: Tensor, workspace: Workspace) -> Tensor:
        """Orthogonalize a batch of normalized wide matrices."""
        return self.solve_with_transform(X, workspace, compose=False)[0]

    def transform(self, X: Tensor, workspace: Workspace) -> Tensor:
        """The transform alone, without its product with X."""
        return self.solve_with_transform(X, workspace, apply=False)[1]

    def solve_with_transform(
        self, X: Tensor, workspace: Workspace, *, compose: bool = True, apply: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The direction of a batch of normalized wide matrices, and its transform `Q (B, n, n)`.

        Without `compose` there is no transform, without `apply` no direction.
        """
        dtype, triples, (n, m) = self.precision(X), self.schedule.triples, X.shape[-2:]
        Y = X.to(dtype)
        R, Q_tot = workspace.like("R", Y, square=True), None
        target, spare = workspace.like("direction", Y), workspace.like("spare", Y)
        for begin, end in pairwise((0, *self.restarts_at(n, m, dtype), len(triples))):
            last = end == len(triples)
            R = symmetric(Y, Y.mT, R)
            Q = gram_transform(R, triples[begin:end], workspace)
            if apply or not last:
                Y = product(Q, Y, target)
                target, spare = spare, target
            if compose:
                kept = Q.to(X.dtype, copy=not last)  # the next segment overwrites Q
                Q_tot = kept if Q_tot is None else symmetric(kept, Q_tot, torch.empty_like(kept))
        return Y.to(X.dtype), Q if Q_tot is None else Q_tot

    @torch.no_grad()
    def with_transform(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """FreshGNS, Algorithm A.3: the direction, and the left transform Q that makes it.

        `direction = Q @ normalize(M)` in the wide orientation (of `M.mT` where M is tall). Q is
        `(..., n, n)` with n the smaller side, in float32 (float64 for float64).
        """
        with full_precision(M.device.type):
            direction, Q = self.solve_with_transform(widen(M, self.eps), Workspace())
        return restore(direction, M), Q.reshape(*M.shape[:-2], *Q.shape[-2:])


def gram_transform(R: Tensor, triples: Sequence[Triple], workspace: Workspace) -> Tensor:
    """The transform of an iteration from the Gram matrix `R = X X^T`: `polar(X) ~ Q X`, `Q ~ R^(-1/2)`.

    R, whose norm is at most 1, is overwritten; Q lies in the workspace.
    """
    P, Q, T = (workspace.like(role, R, square=True) for role in "PQT")
    for k, (a, b, c) in enumerate(triples, start=1):
        # The listing's a R + R Z adds two terms that nearly cancel: in float32 its error is 1.2 to 3.8
        # times that of P formed at once and R <- (P R) P (docs/notebook/restarts.md).
        P = symmetric(R, R, P, plus=R, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)  # P = a I + b R + c R^2
        if k < len(triples):
            T = symmetric(P, R, T)
            # Diagonal blocks that are not symmetric make the error grow (docs/notebook/log.md).
            R = symmetric(T, P, R, symmetrize_diagonal=True)
        if k == 1:
            P, Q = Q, P  # the first Q is P itself: no product with the identity
        else:
            Q, T = symmetric(Q, P, T), Q
    return Q


@dataclass(frozen=True)
class AutoNS(Solver):
    """The cheaper of StandardNS and GramNS for the shape and precision, with one schedule.

    In exact arithmetic both give the same direction. GramNS multiplies less from about m > 1.5 n on.

    >>> AutoNS().choose(256, 256, torch.float32)
    StandardNS(schedule=Schedule(...'gram'...
    >>> AutoNS().choose(256, 1024, torch.float32)
    GramNS(schedule=Schedule(...'gram'...
    """

    schedule: Schedule = GRAM
    eps: float = EPS
    dtype: torch.dtype | None = None

    def choose(self, n: int, m: int, dtype: torch.dtype) -> StandardNS | GramNS:
        """The solver for a wide n x m matrix that is iterated in `dtype`."""
        return cheaper(GramNS(self.schedule, eps=self.eps, dtype=self.dtype), n, m, dtype)

    def solve(self, X: Tensor, workspace: Workspace) -> Tensor:
        """Orthogonalize a batch of normalized wide matrices."""
        return self.choose(X.shape[-2], X.shape[-1], self.precision(X)).solve(X, workspace)


def cheaper(gram: GramNS, n: int, m: int, dtype: torch.dtype) -> StandardNS | GramNS:
    """The given GramNS; or StandardNS with its schedule, where that multiplies less on wide n x m."""
    steps, pieces = gram.schedule.steps, panels(n, dtype)
    restarts = len(gram.restarts_at(n, m, dtype))
    if gram_flops(n, m, steps, restarts, pieces) < standard_flops(n, m, steps, pieces):
        return gram
    return StandardNS(gram.schedule, eps=gram.eps, dtype=gram.dtype)


@dataclass(frozen=True)
class ExactPolar(Solver):
    """The exact polar factor `U V^T` by SVD in float64: the oracle, too slow to train with.

    Singular values below `max(n, m) * 2^-52` of the largest (with `dtype`: that dtype's precision) count as
    zero and stay zero, so a rank-deficient matrix gives a partial isometry.

    >>> ExactPolar()(torch.tensor([[3.0, 0.0, 0.0], [0.0, -2.0, 0.0]]))
    tensor([[ 1.,  0.,  0.],
            [ 0., -1.,  0.]])
    """

    eps: float = EPS
    dtype: torch.dtype | None = None

    def solve(self, X: Tensor, workspace: Workspace) -> Tensor:
        """Orthogonalize a batch of normalized wide matrices."""
        U, S, Vh = torch.linalg.svd(X.double(), full_matrices=False)
        floor = S[..., :1] * max(X.shape[-2:]) * torch.finfo(self.dtype or torch.float64).eps
        direction: Tensor = (U * (S > floor).unsqueeze(-2)) @ Vh
        return direction.to(X.dtype)


def polar(M: Tensor, solver: Solver | None = None) -> Tensor:
    """The polar factor of each matrix of `M (..., n, m)`; by default with the cheapest solver.

    >>> polar(torch.eye(2, 3) * 5, solver=ExactPolar())
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    return (AutoNS() if solver is None else solver)(M)
