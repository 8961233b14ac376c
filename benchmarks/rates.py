"""Does a learning rate carry over? Loss against learning rate at torch.optim.Muon's defaults, nothing tuned.

    python benchmarks/rates.py --text DIR --images DIR [--seeds 0 1 2] [--out runs/rates] [--workers 2]

Text: gpt2-mini with Muon's own defaults (momentum 0.95, Nesterov, weight decay 0.1, ratio "original").
Images: resnet-mini with what a fresh Muon is best with there (momentum 0.8, Nesterov, weight decay 1e-4,
ratio 1). Five rates, a factor of 16. Called again, it goes on. It writes `rates.json` and `rates.png`, and
with `--page` the tables of that page. The folders are those of `benchmarks/study.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from ledger import Finished
from matplotlib import rc_context
from matplotlib.figure import Figure
from study import as_bytes
from trainings import METHODS, Stopped, Trainings, add_arguments, line_of, method_of, tell, trainings_of

from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe


@dataclass(frozen=True)
class Task:
    """A recipe, the settings of all its optimizers, and the learning rates."""

    recipe: str
    shared: OptimizerConfig
    rates: tuple[float, ...]
    settings: tuple[str, ...] = ()


TASKS = {
    "text": Task(
        "gpt2-mini",
        OptimizerConfig(
            "gram", momentum=0.95, nesterov=True, weight_decay=0.1, adjust_lr_fn="original", adam_lr=2e-3
        ),
        (0.005, 0.01, 0.02, 0.04, 0.08),
        ("validate_every=300", "validation_batches=160"),
    ),
    "images": Task(
        "resnet-mini",
        OptimizerConfig("gram", momentum=0.8, nesterov=True, adam_lr=2e-3, head="muon"),
        (0.015, 0.03, 0.06, 0.12, 0.24),
    ),
}


def optimizer(task: str, method: str, lr: float) -> OptimizerConfig:
    """A method with the settings of a task."""
    return method_of(method, lr, TASKS[task].shared)


def config(task: str, method: str, lr: float, seed: int, data: Path) -> RunConfig:
    """One training, judged by the half of the validation data that no setting was chosen by."""
    settings = [*TASKS[task].settings, f"data.path={data}", "data.part=report", f"seed={seed}"]
    settings.append("checkpoint_every=1000000")
    return configure(recipe(TASKS[task].recipe), optimizer(task, method, lr), settings)


def losses(
    trainings: Trainings, data: Mapping[str, Path], methods: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each task, method and rate, with the loss of each seed and the share of GramMuon's FLOPs."""
    cases = [
        (seed, task, method, lr)
        for seed in seeds
        for task in data
        for method in methods
        for lr in TASKS[task].rates
    ]
    names = {case: f"rates-{case[1]}-{case[2]}-{case[3]:g}-s{case[0]}" for case in cases}
    done = trainings.run(
        {name: config(task, method, lr, seed, data[task]) for (seed, task, method, lr), name in names.items()}
    )
    rows = []
    for task in data:
        flops = {
            method: done[names[seeds[0], task, method, TASKS[task].rates[0]]].flops for method in methods
        }
        for method in methods:
            for lr in TASKS[task].rates:
                runs = [done[names[seed, task, method, lr]] for seed in seeds]
                rows.append(row_of(task, method, lr, runs, (flops[method] or 0) / (flops["gram"] or 1)))
    return rows


def row_of(task: str, method: str, lr: float, runs: Sequence[Finished], share: float) -> dict[str, Any]:
    """What is kept of a case; a loss that is not a number is infinite."""
    found = [round(run.loss, 4) if math.isfinite(run.loss) else math.inf for run in runs]
    return {"task": task, "method": method, "lr": lr, "losses": found, "flops": share}


def table(rows: Sequence[dict[str, Any]]) -> Cells:
    """A line for each method, a column for each rate: mean losses."""
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    cells: Cells = [["", *(f"{rate:g}" for rate in rates), "FLOPs"]]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        cells.append(
            [METHODS[method][0], *(f"{mean(row['losses']):.4f}" for row in own), f"{own[0]['flops']:.0%}"]
        )
    return cells


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[str, Cells]]:
    """A table for each task, by its place in the page."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    return {
        f"rates_{task}": (
            f"{task}: loss by learning rate",
            table([one for one in rows if one["task"] == task]),
        )
        for task in tasks
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each task, a line for each method, a dot for each seed."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
        for ax, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for method in dict.fromkeys(row["method"] for row in rows):
                own = [row for row in rows if (row["task"], row["method"]) == (task, method)]
                style = line_of(method) | {"marker": drawing.MARKERS[optimizer(task, method, 1.0).kind]}
                rates, losses = [row["lr"] for row in own], [mean(row["losses"]) for row in own]
                ax.plot(rates, losses, label=METHODS[method][0], **style)
                dots = [(row["lr"], loss) for row in own for loss in row["losses"]]
                ax.scatter(*zip(*dots, strict=True), color=style["color"], s=4, alpha=0.5)
            lowest = min(loss for row in rows if row["task"] == task for loss in row["losses"])
            highest = max(min(row["losses"]) for row in rows if row["task"] == task)
            ax.set(xscale="log", xlabel="learning rate", ylabel=f"{task}: loss", xticks=TASKS[task].rates)
            ax.set_xticklabels([f"{rate:g}" for rate in TASKS[task].rates])
            ax.minorticks_off()
            ax.set_ylim(lowest - 0.02, min(highest + 0.02, lowest + 0.6))
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", help="train.bin and val.bin of bytes")
    parser.add_argument("--vocabulary", type=Path, metavar="DIR", help="the text is in these GPT-2 tokens")
    parser.add_argument("--images", type=Path, metavar="DIR", help="CIFAR-10's binary files")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], metavar="N")
    add_arguments(parser, "runs/rates")
    args = parser.parse_args()
    text = args.text
    if text is not None and args.vocabulary is not None:
        text = as_bytes(text, args.vocabulary, args.out / "bytes")
    data = {task: folder for task, folder in {"text": text, "images": args.images}.items() if folder}
    if not data or "gram" not in args.methods:
        parser.error("name --text, --images, or both; and GramMuon, the unit of FLOPs, among the methods")
    try:
        rows = losses(trainings_of(args), data, args.methods, args.seeds)
    except Stopped as stopped:
        print(stopped)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rates.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args.out / "rates.png")
    tell(tables(rows), args.page)


if __name__ == "__main__":
    main()
