"""Matrices that every rank has and reuses: only their transforms travel, when an owner has refreshed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.gns import CacheGNS
from ..engine.bucket import Bucket, Matrix
from ..engine.local import normalized, step_down, take_in
from ..engine.orthogonalize import Cached, Direction, Update, rows_of
from ..engine.plan import Kind, Plan, kept_dtype
from ..newton_schulz.workspace import ceiling
from ..report.counters import HIT
from .placement import Placement
from .rank_group import RankGroup
from .shared import GOOD, Shared


class Due(NamedTuple):
    """A matrix that is solved at this step: the row of a bucket."""

    bucket: Bucket
    row: int

    @property
    def matrix(self) -> Matrix:
        """Which one it is."""
        return self.bucket.matrices[self.row]


class Replicated(Shared):
    """See above. Every rank takes in all gradients and applies all transforms, the owner's own among them, in the
    same way, so that copies of a parameter stay equal bit for bit. All transforms have one dtype.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        kinds: list[tuple[Kind, list[Matrix]]],
        placements: dict[int, Placement],
    ) -> None:
        chunks = [chunk for kind, matrices in kinds for chunk in plan.chunks(kind, matrices)]
        buckets = plan.buckets(chunks)
        order = [x for bucket in buckets for x in bucket.matrices]
        super().__init__(plan, rank_group, order, placements, buckets)
        self.dtype = kept_dtype(order[0])

    def gather(self, outcomes: list[int]) -> Iterator[tuple[Bucket, Update]]:
        """First what is due, with its transform, then what is reused."""
        self.readings.clear()
        self.collect_flags()
        due = [
            Due(bucket, row)
            for bucket in self.buckets
            for row, x in enumerate(bucket.matrices)
            if outcomes[x.number] != HIT
        ]
        for members in self._rounds(due):
            yield from self._refreshed(members, outcomes)
        for bucket in self.buckets:
            rows = [row for row, x in enumerate(bucket.matrices) if outcomes[x.number] == HIT]
            if rows:
                yield bucket, self._update(bucket, rows, outcomes)

    def scatter(self, bucket: Bucket, update: Update, direction: Direction) -> None:
        """Every rank applies every direction."""
        self.readings.note(bucket, update, direction)
        rows = [update.rows[row] for row in direction.rows]
        step_down(bucket, rows, bucket.wide(direction.D).unbind(0), self._good(bucket, rows))

    def _good(self, bucket: Bucket, rows: list[int]) -> Tensor:
        return rows_of(self.flags_of(bucket) == GOOD, rows)

    def _update(self, bucket: Bucket, rows: list[int], outcomes: list[int]) -> Update:
        good = self._good(bucket, rows)
        U, peak = take_in(bucket, rows, self.plan, self.gradient, good)
        peak = torch.where(good.view(-1, 1, 1), peak, torch.nan)
        matrices = [bucket.matrices[row] for row in rows]
        wanted, kept = [outcomes[x.number] for x in matrices], self.plan.kept(bucket, matrices)
        update = normalized(bucket, rows, wanted, U, peak, kept)
        self.readings.note_peaks(bucket, update)
        return update

    def _refreshed(self, due: list[Due], outcomes: list[int]) -> Iterator[tuple[Bucket, Update]]:
        """The updates of these matrices with their transforms, each of which its owner has made.

        An owner keeps its own updates until all transforms have arrived; those of the others are made then.
        """
        own, others = [], []
        for one in due:
            (own if self.placements[one.matrix.number].owned else others).append(one)
        updates: list[tuple[Bucket, Update]] = []
        made: list[Tensor] = []
        for bucket, rows in _by_bucket(own):
            update = self._update(bucket, rows, outcomes)
            update.U = update.U.clone()
            Q = _cache_of(bucket).fresh.transform(update.U * update.scale, self.plan.workspace)
            made += [transform.to(self.dtype).flatten() for transform in Q.unbind(0)]
            updates.append((bucket, update))
        transforms = self._exchange(due, made)
        for bucket, update in updates:
            yield bucket, _with_transforms(bucket, update, transforms)
        for bucket, rows in _by_bucket(others):
            yield bucket, _with_transforms(bucket, self._update(bucket, rows, outcomes), transforms)

    def _exchange(self, due: list[Due], made: list[Tensor]) -> dict[int, Tensor]:
        """All transforms of these matrices by their numbers; this rank has made its own, in their order."""
        me, size = self.rank_group.rank, self.rank_group.size
        sides = {one.matrix.number: min(one.bucket.rows, one.bucket.cols) for one in due}
        by_owner: list[list[int]] = [[] for _ in range(size)]
        for number in sides:
            by_owner[self.placements[number].owner].append(number)
        sizes = [sum(sides[number] ** 2 for number in numbers) for numbers in by_owner]
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        arrival = self.rank_group.all_to_all(
            "transforms",
            torch.cat([nothing, *made * (size - 1)]),
            [0 if rank == me else sizes[me] for rank in range(size)],
            [0 if rank == me else sizes[rank] for rank in range(size)],
        )
        numbers = [number for rank in range(size) if rank != me for number in by_owner[rank]]
        parts = arrival.wait().split([sides[number] ** 2 for number in numbers])
        found = dict(zip([*numbers, *by_owner[me]], [*parts, *made], strict=True))
        return {number: part.view(sides[number], sides[number]) for number, part in found.items()}

    def _rounds(self, due: list[Due]) -> Iterator[list[Due]]:
        """As many at a time as their owners have room for, with work for every owner; at least one round, so
        that the collectives of all steps are the same.
        """
        turns: Counter[int] = Counter()
        ordered: list[tuple[int, int]] = []
        for place, one in enumerate(due):
            owner = self.placements[one.matrix.number].owner
            ordered.append((turns[owner], place))
            turns[owner] += 1
        found: list[int] = []
        taken: Counter[int] = Counter()
        for _, place in sorted(ordered):
            bucket, x = due[place].bucket, due[place].matrix
            owner = self.placements[x.number].owner
            size = bucket.rows * bucket.cols * bucket.precision.itemsize
            limit = ceiling(x.group["max_workspace_bytes"], bucket.device.type) // 4
            if found and taken[owner] + size > limit:
                yield [due[i] for i in sorted(found)]
                found, taken = [], Counter()
            found.append(place)
            taken[owner] += size
        yield [due[i] for i in sorted(found)]


def _with_transforms(bucket: Bucket, update: Update, transforms: dict[int, Tensor]) -> Update:
    found = [transforms[bucket.matrices[row].number] for row in update.rows]
    update.solved = torch.stack(found).to(bucket.precision)
    return update


def _by_bucket(due: Sequence[Due]) -> list[tuple[Bucket, list[int]]]:
    found: dict[Bucket, list[int]] = {}
    for one in due:
        found.setdefault(one.bucket, []).append(one.row)
    return list(found.items())


def _cache_of(bucket: Bucket) -> CacheGNS:
    assert isinstance(bucket.orthogonalize, Cached)
    return bucket.orthogonalize.cache
