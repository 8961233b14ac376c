"""Statistics: functions of a plan, whose schedule has counted what every step did to every matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch import distributed as dist

from ..distributed.placement import Placement
from ..engine.bucket import Choice, Matrix
from ..engine.plan import Plan
from ..routing.layout import named_params, number_name
from ..routing.names import aligned, looks_like_embedding_or_head
from .counters import LAST, MADE, NEVER, OUTCOMES, PROBED, REFRESHED, REFRESHES, UNTIL, Event, last_event

Placements = Mapping[int, Placement]
Counts = dict[str, list[int]]
"""How often each outcome was, for each matrix by name."""


class Flops(NamedTuple):
    """What steps of a matrix cost: all ranks, this one, and fresh solves on as many ranks as work on it."""

    spent: int
    here: int
    fresh: int


class MatrixReport(NamedTuple):
    """One matrix by its name; `placement` is that of a matrix which several ranks share."""

    name: str
    matrix: Matrix
    choice: Choice
    placement: Placement | None
    counters: list[int]
    residuals: list[float]

    @property
    def outcomes(self) -> Counter[str]:
        """How often each outcome was."""
        return Counter(dict(zip(OUTCOMES, self.counters, strict=False)))

    @property
    def age(self) -> int | None:
        """How many steps ago the transform was made; None without one."""
        return None if self.counters[MADE] == NEVER else self.matrix.group["step"] - self.counters[MADE]

    @property
    def event(self) -> Event | None:
        """The last outcome; None before the first step."""
        step = self.matrix.group["step"]
        return None if self.counters[LAST] < 0 else last_event(self.counters, self.residuals, step)

    def flops(self, outcomes: Mapping[str, int]) -> Flops:
        """What such outcomes cost. Where transforms are sent, all ranks work on the matrix, and its owner
        makes one for them also while the cache is suspended.
        """
        prices, place = self.choice.prices, self.placement
        copies = len(place.ranks) - 1 if place is not None and place.replicated else 0
        owner = _price(prices.executed | ({"uncached": prices.transform} if copies else {}), outcomes)
        copy = _price(prices.copy, outcomes) if copies else 0
        steps = sum(outcomes.values()) - outcomes.get("non-finite", 0)
        here = owner if place is None or place.owned else copy
        return Flops(owner + copies * copy, here, steps * prices.solve * (1 + copies))

    @property
    def cache(self) -> str:
        """What its cache is doing, in words."""
        if self.choice.why:
            return f"not cached: {self.choice.why}"
        if self.choice.life.always is not None:
            return "solved at every step"
        if self.counters[UNTIL] > self.matrix.group["step"]:
            return f"suspended until step {self.counters[UNTIL]}: its residual was above gamma"
        return "no transform yet" if self.age is None else f"transform of age {self.age}"


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: where it went and why, its learning rate, what a step costs, and what the cache did.

    `solve` are the FLOPs of a fresh solve, `hits` the share of steps that reused a transform, `saved` the
    share of the FLOPs of fresh solves, on as many ranks, that was not spent. NaN where nothing is known yet.
    """

    name: str
    shape: tuple[int, ...]
    to: str
    why: str
    lr: float
    solve: int = 0
    hits: float = math.nan
    saved: float = math.nan
    cache: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns: a row for each parameter, and notes on all; as text, a table of them."""

    rows: tuple[ParameterRow, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = [["name", "shape", "to", "why", "lr", "solve", "hits", "saved", "cache"]]
        for row in self.rows:
            solve = _flops(row.solve) if row.solve else "-"
            shares = [f"{share:.0%}" if math.isfinite(share) else "-" for share in (row.hits, row.saved)]
            own = [row.name, str(row.shape), row.to, row.why, f"{row.lr:.3g}"]
            table.append([*own, solve, *shares, row.cache])
        return "\n".join([*aligned(table, "<<<<>>>><"), *self.notes])


def cache_stats(plan: Plan, placements: Placements, bytes_sent: Iterable[Counter[str]]) -> dict[str, Any]:
    """What was done so far: totals, and under "matrices" the same for each matrix by name.

    `flops` are matrix products executed, by all ranks that share a matrix, `flops_here` by this one, and
    `flops_paper` those of the same outcomes by the paper's cost model; `bytes_sent` are those by this rank to
    others, for each kind of collective. Waits for the last step, but not for other ranks: all of them know
    all outcomes.
    """
    matrices: dict[str, dict[str, Any]] = {}
    for one in _reports(plan, placements):
        misses = dict(one.outcomes)
        matrices[one.name] = {
            "calls": one.outcomes.total(),
            "hits": misses.pop("hit"),
            "misses": misses,
            "residual": one.residuals[PROBED],
            "refresh_residual": one.residuals[REFRESHED],
            "age": one.age,
            "last": None if one.event is None else one.event.outcome,
            "flops": one.flops(one.outcomes).spent,
            "flops_here": one.flops(one.outcomes).here,
            "flops_paper": _price(one.choice.prices.paper, one.outcomes),
        }
    sums = ("calls", "hits", "flops", "flops_here", "flops_paper")
    totals = {key: sum(entry[key] for entry in matrices.values()) for key in sums}
    return {
        **totals,
        "misses": totals["calls"] - totals["hits"],
        "hit_rate": _share(totals["hits"], totals["calls"]),
        "bytes_sent": dict(sum(bytes_sent, Counter[str]())),
        "matrices": matrices,
    }


def events(plan: Plan) -> dict[str, Event]:
    """The last outcome of each matrix that was stepped, by name."""
    return {one.name: one.event for one in _reports(plan) if one.event is not None}


def counted(plan: Plan) -> Counts:
    """How often each outcome was so far."""
    return {one.name: one.counters[: len(OUTCOMES)] for one in _reports(plan)}


def metrics(plan: Plan, placements: Placements, before: Counts, rates: Sequence[float]) -> dict[str, float]:
    """Numbers for a log, always under the same names: since `before`, and of the last step.

    Since the last call of `metrics`: `calls`, one for each matrix and step; `hit_rate`, and the shares of
    calls that were `refreshed` (a new transform), `rejected` (of these, for their residual), `bounded`,
    `uncached` and `non_finite`; `flops`, executed by all ranks; `flops_saved`, the share of the FLOPs of
    fresh solves, by the same ranks, that was not spent. Of the last step: `last/hit_rate`; `last/residual`,
    the median over cached directions, and `last/residual_max`; `last/age`, the mean over transforms. Now:
    `lr` and `lr_adam`, the highest learning rates of Muon's groups and of Adam's. NaN where nothing is known.

    >>> import torch
    >>> from cachemuon import CacheMuon
    >>> W = torch.nn.Parameter(torch.zeros(256, 384))
    >>> optimizer = CacheMuon([W], lr=0.01)
    >>> for _ in range(4):
    ...     W.grad = torch.eye(256, 384)
    ...     optimizer.step()
    >>> found = optimizer.metrics()
    >>> found["muon/calls"], found["muon/hit_rate"], found["muon/last/age"], found["muon/lr"]
    (4.0, 0.75, 3.0, 0.01)
    >>> optimizer.metrics()["muon/calls"]
    0.0
    """
    reports = list(_reports(plan, placements))
    outcomes: Counter[str] = Counter()
    flops = []
    for one in reports:
        new = one.outcomes
        new.subtract(dict(zip(OUTCOMES, before.get(one.name, ()), strict=False)))
        outcomes.update(new)
        flops.append(one.flops(new))
    spent = sum(one.spent for one in flops)
    last = [one.event for one in reports if one.event is not None]
    probed = [event.residual for event in last if math.isfinite(event.residual)]
    ages = [one.age for one in reports if one.age is not None]
    highest = dict.fromkeys((True, False), math.nan)
    for group, rate in zip(plan.groups, rates, strict=True):
        highest[group["use_muon"]] = max(rate, highest[group["use_muon"]])
    calls = outcomes.total()
    outcomes["refreshed"] = sum(outcomes[OUTCOMES[code]] for code in REFRESHES)
    outcomes["hit_rate"], outcomes["non_finite"] = outcomes["hit"], outcomes["non-finite"]
    shares = ("hit_rate", "refreshed", "rejected", "bounded", "uncached", "non_finite")
    return {
        "calls": calls,
        **{name: _share(outcomes[name], calls) for name in shares},
        "flops": spent,
        "flops_saved": 1 - _share(spent, sum(one.fresh for one in flops)),
        "last/hit_rate": _share(sum(event.hit for event in last), len(last)),
        "last/residual": median(probed) if probed else math.nan,
        "last/residual_max": max(probed, default=math.nan),
        "last/age": fmean(ages) if ages else math.nan,
        "lr": highest[True],
        "lr_adam": highest[False],
    }


def explain(plan: Plan, placements: Placements, rates: Sequence[float]) -> Explanation:
    """For each parameter where it went and why, its learning rate, what a step costs there, what the cache
    has saved, or why there is none. `print(optimizer.explain())` shows it; before the first step too.

    >>> import torch
    >>> from cachemuon import CacheMuon
    >>> W = torch.nn.Parameter(torch.zeros(64, 64))
    >>> print(CacheMuon([("W", W)]).explain())
    name  shape     to    why          lr      solve  hits  saved  cache
    W     (64, 64)  muon  as given  0.001  7.9 MFLOP     -      -  not cached: a fresh solve is faster
    """
    known: dict[Tensor, list[MatrixReport]] = {}
    for one in _reports(plan, placements, unseen=True):
        known.setdefault(one.matrix.param, []).append(one)
    found, rows = suspects(plan.groups), []
    for number, (group, lr) in enumerate(zip(plan.groups, rates, strict=True)):
        reasons = group.get("reasons") or ["as given"] * len(group["params"])
        for (name, param), why in zip(named_params(group, number), reasons, strict=True):
            if param in known:
                why += ", looks like an embedding or head" if name in found else ""
                rows.append(_row(name, why, lr, known[param]))
            else:  # without elements, if it is Muon's
                to, cache = ("muon", "empty") if group["use_muon"] else ("adam", "")
                rows.append(ParameterRow(name, tuple(param.shape), to, why, lr, cache=cache))
    return Explanation(tuple(rows), tuple(_notes(plan)))


def suspects(groups: list[dict[str, Any]]) -> set[str]:
    """Muon's matrices that look like embeddings or output heads, in groups that the program made itself."""
    return {
        name
        for number, group in enumerate(groups)
        for name, param in (named_params(group, number) if group["use_muon"] else ())
        if not group.get("reasons") and looks_like_embedding_or_head(name, tuple(param.shape))
    }


