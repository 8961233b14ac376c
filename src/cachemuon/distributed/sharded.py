"""Matrices that their owners orthogonalize: updates go to the owners, directions come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..engine.local import step_down
from ..engine.orthogonalize import Direction, Update
from ..engine.plan import Plan
from ..newton_schulz.normalize import peak_of
from .rank_group import RankGroup
from .rounds import Member, Round, Views, plan_rounds
from .shared import Placements, Shared


class Sharded(Shared):
    """Owners orthogonalize round by round. A matrix that only its owner has any part of stays there.

    While an owner works on a round, the updates of the next round and the directions of the last one are
    under way.
    """

    def __init__(
        self, plan: Plan, rank_group: RankGroup, placements: Placements, members: list[Member]
    ) -> None:
        self.staying, self.rounds = plan_rounds(plan, members, placements)
        together = [*self.staying, *chain(*(one.owned for one in self.rounds))]
        pieces = [bucket for one in self.rounds for bucket in one.pieces]
        super().__init__(plan, rank_group, placements, [x for _, x in members], [*chain(*together)], pieces)
        self._outgoing: Views = {}  # where directions are written

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """What this rank owns: first what stays here, then what arrives, round by round."""
        self.begin()
        for buckets in self.staying:
            yield [
                self.update(bucket, _rows(bucket), outcomes, *self.take_in(bucket, _rows(bucket), place))
                for place, bucket in enumerate(buckets)
            ]
        arriving = [self._send_updates(one) for one in self.rounds[:1]]
        leaving: list[Callable[[], None]] = []
        for number, one in enumerate(self.rounds):
            updates = one.from_ranks.views(arriving.pop()())
            arriving += [self._send_updates(following) for following in self.rounds[number + 1 : number + 2]]
            # Zeros, since an orthogonalizer may leave out matrices whose gradient is bad.
            directions = torch.zeros(sum(one.to_ranks.sizes), dtype=self.precision, device=self.device)
            self._outgoing = one.to_ranks.views(directions)
            for buckets in one.owned:
                yield [self._received(bucket, updates, outcomes) for bucket in buckets]
            while leaving:
                leaving.pop()()  # popped, so that its message is freed before the next one is made
            leaving.append(self._send_directions(one, directions))
        while leaving:
            leaving.pop()()
        self._outgoing = {}

    def scatter(self, direction: Direction) -> None:
        """Directions of matrices that stay here are applied; others are written to the message."""
        self.readings.note(direction)
        if not self._outgoing:
            self.step_down(direction)
            return
        bucket, pairs = direction.update.bucket, []
        for row, step in zip(direction.bucket_rows, bucket.wide(direction.D).unbind(0), strict=True):
            x = bucket.matrices[row]
            whole = step.reshape(x.layout.views[x.index].shape)
            for part, own in self._outgoing[x.number]:
                pairs += [(target, source) for source, target in part.views(whole, own)]
        _copy(pairs)

    def _send_updates(self, one: Round) -> Callable[[], Tensor]:
        """Update the momentum of this rank's pieces, and send their updates to the owners.

        Returns a function that waits for the updates that this rank receives.
        """
        outgoing = torch.empty(sum(one.to_owners.sizes), dtype=self.dtype, device=self.device)
        views = one.to_owners.views(outgoing)
        for bucket in one.pieces:
            U, _ = self.take_in(bucket, _rows(bucket))
            pieces = zip(bucket.matrices, U.unbind(0), strict=True)
            _copy([(own, piece.view(own.shape)) for x, piece in pieces for _, own in views.get(x.number, ())])
        if one.copies:
            return lambda: outgoing
        return self.rank_group.all_to_all("updates", outgoing, one.to_owners.sizes, one.from_ranks.sizes)

    def _received(self, bucket: Bucket, updates: Views, outcomes: list[int]) -> Update:
        """The updates of whole matrices, put together from what their ranks have sent."""
        U = torch.empty(len(bucket.matrices), bucket.rows, bucket.cols, dtype=self.dtype, device=self.device)
        pairs = []
        for x, whole in zip(bucket.matrices, U.unbind(0), strict=True):
            for part, own in updates[x.number]:
                pairs += part.views(whole.view(x.layout.views[x.index].shape), own)
        _copy(pairs)
        U = U.to(bucket.precision)
        return self.update(bucket, _rows(bucket), outcomes, U, peak_of(U))

    def _send_directions(self, one: Round, outgoing: Tensor) -> Callable[[], None]:
        """Send directions to all ranks that store a part. Returns a function that waits for those that this
        rank receives, and applies them.
        """
        wait = self.rank_group.all_to_all("directions", outgoing, one.to_ranks.sizes, one.from_owners.sizes)

        def apply() -> None:
            views = one.from_owners.views(wait())
            for bucket in one.pieces:
                steps = [own for x in bucket.matrices for _, own in views[x.number]]
                step_down(bucket, _rows(bucket), steps, self.good[bucket])

        return apply


def _rows(bucket: Bucket) -> list[int]:
    return list(range(len(bucket.matrices)))


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
