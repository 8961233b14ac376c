"""Which rank stores which part of a matrix, and which rank owns it.

Placements follow from shapes, settings and ranks alone, so every rank knows all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, product
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch import distributed as dist

from ..cache.reuse import Reuse
from ..engine.bucket import Kind, is_dtensor
from ..engine.orthogonalize import Cached, Orthogonalizer
from ..routing.layout import MatrixView

EXCHANGES = ("transforms", "directions")
"""What the owner of a matrix sends to ranks that have copies of it."""

FROM_RANKS = 4
"""The number of ranks from which on owners send directions by default (docs/multi-gpu.md)."""

Indices = Sequence[int]
"""Ascending indices along one dimension: a range, or a tuple if they have gaps."""


def local_indices(
    length: int, dim: int, placements: Sequence[Any], mesh: Sequence[int], where: Sequence[int]
) -> Indices:
    """The indices along one dimension of a DTensor that the rank at coordinates `where` of a mesh stores."""
    indices: Indices = range(length)
    for placement, number, place in zip(placements, mesh, where, strict=True):
        if getattr(placement, "dim", None) != dim:
            continue
        if (blocks := getattr(placement, "split_factor", 1)) == 1:
            indices = _chunk(indices, number, place)
        else:  # FSDP over tensor parallel shards each block of rows
            parts = [_chunk(_chunk(indices, blocks, block), number, place) for block in range(blocks)]
            indices = tuple(chain.from_iterable(parts))
    return indices


def _chunk(indices: Indices, number: int, place: int) -> Indices:
    """One of `number` chunks, as torch.chunk makes them; empty where torch makes fewer."""
    size = -(-len(indices) // number)
    return indices[place * size : (place + 1) * size]


def _runs(indices: Indices) -> list[tuple[slice, slice]]:
    """Consecutive indices: their positions, and their values.

    >>> _runs((4, 5, 8))
    [(slice(0, 2, None), slice(4, 6, None)), (slice(2, 3, None), slice(8, 9, None))]
    """
    if isinstance(indices, range):
        return [(slice(0, len(indices)), slice(indices.start, indices.stop))]
    cuts = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
    pairs = pairwise([0, *cuts, len(indices)])
    return [(slice(i, j), slice(indices[i], indices[j - 1] + 1)) for i, j in pairs]


@dataclass(frozen=True)
class ShardSlice:
    """What one rank stores of a matrix: these `indices` along each of its dimensions.

    The slice lies at `place` in what the rank stores of the matrix's parameter.
    """

    indices: tuple[Indices, ...]
    place: tuple[int | slice, ...]

    @classmethod
    def of(cls, stored: Sequence[Indices], view: MatrixView) -> ShardSlice | None:
        """The slice of a matrix on a rank that stores these indices of its parameter; None if it is empty."""
        place: list[int | slice] = []
        for index, along in zip(view.stack_index, stored, strict=False):
            if index not in along:
                return None
            place.append(along.index(index))
        indices = list(stored[len(place) :])
        along = indices[view.dim]
        first, last = bisect_left(along, view.begin), bisect_left(along, view.end)
        inside = along[first:last]
        indices[view.dim] = tuple(i - view.begin for i in inside) if view.begin else inside
        part = cls(tuple(indices), (*place, *[slice(None)] * view.dim, slice(first, last)))
        return part if part.size else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(map(len, self.indices))

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @cached_property
    def _regions(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Regions of the slice, each with its region of the matrix."""
        boxes = product(*map(_runs, self.indices))
        return [(tuple(here for here, _ in box), tuple(there for _, there in box)) for box in boxes]

    def views(self, whole: Tensor, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of a whole matrix and of this slice of it that show the same elements."""
        return [(whole[there], part.view(self.shape)[here]) for here, there in self._regions]


@dataclass(frozen=True)
class Placement:
    """Where one matrix is. Ranks are numbered by their place in `ranks`; `rank` is the number of this one.

    `slices` has what each rank stores of the matrix; the rank `owner` orthogonalizes it. Of a `replicated`
    matrix every rank stores all elements and the transform.
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
        """Whether this rank keeps what its orthogonalizer keeps for it."""
        return self.replicated or self.owned

    @cached_property
    def senders(self) -> frozenset[int]:
        """The ranks that send their slices to the owner: together they have each element once."""
        seen: dict[tuple[Indices, ...], int] = {}
        for rank in sorted(self.slices, key=lambda rank: (rank != self.owner, rank)):
            seen.setdefault(self.slices[rank].indices, rank)
        return frozenset(seen.values())


def placements(kinds: Iterable[Kind], rank: int | None = None) -> dict[int, Placement]:
    """The placement of each matrix that ranks share, by its number in the plan.

    By default those of this rank; those of any other `rank` need no torch.distributed.
    """
    by_ranks: dict[tuple[int, ...], list[Kind]] = {}
    for kind in kinds:
        if kind.ranks:
            by_ranks.setdefault(kind.ranks, []).append(kind)
    found: dict[int, Placement] = {}
    for ranks, members in by_ranks.items():
        here = ranks.index(dist.get_rank() if rank is None else rank)
        default = "directions" if len(ranks) >= FROM_RANKS else "transforms"
        costs, choices, where = [], [], []
        for kind in members:
            choice, cache = kind.choice, cache_of(kind.choice.orthogonalizer)
            scheduled = choice.refresh and choice.life.max_age is not None
            for x, phase in zip(kind.matrices, kind.phases, strict=True):
                view = x.layout.views[x.index]
                slices = _slices(x.param, view, ranks)
                whole = [rank for rank, part in slices.items() if part.size == prod(view.shape)]
                by_transforms = cache is not None and (x.group.get("exchange") or default) == "transforms"
                costs.append(OwnerCost(choice.every_step, choice.refresh, phase if scheduled else None))
                choices.append(whole)  # a rank that stores all of a matrix owns it, as of an expert
                where.append((x.number, slices, by_transforms and len(whole) == len(ranks)))
        owners = assign_owners(costs, choices, len(ranks))
        for (number, slices, replicated), owner in zip(where, owners, strict=True):
            found[number] = Placement(ranks, here, slices, owner, replicated)
    return found


def cache_of(orthogonalizer: Orthogonalizer) -> Reuse | None:
    """The cache of an orthogonalizer whose transforms every rank can apply; None if it has none."""
    return orthogonalizer.cache if isinstance(orthogonalizer, Cached) else None


def _slices(param: Tensor, view: MatrixView, ranks: tuple[int, ...]) -> dict[int, ShardSlice]:
    """What each rank stores of a matrix, in the order of the ranks; not of those that store nothing."""
    found = {}
    if is_dtensor(param):
        mesh, sizes = param.device_mesh.mesh, list(enumerate(param.shape))
        for where in product(*map(range, mesh.shape)):
            stored = [local_indices(size, dim, param.placements, mesh.shape, where) for dim, size in sizes]
            found[ranks.index(int(mesh[where]))] = ShardSlice.of(stored, view)
    else:
        whole = ShardSlice.of([range(size) for size in param.shape], view)
        found = {rank: whole for rank in range(len(ranks))}
    return {rank: part for rank, part in sorted(found.items()) if part is not None}


class OwnerCost(NamedTuple):
    """What a matrix costs its owner: FLOPs at every step, and those that a refresh adds.

    Refreshes fall on the steps of `refresh_slot` within a life; None where no refresh is scheduled.
    """

    step: int
    refresh: int
    refresh_slot: int | None = None


def assign_owners(costs: Sequence[OwnerCost], choices: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The owner of each matrix, so that all ranks have about the same work: one of its choices, or any rank
    where it has none.

    Refreshes of one slot are distributed first, the most expensive ones before the others; then the work that
    is the same at every step.

    >>> costs = [OwnerCost(1, 9, 0), OwnerCost(1, 9, 0), OwnerCost(1, 9, 1), OwnerCost(5, 0)]
    >>> assign_owners(costs, [()] * 4, 2)
    [0, 1, 0, 1]
    """
    load, refreshes, owners = [0] * ranks, Counter[tuple[int, int | None]](), [0] * len(costs)
    life = 1 + max((cost.refresh_slot or 0 for cost in costs), default=0)

    def order(number: int) -> tuple[bool, int, int]:
        step, refresh, slot = costs[number]
        return slot is None, slot or 0, -refresh - step

    for number in sorted(range(len(costs)), key=order):
        step, refresh, slot = costs[number]
        rank = min(choices[number] or range(ranks), key=lambda r: (refreshes[r, slot], load[r], r))
        if slot is not None:
            refreshes[rank, slot] += refresh
        load[rank] += step * life + refresh
        owners[number] = rank
    return owners


def ranks_of(group: dict[str, Any], param: Tensor) -> tuple[int, ...]:
    """The ranks that share a parameter, in the order of their process group; none if one rank has it."""
    if is_dtensor(param) and param.device_mesh.ndim > 1:
        ranks = sorted(param.device_mesh.mesh.flatten().tolist())
    elif (process_group := process_group_of(group, param)) is not None:
        ranks = dist.get_process_group_ranks(process_group)
    else:
        return ()
    return tuple(ranks) if len(ranks) > 1 else ()


def process_group_of(group: dict[str, Any], param: Tensor) -> Any:
    """The process group that shares a parameter; None if it is still to be made, or if there is none."""
    if not is_dtensor(param):
        return group["process_group"].group
    return param.device_mesh.get_group() if param.device_mesh.ndim == 1 else None


def check_sharding(name: str, param: Tensor) -> None:
    """Refuse a parameter that was flattened or partitioned so that no matrix is left, and name what works."""
    if is_dtensor(param) and any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{name}: placements must be Shard or Replicate, got {param.placements}")
    flat = type(param).__name__ == "FlatParameter" or hasattr(param, "_is_flat_param")
    if flat or hasattr(param, "ds_id"):
        got = "a flat one of FullyShardedDataParallel" if flat else "a partition of DeepSpeed's ZeRO stage 3"
        raise ValueError(
            f"{name}: parameters must be whole or DTensors, got {got}; "
            f"torch.distributed.fsdp.fully_shard (FSDP2) shards as DTensors"
        )