def _row(name: str, why: str, lr: float, reports: list[MatrixReport]) -> ParameterRow:
    outcomes = sum((one.outcomes for one in reports), Counter[str]())
    flops = [one.flops(one.outcomes) for one in reports]
    saved = 1 - _share(sum(one.spent for one in flops), sum(one.fresh for one in flops))
    hits, solve = _share(outcomes["hit"], outcomes.total()), sum(one.choice.prices.solve for one in reports)
    states = Counter(one.cache for one in reports)
    cache = "; ".join(text if len(states) == 1 else f"{number} {text}" for text, number in states.items())
    why = why if len(reports) == 1 else f"{why}, {len(reports)} matrices"
    shape = tuple(reports[0].matrix.param.shape)
    return ParameterRow(name, shape, "muon", why, lr, solve, hits, saved, cache)


def _notes(plan: Plan) -> Iterator[str]:
    """How the ranks share the work."""
    for number in sorted({len(kind.ranks) for kind in plan.kinds if kind.ranks}):
        yield f"{number} ranks share the solves: one owner rank for each matrix"
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world > 1 and any(not kind.ranks for kind in plan.kinds):
        yield (
            f"{world} ranks, each solves all: if the model is under DistributedDataParallel, "
            f"param_groups(ddp_model) or process_group= shares the solves"
        )


