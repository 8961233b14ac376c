"""What crosses between host and device: at most one upload in a step, and one reading that nobody waits for.

`torch.tensor(list, device=...)`, `.item()`, `tolist` of a tensor on a device and copies to the host make the
host wait until the device has done all its work. What a step knows on the host goes to the device in one copy
from pinned memory, where it has changed; what the device measures arrives beside the work that follows
(`Readback`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.residual import random_block

FACTORS = 4
"""Numbers on the device for each matrix: `-lr ratio`, `1 - lr weight_decay`, and the weights of momentum."""


class Block(NamedTuple):
    """Random vectors that matrices with n rows share for one life of their transforms, of `period` steps."""

    n: int
    columns: int
    seed: int
    period: int

    def draw(self, step: int, dtype: torch.dtype) -> Tensor:
        """Those of a step, on the host: a pure function of seed and life."""
        return random_block(self.n, self.columns, seed=self.seed, step=step // self.period, dtype=dtype)


class DeviceValues:
    """The host's numbers for one device and dtype, in one tensor there: factors of each matrix, random
    blocks; and beside it what a step measures of each matrix: `max|U|`, and the residual.

    >>> values = DeviceValues(torch.device("cpu"), torch.float32, 2, [Block(4, 3, seed=0, period=11)])
    >>> values.fill([(1.0, 1.0, 1.0, 1.0)] * 2, step=1)
    >>> values.factors.sum(), values.blocks[Block(4, 3, 0, 11)].shape
    (tensor(8.), torch.Size([4, 3]))
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, matrices: int, blocks: Iterable[Block]
    ) -> None:
        self.device = device
        ordered = sorted(set(blocks))
        sizes = [matrices * FACTORS, *(block.n * block.columns for block in ordered)]
        self._host = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        self._there = self._host if device.type == "cpu" else self._host.to(device)
        ends = list(accumulate(sizes))
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        factors, *parts = (self._there[span] for span in self._spans)
        self.factors = factors.view(matrices, FACTORS)
        self.blocks = {block: part.view(block.n, -1) for block, part in zip(ordered, parts, strict=True)}
        self._drawn = dict.fromkeys(ordered, -1)  # the life that each block was drawn for

    def fill(self, factors: list[tuple[float, ...]] | None, step: int) -> None:
        """Bring the device up to date: with factors, unless they are as they were, and with blocks whose life
        begins. One copy, of all that lies between the first and the last that changed.
        """
        changed = []
        if factors is not None:
            self._host[self._spans[0]] = torch.tensor(factors, dtype=torch.float64, device="cpu").flatten()
            changed.append(self._spans[0])
        for (block, life), span in zip(self._drawn.items(), self._spans[1:], strict=True):
            if life != step // block.period:
                self._host[span] = block.draw(step, self._host.dtype).flatten()
                self._drawn[block] = step // block.period
                changed.append(span)
        if changed and self._there is not self._host:
            span = slice(changed[0].start, changed[-1].stop)
            staged = _pinned(self._host[span])
            self._there[span].copy_(staged.copy_(self._host[span]), non_blocking=True)


class Readback:
    """A small tensor on its way to the host; nobody has to wait for it.

    >>> Readback(torch.tensor([1.0, 2.0])).wait()
    tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.Event | None = None
        if values.device.type == "cpu":
            self._host = values.to(torch.float64, copy=True)
            return
        self._host = _pinned(values)
        self._host.copy_(values, non_blocking=True)
        # On the stream of the copy, that of the tensor's device, whichever device is the current one.
        self._arrived = torch.Event(values.device)
        self._arrived.record(torch.accelerator.current_stream(values.device))

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> Tensor:
        """The values, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.to(torch.float64)


def _pinned(like: Tensor) -> Tensor:
    """Memory of the host that a device copies from and to by itself. New for each copy: torch's allocator
    gives it away again only when that copy is done.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
