"""Matrices of which other ranks have parts: their updates travel to their owners, and the steps back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..engine.matrices import Matrix, accumulate, add, agreed, batches, is_dtensor, local, promoted
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import Workspace, ceiling
from ..routing.layout import reading_of
from .homes import Home
from .rank_group import Party


@dataclass(slots=True, eq=False)
class Shared:
    """One matrix of a party at one step: `matrix` is the whole of it, which arrives at its owner; `piece`
    what this rank has of it, flattened to two dimensions. A matrix that no rank has to send is its owner's
    own, as any other.
    """

    home: Home
    index: int
    matrix: Matrix
    piece: Matrix | None
    natural: tuple[int, ...]  # its shape as a part of the parameter: a convolution's has more dimensions

    @property
    def mine(self) -> bool:
        """Whether this rank owns it."""
        return self.home.mine(self.index)


def shared_of(
    param: Tensor, group: dict[str, Any], state: dict[str, Any], recipe: Hashable, home: Home
) -> list[Shared]:
    """The matrices of a parameter that has a gradient; its momentum buffer is made on first sight."""
    assert param.grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
    grad = param.grad
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    own, grad, momentum = local(param), local(grad), local(state["momentum_buffer"])
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    found = []
    for index, one in enumerate(reading_of(group, param).pieces):
        rows, cols = one.sides
        kind = (rows, cols, param.dtype, own.device, recipe, "shared")  # whether it is finite is agreed on
        part = home.parts[index].get(home.party.rank)
        piece = None
        here, there, moving = own, grad, momentum
        if part is not None:
            here, there, moving = (tensor[part.place] for tensor in (own, grad, momentum))
            line = ("piece", part.shape, param.dtype, own.device, recipe)
            moving = moving.flatten(1)  # a view
            lengths = moving.shape[0], moving.shape[1]
            piece = Matrix(param, here, there, moving, group, state, line, lengths, False, index)
        matrix = Matrix(param, here, there, moving, group, state, kind, one.wide, rows > cols, index)
        matrix.party, matrix.owner = home.party, home.owners[index]
        found.append(Shared(home, index, matrix, piece, one.shape))
    return found


def apart(shared: list[Shared]) -> tuple[list[Matrix], list[Shared]]:
    """Those that are this rank's own; and those that must travel, here or elsewhere."""
    own = [s.matrix for s in shared if s.home.alone(s.index) and s.mine]
    return own, [s for s in shared if not s.home.alone(s.index)]


def worked_on(moving: list[Shared]) -> list[Matrix]:
    """What this rank does something with of what travels: its pieces, and the wholes that it owns."""
    return [x for s in moving for x in (s.piece, s.matrix if s.mine else None) if x is not None]


def agree_on_finite(shared: list[Shared]) -> None:
    """Every rank learns, on its device, which gradients are finite on all ranks."""
    for party, members in by_party(shared).items():
        device = members[0].matrix.grad.device
        flags = torch.ones(len(members), dtype=torch.float32, device=device)
        own = [(i, s.piece.grad) for i, s in enumerate(members) if s.piece is not None]
        if own:
            extremes = [torch.stack(torch.aminmax(grad)) for _, grad in own]
            dtype = promoted([s.matrix for s in members])
            finite = torch.stack([one.to(dtype) for one in extremes]).isfinite().all(-1)
            for (i, _), flag in zip(own, finite.unbind(0), strict=True):
                flags[i] = flag
        for s, flag in zip(members, party.least(flags).bool().unbind(0), strict=True):
            s.matrix.finite = flag
            if s.piece is not None:
                s.piece.finite = flag


def by_party(shared: Iterable[Shared]) -> dict[Party, list[Shared]]:
    """The matrices of each party, in their order."""
    found: dict[Party, list[Shared]] = {}
    for s in shared:
        found.setdefault(s.home.party, []).append(s)
    return found


def travel(shared: list[Shared], work: Callable[[list[Matrix]], object], workspace: Workspace) -> None:
    """Bring the update of each matrix to its owner, let it work there, and bring the steps back.

    Many at a time; the next ones arrive while these are worked on.
    """
    for party, members in by_party(shared).items():
        buckets = list(_buckets(members))
        arriving = _collect(party, buckets[0], workspace)
        leaving: Callable[[], None] | None = None
        for number, bucket in enumerate(buckets):
            following = None
            if number + 1 < len(buckets):
                following = _collect(party, buckets[number + 1], workspace)
            work(arriving())
            if leaving is not None:
                leaving()
            leaving = _deliver(party, bucket)
            if following is not None:
                arriving = following
        if leaving is not None:
            leaving()


