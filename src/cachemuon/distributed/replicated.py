"""Matrices that every rank has and reuses: their owners send transforms, when they have refreshed one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..engine.local import grouped
from ..engine.orthogonalize import Cached, Direction, Update
from ..engine.plan import Plan, kept_dtype
from ..report.counters import HIT
from .layout import in_rounds
from .rank_group import RankGroup
from .rounds import Member, Placements, chunks_of
from .shared import Shared


class Due(NamedTuple):
    """A matrix that is solved at this step: the row of a bucket, and its owner."""

    bucket: Bucket
    row: int
    owner: int

    @property
    def share(self) -> float:
        """What it takes of its owner's room: an update that waits, a transform, and that on its way."""
        n, m = sorted((self.bucket.rows, self.bucket.cols))
        return 4 * n * (m + 3 * n) * self.bucket.precision.itemsize / self.bucket.limit


Batch = tuple[Bucket, list[int]]
"""Rows of a bucket."""


class Replicated(Shared):
    """Every rank takes in all gradients and applies all transforms, also an owner its own.

    Batches are the same on all ranks, so that copies of a parameter stay equal bit for bit. All transforms
    have one dtype.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        members: list[Member],
        placements: Placements,
    ) -> None:
        buckets = plan.buckets(chunks_of(plan, members))
        order = [x for bucket in buckets for x in bucket.matrices]
        super().__init__(plan, rank_group, order, placements, buckets, [])
        self.together = grouped(buckets)
        self.dtype = kept_dtype(order[0])

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """First what is due, with its transform, then what is reused."""
        self.begin()
        due = [
            Due(bucket, row, self.placements[x.number].owner)
            for bucket in self.buckets
            for row, x in enumerate(bucket.matrices)
            if outcomes[x.number] != HIT
        ]
        # A step with nothing due has a round too, so that all steps issue the same collectives.
        for members in in_rounds(due, [one.owner for one in due], [one.share for one in due]) or [[]]:
            yield from self._refreshed(members, outcomes)
        for buckets in self.together:
            updates = [
                self._update(bucket, rows, outcomes, place)
                for place, bucket in enumerate(buckets)
                if (rows := [row for row, x in enumerate(bucket.matrices) if outcomes[x.number] == HIT])
            ]
            if updates:
                yield updates

    def scatter(self, direction: Direction) -> None:
        """Every rank applies every direction."""
        self.readings.note(direction)
        self.step_down(direction)

    def _update(self, bucket: Bucket, rows: list[int], outcomes: list[int], place: int = 0) -> Update:
        return self.update(bucket, rows, outcomes, *self.take_in(bucket, rows, place))

    def _refreshed(self, due: list[Due], outcomes: list[int]) -> Iterator[list[Update]]:
        """The updates of these matrices with their transforms, which their owners have made.

        An owner keeps its own updates until all transforms have arrived, and makes those of the others then.
        """
        me = self.rank_group.rank
        by_owner = [_batches(due, rank) for rank in range(self.rank_group.size)]
        sizes = [[len(rows) * _n(bucket) ** 2 for bucket, rows in batches] for batches in by_owner]
        made = torch.empty(sum(sizes[me]), dtype=self.dtype, device=self.device)
        own = []
        for (bucket, rows), transforms in zip(by_owner[me], made.split(sizes[me]), strict=True):
            update = self._update(bucket, rows, outcomes)
            update.U = update.U.clone()  # the workspace is used again
            assert isinstance(bucket.orthogonalize, Cached)
            Q = bucket.orthogonalize.cache.fresh.transform(update.U * update.scale, self.plan.workspace)
            transforms.view(Q.shape).copy_(Q)
            own.append(update)
        gathered = self.rank_group.all_gather("transforms", made, list(map(sum, sizes)))
        for transforms in made.split(sizes[me]):
            yield [_solved(own.pop(0), transforms)]
        for rank, batches in enumerate(by_owner):
            if rank != me:
                for (bucket, rows), transforms in zip(
                    batches, gathered[rank].split(sizes[rank]), strict=True
                ):
                    yield [_solved(self._update(bucket, rows, outcomes), transforms)]


def _n(bucket: Bucket) -> int:
    """The side of its transforms."""
    return min(bucket.rows, bucket.cols)


def _solved(update: Update, transforms: Tensor) -> Update:
    n = _n(update.bucket)
    update.solved = transforms.view(-1, n, n).to(update.bucket.precision)
    return update


def _batches(due: list[Due], owner: int) -> list[Batch]:
    """Those of one owner."""
    found: dict[Bucket, list[int]] = {}
    for one in due:
        if one.owner == owner:
            found.setdefault(one.bucket, []).append(one.row)
    return list(found.items())
