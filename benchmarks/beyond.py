"""CacheMuon beside the best fresh Muon and other baselines, on text and on images: docs/beyond-the-paper.md.

    python benchmarks/beyond.py --text DIR --images DIR [--out runs/beyond] [--workers 2]

The text is `train.bin` and `val.bin` with bytes as uint16 (`cachemuon prepare text --tokenizer bytes`); with
`--vocabulary DIR`, GPT-2's `encoder.json` and `vocab.bpe`, it is in GPT-2's tokens, and made bytes in the
folder of the study. The images are CIFAR-10's binary files.

Every method is tuned with seed 0: CacheMuon and the fresh rivals, GramMuon and torch.optim.Muon's quintic,
over learning rate x momentum x Nesterov, the others over learning rate x Nesterov at GramMuon's momentum,
AdamW over its learning rate. From the best of that grid on, the neighbouring rates of a finer ladder are
tried until none is better; for the rivals the neighbouring momenta too, and CacheMuon's `clip`. Then it is
trained with other seeds, and compared with the fresh rival that is best with those. At last one setting of
CacheMuon is changed at a time, with seed 0. A run has one thread; times are measured apart, at the end, when
nothing else should run. Called again, the study goes on: finished runs are read. At its end it writes
`beyond.json` and `beyond.png`, and with `--page` the tables of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from trainings import Stopped, Trainings, add_arguments

from cachemuon import CacheGNS, GramNS
from cachemuon.flops import GPT2_SMALL, executed_by
from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import CACHING, LABELS, OptimizerConfig, RunConfig
from cachemuon_lab.data.prepare import SPLITS
from cachemuon_lab.data.tokens import FILE_DTYPE, TOKENIZERS, gpt2_encoding
from cachemuon_lab.performance import Cells, renewed
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import Run
from cachemuon_lab.timing import train_in_turns

RECIPES = {"text": "gpt2-mini", "images": "resnet-mini"}
FRESH = ("gram", "jordan")
RIVALS = (*FRESH, "cache")
KINDS = (*RIVALS, "polar", "stale", "paper", "adamw")
TIMED = 44  # steps: four lives of a transform
TUNING, FEW, MANY = 0, (1, 2, 3), (1, 2, 3, 4, 5)  # seeds: for the search; for every method; for the rivals

RATES = (0.02, 0.04, 0.08)
LADDER = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
ADAM_RATES, ADAM_LADDER = (1e-3, 2e-3, 4e-3), (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MOMENTA, MOMENTUM_LADDER = (0.9, 0.95, 0.98), (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
NESTEROV, CLIPS = (True, False), (None, 1 / 16, 1 / 8, 1 / 6)
ABLATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "text": {
        "optimizer.clip": ("0", "0.0625", "0.125"),
        "optimizer.max_norm": ("none", "1.5", "3"),
        "optimizer.max_age": ("3", "6", "20"),
        "optimizer.gamma": ("5",),
        "optimizer.gate": ("lagged",),
    },
    "images": {
        "optimizer.clip": ("0", "0.125"),
        "optimizer.max_norm": ("none",),
        "optimizer.guard": ("false",),
    },
}


Tried = dict[tuple[str, str], list[OptimizerConfig]]
"""By task and kind: settings that were tried, or shall be."""


class Job(NamedTuple):
    """One run of the study: the settings are overrides, beyond the task's own."""

    task: str
    optimizer: OptimizerConfig
    seed: int
    settings: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its folder."""
        one = self.optimizer
        told = [self.task, one.kind, f"lr{getattr(one, rate_of(one)):g}"]
        if one.kind != "adamw":
            told += [f"m{one.momentum:g}", "nesterov" if one.nesterov else "ema"]
        if one.kind == "cache" and one.clip is not None:
            told.append(f"clip{one.clip:.4g}")
        told += [setting.removeprefix("optimizer.").replace("=", "") for setting in self.settings]
        return "-".join([*told, f"s{self.seed}"])


def rate_of(optimizer: OptimizerConfig) -> str:
    """The name of the learning rate that a method is tuned by."""
    return "adam_lr" if optimizer.kind == "adamw" else "lr"


def grid(task: str, kind: str, momenta: Sequence[float]) -> list[OptimizerConfig]:
    """Where the search for a method's settings begins."""
    base = OptimizerConfig("gram", gamma=5.0 if kind == "paper" else OptimizerConfig.gamma, adam_lr=2e-3)
    base = replace(base, kind=kind, head="muon" if task == "images" else "adam")
    if kind == "adamw":
        return [replace(base, adam_lr=rate) for rate in ADAM_RATES]
    return [
        replace(base, lr=rate, momentum=momentum, nesterov=nesterov)
        for momentum, nesterov, rate in product(momenta, NESTEROV, RATES)
    ]


