"""The figures of diagnostics: the residual gate and the age of the transform, in all and by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from cachemuon_lab import drawing
from cachemuon_lab.drawing import BLACK, BLUE, GREY, RED, STYLE, Lacking, Picture
from cachemuon_lab.record import Line, Run
from cachemuon_lab.tables import shown

PANELS, WINDOW, LARGEST_RESIDUAL, BINS = 24, 15, 50.0, 25


@rc_context(STYLE)
def gate(runs: Sequence[Run]) -> Picture:
    """The residual gate of one optimizer: residual, cosine, one against the other, decisions."""
    lines = _probe_lines(runs)
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
def gate_by_layer(runs: Sequence[Run]) -> Picture:
    """The gate's decisions over training in a panel per matrix, or per kind of matrix."""
    lines = _probe_lines(runs)
    step, accepted = drawing.arrays(lines, "step", "accepted")
    figure, panels, what = _panels([line["name"] for line in lines])
    for axes, here in panels:
        steps, rate = drawing.summary(step[here], accepted[here], np.mean, points=None)
        axes.plot(steps, drawing.rolling_mean(rate, WINDOW), color=RED, label="accepted")
        axes.plot(steps, drawing.rolling_mean(1 - rate, WINDOW), color=GREY, ls="--", label="rejected")
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("share of probes", fontsize=8)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    label = shown(runs[0].config.optimizer.label)
    return figure, (
        f"Decisions of the residual gate of {label}, a panel for each {what}: a centered mean of {WINDOW} "
        "measured steps, of fewer at both ends."
    )


@rc_context(STYLE)
def ages_by_layer(runs: Sequence[Run]) -> Picture:
    """The age diagnostic in a panel per matrix, or per kind of matrix."""
    lines = _age_lines(runs)
    age, cosine = drawing.arrays(lines, "age", "cosine")
    figure, panels, what = _panels([line["name"] for line in lines])
    for axes, here in panels:
        drawing.band(axes, age[here], cosine[here], BLUE, line="o-")
    figure.supxlabel("age of the transform, in steps", fontsize=8)
    figure.supylabel("cosine to the fresh direction", fontsize=8)
    return figure, f"Age against agreement, a panel for each {what}. Lines are medians, bands quartiles."


def _panels(names: Sequence[str]) -> tuple[Figure, list[tuple[Axes, NDArray[np.bool_]]], str]:
    """A panel for each matrix, of too many for each kind of matrix: axes, and which lines are its own."""
    names = [name.removesuffix(".weight") for name in names]
    if many := len(set(names)) > PANELS:
        names = [re.sub(r"\d+", "*", name) for name in names]
    titles = list(dict.fromkeys(names))
    columns = min(4, len(titles))
    height = -(-len(titles) // columns)
    figure = Figure(figsize=(6.9, 0.6 + 1.2 * height), layout="constrained")
    grid = list(figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).flat)
    for title, axes in zip(titles, grid, strict=False):
        axes.set_title(title, fontsize=6.5)
    for axes in grid[len(titles) :]:
        axes.remove()
    panels = [
        (axes, np.array([name == title for name in names])) for title, axes in zip(titles, grid, strict=False)
    ]
    return figure, panels, "kind of matrix, * for any number" if many else "matrix"


def _probe_lines(runs: Sequence[Run]) -> list[Line]:
    lines = [line for run in runs for line in run.probes]
    if not lines:
        raise Lacking("no run has measured its probes; one of CacheMuon with diagnostics=gate does.")
    return lines


def _age_lines(runs: Sequence[Run]) -> list[Line]:
    lines = [line for run in runs for line in run.ages if np.isfinite(line["cosine"])]
    if not lines:
        raise Lacking("no run has measured old transforms; one of GramMuon with diagnostics=age does.")
    return lines
