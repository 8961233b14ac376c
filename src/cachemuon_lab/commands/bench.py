"""`cachemuon bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachemuon_lab.commands.options import RUNS, Out, Overwrite
from cachemuon_lab.terminal import display, new_table, say, status


def bench(
    out: Out = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            help="solvers, steps, even, worst, share, growth, host or ceilings; else all.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each contender has its turn.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, to see that all works.")] = False,
    again: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Only tables and pictures, of an earlier bench.json."),
    ] = None,
    pages: Annotated[
        list[Path] | None,
        typer.Option("--page", metavar="FILE", help="Also renew the tables of this Markdown page."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Time solvers and optimizer steps on this machine, beside every other Muon that is installed.

    Nothing else should run meanwhile. Interrupted, the same command goes on with the next part.
    """
    from cachemuon_lab.bench import PARTS, measured, run
    from cachemuon_lab.performance import draw, renew, tables, to_page
    from cachemuon_lab.timing import avoid_trapped_bf16

    if unknown := [part for part in only or () if part not in PARTS]:
        raise ValueError(f"--only must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    if rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {rounds}")
    out = out or RUNS / ("bench-quick" if quick else "bench")
    if again is not None:
        results = measured(again)
    else:
        avoid_trapped_bf16()
        if overwrite:
            (out / "bench.json").unlink(missing_ok=True)
        with status() as tell:
            results = run(out, only or PARTS, rounds=rounds, quick=quick, tell=tell)
    for title, (heads, *rows) in tables(results).values():
        table = new_table(*heads, title=title)
        for row in rows:
            table.add_row(*row)
        display(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(to_page(results))
    renew(pages or (), tables(results))
    pictures = draw(results, out)
    say(f"Written: {', '.join(map(str, [out / 'bench.json', out / 'bench.md', *pictures]))}")
