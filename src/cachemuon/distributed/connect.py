"""From a plan to the exchanges that step its matrices: here alone, sharded, or replicated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist

from ..engine.bucket import Matrix, local
from ..engine.local import Local
from ..engine.plan import Kind, Plan, entry_of, kept_dtype
from ..engine.schedule import NEVER
from ..engine.step import Exchange
from ..report.counters import MADE
from .placement import Placement, placements, process_group_of
from .rank_group import RankGroup
from .replicated import Replicated
from .shared import Shared
from .sharded import Sharded

Ranks = tuple[int, ...]


@dataclass(eq=False)
class Connections:
    """The rank groups of an optimizer, which outlive its plans.

    `agreed` has for each of them what its ranks last agreed on: which rank keeps which transform. They agree
    again where that has changed, and after a state was loaded.
    """

    rank_groups: dict[Ranks, RankGroup] = field(default_factory=dict)
    agreed: dict[Ranks, Any] = field(default_factory=dict)

    def exchanges(self, plan: Plan) -> list[Exchange]:
        """The ways in which the matrices of a plan are stepped. All ranks of a rank group call it together."""
        found: list[Exchange] = []
        own = [(kind, kind.matrices) for kind in plan.kinds if not kind.ranks]
        _drop_unused(plan, [x for _, matrices in own for x in matrices], {})
        for x in (x for _, matrices in own for x in matrices):
            if not _has_entry(plan, x):
                plan.schedule.counters[x.number, MADE] = NEVER
        if own:
            chunks = [chunk for kind, matrices in own for chunk in plan.chunks(kind, matrices)]
            found.append(Local(plan, plan.buckets(chunks)))
        shared: dict[tuple[Ranks, torch.device], list[Kind]] = {}
        for kind in plan.kinds:
            if kind.ranks:
                device = local(kind.matrices[0].param).device
                shared.setdefault((kind.ranks, device), []).append(kind)
        places = placements(plan.kinds)
        for (ranks, _), kinds in shared.items():
            found += self._shared(plan, ranks, kinds, places)
        for ranks in {kind.ranks: None for kind in plan.kinds if kind.ranks}:
            self._agree(plan, ranks, places)
        return found

    def _shared(
        self, plan: Plan, ranks: Ranks, kinds: list[Kind], places: dict[int, Placement]
    ) -> Iterable[Shared]:
        if ranks not in self.rank_groups:
            first = kinds[0].matrices[0]
            self.rank_groups[ranks] = RankGroup(ranks, process_group_of(first.group, first.param, ranks))
        rank_group = self.rank_groups[ranks]
        by_owner: list[tuple[Kind, list[Matrix]]] = []
        by_all: dict[torch.dtype, list[tuple[Kind, list[Matrix]]]] = {}
        for kind in kinds:
            replicated = [x for x in kind.matrices if places[x.number].replicated]
            if replicated:
                by_all.setdefault(kept_dtype(replicated[0]), []).append((kind, replicated))
            if len(replicated) < len(kind.matrices):
                by_owner.append((kind, [x for x in kind.matrices if not places[x.number].replicated]))
        if by_owner:
            yield Sharded(plan, rank_group, by_owner, places)
        for members in by_all.values():
            yield Replicated(plan, rank_group, members, places)

    def _agree(self, plan: Plan, ranks: Ranks, places: dict[int, Placement]) -> None:
        """A matrix whose transform is missing on a rank that should keep it begins without one, on all ranks."""
        matrices = [x for kind in plan.kinds if kind.ranks == ranks for x in kind.matrices]
        _drop_unused(plan, matrices, places)
        caching = [x for x in matrices if entry_of(plan, x) is not None]
        agreed = [
            (x.layout.views[x.index].sides, places[x.number].owner, places[x.number].replicated)
            for x in caching
        ]
        if self.agreed.get(ranks) == agreed:
            return
        has = [not places[x.number].stores_transform or _has_entry(plan, x) for x in caching]
        flags = torch.tensor(has, dtype=torch.float32).to(local(matrices[0].param).device)
        # Read on the host, which is not done within a step.
        everywhere = self.rank_groups[ranks].all_reduce("setup", flags, dist.ReduceOp.MIN).cpu()
        for x, complete in zip(caching, everywhere.tolist(), strict=True):
            if not complete:
                plan.schedule.counters[x.number, MADE] = NEVER
        self.agreed[ranks] = agreed


def _has_entry(plan: Plan, x: Matrix) -> bool:
    name = entry_of(plan, x)
    return name is None or name in plan.state.get(x.param, {})


def _drop_unused(plan: Plan, matrices: list[Matrix], places: dict[int, Placement]) -> None:
    """Give up the transforms that this rank has no use for."""
    wanted: dict[Any, set[str | None]] = {}
    for x in matrices:
        kept = x.number not in places or places[x.number].stores_transform
        wanted.setdefault(x.param, set()).add(entry_of(plan, x) if kept else None)
    for param, names in wanted.items():
        state = plan.state.get(param, {})
        for name in [name for name in state if name.startswith("transform") and name not in names]:
            del state[name]
