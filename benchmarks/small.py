"""GPT-2 Small itself, 124 million parameters, trained whole: loss against wall-clock time.

    python benchmarks/small.py --data DIR [--out runs/small] [--steps 250] [--search 40]

`DIR` has `train.bin` and `val.bin` in GPT-2's tokens. Three optimizers: CacheMuon, the best fresh Muon
(GramMuon with Nesterov's momentum), and torch.optim.Muon's mathematics in float32 (its quintic, iterated on
the matrices themselves). First the learning rate of the first two is chosen by the loss after a shorter run:
0.02 and 0.04, and from the better one on the next of a ladder until that is worse; the third has GramMuon's.
Momentum is the one that was best for both at width 256 in as many steps (docs/beyond-the-paper.md). Then all
are trained for `--steps` steps of 4 x 256 tokens, taking turns of 25 steps, so that a slow hour of the
machine is one for all. Nothing else should run. Times are those of the training steps; validation and
checkpoints are not in them.

Called again it goes on: Ctrl-C stops it at the next step, `--minutes` after that time, and everything done is
kept. At its end it writes `small.json` and `small.png`, and with `--page` the table of that page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import LABELS, OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells, renewed
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import Run
from cachemuon_lab.train import Interrupted, train

KINDS = ("cache", "gram", "jordan")
SHARED = OptimizerConfig("gram", momentum=0.9, nesterov=True, weight_decay=0.1, adam_lr=2e-3)
LADDER, FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16), (2, 3)  # learning rates; where the search begins
TURN = 25  # steps
SETTINGS = ("data.context=256", "batch_size=4", "accumulation=1", "autocast=none", "validation_batches=16")


class Small:
    """The runs of a folder, trained in turns."""

    def __init__(self, data: Path, out: Path, steps: int, search: int, minutes: float = math.inf) -> None:
        self.data, self.out, self.steps, self.search = data, out, steps, search
        self.deadline = time.monotonic() + 60 * minutes

    def config(self, optimizer: OptimizerConfig, steps: int) -> RunConfig:
        own = (
            f"data.path={self.data}",
            f"steps={steps}",
            f"validate_every={TURN}",
            f"checkpoint_every={TURN}",
        )
        return configure(recipe("gpt2-small-owt"), optimizer, (*SETTINGS, *own))

    def searched(self, kind: str) -> dict[float, float]:
        """The losses after shorter runs, by learning rate: none on the ladder beside the best is missing."""
        losses: dict[float, float] = {}
        places: Iterable[int] = FIRST
        while wanted := [LADDER[place] for place in places if LADDER[place] not in losses]:
            names = {f"search-{kind}-{rate:g}": rate for rate in wanted}
            tried = {name: replace(SHARED, kind=kind, lr=rate) for name, rate in names.items()}
            runs = self.train({name: self.config(one, self.search) for name, one in tried.items()})
            losses |= {rate: runs[name].validations[-1]["loss"] for name, rate in names.items()}
            best = LADDER.index(best_of(losses))
            places = range(max(best - 1, 0), min(best + 2, len(LADDER)))
        return dict(sorted(losses.items()))

    def results(self) -> dict[str, Any]:
        """Train everything, each method at the learning rate that was best, and sum it up."""
        searched = {kind: self.searched(kind) for kind in ("cache", "gram")}
        names = {}
        for kind in KINDS:
            rate = best_of(searched.get(kind, searched["gram"]))
            names[f"{kind}-{rate:g}"] = self.config(replace(SHARED, kind=kind, lr=rate), self.steps)
        return {"searched": searched, "methods": [summary(run) for run in self.train(names).values()]}

    def train(self, runs: dict[str, RunConfig]) -> dict[str, Run]:
        """All of them, a turn each, until all are finished."""
        done: dict[str, Run] = {}
        while len(done) < len(runs):
            for name, config in runs.items():
                if name in done:
                    continue
                turn = Turn(name, self.deadline)
                try:
                    done[name] = train(config, self.out / name, resume=True, stop=turn)
                except Interrupted:
                    if not turn.over or turn.late:
                        raise
        return done


def best_of(losses: dict[float, float]) -> float:
    """The learning rate with the lowest loss."""
    return min(losses, key=lambda rate: losses[rate])


class Turn:
    """Asked after each step, it says when the next one's turn has come; and shows where this one is."""

    def __init__(self, name: str, deadline: float) -> None:
        self.name, self.deadline, self.began, self.step = name, deadline, time.monotonic(), 0

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def over(self) -> bool:
        return self.step == TURN

    def __call__(self) -> bool:
        self.step += 1
        pace = (time.monotonic() - self.began) / self.step
        end = "\n" if self.over else ""
        print(f"\r{self.name}: {self.step} of {TURN} steps, {pace:.1f} s each", end=end, flush=True)
        return self.over or self.late


