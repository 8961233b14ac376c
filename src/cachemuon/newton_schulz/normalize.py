"""Normalization and orientation of a solver's input."""

from __future__ import annotations

import torch
from torch import Tensor

from .schedules import Schedule

EPS = 1e-7


def normalize(M: Tensor, eps: float = EPS) -> Tensor:
    """`X = M / (|M|_F + eps)` for each matrix of a batch, in float32 (float64 stays float64).

    The norm is that of `M / max|M|`, since squares overflow float32 at 1e20 and vanish at 1e-25. A zero
    matrix stays zero, also with `eps=0`; a matrix with a NaN or Inf becomes NaN.

    >>> float(torch.linalg.norm(normalize(torch.full((2, 8), 1e30))))
    1.0
    """
    U = M.to(computed_in(M.dtype), copy=True)
    return U.mul_(prescale_(U, peak_of(U), eps))


def prescale_(U: Tensor, peak: Tensor, eps: float) -> Tensor:
    """Divide each matrix of U, in place, by its `peak = max|U|`; returns the `scale (..., 1, 1)` with
    `normalize(U) = scale U`.
    """
    inverse = 1 / peak.clamp(min=torch.finfo(U.dtype).tiny)
    # The largest entry is 1 now, so the norm is below 1 only for the zero matrix.
    norm: Tensor = torch.linalg.vector_norm(U.mul_(inverse), dim=(-2, -1), keepdim=True)
    return 1 / (norm + eps * inverse).clamp_(min=1)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, transforms and residuals of matrices in `dtype`: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fits_dtype(dtype: torch.dtype, schedule: Schedule) -> bool:
    """Whether transforms of a schedule may be rounded to a dtype.

    Their entries go up to the schedule's gain, and multiply directions that were zero in the matrix they come
    from. Rounding adds up to `gain eps / 2` there, which must stay comparable to a direction's length.

    >>> from cachemuon import GRAM, polar_express
    >>> fits_dtype(torch.float16, GRAM), fits_dtype(torch.float16, polar_express(9))  # gains of 804, 10,109
    (True, False)
    """
    return schedule.gain * torch.finfo(dtype).eps / 2 <= 4


def peak_of(M: Tensor) -> Tensor:
    """`max|M|` of each matrix, `(..., 1, 1)`. On a CPU nine times faster than the infinity norm."""
    return torch.maximum(M.amax(dim=(-2, -1), keepdim=True), -M.amin(dim=(-2, -1), keepdim=True))


def wide_batch(M: Tensor) -> Tensor:
    """`M (..., n, m)` as a batch `(B, n, m)` of wide matrices, transposed where M is tall."""
    if M.ndim < 2 or not M.is_floating_point() or 0 in M.shape[-2:]:
        got = f"{M.dtype} of shape {tuple(M.shape)}"
        raise ValueError(f"M must be real floating point (..., n, m) with n, m >= 1, got {got}")
    batch = M.reshape(-1, *M.shape[-2:])
    return batch.mT if M.shape[-2] > M.shape[-1] else batch


def widen(M: Tensor, eps: float = EPS) -> Tensor:
    """`wide_batch(M)`, normalized."""
    return normalize(wide_batch(M), eps)


def restore(direction: Tensor, M: Tensor) -> Tensor:
    """Undo `wide_batch`: a batch of wide directions in M's shape, orientation and dtype."""
    return (direction.mT if M.shape[-2] > M.shape[-1] else direction).reshape(M.shape).to(M.dtype)
