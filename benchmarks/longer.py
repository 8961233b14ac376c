"""A longer training: 2,000 steps of 16 x 128 bytes at width 256, CacheMuon beside the best fresh Muon.

    python benchmarks/longer.py --text DIR [--out runs/longer] [--steps 2000] [--search 500] [--ledger FILE]

`DIR` has `train.bin` and `val.bin` with bytes as uint16, as for `beyond.py`, whose model and momentum it
has. The learning rate of GramMuon, Muon (Jordan) and CacheMuon with `normalize=None` is chosen with seed 0
by shorter runs: two rates, and from the better one on the next of a ladder until that is worse. Then that
CacheMuon and the fresh Muon that was best are searched again at the whole length with another seed, from
that rate and, since longer runs want smaller ones, the next lower one on; and trained at the best of that
with a second seed. NorMuon and CacheMuon, which normalize, are trained at that fresh Muon's best rate,
without a search.

Called again it goes on: Ctrl-C stops it at the next step, `--minutes` after that time, and everything done is
kept. At its end it writes `longer.json` and `longer.png`, and with `--page` the tables of that page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from ledger import Finished
from matplotlib import rc_context
from matplotlib.figure import Figure
from study import best_fresh, hits, summary
from trainings import (
    METHODS,
    Stopped,
    Trainings,
    add_arguments,
    best_of,
    climb,
    line_of,
    method_of,
    searched_table,
    tell,
    trainings_of,
)

from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe

SHARED = OptimizerConfig("gram", momentum=0.9, nesterov=True, adam_lr=2e-3)
LADDER = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
FIRST = {"gram": (3, 4), "jordan": (3, 4), "cache-none": (4, 5)}  # where on it the searches begin
UNTUNED = ("normuon", "cache")  # trained at the rate of the best fresh one
TUNING, SEEDS = 0, (1, 2)
Method = tuple[str, float]  # a name and a learning rate
SETTINGS = ("batch_size=16", "validate_every=100", "checkpoint_every=100")


class Longer:
    """The runs of a folder."""

    def __init__(self, data: Path, trainings: Trainings, steps: int, search: int) -> None:
        self.data, self.trainings, self.steps, self.search = data, trainings, steps, search

    def config(self, name: str, rate: float, seed: int, steps: int) -> RunConfig:
        own = (f"data.path={self.data}", f"steps={steps}", f"seed={seed}")
        return configure(recipe("gpt2-mini"), method_of(name, rate, SHARED), (*SETTINGS, *own))

    def results(self) -> dict[str, Any]:
        """Search, search the two again at the whole length, and sum it up."""
        spent: dict[str, float] = {}

        def losses(wanted: list[tuple[str, float]]) -> list[float]:
            configs = {
                _name("search", *one, TUNING): self.config(*one, TUNING, self.search) for one in wanted
            }
            done = self.trainings.run(configs).values()
            spent.update({name: run.flops or 0 for (name, _), run in zip(wanted, done, strict=True)})
            return [run.loss for run in done]

        searched = climb(LADDER, FIRST, losses)
        fresh = min(searched.keys() - {"cache-none"}, key=lambda name: min(searched[name].values()))
        first: dict[Method, Finished] = {}

        def at_length(wanted: list[Method]) -> list[float]:
            first.update(self._trained(wanted, SEEDS[0]))
            return [first[one].loss for one in wanted]

        places = {name: LADDER.index(best_of(searched[name])) for name in (fresh, "cache-none")}
        found = climb(LADDER, {name: {max(at - 1, 0), at} for name, at in places.items()}, at_length)
        untuned = [(name, best_of(found[fresh])) for name in UNTUNED]
        at_length(untuned)
        tried = [(name, rate) for name, by_rate in found.items() for rate in reversed(by_rate)] + untuned
        best = [(name, best_of(by_rate)) for name, by_rate in found.items()] + untuned
        of_seeds = [first, *(self._trained(best, seed) for seed in SEEDS[1:])]
        methods = []
        for name, rate in tried:
            own = [runs[name, rate] for runs in of_seeds if (name, rate) in runs]
            lines = [[line["loss"] for line in run.validations] for run in own]
            curve = [round(mean(at), 4) for at in zip(*lines, strict=True)]
            steps = [line["step"] for line in own[0].validations]
            row = {"name": name, "kind": method_of(name, rate, SHARED).kind, "lr": rate, **summary(own)}
            methods.append(row | {"steps": steps, "curve": curve})
        gram = spent["gram"] / self.search * self.steps  # the same at every step
        return {"searched": searched, "methods": methods, "gram_flops": gram}

    def _trained(self, methods: list[Method], seed: int) -> dict[Method, Finished]:
        names = {one: _name(*one, seed) for one in methods}
        done = self.trainings.run({name: self.config(*one, seed, self.steps) for one, name in names.items()})
        return {one: done[name] for one, name in names.items()}


def _name(*parts: object) -> str:
    *told, seed = [f"{part:g}" if isinstance(part, float) else str(part) for part in parts]
    return "-".join([*told, f"s{seed}"])


def methods_table(results: dict[str, Any]) -> Cells:
    """A row for each method and rate; differences are seed by seed, FLOPs of GramMuon's."""
    rows = results["methods"]
    best = best_fresh([row for row in rows if len(row["losses"]) == len(SEEDS)])
    cells = [["", "lr", "loss", "of each seed", "to the best fresh", "hits", "FLOPs"]]
    for row in rows:
        apart = [one - other for one, other in zip(row["losses"], best["losses"], strict=False)]
        cells.append(
            [
                METHODS[row["name"]][0],
                f"{row['lr']:g}",
                f"{mean(row['losses']):.4f}",
                ", ".join(f"{loss:.4f}" for loss in row["losses"]),
                "" if row is best else ", ".join(f"{one:+.4f}" for one in apart),
                hits(row),
                f"{row['flops'] / results['gram_flops']:.0%}",
            ]
        )
    return cells


