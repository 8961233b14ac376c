"""Memory for the intermediate results of a step, and how much of it a matrix needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, device, dtype


class Workspace:
    """Memory that is used again and again: each role has its own, as large as was ever asked for.

    What is taken for a role is overwritten when the role is taken again. On a CPU a fresh allocation of
    a large matrix costs as much as the pass that fills it, since the system hands out every page anew.

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

        In half precision on a CPU always row by row: into a transposed result torch multiplies two thousand
        times slower there (12 s for 768 x 768 by 768 x 2304 in bfloat16).
        """
        dtype = dtype or X.dtype
        transposed = X.stride(-2) == 1 and X.stride(-1) != 1
        if dtype.itemsize < 4 and X.device.type == "cpu":
            transposed = False
        return self._take(role, False, X, tuple(X.shape), dtype, transposed)

    def square(self, role: str, X: Tensor) -> Tensor:
        """Memory for `(B, n, n)` in the dtype of a batch `X (B, n, m)`."""
        return self._take(role, True, X, (*X.shape[:-1], X.shape[-2]), X.dtype, False)

    def stack(self, role: str, tensors: list[Tensor], dtype: dtype) -> Tensor:
        """Matrices as a batch in that dtype; a view of a single one that has it."""
        first = tensors[0]
        if len(tensors) == 1:
            return first.unsqueeze(0).to(dtype)
        square = first.shape[-2] == first.shape[-1]
        out = self._take(role, square, first, (len(tensors), *first.shape), first.dtype, False)
        return torch.stack(tensors, out=out).to(dtype)

    def prepare(self, numbers: int, n: int, m: int, itemsize: int, need: int, ceiling: int) -> None:
        """Let go of what larger batches left, where that would pass the ceiling together with the bytes that
        a batch of `numbers` n x m matrices needs.
        """
        fitting = {False: numbers * n * m * itemsize, True: numbers * n * n * itemsize}
        excess = {
            key: memory.nbytes - fitting[key[1]]
            for key, memory in self._memory.items()
            if memory.nbytes > fitting[key[1]]
        }
        if sum(excess.values()) + need > ceiling:
            self._views.clear()
            for key in excess:
                del self._memory[key]

    @property
    def nbytes(self) -> int:
        """All that is kept."""
        return sum(memory.nbytes for memory in self._memory.values())

    def _take(
        self, role: str, square: bool, X: Tensor, shape: tuple[int, ...], dtype: dtype, transposed: bool
    ) -> Tensor:
        view = self._views.get((role, shape, dtype, transposed, X.device))
        return self._made(role, square, X, shape, dtype, transposed) if view is None else view

    def _made(
        self, role: str, square: bool, X: Tensor, shape: tuple[int, ...], dtype: dtype, transposed: bool
    ) -> Tensor:
        size, key = math.prod(shape), (role, square, dtype, X.device)
        if key not in self._memory or self._memory[key].numel() < size:
            self._views.clear()
            self._memory.pop(key, None)
            self._memory[key] = X.new_empty(size, dtype=dtype)
        plain = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        view = self._memory[key][:size].view(plain)
        view = view.mT if transposed else view
        self._views[role, shape, dtype, transposed, X.device] = view
        return view


def memory_limit(max_workspace_bytes: int | None, device_type: str) -> int:
    """The bytes that a step may take beside the state.

    By default 64 MiB on a CPU, where stacks that no cache holds take longer than their matrices one by one
    (docs/performance.md), and 1 GiB on other devices, where every operation has to be launched.

    >>> memory_limit(None, "cpu"), memory_limit(None, "cuda"), memory_limit(5, "cpu")
    (67108864, 1073741824, 5)
    """
    if max_workspace_bytes is not None:
        return max_workspace_bytes
    return 2**26 if device_type == "cpu" else 2**30


def solve_bytes(n: int, m: int, itemsize: int = 4) -> int:
    """What solving for one n x m matrix takes at most beside the state: five of its size, and seven n x n.

    >>> solve_bytes(768, 3072) / 2**20
    60.75
    """
    return itemsize * n * (5 * m + 7 * n)


def hit_bytes(n: int, m: int, columns: int, itemsize: int = 4) -> int:
    """What probing and applying a transform takes at most, with that many random vectors: five matrices of
    n x m, four n x n, thin ones, and the small ones of an inverse root.

    >>> hit_bytes(768, 3072, 56) / 2**20
    56.7685546875
    """
    return itemsize * (n * (5 * m + 4 * n) + columns * (2 * m + 8 * n + 12 * columns))
