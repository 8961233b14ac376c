"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="One of `cachemuon train --list`.")]
Kind = Annotated[
    str | None,
    typer.Option("--optimizer", help="polar, gram, paper, cache or another kind; else the recipe's first."),
]
Gamma = Annotated[float | None, typer.Option(help="CacheMuon's threshold.")]
MaxAge = Annotated[int | None, typer.Option(help="Steps that CacheMuon may reuse a transform for.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as steps=100 or optimizer.lr=0.02."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; under runs/ if not given.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold some.")
]
Seeds = Annotated[int, typer.Option(help="Runs of each optimizer.")]
Workers = Annotated[
    int, typer.Option(help="Trainings at a time, each in a process with one thread on the CPU.")
]
