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
from ..newton_schulz.workspace import ceiling
from ..report.counters import HIT
from .layout import in_rounds
from .rank_group import RankGroup
from .rounds import Member, Placements, chunks_of
from .shared import Shared

Transforms = dict[tuple[Bucket, int], Tensor]
"""Transforms by bucket and row."""


class Due(NamedTuple):
    """A matrix that is solved at this step: the row of a bucket, and its owner."""

    bucket: Bucket
    row: int
    owner: int

    @property
    def n(self) -> int:
        """The side of its transform."""
        return min(self.bucket.rows, self.bucket.cols)

    @property
    def share(self) -> float:
        """How much of its owner's room for updates that wait it takes."""
        limit = self.bucket.matrices[self.row].group["max_workspace_bytes"]
        size = self.bucket.rows * self.bucket.cols * self.bucket.precision.itemsize
        return 4 * size / ceiling(limit, self.bucket.device.type)


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
        by_owner = [[one for one in due if one.owner == rank] for rank in range(self.rank_group.size)]
        own = by_owner[self.rank_group.rank]
        updates, made = [], [torch.empty(0, dtype=self.dtype, device=self.device)]
        for bucket, rows in _by_bucket(own):
            update = self._update(bucket, rows, outcomes)
            update.U = update.U.clone()  # the workspace is used again
            assert isinstance(bucket.orthogonalize, Cached)
            Q = bucket.orthogonalize.cache.fresh.transform(update.U * update.scale, self.plan.workspace)
            made.append(Q.to(self.dtype, copy=True).flatten())
            updates.append(update)
        transforms = self._exchanged(by_owner, torch.cat(made))
        for update in updates:
            yield [_solved(update, transforms)]
        for others in by_owner:
            for bucket, rows in _by_bucket(others) if others is not own else ():
                yield [_solved(self._update(bucket, rows, outcomes), transforms)]

    def _exchanged(self, by_owner: list[list[Due]], made: Tensor) -> Transforms:
        """The transforms of all owners; this rank has made those of its own."""
        sizes = [[one.n**2 for one in owned] for owned in by_owner]
        gathered = self.rank_group.all_gather("transforms", made, list(map(sum, sizes)))
        return {
            (one.bucket, one.row): part.view(one.n, one.n)
            for owned, own_sizes, whole in zip(by_owner, sizes, gathered, strict=True)
            for one, part in zip(owned, whole.split(own_sizes), strict=True)
        }


def _solved(update: Update, transforms: Transforms) -> Update:
    found = [transforms[update.bucket, row] for row in update.rows]
    update.solved = torch.stack(found).to(update.bucket.precision)
    return update


def _by_bucket(due: list[Due]) -> list[tuple[Bucket, list[int]]]:
    found: dict[Bucket, list[int]] = {}
    for one in due:
        found.setdefault(one.bucket, []).append(one.row)
    return list(found.items())
