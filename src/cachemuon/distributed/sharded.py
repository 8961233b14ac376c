"""Matrices that their owners orthogonalize: updates go to the owner, directions come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.bucket import Bucket, Matrix
from ..engine.local import normalized, step_down, take_in
from ..engine.orthogonalize import Direction, Update, rows_of
from ..engine.plan import Chunk, Kind, Plan
from ..engine.readings import Readings
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import ceiling
from .layout import ShardSlice
from .placement import Placement
from .rank_group import Arrival, RankGroup
from .shared import GOOD, Shared


class Parcel(NamedTuple):
    """A slice of a matrix in a message: at `begin`, for or from one rank."""

    matrix: Matrix
    rank: int
    part: ShardSlice
    begin: int

    def of(self, message: Tensor) -> Tensor:
        """Its elements."""
        return message[self.begin : self.begin + self.part.size]


@dataclass(frozen=True)
class Message:
    """The parcels of an all-to-all on one side, in the order of the ranks, and the elements of each rank."""

    parcels: dict[int, list[Parcel]]  # by the matrix's number
    sizes: list[int]

    @classmethod
    def of(cls, ranks: int, parcels: list[tuple[Matrix, int, ShardSlice]]) -> Message:
        """From each matrix, the rank that its slice is for or from, and the slice."""
        ordered = sorted(parcels, key=lambda parcel: parcel[1])  # within a rank as they are
        begins = accumulate((part.size for *_, part in ordered), initial=0)
        found: dict[int, list[Parcel]] = {}
        sizes = [0] * ranks
        for (x, rank, part), begin in zip(ordered, begins, strict=False):
            found.setdefault(x.number, []).append(Parcel(x, rank, part, begin))
            sizes[rank] += part.size
        return cls(found, sizes)


@dataclass(frozen=True, eq=False)
class Round:
    """Matrices of one dtype that travel together: what this rank has of them, and those that it owns."""

    pieces: list[Bucket]
    owned: list[Bucket]
    dtype: torch.dtype
    device: torch.device
    updates: tuple[Message, Message]  # sent, received
    directions: tuple[Message, Message]


class Sharded(Shared):
    """See above. Matrices that only their owner has any part of stay there; `rounds` are of the others.

    The updates of the next round travel while the owners work on this one.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        kinds: list[tuple[Kind, list[Matrix]]],
        placements: dict[int, Placement],
    ) -> None:
        staying, moving = [], []
        for kind, matrices in kinds:
            for x in matrices:
                alone = placements[x.number].only_on_owner
                (staying if alone else moving).append((kind, x))
        rounds = list(_rounds(moving, placements))
        own = [(kind, x) for kind, x in staying if placements[x.number].owned]
        chunks = [_placed(_chunks(plan, own, 1), placements)]
        chunks += [_chunks(plan, [p for p in one if placements[p[1].number].owned], 2) for one in rounds]
        chunks += [_pieces(plan, one, placements) for one in rounds]
        buckets = plan.buckets([chunk for group in chunks for chunk in group])
        sizes = list(accumulate(map(len, chunks), initial=0))
        groups = [buckets[begin:end] for begin, end in zip(sizes, sizes[1:], strict=False)]
        number = len(rounds)
        self.staying = groups[0]
        self.rounds = [
            _round(rank_group, one, owned, pieces, placements)
            for one, owned, pieces in zip(rounds, groups[1 : 1 + number], groups[1 + number :], strict=True)
        ]
        order = [x for one in rounds for _, x in one] + [x for _, x in staying]
        oriented = [*self.staying, *(bucket for one in self.rounds for bucket in one.owned)]
        super().__init__(plan, rank_group, order, placements, oriented)
        self._leaving: tuple[Round, Tensor] | None = None

    def gather(self, outcomes: list[int]) -> Iterator[tuple[Bucket, Update]]:
        """What this rank owns: first what it has alone, then what arrives, round by round."""
        self.readings.clear()
        self.collect_flags()
        for bucket in self.staying:
            rows = list(range(len(bucket.matrices)))
            good = self.flags_of(bucket) == GOOD
            U, peak = take_in(bucket, rows, self.plan, self.gradient, good)
            yield bucket, self._update(bucket, outcomes, U, peak)
        coming: list[Arrival] = [self._send_updates(one) for one in self.rounds[:1]]
        delivered: Callable[[], None] | None = None
        for number, one in enumerate(self.rounds):
            received = coming.pop().wait()
            coming += [self._send_updates(following) for following in self.rounds[number + 1 : number + 2]]
            outgoing = torch.empty(
                sum(one.directions[0].sizes), dtype=computed_in(one.dtype), device=one.device
            )
            self._leaving = one, outgoing
            for bucket in one.owned:
                U = self._received(bucket, one, received)
                peak = torch.amax(U.abs(), dim=(-2, -1), keepdim=True)
                yield bucket, self._update(bucket, outcomes, U, peak)
            if delivered is not None:
                delivered()
            delivered = self._send_directions(one, outgoing)
        if delivered is not None:
            delivered()

    def scatter(self, bucket: Bucket, update: Update, direction: Direction) -> None:
        """Directions of matrices that stay are applied; those of the others are written to the message."""
        self.readings.note(bucket, update, direction)
        D = bucket.wide(direction.D)
        rows = [update.rows[row] for row in direction.rows]
        if bucket in self.staying:
            good = rows_of(self.flags_of(bucket) == GOOD, rows)
            step_down(bucket, rows, D.unbind(0), good)
            return
        assert self._leaving is not None
        one, outgoing = self._leaving
        for row, direction_of_one in zip(rows, D.unbind(0), strict=True):
            x = bucket.matrices[row]
            natural = direction_of_one.reshape(x.layout.views[x.index].shape)
            for parcel in one.directions[0].parcels.get(x.number, ()):
                parcel.part.read_from(natural, parcel.of(outgoing))

    def _update(self, bucket: Bucket, outcomes: list[int], U: Tensor, peak: Tensor) -> Update:
        """What is orthogonalized; where a gradient is not good, the step has no length."""
        peak = torch.where((self.flags_of(bucket) == GOOD).view(-1, 1, 1), peak, torch.nan)
        wanted = [outcomes[x.number] for x in bucket.matrices]
        kept = self.plan.kept(bucket, bucket.matrices)
        rows = list(range(len(bucket.matrices)))
        update = normalized(bucket, rows, wanted, U, peak, kept)
        self.readings.note_peaks(bucket, update)
        return update

    def _send_updates(self, one: Round) -> Arrival:
        """The momentum of this rank's pieces takes in their gradients, and updates leave for the owners."""
        sent, received = one.updates
        outgoing = torch.empty(sum(sent.sizes), dtype=one.dtype, device=one.device)
        for bucket in one.pieces:
            rows = list(range(len(bucket.matrices)))
            U, _ = take_in(bucket, rows, self.plan, self.gradient, self.flags_of(bucket) == GOOD)
            for x, own in zip(bucket.matrices, U.unbind(0), strict=True):
                for parcel in sent.parcels.get(x.number, ()):
                    parcel.of(outgoing).view(own.shape).copy_(own)
        return self.rank_group.all_to_all("updates", outgoing, sent.sizes, received.sizes)

    def _received(self, bucket: Bucket, one: Round, message: Tensor) -> Tensor:
        """The whole updates of a bucket, `(B, rows, cols)`, put together."""
        U = message.new_empty(len(bucket.matrices), bucket.rows, bucket.cols)
        for x, whole in zip(bucket.matrices, U.unbind(0), strict=True):
            natural = whole.view(x.layout.views[x.index].shape)
            for parcel in one.updates[1].parcels[x.number]:
                parcel.part.write_to(natural, parcel.of(message))
        return U.to(bucket.precision)

    def _send_directions(self, one: Round, outgoing: Tensor) -> Callable[[], None]:
        """Directions leave for all ranks that have a part. Returns what waits, and applies those that arrive."""
        sent, coming = one.directions
        arrival = self.rank_group.all_to_all("directions", outgoing, sent.sizes, coming.sizes)

        def apply() -> None:
            message = arrival.wait()
            for bucket in one.pieces:
                steps = [parcel.of(message) for x in bucket.matrices for parcel in coming.parcels[x.number]]
                shape = bucket.rows, bucket.cols
                rows = list(range(len(bucket.matrices)))
                good = self.flags_of(bucket) == GOOD
                step_down(bucket, rows, [step.view(shape) for step in steps], good)

        return apply

    def measured(self) -> Readings:
        """What the owners have measured, on all ranks."""
        self._leaving = None
        return super().measured()


