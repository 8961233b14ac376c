"""What an optimizer tells of itself: statistics, metrics for a log, and an explanation for people."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..distributed.homes import Home, Homes
from ..engine.host import Kept
from ..optim.settings import check_pieces, named_params, number_name
from ..routing.layout import Piece, reading_of
from .counters import (
    AGE,
    LAST,
    NO_AGE,
    OUTCOMES,
    REFRESHES,
    RESIDUALS,
    Event,
    new_counters,
    outcome_counts,
    summary,
)


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one matrix: where it is, and its counters and residuals."""

    name: str
    group: dict[str, Any]
    param: Tensor
    piece: Piece
    index: int
    counters: list[int]
    residuals: list[float]


@dataclass(frozen=True)
class Explained:
    """One parameter: where it went and why, what a step costs there, and what the cache did.

    `solve` are the FLOPs of a fresh solve of its matrices, `hits` the share of their calls that hit, `saved`
    the share of fresh solves' FLOPs that was not spent; NaN where there is nothing to tell yet.
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

    rows: tuple[Explained, ...]

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


class Accounts(Optimizer):
    """Statistics of an optimizer of matrices; what a solve costs, and why a cache rests, it says itself."""

    _kept: Kept

    @abstractmethod
    def _price(
        self, group: dict[str, Any], param: Tensor, piece: Piece, outcomes: dict[str, int]
    ) -> tuple[int, int]:
        """The FLOPs of one matrix's outcomes: executed, and by the paper's model."""

    @abstractmethod
    def _price_fresh(self, group: dict[str, Any], param: Tensor, piece: Piece) -> int:
        """The FLOPs of one matrix's cheapest fresh solve."""

    def _price_of_copy(
        self, group: dict[str, Any], param: Tensor, piece: Piece, outcomes: dict[str, int]
    ) -> int:
        """The FLOPs of one matrix's outcomes on a rank that has all of it, and does not own it: none, where
        its owner sends directions.
        """
        return 0

    @abstractmethod
    def _standings(self, records: list[Record]) -> list[str]:
        """Whether each matrix is cached, and why not."""

    @abstractmethod
    def _settle(self, *, wait: bool = True) -> None:
        """Bring the counters up to date with what is still on its way to the host."""

    def cache_stats(self) -> dict[str, Any]:
        """What was decided so far: totals, and under "matrices" the same for each matrix by name.

        `calls`, `hits`, `misses`, `hit_rate`; `flops`: matrix products executed, by all ranks that share a
        matrix, and `flops_here` by this one; `flops_paper`: the same outcomes by the paper's cost model;
        `bytes_sent`: by this rank to others, for each kind of exchange. For each matrix also the misses by
        reason, the last `residual`, the `refresh_residual`, the `age` and the `last` outcome. Waits for the
        last step, but not for other ranks: all of them know all decisions.
        """
        matrices: dict[str, dict[str, Any]] = {}
        totals = {"calls": 0, "hits": 0, "misses": 0, "flops": 0, "flops_here": 0, "flops_paper": 0}
        for record in self._records():
            entry, outcomes = summary(record.counters, *record.residuals), outcome_counts(record.counters)
            entry["flops"], entry["flops_here"], entry["flops_paper"] = self._spent(record, outcomes)
            matrices[record.name] = entry
            for key in totals.keys() - {"misses"}:
                totals[key] += entry[key]
            totals["misses"] += sum(entry["misses"].values())
        hit_rate = totals["hits"] / totals["calls"] if totals["calls"] else math.nan
        sent: Counter[str] = Counter()
        for party in self._kept.parties.values():
            sent += party.traffic
        return {**totals, "hit_rate": hit_rate, "bytes_sent": dict(sent), "matrices": matrices}

    def events(self) -> dict[str, Event]:
        """The last decision of the gate about each matrix, by name. Waits for the last step."""
        return {
            record.name: Event.of(record.counters, *record.residuals)
            for record in self._records()
            if record.counters[LAST] >= 0
        }

    def metrics(self, prefix: str = "muon/") -> dict[str, float]:
        """Numbers for a log, always under the same names: since the last call, and of the last step.

        Since the last call of `metrics` (or since the optimizer was made, or its state loaded): `calls`, one
        for each matrix and step; `hit_rate`, and the shares of calls that were `refreshed` (a new transform),
        `refused` (of these, for their residual), `resting` and `non_finite`; `flops`: products executed, by
        all ranks; `flops_saved`: the share of the cheapest fresh solves' FLOPs that was not spent. Of the
        last step: `last/hit_rate`; `last/residual`, the median of what was probed, and `last/residual_max`;
        `last/age`, the mean of the transforms'. NaN where there is nothing to tell. Waits for the last step.

        >>> import torch
        >>> from cachemuon import CacheMuon
        >>> W = torch.nn.Parameter(torch.zeros(256, 384))
        >>> optimizer = CacheMuon([W], lr=0.01)
        >>> for _ in range(4):
        ...     W.grad = torch.eye(256, 384)
        ...     optimizer.step()
        >>> told = optimizer.metrics()
        >>> told["muon/calls"], told["muon/hit_rate"], told["muon/last/age"]
        (4.0, 0.75, 3.0)
        >>> optimizer.metrics()["muon/calls"]
        0.0
        """
        records = list(self._records())
        before, self._kept.told = self._kept.told, self._counted(records)
        outcomes: Counter[str] = Counter()
        spent, fresh = 0, 0
        for alike in self._alike(records):
            new = Counter[str]()
            for record in alike:
                new.update(outcome_counts(record.counters))
                new.subtract(outcome_counts(before.get(record.name, ())))
            outcomes.update(new)
            paid, worth = self._balance(alike[0], new)
            spent, fresh = spent + paid, fresh + worth
        calls = outcomes.total()
        last = [record for record in records if record.counters[LAST] >= 0]
        events = [Event.of(record.counters, *record.residuals) for record in last]
        probed = [event.residual for event in events if math.isfinite(event.residual)]
        ages = [record.counters[AGE] for record in records if record.counters[AGE] != NO_AGE]
        told = {
            "calls": calls,
            "hit_rate": _share(outcomes["hit"], calls),
            "refreshed": _share(sum(outcomes[name] for name in REFRESHES), calls),
            "refused": _share(outcomes["residual"], calls),
            "resting": _share(outcomes["resting"], calls),
            "non_finite": _share(outcomes["non-finite"], calls),
            "flops": spent,
            "flops_saved": 1 - _share(spent, fresh),
            "last/hit_rate": _share(sum(event.hit for event in events), len(events)),
            "last/residual": median(probed) if probed else math.nan,
            "last/residual_max": max(probed, default=math.nan),
            "last/age": fmean(ages) if ages else math.nan,
        }
        return {f"{prefix}{name}": float(value) for name, value in told.items()}

    def explain(self) -> Explanation:
        """For each parameter where it went and why, what a step costs there, what the cache has saved, and
        where it rests, why. `print(optimizer.explain())` shows it; before the first step too.

        >>> import torch
        >>> from cachemuon import CacheMuon
        >>> W = torch.nn.Parameter(torch.zeros(64, 64))
        >>> print(CacheMuon([("W", W)]).explain())
        name  shape     to    why           solve  hits  saved  cache
        W     (64, 64)  muon  as given  7.9 MFLOP     -      -  rests: hits alone would save 0% of a step
        """
        rows = []
        records = list(self._records(unseen=True))
        known: dict[int, list[tuple[Record, str]]] = {}
        for record, standing in zip(records, self._standings(records), strict=True):
            known.setdefault(id(record.param), []).append((record, standing))
        for number, group in enumerate(self.param_groups):
            reasons = group.get("reasons") or ["as given"] * len(group["params"])
            for (name, param), reason in zip(named_params(group, number), reasons, strict=True):
                if not group["use_muon"]:
                    rows.append(Explained(name, tuple(param.shape), "adam", reason))
                elif param.numel() == 0:
                    rows.append(Explained(name, tuple(param.shape), "muon", reason, cache="empty"))
                else:
                    rows.append(self._explained(name, param, reason, known[id(param)]))
        return Explanation(tuple(rows))

    def _explained(
        self, name: str, param: Tensor, reason: str, records: list[tuple[Record, str]]
    ) -> Explained:
        shape = tuple(param.shape)
        outcomes: Counter[str] = Counter()
        solve = spent = fresh = 0
        for record, _ in records:
            found = outcome_counts(record.counters)
            outcomes.update(found)
            paid, worth = self._balance(record, found)
            solve += self._price_fresh(record.group, param, record.piece)
            spent, fresh = spent + paid, fresh + worth
        standings = Counter(standing for _, standing in records)
        told = [text if len(standings) == 1 else f"{number} {text}" for text, number in standings.items()]
        reason = reason if len(records) == 1 else f"{reason}, {len(records)} matrices"
        hits = _share(outcomes["hit"], outcomes.total())
        return Explained(name, shape, "muon", reason, solve, hits, 1 - _share(spent, fresh), "; ".join(told))

    def _alike(self, records: Iterable[Record]) -> list[list[Record]]:
        """Together those matrices whose outcomes have the same prices."""
        found: dict[tuple[Any, ...], list[Record]] = {}
        for record in records:
            home = self._home(record.param)
            shared = home.copied and home.party.size if home else 0
            key = (id(record.group), record.piece.sides, record.param.dtype, shared)
            found.setdefault(key, []).append(record)
        return list(found.values())

    def _spent(self, record: Record, outcomes: dict[str, int]) -> tuple[int, int, int]:
        """The FLOPs of such outcomes: by all ranks that share the matrix, by this one; by the paper's
        model.
        """
        where = record.group, record.param, record.piece
        executed, paper = self._price(*where, outcomes)
        if (home := self._home(record.param)) is None:
            return executed, executed, paper
        copy = self._price_of_copy(*where, outcomes) if home.copied else 0
        here = executed if home.mine(record.index) else copy
        return executed + (home.party.size - 1) * copy, here, paper

    def _balance(self, record: Record, outcomes: dict[str, int]) -> tuple[int, int]:
        """The FLOPs of such outcomes, by all ranks that share the matrix; and of fresh solves instead."""
        solves = sum(outcomes.values()) - outcomes["non-finite"]
        fresh = solves * self._price_fresh(record.group, record.param, record.piece)
        return self._spent(record, outcomes)[0], fresh

    def _counted(self, records: Iterable[Record] | None = None) -> dict[str, list[int]]:
        """How often each outcome was, of each matrix by name."""
        found = self._records() if records is None else records
        return {record.name: record.counters[: len(OUTCOMES)] for record in found}

    def _home(self, param: Tensor) -> Home | None:
        """Where a parameter is that other ranks have too, as far as a step has found that out."""
        homes: Homes | None = self._kept.homes
        return None if homes is None else homes.of.get(id(param))

    def _records(self, *, unseen: bool = False) -> Iterator[Record]:
        """Every matrix that has been stepped; with `unseen`, all. A name that another one has already is
        replaced by the parameter's number.
        """
        self._settle()
        taken: set[str] = set()
        for number, group in enumerate(self.param_groups):
            if not group["use_muon"]:
                continue
            for place, (name, param) in enumerate(named_params(group, number)):
                name = number_name(number, place) if name in taken else name
                taken.add(name)
                state, pieces = self.state.get(param, {}), reading_of(group, param).pieces
                rows: Iterable[tuple[list[int], list[float]]]
                if "counters" in state:
                    check_pieces(param, len(pieces), state)
                    counted = self._kept.counters.rows(state["counters"])
                    rows = zip(counted, self._kept.residuals.rows(state["residuals"]), strict=True)
                elif unseen and param.numel():
                    rows = [(new_counters(), [math.nan] * len(RESIDUALS))] * len(pieces)
                else:
                    continue
                for index, (piece, (counters, residuals)) in enumerate(zip(pieces, rows, strict=True)):
                    own = name if len(pieces) == 1 else f"{name}[{index}]"
                    yield Record(own, group, param, piece, index, counters, residuals)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _flops(number: int) -> str:
    """A number of FLOPs for people.

    >>> _flops(8_912_896)
    '8.9 MFLOP'
    """
    size, letter = next((10**e, x) for e, x in ((12, "T"), (9, "G"), (6, "M"), (0, "")) if number >= 10**e)
    return f"{number / size:.1f} {letter}FLOP" if letter else f"{number} FLOP"
