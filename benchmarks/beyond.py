"""CacheMuon beside the paper's and the baselines, on text and on images: docs/beyond-the-paper.md.

    python benchmarks/beyond.py --text DIR --images DIR [--out runs/beyond] [--workers 2]

The text is `train.bin` and `val.bin` with bytes as uint16 (`cachemuon prepare text --tokenizer bytes`); with
`--vocabulary DIR`, GPT-2's `encoder.json` and `vocab.bpe`, it is in GPT-2's tokens, and made bytes in the
folder of the study. The images are CIFAR-10's binary files. Every method is tuned over the same learning
rates with the first seed, and trained at its best with all; then one setting of CacheMuon is changed at a
time. A run has one thread. Called again, the study goes on: finished runs are read. At its end it writes
`beyond.json` and `beyond.png`, and with `--page` the tables of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cachemuon import GramNS
from cachemuon.flops import GPT2_SMALL, executed_by
from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig, RunConfig
from cachemuon_lab.data.prepare import SPLITS
from cachemuon_lab.data.tokens import FILE_DTYPE, TOKENIZERS
from cachemuon_lab.performance import Cells, renewed
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import Run
from cachemuon_lab.train import train

RECIPES = {"text": "gpt2-mini", "images": "resnet-mini"}
SEEDS = (0, 1, 2)
RATES = {"muon": (0.01, 0.02, 0.04), "adamw": (1e-3, 2e-3, 4e-3)}
BASE = OptimizerConfig("gram", momentum=0.95, adam_lr=2e-3)
METHODS = (
    replace(BASE, kind="polar"),
    BASE,
    replace(BASE, kind="jordan"),
    replace(BASE, kind="stale"),
    replace(BASE, kind="adamw"),
    *(replace(BASE, kind="paper", gamma=gamma) for gamma in (2.0, 5.0, 15.0)),
    replace(BASE, kind="cache"),
)
ABLATIONS: dict[str, tuple[str, ...]] = {
    "clip": ("0", "0.03125", "0.0625", "0.125"),
    "max_age": ("1", "3", "6", "9", "16", "none"),
    "gamma": ("1", "2.5", "5", "1000"),
}
SHARED: dict[str, tuple[str, ...]] = {"optimizer.momentum": ("0.9", "0.98"), "batch_size": ("4", "16")}
"""What is changed for GramMuon too, on text."""


class Job(NamedTuple):
    """One run of the study: the settings are overrides, beyond the task's own."""

    task: str
    optimizer: OptimizerConfig
    seed: int
    settings: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its folder."""
        rate = self.optimizer.adam_lr if self.optimizer.kind == "adamw" else self.optimizer.lr
        told = [setting.rpartition(".")[2].replace("=", "") for setting in self.settings]
        return "-".join([self.task, self.optimizer.slug, f"lr{rate:g}", *told, f"s{self.seed}"])


def at_rate(optimizer: OptimizerConfig, rate: float) -> OptimizerConfig:
    return replace(optimizer, **{"adam_lr" if optimizer.kind == "adamw" else "lr": rate})


def rates(optimizer: OptimizerConfig) -> tuple[float, ...]:
    return RATES["adamw" if optimizer.kind == "adamw" else "muon"]


class Study:
    """The runs of a folder, and what they came to."""

    def __init__(self, out: Path, data: dict[str, Path], workers: int) -> None:
        self.out, self.data, self.workers = out, data, workers

    def config(self, job: Job) -> RunConfig:
        optimizer = replace(job.optimizer, head="muon" if job.task == "images" else "adam")
        settings = (f"data.path={self.data[job.task]}", f"seed={job.seed}", "checkpoint_every=1000000")
        return configure(recipe(RECIPES[job.task]), optimizer, (*settings, *job.settings))

    def run(self, jobs: Iterable[Job]) -> dict[Job, Run]:
        """Train what is not finished yet, each run in a process with one thread."""
        jobs = list(dict.fromkeys(jobs))
        runs: dict[Job, Run] = {}
        with ProcessPoolExecutor(self.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            folders = [self.out / job.slug for job in jobs]
            done = pool.map(_train, [self.config(job) for job in jobs], folders)
            for number, (job, run) in enumerate(zip(jobs, done, strict=True), start=1):
                runs[job] = run
                print(f"{number} of {len(jobs)}: {job.slug} {run.validations[-1]['loss']:.4f}", flush=True)
        return runs

    def results(self) -> dict[str, Any]:
        """Train everything, and sum it up: for each task its methods and ablations."""
        found: dict[str, Any] = {}
        grid = self.run(
            Job(task, at_rate(method, rate), SEEDS[0])
            for task in self.data
            for method in METHODS
            for rate in rates(method)
        )
        best = {
            (task, method): min(
                (at_rate(method, rate) for rate in rates(method)),
                key=lambda tuned, task=task: _loss(grid[Job(task, tuned, SEEDS[0])]),
            )
            for task in self.data
            for method in METHODS
        }
        tuned = self.run(Job(task, method, seed) for (task, _), method in best.items() for seed in SEEDS)
        changed = self.run(job for task in self.data for job in ablations(task, best))
        for task in self.data:
            methods = []
            for method in METHODS:
                runs = [tuned[Job(task, best[task, method], seed)] for seed in SEEDS]
                searched = {
                    f"{rate:g}": _loss(grid[Job(task, at_rate(method, rate), SEEDS[0])])
                    for rate in rates(method)
                }
                methods.append(summary(runs) | {"rates": searched})
            rows = [
                {"settings": list(job.settings), "label": job.optimizer.label, **summary([run])}
                for job, run in changed.items()
                if job.task == task
            ]
            found[task] = {"methods": methods, "ablations": rows}
        return found


def ablations(task: str, best: dict[tuple[str, OptimizerConfig], OptimizerConfig]) -> Iterator[Job]:
    ours, gram = best[task, METHODS[-1]], best[task, BASE]
    for name, values in ABLATIONS.items():
        for value in values:
            yield Job(task, ours, SEEDS[0], (f"optimizer.{name}={value}",))
    for name, values in SHARED.items() if task == "text" else ():
        for value in values:
            yield from (Job(task, method, SEEDS[0], (f"{name}={value}",)) for method in (gram, ours))


def _train(config: RunConfig, folder: Path) -> Run:
    return train(config, folder, resume=True)


def _loss(run: Run) -> float:
    return float(run.validations[-1]["loss"])


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What a row of a table needs, from the runs of its seeds."""
    optimizer = runs[0].config.optimizer
    outcomes: dict[str, int] = {}
    for line in (line for run in runs for line in run.steps):
        outcomes["hit"] = outcomes.get("hit", 0) + line["hits"]
        for reason, number in line["misses"].items():
            outcomes[reason] = outcomes.get(reason, 0) + number
    seconds = [sum(line["orthogonalization_seconds"] for line in run.steps) for run in runs]
    return {
        "kind": optimizer.kind,
        "label": optimizer.label,
        "gamma": optimizer.gamma,
        "lr": optimizer.adam_lr if optimizer.kind == "adamw" else optimizer.lr,
        "losses": [round(_loss(run), 4) for run in runs],
        "accuracies": [run.validations[-1]["accuracy"] for run in runs],
        "outcomes": {name: number for name, number in outcomes.items() if number},
        "flops": round(mean(run.steps[-1]["flops"] for run in runs)),
        "seconds": round(mean(seconds), 2),
    }