def summary(run: Run) -> dict[str, Any]:
    """What the picture and the table need of a run: its validations, and the seconds until each."""
    seconds = np.cumsum([line["step_seconds"] for line in run.steps])
    optimizer = run.config.optimizer
    return {
        "kind": optimizer.kind,
        "lr": optimizer.lr,
        "steps": [line["step"] for line in run.validations],
        "losses": [round(line["loss"], 4) for line in run.validations],
        "seconds": [round(float(seconds[line["step"] - 1]), 3) for line in run.validations],
        "step_seconds": round(median(line["step_seconds"] for line in run.steps), 3),
        "optimizer_seconds": round(median(line["optimizer_seconds"] for line in run.steps), 3),
        "hits": round(run.hit_rate or 0.0, 3),
        "flops": run.steps[-1]["flops"],
    }


def seconds_to(row: dict[str, Any], loss: float) -> float | None:
    """When a run first had this validation loss, interpolated between two validations; None if never."""
    for place, reached in enumerate(row["losses"]):
        if reached <= loss:
            if place == 0:
                return float(row["seconds"][0])
            before = row["losses"][place - 1]
            share = (before - loss) / (before - reached)
            first, second = row["seconds"][place - 1 : place + 1]
            return float(first + share * (second - first))
    return None


def table(results: dict[str, Any]) -> Cells:
    """A row for each method. *To the same loss*: the time until GramMuon's last loss, of GramMuon's own."""
    rows = {row["kind"]: row for row in results["methods"]}
    gram = rows["gram"]
    cells = [["", "lr", "loss", "a step", "its optimizer", "hits", "FLOPs", "to the same loss"]]
    for kind in KINDS:
        row = rows[kind]
        when = seconds_to(row, gram["losses"][-1])
        cells.append(
            [
                LABELS[kind],
                f"{row['lr']:g}",
                f"{row['losses'][-1]:.3f}",
                f"{row['step_seconds']:.2f} s",
                f"{row['optimizer_seconds']:.2f} s",
                f"{row['hits']:.0%}" if kind == "cache" else "",
                f"{row['flops'] / gram['flops']:.0%}",
                "not reached" if when is None else f"{when / gram['seconds'][-1]:.2f}",
            ]
        )
    return cells


def draw(results: dict[str, Any], path: Path) -> None:
    """Validation loss against wall-clock time."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        ax = figure.subplots()
        for row in results["methods"]:
            optimizer = OptimizerConfig(row["kind"])
            minutes = np.array(row["seconds"]) / 60
            ax.plot(minutes, row["losses"], color=drawing.colour(optimizer), label=LABELS[row["kind"]])
        ax.set(xlabel="minutes of training, two cores", ylabel="validation loss", xlim=(0, None))
        ax.legend()
        drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="GPT-2's tokens")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/small"))
    parser.add_argument("--steps", type=int, metavar="N", default=250)
    parser.add_argument("--search", type=int, metavar="N", default=40, help="steps of the shorter runs")
    parser.add_argument(
        "--minutes", type=float, metavar="N", default=math.inf, help="stop after so long; call again to go on"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="renew this page's table")
    args = parser.parse_args()
    try:
        results = Small(args.data, args.out, args.steps, args.search, args.minutes).results()
    except Interrupted as stopped:
        print(f"\n{stopped}")
        return
    (args.out / "small.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "small.png")
    for row in table(results):
        print("  ".join(f"{cell:>14}" for cell in row))
    if args.page is not None:
        args.page.write_text(renewed(args.page.read_text(), {"small": ("GPT-2 Small", table(results))}))


if __name__ == "__main__":
    main()
