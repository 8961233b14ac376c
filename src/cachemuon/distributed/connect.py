"""From a plan to the exchanges that step its matrices: on this rank alone, sharded, or replicated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from ..engine.bucket import Matrix, local
from ..engine.plan import Plan, kept_dtype
from ..engine.step import Exchange, Local
from ..report.counters import MADE, NEVER
from .placement import process_group_of
from .rank_group import RankGroup
from .replicated import Replicated
from .sharded import Sharded
from .shared import Member, Placements, chunks_of
from .state import orthogonalizer_entries

Ranks = tuple[int, ...]
Agreed = tuple[tuple[int, int], int, bool]
"""The sides of a matrix, its owner, and whether all ranks keep its transform."""


@dataclass(eq=False)
class Connections:
    """The rank groups of an optimizer, which outlive its plans.

    `agreed` has for each of them which ranks keep what of each matrix, as they last agreed. They agree again
    when that has changed, and after a state was loaded.
    """

    rank_groups: dict[Ranks, RankGroup] = field(default_factory=dict)
    agreed: dict[Ranks, list[Agreed]] = field(default_factory=dict)

    def exchanges(self, plan: Plan, places: Placements) -> list[Exchange]:
        """How the matrices of a plan are stepped. All ranks of a rank group call it together."""
        alike: dict[tuple[Ranks, torch.device, torch.dtype, torch.dtype | None], list[Member]] = {}
        by_ranks: dict[Ranks, list[Matrix]] = {}
        for kind in plan.kinds:
            by_ranks.setdefault(kind.ranks, []).extend(kind.matrices)
            for x in kind.matrices:
                replicated = x.number in places and places[x.number].replicated
                sent = kept_dtype(x) if replicated else None
                alike.setdefault((kind.ranks, local(x.param).device, x.param.dtype, sent), []).append(
                    (kind, x)
                )
        found: list[Exchange] = []
        for (ranks, *_, sent), members in alike.items():
            if ranks:
                method = Sharded if sent is None else Replicated
                found.append(method(plan, self._rank_group(ranks, members[0][1]), places, members))
            else:
                found.append(Local(plan, plan.buckets(chunks_of(plan, members))))
        for ranks, matrices in by_ranks.items():
            self._agree(plan, ranks, matrices, places)
        return found

    def _rank_group(self, ranks: Ranks, x: Matrix) -> RankGroup:
        if ranks not in self.rank_groups:
            group = process_group_of(x.group, x.param)
            if group is None and len(ranks) == dist.get_world_size():
                group = dist.group.WORLD
            elif group is None:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
            self.rank_groups[ranks] = RankGroup(group)
        return self.rank_groups[ranks]

    def _agree(self, plan: Plan, ranks: Ranks, matrices: list[Matrix], places: Placements) -> None:
        """A matrix begins anew if any rank that should keep an entry for it, as a transform, lacks that."""
        keeping = [x for x in matrices if _entries(plan, x)]
        own = [x for x in keeping if x.number not in places or places[x.number].stores_transform]
        _drop_unused(plan, matrices, own)
        lacking = {x for x in own if not _entries(plan, x) <= plan.state.get(x.param, {}).keys()}
        if ranks:
            agreed: list[Agreed] = [
                (x.layout.views[x.index].sides, places[x.number].owner, places[x.number].replicated)
                for x in keeping
            ]
            lacking = set() if self.agreed.get(ranks, []) == agreed else self._on_any(ranks, keeping, lacking)
            self.agreed[ranks] = agreed
        for x in lacking:
            for name in _entries(plan, x):
                plan.state.get(x.param, {}).pop(name, None)
        for x in lacking.union(x for x in matrices if plan.choices[x.number].life.always is not None):
            plan.schedule.counters[x.number, MADE] = NEVER

    def _on_any(self, ranks: Ranks, matrices: list[Matrix], lacking: set[Matrix]) -> set[Matrix]:
        """The matrices that any rank lacks an entry of. The host waits for the answer, outside of a step."""
        flags = torch.tensor([x in lacking for x in matrices], dtype=torch.float32).to(
            local(matrices[0].param).device
        )
        found = self.rank_groups[ranks].all_reduce("setup", flags, dist.ReduceOp.MAX).tolist()
        return {x for x, flag in zip(matrices, found, strict=True) if flag}


def _entries(plan: Plan, x: Matrix) -> set[str]:
    """The state entries that the directions of a matrix need."""
    return set(plan.entries_of(x).values())


def _drop_unused(plan: Plan, matrices: list[Matrix], own: list[Matrix]) -> None:
    """Delete entries for directions that this rank does not need, as after a change of owner."""
    wanted: dict[Tensor, set[str]] = {x.param: set() for x in matrices}
    for x in own:
        wanted[x.param] |= _entries(plan, x)
    for param, names in wanted.items():
        for name in set(orthogonalizer_entries(plan.state.get(param, {}))) - names:
            del plan.state[param][name]