def share_at_gpt2_small(row: dict[str, Any]) -> float:
    """Executed FLOPs beside GramMuon's, if the matrices of GPT-2 Small had these outcomes, clipped alike."""
    spent = fresh = 0.0
    calls = sum(row["outcomes"].values())
    for n, m in GPT2_SMALL:
        small, large = min(n, m), max(n, m)
        rank = round(OptimizerConfig.clip * small) if row["kind"] == "cache" else 0
        probe = "exact" if row["kind"] == "paper" else "sketch"
        cost = executed_by(GramNS(), small, large, probe=probe, rank=rank)
        fresh += cost.gram
        spent += sum(cost.price_of(name) * number / calls for name, number in row["outcomes"].items())
    return spent / fresh


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    made: dict[str, tuple[str, Cells]] = {}
    for task, found in results.items():
        gram = next(row for row in found["methods"] if row["kind"] == "gram")
        made[f"{task}_methods"] = task, _methods(found["methods"], gram)
        made[f"{task}_rates"] = task, _rates(found["methods"])
        for name in (*ABLATIONS, *SHARED):
            rows = [row for row in found["ablations"] if name in row["settings"][0]]
            if rows:
                made[f"{task}_{name.rpartition('.')[2]}"] = name, _changed(rows, gram)
    return made


def _methods(rows: list[dict[str, Any]], gram: dict[str, Any]) -> Cells:
    accuracy = gram["accuracies"][0] is not None
    heads = ["", "lr", "loss, mean", "of each seed", "to GramMuon", *["accuracy"] * accuracy, "hits"]
    cells = [[*heads, "FLOPs", "at width 768", "seconds"]]
    for row in rows:
        muon = row["kind"] != "adamw"
        losses = row["losses"]
        worst = max(one - other for one, other in zip(losses, gram["losses"], strict=True))
        cells.append(
            [
                row["label"],
                f"{row['lr']:g}",
                f"{mean(losses):.4f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(losses) - mean(gram['losses']):+.4f} (worst {worst:+.4f})",
                *[f"{mean(row['accuracies']):.1%}"] * accuracy,
                _hits(row),
                f"{row['flops'] / gram['flops']:.0%}" if muon else "",
                f"{share_at_gpt2_small(row):.0%}" if row["kind"] in ("gram", "paper", "cache") else "",
                f"{row['seconds'] / gram['seconds']:.0%}" if muon else "",
            ]
        )
    return cells


