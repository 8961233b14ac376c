"""The cached direction `Q X`, repaired: pure functions of tensors, the same kernels at every call.

A new gradient brings directions that the cached transform Q was never made for. Q amplifies them, and the
candidate `C = Q X` gets singular values far above 1. A random block Y0 of k vectors finds them, by the Nystrom
approximation `C C^T ~ V V^T`, `V = C C^T Y0 L^-T` with `L L^T = Y0^T C C^T Y0`: the long columns of V are the
long directions of C. With `R = (I + V^T V)^(-1/2)` and `Y = V R`, orthonormal where V is long, `D = C + Y (R - I)
Y^T C` shortens a singular value s of V to between 1 and 1.16 where it is above 1.4, and leaves small ones alone.
D is a transform of X too: `(Q + Y (R - I) Y^T Q) X`.

Everywhere `X = scale U`, for a batch U of wide matrices whose largest entry is 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz.products import product, symmetric
from ..newton_schulz.schedules import ROOT
from ..newton_schulz.solvers import gram_transform
from ..newton_schulz.workspace import Workspace
from .residual import paired_residual


class Repair(NamedTuple):
    """How a cached direction is made from Q, and how long it is.

    It is `shorten (Q + left right) X`, with no product where `left` is None, or `direction (B, n, m)`, which has
    been formed already. `norm (B, 1, 1)` is the Frobenius norm, before shortening, estimated or exact.
    """

    norm: Tensor
    left: Tensor | None = None  # (B, n, k)
    right: Tensor | None = None  # (B, k, n)
    shorten: Tensor | None = None  # (B, 1, 1)
    direction: Tensor | None = None

    def of(self, rows: list[int] | slice) -> Repair:
        """The repair of some matrices of the batch."""
        left, right, shorten, direction = (None if part is None else part[rows] for part in self[1:])
        return Repair(self.norm[rows], left, right, shorten, direction)


def probe(
    U: Tensor, scale: Tensor, Q: Tensor, block: Tensor, vectors: int, workspace: Workspace
) -> tuple[Tensor, Repair]:
    """The residual of `Q X`, estimated from the first `vectors` columns of `block (n, vectors)`."""
    z, n = block[:, :vectors], U.shape[-2]
    E = torch.bmm(_each(z.mT, Q).mul_(scale), U)  # z^T C
    y = torch.bmm(Q, torch.bmm(U, E.mT)).mul_(scale)  # C C^T z; once more scale, since E has one
    distance: Tensor = torch.linalg.vector_norm(y - z, dim=(-2, -1))
    return distance / math.sqrt(n * vectors), Repair(_frobenius(E))


def probe_clipped(
    U: Tensor,
    scale: Tensor,
    Q: Tensor,
    block: Tensor,
    vectors: int,
    max_norm: float | None,
    workspace: Workspace,
) -> tuple[Tensor, Repair]:
    """The residual of the clipped direction, which is not formed, and what clips it.

    `block (n, vectors + k)`: the vectors that estimate the residual, then Y0.
    """
    z, n = block[:, :vectors], U.shape[-2]
    thin = _each(block.mT, Q).mul_(scale)  # z^T Q and Y0^T Q, (B, vectors + k, n)
    F = torch.bmm(thin[:, vectors:], U)  # Y0^T C
    W = torch.bmm(Q, torch.bmm(U, F.mT)).mul_(scale)  # C C^T Y0
    V = torch.linalg.solve_triangular(_cholesky(F, workspace), W.mT, upper=False).mT
    R = _inverse_root(V, workspace)  # (I + V^T V)^(-1/2)
    Y = torch.bmm(V, R)
    shorten = None if max_norm is None else _shorten(R, n, max_norm)
    R.diagonal(dim1=-2, dim2=-1).sub_(1)
    right = torch.bmm(R, torch.bmm(Y.mT, Q))
    E = torch.baddbmm(thin[:, :vectors], _each(z.mT, Y).mul_(scale), right)
    E = torch.bmm(E, U)  # z^T D
    return paired_residual(z, E), Repair(_frobenius(E), Y, right, shorten)


def bound(repair: Repair, residual: Tensor, gamma: float) -> Tensor:
    """The factor `(B, 1, 1)` on a direction that nobody has judged: where its residual is above gamma, or not
    a number, it is cut to a Frobenius norm of about 1, and so to singular values below that; a direction that
    is not finite becomes none.
    """
    cut = repair.norm.reciprocal().nan_to_num_(0, posinf=0)
    shorten = torch.ones_like(cut) if repair.shorten is None else repair.shorten
    return torch.where((residual <= gamma).view(-1, 1, 1), shorten, torch.minimum(cut, shorten))


def apply(
    U: Tensor,
    scale: Tensor,
    factor: Tensor,
    Q: Tensor,
    repair: Repair,
    precision: torch.dtype,
    workspace: Workspace,
) -> Tensor:
    """`factor (Q + left right) X`, with the product in that precision; in Q's the factors go into the small Q,
    and X is never formed.
    """
    if repair.direction is not None:
        return repair.direction.mul_(factor)
    direction = workspace.like("direction", U, precision)
    if precision == Q.dtype:
        return product(_repaired(Q, scale * factor, repair, workspace), U.to(precision), direction)
    Q = _repaired(Q, torch.ones_like(scale), repair, workspace).to(precision)
    D = product(Q, (U * scale).to(precision), direction)
    return D.to(scale.dtype).mul_(factor)


def _repaired(Q: Tensor, factor: Tensor, repair: Repair, workspace: Workspace) -> Tensor:
    """`factor (Q + left right)`."""
    memory = None if torch.compiler.is_compiling() else workspace.square("Q", Q)
    scaled = torch.mul(Q, factor, out=memory)
    if repair.left is None or repair.right is None:
        return scaled
    return product(repair.left, repair.right * factor, scaled, plus=scaled)


def _each(left: Tensor, batch: Tensor) -> Tensor:
    """`left @ one` for each matrix of a batch; matmul would copy the batch first."""
    return torch.bmm(left.expand(len(batch), -1, -1), batch)


def _frobenius(E: Tensor) -> Tensor:
    """`|D|_F (B, 1, 1)`, estimated from `E = z^T D (B, k, m)` for k Gaussian vectors."""
    norm: Tensor = torch.linalg.vector_norm(E, dim=(-2, -1), keepdim=True)
    return norm / math.sqrt(E.shape[-2])


def _cholesky(F: Tensor, workspace: Workspace) -> Tensor:
    """L with `L L^T = F F^T`, and a shift that is just above rounding: it fails only where F is not finite.

    Nothing is checked on the host.
    """
    gram = symmetric(F, F.mT, workspace.square("R", F))
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    limits = torch.finfo(F.dtype)
    shift = diagonal.sum(-1, keepdim=True).mul_(F.shape[-2] * limits.eps).add_(limits.tiny)
    diagonal.add_(shift)
    L: Tensor = torch.linalg.cholesky_ex(gram).L
    return L


def _inverse_root(V: Tensor, workspace: Workspace) -> Tensor:
    """`(I + V^T V)^(-1/2)`, in the workspace."""
    G = symmetric(V.mT, V, workspace.square("R", V.mT))
    G.diagonal(dim1=-2, dim2=-1).add_(1)
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    return gram_transform(G.div_(norm), ROOT.triples, workspace).mul_(norm.rsqrt_())


def _shorten(R: Tensor, n: int, max_norm: float) -> Tensor:
    """The factor `(B, 1, 1)` that brings a clipped direction of n rows to a spectral norm of max_norm.

    Where more directions are long than the block has vectors, D is still too long. Its spectral norm is about
    `sqrt(h)`, with h the harmonic mean of the eigenvalues of `I + V^T V`, and nearly always below
    `(1 + n / 25k + 0.9 / sqrt(k)) sqrt(h)` for k vectors (docs/notebook/beyond-the-paper.md).
    """
    k = R.shape[-1]
    inverse_root: Tensor = torch.linalg.vector_norm(R, dim=(-2, -1), keepdim=True)  # sqrt(k / h)
    limit = max_norm / (1 + n / (25 * k) + 0.9 / math.sqrt(k))
    return inverse_root.mul_(limit / math.sqrt(k)).clamp_(max=1)
