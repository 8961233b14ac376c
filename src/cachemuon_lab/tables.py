"""The paper's table from runs: a row for each optimizer, seeds merged, against both fresh baselines.

`compare` makes a `Comparison` of the runs of one task; `table_forms` shows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from cachemuon_lab.config import CACHING, LABELS, OptimizerConfig, RunConfig, differences
from cachemuon_lab.models import GPT2Config
from cachemuon_lab.record import Run
from cachemuon_lab.reported import Reported, reported

DASH = "—"
BASELINES = {LABELS[kind]: kind for kind in ("gram", "polar")}
ORDER = ("polar", "gram", "paper", "cache", "stale", "jordan", "dion2", "dion3", "adamuon", "soap", "adamw")
UNITS = {
    "percent": ((0.01, "%"),),
    "flops": ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1.0, "FLOPs")),
    "seconds": ((1.0, "seconds"), (1e-3, "ms")),
    "pflops": ((1.0, "PFLOPs"),),
}


@dataclass(frozen=True)
class Value:
    """A mean over runs, with the sample standard deviation where there are two or more.

    >>> Value.of([1.0, 3.0, None])
    Value(mean=2.0, spread=1.4142135623730951)
    """

    mean: float
    spread: float | None = None

    @classmethod
    def of(cls, numbers: Iterable[float | None]) -> Value | None:
        """Of the numbers that are there and finite; None if none is."""
        known = [number for number in numbers if number is not None and math.isfinite(number)]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Column:
    """A quantity of the table: its key in `Row.cells`, what it stands under, its name, its form."""

    key: str
    heading: str
    name: str
    form: str  # "count", "rate", "loss", "percent", "flops", "pflops" or "seconds"
    always: bool = True  # else it is shown where a row has it


COLUMNS = (
    Column("n", "", "runs", "count"),
    Column("lr", "", "learning rate", "rate"),
    Column("loss", "best validation", "loss", "loss"),
    Column("accuracy", "best validation", "accuracy", "percent", always=False),
    Column("paper", "orthogonalization, {flops}", "paper", "flops"),
    Column("executed", "orthogonalization, {flops}", "executed", "flops"),
    *(
        Column(f"saved_{model}_{kind}", f"saved against {label}", model, "percent")
        for label, kind in BASELINES.items()
        for model in ("paper", "executed")
    ),
    Column("hit_rate", "", "hit rate", "percent"),
    Column("orthogonalization_seconds", "median {seconds} per step", "matrices", "seconds"),
    Column("optimizer_seconds", "median {seconds} per step", "optimizer", "seconds"),
    Column("step_seconds", "median {seconds} per step", "step", "seconds"),
    Column("reported_best_loss", "the paper reports", "loss", "loss", always=False),
    Column("reported_pflops", "the paper reports", "PFLOPs", "pflops", always=False),
    Column("reported_hit_rate", "the paper reports", "hit rate", "percent", always=False),
    *(
        Column(f"reported_saved_{kind}", "the paper reports", f"saved, {label}", "percent", always=False)
        for label, kind in BASELINES.items()
    ),
)


@dataclass(frozen=True)
class Row:
    """One optimizer: its label, the runs that count (one per seed), a value for each column's key."""

    label: str
    runs: tuple[Run, ...] = field(repr=False)
    cells: dict[str, Value | None]
    unfinished: str = ""

    @property
    def kind(self) -> str:
        """The optimizer's kind, as in its configuration."""
        return self.runs[0].config.optimizer.kind

    @property
    def family(self) -> str:
        """The rows that this one is compared with; empty where there is one family."""
        return self.runs[0].config.optimizer.family

    @property
    def caches(self) -> bool:
        """Whether the optimizer reuses what it computed at an earlier step."""
        return self.kind in (*CACHING, "stale")

    @property
    def title(self) -> str:
        """The label for people, marked if the row is not finished."""
        return shown(self.label) + (f" (unfinished: {self.unfinished})" if self.unfinished else "")


