"""A longer training: 2,000 steps of 16 x 128 bytes at width 256, CacheMuon beside the fresh Muons.

    python benchmarks/longer.py --text DIR [--out runs/longer] [--steps 2000] [--workers 2] [--page FILE]

`DIR` has `train.bin` and `val.bin` with bytes as uint16, as for `beyond.py`, whose model and momentum it has.
The learning rate of each method is chosen with seed 0 by runs of the whole length: two rates, and from the
better one on the next of a ladder until that is worse. Then each is trained with two other seeds.

Called again it goes on: Ctrl-C stops it at the next step, `--minutes` after that time, and everything done is
kept. At its end it writes `longer.json` and `longer.png`, and with `--page` the tables of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from beyond import RIVALS, best_fresh, hits, summary
from matplotlib import rc_context
from matplotlib.figure import Figure
from trainings import Stopped, Trainings, add_arguments, best_of, climb, searched_table, tell

from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import LABELS, OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe

SHARED = OptimizerConfig("gram", momentum=0.9, nesterov=True, adam_lr=2e-3)
LADDER = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
FIRST = {"gram": (2, 3), "jordan": (2, 3), "cache": (3, 4)}  # where on it the searches begin
TUNING, SEEDS = 0, (1, 2)
SETTINGS = ("batch_size=16", "validate_every=100", "checkpoint_every=100")


class Longer:
    """The runs of a folder."""

    def __init__(
        self, data: Path, trainings: Trainings, steps: int, *, kinds: Sequence[str] = RIVALS
    ) -> None:
        self.data, self.trainings, self.steps = data, trainings, steps
        self.kinds = [kind for kind in RIVALS if kind in {"gram", *kinds}]

    def config(self, kind: str, rate: float, seed: int) -> RunConfig:
        own = (f"data.path={self.data}", f"steps={self.steps}", f"seed={seed}")
        return configure(recipe("gpt2-mini"), replace(SHARED, kind=kind, lr=rate), (*SETTINGS, *own))

    def results(self) -> dict[str, Any]:
        """Search, train each method at its best learning rate with other seeds, and sum it up."""

        def losses(wanted: list[tuple[str, float]]) -> list[float]:
            configs = {_name(*one, TUNING): self.config(*one, TUNING) for one in wanted}
            return [run.validations[-1]["loss"] for run in self.trainings.run(configs).values()]

        searched = climb(LADDER, {kind: FIRST[kind] for kind in self.kinds}, losses)
        wanted = [(kind, best_of(searched[kind]), seed) for kind in self.kinds for seed in SEEDS]
        runs = self.trainings.run({_name(*one): self.config(*one) for one in wanted})
        methods = []
        for kind in self.kinds:
            own = [runs[_name(*one)] for one in wanted if one[0] == kind]
            lines = [[line["loss"] for line in run.validations] for run in own]
            curve = [round(mean(at), 4) for at in zip(*lines, strict=True)]
            steps = [line["step"] for line in own[0].validations]
            methods.append(summary(own) | {"steps": steps, "curve": curve})
        return {"searched": searched, "methods": methods}


def _name(kind: str, rate: float, seed: int) -> str:
    return f"{kind}-{rate:g}-s{seed}"


def methods_table(results: dict[str, Any]) -> Cells:
    """A row for each method; differences are seed by seed, FLOPs of GramMuon's."""
    rows = results["methods"]
    best, gram = best_fresh(rows), next(row for row in rows if row["kind"] == "gram")
    cells = [["", "lr", "loss", "of each seed", "to the best fresh", "hits", "FLOPs"]]
    for row in rows:
        apart = [one - other for one, other in zip(row["losses"], best["losses"], strict=True)]
        cells.append(
            [
                LABELS[row["kind"]],
                f"{row['lr']:g}",
                f"{mean(row['losses']):.4f}",
                ", ".join(f"{loss:.4f}" for loss in row["losses"]),
                "" if row is best else ", ".join(f"{one:+.4f}" for one in apart),
                hits(row),
                f"{row['flops'] / gram['flops']:.0%}",
            ]
        )
    return cells


def draw(results: dict[str, Any], path: Path) -> None:
    """Mean validation loss of the seeds against steps."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        for row in results["methods"]:
            tint = drawing.colour(OptimizerConfig(row["kind"]))
            ax.plot(row["steps"], row["curve"], color=tint, label=f"{LABELS[row['kind']]}, lr {row['lr']:g}")
        worst = max(row["curve"][len(row["curve"]) // 5] for row in results["methods"])
        lowest = min(np.min(row["curve"]) for row in results["methods"])
        ax.set(xlabel="step", ylabel="validation loss", ylim=(lowest - 0.05, worst + 0.05))
        ax.legend()
        drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", required=True, help="train.bin, val.bin of bytes")
    parser.add_argument("--steps", type=int, metavar="N", default=2000)
    parser.add_argument("--methods", nargs="*", choices=RIVALS, default=RIVALS, help="beside gram")
    add_arguments(parser, "runs/longer")
    args = parser.parse_args()
    trainings = Trainings(args.out, workers=args.workers, minutes=args.minutes)
    try:
        results = Longer(args.text, trainings, args.steps, kinds=args.methods).results()
    except Stopped as stopped:
        print(stopped)
        return
    (args.out / "longer.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "longer.png")
    made = {
        "longer": ("2,000 steps", methods_table(results)),
        "longer_search": ("2,000 steps: search", searched_table(results["searched"])),
    }
    tell(made, args.page)


if __name__ == "__main__":
    main()
