"""What is known of every step before the first: solvers, prices, room, and when first transforms end.

A plan is a pure function of the parameter groups: of shapes and settings, never of what has happened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from torch import Tensor

from ..cache.gns import CacheGNS
from ..distributed.homes import ranks_of
from ..flops.model import Executed, executed_by
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import hit_bytes, solve_bytes
from ..routing.layout import Piece, reading_of
from .guard import Guard
from .matrices import cached_in, identity

SETTINGS = (
    "solver",
    "probe",
    "vectors",
    "clip",
    "max_norm",
    "gate",
    "guard",
    "min_rows",
    "max_age",
    "view",
    "split",
    "transposed",
    "process_group",
    "cache_dtype",
    "max_cache_bytes",
)
"""The settings of a group that a plan depends on."""


def cache_of(group: dict[str, Any]) -> CacheGNS:
    """The solver with the settings of a parameter group of CacheMuon."""
    return CacheGNS(group["solver"], group["probe"], group["vectors"], group["clip"], group["max_norm"])


def cost_of(group: dict[str, Any], param: Tensor, piece: Piece) -> Executed:
    """What each outcome of one of a parameter's matrices costs, as executed."""
    n, m = piece.wide
    solver, sketch = group["solver"], {"probe": group["probe"], "vectors": group["vectors"]}
    return executed_by(solver, n, m, solver.precision(param), rank=cache_of(group).rank(n), **sketch)


@dataclass(frozen=True, eq=False, slots=True)
class Policy:
    """What the matrices of one kind in one group have in common."""

    cache: CacheGNS
    guard: Guard | None  # None: the cache never rests for what it costs
    cold: int  # FLOPs of a refresh
    kept: int  # bytes of a transform
    worth: float  # what a transform saves at most, as `Guard.saved`, for each of its bytes
    hit_room: int  # bytes, for each of a batch
    solve_room: int
    left: int  # bytes that a probe leaves until the gate has decided
    aside: str = ""  # why it is never cached, whatever it costs

    @classmethod
    def of(cls, group: dict[str, Any], param: Tensor, piece: Piece, batch: int) -> Policy:
        """For a matrix of a parameter, of whose kind there are `batch`."""
        n, m = piece.wide
        cache, cost, size = cache_of(group), cost_of(group, param, piece), computed_in(param.dtype).itemsize
        lagged, kept_in = group["gate"] == "lagged", cached_in(group, param.dtype)
        kept, hit_room = n * n * kept_in.itemsize, hit_bytes(n, m, cache.columns(n), size)
        if kept_in.itemsize < size:
            hit_room += kept  # a stack of them, before it is in the precision of the products
        limits = {"max_age": group["max_age"], "batch": batch, "lagged": lagged}
        guard = Guard.of(cost, device=param.device.type, **limits)
        left = 0 if lagged else n * m if cache.probe == "exact" else 2 * n * cost.rank
        room = hit_room, solve_bytes(n, m, size), left * size
        few = f"fewer than min_rows={group['min_rows']} rows" if n < group["min_rows"] else ""
        guarded = guard if group["guard"] else None
        return cls(cache, guarded, cost.cold, kept, guard.saved / kept, *room, aside=few)

    @property
    def always_rests(self) -> bool:
        """Whether its cache is never used."""
        return self.resting(wait=0)

    def resting(self, wait: int) -> bool:
        """Whether its cache is set aside, for good or by the guard."""
        return bool(self.aside) or (self.guard is not None and self.guard.resting(wait))


Member = tuple[dict[str, Any], Tensor, Piece, int]
"""A matrix: its group, its parameter, and its part of that, with the index."""


