"""What ranks tell and send one another, over torch.distributed; and where the parameters are.

Where a matrix is whole on every rank, transforms travel; where it is sharded, shards travel. Every matrix has
one owner, which solves for it and decides about it. Who that is follows from shapes and ranks alone, so every
rank knows it. Without other ranks nothing is communicated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import Optimizer, StateDict

from .matrices import Matrix, accumulate, add, agreed, batches, is_dtensor, local
from .ownership import Part, Runs, Work, held, owners
from .polar import computed_in
from .views import Piece, reading_of
from .workspace import Workspace, ceiling

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HOST = torch.device("cpu")
PATIENCE = 5  # seconds, for a rank to say that it is there


@dataclass(frozen=True)
class Replicas:
    """A process group as a setting: the ranks that have copies of plain parameters.

    It is shared by copies of an optimizer, and lost when that is pickled: a group is of one process.
    """

    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicas, ()


def as_replicas(value: Any) -> Replicas:
    """The setting `process_group`: a group, or None for parameters that are this rank's own.

    >>> as_replicas(None)
    Replicas(group=None)
    """
    if isinstance(value, Replicas):
        return value
    if value is None or isinstance(value, dist.ProcessGroup):
        return Replicas(value)
    raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {value!r}")


@contextmanager
def watched(group: Any) -> Iterator[None]:
    """Where a collective of a process group fails, name the ranks that are gone: those that do not say that
    they are there.
    """
    try:
        yield
    except RuntimeError as error:
        if gone := _absent(dist.get_process_group_ranks(group)):
            names = ("rank " if len(gone) == 1 else "ranks ") + ", ".join(map(str, gone))
            raise RuntimeError(f"no answer from {names} of {dist.get_world_size(group)}") from error
        raise


def _absent(ranks: list[int]) -> list[int]:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"cachemuon/{dist.get_rank()}", "here")
        until = time.monotonic() + PATIENCE
        while gone := [rank for rank in ranks if not store.check([f"cachemuon/{rank}"])]:
            if time.monotonic() > until:
                return gone
            time.sleep(0.1)
    except RuntimeError:  # the store is gone, with the rank that has it
        return [0]
    return []


EXCHANGES = ("transforms", "directions")
"""What owners of cached matrices send to ranks that have copies."""


class Party:
    """Ranks that have the same parameters, and step together.

    `traffic` counts the bytes that this rank has handed to each kind of collective for others.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.traffic: Counter[str] = Counter()

    @cached_property
    def _host_group(self) -> Any:
        """Where ranks can agree without waiting for their devices."""
        if "cpu:" in dist.get_backend_config(self.group):
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def count(self, flags: list[bool]) -> list[int]:
        """On how many ranks each flag holds. Waits for the other hosts, not for any device."""
        counts = torch.tensor(flags, dtype=torch.int32, device=HOST)
        with watched(self.group):
            dist.all_reduce(counts, group=self._host_group)
        self.traffic["presence"] += counts.nbytes
        return [int(number) for number in counts.tolist()]

    def same(self, number: int) -> bool:
        """Whether all ranks have the same number."""
        ends = torch.tensor([number, -number], dtype=torch.int64, device=HOST)
        with watched(self.group):
            dist.all_reduce(ends, dist.ReduceOp.MIN, group=self._host_group)
        least, most = ends.tolist()
        return bool(least == -most)

    def least(self, values: Tensor) -> Tensor:
        """The smallest of all ranks' values."""
        with watched(self.group):
            dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        self.traffic["finite"] += values.nbytes
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values: the owners' own, where all others have zeros."""
        with watched(self.group):
            dist.all_reduce(values, group=self.group)
        self.traffic["residuals"] += values.nbytes
        return values

    def exchange(self, what: str, outgoing: list[Tensor], sizes: tuple[list[int], list[int]]) -> Arrival:
        """Send tensors, in the order of the ranks they are for; and receive.

        `sizes`: how many elements go to each rank, and come from each. Elements that stay are no traffic.
        """
        leaving, coming = sizes
        sent = torch.cat([tensor.reshape(-1) for tensor in outgoing])
        received = sent.new_empty(sum(coming))
        with watched(self.group):
            work = dist.all_to_all_single(received, sent, coming, leaving, group=self.group, async_op=True)
        self.traffic[what] += (sum(leaving) - leaving[self.rank]) * sent.itemsize
        return Arrival(self.group, work, sent, received)

    def spread(self, matrices: list[Matrix], made: dict[int, Tensor]) -> list[Tensor]:
        """The transforms of these matrices, of which each rank has `made` its own."""
        sizes = [0] * self.size
        for x in matrices:
            sizes[x.owner] += x.shape[0] ** 2
        first, others = matrices[0], [rank for rank in range(self.size) if rank != self.rank]
        own = [made[id(x)] for x in matrices if x.owned]
        leaving = [0 if rank == self.rank else sizes[self.rank] for rank in range(self.size)]
        coming = [0 if rank == self.rank else sizes[rank] for rank in range(self.size)]
        outgoing = [first.momentum.new_empty(0, dtype=first.cached_in), *own * len(others)]
        received = self.exchange("transforms", outgoing, (leaving, coming)).wait()
        of_others = [x for rank in others for x in matrices if x.owner == rank]
        parts = received.split([x.shape[0] ** 2 for x in of_others])
        found = {id(x): part.view(x.shape[0], x.shape[0]) for x, part in zip(of_others, parts, strict=True)}
        return [made[id(x)] if x.owned else found[id(x)] for x in matrices]


