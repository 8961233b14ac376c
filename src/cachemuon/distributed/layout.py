"""What each rank has of a matrix, and which rank owns it: pure functions of shapes, placements and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..routing.layout import Piece

Runs = list[range]


def cut(runs: Runs, begin: int, end: int) -> Runs:
    """Those of a list's places that lie at begin, ..., end - 1 of it.

    >>> cut([range(0, 3), range(7, 9)], 2, 5)
    [range(2, 3), range(7, 9)]
    """
    found, before = [], 0
    for run in runs:
        part = run[max(begin - before, 0) : max(end - before, 0)]
        before += len(run)
        if len(part):
            found.append(part)
    return found


def chunk(runs: Runs, number: int, place: int) -> Runs:
    """One of so many chunks, as torch.chunk makes them, where missing ones are empty.

    >>> [chunk([range(7)], 3, place) for place in range(3)], chunk([range(2)], 4, 3)
    ([[range(0, 3)], [range(3, 6)], [range(6, 7)]], [])
    """
    size = -(-sum(map(len, runs)) // number)
    return cut(runs, place * size, (place + 1) * size)


def within(runs: Runs, begin: int, end: int) -> tuple[int, Runs]:
    """Those of the places that are at least `begin` and below `end`, counted from there; and how many are
    below that.

    >>> within([range(0, 3), range(7, 9)], 2, 8)
    (2, [range(0, 1), range(5, 6)])
    """
    below = sum(max(min(run.stop, begin) - run.start, 0) for run in runs)
    parts = [range(max(run.start, begin) - begin, min(run.stop, end) - begin) for run in runs]
    return below, [part for part in parts if len(part)]


def held(length: int, dim: int, placements: Sequence[Any], mesh: Sequence[int], where: Sequence[int]) -> Runs:
    """The indices along one dimension that the rank at `where` in a mesh holds of a DTensor."""
    runs = [range(length)]
    for placement, number, place in zip(placements, mesh, where, strict=True):
        if getattr(placement, "dim", None) != dim:
            continue
        blocks = getattr(placement, "split_factor", 1)  # FSDP over tensor parallel shards within its blocks
        runs = [run for block in range(blocks) for run in chunk(chunk(runs, blocks, block), number, place)]
    merged: Runs = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return [run for run in merged if len(run)]


Box = tuple[slice, ...]


class Part(NamedTuple):
    """What one rank has of a matrix: at `place` of what it has of the parameter a tensor of that shape; and
    which boxes of it are which boxes of the whole.
    """

    place: tuple[int | slice, ...]
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]

    @property
    def size(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def region(self) -> Hashable:
        """Which numbers of the matrix these are."""
        return tuple((side.start, side.stop) for _, there in self.boxes for side in there)

    @classmethod
    def of(cls, runs: Sequence[Runs], piece: Piece) -> Part | None:
        """From the indices that a rank holds along each dimension of a parameter; None if it has nothing."""
        place: list[int | slice] = []
        lead = len(piece.slot)
        for one, along in zip(piece.slot, runs, strict=False):
            before, inside = within(along, one, one + 1)
            if not inside:
                return None
            place.append(before)
        rest = list(runs[lead:])
        before, rest[piece.dim] = within(rest[piece.dim], piece.begin, piece.end)
        part = cls.whole(rest)
        if part is None:
            return None
        window = slice(before, before + part.shape[piece.dim])
        return part._replace(place=(*place, *[slice(None)] * piece.dim, window))

    @classmethod
    def whole(cls, runs: Sequence[Runs]) -> Part | None:
        """The same, where a parameter is not read as matrices."""
        shape = tuple(sum(map(len, along)) for along in runs)
        return cls((), shape, tuple(_boxes(runs))) if prod(shape) else None

    def cut_from(self, whole: Tensor) -> Tensor:
        """This part of a matrix."""
        if len(self.boxes) == 1:
            return whole[self.boxes[0][1]]
        part = whole.new_empty(self.shape)
        for here, there in self.boxes:
            part[here] = whole[there]
        return part

    def put_into(self, whole: Tensor, part: Tensor) -> None:
        """Write this part of a matrix."""
        for here, there in self.boxes:
            whole[there] = part.view(self.shape)[here]


def _boxes(rest: Sequence[Runs]) -> Iterator[tuple[Box, Box]]:
    pairs = []
    for along in rest:
        before, here = 0, []
        for run in along:
            here.append((slice(before, before + len(run)), slice(run.start, run.stop)))
            before += len(run)
        pairs.append(here)
    for chosen in product(*pairs):
        yield tuple(one for one, _ in chosen), tuple(one for _, one in chosen)


class Work(NamedTuple):
    """What a matrix costs its owner: FLOPs at every step, and those of a solve, which is due at a step of
    that number within a life; None: every step's are all.
    """

    step: int
    solve: int
    due: int | None = None


def owners(works: Sequence[Work], choices: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The owner of each matrix, one of its choices, so that ranks have about the same work.

    The solves that are due at one step are spread first, the largest ones before the others; then what is
    the same at every step.

    >>> owners([Work(1, 9, 0), Work(1, 9, 0), Work(1, 9, 1), Work(5, 0)], [(0, 1)] * 4, 2)
    [0, 1, 0, 1]
    """
    load, due = [0] * ranks, Counter[tuple[int, int]]()
    found = [0] * len(works)

    def order(number: int) -> tuple[int, int, int, int]:
        work = works[number]
        late = (1, 0) if work.due is None else (0, work.due)
        return (*late, -work.solve - work.step, number)

    lives = 1 + max((work.due for work in works if work.due is not None), default=0)
    for number in sorted(range(len(works)), key=order):
        work, at = works[number], works[number].due
        rank = min(choices[number], key=lambda r: (due[r, -1 if at is None else at], load[r], r))
        if at is not None:
            due[rank, at] += work.solve
        load[rank] += work.step * lives + work.solve
        found[number] = rank
    return found
