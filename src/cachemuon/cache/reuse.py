"""The cached direction `Q X`, repaired: pure functions of tensors, the same kernels at every call.

A new gradient brings directions that the cached transform Q was never made for. Q amplifies them, and the
candidate `C = Q X` gets singular values far above 1. A random block Y0 of k vectors finds them, by the
Nystrom approximation `C C^T ~ V V^T`, `V = C C^T Y0 L^-T` with `L L^T = Y0^T C C^T Y0`: the long columns of V
are the long directions of C. With `I + V^T V = K K^T` the columns of `Y = V K^-T` are orthonormal where V is
long, and `C C^T ~ Y (H - I) Y^T` for `H = K^T K`. So `D = C + Y (H^(-1/2) - I) Y^T C` shortens a singular
value s of V to between 1 and 1.16 where it is above 1.4, and leaves small ones alone. D is a transform of X
too: `(Q + Y (H^(-1/2) - I) Y^T Q) X`.

Its residual `err(D) = |D D^T - I|_F / sqrt(n)`, how far its rows are from orthonormal, is estimated from a
few random vectors, or computed. Everywhere `X = scale U`, for matrices whose largest entry is 1. U comes in
stacks `(B_i, n, m_i)` of one width each; whatever is no product with U is done for all stacks together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz.normalize import fits_dtype
from ..newton_schulz.products import Workspace, product
from ..newton_schulz.solvers import GramNS

PROBES = ("sketch", "exact")


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


@dataclass(frozen=True)
class Reuse:
    """How transforms of a solver are reused: what measures cached directions, and what repairs them.

    With `probe="exact"` the candidate `C = Q X` is formed and its residual computed; `"sketch"` estimates it
    from `vectors` random vectors first. `clip` is the fraction of the rows whose directions may be cut (None:
    `rank`), `max_norm` the spectral norm that a direction which is still longer is shortened to.
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

    def rank(self, n: int) -> int:
        """How many directions of n are clipped: `clip n`; for None n/8, and up to n/4 as long as that is few.

        >>> [Reuse(clip=None).rank(n) for n in (64, 256, 512, 768)]
        [16, 64, 64, 96]
        """
        return max(math.ceil(n / 8), min(n // 4, 64)) if self.clip is None else math.ceil(self.clip * n)

    def columns(self, n: int) -> int:
        """The columns of the random block that matrices with n rows share: for the residual, and to clip."""
        return self.vectors + self.rank(n)

    def reuse(
        self,
        U: Sequence[Tensor],
        scale: Tensor,
        gain: Tensor,
        Q: Tensor,
        block: Tensor,
        gamma: float,
        workspace: Workspace,
    ) -> tuple[list[Tensor], Tensor]:
        """The cached directions times `gain (B, 1, 1)`, and their residuals, with no reading between the two.

        Where the residual is above gamma, or not a number, nobody judges the direction: it is cut to a
        Frobenius norm of about 1, and so to singular values below that. One that is not finite becomes zero.
        """
        residual, repair = self.measure(U, scale, Q, block)
        shorten = torch.ones_like(repair.norm) if repair.shorten is None else repair.shorten
        cut = torch.minimum(repair.norm.reciprocal(), shorten)
        bounded = torch.where((residual <= gamma).view(-1, 1, 1), shorten, cut).nan_to_num_(0)
        return self.apply(U, scale, gain, Q, repair._replace(shorten=bounded), workspace), residual

    def measure(self, U: Sequence[Tensor], scale: Tensor, Q: Tensor, block: Tensor) -> tuple[Tensor, Repair]:
        """The residual `(B,)` of the cached direction of `X = scale U`, and how to form that direction."""
        if self.probe == "exact":
            one = torch.ones_like(scale)
            (C,) = self.apply(U, scale, one, Q, Repair(one), Workspace())
            norm = torch.linalg.vector_norm(C, dim=(-2, -1), keepdim=True)
            return exact_residual(C), Repair(norm, formed=C)
        if self.clip == 0:
            return probe(U, scale, Q, block, self.vectors)
        return probe_clipped(U, scale, Q, block, self.vectors, self.max_norm)

    def apply(
        self,
        U: Sequence[Tensor],
        scale: Tensor,
        gain: Tensor,
        Q: Tensor,
        repair: Repair,
        workspace: Workspace,
    ) -> list[Tensor]:
        """`gain shorten (Q + left right) X`, in the solver's precision if that holds its transforms. In Q's
        own the factors go into the small Q, and X is never formed. Where they are 0 the direction is 0,
        whatever Q.
        """
        factor = gain if repair.shorten is None else gain * repair.shorten
        if repair.formed is not None:
            return [repair.formed.mul_(factor).masked_fill_(factor == 0, 0)]
        precision = self.fresh.precision(scale)
        own = precision == scale.dtype or not fits_dtype(precision, self.fresh.schedule)
        onto = scale * factor if own else (factor != 0).to(Q.dtype)
        made = torch.mul(
            Q, onto, out=None if torch.compiler.is_compiling() else workspace.like("Q", Q, square=True)
        )
        if repair.left is not None and repair.right is not None:
            made = product(repair.left, repair.right * onto, made, plus=made)
        made.masked_fill_(factor == 0, 0)
        if not own:
            made, parts = made.to(precision), scale.split([len(one) for one in U])
            U = [(one * part).to(precision) for one, part in zip(U, parts, strict=True)]
        directions = [
            product(part, one, workspace.like(f"direction {i}", one))
            for i, (part, one) in enumerate(zip(made.split([len(one) for one in U]), U, strict=True))
        ]
        if own:
            return directions
        factors = factor.split([len(one) for one in U])
        return [one.to(scale.dtype).mul_(part) for one, part in zip(directions, factors, strict=True)]


def probe(
    U: Sequence[Tensor], scale: Tensor, Q: Tensor, block: Tensor, vectors: int
) -> tuple[Tensor, Repair]:
    """The residual of `Q X`, estimated from the first `vectors` columns of `block (n, vectors)`."""
    z, n = block[:, :vectors], Q.shape[-1]
    thin = torch.bmm(z.mT.expand(len(Q), -1, -1), Q).mul_(scale).split([len(one) for one in U])
    E = [torch.bmm(part, one) for part, one in zip(thin, U, strict=True)]  # z^T C
    y = torch.cat([torch.bmm(part, one.mT) for part, one in zip(E, U, strict=True)])
    y = torch.bmm(y, Q.mT).mul_(scale)  # z^T C C^T; once more scale, since E has one
    distance: Tensor = torch.linalg.vector_norm(y - z.mT, dim=(-2, -1))
    squares = torch.cat([torch.bmm(one, one.mT) for one in E]).diagonal(dim1=-2, dim2=-1)
    return distance / math.sqrt(n * vectors), Repair(squares.mean(-1).sqrt().view(-1, 1, 1))


def probe_clipped(
    U: Sequence[Tensor], scale: Tensor, Q: Tensor, block: Tensor, vectors: int, max_norm: float | None
) -> tuple[Tensor, Repair]:
    """The residual of the clipped direction, which is not formed, and what clips it.

    `block (n, vectors + k)`: the vectors z that estimate the residual, then Y0. With `E = z^T D`, `|D|_F^2`
    is the mean of the diagonal of `E E^T`.
    """
    drawn = block.mT.expand(len(Q), -1, -1)  # for bmm: matmul would copy Q first
    n, k = Q.shape[-1], block.shape[-1] - vectors
    thin = torch.bmm(drawn, Q).mul_(scale)  # z^T Q and Y0^T Q, (B, vectors + k, n)
    W = torch.bmm(Q, _products(thin[:, vectors:], U, U).mT).mul_(scale)  # C C^T Y0
    gram = torch.bmm(drawn[:, vectors:], W)
    diagonal, limits = gram.diagonal(dim1=-2, dim2=-1), torch.finfo(gram.dtype)
    diagonal.add_(
        diagonal.sum(-1, keepdim=True).mul_(k * limits.eps).add_(limits.tiny)
    )  # just above rounding
    L, failed = torch.linalg.cholesky_ex(gram)  # nothing is checked on the host
    V = torch.linalg.solve_triangular(L, W.mT, upper=False)  # transposed, (B, k, n)
    V = V.masked_fill_((failed != 0).view(-1, 1, 1), 0)  # nothing is clipped then
    G = torch.bmm(V, V.mT)
    G.diagonal(dim1=-2, dim2=-1).add_(1)
    K = torch.linalg.cholesky_ex(G).L
    Y = torch.linalg.solve_triangular(K, V, upper=False)  # transposed, (B, k, n)
    T = inverse_root(torch.bmm(K.mT, K))
    T.diagonal(dim1=-2, dim2=-1).sub_(1)
    right = torch.bmm(T, torch.bmm(Y, Q))
    left = torch.bmm(drawn[:, :vectors], Y.mT).mul_(scale)
    products = _products(torch.baddbmm(thin[:, :vectors], left, right), U)
    norm = products.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt().view(-1, 1, 1)
    shorten = None
    if max_norm is not None:
        # Where more directions are long than the block has vectors, D is still too long. Its spectral norm is
        # about `sqrt(h)`, with h the harmonic mean of the eigenvalues of H, and nearly always below
        # `(1 + n / 25k + 0.9 / sqrt(k)) sqrt(h)` (docs/notebook). `|Y|_F^2` is `k - k / h`.
        squares = torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True).square_()
        limit = max_norm / (1 + n / (25 * k) + 0.9 / math.sqrt(k))
        shorten = (1 - squares.div_(k)).clamp_(min=0).sqrt_().mul_(limit).clamp_(max=1)
    return paired_norms(block[:, :vectors], products), Repair(norm, Y.mT, right, shorten)


def _products(left: Tensor, U: Sequence[Tensor], onto: Sequence[Tensor] | None = None) -> Tensor:
    """`E E^T (B, k, k)` or `E onto^T (B, k, n)` in one batch for all stacks, with `E = left U (B, k, m)`."""
    found = []
    for i, (part, one) in enumerate(zip(left.split([len(one) for one in U]), U, strict=True)):
        E = torch.bmm(part, one)
        found.append(torch.bmm(E, (E if onto is None else onto[i]).mT))
    return found[0] if len(found) == 1 else torch.cat(found)


POLES = (
    (0.860856, 1.4405277),
    (35.741359, 6.4010381),
    (1000.0, 33.4271325),
    (27978.7906305, 179.093306),
    (1161634.4818952, 1673.3666536),
)
"""`sum w / (x + t)` over these pairs (t, w) is `x^(-1/2)` for 1 <= x <= 1e6, to 1%: a quadrature of the
integral `2 / pi int dt / (x + t^2)` by Jacobi's elliptic functions (Hale, Higham and Trefethen 2008, method
3).
"""


def inverse_root(H: Tensor) -> Tensor:
    """`H^(-1/2)` for symmetric matrices with eigenvalues from 1 to 1e6, to 1%; less beyond.

    >>> inverse_root(torch.eye(2).unsqueeze(0) * 100).diagonal(dim1=-2, dim2=-1).mul(10).round(decimals=1)
    tensor([[1., 1.]])
    """
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    # L L^T = (H + t I) / w, so that L^-T L^-1 is w (H + t I)^-1: the sum over all pairs is one product.
    L = torch.stack([torch.add(eye * (t / w), H, alpha=1 / w) for t, w in POLES], dim=1)
    L = torch.linalg.cholesky_ex(L).L
    L = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)  # one name: no more than two alive
    L = L.flatten(1, 2)
    return torch.bmm(L.mT, L)


