"""Where parameters are: which ranks have them, or which part of them, and which rank owns each matrix.

Where a matrix is whole on every rank, transforms travel; where it is sharded, shards travel. Every matrix has
one owner, which solves for it and decides about it. Who that is follows from shapes and ranks alone, so every
rank knows it. Without other ranks nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import Optimizer, StateDict

from ..engine.matrices import identity, is_dtensor, local
from ..routing.layout import Piece, reading_of
from .layout import Part, Runs, Work, held, owners
from .rank_group import Party

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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

    def keeps(self, index: int) -> bool:
        """Whether this rank keeps the transform of a matrix: its owner, or all that have copies."""
        return self.copied or self.mine(index)

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

    def present(self, *, new: bool) -> tuple[set[int], bool, list[Party]]:
        """Which parameters have a gradient on every rank that has a part of them; whether that is so of all
        that have one anywhere; and the parties of which a rank says that it has something `new`.
        """
        found, all_or_none, changed = set(), True, []
        for party, members in self.members.items():
            *counts, news = party.count([*(param.grad is not None for _, param in members), new])
            if news:
                changed.append(party)
            for (_, param), number in zip(members, counts, strict=True):
                all_or_none = all_or_none and number in (0, party.size)
                if number == party.size:
                    found.add(id(param))
        return found, all_or_none, changed


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
            *map(identity, group["params"]),
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

    >>> import torch
    >>> W = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([W], momentum=0.9)
    >>> whole_state_dict(optimizer)["param_groups"][0]["momentum"]
    0.9
    """
    packed = optimizer.state_dict()
    pairs = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    entries = packed["state"]
    for number, (group, param) in enumerate(pairs):
        if number not in entries or not (among := _apart_in(group, param)):
            continue
        kept = {
            key: whole(value) if isinstance(value, Tensor) else value
            for key, value in entries[number].items()
        }
        own = {key: value.cpu() for key, value in kept.items() if key.startswith("transform")}
        for ranks in among:
            found: list[Any] = [None] * dist.get_world_size(ranks)
            dist.all_gather_object(found, own, group=ranks)
            own = {key: value for part in found for key, value in part.items()}
        entries[number] = {**kept, **{key: value.to(local(param).device) for key, value in own.items()}}
    return packed


def _apart_in(group: dict[str, Any], param: Tensor) -> list[Any]:
    """The process groups of whose ranks each has only some of a parameter's state."""
    if is_dtensor(param):
        return [param.device_mesh.get_group(dim) for dim in range(param.device_mesh.ndim)]
    if group.get("exchange") == "directions" and ranks_of(group, param):
        return [group["process_group"].group]
    return []


def by_mesh(params: list[Tensor]) -> list[list[Tensor]]:
    """Plain parameters, and those of each mesh: torch's operations on lists take no mixture."""
    found: dict[Hashable, list[Tensor]] = {}
    for param in params:
        mesh = param.device_mesh if is_dtensor(param) else None
        found.setdefault(mesh, []).append(param)
    return list(found.values())
