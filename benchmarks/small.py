"""GPT-2 Small itself, 124 million parameters, trained whole: loss against wall-clock time.

    python benchmarks/small.py --data DIR [--out runs/small] [--steps 250] [--search 100] [--workers 2]

`DIR` has `train.bin` and `val.bin` in GPT-2's tokens. First the learning rates of GramMuon, Muon (Jordan),
which is torch.optim.Muon's arithmetic in float32, and CacheMuon with `normalize=None` are chosen by the
loss after a shorter run of four of the twelve blocks: two rates, and from the better one on the next of a
ladder until that is worse. NorMuon and CacheMuon, which normalize, have GramMuon's, without a search.
Momentum is the one that was best at width 256 in as many steps (docs/notebook/search.md). Then all are
trained for `--steps` steps of 4 x 256 tokens. A run has one thread, and `--workers` of them go at a time;
another number of threads rounds otherwise, which moves a loss by some thousandths. Times are measured
apart, at the end, when nothing else should run: whole training steps of all of them on all threads, in
turns. `--times` measures these alone.

Called again it goes on: Ctrl-C stops it at the next step, `--minutes` after that time, and everything done is
kept. At its end it writes `small.json` and `small.png`, and with `--page` the table of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from ledger import Finished
from matplotlib import rc_context
from matplotlib.figure import Figure
from study import hits
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
from cachemuon_lab.timing import train_in_turns

SEARCHED = ("gram", "jordan", "cache-none")
UNTUNED = ("normuon", "cache")  # trained at GramMuon's rate
SHARED = OptimizerConfig("gram", momentum=0.9, nesterov=True, weight_decay=0.1, adam_lr=2e-3)
LADDER = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
FIRST = {"gram": (3, 4), "jordan": (3, 4), "cache-none": (4, 5)}  # where on it the searches begin
SETTINGS = ("data.context=256", "batch_size=4", "accumulation=1", "autocast=none", "validation_batches=16")
SHORTER = ("model.layers=4",)  # in the search
OFTEN, TIMED = 25, 11  # steps between validations; steps that are timed: one life of a transform


class Small:
    """The runs of a folder."""

    def __init__(
        self,
        data: Path,
        trainings: Trainings,
        steps: int,
        search: int,
        *,
        names: Sequence[str] = (*SEARCHED, *UNTUNED),
    ) -> None:
        self.data, self.trainings, self.steps, self.search = data, trainings, steps, search
        self.names = [name for name in (*SEARCHED, *UNTUNED) if name in {"gram", *names}]

    def config(self, optimizer: OptimizerConfig, steps: int, settings: Sequence[str] = ()) -> RunConfig:
        own = (
            f"data.path={self.data}",
            f"steps={steps}",
            f"validate_every={OFTEN}",
            f"checkpoint_every={OFTEN}",
        )
        return configure(recipe("gpt2-small-owt"), optimizer, (*SETTINGS, *own, *settings))

    def searched(self) -> dict[str, dict[float, float]]:
        """For each method that is searched the losses after shorter runs, by learning rate."""

        def losses(wanted: list[tuple[str, float]]) -> list[float]:
            runs = {
                f"search-{name}-{rate:g}": self.config(method_of(name, rate, SHARED), self.search, SHORTER)
                for name, rate in wanted
            }
            return [run.loss for run in self.trainings.run(runs).values()]

        return climb(LADDER, {name: FIRST[name] for name in self.names if name in SEARCHED}, losses)

    def results(self) -> dict[str, Any]:
        """Train everything, each method at its learning rate, time it, and sum it up."""
        searched = self.searched()
        rates = {name: best_of(searched.get(name, searched["gram"])) for name in self.names}
        methods = {name: method_of(name, rate, SHARED) for name, rate in rates.items()}
        runs = self.trainings.run(
            {f"{name}-{one.lr:g}": self.config(one, self.steps) for name, one in methods.items()}
        ).values()
        took = self.times(methods)
        rows = [
            summary(name, one, run, took[name])
            for (name, one), run in zip(methods.items(), runs, strict=True)
        ]
        return {"searched": searched, "methods": rows, "times": took}

    def times(self, methods: Mapping[str, OptimizerConfig]) -> dict[str, dict[str, float]]:
        """Mean seconds of a whole training step of each method, and of these its optimizer's."""
        configs = [self.config(one, self.steps) for one in methods.values()]
        keys = ("step_seconds", "optimizer_seconds")
        return {
            name: {key: round(fmean(one[key] for one in took), 3) for key in keys}
            for name, took in zip(methods, train_in_turns(configs, TIMED), strict=True)
        }


