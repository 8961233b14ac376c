"""Count a step of Muon and CacheMuon on many ranks: FLOPs, bytes, balance, memory. docs/notebook/scaling.md

    python benchmarks/scale.py [--page docs/notebook/scaling.md] [--picture docs/img/scale.png]

Nothing is timed. What is counted for 1 to 4 ranks is what ranks do here (tests/distributed/test_scale.py);
for 8 to 1,024 it is the same formulas. Every transform is reused `max_age` times and then refreshed: no
residual is above gamma. Matrices are float32, and so are the updates and directions that ranks send.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from cachemuon import CacheGNS, GramNS
from cachemuon.distributed.placement import OwnerCost, assign_owners
from cachemuon.engine.bucket import spread
from cachemuon.flops import ExecutedCost, executed_by
from cachemuon_lab import drawing
from cachemuon_lab.performance import Cells, renew
from cachemuon_lab.totals import GPT2_LARGE

Shape = tuple[int, int]
MAX_AGE, ITEM = 10, 4  # bytes of a number
RANKS = (1, 8, 64, 256, 1024)

LLAMA_8B = 32 * ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *3 * ((4096, 14336),))
"""Llama 3 8B (Grattafiori et al., 2024): 32 layers of width 4,096, grouped keys and values, SwiGLU."""

MIXTURE_DENSE = 60 * (4 * ((7168, 7168),))
MIXTURE_EXPERTS = (2048, 7168)
MIXTURE_NUMBER = 60 * 384 * 3
"""A mixture of 1.01T parameters: 60 layers of width 7,168 with 384 experts of width 2,048, three matrices
each (the sizes are near those of Kimi K2, 2025; attention is four square matrices here)."""


def costs(shapes: Iterable[Shape]) -> list[ExecutedCost]:
    """What each outcome of each matrix costs, with CacheMuon's defaults."""
    clip = CacheGNS(clip=None)
    return [executed_by(GramNS(), n, m, rank=clip.rank(n)) for n, m in shapes]


class Step(NamedTuple):
    """The mean cost of a step over one life of the transforms.

    `flops` of all ranks, and of the `busiest` rank; `worst` is the largest share of one step that a rank has,
    as a multiple of the mean rank's; `sent` bytes of all ranks; bytes of `transforms` that one rank keeps.
    """

    way: str
    flops: float
    busiest: float
    worst: float
    sent: float
    transforms: float


TRANSFORMS, CACHED_SHARDS = 3, 4
"""The places of two ways among those of `steps`."""


def steps(shapes: Sequence[Shape], ranks: int, max_age: int = MAX_AGE) -> list[Step]:
    """Six ways to share the work, for matrices whose sides are divisible by the number of ranks."""
    wide = [(min(shape), max(shape)) for shape in shapes]
    found = costs(wide)
    numbers = sum(n * m for n, m in wide)
    squares = ITEM * sum(n * n for n, _ in wide)
    others, life = ranks - 1, max_age + 1
    order = sorted(range(len(shapes)), key=lambda i: shapes.index(shapes[i]))  # one kind after the other
    slots = spread([found[i].refresh - found[i].hit for i in order], life)
    due = [slot for _, slot in sorted(zip(order, slots, strict=True))]
    fresh = [OwnerCost(cost.gram, 0) for cost in found]
    cached = [
        OwnerCost(cost.hit, cost.refresh - cost.hit, slot) for cost, slot in zip(found, due, strict=True)
    ]
    gram = sum(cost.gram for cost in found)
    hits = sum(cost.hit for cost in found) * max_age / life
    refreshes = sum(cost.refresh for cost in found) / life
    received = sum(cost.received for cost in found) / life
    solves = [(0, cost.refresh - cost.received) for cost in found]
    shards = 2 * ITEM * numbers * others / ranks
    directions = ITEM * numbers * others
    fresh_busy = busy(fresh, [cost[:2] for cost in fresh], ranks, life)
    cached_busy = busy(cached, [cost[:2] for cost in cached], ranks, life)
    busiest, worst = busy(cached, solves, ranks, life)
    base, mean = hits + received, mean_load(solves, ranks, life)
    own = squares / ranks
    return [
        Step("every rank solves all", ranks * gram, gram, 1.0, 0, 0),
        Step("Muon, copies: owners send directions", gram, *fresh_busy, directions, 0),
        Step("Muon, shards: to owners and back", gram, *fresh_busy, shards, 0),
        Step(
            "CacheMuon, copies: owners send transforms",
            ranks * hits + refreshes + others * received,
            base + busiest,
            (base + worst * mean) / (base + mean),
            squares * others / life,
            squares,
        ),
        Step("CacheMuon, shards: to owners and back", hits + refreshes, *cached_busy, shards, own),
        Step("CacheMuon, copies: owners send directions", hits + refreshes, *cached_busy, directions, own),
    ]


