"""Where each matrix is among the ranks that share it, and which of them owns it.

Placements follow from shapes, settings and ranks alone, so every rank knows all of them without asking.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist

from ..engine.bucket import Matrix, is_dtensor
from ..engine.kinds import Kind
from ..engine.orthogonalize import Cached
from .layout import IndexRanges, OwnerCost, ShardSlice, assign_owners, local_indices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

EXCHANGES = ("transforms", "directions")
"""What the owner of a matrix sends to ranks that have copies of it."""

FROM_RANKS = 4
"""From how many ranks on owners send directions by default (docs/multi-gpu.md)."""


@dataclass(frozen=True)
class Placement:
    """Where one matrix is: `slices` has what each rank of `ranks` stores of it, by the rank's place there.

    `rank` is this rank's own place, `owner` the place of the rank that solves for the matrix. Every rank has
    the whole of a `replicated` matrix, and keeps and applies its transform.
    """

    ranks: tuple[int, ...]
    rank: int
    slices: dict[int, ShardSlice]
    owner: int
    replicated: bool

    @property
    def here(self) -> ShardSlice | None:
        """What this rank stores of it; None if that is nothing."""
        return self.slices.get(self.rank)

    @property
    def owned(self) -> bool:
        """Whether this rank owns it."""
        return self.owner == self.rank

    @property
    def stores_transform(self) -> bool:
        """Whether this rank keeps its transform."""
        return self.replicated or self.owned

    @property
    def only_on_owner(self) -> bool:
        """Whether no other rank has any part of it."""
        return list(self.slices) == [self.owner]

    @cached_property
    def senders(self) -> frozenset[int]:
        """The ranks that send their parts to the owner: together they have the matrix once."""
        seen: dict[Hashable, int] = {}
        for rank in sorted(self.slices, key=lambda rank: (rank != self.owner, rank)):
            seen.setdefault(self.slices[rank].covers, rank)
        return frozenset(seen.values())


def placements(kinds: Iterable[Kind], rank: int | None = None) -> dict[int, Placement]:
    """The placement of each matrix that is shared, by its number in the plan.

    It is that of this rank; or of any other `rank`, and then nothing asks torch.distributed.
    """
    by_ranks: dict[tuple[int, ...], list[Kind]] = {}
    for kind in kinds:
        if kind.ranks:
            by_ranks.setdefault(kind.ranks, []).append(kind)
    found: dict[int, Placement] = {}
    for ranks, members in by_ranks.items():
        here = ranks.index(dist.get_rank() if rank is None else rank)
        matrices = [x for kind in members for x in kind.matrices]
        slices = [_slices(x, ranks) for x in matrices]
        sizes = [prod(x.layout.views[x.index].shape) for x in matrices]
        owners = assign_owners(
            [cost for kind in members for cost in _costs(kind)],
            [_choices(*pair, len(ranks)) for pair in zip(slices, sizes, strict=True)],
            len(ranks),
        )
        cached = [isinstance(kind.choice.orthogonalizer, Cached) for kind in members for _ in kind.matrices]
        for x, own, size, owner, reuses in zip(matrices, slices, sizes, owners, cached, strict=True):
            copies = len(own) == len(ranks) and all(part.size == size for part in own.values())
            replicated = reuses and copies and exchange_of(x.group, len(ranks)) == "transforms"
            found[x.number] = Placement(ranks, here, own, owner, replicated)
    return found


def exchange_of(group: dict[str, Any], number: int) -> str:
    """What owners send in a rank group of that size: as the setting says, or by the size.

    >>> exchange_of({"exchange": None}, 2), exchange_of({"exchange": None}, 8)
    ('transforms', 'directions')
    """
    chosen: str | None = group.get("exchange")
    return chosen or ("directions" if number >= FROM_RANKS else "transforms")


def ranks_of(group: dict[str, Any], param: Tensor) -> tuple[int, ...]:
    """The ranks that share a parameter; none if this rank has it alone."""
    if is_dtensor(param):
        ranks = tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    elif group["process_group"].group is not None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group["process_group"].group)))
    else:
        return ()
    return ranks if len(ranks) > 1 else ()


def process_group_of(group: dict[str, Any], param: Tensor, ranks: tuple[int, ...]) -> Any:
    """The process group of the ranks that share a parameter. Making a new one communicates."""
    if not is_dtensor(param):
        return group["process_group"].group
    if param.device_mesh.ndim == 1:
        return param.device_mesh.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(ranks), use_local_synchronization=True)


def index_ranges(param: DTensor, where: Sequence[int]) -> list[IndexRanges]:
    """The indices that the rank at `where` in a parameter's mesh stores along each dimension."""
    sides = tuple(param.device_mesh.mesh.shape)
    return [
        local_indices(length, dim, param.placements, sides, where) for dim, length in enumerate(param.shape)
    ]


def _slices(x: Matrix, ranks: tuple[int, ...]) -> dict[int, ShardSlice]:
    param, view = x.param, x.layout.views[x.index]
    ranges: dict[int, list[IndexRanges]] = {}
    if is_dtensor(param):
        mesh = param.device_mesh.mesh
        for where in product(*map(range, mesh.shape)):
            ranges[ranks.index(int(mesh[where]))] = index_ranges(param, where)
    else:
        ranges = {rank: [[range(length)] for length in param.shape] for rank in range(len(ranks))}
    parts = {rank: ShardSlice.of(ranges[rank], view) for rank in sorted(ranges)}
    return {rank: part for rank, part in parts.items() if part is not None}


def _choices(slices: dict[int, ShardSlice], size: int, ranks: int) -> Sequence[int]:
    """Which ranks may own a matrix of that size: those that have all of it, as of an expert; else all."""
    return [rank for rank, part in slices.items() if part.size == size] or range(ranks)


def _costs(kind: Kind) -> list[OwnerCost]:
    choice = kind.choice
    scheduled = choice.refresh and choice.life.max_age is not None
    return [
        OwnerCost(choice.every_step, choice.refresh, phase if scheduled else None) for phase in kind.phases
    ]


def check_sharding(name: str, param: Tensor) -> None:
    """Refuse a parameter that was flattened or partitioned so that no matrix is left, and name what works."""
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