def summary(name: str, optimizer: OptimizerConfig, run: Finished, took: dict[str, float]) -> dict[str, Any]:
    """What the picture and the table need of a run: its validations, and the seconds until each."""
    steps = [line["step"] for line in run.validations]
    return {
        "name": name,
        "kind": optimizer.kind,
        "lr": optimizer.lr,
        "steps": steps,
        "losses": [round(line["loss"], 4) for line in run.validations],
        "seconds": [round(step * took["step_seconds"], 3) for step in steps],
        **took,
        "outcomes": run.outcomes,
        "flops": run.flops,
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
    rows = {row["name"]: row for row in results["methods"]}
    gram = rows["gram"]
    cells = [["", "lr", "loss", "a step", "its optimizer", "hits", "FLOPs", "to the same loss"]]
    for name, row in rows.items():
        when = seconds_to(row, gram["losses"][-1])
        cells.append(
            [
                METHODS[name][0],
                f"{row['lr']:g}",
                f"{row['losses'][-1]:.3f}",
                f"{row['step_seconds']:.2f} s",
                f"{row['optimizer_seconds']:.2f} s",
                hits(row),
                f"{row['flops'] / gram['flops']:.0%}",
                "not reached" if when is None else f"{when / gram['seconds'][-1]:.2f}",
            ]
        )
    return cells


def table_of_times(took: dict[str, dict[str, float]]) -> Cells:
    """A row for each method: a whole training step, and of it the optimizer's."""
    cells = [["", "a step", "its optimizer", "of GramMuon's step"]]
    for name, one in took.items():
        step, own = one["step_seconds"], one["optimizer_seconds"]
        share = step / took["gram"]["step_seconds"]
        cells.append([METHODS[name][0], f"{step:.2f} s", f"{own:.2f} s", f"{share:.2f}"])
    return cells


def draw(results: dict[str, Any], path: Path) -> None:
    """Validation loss against wall-clock time."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        ax = figure.subplots()
        for row in results["methods"]:
            minutes = np.array(row["seconds"]) / 60
            ax.plot(minutes, row["losses"], label=METHODS[row["name"]][0], **line_of(row["name"]))
        ax.set(xlabel="minutes of training, two cores", ylabel="validation loss", xlim=(0, None))
        ax.legend()
        drawing.save(figure, path)


def main() -> None:
    parser, names = argparse.ArgumentParser(description=__doc__.splitlines()[0]), (*SEARCHED, *UNTUNED)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="GPT-2's tokens")
    parser.add_argument("--steps", type=int, metavar="N", default=250)
    parser.add_argument("--search", type=int, metavar="N", default=100, help="steps of the shorter runs")
    parser.add_argument("--methods", nargs="*", choices=names, default=names, help="beside gram")
    add_arguments(parser, "runs/small")
    parser.add_argument("--times", action="store_true", help="measure the times of steps, and nothing else")
    args = parser.parse_args()
    small = Small(args.data, trainings_of(args), args.steps, args.search, names=args.methods)
    if args.times:
        made = {
            "times": (
                "Times",
                table_of_times(
                    small.times({name: method_of(name, SHARED.lr, SHARED) for name in small.names})
                ),
            )
        }
    else:
        try:
            results = small.results()
        except Stopped as stopped:
            print(stopped)
            return
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "small.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(results, args.out / "small.png")
        made = {
            "small": ("GPT-2 Small", table(results)),
            "small_search": ("GPT-2 Small: search", searched_table(results["searched"])),
            "times": ("Times", table_of_times(results["times"])),
        }
    tell(made, args.page)


if __name__ == "__main__":
    main()
