"""Statistics: functions of a plan, whose schedule has counted what every step did to every matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from torch import Tensor

from ..distributed.placement import Placement
from ..engine.bucket import Matrix
from ..engine.kinds import Prices
from ..engine.plan import Plan
from ..routing.layout import named_params, number_name
from .counters import (
    LAST,
    MADE,
    NEVER,
    OUTCOMES,
    REFRESHES,
    UNTIL,
    Event,
    age_at,
    last_event,
    outcome_counts,
    summary,
)

Placements = Mapping[int, Placement]
Counts = dict[str, list[int]]
"""How often each outcome was, for each matrix by name."""


class MatrixReport(NamedTuple):
    """One matrix by its name, with its counters and residuals."""

    name: str
    matrix: Matrix
    counters: list[int]
    residuals: list[float]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: where it went and why, what a step costs there, and what the cache did.

    `solve` are the FLOPs of a fresh solve of its matrices, `hits` the share of its steps that reused a
    transform, `saved` the share of fresh solves' FLOPs that was not spent; NaN where there is nothing to tell
    yet.
    """

    name: str
    shape: tuple[int, ...]
    to: str
    why: str
    solve: int = 0
    hits: float = math.nan
    saved: float = math.nan
    cache: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns: a row for each parameter; as text, a table of them."""

    rows: tuple[ParameterRow, ...]

    def __str__(self) -> str:
        cells = [["name", "shape", "to", "why", "solve", "hits", "saved", "cache"]]
        for row in self.rows:
            solve = _flops(row.solve) if row.solve else "-"
            shares = [f"{share:.0%}" if math.isfinite(share) else "-" for share in (row.hits, row.saved)]
            cells.append([row.name, str(row.shape), row.to, row.why, solve, *shares, row.cache])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = "<<<<>>><"
        lines = (
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            for row in cells
        )
        return "\n".join(line.rstrip() for line in lines)


def cache_stats(plan: Plan, placements: Placements, bytes_sent: Iterable[Counter[str]]) -> dict[str, Any]:
    """What was done so far: totals, and under "matrices" the same for each matrix by name.

    `calls`, `hits`, `misses`, `hit_rate`; `flops`: matrix products executed, by all ranks that share a
    matrix, and `flops_here` by this one; `flops_paper`: the same outcomes by the paper's cost model;
    `bytes_sent`: by this rank to others, for each kind of collective. For each matrix also the misses by
    reason, the last `residual`, the `refresh_residual`, the `age` of the transform and the `last` outcome.
    Waits for the last step, but not for other ranks: all of them know all outcomes.
    """
    matrices: dict[str, dict[str, Any]] = {}
    totals = {"calls": 0, "hits": 0, "misses": 0, "flops": 0, "flops_here": 0, "flops_paper": 0}
    for one in _reports(plan):
        outcomes = outcome_counts(one.counters)
        entry = summary(one.counters, one.residuals, one.matrix.group["step"])
        prices = plan.choices[one.matrix.number].prices
        entry["flops"] = _spent(prices, outcomes, placements.get(one.matrix.number))
        entry["flops_here"] = _spent_here(prices, outcomes, placements.get(one.matrix.number))
        entry["flops_paper"] = _price(prices.paper, outcomes)
        matrices[one.name] = entry
        for key in totals.keys() - {"misses"}:
            totals[key] += entry[key]
        totals["misses"] += sum(entry["misses"].values())
    hit_rate = totals["hits"] / totals["calls"] if totals["calls"] else math.nan
    sent = sum(bytes_sent, Counter[str]())
    return {**totals, "hit_rate": hit_rate, "bytes_sent": dict(sent), "matrices": matrices}


def events(plan: Plan) -> dict[str, Event]:
    """The last outcome of each matrix that was stepped, by name."""
    return {
        one.name: last_event(one.counters, one.residuals, one.matrix.group["step"])
        for one in _reports(plan)
        if one.counters[LAST] >= 0
    }


def counted(plan: Plan) -> Counts:
    """How often each outcome was so far."""
    return {one.name: one.counters[: len(OUTCOMES)] for one in _reports(plan)}


def metrics(plan: Plan, placements: Placements, before: Counts) -> dict[str, float]:
    """Numbers for a log, always under the same names: since `before`, and of the last step.

    Since the last call of `metrics` (or since the optimizer was made, or its state loaded): `calls`, one
    for each matrix and step; `hit_rate`, and the shares of calls that were `refreshed` (a new transform),
    `rejected` (of these, for their residual), `bounded`, `uncached` and `non_finite`; `flops`: products
    executed, by all ranks; `flops_saved`: the share of the cheapest fresh solves' FLOPs that was not spent.
    Of the last step: `last/hit_rate`; `last/residual`, the median of the cached directions', and
    `last/residual_max`; `last/age`, the mean of the transforms'. NaN where there is nothing to tell.

    >>> import torch
    >>> from cachemuon import CacheMuon
    >>> W = torch.nn.Parameter(torch.zeros(256, 384))
    >>> optimizer = CacheMuon([W], lr=0.01)
    >>> for _ in range(4):
    ...     W.grad = torch.eye(256, 384)
    ...     optimizer.step()
    >>> found = optimizer.metrics()
    >>> found["muon/calls"], found["muon/hit_rate"], found["muon/last/age"]
    (4.0, 0.75, 3.0)
    >>> optimizer.metrics()["muon/calls"]
    0.0
    """
    outcomes: Counter[str] = Counter()
    spent, fresh = 0, 0
    last: list[Event] = []
    ages = []
    for one in _reports(plan):
        new = Counter(outcome_counts(one.counters))
        new.subtract(outcome_counts(before.get(one.name, ())))
        outcomes.update(new)
        prices = plan.choices[one.matrix.number].prices
        spent += _spent(prices, new, placements.get(one.matrix.number))
        fresh += _fresh(prices, new)
        step = one.matrix.group["step"]
        if one.counters[LAST] >= 0:
            last.append(last_event(one.counters, one.residuals, step))
        if one.counters[MADE] != NEVER:
            ages.append(age_at(one.counters, step) or 0)
    calls = outcomes.total()
    probed = [event.residual for event in last if math.isfinite(event.residual)]
    return {
        "calls": calls,
        "hit_rate": _share(outcomes["hit"], calls),
        "refreshed": _share(sum(outcomes[OUTCOMES[code]] for code in REFRESHES), calls),
        "rejected": _share(outcomes["rejected"], calls),
        "bounded": _share(outcomes["bounded"], calls),
        "uncached": _share(outcomes["uncached"], calls),
        "non_finite": _share(outcomes["non-finite"], calls),
        "flops": spent,
        "flops_saved": 1 - _share(spent, fresh),
        "last/hit_rate": _share(sum(event.hit for event in last), len(last)),
        "last/residual": median(probed) if probed else math.nan,
        "last/residual_max": max(probed, default=math.nan),
        "last/age": fmean(ages) if ages else math.nan,
    }


def explain(plan: Plan, placements: Placements) -> Explanation:
    """For each parameter where it went and why, what a step costs there, what the cache has saved, and, where
    there is none, why. `print(optimizer.explain())` shows it; before the first step too.

    >>> import torch
    >>> from cachemuon import CacheMuon
    >>> W = torch.nn.Parameter(torch.zeros(64, 64))
    >>> print(CacheMuon([("W", W)]).explain())
    name  shape     to    why           solve  hits  saved  cache
    W     (64, 64)  muon  as given  7.9 MFLOP     -      -  none: a fresh solve is faster
    """
    known: dict[Tensor, list[MatrixReport]] = {}
    for one in _reports(plan, unseen=True):
        known.setdefault(one.matrix.param, []).append(one)
    rows = []
    for number, group in enumerate(plan.groups):
        reasons = group.get("reasons") or ["as given"] * len(group["params"])
        for (name, param), reason in zip(named_params(group, number), reasons, strict=True):
            if not group["use_muon"]:
                rows.append(ParameterRow(name, tuple(param.shape), "adam", reason))
            elif param.numel() == 0:
                rows.append(ParameterRow(name, tuple(param.shape), "muon", reason, cache="empty"))
            else:
                rows.append(_row(plan, placements, name, reason, known[param]))
    return Explanation(tuple(rows))


def _row(
    plan: Plan, placements: Placements, name: str, reason: str, reports: list[MatrixReport]
) -> ParameterRow:
    outcomes: Counter[str] = Counter()
    solve = spent = fresh = 0
    for one in reports:
        found, prices = outcome_counts(one.counters), plan.choices[one.matrix.number].prices
        outcomes.update(found)
        solve += prices.solve
        spent += _spent(prices, found, placements.get(one.matrix.number))
        fresh += _fresh(prices, found)
    states = Counter(_cache_state(plan, one) for one in reports)
    texts = [text if len(states) == 1 else f"{number} {text}" for text, number in states.items()]
    reason = reason if len(reports) == 1 else f"{reason}, {len(reports)} matrices"
    hits = _share(outcomes["hit"], outcomes.total())
    shape = tuple(reports[0].matrix.param.shape)
    return ParameterRow(name, shape, "muon", reason, solve, hits, 1 - _share(spent, fresh), "; ".join(texts))


def _cache_state(plan: Plan, one: MatrixReport) -> str:
    choice, step = plan.choices[one.matrix.number], one.matrix.group["step"]
    if choice.why:
        return f"none: {choice.why}"
    if choice.orthogonalizer.entry is None:
        return "none: every step solves"
    if one.counters[UNTIL] > step:
        return f"solved fresh until step {one.counters[UNTIL]}: its residual was above gamma"
    age = age_at(one.counters, step)
    return "no transform yet" if age is None else f"transform of age {age}"


def _spent(prices: Prices, outcomes: Mapping[str, int], placement: Placement | None) -> int:
    """The FLOPs of such outcomes, by all ranks that share the matrix."""
    spent = _spent_by_owner(prices, outcomes, placement)
    if placement is not None and placement.replicated:
        spent += (len(placement.ranks) - 1) * _price(prices.copy, outcomes)
    return spent


def _spent_here(prices: Prices, outcomes: Mapping[str, int], placement: Placement | None) -> int:
    """The same by this rank."""
    if placement is None or placement.owned:
        return _spent_by_owner(prices, outcomes, placement)
    return _price(prices.copy, outcomes) if placement.replicated else 0


def _spent_by_owner(prices: Prices, outcomes: Mapping[str, int], placement: Placement | None) -> int:
    """The same by its owner, which makes a transform for other ranks also while the cache is suspended."""
    replicated = placement is not None and placement.replicated
    return _price(prices.executed | ({"uncached": prices.transform} if replicated else {}), outcomes)


def _price(prices: Mapping[str, int], outcomes: Mapping[str, int]) -> int:
    return sum(count * prices.get(outcome, 0) for outcome, count in outcomes.items())


def _fresh(prices: Prices, outcomes: Mapping[str, int]) -> int:
    """The FLOPs of the cheapest fresh solves instead."""
    return (sum(outcomes.values()) - outcomes.get("non-finite", 0)) * prices.solve


def _reports(plan: Plan, *, unseen: bool = False) -> Iterator[MatrixReport]:
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
            name = names[x.param]
            own = name if len(x.layout.views) == 1 else f"{name}[{x.index}]"
            yield MatrixReport(own, x, counters, residuals)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _flops(number: int) -> str:
    """A number of FLOPs for people.

    >>> _flops(8_912_896)
    '8.9 MFLOP'
    """
    size, letter = next((10**e, x) for e, x in ((12, "T"), (9, "G"), (6, "M"), (0, "")) if number >= 10**e)
    return f"{number / size:.1f} {letter}FLOP" if letter else f"{number} FLOP"
