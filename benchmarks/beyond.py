"""CacheMuon beside the paper's and the baselines, on text and on images: docs/beyond-the-paper.md.

    python benchmarks/beyond.py --text DIR --images DIR [--out runs/beyond] [--workers 2]

The text is `train.bin` and `val.bin` with bytes as uint16 (`cachemuon prepare text --tokenizer bytes`); with
`--vocabulary DIR`, GPT-2's `encoder.json` and `vocab.bpe`, it is in GPT-2's tokens, and made bytes in the
folder of the study. The images are CIFAR-10's binary files. Every method is tuned over the same learning
rates with the first seed, and trained at its best with all; the paper's other gammas have the rate of gamma
5. Then one setting of CacheMuon is changed at a time. A run has one thread; times are measured apart, at the
end, when nothing else should run. Called again, the study goes on: finished runs are read. At its end it
writes `beyond.json` and `beyond.png`, and with `--page` the tables of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, mean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cachemuon import CacheGNS, GramNS
from cachemuon.flops import GPT2_SMALL, executed_by
from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import CACHING, OptimizerConfig, RunConfig
from cachemuon_lab.data.prepare import SPLITS
from cachemuon_lab.data.tokens import FILE_DTYPE, TOKENIZERS, gpt2_encoding
from cachemuon_lab.models import build
from cachemuon_lab.optimizers import Meter, make_optimizer
from cachemuon_lab.performance import Cells, renewed
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import Run
from cachemuon_lab.timing import turns
from cachemuon_lab.train import open_data, train

RECIPES = {"text": "gpt2-mini", "images": "resnet-mini"}
SEEDS = (0, 1, 2)
TIMED, CPU = 42, torch.device("cpu")  # steps: six lives of a transform
RATES = {"lr": (0.01, 0.02, 0.04), "adam_lr": (1e-3, 2e-3, 4e-3)}
BASE = OptimizerConfig("gram", momentum=0.95, adam_lr=2e-3)
METHODS = (
    replace(BASE, kind="polar"),
    BASE,
    replace(BASE, nesterov=True),
    replace(BASE, kind="jordan"),
    replace(BASE, kind="stale"),
    replace(BASE, kind="adamw"),
    replace(BASE, kind="paper", gamma=5.0),
    replace(BASE, kind="cache"),
)
PAPER, OURS = METHODS[-2:]
GAMMAS = {"text": (2.0, 15.0), "images": ()}
ABLATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "text": {
        "optimizer.clip": ("0", "0.03125", "0.125"),
        "optimizer.max_age": ("1", "3", "12", "none"),
        "optimizer.gamma": ("5",),
        "optimizer.gate": ("lagged",),
        "optimizer.momentum": ("0.9", "0.98"),
        "batch_size": ("4", "16"),
    },
    "images": {"optimizer.clip": ("0", "0.125"), "optimizer.max_age": ("1", "12")},
}
SHARED = ("optimizer.momentum", "batch_size")
"""What is changed for GramMuon too."""


class Job(NamedTuple):
    """One run of the study: the settings are overrides, beyond the task's own."""

    task: str
    optimizer: OptimizerConfig
    seed: int
    settings: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its folder."""
        rate = getattr(self.optimizer, rate_of(self.optimizer))
        told = [setting.removeprefix("optimizer.").replace("=", "") for setting in self.settings]
        return "-".join([self.task, self.optimizer.slug, f"lr{rate:g}", *told, f"s{self.seed}"])


def rate_of(optimizer: OptimizerConfig) -> str:
    """The name of the learning rate that a method is tuned by."""
    return "adam_lr" if optimizer.kind == "adamw" else "lr"


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
            done = pool.map(partial(train, resume=True), [self.config(job) for job in jobs], folders)
            for number, (job, run) in enumerate(zip(jobs, done, strict=True), start=1):
                runs[job] = run
                print(f"{number} of {len(jobs)}: {job.slug} {run.validations[-1]['loss']:.4f}", flush=True)
        return runs

    def results(self) -> dict[str, Any]:
        """Train everything, and sum it up: for each task its methods and ablations."""
        grid = self.run(job for task in self.data for method in METHODS for job in search(task, method))
        tuned = {
            (task, method): min(search(task, method), key=lambda job: _loss(grid[job])).optimizer
            for task in self.data
            for method in METHODS
        }
        rows = {task: [tuned[task, method] for method in METHODS] for task in self.data}
        for task in self.data:
            rows[task] += [replace(tuned[task, PAPER], gamma=gamma) for gamma in GAMMAS[task]]
        seeds = self.run(Job(task, one, seed) for task in self.data for one in rows[task] for seed in SEEDS)
        changes = {task: list(ablations(task, tuned[task, OURS], tuned[task, BASE])) for task in self.data}
        changed = self.run(job for task in self.data for job in changes[task])
        return {
            task: {
                "methods": [
                    summary([seeds[Job(task, one, seed)] for seed in SEEDS]) | {"milliseconds": took}
                    for one, took in zip(rows[task], self.milliseconds(task, rows[task]), strict=True)
                ],
                "rates": {
                    method.label: [round(_loss(grid[job]), 4) for job in search(task, method)]
                    for method in METHODS
                },
                "ablations": [
                    {"settings": job.settings[0]} | summary([changed[job]]) for job in changes[task]
                ],
            }
            for task in self.data
        }

    def milliseconds(self, task: str, methods: Sequence[OptimizerConfig]) -> list[float]:
        """The mean matrix part of a step of each method, on all threads; they take turns step by step."""
        runs = []
        for method in methods:
            config = self.config(Job(task, method, SEEDS[0]))
            torch.manual_seed(config.seed)
            model = build(config.model)
            runs.append((open_data(config), model, Meter(make_optimizer(config.optimizer, model), CPU)))
        took: list[list[float]] = [[] for _ in methods]
        for step in range(TIMED + 1):
            for number in turns(range(len(methods)), step):
                data, model, meter = runs[number]
                model(*data.train(step)).backward()
                meter.step()
                meter.optimizer.zero_grad()
                if step:  # the first is a cold one
                    took[number].append(1e3 * meter.seconds["orthogonalization_seconds"])
        return [round(fmean(times), 2) for times in took]


def search(task: str, method: OptimizerConfig) -> list[Job]:
    """A method at each of the learning rates, with the first seed."""
    name = rate_of(method)
    return [Job(task, replace(method, **{name: value}), SEEDS[0]) for value in RATES[name]]


def ablations(task: str, ours: OptimizerConfig, gram: OptimizerConfig) -> Iterator[Job]:
    """One setting of CacheMuon changed at a time; what GramMuon has too is changed for both."""
    for name, values in ABLATIONS[task].items():
        for value in values:
            for method in (gram, ours) if name in SHARED else (ours,):
                yield Job(task, method, SEEDS[0], (f"{name}={value}",))


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
    return {
        "kind": optimizer.kind,
        "label": optimizer.label,
        "gamma": optimizer.gamma,
        "lr": getattr(optimizer, rate_of(optimizer)),
        "losses": [round(_loss(run), 4) for run in runs],
        "accuracies": [run.validations[-1]["accuracy"] for run in runs],
        "outcomes": {name: number for name, number in outcomes.items() if number},
        "flops": round(mean(run.steps[-1]["flops"] for run in runs)),
    }


def share_at_gpt2_small(row: dict[str, Any]) -> float:
    """Executed FLOPs beside GramMuon's, if the matrices of GPT-2 Small had these outcomes, clipped alike."""
    spent = fresh = 0.0
    calls = sum(row["outcomes"].values())
    probe: Any = "exact" if row["kind"] == "paper" else "sketch"
    clip = CacheGNS(clip=OptimizerConfig.clip if row["kind"] == "cache" else 0.0)
    for n, m in GPT2_SMALL:
        cost = executed_by(GramNS(), n, m, probe=probe, rank=clip.rank(min(n, m)))
        fresh += cost.gram
        spent += sum(cost.price_of(name) * number / calls for name, number in row["outcomes"].items())
    return spent / fresh


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    made: dict[str, tuple[str, Cells]] = {}
    for task, found in results.items():
        gram, *_ = (row for row in found["methods"] if row["kind"] == "gram")
        ours, *_ = (row for row in found["methods"] if row["kind"] == "cache")
        made[f"{task}_methods"] = f"{task}: methods", _methods(found["methods"], gram)
        heads = ["", *(f"{rate:g}" for rate in RATES["lr"])]
        own = {"AdamW": f"AdamW ({', '.join(f'{rate:g}' for rate in RATES['adam_lr'])})"}
        searched = sorted(found["rates"].items(), key=lambda item: item[0] in own)
        rates = [[own.get(name, name), *(f"{loss:.4f}" for loss in losses)] for name, losses in searched]
        made[f"{task}_rates"] = f"{task}: learning rates", [heads, *rates]
        made[f"{task}_ablations"] = f"{task}: ablations", _ablations(found["ablations"], gram, ours)
    return made


