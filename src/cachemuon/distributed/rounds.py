"""Which matrices are exchanged together, and what each rank sends: planned once, from placements alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.bucket import Bucket, Matrix
from ..engine.kinds import Kind
from ..engine.local import grouped
from ..engine.plan import Chunk, Plan
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import memory_limit
from .layout import ShardSlice, in_rounds
from .placement import Placement

Member = tuple[Kind, Matrix]
Placements = dict[int, Placement]


class Parcel(NamedTuple):
    """A slice of a matrix in a message, where it begins at an element."""

    part: ShardSlice
    begin: int

    def of(self, message: Tensor) -> Tensor:
        """Its elements, in the shape of the slice."""
        return message[self.begin : self.begin + self.part.size].view(self.part.shape)


@dataclass(frozen=True)
class Message:
    """What one rank sends to all, or receives from all.

    `parcels` are those of each matrix, by its number; `sizes` the elements for each rank, or from it.
    """

    parcels: dict[int, list[Parcel]]
    sizes: list[int]

    @classmethod
    def of(cls, ranks: int, slices: Iterable[tuple[Matrix, int, ShardSlice]]) -> Message:
        """From each matrix, the rank that its slice is for or from, and the slice.

        Sender and receiver list matrices in one order, and so agree on where each slice begins.
        """
        parcels: dict[int, list[Parcel]] = {}
        sizes = [0] * ranks
        begin = 0
        for x, rank, part in sorted(slices, key=lambda one: one[1]):  # of one rank in their order
            parcels.setdefault(x.number, []).append(Parcel(part, begin))
            sizes[rank] += part.size
            begin += part.size
        return cls(parcels, sizes)

    @property
    def size(self) -> int:
        """Its number of elements."""
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Round:
    """Matrices that are exchanged together.

    `pieces` are buckets of what this rank has of them; `owned` buckets of those that it owns, in lists that
    are worked on together. Updates go `to_owners` and arrive `from_ranks`; directions go `to_ranks` and
    arrive `from_owners`. Where every owner has its matrices whole, as `copies`, no update is sent.
    """

    pieces: list[Bucket]
    owned: list[list[Bucket]]
    dtype: torch.dtype
    copies: bool
    to_owners: Message
    from_ranks: Message
    to_ranks: Message
    from_owners: Message


class Rounds(NamedTuple):
    """The matrices of a rank group in an `order` that all its ranks know.

    `staying` are buckets of matrices that only this rank has any part of, in lists that are worked on
    together.
    """

    order: list[Matrix]
    staying: list[list[Bucket]]
    rounds: list[Round]


def plan_rounds(plan: Plan, members: list[Member], placements: Placements) -> Rounds:
    """The rounds of matrices that one rank group shares."""
    alone = [(kind, x) for kind, x in members if placements[x.number].only_on_owner]
    moving = [(kind, x) for kind, x in members if not placements[x.number].only_on_owner]
    together = _together(moving, placements)
    chunks = [chunks_of(plan, _here(alone, placements))]
    for one in together:
        owned = [(kind, x) for kind, x in one if placements[x.number].owned]
        chunks += [chunks_of(plan, owned, 2), _pieces(plan, one, placements)]
    made = iter(plan.buckets([chunk for some in chunks for chunk in some]))  # all at once: see there
    staying, *buckets = [list(islice(made, len(some))) for some in chunks]
    rounds = [
        _round(one, owned, pieces, placements)
        for one, owned, pieces in zip(together, buckets[::2], buckets[1::2], strict=True)
    ]
    order = [x for one in together for _, x in one] + [x for _, x in alone]
    return Rounds(order, grouped(staying), rounds)


def _together(members: list[Member], placements: Placements) -> list[list[Member]]:
    """Matrices of one dtype, as many at a time as their owners have room for.

    An owner gives them an eighth of what a step may take: the messages need room too, and the next round.
    """
    by_dtype: dict[torch.dtype, list[Member]] = {}
    for kind, x in members:
        by_dtype.setdefault(x.param.dtype, []).append((kind, x))
    found = []
    for dtype, alike in by_dtype.items():
        itemsize = dtype.itemsize + 2 * computed_in(dtype).itemsize
        owners, shares = [], []
        for _, x in alike:
            room = memory_limit(x.group["max_workspace_bytes"], x.param.device.type) / 8
            owners.append(placements[x.number].owner)
            shares.append(prod(x.layout.views[x.index].shape) * itemsize / room)
        found += in_rounds(alike, owners, shares)
    return found


def _here(members: list[Member], placements: Placements) -> list[Member]:
    """Matrices that this rank has parts of, at their places in its part of the parameter."""
    slices = [(kind, x, placements[x.number].here) for kind, x in members]
    return [(kind, replace(x, place=part.place)) for kind, x, part in slices if part is not None]


def chunks_of(plan: Plan, members: list[Member], share: int = 1) -> list[Chunk]:
    """Matrices of any kinds in chunks (`Plan.chunks`)."""
    by_kind: dict[Kind, list[Matrix]] = {}
    for kind, x in members:
        by_kind.setdefault(kind, []).append(x)
    return [chunk for kind, matrices in by_kind.items() for chunk in plan.chunks(kind, matrices, share)]


def _pieces(plan: Plan, members: list[Member], placements: Placements) -> list[Chunk]:
    """What this rank has of matrices, in chunks of one shape."""
    alike: dict[tuple[Kind, tuple[int, int]], list[Matrix]] = {}
    for kind, x in _here(members, placements):
        part = placements[x.number].slices[placements[x.number].rank]
        alike.setdefault((kind, part.sides), []).append(x)
    return [
        chunk
        for (kind, sides), matrices in alike.items()
        for chunk in plan.chunks(kind, matrices, 2, piece=sides)
    ]


def _round(members: list[Member], owned: list[Bucket], pieces: list[Bucket], placements: Placements) -> Round:
    to_owners, from_ranks, to_ranks, from_owners = [], [], [], []
    for _, x in members:
        place = placements[x.number]
        if place.here is not None:
            from_owners.append((x, place.owner, place.here))
            if place.rank in place.senders:
                to_owners.append((x, place.owner, place.here))
        if place.owned:
            to_ranks += [(x, rank, part) for rank, part in place.slices.items()]
            from_ranks += [(x, rank, place.slices[rank]) for rank in sorted(place.senders)]
    places = [placements[x.number] for _, x in members]
    copies = all(place.senders == {place.owner} for place in places)
    number = len(places[0].ranks)
    messages = (Message.of(number, some) for some in (to_owners, from_ranks, to_ranks, from_owners))
    return Round(pieces, grouped(owned), members[0][1].param.dtype, copies, *messages)
