"""A rank group: ranks that share parameters, and the collectives among them, over torch.distributed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

TIMEOUT_S = 5
"""How long a rank may take to answer after a collective has failed."""


@dataclass(frozen=True)
class ProcessGroupRef:
    """A process group as a setting of plain parameters: its ranks have copies of them.

    Copies of an optimizer share the group. A pickle drops it, since it belongs to one process.
    """

    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroupRef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessGroupRef, ()


def as_process_group(value: Any) -> ProcessGroupRef:
    """The setting `process_group`: a group, or None for parameters that this rank does not share."""
    if isinstance(value, ProcessGroupRef):
        return value
    if value is None or isinstance(value, dist.ProcessGroup):
        return ProcessGroupRef(value)
    raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {value!r}")


@contextmanager
def name_dead_ranks(group: Any) -> Iterator[None]:
    """If a collective of a process group fails, name the ranks that no longer answer."""
    try:
        yield
    except torch.OutOfMemoryError:  # of this rank; the others are alive
        raise
    except RuntimeError as error:
        if dead := _silent(dist.get_process_group_ranks(group)):
            names = ("rank " if len(dead) == 1 else "ranks ") + ", ".join(map(str, dead))
            raise RuntimeError(f"no answer from {names} of {dist.get_world_size(group)}") from error
        raise


def _silent(ranks: list[int]) -> list[int]:
    """The ranks that do not answer: living ranks write to the store after a failure."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"cachemuon/{dist.get_rank()}", "here")
        until = time.monotonic() + TIMEOUT_S
        while silent := [rank for rank in ranks if not store.check([f"cachemuon/{rank}"])]:
            if time.monotonic() > until:
                return silent
            time.sleep(0.1)
    except RuntimeError:  # the store died with rank 0, which serves it
        return [0]
    return []


class RankGroup:
    """The ranks that share some parameters, numbered in the order of their process group.

    `bytes_sent` counts, for each kind of collective, the bytes that this rank has sent to others.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.bytes_sent: Counter[str] = Counter()

    def all_reduce(self, what: str, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum of all ranks' values, or another reduction, in place."""
        with name_dead_ranks(self.group):
            dist.all_reduce(values, op, group=self.group)
        self.bytes_sent[what] += values.nbytes
        return values

    def all_gather(self, what: str, own: Tensor, sizes: list[int]) -> list[Tensor]:
        """The tensors of all ranks, which are one-dimensional and of these sizes."""
        leaving, coming = [own.numel()] * self.size, list(sizes)
        leaving[self.rank] = coming[self.rank] = 0
        outgoing = own.expand(self.size - 1, -1).flatten().contiguous()
        found = list(self.all_to_all(what, outgoing, leaving, coming)().split(coming))
        found[self.rank] = own
        return found

    def all_to_all(
        self, what: str, outgoing: Tensor, leaving: list[int], coming: list[int]
    ) -> Callable[[], Tensor]:
        """Start to send consecutive parts of `outgoing` to the ranks, of `leaving` elements each; `coming`
        elements arrive from each. Returns what waits for them. Elements for this rank itself are not counted.
        """
        received = outgoing.new_empty(sum(coming))
        with name_dead_ranks(self.group):
            work = dist.all_to_all_single(
                received, outgoing, coming, leaving, group=self.group, async_op=True
            )
        self.bytes_sent[what] += (outgoing.numel() - leaving[self.rank]) * outgoing.itemsize
        return partial(self._wait, work, outgoing, received)

    def _wait(self, work: Any, outgoing: Tensor, received: Tensor) -> Tensor:
        """`received`, once it is complete; `outgoing` is an argument so that it lives until it has left."""
        with name_dead_ranks(self.group):
            work.wait()
        return received
