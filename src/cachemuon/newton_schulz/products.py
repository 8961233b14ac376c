"""Products that are known to be symmetric: half of each is computed, the rest mirrored.

`X X^T` is symmetric, and so is every product inside a Gram iteration, whose factors are polynomials of one
matrix and commute.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANELS = 4
"""The number of column panels of a symmetric product. Each is computed from the diagonal down."""

MIN_ROWS = 640
"""The fewest rows for which panels pay: they take GramNS to 0.97 of its time at 512, 0.86 at 768 and 0.80 at
1280, on two cores in float32 (docs/notebook/performance.md). Half precision was not measured."""


def panels(n: int, dtype: torch.dtype) -> int:
    """The number of panels of an n x n product in `dtype`; 1 is the full product.

    >>> panels(768, torch.float32), panels(256, torch.float32), panels(768, torch.float16)
    (4, 1, 1)
    """
    return PANELS if n >= MIN_ROWS and dtype in (torch.float32, torch.float64) else 1


def product(
    A: Tensor, B: Tensor, out: Tensor, plus: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """`alpha A B + beta plus` for batches, in `out`; in memory of the compiler's choice under torch.compile.

    >>> product(torch.ones(1, 2, 3), torch.ones(1, 3, 2), torch.empty(1, 2, 2))
    tensor([[[3., 3.],
             [3., 3.]]])
    """
    memory = None if torch.compiler.is_compiling() else out
    if plus is None:
        return torch.bmm(A, B, out=memory)
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha, out=memory)


def symmetric(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    plus: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    symmetrize_diagonal: bool = False,
) -> Tensor:
    """`alpha A B + beta plus` in `out (..., n, n)`, for batches A and B with a symmetric product.

    Rounding leaves the diagonal blocks slightly asymmetric, unless `symmetrize_diagonal` averages it out.

    >>> X = torch.tensor([[[1.0, 2.0], [0.0, 1.0]]])
    >>> symmetric(X, X.mT, torch.empty(1, 2, 2))
    tensor([[[5., 2.],
             [2., 1.]]])
    """
    n = out.shape[-1]
    if (pieces := panels(n, out.dtype)) == 1 or torch.compiler.is_compiling():
        return product(A, B, out, plus, beta=beta, alpha=alpha)
    width = -(-n // pieces)
    for number, target in enumerate(out.unbind(0)):  # one by one: `mm` is faster than `bmm` of one
        left, right = A[number], B[number]
        for i in range(0, n, width):
            j = min(i + width, n)
            panel = target[i:, i:j]
            if plus is None:
                torch.mm(left[i:], right[:, i:j], out=panel)
            else:
                torch.addmm(plus[number, i:, i:j], left[i:], right[:, i:j], beta=beta, alpha=alpha, out=panel)
            if symmetrize_diagonal:
                corner = panel[: j - i]
                corner.add_(corner.mT.clone()).mul_(0.5)
            target[i:j, j:].copy_(panel[j - i :].mT)
    return out


def symmetric_flops(n: int, k: int, pieces: int = 1) -> int:
    """The FLOPs of `symmetric` for `(n x k) @ (k x n)` in that many panels: 2 n^2 k for one.

    >>> symmetric_flops(768, 3072), symmetric_flops(768, 3072, 4) / symmetric_flops(768, 3072)
    (3623878656, 0.625)
    """
    width = -(-n // pieces)
    return sum(2 * k * (n - i) * (min(i + width, n) - i) for i in range(0, n, width))


def gram_flops(n: int, m: int, steps: int, restarts: int, pieces: int = 1, cubic: int = 0) -> int:
    """The FLOPs of GramNS: `Y Y^T` and `Q Y` for each segment, `R^2` for each step that is not cubic, and
    three products more for each step that ends no segment.
    """
    squares = steps - cubic + 3 * (steps - 1 - restarts)
    segment = symmetric_flops(n, m, pieces) + 2 * n * n * m
    return (restarts + 1) * segment + squares * symmetric_flops(n, n, pieces)


def standard_flops(n: int, m: int, steps: int, pieces: int = 1, cubic: int = 0) -> int:
    """The FLOPs of StandardNS: `Y Y^T` and `Z Y` for each step, `A^2` for each step that is not cubic."""
    rectangular = symmetric_flops(n, m, pieces) + 2 * n * n * m
    return steps * rectangular + (steps - cubic) * symmetric_flops(n, n, pieces)