@dataclass(eq=False)
class Arrival:
    """What is on its way. `sent` is kept until it has left."""

    group: Any
    work: Any
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """What has arrived."""
        with watched(self.group):
            self.work.wait()
        return self.received


@dataclass(frozen=True, eq=False)
class Home:
    """Where the matrices of a parameter are: what each rank of a party has of each, and its owner."""

    party: Party
    parts: list[dict[int, Part]]
    owners: list[int]
    copied: bool  # every rank has all of it, and keeps its transforms

    def mine(self, index: int) -> bool:
        """Whether this rank owns a matrix."""
        return self.owners[index] == self.party.rank

    def alone(self, index: int) -> bool:
        """Whether its owner is the only one to have any of it."""
        return list(self.parts[index]) == [self.owners[index]]

    @cached_property
    def sources(self) -> list[set[int]]:
        """Who sends an owner its parts: the ranks that together have the matrix once, itself if it can."""
        found = []
        for parts, owner in zip(self.parts, self.owners, strict=True):
            seen: dict[Hashable, int] = {}
            for rank in sorted(parts, key=lambda rank: (rank != owner, rank)):
                seen.setdefault(parts[rank].region, rank)
            found.append(set(seen.values()))
        return found


class Homes:
    """The homes of all parameters that other ranks have, or have parts of."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        parties: dict[tuple[int, ...], Party],
        works: Callable[[dict[str, Any], Tensor], list[Work]],
    ) -> None:
        self.key = homes_key(groups)
        self.of: dict[int, Home] = {}
        self.members = parties_of(groups, parties)
        for party, members in self.members.items():
            pieces = [reading_of(group, param).pieces for group, param in members]
            parts = [_parts(param, of, party) for (_, param), of in zip(members, pieces, strict=True)]
            sizes = [[prod(piece.shape) for piece in of] for of in pieces]
            work = [one for group, param in members for one in works(group, param)]
            choices = [
                _choices(one, size, party.size)
                for pair in zip(parts, sizes, strict=True)
                for one, size in zip(*pair, strict=True)
            ]
            found = iter(owners(work, choices, party.size))
            for (group, param), size, of in zip(members, sizes, parts, strict=True):
                whole = [
                    part.size == all_ for one, all_ in zip(of, size, strict=True) for part in one.values()
                ]
                copied = all(whole) and len(whole) == party.size * len(of)
                copied = copied and group.get("exchange") == "transforms"
                self.of[id(param)] = Home(party, of, [next(found) for _ in of], copied)

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether these are still the homes of these groups."""
        return self.key == homes_key(groups)

    def present(self) -> tuple[set[int], bool]:
        """Which parameters have a gradient on every rank that has a part of them; and whether that is so of
        all that have one anywhere.
        """
        found, all_or_none = set(), True
        for party, members in self.members.items():
            flags = [param.grad is not None for _, param in members]
            for (_, param), number in zip(members, party.count(flags), strict=True):
                all_or_none = all_or_none and number in (0, party.size)
                if number == party.size:
                    found.add(id(param))
        return found, all_or_none