def neighbours(one: OptimizerConfig) -> list[OptimizerConfig]:
    """The next lower and higher learning rate; for the rivals also momentum, and what is clipped."""
    name, ladder = rate_of(one), ADAM_LADDER if one.kind == "adamw" else LADDER
    found = [replace(one, **{name: rate}) for rate in around(getattr(one, name), ladder)]
    if one.kind in RIVALS:
        found += [replace(one, momentum=momentum) for momentum in around(one.momentum, MOMENTUM_LADDER)]
    if one.kind == "cache":
        found += [replace(one, clip=clip) for clip in CLIPS]
    return [other for other in found if other != one]


def around(value: float, ladder: Sequence[float]) -> Sequence[float]:
    """A value of a ladder, and those beside it."""
    place = ladder.index(value)
    return ladder[max(place - 1, 0) : place + 2]


class Study:
    """The runs of a folder, and what they came to."""

    def __init__(self, trainings: Trainings, data: dict[str, Path], kinds: Sequence[str] = KINDS) -> None:
        self.trainings, self.data = trainings, data
        self.kinds = [kind for kind in KINDS if kind in {*RIVALS, *kinds}]
        self.runs: dict[Job, Run] = {}

    def config(self, job: Job) -> RunConfig:
        settings = (f"data.path={self.data[job.task]}", f"seed={job.seed}", "checkpoint_every=1000000")
        return configure(recipe(RECIPES[job.task]), job.optimizer, (*settings, *job.settings))

    def run(self, jobs: Iterable[Job]) -> None:
        """Train what is not finished yet."""
        wanted = {job: self.config(job) for job in jobs if job not in self.runs}
        done = self.trainings.run({job.slug: config for job, config in wanted.items()})
        self.runs |= {job: done[job.slug] for job in wanted}

    def loss(self, job: Job) -> float:
        """What a run ended with on the validation data."""
        return float(self.runs[job].validations[-1]["loss"])

    def tune(self, found: Tried) -> dict[tuple[str, str], OptimizerConfig]:
        """The best of each list, and of what lies around it; the lists grow by what was tried."""
        best: dict[tuple[str, str], OptimizerConfig] = {}
        more = found
        while any(more.values()):
            self.run(Job(task, one, TUNING) for (task, _), new in more.items() for one in new)
            more = {}
            for (task, kind), tried in found.items():
                best[task, kind] = min(tried, key=lambda one: self.loss(Job(task, one, TUNING)))
                more[task, kind] = [one for one in neighbours(best[task, kind]) if one not in tried]
                tried += more[task, kind]
        return best

    def results(self) -> dict[str, Any]:
        """Train everything, and sum it up: for each task its methods and ablations."""
        searched = {(task, kind): grid(task, kind, MOMENTA) for task in self.data for kind in RIVALS}
        best = self.tune(searched)
        others = {
            (task, kind): grid(task, kind, (best[task, "gram"].momentum,))
            for task in self.data
            for kind in self.kinds
            if kind not in RIVALS
        }
        best |= self.tune(others)
        searched |= others
        seeds = {key: MANY if key[1] in RIVALS else FEW for key in best}
        self.run(Job(task, one, seed) for (task, kind), one in best.items() for seed in seeds[task, kind])
        changes = {task: list(ablations(task, best[task, "cache"])) for task in self.data}
        self.run(job for task in self.data for job in changes[task])
        results = {}
        for task in self.data:
            rows = [best[task, kind] for kind in self.kinds]
            took = self.milliseconds(task, rows)
            results[task] = {
                "methods": [
                    summary([self.runs[Job(task, one, seed)] for seed in seeds[task, one.kind]])
                    | {"tuning": round(self.loss(Job(task, one, TUNING)), 4), "milliseconds": milliseconds}
                    for one, milliseconds in zip(rows, took, strict=True)
                ],
                "search": [
                    settings_of(one) | {"loss": round(self.loss(Job(task, one, TUNING)), 4)}
                    for kind in self.kinds
                    for one in searched[task, kind]
                ],
                "ablations": [
                    {"changed": changed} | summary([self.runs[job]])
                    for changed, job in [
                        ("", Job(task, best[task, "gram"], TUNING)),
                        ("", Job(task, best[task, "cache"], TUNING)),
                        *((job.settings[0], job) for job in changes[task]),
                    ]
                ],
            }
        return results

    def milliseconds(self, task: str, methods: Sequence[OptimizerConfig]) -> list[float]:
        """The mean matrix part of a step of each method, on all threads; they take turns step by step."""
        configs = [self.config(Job(task, method, TUNING)) for method in methods]
        took = train_in_turns(configs, TIMED)
        return [round(1e3 * fmean(one["orthogonalization_seconds"] for one in times), 2) for times in took]