def exact_residual(C: Tensor) -> Tensor:
    """`|C C^T - I|_F / sqrt(n)` of each wide matrix of a batch `(..., n, m)`: the paper's err.

    >>> exact_residual(torch.eye(2, 3) * 2)
    tensor(3.)
    """
    gram = C @ C.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    distance: Tensor = torch.linalg.vector_norm(gram, dim=(-2, -1))
    return distance / math.sqrt(C.shape[-2])


def sketched_residual(z: Tensor, *factors: Tensor) -> Tensor:
    """The same number for `C = factors[0] @ factors[1] @ ...`, estimated from k random vectors.

    With Gaussian `z (n, k)`, `|(C C^T - I) z|_F^2 / (k n)` is an unbiased estimate of `err^2`.
    C itself is never formed: only products with k columns are made.

    >>> Q, X = torch.eye(2) * 2, torch.eye(2, 3)
    >>> z = random_block(2, 1000, seed=0, step=0)
    >>> bool((sketched_residual(z, Q, X) - 3).abs() < 0.2)
    True
    """
    y = z.mT  # from the left: on a CPU up to five times as fast as a factor times thin columns
    for factor in factors:
        y = y @ factor
    for factor in reversed(factors):
        y = y @ factor.mT
    n, k = z.shape[-2:]
    distance: Tensor = torch.linalg.vector_norm(y - z.mT, dim=(-2, -1))
    return distance / math.sqrt(n * k)


