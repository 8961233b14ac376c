"""Products of batches: symmetric ones at half the price, in full precision, into memory that is reused.

`X X^T` is symmetric, and so is every product inside a Gram iteration, whose factors are polynomials of one
matrix and commute: half of each is computed, the rest mirrored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, device, dtype

_BACKENDS: Any = torch.backends

Key = tuple[str, bool, tuple[int, ...], dtype, bool, device]
"""A role, whether it is a square, shape, dtype, whether transposed, device."""

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
    if n < MIN_ROWS or out.dtype.itemsize < 4 or torch.compiler.is_compiling():  # `panels` is 1
        memory = None if torch.compiler.is_compiling() else out
        if plus is None:
            return torch.bmm(A, B, out=memory)
        return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha, out=memory)
    width = -(-n // PANELS)
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


@contextmanager
def full_precision(*device_types: str) -> Iterator[None]:
    """Compute products in the dtype of their factors: without autocast, which would make them bf16, and
    without TF32, whose ten bits ruin an iteration that has no restart.
    """
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        for backend in (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul):
            if (precision := backend.fp32_precision) not in ("none", "ieee"):
                # A value inherited from the global setting reads the same; on exit it is inherited again.
                inherited = precision == _BACKENDS.fp32_precision
                stack.callback(setattr, backend, "fp32_precision", "none" if inherited else precision)
                backend.fp32_precision = "ieee"
        yield


class Workspace:
    """Reused memory: each role has one buffer, as large as its largest request so far.

    A role's tensor is overwritten when the role is requested again. On a CPU a new large tensor costs as much
    as the pass that fills it, since the system has to hand out every page.

    >>> import torch
    >>> workspace, X = Workspace(), torch.randn(1, 3, 2).mT
    >>> one, two = workspace.like("X", X), workspace.like("X", X)
    >>> one.data_ptr() == two.data_ptr(), one.stride() == X.stride()
    (True, True)
    >>> workspace.like("R", X, square=True).shape
    torch.Size([1, 2, 2])
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, bool, dtype, device], Tensor] = {}
        self._views: dict[Key, Tensor] = {}

    def like(self, role: str, X: Tensor, dtype: dtype | None = None, square: bool = False) -> Tensor:
        """Memory in the shape and layout of a batch `X (B, n, m)`, or for `(B, n, n)`.

        In half precision on a CPU it is always row by row: torch multiplies into a transposed result two
        thousand times slower there (12 s for 768 x 768 by 768 x 2304 in bfloat16).
        """
        dtype = dtype or X.dtype
        slow = dtype.itemsize < 4 and X.device.type == "cpu"
        transposed = X.stride(-2) == 1 and X.stride(-1) != 1 and not slow
        shape = (*X.shape[:-1], X.shape[-2]) if square else X.shape
        key = role, shape[-2] == shape[-1], shape, dtype, transposed and not square, X.device
        view = self._views.get(key)
        return self._made(X, key) if view is None else view

    def stack(self, role: str, tensors: list[Tensor], dtype: dtype) -> Tensor:
        """Matrices as a batch in `dtype`; a view of a single matrix that has it."""
        first = tensors[0]
        if len(tensors) == 1:
            return first.unsqueeze(0).to(dtype)
        square, shape = first.shape[-2] == first.shape[-1], (len(tensors), *first.shape)
        key = role, square, shape, first.dtype, False, first.device
        view = self._views.get(key)
        return torch.stack(tensors, out=self._made(first, key) if view is None else view).to(dtype)

    def prepare(self, count: int, n: int, m: int, itemsize: int, need: int, limit: int) -> None:
        """Free the buffers that are too large for a batch of `count` n x m matrices, if their excess and the
        `need` bytes of that batch together exceed `limit`.
        """
        fitting = {False: count * n * m * itemsize, True: count * n * n * itemsize}
        large = [key for key, memory in self._memory.items() if memory.nbytes > fitting[key[1]]]
        excess = sum(self._memory[key].nbytes - fitting[key[1]] for key in large)
        if excess + need > limit:
            self._views.clear()
            for key in large:
                del self._memory[key]

    @property
    def nbytes(self) -> int:
        """The size of all buffers."""
        return sum(memory.nbytes for memory in self._memory.values())

    def _made(self, X: Tensor, key: Key) -> Tensor:
        role, square, shape, dtype, transposed, _ = key
        size, place = math.prod(shape), (role, square, dtype, X.device)
        if place not in self._memory or self._memory[place].numel() < size:
            self._views.clear()
            self._memory.pop(place, None)  # free it before the larger one is allocated
            self._memory[place] = X.new_empty(size, dtype=dtype)
        rows, cols = shape[-2:]
        flat = self._memory[place][:size]
        view = flat.view(*shape[:-2], cols, rows).mT if transposed else flat.view(shape)
        self._views[key] = view
        return view


def symmetric_flops(n: int, k: int, pieces: int = 1) -> int:
    """The FLOPs of `symmetric` for `(n x k) @ (k x n)` in that many panels: 2 n^2 k for one.

    >>> symmetric_flops(768, 3072), symmetric_flops(768, 3072, 4) / symmetric_flops(768, 3072)
    (3623878656, 0.625)
    """
    width = -(-n // pieces)
    return sum(2 * k * (n - i) * (min(i + width, n) - i) for i in range(0, n, width))


def gram_flops(n: int, m: int, steps: int, restarts: int, pieces: int = 1) -> int:
    """The FLOPs of GramNS: `Y Y^T` and `Q Y` for each segment, `R^2` for each step, and three products more
    for each step that ends no segment.
    """
    squares = steps + 3 * (steps - 1 - restarts)
    segment = symmetric_flops(n, m, pieces) + 2 * n * n * m
    return (restarts + 1) * segment + squares * symmetric_flops(n, n, pieces)


def standard_flops(n: int, m: int, steps: int, pieces: int = 1) -> int:
    """The FLOPs of StandardNS: `Y Y^T`, `A^2` and `Z Y` for each step."""
    return steps * (symmetric_flops(n, m, pieces) + symmetric_flops(n, n, pieces) + 2 * n * n * m)