Member = tuple[Kind, Matrix]


def _rounds(moving: list[Member], placements: dict[int, Placement]) -> Iterator[list[Member]]:
    """Matrices of one dtype, as many at a time as their owners have room for, with work for every owner."""
    turns: Counter[int] = Counter()
    ordered = []
    for kind, x in moving:
        owner = placements[x.number].owner
        ordered.append((str(x.param.dtype), turns[owner], kind, x))
        turns[owner] += 1
    ordered.sort(key=lambda one: one[:2])
    found: list[Member] = []
    taken: Counter[int] = Counter()
    for _, _, kind, x in ordered:
        owner, dtype = placements[x.number].owner, x.param.dtype
        rows, cols = x.layout.views[x.index].sides
        size = rows * cols * (dtype.itemsize + 2 * computed_in(dtype).itemsize)
        limit = ceiling(x.group["max_workspace_bytes"], x.param.device.type) // 8
        if found and (taken[owner] + size > limit or dtype != found[0][1].param.dtype):
            yield found
            found, taken = [], Counter()
        found.append((kind, x))
        taken[owner] += size
    if found:
        yield found


def _chunks(plan: Plan, members: list[Member], share: int) -> list[Chunk]:
    by_kind: dict[Kind, list[Matrix]] = {}
    for kind, x in members:
        by_kind.setdefault(kind, []).append(x)
    return [chunk for kind, matrices in by_kind.items() for chunk in plan.chunks(kind, matrices, share)]


