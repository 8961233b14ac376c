"""The paper's figures from runs, for print and screen.

`figures` writes all that the runs allow. `quality`, `frontier` and `work` each draw one of a comparison and
caption it, or raise `Lacking`; those of diagnostics are in `diagnostic_figures`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cachemuon_lab import drawing
from cachemuon_lab.config import CACHING, LABELS
from cachemuon_lab.diagnostic_figures import ages, ages_by_layer, gate, gate_by_layer
from cachemuon_lab.drawing import COLOURS, STYLE, Lacking, Picture
from cachemuon_lab.record import Run
from cachemuon_lab.tables import BASELINES, Comparison, Row, compare, tasks

MODELS = {"paper": "By the paper's model", "executed": "As executed"}


class Drawn(NamedTuple):
    """A figure: its name, its files, its caption. Without files it was not possible: `caption` says why."""

    name: str
    paths: tuple[Path, ...]
    caption: str


FORMATS = ("pdf", "png", "svg")


def figures(
    runs: Sequence[Run], out: str | os.PathLike[str], formats: Sequence[str] = FORMATS
) -> list[Drawn]:
    """Write every figure that the runs allow into the folder `out`; those of several tasks are numbered."""
    if wrong := [one for one in formats if one not in FORMATS]:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {wrong[0]!r}")
    Path(out).mkdir(parents=True, exist_ok=True)
    groups, drawn = tasks(runs), []
    for number, group in enumerate(groups, start=1):
        prefix = f"task{number}-" if len(groups) > 1 else ""
        for name, draw in _drawings(group):
            try:
                figure, caption = draw()
            except Lacking as reason:
                drawn.append(Drawn(prefix + name, (), f"Not drawn: {reason}"))
                continue
            paths = tuple(Path(out, f"{prefix}{name}.{suffix}") for suffix in formats)
            for path in paths:
                drawing.save(figure, path)
            drawn.append(Drawn(prefix + name, paths, caption))
    return drawn


@rc_context(STYLE)
def quality(comparison: Comparison) -> Picture:
    """Validation loss over training, a panel a family, beside what was saved against fresh baselines."""
    families = {name: [r for r in rows if r.cells["loss"]] for name, rows in comparison.families.items()}
    families = {name: rows for name, rows in families.items() if rows}
    if not families:
        raise Lacking("no run has been validated yet.")
    everyone = [row for rows in families.values() for row in rows]
    saving = [row for row in everyone if row.caches]
    known = [kind for kind in BASELINES.values() if any(row.cells[f"saved_paper_{kind}"] for row in saving)]
    widths = [1.5] * len(families) + [1.0] * bool(known)
    figure = Figure(figsize=(min(2.3 + 2.3 * len(widths), 9.2), 3.5), layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for panel, (family, rows) in zip(axes, families.items(), strict=False):
        _loss_curves(panel, rows)
        if len(families) > 1:
            panel.set_title(family.capitalize())
            panel.legend(loc="upper right")
    axes[0].set_ylabel("validation loss")
    caption = f"Validation loss over training: {comparison.title}. In parentheses the best of each."
    caption += " Losses of the first fifth may lie above the axis."
    if len(families) > 1:
        caption += " Each family of settings has a panel; losses are compared within it."
    else:
        figure.legend(loc="outside lower center", ncols=3)
    if known:
        _saving_bars(axes[-1], saving, known)
        if len(families) > 1 and len(known) > 1:
            axes[-1].legend(loc="lower right")
        caption += " Right: orthogonalization FLOPs saved against the fresh baselines, by the paper's model."
    return figure, caption + _over_seeds(everyone, "bands")


@rc_context(STYLE)
def frontier(comparison: Comparison) -> Picture:
    """Best validation loss against FLOPs relative to GramMuon's, by both models of cost, a row a family."""
    families = {
        name: [row for row in rows if row.cells["saved_paper_gram"] and row.cells["loss"]]
        for name, rows in comparison.families.items()
    }
    families = {name: rows for name, rows in families.items() if any(r.kind in CACHING for r in rows)}
    if not families:
        raise Lacking("it needs runs of CacheMuon and of GramMuon, both validated.")
    everyone = [row for rows in families.values() for row in rows]
    several = len(families) > 1
    figure = Figure(figsize=(6.9, 1.4 + 2.1 * len(families)), layout="constrained")
    panels = figure.subplots(len(families), 2, sharex=True, sharey="row", squeeze=False)
    for line, (family, rows) in zip(panels, families.items(), strict=True):
        for axes, model in zip(line, MODELS, strict=True):
            _frontier(axes, rows, model)
        line[0].set_ylabel(f"{family.capitalize()}\n" * several + "best validation loss")
        if several:
            line[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axes, title in zip(panels[0], MODELS.values(), strict=True):
        axes.set_title(title)
    for axes in panels[-1]:
        axes.set_xlabel("FLOPs relative to GramMuon")
    caption = f"Quality against FLOPs of orthogonalization: {comparison.title}. Lines join one algorithm."
    if several:
        caption += " Each family of settings has a row; losses are compared within it."
    else:
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure, caption + _over_seeds(everyone, "error bars")


def _loss_curves(axes: Axes, rows: Sequence[Row]) -> None:
    lows, highs = [], []
    for number, (row, style) in enumerate(zip(rows, drawing.styles(rows), strict=True)):
        x, mean, spread = drawing.curve([run.validations for run in row.runs], "loss")
        axes.plot(x, mean, label=f"{row.title} ({_best(row)})", markevery=(0.03 * number, 0.15), **style)
        if len(row.runs) > 1:
            axes.fill_between(x, mean - spread, mean + spread, color=style["color"], alpha=0.15, lw=0)
        later = mean[(x >= row.runs[0].config.steps / 5) & np.isfinite(mean)]
        lows.append(np.nanmin(mean))
        highs.append(later.max(initial=lows[-1]))
    margin = 0.05 * (max(highs) - min(lows)) or 0.05
    axes.set(xlabel="step", ylim=(min(lows) - margin, max(highs) + margin))


def _frontier(axes: Axes, rows: Sequence[Row], model: str) -> None:
    frontiers: dict[str, list[tuple[float, float]]] = {}
    for row, style in zip(rows, drawing.styles(rows), strict=True):
        saved, loss = row.cells[f"saved_{model}_gram"], row.cells["loss"]
        assert saved and loss
        x, y = 1 - saved.mean, loss.mean
        bars: dict[str, Any] = {"xerr": saved.spread, "yerr": loss.spread, "capsize": 2, "zorder": 3}
        axes.errorbar(x, y, label=row.title, **style | {"ls": ""}, **bars)
        if row.kind in CACHING:
            frontiers.setdefault(row.kind, []).append((x, y))
    for kind, points in frontiers.items():
        line: dict[str, Any] = {
            "color": "#bbbbbb",
            "ls": "-" if kind == "paper" else "--",
            "lw": 1,
            "zorder": 1,
        }
        axes.plot(*zip(*sorted(points), strict=True), **line)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.locator_params(axis="x", nbins=6)


@rc_context(STYLE)
def work(comparison: Comparison) -> Picture:
    """Cumulative FLOPs of orthogonalization over training, by both models of cost."""
    rows = [row for row in comparison.rows if row.cells["paper"]]
    if not rows:
        raise Lacking("no run has orthogonalized anything.")
    figure, (scale, unit) = Figure(figsize=(6.9, 3.5), layout="constrained"), comparison.unit("flops")
    for axes, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        key = "flops_paper" if model == "paper" else "flops"
        for row, style in zip(rows, drawing.styles(rows), strict=True):
            x, mean, _ = drawing.curve([run.steps for run in row.runs], key)
            axes.plot(x, mean / scale, label=row.title, markevery=0.2, **style)
        axes.set(xlabel="step", title=MODELS[model], ylim=(0, None))
    figure.axes[0].set_ylabel(f"cumulative {unit}")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure, f"Cumulative FLOPs of orthogonalization: {comparison.title}." + _over_seeds(rows)


def _drawings(runs: Sequence[Run]) -> Iterator[tuple[str, Callable[[], Picture]]]:
    """The name of each figure, and what draws it; diagnostics are drawn for each optimizer measured."""
    comparison = compare(runs)
    yield "quality", partial(quality, comparison)
    yield "frontier", partial(frontier, comparison)
    yield "work", partial(work, comparison)
    for name, draw, measured in (
        ("gate", gate, [run for run in runs if run.probes]),
        ("gate-by-layer", gate_by_layer, [run for run in runs if run.probes]),
        ("ages", ages, [run for run in runs if run.ages]),
        ("ages-by-layer", ages_by_layer, [run for run in runs if run.ages]),
    ):
        optimizers = dict.fromkeys(run.config.optimizer for run in measured)
        for number, optimizer in enumerate(optimizers, start=1):
            group = [run for run in measured if run.config.optimizer == optimizer]
            yield name if len(optimizers) == 1 else f"{name}-{number}", partial(draw, group)
        if not optimizers:
            yield name, partial(draw, runs)


def _saving_bars(axes: Axes, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    height, places = 0.8 / len(kinds), np.arange(len(rows))
    for number, kind in enumerate(kinds):
        saved = [row.cells[f"saved_paper_{kind}"] for row in rows]
        widths = [value.mean if value else 0.0 for value in saved]
        label = next(label for label, other in BASELINES.items() if other == kind)
        bars = axes.barh(
            places + (number - (len(kinds) - 1) / 2) * height,
            widths,
            height * 0.92,
            xerr=[(value.spread if value else None) or 0.0 for value in saved],
            color=COLOURS[kind],
            label=f"saved against {label}",
        )
        texts = [f"{100 * width:.1f} %".replace("-", "\N{MINUS SIGN}") for width in widths]
        axes.bar_label(bars, texts, padding=2, fontsize=6.5)
    axes.set_yticks(places, [row.title for row in rows])
    axes.invert_yaxis()
    low, high = axes.get_xlim()
    room = 0.35 * (high - low)  # for the labels of the bars
    axes.set_xlim(low - (room if low < 0 else 0.0), high + room)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"FLOPs saved against {LABELS[kinds[0]]}" if len(kinds) == 1 else "FLOPs saved")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _best(row: Row) -> str:
    loss, accuracy = row.cells["loss"], row.cells["accuracy"]
    assert loss
    return f"{loss.mean:.3f}" + (f", {100 * accuracy.mean:.1f} %" if accuracy else "")


def _over_seeds(rows: Sequence[Row], spread: str = "") -> str:
    counts = sorted({len(row.runs) for row in rows})
    if counts[-1] == 1:
        return ""
    told = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f" Means over {told} seeds" + (f"; {spread} are one standard deviation." if spread else ".")