def busy(
    owned: Sequence[OwnerCost], loads: Sequence[tuple[int, int]], ranks: int, life: int
) -> tuple[float, float]:
    """The FLOPs of the busiest rank in the mean step, and the largest share of a step that one has, as a
    multiple of the mean rank's; `loads` are the FLOPs of each matrix, at every step and for its solve.
    """
    steps = [[0.0] * ranks for _ in range(life)]
    found = assign_owners(owned, [range(ranks)] * len(owned), ranks)
    for cost, (always, solve), owner in zip(owned, loads, found, strict=True):
        for number, step in enumerate(steps):
            step[owner] += always + (solve if number == cost.refresh_slot else 0)
    totals = [sum(step[rank] for step in steps) / life for rank in range(ranks)]
    worst = max((max(step) * ranks / sum(step) for step in steps if sum(step)), default=1.0)
    return max(totals), worst


def mean_load(loads: Sequence[tuple[int, int]], ranks: int, life: int) -> float:
    """The FLOPs of the mean rank in the mean step."""
    return sum(always + solve / life for always, solve in loads) / ranks


def small_bytes(matrices: int, *, cached: bool) -> int:
    """What a rank gives at every step to the collectives that carry no matrices: a flag for each matrix, and
    three readings where transforms are cached.
    """
    return ITEM * matrices * (1 + 3 * cached)


def columns(n: int, m: int, ranks: int, max_age: int = MAX_AGE) -> tuple[float, float]:
    """If X were sharded along its long side: FLOPs of a rank, and numbers that it sends, in the mean step.

    A hit `Q X_r` and all products with X are local. Sums over ranks are needed for a clipped hit's thin
    products, `n r + r^2 + k^2` numbers, and for a solve's Gram matrix, n^2. Every rank does the n x n part.
    A sum over ranks sends twice its numbers.
    """
    (cost,) = costs([(n, m)])
    r, k, life = cost.rank, cost.vectors, max_age + 1
    local = cost.apply + (2 * k + 4 * r) * n * m + 2 * r * r * m
    thin = max(cost.hit - local, 0)
    iterations = cost.refresh - 4 * n * n * m - cost.recheck
    hit, refresh = local / ranks + thin, (4 * n * n * m + cost.recheck) / ranks + iterations
    sent = 2 * (max_age * (n * r + r * r + k * k) + n * n) / life
    return (max_age * hit + refresh) / life, sent * (ranks - 1) / ranks


def digits(number: float) -> str:
    """Three digits, without an exponent.

    >>> digits(2588.4), digits(0.07512)
    ('2,590', '0.0751')
    """
    return f"{float(f'{number:.3g}'):,.12g}"


