"""The cached direction `Q X`, repaired: pure functions of tensors, the same kernels at every call.

A new gradient brings directions that the cached transform Q was never made for. Q amplifies them, and the
candidate `C = Q X` gets singular values far above 1. A random block Y0 of k vectors finds them, by the
Nystrom approximation `C C^T ~ V V^T`, `V = C C^T Y0 L^-T` with `L L^T = Y0^T C C^T Y0`: the long columns of V
are the long directions of C. With `I + V^T V = K K^T` the columns of `Y = V K^-T` are orthonormal where V is
long, and `C C^T ~ Y (H - I) Y^T` for `H = K^T K`. So `D = C + Y (H^(-1/2) - I) Y^T C` shortens a singular
value s of V to between 1 and 1.16 where it is above 1.4, and leaves small ones alone. D is a transform of X
too: `(Q + Y (H^(-1/2) - I) Y^T Q) X`.

Everywhere `X = scale U`, for matrices whose largest entry is 1. U comes in stacks `(B_i, n, m_i)` of one
width each; whatever is no product with U is done for all stacks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz.inverse_root import inverse_root
from ..newton_schulz.products import product, symmetric
from ..newton_schulz.workspace import Workspace
from .residual import paired_norms


class Repair(NamedTuple):
    """How a cached direction is made from Q, and how long it is.

    It is `shorten (Q + left right) X`, with no product where `left` is None, or `formed`, which has
    been formed already. `norm (B, 1, 1)` is the Frobenius norm, before shortening, estimated or exact.
    """

    norm: Tensor
    left: Tensor | None = None  # (B, n, k)
    right: Tensor | None = None  # (B, k, n)
    shorten: Tensor | None = None  # (B, 1, 1)
    formed: Tensor | None = None  # (B, n, m)

    def of(self, rows: list[int] | slice) -> Repair:
        """The repair of some matrices of the batch."""
        left, right, shorten, formed = (None if part is None else part[rows] for part in self[1:])
        return Repair(self.norm[rows], left, right, shorten, formed)


def probe(
    U: Sequence[Tensor], scale: Tensor, Q: Tensor, block: Tensor, vectors: int
) -> tuple[Tensor, Repair]:
    """The residual of `Q X`, estimated from the first `vectors` columns of `block (n, vectors)`."""
    z, n = block[:, :vectors], Q.shape[-1]
    E = _times(_each(z.mT, Q).mul_(scale), U)  # z^T C
    y = torch.bmm(Q, _outer(U, E)).mul_(scale)  # C C^T z; once more scale, since E has one
    distance: Tensor = torch.linalg.vector_norm(y - z, dim=(-2, -1))
    return distance / math.sqrt(n * vectors), Repair(_frobenius(_outer(E, E)))


def probe_clipped(
    U: Sequence[Tensor],
    scale: Tensor,
    Q: Tensor,
    block: Tensor,
    vectors: int,
    max_norm: float | None,
) -> tuple[Tensor, Repair]:
    """The residual of the clipped direction, which is not formed, and what clips it.

    `block (n, vectors + k)`: the vectors that estimate the residual, then Y0.
    """
    z = block[:, :vectors]
    thin = _each(block.mT, Q).mul_(scale)  # z^T Q and Y0^T Q, (B, vectors + k, n)
    F = _times(thin[:, vectors:], U)  # Y0^T C
    W = torch.bmm(Q, _outer(U, F)).mul_(scale)  # C C^T Y0
    L, failed = _cholesky(_each(block.mT[vectors:], W))
    V = torch.linalg.solve_triangular(L, W.mT, upper=False)  # transposed, (B, k, n)
    V = V.masked_fill_(failed, 0)  # nothing is clipped then; a NaN would get into the weights
    G = torch.bmm(V, V.mT)
    G.diagonal(dim1=-2, dim2=-1).add_(1)
    K = torch.linalg.cholesky_ex(G).L
    Y = torch.linalg.solve_triangular(K, V, upper=False)  # transposed, (B, k, n)
    T = inverse_root(torch.bmm(K.mT, K))
    T.diagonal(dim1=-2, dim2=-1).sub_(1)
    right = torch.bmm(T, torch.bmm(Y, Q))
    E = _times(torch.baddbmm(thin[:, :vectors], _each(z.mT, Y.mT).mul_(scale), right), U)  # z^T D
    products = _outer(E, E)
    shorten = None if max_norm is None else _shorten(Y, max_norm)
    return paired_norms(z, products), Repair(_frobenius(products), Y.mT, right, shorten)


def bound(repair: Repair, residual: Tensor, gamma: float) -> Tensor:
    """The factor `(B, 1, 1)` on a direction that nobody has judged: where its residual is above gamma, or not
    a number, it is cut to a Frobenius norm of about 1, and so to singular values below that; a direction that
    is not finite becomes zero.
    """
    shorten = torch.ones_like(repair.norm) if repair.shorten is None else repair.shorten
    cut = torch.minimum(repair.norm.reciprocal(), shorten)
    return torch.where((residual <= gamma).view(-1, 1, 1), shorten, cut).nan_to_num_(0)


def apply(
    U: Sequence[Tensor],
    scale: Tensor,
    factor: Tensor,
    Q: Tensor,
    repair: Repair,
    precision: torch.dtype,
    workspace: Workspace,
) -> list[Tensor]:
    """`factor (Q + left right) X`, with the product in that precision; in Q's the factors go into the small
    Q, and X is never formed. Where the factor is 0 the direction is 0, whatever Q.
    """
    if repair.formed is not None:
        return [repair.formed.mul_(factor).masked_fill_(factor == 0, 0)]
    directions = [workspace.like(f"direction {i}", one, precision) for i, one in enumerate(U)]
    sizes = [len(one) for one in U]
    if precision == Q.dtype:
        parts = _repaired(Q, scale * factor, repair, workspace).split(sizes)
        return [product(*one) for one in zip(parts, U, directions, strict=True)]
    parts = _repaired(Q, (factor != 0).to(Q.dtype), repair, workspace).to(precision).split(sizes)
    scaled = [(one * own).to(precision) for one, own in zip(U, scale.split(sizes), strict=True)]
    made = [product(*one) for one in zip(parts, scaled, directions, strict=True)]
    return [one.to(scale.dtype).mul_(own) for one, own in zip(made, factor.split(sizes), strict=True)]


def _repaired(Q: Tensor, factor: Tensor, repair: Repair, workspace: Workspace) -> Tensor:
    """`factor (Q + left right)`."""
    memory = None if torch.compiler.is_compiling() else workspace.square("Q", Q)
    scaled = torch.mul(Q, factor, out=memory)
    if repair.left is not None and repair.right is not None:
        scaled = product(repair.left, repair.right * factor, scaled, plus=scaled)
    return scaled.masked_fill_(factor == 0, 0)


def _each(left: Tensor, batch: Tensor) -> Tensor:
    """`left @ one` for each matrix of a batch; matmul would copy the batch first."""
    return torch.bmm(left.expand(len(batch), -1, -1), batch)


def _times(left: Tensor, U: Sequence[Tensor]) -> list[Tensor]:
    """`left @ one` for each matrix of the stacks, with `left (B, k, n)` for all of them."""
    if len(U) == 1:
        return [torch.bmm(left, U[0])]
    parts = left.split([len(one) for one in U])
    return [torch.bmm(part, one) for part, one in zip(parts, U, strict=True)]


def _outer(A: Sequence[Tensor], B: Sequence[Tensor]) -> Tensor:
    """`a b^T` for all matrices of the stacks, in one batch; half of it is multiplied where A is B."""
    products = [
        symmetric(a, a.mT, a.new_empty(*a.shape[:-1], a.shape[-2])) if a is b else torch.bmm(a, b.mT)
        for a, b in zip(A, B, strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products)


def _frobenius(products: Tensor) -> Tensor:
    """`|D|_F (B, 1, 1)`, estimated from `E E^T (B, k, k)` where `E = z^T D` for k Gaussian vectors."""
    squares = products.diagonal(dim1=-2, dim2=-1).mean(-1)
    return squares.sqrt().view(-1, 1, 1)


def _cholesky(gram: Tensor) -> tuple[Tensor, Tensor]:
    """L with `L L^T = gram`, with a shift that is just above rounding; and where it failed, `(B, 1, 1)`.

    Nothing is checked on the host.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    limits = torch.finfo(gram.dtype)
    shift = diagonal.sum(-1, keepdim=True).mul_(gram.shape[-1] * limits.eps).add_(limits.tiny)
    diagonal.add_(shift)
    L, info = torch.linalg.cholesky_ex(gram)
    return L, (info != 0).view(-1, 1, 1)


def _shorten(Y: Tensor, max_norm: float) -> Tensor:
    """The factor `(B, 1, 1)` that brings a clipped direction of n rows to a spectral norm of max_norm.

    Where more directions are long than the block has vectors, D is still too long. Its spectral norm is about
    `sqrt(h)`, with h the harmonic mean of the eigenvalues of H, and nearly always below `(1 + n / 25k + 0.9 /
    sqrt(k)) sqrt(h)` for k vectors (docs/beyond-the-paper.md). `|Y|_F^2` is `k - k / h`.
    """
    k, n = Y.shape[-2:]
    limit = max_norm / (1 + n / (25 * k) + 0.9 / math.sqrt(k))
    norm = torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True)
    inverse_root_h: Tensor = (1 - norm.square_().div_(k)).clamp_(min=0).sqrt_()
    return inverse_root_h.mul_(limit).clamp_(max=1)