def _buckets(members: list[Shared]) -> Iterator[list[Shared]]:
    """Those of one dtype, as many at a time as their owners have room for, and work for every owner."""
    turns: Counter[int] = Counter()
    placed = []
    for s in members:
        owner = s.home.owners[s.index]
        placed.append((str(s.matrix.grad.dtype), turns[owner], s))
        turns[owner] += 1
    placed.sort(key=lambda one: one[:2])
    bucket: list[Shared] = []
    taken: Counter[int] = Counter()
    for _, _, s in placed:
        owner, dtype = s.home.owners[s.index], s.matrix.grad.dtype
        limit = _room(s.matrix)
        size = prod(s.matrix.shape) * (dtype.itemsize + computed_in(dtype).itemsize)
        if bucket and (taken[owner] + size > limit or dtype != bucket[0].matrix.grad.dtype):
            yield bucket
            bucket, taken = [], Counter()
        bucket.append(s)
        taken[owner] += size
    yield bucket


def _room(x: Matrix) -> int:
    """The bytes of arriving updates and leaving steps that an owner has at a time: an eighth of what a step
    may take. Beside them there are the messages themselves, and those of the next matrices.
    """
    return max(ceiling(x.group["max_workspace_bytes"], x.grad.device.type) // 8, 1)


def _collect(party: Party, bucket: list[Shared], workspace: Workspace) -> Callable[[], list[Matrix]]:
    """Take in the gradients, and send updates to their owners. Returns what waits for those of this rank."""
    me, first = party.rank, bucket[0].matrix
    updates: dict[int, Tensor] = {}
    pieces = [s.piece for s in bucket if s.piece is not None]
    for batch in batches(pieces, lambda x: x.kind, lambda x: 4 * x.grad.nbytes, _room(first)):
        U = accumulate(batch, workspace).U
        updates |= {id(x): one for x, one in zip(batch, U.clone().unbind(0), strict=True)}
    outgoing, leaving = [first.grad.new_empty(0)], [0] * party.size
    for rank in range(party.size):
        for s in bucket:
            if s.home.owners[s.index] == rank and me in s.home.sources[s.index] and s.piece is not None:
                outgoing.append(updates[id(s.piece)])
                leaving[rank] += s.piece.grad.numel()
    mine = [s for s in bucket if s.mine]
    coming = [
        (rank, s, s.home.parts[s.index][rank])
        for rank in range(party.size)
        for s in mine
        if rank in s.home.sources[s.index]
    ]
    sizes = [sum(part.size for one, _, part in coming if one == rank) for rank in range(party.size)]
    arrival = party.exchange("updates", outgoing, (leaving, sizes))

    def arrived() -> list[Matrix]:
        received = arrival.wait().split([part.size for _, _, part in coming])
        for s in mine:
            x = s.matrix
            x.arrived = received[0].new_empty(x.sides)
        for (_, s, part), values in zip(coming, received, strict=True):
            assert s.matrix.arrived is not None
            part.put_into(s.matrix.arrived.view(s.natural), values)
        return [s.matrix for s in mine]

    return arrived


def _deliver(party: Party, bucket: list[Shared]) -> Callable[[], None]:
    """Send the steps of this rank's matrices to all that have a part. Returns what waits, and takes them."""
    first = bucket[0].matrix
    dtype = computed_in(first.grad.dtype)
    outgoing, leaving = [first.grad.new_empty(0, dtype=dtype)], [0] * party.size
    mine = [s for s in bucket if s.mine]
    for s in mine:
        if s.matrix.leaving is None:  # its gradient was not finite
            s.matrix.leaving = first.grad.new_zeros(s.matrix.sides, dtype=dtype)
    for rank in range(party.size):
        for s in mine:
            if (part := s.home.parts[s.index].get(rank)) is not None:
                assert s.matrix.leaving is not None
                outgoing.append(part.cut_from(s.matrix.leaving.view(s.natural)))
                leaving[rank] += part.size
    coming = [
        (rank, s.piece)
        for rank in range(party.size)
        for s in bucket
        if s.home.owners[s.index] == rank and s.piece is not None
    ]
    sizes = [sum(x.grad.numel() for one, x in coming if one == rank) for rank in range(party.size)]
    arrival = party.exchange("directions", outgoing, (leaving, sizes))
    for s in mine:
        s.matrix.arrived = s.matrix.leaving = None

    def arrived() -> None:
        received = arrival.wait().split([x.grad.numel() for _, x in coming])
        steps = {id(x): values for (_, x), values in zip(coming, received, strict=True)}
        pieces = [x for _, x in coming]
        for batch in batches(pieces, lambda x: x.kind, lambda x: 0, 1):
            add(batch, [steps[id(x)].view(x.param.shape) for x in batch], agreed(batch))

    return arrived
