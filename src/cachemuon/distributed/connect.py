"""From a plan to the exchanges that step its matrices: on this rank alone, sharded, or replicated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist

from ..engine.bucket import Matrix, local
from ..engine.local import Local
from ..engine.plan import Plan, kept_dtype
from ..engine.step import Exchange
from ..report.counters import MADE, NEVER
from .placement import Placement, process_group_of
from .rank_group import RankGroup
from .replicated import Replicated
from .rounds import Member, chunks_of
from .sharded import Sharded

Ranks = tuple[int, ...]
Kept = tuple[tuple[int, int], int, bool]
"""The sides of a matrix, its owner, and whether all ranks keep its transform."""


@dataclass(eq=False)
class Connections:
    """The rank groups of an optimizer, which outlive its plans.

    `agreed` has for each of them what its ranks last agreed on: who keeps which transform. They agree again
    where that has changed, and after a state was loaded.
    """

    rank_groups: dict[Ranks, RankGroup] = field(default_factory=dict)
    agreed: dict[Ranks, list[Kept]] = field(default_factory=dict)

    def exchanges(self, plan: Plan, places: dict[int, Placement]) -> list[Exchange]:
        """How the matrices of a plan are stepped. All ranks of a rank group call it together."""
        own = [(kind, x) for kind in plan.kinds if not kind.ranks for x in kind.matrices]
        _drop_unused(plan, [x for _, x in own], {})
        _begin_without(plan, [x for _, x in own if not _has_transform(plan, x)])
        found: list[Exchange] = [Local(plan, plan.buckets(chunks_of(plan, own)))] if own else []
        shared: dict[Ranks, dict[torch.device, list[Member]]] = {}
        for kind in plan.kinds:
            for x in kind.matrices if kind.ranks else ():
                by_device = shared.setdefault(kind.ranks, {})
                by_device.setdefault(local(x.param).device, []).append((kind, x))
        for ranks, by_device in shared.items():
            matrices = [x for kind in plan.kinds if kind.ranks == ranks for x in kind.matrices]
            rank_group = self._rank_group(ranks, matrices[0])
            for members in by_device.values():
                found += _shared(plan, rank_group, members, places)
            self._agree(plan, ranks, matrices, places)
        return found

    def _rank_group(self, ranks: Ranks, x: Matrix) -> RankGroup:
        if ranks not in self.rank_groups:
            self.rank_groups[ranks] = RankGroup(ranks, process_group_of(x.group, x.param, ranks))
        return self.rank_groups[ranks]

    def _agree(self, plan: Plan, ranks: Ranks, matrices: list[Matrix], places: dict[int, Placement]) -> None:
        """A matrix whose transform is missing on a rank that should keep it has none on any rank."""
        _drop_unused(plan, matrices, places)
        caching = [x for x in matrices if plan.entry_of(x) is not None]
        _begin_without(plan, [x for x in matrices if plan.entry_of(x) is None])
        agreed: list[Kept] = [
            (x.layout.views[x.index].sides, places[x.number].owner, places[x.number].replicated)
            for x in caching
        ]
        if self.agreed.get(ranks, []) == agreed:
            return
        complete = [not places[x.number].stores_transform or _has_transform(plan, x) for x in caching]
        flags = torch.tensor(complete, dtype=torch.float32).to(local(matrices[0].param).device)
        # Read on the host, which is not done within a step.
        everywhere = self.rank_groups[ranks].all_reduce("setup", flags, dist.ReduceOp.MIN).tolist()
        _begin_without(plan, [x for x, good in zip(caching, everywhere, strict=True) if not good])
        self.agreed[ranks] = agreed


def _shared(
    plan: Plan, rank_group: RankGroup, members: list[Member], places: dict[int, Placement]
) -> list[Exchange]:
    """Those that owners orthogonalize, and those that all ranks do, which keep transforms of one dtype."""
    by_owner: list[Member] = []
    by_all: dict[torch.dtype, list[Member]] = {}
    for kind, x in members:
        alike = by_all.setdefault(kept_dtype(x), []) if places[x.number].replicated else by_owner
        alike.append((kind, x))
    found: list[Exchange] = [Sharded(plan, rank_group, by_owner, places)] if by_owner else []
    return found + [Replicated(plan, rank_group, alike, places) for alike in by_all.values()]


def _begin_without(plan: Plan, matrices: list[Matrix]) -> None:
    """These matrices have no transform."""
    for x in matrices:
        plan.schedule.counters[x.number, MADE] = NEVER


def _has_transform(plan: Plan, x: Matrix) -> bool:
    return plan.entry_of(x) in plan.state.get(x.param, {})


def _drop_unused(plan: Plan, matrices: list[Matrix], places: dict[int, Placement]) -> None:
    """Give up the transforms that this rank has no use for."""
    wanted: dict[Any, set[str | None]] = {}
    for x in matrices:
        kept = x.number not in places or places[x.number].stores_transform
        wanted.setdefault(x.param, set()).add(plan.entry_of(x) if kept else None)
    for param, names in wanted.items():
        state = plan.state.get(param, {})
        for name in [name for name in state if name.startswith("transform") and name not in names]:
            del state[name]