def best_table(results: dict[str, Any]) -> Cells:
    """A row for each method at its best rate, the one that all seeds were trained at."""
    rows = [row for row in results["methods"] if len(row["losses"]) == len(SEEDS)]
    best = best_fresh(rows)
    cells = [["", "lr", "seeds", "loss", "to the best fresh", "hits", "FLOPs"]]
    for row in rows:
        apart = mean(row["losses"]) - mean(best["losses"])
        cells.append(
            [
                METHODS[row["name"]][0],
                f"{row['lr']:g}",
                str(len(row["losses"])),
                f"{mean(row['losses']):.3f}",
                "" if row is best else f"{apart:+.3f}",
                hits(row),
                f"{row['flops'] / results['gram_flops']:.0%}",
            ]
        )
    return cells


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    return {
        "longer": ("Longer trainings", methods_table(results)),
        "longer_best": ("Longer trainings: the best of each", best_table(results)),
        "longer_search": ("Longer trainings: search", searched_table(results["searched"])),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Mean validation loss of the seeds against steps."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        rows = [row for row in results["methods"] if len(row["losses"]) == len(SEEDS)]
        for row in rows:
            told = f"{METHODS[row['name']][0]}, lr {row['lr']:g}"
            ax.plot(row["steps"], row["curve"], label=told, **line_of(row["name"]))
        worst = max(row["curve"][len(row["curve"]) // 5] for row in rows)
        lowest = min(np.min(row["curve"]) for row in rows)
        ax.set(xlabel="step", ylabel="validation loss", ylim=(lowest - 0.05, worst + 0.05))
        ax.legend()
        drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", required=True, help="train.bin, val.bin of bytes")
    parser.add_argument("--steps", type=int, metavar="N", default=2000)
    parser.add_argument("--search", type=int, metavar="N", default=500, help="steps of the shorter runs")
    add_arguments(parser, "runs/longer")
    args = parser.parse_args()
    try:
        results = Longer(args.text, trainings_of(args), args.steps, args.search).results()
    except Stopped as stopped:
        print(stopped)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "longer.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "longer.png")
    tell(tables(results), args.page)


if __name__ == "__main__":
    main()