def _placed(chunks: list[Chunk], placements: dict[int, Placement]) -> list[Chunk]:
    """Chunks of matrices that are whole on this rank, at their places there."""
    for chunk in chunks:
        chunk.matrices = [
            x._replace(place=placements[x.number].slices[placements[x.number].rank].place)
            for x in chunk.matrices
        ]
    return chunks


def _pieces(plan: Plan, members: list[Member], placements: dict[int, Placement]) -> list[Chunk]:
    """What this rank has of matrices, in chunks of one shape."""
    alike: dict[tuple[Kind, tuple[int, int]], list[Matrix]] = {}
    for kind, x in members:
        placement = placements[x.number]
        part = placement.slices.get(placement.rank)
        if part is not None:
            alike.setdefault((kind, part.sides), []).append(x._replace(place=part.place))
    return [
        chunk
        for (kind, sides), matrices in alike.items()
        for chunk in plan.chunks(kind, matrices, 2, piece=sides)
    ]


def _round(
    rank_group: RankGroup,
    members: list[Member],
    owned: list[Bucket],
    pieces: list[Bucket],
    placements: dict[int, Placement],
) -> Round:
    me, size = rank_group.rank, rank_group.size
    to_owner, from_rank, to_rank, from_owner = [], [], [], []
    for _, x in members:
        placement = placements[x.number]
        own = placement.slices.get(me)
        if own is not None:
            from_owner.append((x, placement.owner, own))
            if me in placement.senders:
                to_owner.append((x, placement.owner, own))
        if placement.owned:
            from_rank += [(x, rank, placement.slices[rank]) for rank in sorted(placement.senders)]
            to_rank += [(x, rank, part) for rank, part in placement.slices.items()]
    messages = [Message.of(size, parcels) for parcels in (to_owner, from_rank, to_rank, from_owner)]
    first = members[0][1].param
    return Round(
        pieces, owned, first.dtype, first.device, (messages[0], messages[1]), (messages[2], messages[3])
    )
