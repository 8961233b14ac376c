"""Memory for the intermediate results of a step, and how much of it a matrix needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, device, dtype


class Workspace:
    """Reused memory: each role has one buffer, as large as its largest request so far.

    A role's tensor is overwritten when the role is requested again. On a CPU a new large tensor costs as much
    as the pass that fills it, since the system has to hand out every page.

    >>> import torch
    >>> workspace, X = Workspace(), torch.randn(1, 3, 2).mT
    >>> one, two = workspace.like("X", X), workspace.like("X", X)
    >>> one.data_ptr() == two.data_ptr(), one.stride() == X.stride(), workspace.square("R", X).shape
    (True, True, torch.Size([1, 2, 2]))
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, bool, dtype, device], Tensor] = {}
        self._views: dict[object, Tensor] = {}

    def like(self, role: str, X: Tensor, dtype: dtype | None = None) -> Tensor:
        """Memory in the shape and layout of a batch `X (B, n, m)`.

        In half precision on a CPU it is always row by row: torch multiplies into a transposed result two
        thousand times slower there (12 s for 768 x 768 by 768 x 2304 in bfloat16).
        """
        dtype = dtype or X.dtype
        slow = dtype.itemsize < 4 and X.device.type == "cpu"
        transposed = X.stride(-2) == 1 and X.stride(-1) != 1 and not slow
        return self._take(role, False, X, tuple(X.shape), dtype, transposed)

    def square(self, role: str, X: Tensor) -> Tensor:
        """Memory for `(B, n, n)` in the dtype of a batch `X (B, n, m)`."""
        return self._take(role, True, X, (*X.shape[:-1], X.shape[-2]), X.dtype, False)

    def stack(self, role: str, tensors: list[Tensor], dtype: dtype) -> Tensor:
        """Matrices as a batch in `dtype`; a view of a single matrix that has it."""
        first = tensors[0]
        if len(tensors) == 1:
            return first.unsqueeze(0).to(dtype)
        square = first.shape[-2] == first.shape[-1]
        out = self._take(role, square, first, (len(tensors), *first.shape), first.dtype, False)
        return torch.stack(tensors, out=out).to(dtype)

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

    def _take(
        self, role: str, square: bool, X: Tensor, shape: tuple[int, ...], dtype: dtype, transposed: bool
    ) -> Tensor:
        key = role, square, dtype, X.device
        found = self._views.get((key, shape, transposed))
        if found is None:
            size = math.prod(shape)
            if key not in self._memory or self._memory[key].numel() < size:
                self._views.clear()
                self._memory.pop(key, None)  # free it before the larger one is allocated
                self._memory[key] = X.new_empty(size, dtype=dtype)
            rows, cols = shape[-2:]
            flat = self._memory[key][:size]
            found = flat.view(*shape[:-2], cols, rows).mT if transposed else flat.view(shape)
            self._views[key, shape, transposed] = found
        return found


def memory_limit(max_workspace_bytes: int | None, device_type: str) -> int:
    """The bytes that a step may use beside the state.

    The default is 64 MiB on a CPU, where batches that exceed its caches take longer than single matrices
    (docs/notebook/performance.md), and 1 GiB on other devices, where each operation has a launch cost.

    >>> memory_limit(None, "cpu"), memory_limit(None, "cuda"), memory_limit(5, "cpu")
    (67108864, 1073741824, 5)
    """
    if max_workspace_bytes is not None:
        return max_workspace_bytes
    return 2**26 if device_type == "cpu" else 2**30


def solve_bytes(n: int, m: int, itemsize: int = 4) -> int:
    """The most bytes that a solve of an n x m matrix needs beside the state: five n x m, seven n x n.

    >>> solve_bytes(768, 3072) / 2**20
    60.75
    """
    return itemsize * n * (5 * m + 7 * n)


def hit_bytes(n: int, m: int, columns: int, itemsize: int = 4) -> int:
    """The most bytes that a hit with that many random vectors needs: five n x m, four n x n, and thin ones.

    >>> hit_bytes(768, 3072, 56) / 2**20
    56.625
    """
    return itemsize * (n * (5 * m + 4 * n) + columns * (2 * m + 8 * n))
