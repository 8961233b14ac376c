"""`cachemuon figures` and `cachemuon report`, and what other commands show of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachemuon_lab.commands.options import RunFolders
from cachemuon_lab.terminal import console, display, say

if TYPE_CHECKING:
    from cachemuon_lab.record import Run


def figures(
    runs: RunFolders,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the figures.")] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="pdf, png or svg; all if not given.")
    ] = None,
) -> None:
    """Draw every figure that the runs allow."""
    draw(_open_runs(runs), out, formats)


def report(
    runs: RunFolders,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page, or its folder.")] = Path("report.html"),
) -> None:
    """Write an HTML page about the runs."""
    from cachemuon_lab.report import write_report

    say(f"The report is {write_report(_open_runs(runs), out)}.")


def _open_runs(paths: Iterable[Path]) -> list[Run]:
    from cachemuon_lab.record import CONFIG, Run

    runs: list[Run] = []
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}")
        folders = [path] if (path / CONFIG).is_file() else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if not folders:
            raise ValueError(f"{path} is no run, and holds none: no {CONFIG}")
        runs += [Run.open(folder) for folder in folders]
    return runs


def show_table(runs: list[Run]) -> None:
    """Print the table of a comparison."""
    from cachemuon_lab.table_forms import to_rich
    from cachemuon_lab.tables import compare

    display(to_rich(compare(runs), width=console().width))


def write_pages(runs: list[Run], out: Path, command: str) -> str:
    """Figures and report of a comparison; returns where they are."""
    from cachemuon_lab.figures import figures
    from cachemuon_lab.report import write_report

    figures(runs, out / "figures")
    return f"The report is {write_report(runs, out, [command])}, its figures are in {out / 'figures'}."


def draw(runs: list[Run], out: Path, formats: Sequence[str] | None = None) -> None:
    """Draw every figure that the runs allow, and say where each is."""
    from cachemuon_lab.figures import figures

    drawn = figures(runs, out, **({"formats": formats} if formats else {}))
    for figure in drawn:
        say(f"{figure.name}: {', '.join(map(str, figure.paths)) or figure.caption}")
