"""Matrices that their owners orthogonalize: updates go to the owners, directions come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..engine.local import step_down
from ..engine.orthogonalize import Direction, Update
from ..engine.plan import Plan
from ..newton_schulz.normalize import computed_in, peak_of
from .rank_group import RankGroup
from .rounds import Member, Message, Placements, Round, plan_rounds
from .shared import Shared


class Sharded(Shared):
    """Owners orthogonalize round by round. A matrix that only its owner has any part of stays there.

    While an owner works on a round, updates of the next round and directions of the last one are under way.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        members: list[Member],
        placements: Placements,
    ) -> None:
        order, self.staying, self.rounds = plan_rounds(plan, members, placements)
        together = [*self.staying, *(buckets for one in self.rounds for buckets in one.owned)]
        pieces = [bucket for one in self.rounds for bucket in one.pieces]
        super().__init__(
            plan,
            rank_group,
            order,
            placements,
            [bucket for buckets in together for bucket in buckets],
            pieces,
        )
        self._outgoing: tuple[Message, Tensor] | None = None  # where the directions of a round are written

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
            message = arriving.pop()()
            arriving += [self._send_updates(following) for following in self.rounds[number + 1 : number + 2]]
            # Zeros, since an orthogonalizer may leave out matrices whose gradient is bad.
            directions = torch.zeros(one.to_ranks.size, dtype=computed_in(one.dtype), device=self.device)
            self._outgoing = one.to_ranks, directions
            for buckets in one.owned:
                yield [self._received(bucket, one.from_ranks, message, outcomes) for bucket in buckets]
            while leaving:
                leaving.pop()()  # nothing else refers to its messages
            leaving.append(self._send_directions(one, directions))
        while leaving:
            leaving.pop()()
        self._outgoing = None

    def scatter(self, direction: Direction) -> None:
        """Directions of matrices that stay here are applied; others are written to the message."""
        self.readings.note(direction)
        if self._outgoing is None:
            self.step_down(direction)
            return
        sent, message = self._outgoing
        bucket, pairs = direction.update.bucket, []
        for row, step in zip(direction.bucket_rows, bucket.wide(direction.D).unbind(0), strict=True):
            x = bucket.matrices[row]
            whole = step.reshape(x.layout.views[x.index].shape)
            for parcel in sent.parcels.get(x.number, ()):
                pairs += [(part, of_whole) for of_whole, part in parcel.part.views(whole, parcel.of(message))]
        _copy(pairs)

    def _send_updates(self, one: Round) -> Callable[[], Tensor]:
        """The momentum of this rank's pieces takes in their gradients, and updates leave for the owners.

        Returns what waits for those that arrive here.
        """
        sent = one.to_owners
        outgoing = torch.empty(sent.size, dtype=one.dtype, device=self.device)
        for bucket in one.pieces:
            U, _ = self.take_in(bucket, _rows(bucket))
            _copy(
                [
                    (parcel.of(outgoing), piece.view(parcel.part.shape))
                    for x, piece in zip(bucket.matrices, U.unbind(0), strict=True)
                    for parcel in sent.parcels.get(x.number, ())
                ]
            )
        if one.copies:
            return lambda: outgoing
        return self.rank_group.all_to_all("updates", outgoing, sent.sizes, one.from_ranks.sizes).wait

    def _received(self, bucket: Bucket, received: Message, message: Tensor, outcomes: list[int]) -> Update:
        """The updates of whole matrices, put together from what their ranks have sent."""
        U = message.new_empty(len(bucket.matrices), bucket.rows, bucket.cols)
        pairs = []
        for x, whole in zip(bucket.matrices, U.unbind(0), strict=True):
            natural = whole.view(x.layout.views[x.index].shape)
            for parcel in received.parcels[x.number]:
                pairs += parcel.part.views(natural, parcel.of(message))
        _copy(pairs)
        U = U.to(bucket.precision)
        return self.update(bucket, _rows(bucket), outcomes, U, peak_of(U))

    def _send_directions(self, one: Round, outgoing: Tensor) -> Callable[[], None]:
        """Directions leave for all ranks that have a part. Returns what waits for those that arrive here, and
        applies them.
        """
        coming = one.from_owners
        arrival = self.rank_group.all_to_all("directions", outgoing, one.to_ranks.sizes, coming.sizes)

        def apply() -> None:
            message = arrival.wait()
            for bucket in one.pieces:
                steps = [coming.parcels[x.number][0].of(message) for x in bucket.matrices]
                step_down(bucket, _rows(bucket), steps, self.good[bucket])

        return apply


def _rows(bucket: Bucket) -> list[int]:
    return list(range(len(bucket.matrices)))


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
