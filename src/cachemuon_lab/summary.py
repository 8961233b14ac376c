"""What a comparison came to, in a few lines for people: each family within itself, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from cachemuon_lab.tables import DASH, Comparison, Row
from cachemuon_lab.terminal import new_table

NOISE = 0.03
"""Losses of one short run differ by about so much between seeds."""


def summary_tables(comparison: Comparison) -> Iterator[Table]:
    """A table for each family: loss, difference to the best fresh optimizer, FLOPs relative to GramMuon."""
    for family, rows in comparison.families.items():
        fresh = comparison.fresh(family)
        heads = ("learning rate", "best loss", "difference", "hits", "FLOPs", "FLOPs, paper's count")
        table = new_table("", *heads, title=_beside(family, fresh) if fresh else family.capitalize())
        for row in rows:
            loss, hits = row.cells["loss"], row.cells["hit_rate"]
            difference = _difference(row, fresh)
            table.add_row(
                row.title,
                f"{row.runs[0].config.optimizer.lr:g}",
                f"{loss.mean:.3f}" if loss else DASH,
                "" if row is fresh else DASH if difference is None else f"{difference:+.3f}",
                f"{hits.mean:.0%}" if hits else "",
                *(_share(row, model) for model in ("executed", "paper")),
            )
        yield table


def verdicts(comparison: Comparison) -> list[str]:
    """For each family with a fresh optimizer a line for each that caches, and how much may be chance."""
    said = []
    for family, rows in comparison.families.items():
        fresh = comparison.fresh(family)
        cached = [row for row in rows if row.caches and _difference(row, fresh) is not None]
        if fresh is None or not cached:
            continue
        said.append(f"{_beside(family, fresh)}:")
        said += [
            f"  {row.title}: loss {_compared(row, fresh)}, {_share(row, 'executed')} of the FLOPs"
            for row in cached
        ]
    seeds = max((len(row.runs) for row in comparison.rows), default=0)
    if seeds == 1:
        said.append(f"A lower loss is better. One seed: differences below {NOISE:g} may be chance.")
    return said


def next_steps(page: str, out: Path) -> list[str]:
    """What to do after the demonstration."""
    return [
        page,
        "Next:",
        f"  open {out / 'report.html'} in a browser",
        "  with three seeds: cachemuon compare demo --seeds 3 --workers 2",
        "  in your own training: docs/quickstart.md",
    ]


def _beside(family: str, fresh: Row) -> str:
    return f"{family.capitalize()}, beside {fresh.title}" if family else f"Beside {fresh.title}"


def _difference(row: Row, fresh: Row | None) -> float | None:
    mine, its = row.cells["loss"], fresh.cells["loss"] if fresh else None
    return None if mine is None or its is None else round(mine.mean - its.mean, 3) + 0.0  # nothing is -0


def _compared(row: Row, fresh: Row) -> str:
    difference = _difference(row, fresh) or 0.0
    return f"{abs(difference):.3f} {'lower' if difference < 0 else 'higher'}" if difference else "the same"


def _share(row: Row, model: str) -> str:
    saved = row.cells[f"saved_{model}_gram"]
    return DASH if saved is None else f"{1 - saved.mean:.0%}"