def by_number(
    ranks: Iterable[int], shapes: Sequence[Shape], experts: tuple[Shape, int] | None = None
) -> Cells:
    """A row for each way and number of ranks."""
    cells = [
        ["ranks", "way", "TFLOP, all ranks", "TFLOP, busiest", "worst / mean", "GB sent by a rank", "GB kept"]
    ]
    for number in ranks:
        own = steps([experts[0]], 1) if experts else None
        for place, step in enumerate(steps(shapes, number)):
            flops, busiest, kept = step.flops, step.busiest, step.transforms
            if own is not None and experts is not None:  # every expert is on one rank, which owns it
                share = experts[1] / number
                flops += own[place].flops * experts[1] * (number if place == 0 else 1)
                busiest += own[place].busiest * (experts[1] if place == 0 else share)
                kept += own[place].transforms * (experts[1] if place == TRANSFORMS else share)
            cells.append(
                [
                    str(number),
                    step.way,
                    digits(flops / 1e12),
                    digits(busiest / 1e12),
                    f"{step.worst:.2f}",
                    digits(step.sent / number / 1e9),
                    digits(kept / 1e9),
                ]
            )
    return cells


def by_columns(ranks: Iterable[int]) -> Cells:
    """Owners beside column shards, for single shapes: what the busiest rank does, and all ranks send."""
    shapes = ((768, 3072), (4096, 4096), (4096, 14336), (2048, 7168))
    cells = [
        ["matrix", "ranks", "GFLOP of its owner", "GFLOP of a rank, columns", "MB, owner", "MB, columns"]
    ]
    for n, m in shapes:
        for number in ranks:
            step = steps([(n, m)], number)[CACHED_SHARDS]
            flops, sent = columns(n, m, number)
            cells.append(
                [
                    f"{n} x {m}",
                    str(number),
                    digits(step.busiest / 1e9),
                    digits(flops / 1e9),
                    digits(step.sent / 1e6),
                    digits(ITEM * number * sent / 1e6),
                ]
            )
    return cells


def draw(path: Path) -> None:
    """FLOPs of the busiest rank and bytes sent by a rank, against the number of ranks, for an 8B model."""
    ranks = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    made = [steps(LLAMA_8B, number) for number in ranks]
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        flops, sent = figure.subplots(1, 2)
        for place, first in enumerate(made[0]):
            line = {"color": f"C{place}", "marker": "osD^vP"[place], "ms": 3, "label": first.way}
            flops.plot(ranks, [row[place].busiest / 1e12 for row in made], **line)
            if place:
                sent.plot(
                    ranks[1:],
                    [row[place].sent / n / 1e9 for n, row in zip(ranks, made, strict=True)][1:],
                    **line,
                )
        flops.set(xlabel="ranks", ylabel="TFLOP of the busiest rank in a step", xscale="log", yscale="log")
        sent.set(xlabel="ranks", ylabel="GB that a rank sends in a step", xscale="log", yscale="log")
        figure.legend(*flops.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        drawing.save(figure, path)


def tables() -> dict[str, tuple[str, Cells]]:
    """The tables of the page."""
    return {
        "large8": ("GPT-2 Large on 8 ranks", [row[1:] for row in by_number((8,), GPT2_LARGE)]),
        "dense8": ("8B dense on 8 ranks", [row[1:] for row in by_number((8,), LLAMA_8B)]),
        "large": ("GPT-2 Large", by_number(RANKS[1:4], GPT2_LARGE)),
        "dense": ("8B dense", by_number(RANKS[1:], LLAMA_8B)),
        "mixture": (
            "1T mixture",
            by_number(RANKS[2:], MIXTURE_DENSE, (MIXTURE_EXPERTS, MIXTURE_NUMBER)),
        ),
        "columns": ("Column shards", by_columns((8, 64))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", type=Path, metavar="FILE", action="append", default=[], help="renew this page's tables"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    made = tables()
    for title, cells in made.values():
        print(title)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            print("  ".join(map(str.ljust, row, widths)))
    renew(args.page, made)
    if args.picture is not None:
        draw(args.picture)


if __name__ == "__main__":
    main()
