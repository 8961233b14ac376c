"""Matrices that every rank stores whole and reuses: owners send the transforms that they refresh."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..engine.bucket import Bucket, grouped
from ..engine.orthogonalize import Direction, Update
from ..engine.plan import Plan, kept_dtype
from ..report.counters import HIT
from .placement import cache_of
from .rank_group import RankGroup
from .shared import Member, Placements, Shared, chunks_of, in_rounds


class Replicated(Shared):
    """Every rank updates momentum from all gradients and applies all transforms, an owner also its own.

    Batches are the same on all ranks, so that copies of a parameter stay equal bit for bit. All transforms
    have one dtype.
    """

    def __init__(
        self, plan: Plan, rank_group: RankGroup, placements: Placements, members: list[Member]
    ) -> None:
        buckets = plan.buckets(chunks_of(plan, members))
        super().__init__(plan, rank_group, placements, members, buckets)
        self.together = grouped(buckets)
        self.transform_dtype = kept_dtype(self.matrices[0])

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """First the matrices that are due, with their new transforms; then those that are reused."""
        self.begin()
        due = []
        for bucket in self.parts:
            for row, x in enumerate(bucket.matrices):
                if outcomes[x.number] != HIT:
                    n, m = sorted((bucket.rows, bucket.cols))
                    taken = 4 * n * (m + 3 * n) * bucket.precision.itemsize  # update, transform and messages
                    due.append(((bucket, row), self.placements[x.number].owner, taken / bucket.limit))
        # A step with nothing due has a round too, so that all steps issue the same collectives.
        for members in in_rounds(due) or [[]]:
            yield from self._refreshed(members, outcomes)
        for buckets in self.together:
            hits = [
                [row for row, x in enumerate(one.matrices) if outcomes[x.number] == HIT] for one in buckets
            ]
            if any(hits):
                yield [
                    self._update(bucket, rows, outcomes, place)
                    for place, (bucket, rows) in enumerate(zip(buckets, hits, strict=True))
                    if rows
                ]

    def scatter(self, direction: Direction) -> None:
        """Every rank applies every direction."""
        self.note(direction)
        self.step_down(direction)

    def _update(self, bucket: Bucket, rows: list[int], outcomes: list[int], place: int = 0) -> Update:
        return self.update(bucket, rows, outcomes, *self.take_in(bucket, rows, place))

    def _refreshed(self, due: list[tuple[Bucket, int]], outcomes: list[int]) -> Iterator[list[Update]]:
        """The updates of these rows of buckets, with the transforms that their owners have made.

        An owner keeps its own updates until all transforms have arrived; only then it makes those of others.
        """
        group, me = self.rank_group, self.rank_group.rank
        batches: list[dict[Bucket, list[int]]] = [{} for _ in range(group.size)]
        for bucket, row in due:
            owner = self.placements[bucket.matrices[row].number].owner
            batches[owner].setdefault(bucket, []).append(row)
        sizes = [
            [len(rows) * min(bucket.rows, bucket.cols) ** 2 for bucket, rows in some.items()]
            for some in batches
        ]
        made = torch.empty(sum(sizes[me]), dtype=self.transform_dtype, device=self.device)
        own = []
        for (bucket, rows), transforms in zip(batches[me].items(), made.split(sizes[me]), strict=True):
            update = self._update(bucket, rows, outcomes)
            update.U = update.U.clone()  # the workspace is used again
            cache = cache_of(bucket.orthogonalize)
            assert cache is not None  # or the matrices would not be replicated
            Q = cache.fresh.transform(update.U * update.scale, self.plan.workspace)
            transforms.view(Q.shape).copy_(Q)
            own.append(update)
        gathered = group.all_gather("transforms", made, list(map(sum, sizes)))
        for rank in sorted(range(group.size), key=lambda rank: rank != me):  # its own first
            parts = gathered[rank].split(sizes[rank])
            for (bucket, rows), transforms in zip(batches[rank].items(), parts, strict=True):
                update = own.pop(0) if rank == me else self._update(bucket, rows, outcomes)
                n = min(bucket.rows, bucket.cols)
                update.solved = transforms.view(-1, n, n).to(bucket.precision)
                yield [update]
                del update  # not kept while the next one is made