def parties_of(
    groups: list[dict[str, Any]], parties: dict[tuple[int, ...], Party]
) -> dict[Party, list[tuple[dict[str, Any], Tensor]]]:
    """The parameters of Muon that each party shares, with their groups."""
    found: dict[Party, list[tuple[dict[str, Any], Tensor]]] = {}
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            if (party := _party_of(group, param, parties)) is not None and param.numel():
                found.setdefault(party, []).append((group, param))
    return found


def homes_key(groups: list[dict[str, Any]]) -> list[Any]:
    """What homes depend on."""
    return [
        (
            id(group["process_group"].group),
            *(group.get(key) for key in ("exchange", "view", "split", "transposed")),
            *map(id, group["params"]),
        )
        for group in groups
        if group["use_muon"]
    ]


def ranks_of(group: dict[str, Any], param: Tensor) -> tuple[int, ...]:
    """The ranks that share a parameter; none if it is this rank's own."""
    if is_dtensor(param):
        ranks = tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    elif group["process_group"].group is not None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group["process_group"].group)))
    else:
        return ()
    return ranks if len(ranks) > 1 else ()


def _party_of(group: dict[str, Any], param: Tensor, parties: dict[tuple[int, ...], Party]) -> Party | None:
    ranks = ranks_of(group, param)
    if not ranks:
        return None
    if ranks not in parties:
        if not is_dtensor(param):
            made = group["process_group"].group
        elif param.device_mesh.ndim == 1:
            made = param.device_mesh.get_group()
        elif len(ranks) == dist.get_world_size():
            made = dist.group.WORLD
        else:
            made = dist.new_group(list(ranks), use_local_synchronization=True)
        parties[ranks] = Party(made)
    return parties[ranks]


def _parts(param: Tensor, pieces: Iterable[Piece], party: Party) -> list[dict[int, Part]]:
    """For each matrix of a parameter what each rank of the party has of it."""
    by_rank: dict[int, list[Runs]] = {}
    if is_dtensor(param):
        mesh = param.device_mesh.mesh
        for where in product(*map(range, mesh.shape)):
            by_rank[dist.get_group_rank(party.group, int(mesh[where]))] = _runs(param, where)
    else:
        by_rank = {rank: [[range(length)] for length in param.shape] for rank in range(party.size)}
    found = []
    for piece in pieces:
        parts = {rank: Part.of(runs, piece) for rank, runs in sorted(by_rank.items())}
        found.append({rank: part for rank, part in parts.items() if part is not None})
    return found


def _runs(param: DTensor, where: Sequence[int]) -> list[Runs]:
    """The indices that the rank at `where` in a parameter's mesh holds along each dimension."""
    sides = tuple(param.device_mesh.mesh.shape)
    return [held(length, dim, param.placements, sides, where) for dim, length in enumerate(param.shape)]


def _choices(parts: dict[int, Part], size: int, ranks: int) -> Sequence[int]:
    """Who may own a matrix of that size: those who have all of it, as an expert's, if any; else anybody."""
    return [rank for rank, part in parts.items() if part.size == size] or range(ranks)