def spread(weights: list[int], places: int) -> list[int]:
    """A place for each weight, in their order, so that all places have about the same sum.

    >>> spread([3, 3, 1, 1, 1, 1, 1, 1], 4)
    [0, 1, 2, 2, 2, 3, 3, 3]
    """
    total, before, found = sum(weights), 0, []
    for weight in weights:
        found.append((2 * before + weight) * places // (2 * total))  # where its middle lies
        before += weight
    return found


class Plan:
    """The policy of every matrix; and by how many steps the first life of each matrix is shorter.

    `max_cache_bytes` is for the transforms of all matrices together; where groups differ in it, the smallest
    counts. What finds no room rests.

    Transforms that were all made at the first step would all be due at one step. So first lives have all
    lengths, and each step gets about the same FLOPs of refreshes from then on; those of one shape together,
    as far as that goes, since they are solved as one batch.

    Ranks that share parameters must come to the same plan for them. They do if they have parameters of the
    same shapes; the parameters of ranks that have not are planned `apart`, as if there were no others.
    """

    def __init__(self, groups: list[dict[str, Any]], apart: Collection[tuple[int, ...]] = ()) -> None:
        self.key = _key(groups)
        limits = [group["max_cache_bytes"] for group in groups if group["use_muon"]]
        self._budget = min((limit for limit in limits if limit is not None), default=None)
        self._places: dict[int, tuple[list[Policy], list[int]]] = {}
        members = [
            (group, param)
            for group in groups
            for param in (group["params"] if group["use_muon"] else ())
            if param.numel()  # others are never stepped
        ]
        self._spread(members)
        for ranks in apart:
            self._spread([pair for pair in members if ranks_of(*pair) == ranks])

    def _spread(self, members: list[tuple[dict[str, Any], Tensor]]) -> None:
        kinds: dict[Any, list[Member]] = {}
        for group, param in members:
            pieces = reading_of(group, param).pieces
            for index, piece in enumerate(pieces):
                kind = (id(group), piece.sides, param.dtype, param.device)
                kinds.setdefault(kind, []).append((group, param, piece, index))
            self._places[id(param)] = [], [0] * len(pieces)
        due: dict[int, list[tuple[int, list[int], int]]] = {}  # by max_age: the FLOPs, and where to write
        policies: dict[tuple[int, int], Policy] = {}
        for alike, policy in self._admit(list(kinds.values())):
            policies |= {(id(param), index): policy for _, param, _, index in alike}
            max_age = alike[0][0]["max_age"]
            if max_age and not policy.always_rests:
                places = [(self._places[id(param)][1], index) for _, param, _, index in alike]
                due.setdefault(max_age, []).extend((policy.cold, *place) for place in places)
        for _, param in members:
            found, early = self._places[id(param)]
            found += [policies[id(param), index] for index in range(len(early))]
        for max_age, entries in due.items():
            steps = spread([flops for flops, _, _ in entries], max_age + 1)
            for (_, early, i), step in zip(entries, steps, strict=True):
                early[i] = step

    def _admit(self, kinds: list[list[Member]]) -> Iterator[tuple[list[Member], Policy]]:
        """The matrices of each kind with their policy: where a byte saves most come first, as many as there
        is room for, unless so few of a kind would not pay; the others rest.
        """
        policies = [Policy.of(*alike[0][:3], len(alike)) for alike in kinds]
        if self._budget is None:
            yield from zip(kinds, policies, strict=True)
            return
        left = self._budget
        for alike, policy in sorted(zip(kinds, policies, strict=True), key=lambda pair: -pair[1].worth):
            if policy.always_rests:
                yield alike, policy
                continue
            number = min(len(alike), left // policy.kept)
            if number and not (cached := Policy.of(*alike[0][:3], number)).always_rests:
                yield alike[:number], cached
                left -= number * policy.kept
                alike = alike[number:]
            if alike:
                yield alike, replace(policy, aside="no room within max_cache_bytes")

    def digest(self, params: Iterable[Tensor]) -> int:
        """A number that tells plans for these parameters apart."""
        told = []
        for param in params:
            policies, early = self.of(param)
            told.append((early, [(policy.guard, policy.aside) for policy in policies]))
        return int.from_bytes(blake2b(repr(told).encode(), digest_size=7).digest(), "little")

    @property
    def pays(self) -> bool:
        """Whether any cache would pay, if there were room for it; or there is nothing to cache."""
        guards = [policy.guard for found, _ in self._places.values() for policy in found]
        return not guards or any(guard is None or not guard.always_rests for guard in guards)

    def of(self, param: Tensor) -> tuple[list[Policy], list[int]]:
        """The policy, and `early`, of each matrix of a parameter."""
        return self._places[id(param)]

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether it is still the plan of these groups."""
        return self.key == _key(groups)


def _key(groups: list[dict[str, Any]]) -> list[Any]:
    return [
        (*(group[name] for name in SETTINGS), *map(identity, group["params"]))
        for group in groups
        if group["use_muon"]
    ]
