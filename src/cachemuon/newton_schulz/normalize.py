"""Normalization, orientation and precision of what a solver works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .schedules import Schedule

EPS = 1e-7
_BACKENDS: Any = torch.backends
_MATMULS = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)


def normalize(M: Tensor, eps: float = EPS) -> Tensor:
    """`X = M / (|M|_F + eps)` for each matrix of a batch, in float32 (float64 stays float64).

    The norm is taken of `M / max|M|`, since squares overflow float32 at 1e20 and vanish at 1e-25.
    A zero matrix stays zero, also with `eps=0`; a matrix with a NaN or Inf comes out as NaN.

    >>> float(torch.linalg.norm(normalize(torch.full((2, 8), 1e30))))
    1.0
    """
    U = M.to(computed_in(M.dtype), copy=True)
    return U.mul_(prescale_(U, peak_of(U), eps))


def prescale_(U: Tensor, peak: Tensor, eps: float) -> Tensor:
    """Divide each matrix of U, in place, by its `peak = max|U|`; returns the `scale (..., 1, 1)` that is left
    to its norm: `X = scale U`.
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

    Their entries go up to its gain, where they meet directions that are zero in the matrix that they were
    made for. What rounding loses there, `gain eps / 2`, must not be much longer than a direction.

    >>> from cachemuon import DEEPSEEK_V4, GRAM
    >>> fits_dtype(torch.float16, GRAM), fits_dtype(torch.float16, DEEPSEEK_V4)  # gains of 804 and 79,263
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
    """A batch of wide directions in M's shape, orientation and dtype: the way back of `wide_batch`."""
    return (direction.mT if M.shape[-2] > M.shape[-1] else direction).reshape(M.shape).to(M.dtype)


@contextmanager
def full_precision(*device_types: str) -> Iterator[None]:
    """Within it products are what they say: no autocast, which would turn them into bf16, and float32 in
    float32, not in TF32, whose ten bits spoil an iteration without a restart.
    """
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        for backend in _MATMULS:
            if (precision := backend.fp32_precision) not in ("none", "ieee"):
                # What a backend has from the setting for all of them reads the same, and is left to it again.
                inherited = precision == _BACKENDS.fp32_precision
                stack.callback(setattr, backend, "fp32_precision", "none" if inherited else precision)
                backend.fp32_precision = "ieee"
        yield