def check_sharding(name: str, param: Tensor) -> None:
    """Refuse what was flattened or partitioned in a way that leaves no matrices, and name what works."""
    if is_dtensor(param):
        for placement in param.placements:
            if placement.is_partial():
                raise ValueError(f"{name}: placements must be Shard or Replicate, got {param.placements}")
    if type(param).__name__ == "FlatParameter" or hasattr(param, "_is_flat_param"):
        raise ValueError(
            f"{name}: parameters must have their own shape, got a flat one of FullyShardedDataParallel; "
            f"torch.distributed.fsdp.fully_shard (FSDP2) keeps it"
        )
    if hasattr(param, "ds_id"):
        raise ValueError(
            f"{name}: parameters must be whole or DTensors, got a partition of DeepSpeed's ZeRO stage 3; "
            f"torch.distributed.fsdp.fully_shard (FSDP2) shards as DTensors"
        )


def sharded_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that is whole as what this rank has of it, if its parameter is sharded."""
    if not is_dtensor(param) or is_dtensor(tensor) or tensor.shape != param.shape:
        return tensor
    mesh = param.device_mesh
    where = mesh.get_coordinate()
    if where is None:
        return tensor
    part = Part.whole(_runs(param, where))
    own = tensor.new_empty(local(param).shape) if part is None else part.cut_from(tensor).contiguous()
    placed = mesh, param.placements
    return type(param).from_local(own, *placed, run_check=False, shape=param.shape, stride=param.stride())


def whole(tensor: Tensor) -> Tensor:
    """A tensor as one process alone has it. Every rank must call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def whole_state_dict(optimizer: Optimizer) -> StateDict:
    """The state of an optimizer as one process alone has it: shards put together, all transforms.

    Every rank of the optimizer's parameters must call it, and all get it. `load_state_dict` goes on from it
    on one process, and on any number of ranks.

    >>> W = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([W], momentum=0.9)
    >>> whole_state_dict(optimizer)["param_groups"][0]["momentum"]
    0.9
    """
    packed = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    entries = packed["state"]
    for number, param in enumerate(params):
        if not is_dtensor(param) or number not in entries:
            continue
        kept = {
            key: whole(value) if isinstance(value, Tensor) else value
            for key, value in entries[number].items()
        }
        own = {key: value.cpu() for key, value in kept.items() if key.startswith("transform")}
        for dim in range(param.device_mesh.ndim):
            group = param.device_mesh.get_group(dim)
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, own, group=group)
            own = {key: value for part in found for key, value in part.items()}
        entries[number] = {**kept, **{key: value.to(local(param).device) for key, value in own.items()}}
    return packed


def by_mesh(params: list[Tensor]) -> list[list[Tensor]]:
    """Plain parameters, and those of each mesh: torch's operations on lists take no mixture."""
    found: dict[Hashable, list[Tensor]] = {}
    for param in params:
        mesh = param.device_mesh if is_dtensor(param) else None
        found.setdefault(mesh, []).append(param)
    return list(found.values())


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
        kind = (rows, cols, param.dtype, own.device, recipe)
        part = home.parts[index].get(home.party.rank)
        piece = None
        here, there, moving = own, grad, momentum
        if part is not None:
            here, there, moving = (tensor[part.place] for tensor in (own, grad, momentum))
            line = ("piece", part.shape, param.dtype, own.device, recipe)
            flat = there.flatten(1), moving.flatten(1)  # of the momentum always a view
            lengths = flat[0].shape[0], flat[0].shape[1]
            piece = Matrix(param, here, *flat, group, state, line, lengths, False, index)
            if part.size == rows * cols:
                there, moving = flat
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
        flags = torch.ones(len(members), device=device)
        own = [(i, s.piece.grad) for i, s in enumerate(members) if s.piece is not None]
        if own:
            extremes = [torch.stack(torch.aminmax(grad)) for _, grad in own]
            finite = torch.stack([one.to(flags.dtype) for one in extremes]).isfinite().all(-1)
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
