"""CacheMuon, which solves when it must: settings, checks, and the paper's own algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from ..cache.gns import GATES, check_gate
from ..distributed.exchange import Shared, apart, travel, worked_on
from ..distributed.homes import Home, Homes, ranks_of
from ..distributed.layout import Work
from ..distributed.rank_group import EXCHANGES, Party
from ..engine.cached import CachedStep, Decision, Told, Unread, blocks_for, drop_transform, residuals_of
from ..engine.fresh import send
from ..engine.host import Claim, Edits
from ..engine.matrices import Matrix, agreed, cached_in, local
from ..engine.plan import Plan, Policy, cache_of, cost_of
from ..flops.model import paper_cost, price
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import GramNS
from ..report.accounts import Record
from ..report.counters import AGE, NO_AGE, WAIT, transform_name
from ..routing.layout import Piece, reading_of
from .base import MatrixOptimizer
from .settings import check_kept, check_pieces, shorthand


class CacheMuon(MatrixOptimizer):
    """CacheMuon: Muon that reuses the left transform of an earlier solve, as Algorithm A.5 does, and clips.

    The transform Q of a matrix's last solve is applied to its new momentum, and a few directions that
    it over-amplifies are cut to about 1 (`CacheGNS`). If the residual of the result is at most `gamma`, it is
    the direction (a hit), shortened where its spectral norm would be above `max_norm`; else, and after
    `max_age` steps, it is solved anew and Q replaced (a miss). `cache_stats()` tells what was decided.
    Clipping and a short life let cached directions train about as well as fresh ones, where matrices are not
    small (docs/beyond-the-paper.md): gamma only stops what has gone wrong. `CacheMuon.paper` is the paper's
    own algorithm.

    Settings and defaults that torch.optim.Muon has too are its own. For its limited steps the best learning
    rate is up to twice that of `Muon`, on text; `max_norm=4` is for those who keep theirs.

    `probe="sketch"` estimates the residual from `vectors` random vectors, `probe="exact"` computes it, and
    goes with `clip=0`.

    `gate="sync"` reads all residuals of a step on the host together, then decides. `gate="lagged"`
    decides on the last residual known for a transform, which was read while other work went on: the
    host never waits for the step it is in, and a transform that has gone bad is used once before it is
    replaced.
    `guard=True` sets the cache of a matrix aside while it costs more than it saves (`guard.Guard`), and for
    good where the matrix is small. With `min_rows` a matrix whose smaller side is below it is never cached,
    whatever it costs.

    `cache_dtype=torch.float16` keeps transforms in half the bytes, and `max_cache_bytes` limits those of all
    of them together: they go where a byte saves most, and the other matrices rest (docs/memory.md).

    `process_group` are the ranks that have copies of plain parameters, as under DistributedDataParallel
    (`param_groups` finds it); what is sharded (FSDP2, tensor parallel) is known by itself. Each matrix has an
    owner among the ranks, which solves for it and decides. Where all have copies they apply its transforms
    themselves, and `exchange="directions"` has the owner do that too, and keep the only one: fewer FLOPs,
    more bytes (docs/distributed.md).

    >>> import torch
    >>> W = torch.nn.Parameter(torch.zeros(256, 384))
    >>> opt = CacheMuon([W], lr=0.01)
    >>> for _ in range(3):
    ...     W.grad = torch.eye(256, 384)
    ...     opt.step()
    >>> stats = opt.cache_stats()
    >>> stats["calls"], stats["hits"], stats["matrices"]["group0.param0"]["misses"]["cold"]
    (3, 2, 1)
    """

    RECIPE = (*MatrixOptimizer.RECIPE, "probe", "vectors", "clip", "max_norm", "seed", "gate", "cache_dtype")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        eps: float | None = None,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        gamma: float = 20.0,
        probe: str = "sketch",
        vectors: int = 8,
        max_age: int | None = 10,
        clip: float | None = None,
        max_norm: float | None = 2.0,
        seed: int = 0,
        gate: str = "sync",
        guard: bool = True,
        min_rows: int = 0,
        cache_dtype: torch.dtype | None = None,
        max_cache_bytes: int | None = None,
        solver: GramNS | None = None,
        max_workspace_bytes: int | None = None,
        process_group: Any = None,
        exchange: str = "transforms",
    ) -> None:
        if ns_coefficients is not None or ns_steps is not None:
            solver = self._repeated(shorthand(ns_coefficients, ns_steps, solver))
        super().__init__(
            params,
            GramNS() if solver is None else solver,
            eps,
            process_group,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
            gamma=gamma,
            probe=probe,
            vectors=vectors,
            max_age=max_age,
            clip=clip,
            max_norm=max_norm,
            seed=seed,
            gate=gate,
            guard=guard,
            min_rows=min_rows,
            cache_dtype=cache_dtype,
            max_cache_bytes=max_cache_bytes,
            max_workspace_bytes=max_workspace_bytes,
            exchange=exchange,
        )

    @classmethod
    def paper(cls, params: ParamsT, lr: float | Tensor = 1e-3, gamma: float = 5.0, **settings: Any) -> Self:
        """The decisions of the paper's algorithm, A.4 and A.5: exact probe, no clip, age limit or guard.

        `settings` are those of Muon, with the paper's defaults: an average without Nesterov's step, a
        `weight_decay` of 1e-4, an `adjust_lr_fn` of "none". A `gamma` of 0 makes it GramMuon.
        """
        added = {"probe", "vectors", "max_age", "clip", "max_norm", "seed", "gate", "guard"}
        added |= {"min_rows", "cache_dtype", "max_cache_bytes"}
        if taken := sorted(added.intersection(settings)):
            raise ValueError(f"CacheMuon.paper takes no {', '.join(taken)}: the paper's algorithm has none")
        settings = {"weight_decay": 1e-4, "nesterov": False, "adjust_lr_fn": "none", **settings}
        return cls(params, lr=lr, gamma=gamma, probe="exact", max_age=None, clip=0.0, guard=False, **settings)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_gate(group["gamma"], group["max_age"])
        if not isinstance(group["solver"], GramNS):
            raise ValueError(f"solver must be a GramNS, which yields a transform, got {group['solver']!r}")
        if not isinstance(group["seed"], int):
            raise ValueError(f"seed must be an integer, got {group['seed']!r}")
        if group["gate"] not in GATES:
            raise ValueError(f"gate must be one of {', '.join(map(repr, GATES))}, got {group['gate']!r}")
        if not isinstance(group["guard"], bool):
            raise ValueError(f"guard must be True or False, got {group['guard']!r}")
        if not (isinstance(group["min_rows"], int) and group["min_rows"] >= 0):
            raise ValueError(f"min_rows must be an integer >= 0, got {group['min_rows']!r}")
        if group["exchange"] not in EXCHANGES:
            allowed = ", ".join(map(repr, EXCHANGES))
            raise ValueError(f"exchange must be one of {allowed}, got {group['exchange']!r}")
        cache_of(group)
        check_kept(group)

    def _repeated(self, schedule: Schedule) -> GramNS:
        return GramNS(schedule)

    def _orthogonalize(self, matrices: list[Matrix], shared: list[Shared]) -> None:
        self._settle()
        wholes = [*matrices, *(s.matrix for s in shared)]
        decisions = self._decisions(wholes)
        of = {id(d.matrix): d for d in decisions}
        for d in decisions:
            if d.resting and d.age == NO_AGE:  # not at the first such step: a bad gradient may undo it
                drop_transform(d.matrix)
        for s in shared:
            s.matrix.copied = s.home.copied and not of[id(s.matrix)].resting
        copies = [s.matrix for s in shared if s.matrix.copied]
        own, moving = apart([s for s in shared if not s.matrix.copied])
        here = [*matrices, *copies, *own]
        sent = [*here, *worked_on(moving)]
        cached = [of[id(x)] for x in sent if id(x) in of and not of[id(x)].resting]
        step = CachedStep(self._kept, send(sent, blocks_for(cached)))
        step.take([of[id(x)] for x in here])
        travel(moving, lambda arrived: step.take([of[id(x)] for x in arrived]), self._kept.workspace)
        told = [of[id(s.matrix)] for s in shared if not s.matrix.copied]
        for d in told:
            d.follow()
        self._post("counters", wholes, [d.counters for d in decisions])
        if any(not d.resting for d in decisions):
            self._post("residuals", wholes, [d.residuals for d in decisions])
        if any(d.outcome == "non-finite" for d in decisions):
            self._warn_non_finite()
        self._send(step.unread)
        self._tell(told)

    def _tell(self, told: list[Decision]) -> None:
        """Tell the other ranks the residuals by which an owner has decided, or will."""
        parties: dict[Party, list[Decision]] = {}
        for d in told:
            parties.setdefault(d.matrix.party, []).append(d)
        for party, members in parties.items():
            residuals = party.total(residuals_of(members)).flatten()
            finite = agreed([d.matrix for d in members])
            self._kept.send([Told(d) for d in members], [finite], [residuals])

    def _homes(self) -> Homes:
        self._plan()  # by which owners are chosen
        return super()._homes()

    def _agree(self, parties: list[Party]) -> None:
        """Ranks whose plans for what they share differ plan that apart. Where matrices may have other owners
        than before, and after loading, only the transforms that are worked with here are kept, and what lacks
        one begins anew, on all ranks.
        """
        self._settle()
        members, differing = self._homes().members, set(self._kept.differing)
        alone = Plan(self.param_groups) if parties else None
        for party in parties:
            ranks = ranks_of(*members[party][0])
            same = alone is None or party.same(alone.digest(param for _, param in members[party]))
            differing = differing - {ranks} if same else differing | {ranks}
        if differing != self._kept.differing:
            self._kept.plan, self._kept.differing = None, differing
        homes, edits = self._homes(), Edits(self._kept.counters)
        self._free(self._plan(), homes, edits)
        for party in parties:
            places, found = [], []
            for _, param in members[party]:
                home, state = homes.of[id(param)], self.state.get(param, {})
                for index in range(len(home.owners)):
                    name = transform_name(index, len(home.owners))
                    if not home.keeps(index):
                        state.pop(name, None)
                    places.append((state, index))
                    found.append(not home.keeps(index) or name in state)
            for (state, index), number in zip(places, party.count(found), strict=True):
                if number < party.size and "counters" in state:
                    edits.rows(state["counters"])[index][AGE] = NO_AGE
        edits.post()

    def state_dict(self) -> StateDict:
        """The state. A cache that rests for a while has zeros for its transform there, so that the entries of
        a state do not depend on when it was saved, as `torch.distributed.checkpoint` wants it.
        """
        packed = super().state_dict()
        plan = self._kept.plan
        if plan is None or not plan.fits(self.param_groups):
            return packed
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        for number, (group, param) in enumerate(pairs):
            state = packed["state"].get(number, {})
            if "counters" in state:
                resting = _resting_transforms(group, param, state, plan.of(param)[0], self._home(param))
                packed["state"][number] = {**state, **resting}
        return packed

    def _works(self, group: dict[str, Any], param: Tensor) -> list[Work]:
        found = []
        for piece, policy, early in zip(
            reading_of(group, param).pieces, *self._plan().of(param), strict=True
        ):
            cost, due = cost_of(group, param, piece), None if group["max_age"] is None else early
            rests = policy.always_rests
            found.append(Work(cost.baseline, 0) if rests else Work(cost.hit, cost.cold - cost.hit, due))
        return found

    def _decisions(self, matrices: list[Matrix]) -> list[Decision]:
        plan, found = self._plan(), []
        known = self._rows("counters", matrices), self._rows("residuals", matrices)
        for x, counters, residuals in zip(matrices, *known, strict=True):
            policies, early = plan.of(x.whole)
            found.append(Decision(x, policies[x.index], counters, residuals, early[x.index]))
        return found

    def _plan(self) -> Plan:
        plan: Plan | None = self._kept.plan
        if plan is None or not plan.fits(self.param_groups):
            for group in self.param_groups:
                if group["use_muon"]:
                    self._check_group(group)
            plan = self._kept.plan = Plan(self.param_groups, self._kept.differing)
            self._kept.homes, self._kept.reconciled = None, False
            if not plan.pays:
                self._warn_once(
                    "no cache can pay here: all matrices are too small, or too few of a shape, and rest. "
                    "Muon does the same; guard=False caches them anyway; print(optimizer.explain()) tells of "
                    "each. This is said once."
                )
        return plan

    def _free(self, plan: Plan, homes: Homes, edits: Edits) -> None:
        """Give up the transforms for which a plan has no use; what no other rank has, and lacks one, begins
        anew.
        """
        for param in (p for group in self.param_groups if group["use_muon"] for p in group["params"]):
            state = self.state.get(param, {})
            if "counters" not in state:
                continue
            policies = plan.of(param)[0]
            check_pieces(param, len(policies), state)
            for index, policy in enumerate(policies):
                name = transform_name(index, len(policies))
                if policy.always_rests:
                    state.pop(name, None)
                if policy.always_rests or (id(param) not in homes.of and name not in state):
                    edits.rows(state["counters"])[index][AGE] = NO_AGE

    def _send(self, unread: list[Unread]) -> None:
        """Send to the host what a step has left on the device: the next one will know it."""
        if not unread:
            return
        claims = [
            Claim(d.matrix.state, d.matrix.index, d.before, d.counters, part.columns)
            for part in unread
            for d in part.batch
        ]
        residuals = [part.residual for part in unread if part.residual is not None]
        self._kept.send(claims, [part.finite for part in unread], residuals)

    def _price(
        self, group: dict[str, Any], param: Tensor, piece: Piece, outcomes: dict[str, int]
    ) -> tuple[int, int]:
        paper = price(paper_cost(group["solver"], *piece.wide), outcomes)
        return price(cost_of(group, param, piece), _as_executed(group, outcomes)), paper

    def _price_of_copy(
        self, group: dict[str, Any], param: Tensor, piece: Piece, outcomes: dict[str, int]
    ) -> int:
        return cost_of(group, param, piece).price_of_copy(_as_executed(group, outcomes))

    def _price_fresh(self, group: dict[str, Any], param: Tensor, piece: Piece) -> int:
        return cost_of(group, param, piece).baseline

    def _standings(self, records: list[Record]) -> list[str]:
        plan: Plan | None = self._kept.plan  # the ranks' common one, if there has been a step
        if plan is None or not plan.fits(self.param_groups):
            plan = Plan(self.param_groups)
        return [_standing(plan.of(record.param)[0][record.index], record.counters) for record in records]


def _resting_transforms(
    group: dict[str, Any], param: Tensor, state: dict[str, Any], policies: Sequence[Policy], home: Home | None
) -> dict[str, Tensor]:
    """Zeros for the transforms that a parameter's state lacks, of those that this rank may come to keep."""
    pieces, momentum, found = reading_of(group, param).pieces, local(state["momentum_buffer"]), {}
    for index, (piece, policy) in enumerate(zip(pieces, policies, strict=True)):
        name, n = transform_name(index, len(pieces)), piece.wide[0]
        if name not in state and not policy.always_rests and (home is None or home.keeps(index)):
            found[name] = momentum.new_zeros((n, n), dtype=cached_in(group, param.dtype))
    return found


def _standing(policy: Policy, counters: list[int]) -> str:
    if policy.aside:
        return f"rests: {policy.aside}"
    if policy.guard is not None and policy.guard.always_rests:
        return f"rests: hits alone would save {max(policy.guard.best, 0) / 1000:.0%} of a step"
    if wait := counters[WAIT]:
        return f"rests for {wait} steps: its tries cost more than they saved"
    return "no transform yet" if counters[AGE] == NO_AGE else f"transform of age {counters[AGE]}"


def _as_executed(group: dict[str, Any], outcomes: dict[str, int]) -> dict[str, int]:
    """A lagged gate solves without a probe."""
    if group["gate"] != "lagged":
        return outcomes
    return {**outcomes, "residual": 0, "cold": outcomes["cold"] + outcomes["residual"]}