def ablations(task: str, ours: OptimizerConfig) -> Iterator[Job]:
    """One setting of CacheMuon changed at a time."""
    for name, values in ABLATIONS[task].items():
        yield from (Job(task, ours, TUNING, (f"{name}={value}",)) for value in values)


def settings_of(optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a method was tuned by."""
    found: dict[str, Any] = {"kind": optimizer.kind, "lr": getattr(optimizer, rate_of(optimizer))}
    if optimizer.kind != "adamw":
        found |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    return found | ({"clip": optimizer.clip} if optimizer.kind == "cache" else {})


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What a row of a table needs, from the runs of its seeds."""
    optimizer = runs[0].config.optimizer
    outcomes: dict[str, int] = {}
    for line in (line for run in runs for line in run.steps):
        outcomes["hit"] = outcomes.get("hit", 0) + line["hits"]
        for reason, number in line["misses"].items():
            outcomes[reason] = outcomes.get(reason, 0) + number
    return settings_of(optimizer) | {
        "losses": [round(float(run.validations[-1]["loss"]), 4) for run in runs],
        "accuracies": [run.validations[-1]["accuracy"] for run in runs],
        "outcomes": {name: number for name, number in outcomes.items() if number},
        "flops": round(mean(run.steps[-1]["flops"] for run in runs)),
    }


def share_at_gpt2_small(row: dict[str, Any]) -> float:
    """Executed FLOPs beside GramMuon's, if the matrices of GPT-2 Small had these outcomes, clipped alike."""
    spent = fresh = 0.0
    calls = sum(row["outcomes"].values())
    probe: Any = "exact" if row["kind"] == "paper" else "sketch"
    clip = CacheGNS(clip=row["clip"] if row["kind"] == "cache" else 0.0)
    for n, m in GPT2_SMALL:
        cost = executed_by(GramNS(), n, m, probe=probe, rank=clip.rank(min(n, m)))
        fresh += cost.gram
        spent += sum(cost.price_of(name) * number / calls for name, number in row["outcomes"].items())
    return spent / fresh


def standard_error(values: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(values) / sqrt(len(values))


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    made: dict[str, tuple[str, Cells]] = {}
    for task, found in results.items():
        made[f"{task}_methods"] = f"{task}: methods", _methods(found["methods"])
        made[f"{task}_search"] = f"{task}: search", _search(found["search"])
        made[f"{task}_ablations"] = f"{task}: ablations", _ablations(found["ablations"])
    return made


def best_fresh(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fresh rival with the lowest mean loss: what CacheMuon must be as good as."""
    return min((row for row in rows if row["kind"] in FRESH), key=lambda row: mean(row["losses"]))


def _methods(rows: list[dict[str, Any]]) -> Cells:
    gram = next(row for row in rows if row["kind"] == "gram")
    best = best_fresh(rows)
    images = gram["accuracies"][0] is not None
    heads = ["", "lr", "momentum", "loss", "of each seed", "to the best fresh", "worst seed"]
    cells = [
        [*heads, *["accuracy"] * images, "hits", "FLOPs", *["FLOPs at width 768"] * (not images), "time"]
    ]
    for row in rows:
        muon, losses = row["kind"] != "adamw", row["losses"]
        share = share_at_gpt2_small(row) if row["kind"] in ("gram", *CACHING) else None
        apart = [one - other for one, other in zip(losses, best["losses"], strict=False)]
        cells.append(
            [
                LABELS[row["kind"]],
                f"{row['lr']:g}",
                _settings(row) if muon else "",
                f"{mean(losses):.4f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(apart):+.4f} ± {standard_error(apart):.4f}" if row is not best else "",
                f"{max(apart):+.4f}" if row is not best else "",
                *([f"{mean(row['accuracies']):.1%}"] if images else []),
                hits(row),
                f"{row['flops'] / gram['flops']:.0%}" if muon else "",
                *([] if images else [f"{share:.0%}" if share is not None else ""]),
                f"{row['milliseconds'] / gram['milliseconds']:.0%}" if muon else "",
            ]
        )
    return cells


def _search(rows: list[dict[str, Any]]) -> Cells:
    """A row for each setting beside the learning rate, a column for each of that; AdamW's rates are told."""
    muon = [row for row in rows if row["kind"] != "adamw"]
    rates = sorted({row["lr"] for row in muon})
    lines: dict[str, dict[float, float]] = {}
    for row in muon:
        lines.setdefault(f"{LABELS[row['kind']]}, {_settings(row)}", {})[row["lr"]] = row["loss"]
    cells = [["", *(f"{rate:g}" for rate in rates)]]
    for name, losses in lines.items():
        cells.append([name, *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates)])
    adam = sorted((row["lr"], row["loss"]) for row in rows if row["kind"] == "adamw")
    told = [f"{loss:.4f} ({rate:g})" for rate, loss in adam]
    return [*cells, ["AdamW, its own rates", *told, *[""] * (len(rates) - len(told))]] if told else cells


def _ablations(rows: list[dict[str, Any]]) -> Cells:
    """One seed; first both rivals unchanged."""
    gram, cells = rows[0], [["", "optimizer", "loss", "hits", "FLOPs"]]
    for row in rows:
        share = f"{row['flops'] / gram['flops']:.0%}"
        told = row["changed"].removeprefix("optimizer.") or "unchanged"
        cells.append([told, LABELS[row["kind"]], f"{row['losses'][0]:.4f}", hits(row), share])
    return cells


def _settings(row: dict[str, Any]) -> str:
    """What a Muon was tuned by beside the learning rate."""
    clip = [] if row.get("clip") is None else [f"clip {row['clip']:.3g}"]
    return ", ".join([f"{row['momentum']:g}", *["Nesterov"] * row["nesterov"], *clip])


def hits(row: dict[str, Any]) -> str:
    """The share of hits, where there can be any."""
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
                    ax.errorbar(
                        row[key] / gram[key],
                        mean(row["losses"]),
                        yerr=2 * standard_error(row["losses"]),
                        color=drawing.colour(OptimizerConfig(row["kind"])),
                        marker=drawing.MARKERS[row["kind"]],
                        capsize=2,
                        ls="",
                        label=LABELS[row["kind"]],
                    )
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
    parser.add_argument(
        "--methods", nargs="*", choices=KINDS, default=KINDS, help=f"beside {', '.join(RIVALS)}"
    )
    add_arguments(parser, "runs/beyond")
    args = parser.parse_args()
    data = {task: path for task, path in (("text", args.text), ("images", args.images)) if path is not None}
    if not data:
        parser.error("name --text, --images, or both")
    if args.vocabulary is not None and "text" in data:
        data["text"] = as_bytes(data["text"], args.vocabulary, args.out / "bytes")
    trainings = Trainings(args.out, workers=args.workers, minutes=args.minutes)
    try:
        results = Study(trainings, data, args.methods).results()
    except Stopped as stopped:
        print(stopped)
        return
    (args.out / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "beyond.png")
    if args.page is not None:
        args.page.write_text(renewed(args.page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
