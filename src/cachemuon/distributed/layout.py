"""What each rank has of a matrix, and which rank owns it: pure functions of shapes, placements and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..routing.layout import MatrixView

T = TypeVar("T")

IndexRanges = list[range]
"""Indices along one dimension, in ascending order."""


def take(ranges: IndexRanges, begin: int, end: int) -> IndexRanges:
    """The entries number begin, ..., end - 1 of a list of indices.

    >>> take([range(0, 3), range(7, 9)], 2, 5)
    [range(2, 3), range(7, 9)]
    """
    found, before = [], 0
    for one in ranges:
        part = one[max(begin - before, 0) : max(end - before, 0)]
        before += len(one)
        if len(part):
            found.append(part)
    return found


def chunk(ranges: IndexRanges, number: int, place: int) -> IndexRanges:
    """One of `number` chunks, as torch.chunk makes them; chunks that torch leaves out are empty.

    >>> [chunk([range(7)], 3, place) for place in range(3)], chunk([range(2)], 4, 3)
    ([[range(0, 3)], [range(3, 6)], [range(6, 7)]], [])
    """
    size = -(-sum(map(len, ranges)) // number)
    return take(ranges, place * size, (place + 1) * size)


def within(ranges: IndexRanges, begin: int, end: int) -> tuple[int, IndexRanges]:
    """The indices from `begin` up to `end`, counted from `begin`; and how many indices are below `begin`.

    >>> within([range(0, 3), range(7, 9)], 2, 8)
    (2, [range(0, 1), range(5, 6)])
    """
    below = sum(max(min(one.stop, begin) - one.start, 0) for one in ranges)
    parts = [range(max(one.start, begin) - begin, min(one.stop, end) - begin) for one in ranges]
    return below, [part for part in parts if len(part)]


def local_indices(
    length: int, dim: int, placements: Sequence[Any], mesh: Sequence[int], where: Sequence[int]
) -> IndexRanges:
    """The indices along one dimension of a DTensor that the rank at coordinates `where` of a mesh stores."""
    ranges = [range(length)]
    for placement, number, place in zip(placements, mesh, where, strict=True):
        if getattr(placement, "dim", None) != dim:
            continue
        blocks = getattr(placement, "split_factor", 1)  # FSDP over tensor parallel shards within its blocks
        ranges = [
            one for block in range(blocks) for one in chunk(chunk(ranges, blocks, block), number, place)
        ]
    merged: IndexRanges = []
    for one in ranges:
        if merged and merged[-1].stop == one.start:
            merged[-1] = range(merged[-1].start, one.stop)
        else:
            merged.append(one)
    return [one for one in merged if len(one)]


Region = tuple[slice, ...]


class ShardSlice(NamedTuple):
    """What one rank stores of a matrix: a tensor of `shape`, at `place` of the rank's part of the parameter.

    Each pair of `regions` is a region of that tensor, and the region of the whole matrix that it is.
    """

    place: tuple[int | slice, ...]
    shape: tuple[int, ...]
    regions: tuple[tuple[Region, Region], ...]

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Its shape, flattened to two dimensions."""
        return self.shape[0], prod(self.shape[1:])

    @property
    def covers(self) -> Hashable:
        """Which elements of the matrix it has."""
        return tuple((side.start, side.stop) for _, there in self.regions for side in there)

    @classmethod
    def of(cls, ranges: Sequence[IndexRanges], view: MatrixView) -> ShardSlice | None:
        """From the indices that a rank stores along each dimension of a parameter; None if it has nothing."""
        place: list[int | slice] = []
        lead = len(view.stack_index)
        for index, along in zip(view.stack_index, ranges, strict=False):
            before, inside = within(along, index, index + 1)
            if not inside:
                return None
            place.append(before)
        rest = list(ranges[lead:])
        before, rest[view.dim] = within(rest[view.dim], view.begin, view.end)
        part = cls.whole(rest)
        if part is None:
            return None
        window = slice(before, before + part.shape[view.dim])
        return part._replace(place=(*place, *[slice(None)] * view.dim, window))

    @classmethod
    def whole(cls, ranges: Sequence[IndexRanges]) -> ShardSlice | None:
        """The same for a parameter that is not read as matrices."""
        shape = tuple(sum(map(len, along)) for along in ranges)
        return cls((), shape, tuple(_regions(ranges))) if prod(shape) else None

    def views(self, whole: Tensor, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of a whole matrix and of this slice of it, which have the same elements."""
        return [(whole[there], part.view(self.shape)[here]) for here, there in self.regions]


def _regions(rest: Sequence[IndexRanges]) -> Iterator[tuple[Region, Region]]:
    pairs = []
    for along in rest:
        before, here = 0, []
        for one in along:
            here.append((slice(before, before + len(one)), slice(one.start, one.stop)))
            before += len(one)
        pairs.append(here)
    for chosen in product(*pairs):
        yield tuple(one for one, _ in chosen), tuple(one for _, one in chosen)


class OwnerCost(NamedTuple):
    """What a matrix costs its owner: FLOPs at every step, and those that a refresh adds.

    Refreshes fall on the steps of `refresh_slot` within a life; None where no refresh is scheduled.
    """

    step: int
    refresh: int
    refresh_slot: int | None = None


def assign_owners(costs: Sequence[OwnerCost], choices: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The owner of each matrix, one of its choices, so that all ranks have about the same work.

    Refreshes of one slot are distributed first, the most expensive ones before the others; then the work that
    is the same at every step.

    >>> costs = [OwnerCost(1, 9, 0), OwnerCost(1, 9, 0), OwnerCost(1, 9, 1), OwnerCost(5, 0)]
    >>> assign_owners(costs, [(0, 1)] * 4, 2)
    [0, 1, 0, 1]
    """
    load, refreshes = [0] * ranks, Counter[tuple[int, int]]()
    found = [0] * len(costs)

    def order(number: int) -> tuple[int, int, int, int]:
        cost = costs[number]
        late = (1, 0) if cost.refresh_slot is None else (0, cost.refresh_slot)
        return (*late, -cost.refresh - cost.step, number)

    life = 1 + max((cost.refresh_slot for cost in costs if cost.refresh_slot is not None), default=0)
    for number in sorted(range(len(costs)), key=order):
        cost, slot = costs[number], costs[number].refresh_slot
        rank = min(choices[number], key=lambda r: (refreshes[r, -1 if slot is None else slot], load[r], r))
        if slot is not None:
            refreshes[rank, slot] += cost.refresh
        load[rank] += cost.step * life + cost.refresh
        found[number] = rank
    return found


def in_rounds(members: Sequence[T], owners: Sequence[int], shares: Sequence[float]) -> list[list[T]]:
    """As many members at a time as their owners have room for, with work for every owner in each round.

    `shares` are the parts of its owner's room that each takes; one that takes more is a round by itself.

    >>> in_rounds("abcde", [0, 0, 0, 1, 1], [0.5] * 5)
    [['a', 'b', 'd', 'e'], ['c']]
    """
    turns = Counter[int]()
    order: list[tuple[int, int]] = []
    for place, owner in enumerate(owners):
        order.append((turns[owner], place))
        turns[owner] += 1
    rounds: list[list[int]] = []
    room: dict[int, float] = {}
    for _, place in sorted(order):
        owner = owners[place]
        if not rounds or (owner in room and room[owner] < shares[place]):
            rounds.append([])
            room = {}
        rounds[-1].append(place)
        room[owner] = room.get(owner, 1.0) - shares[place]
    return [[members[place] for place in sorted(one)] for one in rounds]