def paired_norms(z: Tensor, products: Tensor) -> Tensor:
    """The same number from `E E^T (B, k, k)` with `E = z^T C` alone: half the products, with more variance.

    For two independent Gaussian vectors `z_i^T (C C^T - I) z_j` has mean square `|C C^T - I|_F^2`, so the
    mean over all pairs i != j of `(E E^T - z^T z)_ij^2`, over n, is an unbiased estimate of `err^2`.

    >>> z = random_block(2, 400, seed=0, step=0)
    >>> E = z.mT.unsqueeze(0) @ (torch.eye(2, 3) * 2)
    >>> bool((paired_norms(z, E @ E.mT) - 3).abs() < 0.3)
    True
    """
    n, k = z.shape[-2:]
    own = (one.expand(len(products), -1, -1) for one in (z.mT, z))
    apart = torch.baddbmm(products, *own, alpha=-1)
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    length: Tensor = torch.linalg.vector_norm(apart, dim=(-2, -1))
    return length / math.sqrt(n * k * (k - 1))


def random_block(n: int, vectors: int, *, seed: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal `(n, vectors)` on the CPU, a pure function of seed, step and n.

    So it is the same for every device, and every matrix with n rows shares it: decisions don't depend on
    how matrices are batched, and no generator needs saving.
    """
    digest = hashlib.blake2b(f"{seed},{step},{n}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(n, vectors, generator=generator, dtype=dtype, device="cpu")
