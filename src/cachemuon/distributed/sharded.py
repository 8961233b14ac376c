"""Matrices that their owners orthogonalize: updates go to the owners, directions come back.

Which matrices are exchanged together, and what each rank sends of them, is planned once, from placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from math import prod

import torch
from torch import Tensor

from ..engine.bucket import Bucket, grouped
from ..engine.orthogonalize import Direction, Update
from ..engine.plan import Plan
from ..engine.step import step_down
from ..newton_schulz.normalize import computed_in, peak_of
from ..newton_schulz.workspace import memory_limit
from .placement import Placement, ShardSlice
from .rank_group import RankGroup
from .shared import Member, Placements, Shared, chunks_of, in_rounds

Views = dict[int, list[tuple[ShardSlice, Tensor]]]
"""Slices of matrices, by their number, and where they lie in a message."""


class Message:
    """Slices of matrices that one rank sends to all, or receives from all, in one tensor, rank by rank.

    `slices` are the number of a matrix, the rank that its slice is for or from, and the slice. Sender and
    receiver list matrices in one order, and so agree on where each slice lies.
    """

    def __init__(self, ranks: int, slices: list[tuple[int, int, ShardSlice]]) -> None:
        self._slices = sorted(slices, key=lambda entry: entry[1])
        self.sizes = [0] * ranks  # elements for each rank, or from it
        for _, rank, part in slices:
            self.sizes[rank] += part.size

    def views(self, message: Tensor) -> Views:
        """Where each slice lies in the message."""
        found: Views = {}
        parts = message.split([part.size for *_, part in self._slices])
        for (number, _, part), own in zip(self._slices, parts, strict=True):
            found.setdefault(number, []).append((part, own.view(part.shape)))
        return found


class Round:
    """Matrices that are exchanged together.

    `pieces` are buckets of what this rank stores of them; `owned` buckets of those that it owns, in lists
    that are orthogonalized together. Updates go `to_owners` and arrive `from_ranks`; directions go `to_ranks`
    and arrive `from_owners`. Where each owner stores all of its matrices, as `copies`, no update is sent.
    """

    def __init__(
        self, members: list[Member], owned: list[Bucket], pieces: list[Bucket], placements: Placements
    ) -> None:
        places = [(x.number, placements[x.number]) for _, x in members]
        updates = [
            (k, rank, place.owner, place.slices[rank]) for k, place in places for rank in place.senders
        ]
        back = [(k, place.owner, rank, part) for k, place in places for rank, part in place.slices.items()]
        self.owned, self.pieces = grouped(owned), pieces
        self.copies = all(sender == owner for _, sender, owner, _ in updates)
        self.to_owners, self.from_ranks = _messages(places[0][1], updates)
        self.to_ranks, self.from_owners = _messages(places[0][1], back)


def _messages(place: Placement, transfers: list[tuple[int, int, int, ShardSlice]]) -> tuple[Message, Message]:
    """What a rank sends, and what it receives, of slices with their matrix, sender and receiver."""
    sent = [(k, receiver, part) for k, sender, receiver, part in transfers if sender == place.rank]
    received = [(k, sender, part) for k, sender, receiver, part in transfers if receiver == place.rank]
    return Message(len(place.ranks), sent), Message(len(place.ranks), received)


def plan_rounds(
    plan: Plan, members: list[Member], placements: Placements
) -> tuple[list[list[Bucket]], list[Round]]:
    """Buckets of matrices that only this rank has any part of, and the rounds of all others.

    An owner gives a round an eighth of `max_workspace_bytes`: its messages need room too, and the next round.
    """
    alone, moving = [], []
    for kind, x in members:
        place, dtype = placements[x.number], x.param.dtype
        if len(place.slices) == 1:  # that rank has all of the matrix, and so owns it
            alone.append((kind, x))
            continue
        limit = memory_limit(x.group["max_workspace_bytes"], x.param.device.type)
        taken = prod(x.layout.views[x.index].shape) * (dtype.itemsize + 2 * computed_in(dtype).itemsize)
        moving.append(((kind, x), place.owner, 8 * taken / limit))
    rounds = in_rounds(moving)
    chunks = [chunks_of(plan, _here(alone, placements))]
    for together in rounds:
        own = [(kind, x) for kind, x in together if placements[x.number].owned]
        chunks += [chunks_of(plan, own, 2), chunks_of(plan, _here(together, placements), 2, placements)]
    made = iter(plan.buckets([*chain(*chunks)]))  # in one call, so that one upload fills all of them
    staying, *buckets = [list(islice(made, len(some))) for some in chunks]
    return grouped(staying), [
        Round(together, owned, pieces, placements)
        for together, owned, pieces in zip(rounds, buckets[::2], buckets[1::2], strict=True)
    ]


def _here(members: list[Member], placements: Placements) -> list[Member]:
    """Matrices that this rank stores parts of, at their places in what it stores of the parameter."""
    slices = [(kind, x, placements[x.number].here) for kind, x in members]
    return [(kind, replace(x, place=part.place)) for kind, x, part in slices if part is not None]


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
        super().__init__(plan, rank_group, placements, members, [*chain(*together)], pieces)
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
        self.note(direction)
        if not self._outgoing:
            self.step_down(direction)
            return
        bucket, pairs = direction.update.bucket, []
        for row, step in zip(direction.update.rows, bucket.wide(direction.D).unbind(0), strict=True):
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
