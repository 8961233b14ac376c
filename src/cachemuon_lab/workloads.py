"""What is timed: sequences of gradients for optimizers, and loops to compare the solvers with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cachemuon import GRAM, CacheGNS
from cachemuon.newton_schulz.products import Workspace
from cachemuon_lab.totals import Shape


def plain_gram_loop(M: Tensor) -> Tensor:
    """GramNS with a restart after the second iteration, as one would write it down with `torch.addmm`."""
    X, eye = M / (M.norm() + 1e-7), torch.eye(len(M), device=M.device)
    R, Q = X @ X.mT, None
    for k, (a, b, c) in enumerate(GRAM.triples):
        if k == 2 and Q is not None:
            X, Q = Q @ X, None
            R = X @ X.mT
        Z = torch.addmm(R, R, R, beta=b, alpha=c)
        Q = Z + a * eye if Q is None else torch.addmm(Q, Q, Z, beta=a)
        if k not in (1, len(GRAM.triples) - 1):
            RZ = torch.addmm(R, R, Z, beta=a)
            R = torch.addmm(RZ, Z, RZ, beta=a)
    assert Q is not None
    direction: Tensor = Q @ X
    return direction


def full_gram_loop(X: Tensor, workspace: Workspace) -> Tensor:
    """GramNS without a restart on normalized `X (1, n, m)`, in kept memory, every product computed in full:
    GramNS as it was before it computed symmetric products by half.
    """
    R, P, Q, T = (workspace.like(role, X, square=True) for role in "RPQT")
    torch.bmm(X, X.mT, out=R)
    for k, (a, b, c) in enumerate(GRAM.triples):
        torch.baddbmm(R, R, R, beta=b, alpha=c, out=P)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        if k == 0:
            Q.copy_(P)
        else:
            torch.bmm(Q, P, out=T)
            Q, T = T, Q
        if k < len(GRAM.triples) - 1:
            torch.bmm(P, R, out=T)
            torch.bmm(T, P, out=R)
    return torch.bmm(Q, X, out=workspace.like("direction", X))


def smooth_gradients(shape: Shape, steps: int, device: str) -> list[Tensor]:
    """A matrix that changes from step to step by 10% to 50%, with two decades of singular values."""
    n, m = sorted(shape)
    chance = torch.Generator().manual_seed(n + m)
    basis = torch.linalg.qr(torch.randn(n, n, generator=chance)).Q * torch.logspace(0, -2, n)
    found: list[Tensor] = []
    for _ in range(steps):
        new = basis @ torch.randn(n, m, generator=chance)
        keep = 0.87 + 0.125 * torch.rand((), generator=chance).item()
        new = keep * found[-1] + math.sqrt(1 - keep**2) * new if found else new
        found.append(new)
    return [(M.mT.contiguous() if shape[0] > shape[1] else M).to(device) for M in found]


def gamma_for(gradients: Sequence[Tensor], hit_rate: float) -> float:
    """The gamma at which that part of the steps of a sequence hits, by bisection."""
    low, high = 0.1, 100.0
    for _ in range(8):
        gamma, transform, age, hits = math.sqrt(low * high), None, 0, 0
        for step, M in enumerate(gradients):
            _, transform, event = CacheGNS()(M, transform, gamma, age=age, step=step)
            age = event.age  # type: ignore[union-attr]
            hits += event.hit  # type: ignore[union-attr]
        low, high = (low, gamma) if hits / (len(gradients) - 1) > hit_rate else (gamma, high)
    return gamma


def new_basis(n: int, m: int, steps: int, device: str) -> Iterator[Tensor]:
    """The worst case for a cache: each matrix has another left basis; three decades of singular values."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        basis = torch.linalg.qr(torch.randn(n, n, generator=chance)).Q * torch.logspace(0, -3, n)
        yield (basis @ torch.randn(n, m, generator=chance)).to(device)