def _price(prices: Mapping[str, int], outcomes: Mapping[str, int]) -> int:
    return sum(count * prices.get(outcome, 0) for outcome, count in outcomes.items())


def _reports(
    plan: Plan, placements: Placements = MappingProxyType({}), *, unseen: bool = False
) -> Iterator[MatrixReport]:
    """Every matrix that has been stepped; with `unseen`, all. A name that another one has already is
    replaced by the parameter's number.
    """
    names: dict[Tensor, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(plan.groups):
        for place, (name, param) in enumerate(named_params(group, number) if group["use_muon"] else ()):
            names[param] = number_name(number, place) if name in taken else name
            taken.add(names[param])
    tables = plan.schedule.counters.tolist(), plan.schedule.residuals.tolist()
    for x, counters, residuals in zip(plan.matrices, *tables, strict=True):
        if unseen or "counters" in plan.state.get(x.param, {}):
            name = names[x.param] if len(x.layout.views) == 1 else f"{names[x.param]}[{x.index}]"
            placement = placements.get(x.number)
            yield MatrixReport(name, x, plan.choices[x.number], placement, counters, residuals)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _flops(number: int) -> str:
    """A number of FLOPs for people.

    >>> _flops(8_912_896), _flops(145_408)
    ('8.9 MFLOP', '0.1 MFLOP')
    """
    size, letter = next((10**e, x) for e, x in ((12, "T"), (9, "G"), (6, "M")) if number >= 10**e or e == 6)
    return f"{number / size:.1f} {letter}FLOP"
