"""Ranks that step together, and what they tell and send one another, over torch.distributed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..engine.matrices import Matrix

HOST = torch.device("cpu")
PATIENCE = 5  # seconds, for a rank to say that it is there


@dataclass(frozen=True)
class Replicas:
    """A process group as a setting: the ranks that have copies of plain parameters.

    It is shared by copies of an optimizer, and lost when that is pickled: a group is of one process.
    """

    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicas, ()


def as_replicas(value: Any) -> Replicas:
    """The setting `process_group`: a group, or None for parameters that are this rank's own.

    >>> as_replicas(None)
    Replicas(group=None)
    """
    if isinstance(value, Replicas):
        return value
    if value is None or isinstance(value, dist.ProcessGroup):
        return Replicas(value)
    raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {value!r}")


@contextmanager
def watched(group: Any) -> Iterator[None]:
    """Where a collective of a process group fails, name the ranks that are gone: those that do not say that
    they are there.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # of this rank: the others wait for it
        raise
    except RuntimeError as error:
        if gone := _absent(dist.get_process_group_ranks(group)):
            names = ("rank " if len(gone) == 1 else "ranks ") + ", ".join(map(str, gone))
            raise RuntimeError(f"no answer from {names} of {dist.get_world_size(group)}") from error
        raise


def _absent(ranks: list[int]) -> list[int]:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"cachemuon/{dist.get_rank()}", "here")
        until = time.monotonic() + PATIENCE
        while gone := [rank for rank in ranks if not store.check([f"cachemuon/{rank}"])]:
            if time.monotonic() > until:
                return gone
            time.sleep(0.1)
    except RuntimeError:  # the store is gone, with the rank that has it
        return [0]
    return []


EXCHANGES = ("transforms", "directions")
"""What owners of cached matrices send to ranks that have copies."""


class Party:
    """Ranks that have the same parameters, and step together.

    `traffic` counts the bytes that this rank has handed to each kind of collective for others.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.traffic: Counter[str] = Counter()

    @cached_property
    def _host_group(self) -> Any:
        """Where ranks can agree without waiting for their devices."""
        if "cpu:" in dist.get_backend_config(self.group):
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def count(self, flags: list[bool]) -> list[int]:
        """On how many ranks each flag holds. Waits for the other hosts, not for any device."""
        counts = torch.tensor(flags, dtype=torch.int32, device=HOST)
        with watched(self.group):
            dist.all_reduce(counts, group=self._host_group)
        self.traffic["presence"] += counts.nbytes
        return [int(number) for number in counts.tolist()]

    def same(self, number: int) -> bool:
        """Whether all ranks have the same number."""
        ends = torch.tensor([number, -number], dtype=torch.int64, device=HOST)
        with watched(self.group):
            dist.all_reduce(ends, dist.ReduceOp.MIN, group=self._host_group)
        least, most = ends.tolist()
        return bool(least == -most)

    def least(self, values: Tensor) -> Tensor:
        """The smallest of all ranks' values."""
        with watched(self.group):
            dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        self.traffic["finite"] += values.nbytes
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values: the owners' own, where all others have zeros."""
        with watched(self.group):
            dist.all_reduce(values, group=self.group)
        self.traffic["residuals"] += values.nbytes
        return values

    def exchange(self, what: str, outgoing: list[Tensor], sizes: tuple[list[int], list[int]]) -> Arrival:
        """Send tensors, in the order of the ranks they are for; and receive.

        `sizes`: how many elements go to each rank, and come from each. Elements that stay are no traffic.
        """
        leaving, coming = sizes
        sent = torch.cat([tensor.reshape(-1) for tensor in outgoing])
        received = sent.new_empty(sum(coming))
        with watched(self.group):
            work = dist.all_to_all_single(received, sent, coming, leaving, group=self.group, async_op=True)
        self.traffic[what] += (sum(leaving) - leaving[self.rank]) * sent.itemsize
        return Arrival(self.group, work, sent, received)

    def spread(self, matrices: list[Matrix], made: dict[int, Tensor]) -> list[Tensor]:
        """The transforms of these matrices, of which each rank has `made` its own."""
        sizes = [0] * self.size
        for x in matrices:
            sizes[x.owner] += x.shape[0] ** 2
        first, others = matrices[0], [rank for rank in range(self.size) if rank != self.rank]
        own = [made[id(x)] for x in matrices if x.owned]
        leaving = [0 if rank == self.rank else sizes[self.rank] for rank in range(self.size)]
        coming = [0 if rank == self.rank else sizes[rank] for rank in range(self.size)]
        outgoing = [first.momentum.new_empty(0, dtype=first.cached_in), *own * len(others)]
        received = self.exchange("transforms", outgoing, (leaving, coming)).wait()
        of_others = [x for rank in others for x in matrices if x.owner == rank]
        parts = received.split([x.shape[0] ** 2 for x in of_others])
        found = {id(x): part.view(x.shape[0], x.shape[0]) for x, part in zip(of_others, parts, strict=True)}
        return [made[id(x)] if x.owned else found[id(x)] for x in matrices]


@dataclass(eq=False)
class Arrival:
    """What is on its way. `sent` is kept until it has left."""

    group: Any
    work: Any
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """What has arrived."""
        with watched(self.group):
            self.work.wait()
        return self.received
