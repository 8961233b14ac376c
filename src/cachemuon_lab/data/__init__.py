"""Data as pure functions: the batch of a step depends on the seed and the step, on nothing before it.

The same seed gives every optimizer the same batches, and a resumed run needs no saved position.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Batches(Protocol):
    """What training asks of its data: batches of inputs and targets, on the CPU.

    A step may be made of several calls of `train`, one for each micro-batch of each rank. Their number
    within the step is `micro * world + rank`, so two ranks with one micro-batch each see together
    what one rank with two sees.
    """

    @property
    def validation_batches(self) -> int | None:
        """How many batches `validation` has; None if it never ends."""

    def train(self, step: int, micro: int = 0, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one micro-batch of a step on one of `world` ranks."""

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets number `index`, the same in every run on this data."""

    def describe(self) -> dict[str, Any]:
        """What goes into a run's record: files by name, their sizes and checksums, the seed."""


def keyed_generator(*key: int | str) -> torch.Generator:
    """A generator whose stream is a pure function of the key, on every machine.

    >>> a, b = keyed_generator("crop", 1, 2), keyed_generator("crop", 1, 2)
    >>> torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def part_of(size: int, part: str) -> slice:
    """The validation examples of a part: "all" of them, "tune" the first half, "report" the second.

    >>> part_of(5, "tune"), part_of(5, "report")
    (slice(0, 2, None), slice(2, 5, None))
    """
    return {"all": slice(0, size), "tune": slice(0, size // 2), "report": slice(size // 2, size)}[part]


def slot_of(micro: int, rank: int, world: int) -> int:
    """The number of a call of `train` within its step, `micro * world + rank`.

    >>> [slot_of(micro, rank, world=2) for micro in (0, 1) for rank in (0, 1)]
    [0, 1, 2, 3]
    """
    if micro < 0 or not 0 <= rank < world:
        raise ValueError(f"micro must be at least 0 and rank in [0, world), got {micro=}, {rank=}, {world=}")
    return micro * world + rank
