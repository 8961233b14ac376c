"""The paper's figures from runs, for print and screen.

`figures` writes all that the runs allow. `quality`, `gate`, `ages`, `ages_by_layer`, `frontier` and `work`
each draw one and caption it, or raise `Lacking`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cachemuon_lab import drawing
from cachemuon_lab.config import CACHING
from cachemuon_lab.drawing import BLACK, BLUE, COLOURS, GREY, RED, STYLE
from cachemuon_lab.record import Line, Run
from cachemuon_lab.tables import BASELINES, Comparison, Row, compare, shown, tasks

MODELS = {"paper": "By the paper's model", "executed": "As executed"}
PANELS, WINDOW, LARGEST_RESIDUAL, BINS = 24, 15, 50.0, 25


class Lacking(Exception):
    """The runs do not hold what a figure shows; the message says what would."""


class Drawn(NamedTuple):
    """A figure: its name, its files, its caption. Without files it was not possible: `caption` says why."""

    name: str
    paths: tuple[Path, ...]
    caption: str


Picture = tuple[Figure, str]


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
    """Validation loss over training, beside what was saved against the fresh baselines."""
    rows = [row for row in comparison.rows if row.cells["loss"]]
    if not rows:
        raise Lacking("no run has been validated yet.")
    saving = [row for row in rows if row.kind in (*CACHING, "stale")]
    known = [kind for kind in BASELINES.values() if any(row.cells[f"saved_paper_{kind}"] for row in saving)]
    panels = 2 if known else 1
    figure = Figure(figsize=(2.3 + 2.3 * panels, 3.5), layout="constrained")
    left, *right = figure.subplots(1, panels, squeeze=False, width_ratios=(1.5, 1)[:panels])[0]
    lows, highs = [], []
    for number, (row, style) in enumerate(zip(rows, drawing.styles(rows), strict=True)):
        x, mean, spread = drawing.curve([run.validations for run in row.runs], "loss")
        left.plot(x, mean, label=f"{row.title} ({_best(row)})", markevery=(0.03 * number, 0.15), **style)
        if len(row.runs) > 1:
            left.fill_between(x, mean - spread, mean + spread, color=style["color"], alpha=0.15, lw=0)
        later = mean[(x >= row.runs[0].config.steps / 5) & np.isfinite(mean)]
        lows.append(np.nanmin(mean))
        highs.append(later.max(initial=lows[-1]))
    margin = 0.05 * (max(highs) - min(lows)) or 0.05
    left.set(xlabel="step", ylabel="validation loss", ylim=(min(lows) - margin, max(highs) + margin))
    caption = f"Validation loss over training: {comparison.title}. In parentheses the best of each."
    caption += " Losses of the first fifth may lie above the axis."
    if known:
        _saving_bars(right[0], saving, known)
        caption += " Right: orthogonalization FLOPs saved against the fresh baselines, by the paper's model."
    figure.legend(loc="outside lower center", ncols=3)
    return figure, caption + _over_seeds(rows, "bands")


@rc_context(STYLE)
def gate(runs: Sequence[Run]) -> Picture:
    """The residual gate of one optimizer: residual, cosine, one against the other, decisions."""
    lines = [line for run in runs for line in run.probes]
    if not lines:
        raise Lacking("no run has measured its probes; one of CacheMuon with diagnostics=gate does.")
    step, residual, cosine, accepted = drawing.arrays(lines, "step", "residual", "cosine", "accepted")
    finite, gamma = np.isfinite(residual) & np.isfinite(cosine), runs[0].config.optimizer.gamma
    figure = Figure(figsize=(6.9, 4.8), layout="constrained")
    (a, b), (c, d) = figure.subplots(2, 2)
    if finite.any():
        drawing.band(a, step[finite], residual[finite], BLUE, "all probes")
        drawing.band(b, step[finite], cosine[finite], BLUE, "all probes")
    taken = finite & (accepted > 0)
    if taken.any():
        drawing.band(b, step[taken], cosine[taken], RED, "accepted")
    low = finite & (residual <= LARGEST_RESIDUAL)
    if low.any():
        width = residual[low].max() / BINS or 1.0
        middles = (np.minimum(residual[low] // width, BINS - 1) + 0.5) * width
        drawing.band(c, middles, cosine[low], BLUE, "all probes", "o-")
    steps, rate = drawing.summary(step, accepted, np.mean, points=None)
    d.plot(steps, drawing.rolling_mean(rate, WINDOW), color=RED, label="accepted")
    d.plot(steps, drawing.rolling_mean(1 - rate, WINDOW), color=GREY, ls="--", label="rejected")
    a.axhline(gamma, color=BLACK, ls="--", lw=1, label=f"threshold {gamma:g}")
    c.axvline(gamma, color=BLACK, ls="--", lw=1, label=f"threshold {gamma:g}")
    a.set(yscale="log", xlabel="step", ylabel="residual", title="(a) Residual of the cached candidate")
    b.set(xlabel="step", ylabel="cosine", title="(b) Cosine of cached and fresh direction")
    c.set(xlabel="residual", ylabel="cosine", title="(c) Residual against cosine")
    d.set(xlabel="step", ylabel="share of probes", title="(d) Decisions", ylim=(-0.03, 1.03))
    d.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (a, b, c, d):
        axes.legend()
    label = shown(runs[0].config.optimizer.label)
    lost = f" {np.sum(~finite):,} probes that are not finite are in (d) alone." if not finite.all() else ""
    return figure, (
        f"The residual gate of {label}, over {len(lines):,} probes. Lines are medians over matrices, "
        f"bands quartiles. (c): residuals up to {LARGEST_RESIDUAL:g}, in {BINS} bins. "
        f"(d): a centered mean of {WINDOW} measured steps, of fewer at both ends.{lost}"
    )


@rc_context(STYLE)
def ages(runs: Sequence[Run]) -> Picture:
    """Cosine of an old transform's direction to the fresh one, against the transform's age."""
    lines = _age_lines(runs)
    age, cosine = drawing.arrays(lines, "age", "cosine")
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.subplots()
    drawing.band(axes, age, cosine, BLUE, "median, quartiles, 5 to 95 %", "o-", alpha=0.3)
    places, low, high = drawing.summary(age, cosine, drawing.percentile(5), drawing.percentile(95))
    axes.fill_between(places, low, high, color=BLUE, alpha=0.15, lw=0)
    axes.set(xlabel="age of the transform, in steps", ylabel="cosine to the fresh direction", xticks=places)
    axes.legend()
    return figure, (
        "Age of a transform against the agreement of its direction with the fresh one, over "
        f"{len({line['name'] for line in lines}):,} matrices and {len(lines):,} measurements."
    )


@rc_context(STYLE)
def ages_by_layer(runs: Sequence[Run]) -> Picture:
    """The age diagnostic in a panel per matrix; if those are too many, per kind of matrix."""
    lines = _age_lines(runs)
    names = [line["name"].removesuffix(".weight") for line in lines]
    if many := len(set(names)) > PANELS:
        names = [re.sub(r"\d+", "*", name) for name in names]
    panels = list(dict.fromkeys(names))
    columns = min(4, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(6.9, 0.6 + 1.2 * height), layout="constrained")
    grid = list(figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).flat)
    age, cosine = drawing.arrays(lines, "age", "cosine")
    for panel, axes in zip(panels, grid, strict=False):
        here = np.array([name == panel for name in names])
        drawing.band(axes, age[here], cosine[here], BLUE, line="o-")
        axes.set_title(panel, fontsize=6.5)
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.supxlabel("age of the transform, in steps", fontsize=8)
    figure.supylabel("cosine to the fresh direction", fontsize=8)
    what = "kind of matrix, * for any number" if many else "matrix"
    return figure, f"Age against agreement, a panel for each {what}. Lines are medians, bands quartiles."


@rc_context(STYLE)
def frontier(comparison: Comparison) -> Picture:
    """Best validation loss against FLOPs relative to GramMuon's, by both models of cost."""
    rows = [row for row in comparison.rows if row.cells["saved_paper_gram"] and row.cells["loss"]]
    if not any(row.kind in CACHING for row in rows):
        raise Lacking("it needs runs of CacheMuon and of GramMuon, both validated.")
    figure = Figure(figsize=(6.9, 3.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        frontiers: dict[str, list[tuple[float, float]]] = {}
        for row, style in zip(rows, drawing.styles(rows), strict=True):
            saved, loss = row.cells[f"saved_{model}_gram"], row.cells["loss"]
            assert saved and loss
            x, y = 1 - saved.mean, loss.mean
            bars = {"xerr": saved.spread, "yerr": loss.spread, "capsize": 2, "zorder": 3}
            axes.errorbar(x, y, label=row.title, **style | {"ls": ""}, **bars)
            if row.kind in CACHING:
                frontiers.setdefault(row.kind, []).append((x, y))
        for kind, points in frontiers.items():
            line = {"color": "#bbbbbb", "ls": "-" if kind == "paper" else "--", "lw": 1, "zorder": 1}
            axes.plot(*zip(*sorted(points), strict=True), **line)
        axes.set(xlabel="FLOPs relative to GramMuon", title=MODELS[model])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.locator_params(axis="x", nbins=6)
    figure.axes[0].set_ylabel("best validation loss")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    caption = f"Quality against FLOPs of orthogonalization: {comparison.title}. Lines join one algorithm."
    return figure, caption + _over_seeds(rows, "error bars")


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
    axes.set_xlabel("FLOPs saved")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _age_lines(runs: Sequence[Run]) -> list[Line]:
    lines = [line for run in runs for line in run.ages if np.isfinite(line["cosine"])]
    if not lines:
        raise Lacking("no run has measured old transforms; one of GramMuon with diagnostics=age does.")
    return lines


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