@dataclass(frozen=True)
class Comparison:
    """Runs of one task side by side. `notes` says what was left out of the rows, and why."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[Column]:
        """The columns to show: some of them only where a row has a value."""
        return [column for column in COLUMNS if column.always or self._known(column)]

    def _known(self, column: Column) -> bool:
        return any(row.cells[column.key] for row in self.rows)

    @property
    def families(self) -> dict[str, list[Row]]:
        """The rows by family: each is compared within its own."""
        return {name: list(rows) for name, rows in groupby(self.rows, key=lambda row: row.family)}

    def fresh(self, family: str) -> Row | None:
        """The baseline of a family: of its optimizers that solve at every step the one of the lowest loss."""
        rows = [row for row in self.families[family] if not row.caches and row.kind != "adamw"]
        losses = {row.label: row.cells["loss"] for row in rows}
        known = [row for row in rows if losses[row.label]]
        return min(known, key=lambda row: row.cells["loss"].mean if row.cells["loss"] else 0.0, default=None)

    def unit(self, form: str) -> tuple[float, str]:
        """The unit of a form and its name: the largest that the largest number reaches."""
        cells = [row.cells[column.key] for row in self.rows for column in COLUMNS if column.form == form]
        largest = max((cell.mean for cell in cells if cell is not None), default=0.0)
        units = UNITS.get(form, ((1.0, ""),))
        return next((unit for unit in units if largest >= unit[0]), units[-1])

    def heading(self, column: Column) -> str:
        """The heading that a column stands under, with its unit."""
        return column.heading.format(flops=self.unit("flops")[1], seconds=self.unit("seconds")[1])

    def text(self, row: Row, column: Column) -> str:
        """A cell: `mean ± spread`, `mean` where there is no spread, or a dash where there is nothing."""
        value = row.cells[column.key]
        if value is None:
            return DASH
        if column.form == "rate":
            return f"{value.mean:g}"
        scale, digits = self.unit(column.form)[0], {"count": 0, "loss": 3, "percent": 1}.get(column.form, 2)
        text = f"{value.mean / scale:z.{digits}f}".replace("-", "\N{MINUS SIGN}")
        if value.spread:
            text += f" ± {value.spread / scale:.{digits}f}"
        return text + (" %" if column.form == "percent" else "")


def shown(label: str) -> str:
    """A label as tables and legends print it."""
    return label.replace("gamma=", "\N{GREEK SMALL LETTER GAMMA}=").replace("nesterov=True", "Nesterov")


def tasks(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs in groups that can be compared: same model, data, steps and batch."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        one, data = run.config, run.config.data
        data_key = (data.kind, data.context, Path(data.path or "").name)  # the same folder on any machine
        key = (one.model, data_key, one.steps, one.batch_size, one.accumulation, one.replicas)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def compare(runs: Sequence[Run]) -> Comparison:
    """The comparison of runs of one task, which `tasks` sorts them into.

    Runs that differ only in name, seed, checkpoints or measurement are one row. Of a row, only finished
    runs count if there are any, and one run per seed. Savings are over the steps that a run and its
    baseline have both done. Rows stand by family, in the order of `ORDER`, those of one kind by gamma.
    """
    if len(tasks(runs)) != 1:
        raise ValueError(f"runs must be of one task, got {len(tasks(runs))}; sort them with tasks(runs)")
    groups: dict[RunConfig, list[Run]] = {}
    for run in sorted(runs, key=lambda run: _place(run.config.optimizer)):
        groups.setdefault(_without_seed(run.config), []).append(run)
    notes: list[str] = []
    counted = [_counted(group, notes) for group in groups.values()]
    everyone = [run for group in counted for run in group]
    fresh = {
        kind: [run for run in everyone if run.config.optimizer.label.split()[0] == name]
        for name, kind in BASELINES.items()
    }
    rows = []
    for label, group in zip(_labels(list(groups)), counted, strict=True):
        measured = [_measured(run, fresh) for run in group]
        cells = {c.key: Value.of(m[c.key] for m in measured) for c in COLUMNS if c.key != "n"}
        cells["n"] = Value(len(group))
        behind = [f"step {_last(run):,} of {run.config.steps:,}" for run in group if not run.complete]
        rows.append(Row(label, tuple(group), cells, "; ".join(behind)))
        if any(m["loss"] is None for m in measured):
            notes.append(f"{shown(label)}: a run without a finite validation loss is left out of that mean.")
    return Comparison(describe(runs[0].config), tuple(rows), tuple(notes))


def describe(config: RunConfig) -> str:
    """A run's task in words: model, data, steps."""
    model, path = config.model, config.data.path
    what = "ResNet-18" if not isinstance(model, GPT2Config) else f"GPT-2 of {model.layers} layers"
    names = {"python": "Python's own sources", "tokens": Path(path or "tokens").name, "cifar10": "CIFAR-10"}
    batch = config.batch_size * config.accumulation * config.replicas
    what += f", width {model.width}, on {names[config.data.kind]}"
    return f"{what}, {config.steps:,} steps of {batch:,} examples"