def _rates(rows: list[dict[str, Any]]) -> Cells:
    cells = [["", *(f"{rate:g}" for rate in RATES["muon"])]]
    return cells + [
        [row["label"], *(f"{loss:.4f}" for loss in row["rates"].values())]
        for row in rows
        if row["kind"] != "adamw"
    ]


def _changed(rows: list[dict[str, Any]], gram: dict[str, Any]) -> Cells:
    cells = [["", "optimizer", "loss", "hits", "FLOPs"]]
    for row in rows:
        fresh = [r["flops"] for r in rows if r["kind"] == "gram" and r["settings"] == row["settings"]]
        share = row["flops"] / (fresh or [gram["flops"]])[0]
        told = row["settings"][0].rpartition(".")[2]
        name = "GramMuon" if row["kind"] == "gram" else "CacheMuon"
        cells.append([told, name, f"{row['losses'][0]:.4f}", _hits(row), f"{share:.0%}"])
    return cells


def _hits(row: dict[str, Any]) -> str:
    calls = sum(row["outcomes"].values())
    return (
        f"{row['outcomes'].get('hit', 0) / calls:.0%}" if row["kind"] in ("paper", "cache", "stale") else ""
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss against FLOPs and against seconds, both relative to GramMuon's, a row for each task."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(7.2, 2.9 * len(results)), layout="constrained")
        grid = figure.subplots(len(results), 2, squeeze=False, sharey="row")
        for axes, (task, found) in zip(grid, results.items(), strict=True):
            rows = [row for row in found["methods"] if row["kind"] != "adamw"]
            gram = next(row for row in rows if row["kind"] == "gram")
            for ax, (key, title) in zip(
                axes, {"flops": "executed FLOPs", "seconds": "seconds"}.items(), strict=True
            ):
                for row in rows:
                    middle, losses = mean(row["losses"]), row["losses"]
                    ax.errorbar(
                        row[key] / gram[key],
                        middle,
                        yerr=[[middle - min(losses)], [max(losses) - middle]],
                        color=drawing.colour(OptimizerConfig(row["kind"], gamma=row["gamma"])),
                        marker=drawing.MARKERS[row["kind"]],
                        capsize=2,
                        ls="",
                        label=row["label"],
                    )
                paper = sorted(
                    (row[key] / gram[key], mean(row["losses"])) for row in rows if row["kind"] == "paper"
                )
                ax.plot(*zip(*paper, strict=True), color="#bbbbbb", lw=1, zorder=1)
                ax.set(xlabel=f"{title} of orthogonalization, relative to GramMuon", xlim=(0, None))
                ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes[0].set_ylabel(f"{task}: validation loss")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        drawing.save(figure, path)


def as_bytes(tokens: Path, vocabulary: Path, out: Path) -> Path:
    """The text of GPT-2's tokens as a folder of bytes, with a zero after each document."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(str(vocabulary / "vocab.bpe"), str(vocabulary / "encoder.json"))
    words = {number: word for word, number in ranks.items()} | {TOKENIZERS["gpt2"][1]: b"\0"}
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        ids = np.fromfile(tokens / f"{split}.bin", dtype=FILE_DTYPE)
        text = b"".join(words[number] for number in ids.tolist())
        np.frombuffer(text, np.uint8).astype(FILE_DTYPE).tofile(out / f"{split}.bin")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", help="train.bin and val.bin of bytes")
    parser.add_argument("--vocabulary", type=Path, metavar="DIR", help="the text is in these GPT-2 tokens")
    parser.add_argument("--images", type=Path, metavar="DIR", help="CIFAR-10's binary files")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/beyond"))
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="runs at a time")
    parser.add_argument("--page", type=Path, metavar="FILE", help="renew this page's tables")
    args = parser.parse_args()
    data = {task: path for task, path in (("text", args.text), ("images", args.images)) if path is not None}
    if not data:
        parser.error("name --text, --images, or both")
    if args.vocabulary is not None and "text" in data:
        data["text"] = as_bytes(data["text"], args.vocabulary, args.out / "bytes")
    results = Study(args.out, data, args.workers).results()
    (args.out / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "beyond.png")
    if args.page is not None:
        args.page.write_text(renewed(args.page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
