"""Tables and pictures of `cachemuon bench`, from its results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from cachemuon_lab.drawing import BLUE, GREY, RED, STYLE

Cells = list[list[str]]


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells, heads first, for each table of the parts that were measured."""
    found: dict[str, tuple[str, Cells]] = {}
    if "solvers" in results:
        found["solvers"] = _solvers(results["solvers"])
    for number, (title, rows) in enumerate(results.get("steps", {}).get("workloads", {}).items()):
        found[f"steps{number + 1}"] = _steps(title, rows)
    if "even" in results:
        found["even"] = _even(results["even"])
    if "host" in results:
        found["host"] = _host(results["host"])
    if "ceilings" in results:
        found["ceilings"] = _ceilings(results["ceilings"])
    if "worst" in results:
        found["worst"] = _worst(results["worst"])
    if "share" in results:
        found["share"] = _share(results["share"])
    for axis, title in (("size", "One n x 4n matrix"), ("number", "64 x 64 matrices")):
        if "growth" in results:
            found[axis] = _growth(results["growth"][axis], title)
    return found


def to_markdown(cells: Cells) -> str:
    """The cells as a Markdown table: the first column and those of words on the left, numbers on the right.

    >>> print(to_markdown([["what", "how", "ms"], ["hit", "bf16", "1.0"]]))
    | what | how | ms |
    |---|---|--:|
    | hit | bf16 | 1.0 |
    """
    columns = list(zip(*cells[1:], strict=True))[1:] or [()] * (len(cells[0]) - 1)
    rule = ["---"] + ["---" if _of_words(column) else "--:" for column in columns]
    lines = [
        "|" + "|".join(rule) + "|" if row is rule else "| " + " | ".join(row) + " |"
        for row in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(lines)


def _of_words(column: Sequence[str]) -> bool:
    words = [cell[0].isalpha() for cell in column if cell]
    return 2 * sum(words) > len(words)


def renewed(text: str, made: Mapping[str, tuple[str, Cells]]) -> str:
    """A Markdown page with new tables, each between `<!-- table NAME -->` and `<!-- end -->`.

    Those of other names stay: a page may have tables of several commands.

    >>> page = "<!-- table share -->old<!-- end -->"
    >>> renewed(page, {"share": ("Title", [["what", "share"], ["model", "90%"]])}).splitlines()[4]
    '| model | 90% |'
    """
    asked = re.findall(r"<!-- table (\w+) -->", text)
    if not made.keys() & asked:
        raise ValueError(f"the page asks for the tables {asked}, there are: {', '.join(made)}")

    def table(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in made:
            return found.group()
        return f"<!-- table {name} -->\n\n{to_markdown(made[name][1])}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def renew(pages: Iterable[Path], made: Mapping[str, tuple[str, Cells]]) -> None:
    """Write new tables into Markdown pages. Each page has some of them."""
    for page in pages:
        page.write_text(renewed(page.read_text(), made))


def to_page(results: dict[str, Any]) -> str:
    """All tables as Markdown, with what they were measured on."""
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    parts = [f"{title}\n\n{to_markdown(cells)}" for title, cells in tables(results).values()]
    return "\n\n".join([f"Measured on: {about}.", *parts]) + "\n"


def _ratio(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _solvers(part: dict[str, Any]) -> tuple[str, Cells]:
    columns = [
        ("hit / Q @ X", "to product", "hit"),
        ("hit, clip 1/16", "to product", "hit, clip 1/16"),
        ("hit, clip 1/8", "to product", "hit, clip 1/8"),
        ("hit, exact probe", "to product", "hit, exact probe"),
        ("miss / GramNS", "to GramNS", "miss"),
        ("clipped miss / GramNS", "to GramNS", "miss, clipped"),
        ("GramNS / full products", "to full products", "GramNS, kept memory"),
        ("GramNS / plain loop", "to plain loop", "GramNS"),
        ("default / GramNS", "to GramNS", "polar (default)"),
        ("StandardNS / GramNS", "to GramNS", "StandardNS"),
    ]
    cells = [["shape", *(head for head, _, _ in columns), "Q @ X, ms", "GramNS, ms"]]
    for row in part["rows"]:
        n, m = row["shape"]
        milliseconds = row["milliseconds"]
        cells.append(
            [
                f"{row['model']}, {n} x {m}",
                *(_ratio(row[base][name]) for _, base, name in columns),
                f"{milliseconds['Q @ X']:.2f}",
                f"{milliseconds['GramNS']:.2f}",
            ]
        )
    return f"Solvers, median of {part['rounds']} rounds (quartiles)", cells


def _steps(title: str, rows: list[dict[str, Any]]) -> tuple[str, Cells]:
    cells = [["optimizer", "precision", "step / GramMuon's", "matrix part", "ms", "hits", "peak MiB"]]
    for row in rows:
        part, hits = row["matrix part to GramMuon"], row["hits"]
        cells.append(
            [
                row["name"],
                row["precision"],
                f"{row['to GramMuon']:.2f}",
                "" if part is None else f"{part:.2f}",
                f"{row['milliseconds']:.1f}",
                "" if hits is None else f"{hits:.0%}",
                f"{row['peak MiB']:.0f}",
            ]
        )
    return f"One step of {title}", cells


def _even(part: dict[str, Any]) -> tuple[str, Cells]:
    cells = [
        [
            "optimizer",
            "steps",
            "largest / median",
            "smallest / median",
            "median, ms",
            "mean / GramMuon's",
            "hits",
        ]
    ]
    for row in part["rows"]:
        cells.append(
            [
                row["name"],
                str(row["steps"]),
                f"{row['largest']:.2f}",
                f"{row['smallest']:.2f}",
                f"{row['median milliseconds']:.0f}",
                f"{row['mean to GramMuon']:.2f}",
                "" if row["hits"] is None else f"{row['hits']:.0%}",
            ]
        )
    return "Twelve blocks of GPT-2 Small, steps after the first", cells


def _host(part: dict[str, Any]) -> tuple[str, Cells]:
    cells = [["matrices", "optimizer", "ms", "step / that of", "means of seven steps, median (quartiles)"]]
    for row in part["rows"]:
        cells.append(
            [row["case"], row["name"], f"{row['milliseconds']:.2f}", row["base"], _ratio(row["ratio"])]
        )
    return "The host's part", cells


def _ceilings(part: dict[str, Any]) -> tuple[str, Cells]:
    sizes = [f"{size / 2**20:.0f} MiB" if size > 1 else "one by one" for size in part["sizes"]]
    cells = [["blocks x width", "optimizer, ms", *sizes]]
    for row in part["rows"]:
        for name in ("CacheMuon", "GramMuon"):
            cells.append([f"{row['layers']} x {row['width']}", name, *(f"{took:.1f}" for took in row[name])])
    return "A step under a ceiling on working memory", cells


def _worst(part: dict[str, Any]) -> tuple[str, Cells]:
    cells = [["shape", "CacheMuon / cheapest Muon", "Muon / itself", "hits", "cache tried", "uncached"]]
    for row in part["rows"]:
        uncached = row["outcomes"]["uncached"]
        cells.append(
            [
                "{} x {}".format(*row["shape"]),
                "{:.3f} ({:.3f} to {:.3f})".format(*row["CacheMuon / Muon"]),
                "{:.3f} ({:.3f} to {:.3f})".format(*row["Muon again / Muon"]),
                str(row["hits"]),
                str(row["steps"] - uncached),
                str(uncached),
            ]
        )
    return f"A new left basis at each of {part['rows'][0]['steps']} steps", cells


def _share(part: dict[str, Any]) -> tuple[str, Cells]:
    cells = [["optimizer", "share of the training step", "model, ms", "optimizer, ms", "hits"]]
    for row in part["rows"]:
        cells.append(
            [
                row["name"],
                f"{row['share']:.0%}",
                f"{row['model milliseconds']:.0f}",
                f"{row['optimizer milliseconds']:.0f}",
                "" if row["hits"] is None else f"{row['hits']:.0%}",
            ]
        )
    return f"A training step on {part['tokens']:,} tokens", cells


def _growth(series: dict[str, list[float]], title: str) -> tuple[str, Cells]:
    lines = [name for name in series if name != "x"]
    cells = [[f"{title}, ms", *lines]]
    for number, x in enumerate(series["x"]):
        cells.append([f"{x:g}", *(f"{series[name][number]:.2f}" for name in lines)])
    return title, cells


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """`steps.png` and `growth.png`, as far as their parts were measured."""
    drawn = []
    with rc_context(STYLE):
        if "steps" in results:
            drawn.append(_save(_bars(results["steps"]["workloads"]), out / "steps.png"))
        if "growth" in results:
            drawn.append(_save(_curves(results["growth"]), out / "growth.png"))
    return drawn


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _bars(workloads: dict[str, list[dict[str, Any]]]) -> Figure:
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    for axes, (title, rows) in zip(
        figure.subplots(1, len(workloads), squeeze=False)[0], workloads.items(), strict=True
    ):
        values = np.array([row["to GramMuon"] for row in rows])
        colours = [
            GREY if row["matrix part to GramMuon"] is None else BLUE if row["hits"] is None else RED
            for row in rows
        ]
        places = np.arange(len(rows))[::-1]
        axes.barh(places, values, color=colours)
        axes.set_yticks(places, [f"{row['name']} ({row['precision']})" for row in rows])
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                f"{value:.2f}", (value, place), (2, 0), textcoords="offset points", va="center", fontsize=6
            )
        axes.set_xscale("log")
        axes.set_xlim(values.min() / 1.6, values.max() * 2)
        axes.set_xlabel("step time / GramMuon's")
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
    return figure


def _curves(growth: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    colours = {
        "hit": RED,
        "miss": "#E69F00",
        "GramMuon": "#222222",
        "PolarExpMuon": BLUE,
        "torch.optim.Muon": GREY,
    }
    labels = {"hit": "CacheMuon, every step a hit", "miss": "CacheMuon, every step a miss"}
    titles = {"size": "n, of one n x 4n matrix", "number": "number of 64 x 64 matrices"}
    for axes, (axis, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        series = growth[axis]
        for name, colour in colours.items():
            if name in series:
                axes.plot(series["x"], series[name], "o-", color=colour, label=labels.get(name, name))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(series["x"], [f"{x:g}" for x in series["x"]])
        axes.set_xlabel(title)
        axes.set_ylabel("ms a step")
    figure.axes[0].legend()
    return figure