def _methods(rows: list[dict[str, Any]], gram: dict[str, Any]) -> Cells:
    images = gram["accuracies"][0] is not None
    heads = ["", "lr", "loss", "of each seed", "to GramMuon", "worst seed", *["accuracy"] * images]
    cells = [[*heads, "hits", "FLOPs", *["FLOPs at width 768"] * (not images), "time"]]
    for row in rows:
        muon, losses = row["kind"] != "adamw", row["losses"]
        share = share_at_gpt2_small(row) if row["kind"] in ("gram", *CACHING) else None
        apart = [one - other for one, other in zip(losses, gram["losses"], strict=True)]
        cells.append(
            [
                row["label"],
                f"{row['lr']:g}",
                f"{mean(losses):.4f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(apart):+.4f}" if row is not gram else "",
                f"{max(apart):+.4f}" if row is not gram else "",
                *([f"{mean(row['accuracies']):.1%}"] if images else []),
                _hits(row),
                f"{row['flops'] / gram['flops']:.0%}" if muon else "",
                *([] if images else [f"{share:.0%}" if share is not None else ""]),
                f"{row['milliseconds'] / gram['milliseconds']:.0%}" if muon else "",
            ]
        )
    return cells


def _ablations(rows: list[dict[str, Any]], gram: dict[str, Any], ours: dict[str, Any]) -> Cells:
    """One seed; first both methods unchanged. FLOPs are relative to GramMuon's with the same setting."""
    cells = [["", "optimizer", "loss", "hits", "FLOPs"]]
    for row in ({"settings": "none"} | gram, {"settings": "none"} | ours, *rows):
        alike = [one for one in rows if one["kind"] == "gram" and one["settings"] == row["settings"]]
        share = row["flops"] / (*alike, gram)[0]["flops"]
        name = "GramMuon" if row["kind"] == "gram" else "CacheMuon"
        told = row["settings"].removeprefix("optimizer.")
        cells.append([told, name, f"{row['losses'][0]:.4f}", _hits(row), f"{share:.0%}"])
    return cells


