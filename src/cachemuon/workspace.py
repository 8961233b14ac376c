"""Memory for the intermediate results of a solve."""

from __future__ import annotations

import math

from torch import Tensor, device, dtype, uint8


class Workspace:
    """Memory that is used again and again: each role has its own, as large as was ever asked for.

    What is taken for a role is overwritten when the role is taken again. On a CPU a fresh allocation of
    a large matrix costs as much as the pass that fills it, since the system hands out every page anew:
    with kept memory a solve of 768 x 768 takes 5% less time (docs/performance.md).

    >>> import torch
    >>> workspace, X = Workspace(), torch.randn(1, 3, 2).mT
    >>> one, two = workspace.like("X", X), workspace.like("X", X)
    >>> one.data_ptr() == two.data_ptr(), one.stride() == X.stride(), workspace.square("R", X).shape
    (True, True, torch.Size([1, 2, 2]))
    """

    RECTANGLES, SQUARES = 5, 7
    """How many n x m and n x n matrices a step needs at once at most, those that are stacked included."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, bool, device], Tensor] = {}
        self._views: dict[object, Tensor] = {}

    def like(self, role: str, X: Tensor, dtype: dtype | None = None) -> Tensor:
        """Memory in the shape and layout of a batch `X (B, n, m)`."""
        transposed = X.stride(-2) == 1 and X.stride(-1) != 1
        return self._take(role, False, X, X.shape, dtype or X.dtype, transposed)

    def square(self, role: str, X: Tensor) -> Tensor:
        """Memory for `(B, n, n)` in the dtype of a batch `X (B, n, m)`."""
        return self._take(role, True, X, (*X.shape[:-1], X.shape[-2]), X.dtype, False)

    def prepare(self, numbers: int, n: int, m: int, itemsize: int, ceiling: int) -> None:
        """Let go of what larger batches left, where that and a batch of `numbers` n x m matrices would
        pass the ceiling together.
        """
        fitting = {False: numbers * n * m * itemsize, True: numbers * n * n * itemsize}
        excess = {
            key: memory.numel() - fitting[key[1]]
            for key, memory in self._memory.items()
            if memory.numel() > fitting[key[1]]
        }
        if sum(excess.values()) + numbers * workspace_bytes(n, m, itemsize) > ceiling:
            self._views.clear()
            for key in excess:
                del self._memory[key]

    def _take(
        self, role: str, square: bool, X: Tensor, shape: tuple[int, ...], dtype: dtype, transposed: bool
    ) -> Tensor:
        view = self._views.get((role, shape, dtype, transposed, X.device))
        return self._made(role, square, X, shape, dtype, transposed) if view is None else view

    def _made(
        self, role: str, square: bool, X: Tensor, shape: tuple[int, ...], dtype: dtype, transposed: bool
    ) -> Tensor:
        size, key = math.prod(shape) * dtype.itemsize, (role, square, X.device)
        if key not in self._memory or self._memory[key].numel() < size:
            self._views.clear()
            self._memory.pop(key, None)
            self._memory[key] = X.new_empty(size, dtype=uint8)
        plain = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        view = self._memory[key][:size].view(dtype).view(plain)
        view = view.mT if transposed else view
        self._views[role, shape, dtype, transposed, X.device] = view
        return view


def workspace_bytes(n: int, m: int, itemsize: int = 4) -> int:
    """What working on one n x m matrix takes at most beside the state.

    >>> workspace_bytes(768, 3072) / 2**20
    60.75
    """
    return itemsize * (Workspace.RECTANGLES * n * m + Workspace.SQUARES * n * n)