def _measured(run: Run, fresh: dict[str, list[Run]]) -> dict[str, float | None]:
    losses = [line["loss"] for line in run.validations if math.isfinite(line["loss"])]
    accuracies = [line["accuracy"] for line in run.validations if line["accuracy"] is not None]
    told = reported(run.config) or Reported()
    measured: dict[str, float | None] = {
        "lr": run.config.optimizer.lr,
        "loss": min(losses, default=None),
        "accuracy": max(accuracies, default=None),
        "hit_rate": run.hit_rate if run.config.optimizer.kind in (*CACHING, "stale") else None,
        **{f"reported_{name}": getattr(told, name) for name in Reported.__dataclass_fields__},
    }
    for model, key in (("paper", "flops_paper"), ("executed", "flops")):
        measured[model] = _flops(run, key, _last(run))
        for kind, baselines in fresh.items():
            measured[f"saved_{model}_{kind}"] = _saved(run, baselines, key)
    for key in (column.key for column in COLUMNS if column.form == "seconds"):
        known = [line[key] for line in run.steps if key in line]
        measured[key] = statistics.median(known) if known else None
    return measured


def _saved(run: Run, baselines: list[Run], key: str) -> float | None:
    matrices = run.config.optimizer.head  # with "muon" the last layer is one more
    baselines = [other for other in baselines if other.config.optimizer.head == matrices]
    baseline = max(baselines, key=_last, default=run)
    step = min(_last(run), _last(baseline))
    mine, its = _flops(run, key, step), _flops(baseline, key, step)
    return 1 - mine / its if baselines and mine is not None and its is not None else None


def _flops(run: Run, key: str, step: int) -> float | None:
    """What had been spent by a step; None for an optimizer that orthogonalizes nothing."""
    return next((line[key] for line in reversed(run.steps) if line["step"] <= step), None) or None


def _last(run: Run) -> int:
    return int(run.steps[-1]["step"]) if run.steps else 0


def _place(optimizer: OptimizerConfig) -> tuple[str, int, float]:
    return optimizer.family, ORDER.index(optimizer.kind), optimizer.gamma


def _without_seed(config: RunConfig) -> RunConfig:
    config = replace(config, name="row", seed=0, checkpoint_every=1, data=replace(config.data, path=None))
    return replace(config, validate_every=1, diagnostics="off", diagnose_every=1, ages=(1,))


def _counted(group: list[Run], notes: list[str]) -> list[Run]:
    finished = [run for run in group if run.complete]
    seeds: dict[int, Run] = {}
    for run in sorted(finished or group, key=lambda run: run.config.diagnostics != "off"):
        seeds.setdefault(run.config.seed, run)
    if left := len(group) - len(seeds):
        label = shown(group[0].config.optimizer.label)
        notes.append(f"{label}: {left} of {len(group)} runs left out, unfinished or of a seed already there.")
    return list(seeds.values())


def _labels(configs: list[RunConfig]) -> list[str]:
    labels = []
    for config in configs:
        namesakes = [other for other in configs if other.optimizer.label == config.optimizer.label]
        keys = {key: pair[0] for other in namesakes for key, pair in differences(config, other).items()}
        told = ", ".join(f"{key.removeprefix('optimizer.')}={value}" for key, value in keys.items())
        labels.append(f"{config.optimizer.label} ({told})" if told else config.optimizer.label)
    return labels
