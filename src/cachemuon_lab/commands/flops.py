"""`cachemuon flops`: what orthogonalization costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cachemuon_lab.terminal import display, new_table

if TYPE_CHECKING:
    from cachemuon.flops import Cost
    from cachemuon_lab.totals import Shape


def flops(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|SHAPES...",
            help="gpt2-small, gpt2-large, resnet18, or as 768x3072; paper: its table.",
        ),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1,
    replicas: Annotated[int, typer.Option(help="Devices that each orthogonalize everything.")] = 1,
    hit_rate: Annotated[float | None, typer.Option(help="Also price CacheMuon, if this part hits.")] = None,
) -> None:
    """Price orthogonalization, by the paper's model and as executed."""
    if what == ["paper"]:
        return _show_papers_table()
    from cachemuon import CacheGNS, GramNS
    from cachemuon.flops import PaperCost, executed_by
    from cachemuon_lab.config import OptimizerConfig
    from cachemuon_lab.totals import total

    def clipped(n: int, m: int) -> Cost:
        return executed_by(GramNS(), n, m, rank=CacheGNS(clip=OptimizerConfig.clip).rank(min(n, m)))

    shapes = [shape for word in what for shape in _shapes(word)]
    models: dict[str, Callable[[int, int], Cost]] = {
        "the paper's model": PaperCost,
        "executed, exact probe": partial(executed_by, GramNS(), probe="exact"),
        "executed, sketched probe": partial(executed_by, GramNS()),
        "executed, clipped": clipped,
    }
    table = new_table(
        "shape", "matrices", "hit", "miss", "GramNS", "StandardNS", "break-even", title="GFLOPs of one call"
    )
    for name, model in models.items():
        table.add_section()
        table.add_row(Text(name, style="bold"))
        for (rows, columns), count in Counter(shapes).items():
            cost = model(rows, columns)
            prices = (f"{price / 1e9:,.4g}" for price in (cost.hit, cost.miss, cost.gram, cost.standard))
            table.add_row(f"{rows}x{columns}", str(count), *prices, f"{cost.break_even:.1%}")
    display(table)

    sums: dict[str, list[float]] = {}
    for model in models.values():
        add = partial(total, shapes, steps, replicas=replicas, model=model)
        sums.setdefault("GramMuon", []).append(add(solver="gram"))
        sums.setdefault("PolarExpMuon", []).append(add(solver="standard"))
        if hit_rate is not None:
            sums.setdefault(f"CacheMuon, {hit_rate:.0%} hits", []).append(add(solver="cache", hits=hit_rate))
    largest = max(value for row in sums.values() for value in row)
    scale, unit = next(
        (pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if largest >= pair[0]), (1e6, "M")
    )
    on = f" on {replicas} replicas" if replicas > 1 else ""
    title = f"{unit}FLOPs of {len(shapes)} matrices in {steps:,} step{'s' * (steps > 1)}{on}"
    table = new_table("", *models, title=title)
    for label, row in sums.items():
        table.add_row(label, *(f"{value / scale:,.2f}" for value in row))
    display(table)


def _show_papers_table() -> None:
    """The table of orthogonalization FLOPs in the paper's appendix."""
    from cachemuon_lab.appendix import flops_table

    title, (heads, *rows) = flops_table()
    table = new_table(*heads, title=title)
    for row in rows:
        table.add_row(*row)
    display(table)


def _shapes(word: str) -> Sequence[Shape]:
    from cachemuon_lab.totals import GPT2_LARGE, GPT2_SMALL, RESNET18

    models = {"gpt2-small": GPT2_SMALL, "gpt2-large": GPT2_LARGE, "resnet18": RESNET18}
    if word in models:
        return models[word]
    rows, _, columns = word.partition("x")
    if not all(side.isdecimal() and 0 < len(side) < 10 for side in (rows, columns)):
        raise ValueError(f"expected {', '.join(models)} or a shape as 768x3072, got {word!r}")
    return [(int(rows), int(columns))]
