"""What all figures share: their style, a colour for each optimizer, summaries of recorded lines.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. An optimizer has the same one in
every figure; those of CacheMuon.paper go with gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cachemuon_lab.config import NORMUON, OptimizerConfig
from cachemuon_lab.record import Line
from cachemuon_lab.tables import Row

Array = NDArray[np.float64]

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "legend.fontsize": 7,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text as text; journals refuse the default
    "svg.hashsalt": "cachemuon",  # without it no two files are equal
}
COLOURS = {
    "gram": "#222222",
    "polar": "#0072B2",
    "jordan": "#56B4E9",
    "stale": "#8C6D3F",
    "adamw": "#888888",
    "cache": "#B3123A",
    "dion2": "#009E73",
    "dion3": "#005F45",
    "adamuon": "#E69F00",
    "soap": "#7B5EA7",
}
MARKERS = {"gram": "s", "polar": "D", "jordan": "v", "stale": "X", "adamw": "P", "paper": "o", "cache": "^"}
MARKERS |= {"dion2": "<", "dion3": ">", "adamuon": "*", "soap": "h"}
GAMMAS = (0.5, 2.0, 5.0, 10.0, 15.0, 60.0)
GAMMA_COLOURS = ("#B3A400", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#5E2A57")
DASHES = ("-", "--", ":", "-.")
BLUE, RED, GREY, BLACK = "#0072B2", "#D55E00", "#777777", "#222222"
POINTS = 250
"""The most points of a band: what a column of print can show, and files stay small."""


class Lacking(Exception):
    """The runs do not hold what a figure shows; the message says what would."""


Picture = tuple[Figure, str]
"""A figure and its caption."""


def colour(optimizer: OptimizerConfig) -> str:
    """The optimizer's colour in every figure; CacheMuon.paper's is a function of gamma.

    >>> colour(OptimizerConfig("paper", gamma=5.0))
    '#e69f00'
    """
    if optimizer.kind != "paper":
        return COLOURS[optimizer.kind]
    at, channels = np.log(max(optimizer.gamma, 1e-9)), np.array([to_rgb(c) for c in GAMMA_COLOURS])
    red, green, blue = (float(np.interp(at, np.log(GAMMAS), channel)) for channel in channels.T)
    return to_hex((red, green, blue))


def styles(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Colour, dashes and marker for each row's line; rows of one colour differ in their dashes.

    NorMuon has its Muon's colour and marker, but hollow.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        optimizer = row.runs[0].config.optimizer
        tint = colour(optimizer)
        used = [style["ls"] for style in found if style["color"] == tint]
        free = [dash for dash in DASHES if dash not in used]
        style = {"color": tint, "ls": free[0] if free else ":", "marker": MARKERS[optimizer.kind]}
        hollow = optimizer.kind in NORMUON and optimizer.normalize == "rows"
        found.append(style | ({"mfc": "white"} if hollow else {}))
    return found


def arrays(lines: Sequence[Line], *keys: str) -> list[Array]:
    """The values of the lines under each key."""
    return [np.array([line[key] for line in lines], dtype=np.float64) for key in keys]


def curve(seeds: Sequence[Sequence[Line]], key: str) -> tuple[Array, Array, Array]:
    """Steps, mean and standard deviation over seeds, at the steps that all of them have."""
    values = [{line["step"]: line[key] for line in lines} for lines in seeds]
    steps = sorted(set.intersection(*(set(value) for value in values)))
    table = np.array([[value[step] for step in steps] for value in values], dtype=np.float64)
    spread = table.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
    return np.array(steps, dtype=np.float64), table.mean(axis=0), spread


def summary(
    x: Array, y: Array, *measures: Callable[[Array], Any], points: int | None = POINTS
) -> list[Array]:
    """The distinct x, and each measure of the y that are there; above `points`, neighbours are pooled.

    >>> x, y = np.array([1.0, 1.0, 2.0]), np.array([3.0, 5.0, 7.0])
    >>> summary(x, y, np.mean)
    [array([1., 2.]), array([4., 7.])]
    """
    if points is not None and len(np.unique(x)) > points:
        width = (x.max() - x.min()) / points
        x = x.min() + (np.minimum((x - x.min()) // width, points - 1) + 0.5) * width
    order = np.argsort(x, kind="stable")
    places, first = np.unique(x[order], return_index=True)
    groups = np.split(y[order], first[1:])
    return [places, *(np.array([measure(group) for group in groups]) for measure in measures)]


def band(
    axes: Axes, x: Array, y: Array, tint: str, label: str | None = None, line: str = "-", alpha: float = 0.2
) -> None:
    """The median of y over x, and its quartiles as a band."""
    places, low, middle, high = summary(x, y, percentile(25), percentile(50), percentile(75))
    axes.plot(places, middle, line, color=tint, label=label)
    axes.fill_between(places, low, high, color=tint, alpha=alpha, lw=0)


def percentile(q: float) -> Callable[[Array], Any]:
    """The measure for `summary` that is a percentile."""
    return lambda values: np.percentile(values, q)


def rolling_mean(values: Array, window: int) -> Array:
    """A centered mean of `window` neighbours, of those that exist at both ends.

    >>> rolling_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3)
    array([1.5, 3. , 6. , 7.5])
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first = np.maximum(places - window // 2, 0)
    last = np.minimum(places + window // 2 + 1, len(values))
    mean: Array = (total[last] - total[first]) / (last - first)
    return mean


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix: the same bytes for the same figure."""
    FigureCanvasAgg(figure)
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix)
    with rc_context(STYLE):
        figure.savefig(path, dpi=200, metadata=undated, transparent=path.suffix == ".svg")
