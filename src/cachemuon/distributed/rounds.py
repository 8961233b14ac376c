"""Which matrices are exchanged together, and what each rank sends of them: planned once, from placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from math import prod
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..engine.bucket import Bucket, Matrix
from ..engine.kinds import Kind
from ..engine.local import grouped
from ..engine.plan import Chunk, Plan
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import memory_limit
from .placement import ShardSlice
from .shared import Placements

T = TypeVar("T")
Member = tuple[Kind, Matrix]
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


class Round(NamedTuple):
    """Matrices that are exchanged together.

    `pieces` are buckets of what this rank stores of them; `owned` buckets of those that it owns, in lists
    that are orthogonalized together. Updates go `to_owners` and arrive `from_ranks`; directions go `to_ranks`
    and arrive `from_owners`. Where each owner stores all of its matrices, as `copies`, no update is sent.
    """

    pieces: list[Bucket]
    owned: list[list[Bucket]]
    copies: bool
    to_owners: Message
    from_ranks: Message
    to_ranks: Message
    from_owners: Message


def plan_rounds(
    plan: Plan, members: list[Member], placements: Placements
) -> tuple[list[list[Bucket]], list[Round]]:
    """Buckets of matrices that only this rank has any part of, and the rounds of all others.

    An owner gives a round an eighth of `max_workspace_bytes`: its messages need room too, and the next round.
    """
    alone = [(kind, x) for kind, x in members if placements[x.number].only_on_owner]
    moving = [(kind, x) for kind, x in members if not placements[x.number].only_on_owner]
    owners, shares = [], []
    for _, x in moving:
        dtype, limit = x.param.dtype, memory_limit(x.group["max_workspace_bytes"], x.param.device.type)
        taken = prod(x.layout.views[x.index].shape) * (dtype.itemsize + 2 * computed_in(dtype).itemsize)
        owners.append(placements[x.number].owner)
        shares.append(8 * taken / limit)
    rounds = in_rounds(moving, owners, shares)
    chunks = [chunks_of(plan, _here(alone, placements))]
    for together in rounds:
        own = [(kind, x) for kind, x in together if placements[x.number].owned]
        chunks += [chunks_of(plan, own, 2), chunks_of(plan, _here(together, placements), 2, placements)]
    made = iter(plan.buckets([*chain(*chunks)]))  # in one call, so that one upload fills all of them
    staying, *buckets = [list(islice(made, len(some))) for some in chunks]
    return grouped(staying), [
        _round(together, owned, pieces, placements)
        for together, owned, pieces in zip(rounds, buckets[::2], buckets[1::2], strict=True)
    ]


def _round(members: list[Member], owned: list[Bucket], pieces: list[Bucket], placements: Placements) -> Round:
    to_owners, from_ranks, to_ranks, from_owners = [], [], [], []
    copies = True
    for _, x in members:
        place = placements[x.number]
        copies = copies and place.senders == {place.owner}
        if place.here is not None:
            from_owners.append((x.number, place.owner, place.here))
            if place.rank in place.senders:
                to_owners.append((x.number, place.owner, place.here))
        if place.owned:
            to_ranks += [(x.number, rank, part) for rank, part in place.slices.items()]
            from_ranks += [(x.number, rank, place.slices[rank]) for rank in sorted(place.senders)]
    messages = [Message(len(place.ranks), some) for some in (to_owners, from_ranks, to_ranks, from_owners)]
    return Round(pieces, grouped(owned), copies, *messages)


def _here(members: list[Member], placements: Placements) -> list[Member]:
    """Matrices that this rank stores parts of, at their places in what it stores of the parameter."""
    slices = [(kind, x, placements[x.number].here) for kind, x in members]
    return [(kind, replace(x, place=part.place)) for kind, x, part in slices if part is not None]


def chunks_of(
    plan: Plan, members: list[Member], share: int = 1, pieces: Placements | None = None
) -> list[Chunk]:
    """Matrices in chunks of one kind (`Plan.chunks`); with `pieces` of one shape of what this rank stores."""
    alike: dict[tuple[Kind, tuple[int, int] | None], list[Matrix]] = {}
    for kind, x in members:
        part = None if pieces is None else pieces[x.number].here
        sides = None if part is None else (part.shape[0], prod(part.shape[1:]))
        alike.setdefault((kind, sides), []).append(x)
    return [
        chunk
        for (kind, sides), matrices in alike.items()
        for chunk in plan.chunks(kind, matrices, share, piece=sides)
    ]


def in_rounds(members: Sequence[T], owners: Sequence[int], shares: Sequence[float]) -> list[list[T]]:
    """As many members at a time as their owners have room for, with work for every owner in each round.

    `shares` are the parts of its owner's room that each takes; one that takes more is a round by itself.

    >>> in_rounds("abcde", [0, 0, 0, 1, 1], [0.5] * 5)
    [['a', 'b', 'd', 'e'], ['c']]
    """
    rounds: list[list[T]] = []
    last: dict[int, tuple[int, float]] = {}  # of each owner: its last round, and what is taken of its room
    for member, owner, share in zip(members, owners, shares, strict=True):
        number, taken = last.get(owner, (0, 0.0))
        if taken and taken + share > 1:
            number, taken = number + 1, 0.0
        last[owner] = number, taken + share
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(member)
    return rounds
