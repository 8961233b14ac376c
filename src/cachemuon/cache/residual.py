"""The residual of a direction: how far its rows are from orthonormal.

`err(C) = |C C^T - I|_F / sqrt(n)`, exactly or estimated from a few random vectors.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


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
    y = z.mT  # from the left: on a CPU twice as fast as the transposed factor times z
    for factor in factors:
        y = y @ factor
    y = y.mT
    for factor in reversed(factors):
        y = factor @ y
    n, k = z.shape[-2:]
    distance: Tensor = torch.linalg.vector_norm(y - z, dim=(-2, -1))
    return distance / math.sqrt(n * k)


def paired_residual(z: Tensor, E: Tensor) -> Tensor:
    """The same number from `E = z^T C (..., k, m)` alone: half the products, with more variance.

    For two independent Gaussian vectors `z_i^T (C C^T - I) z_j` has mean square `|C C^T - I|_F^2`, so the
    mean over all pairs i != j of `(E E^T - z^T z)_ij^2`, over n, is an unbiased estimate of `err^2`.

    >>> z = random_block(2, 400, seed=0, step=0)
    >>> bool((paired_residual(z, z.mT @ (torch.eye(2, 3) * 2)) - 3).abs() < 0.3)
    True
    """
    return paired_norms(z, E @ E.mT)


def paired_norms(z: Tensor, products: Tensor) -> Tensor:
    """The same number from `E E^T (..., k, k)`."""
    n, k = z.shape[-2:]
    batch = products.reshape(-1, k, k)
    apart = torch.baddbmm(batch, *(one.expand(len(batch), -1, -1) for one in (z.mT, z)), alpha=-1)
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    length: Tensor = torch.linalg.vector_norm(apart, dim=(-2, -1))
    return length.reshape(products.shape[:-2]) / math.sqrt(n * k * (k - 1))


def random_block(
    n: int,
    vectors: int,
    *,
    seed: int,
    step: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal `(n, vectors)` on the CPU, a pure function of seed, step and n.

    So it is the same for every device, and every matrix with n rows shares it: decisions don't depend on
    how matrices are batched, and no generator needs saving.
    """
    digest = hashlib.blake2b(f"{seed},{step},{n}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(n, vectors, generator=generator, dtype=dtype, device="cpu")