def _hits(row: dict[str, Any]) -> str:
    if row["kind"] not in (*CACHING, "stale"):
        return ""
    return f"{row['outcomes'].get('hit', 0) / sum(row['outcomes'].values()):.0%}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss against FLOPs and against time, both relative to GramMuon's, a row for each task."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(7.2, 2.9 * len(results)), layout="constrained")
        grid = figure.subplots(len(results), 2, squeeze=False, sharey="row")
        for axes, (task, found) in zip(grid, results.items(), strict=True):
            rows = [row for row in found["methods"] if row["kind"] != "adamw"]
            gram = next(row for row in rows if row["kind"] == "gram")
            for ax, (key, title) in zip(
                axes, {"flops": "executed FLOPs", "milliseconds": "time"}.items(), strict=True
            ):
                for row in rows:
                    middle, losses = mean(row["losses"]), row["losses"]
                    ax.errorbar(
                        row[key] / gram[key],
                        middle,
                        yerr=[[middle - min(losses)], [max(losses) - middle]],
                        color=drawing.colour(OptimizerConfig(row["kind"], gamma=row["gamma"])),
                        marker=drawing.MARKERS[row["kind"]],
                        fillstyle="none" if "nesterov" in row["label"] else "full",
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
    encoding, (size, end) = gpt2_encoding(vocabulary), TOKENIZERS["gpt2"]
    words = [b"\0" if number == end else encoding.decode_single_token_bytes(number) for number in range(size)]
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
