"""CacheMuon beside the best fresh Muon and other baselines, on text and on images: docs/results.md.

    python benchmarks/beyond.py --text DIR --images DIR [--out runs/beyond] [--workers 2] [--ledger FILE]

The text is `train.bin` and `val.bin` with bytes as uint16 (`cachemuon prepare text --tokenizer bytes`); with
`--vocabulary DIR`, GPT-2's `encoder.json` and `vocab.bpe`, it is in GPT-2's tokens, and made bytes in the
folder of the study. The images are CIFAR-10's binary files.

Every method is tuned with seed 0: GramMuon and CacheMuon over learning rate x momentum x Nesterov; the
others begin at GramMuon's best learning rate and momentum, with Nesterov and without, AdamW at three rates
of its own. From the best of these on, the neighboring rates of a finer ladder are tried until none is
better; for CacheMuon and the fresh rivals, GramMuon, torch.optim.Muon's quintic and PolarExpMuon, the
neighboring momenta too, and CacheMuon's `clip`. On images most matrices are too small to be cached by
default, so there is also a CacheMuon that caches all matrices of 64 rows and more: it shows the FLOPs that
these can save. Then each method is trained with other seeds, and compared with the fresh rival that is best
with those. A run has one thread. Called again, the study goes on: finished runs are read, also from the
ledger of another machine. At its end it writes `beyond.json` and `beyond.png`, and with `--page` the tables
of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ledger import Finished
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from study import as_bytes, best_fresh, hits, standard_error, summary
from trainings import Stopped, Trainings, add_arguments, tell, trainings_of

from cachemuon import CacheGNS, GramNS
from cachemuon.flops import executed_by
from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import CACHING, LABELS, OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe
from cachemuon_lab.totals import GPT2_SMALL

RECIPES = {"text": "gpt2-mini", "images": "resnet-mini"}
FRESH = ("gram", "jordan", "polar")
RIVALS = (*FRESH, "cache")
CACHE_64 = "cache64"  # a CacheMuon that caches all matrices with so many rows
CHANGED: dict[str, Any] = {"cache_all": True, "min_rows": 64, "clip": 1 / 8, "vectors": 4}  # in it
METHODS = (*RIVALS, CACHE_64, "stale", "paper", "adamw")
TUNING, FEW, MANY = 0, (1, 2, 3), (1, 2, 3, 4, 5)  # seeds: for the search; for the baselines; for the rest

RATES = (0.02, 0.04, 0.08)
LADDER = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
ADAM_RATES, ADAM_LADDER = (1e-3, 2e-3, 4e-3), (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MOMENTA, MOMENTUM_LADDER = (0.9, 0.95, 0.98), (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
NESTEROV, CLIPS = (True, False), (None, 1 / 16, 1 / 8, 1 / 6)


Tried = dict[tuple[str, str], list[OptimizerConfig]]
"""By task and method: settings that were tried, or shall be."""


class Job(NamedTuple):
    """One run of the study."""

    task: str
    optimizer: OptimizerConfig
    seed: int

    @property
    def slug(self) -> str:
        """The name of its folder."""
        one = self.optimizer
        told = [self.task, one.kind, f"lr{getattr(one, rate_of(one)):g}"]
        if one.kind != "adamw":
            told += [f"m{one.momentum:g}", "nesterov" if one.nesterov else "ema"]
        if one.kind == "cache":
            given = {name: getattr(one, name) for name in CHANGED}
            told += [
                f"{name}{value:.4g}"
                for name, value in given.items()
                if value != getattr(OptimizerConfig, name)
            ]
        return "-".join([*told, f"s{self.seed}"])


def rate_of(optimizer: OptimizerConfig) -> str:
    """The name of the learning rate that a method is tuned by."""
    return "adam_lr" if optimizer.kind == "adamw" else "lr"


def grid(
    task: str, method: str, momenta: Sequence[float], rates: Sequence[float] = RATES
) -> list[OptimizerConfig]:
    """Where the search for a method's settings begins."""
    base = OptimizerConfig("cache", adam_lr=2e-3, head="muon" if task == "images" else "adam")
    if method == CACHE_64:
        base = replace(base, **CHANGED)
    else:
        base = replace(base, kind=method, gamma=5.0 if method == "paper" else base.gamma)
    if method == "adamw":
        return [replace(base, adam_lr=rate) for rate in ADAM_RATES]
    return [
        replace(base, lr=rate, momentum=momentum, nesterov=nesterov)
        for momentum, nesterov, rate in product(momenta, NESTEROV, rates)
    ]


def neighbours(one: OptimizerConfig) -> list[OptimizerConfig]:
    """The next lower and higher learning rate; for the rivals also momentum, and what is clipped."""
    name, ladder = rate_of(one), ADAM_LADDER if one.kind == "adamw" else LADDER
    found = [replace(one, **{name: rate}) for rate in around(getattr(one, name), ladder)]
    if one.kind in RIVALS:
        found += [replace(one, momentum=momentum) for momentum in around(one.momentum, MOMENTUM_LADDER)]
    if one.kind == "cache" and not one.cache_all:
        found += [replace(one, clip=clip) for clip in CLIPS]
    return [other for other in found if other != one]


def around(value: float, ladder: Sequence[float]) -> Sequence[float]:
    """A value of a ladder, and those beside it."""
    place = ladder.index(value)
    return ladder[max(place - 1, 0) : place + 2]


def plain(optimizer: OptimizerConfig) -> OptimizerConfig:
    """CacheMuon without `normalize`, as this study has it, which was trained before there was any."""
    return replace(optimizer, normalize=None) if optimizer.kind == "cache" else optimizer


class Study:
    """The runs of a folder, and what they came to."""

    def __init__(self, trainings: Trainings, data: dict[str, Path], methods: Sequence[str] = METHODS) -> None:
        self.trainings, self.data = trainings, data
        wanted = [method for method in METHODS if method in {*RIVALS, *methods}]
        on_text = [method for method in wanted if method != CACHE_64]
        self.methods = {task: wanted if task == "images" else on_text for task in data}
        self.runs: dict[Job, Finished] = {}

    def config(self, job: Job) -> RunConfig:
        settings = (f"data.path={self.data[job.task]}", f"seed={job.seed}", "checkpoint_every=1000000")
        return configure(recipe(RECIPES[job.task]), plain(job.optimizer), settings)

    def run(self, jobs: Iterable[Job]) -> None:
        """Train what is not finished yet."""
        wanted = {job: self.config(job) for job in jobs if job not in self.runs}
        done = self.trainings.run({job.slug: config for job, config in wanted.items()})
        self.runs |= {job: done[job.slug] for job in wanted}

    def loss(self, job: Job) -> float:
        """What a run ended with on the validation data."""
        return self.runs[job].loss

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
        """Train everything, and sum it up: for each task its methods, and what was searched."""
        first = ("gram", "cache")
        searched = {(task, method): grid(task, method, MOMENTA) for task in self.data for method in first}
        best = self.tune(searched)
        others = {
            (task, method): grid(task, method, (best[task, "gram"].momentum,), (best[task, "gram"].lr,))
            for task, methods in self.methods.items()
            for method in methods
            if method not in first
        }
        best |= self.tune(others)
        searched |= others
        seeds = {key: MANY if key[1] in (*RIVALS, CACHE_64) else FEW for key in best}
        self.run(Job(task, one, seed) for (task, method), one in best.items() for seed in seeds[task, method])
        results = {}
        for task, methods in self.methods.items():
            results[task] = {
                "methods": [
                    self.summary(task, best[task, method], seeds[task, method]) for method in methods
                ],
                "search": [
                    settings_of(one) | {"loss": round(self.loss(Job(task, one, TUNING)), 4)}
                    for method in methods
                    for one in searched[task, method]
                ],
            }
        return results

    def summary(self, task: str, one: OptimizerConfig, seeds: Iterable[int]) -> dict[str, Any]:
        """The row of a method, from its runs with these seeds."""
        return settings_of(one) | summary([self.runs[Job(task, one, seed)] for seed in seeds])


def settings_of(optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a method was tuned by."""
    found: dict[str, Any] = {"kind": optimizer.kind, "lr": getattr(optimizer, rate_of(optimizer))}
    if optimizer.kind != "adamw":
        found |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    return found | ({name: getattr(optimizer, name) for name in CHANGED} if optimizer.kind == "cache" else {})


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


def tables(results: dict[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    made: dict[str, tuple[str, Cells]] = {}
    for task, found in results.items():
        made[task] = f"{task}: losses", _losses(found["methods"])
        made[f"{task}_methods"] = f"{task}: methods", _methods(found["methods"])
        made[f"{task}_search"] = f"{task}: search", _search(found["search"])
    return made


def _losses(rows: list[dict[str, Any]]) -> Cells:
    """A row for each method: the mean of its seeds, its difference to the best fresh rival, and the FLOPs."""
    gram, best = next(row for row in rows if row["kind"] == "gram"), best_fresh(rows)
    cells = [["", "lr", "momentum", "seeds", "loss", "to the best fresh", "±", "FLOPs"]]
    for row in rows:
        muon = row["kind"] != "adamw"
        apart = [one - other for one, other in zip(row["losses"], best["losses"], strict=False)]
        cells.append(
            [
                LABELS[row["kind"]],
                f"{row['lr']:g}",
                _settings(row) if muon else "",
                str(len(row["losses"])),
                f"{mean(row['losses']):.3f}",
                f"{mean(apart):+.3f}" if row is not best else "",
                f"{standard_error(apart):.3f}" if row is not best else "",
                f"{row['flops'] / gram['flops']:.0%}" if muon else "",
            ]
        )
    return cells


def _methods(rows: list[dict[str, Any]]) -> Cells:
    gram = next(row for row in rows if row["kind"] == "gram")
    best = best_fresh(rows)
    images = gram["accuracies"][0] is not None
    heads = ["", "lr", "momentum", "loss", "of each seed", "to the best fresh", "worst seed"]
    cells = [[*heads, *["accuracy"] * images, "hits", "FLOPs", *["FLOPs at width 768"] * (not images)]]
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


def _settings(row: dict[str, Any]) -> str:
    """What a Muon was tuned by beside the learning rate."""
    clip = [] if row.get("clip") is None else [f"clip {row['clip']:.3g}"]
    cached = [f"from {row['min_rows']} rows on"] if row.get("cache_all") else []
    return ", ".join([f"{row['momentum']:g}", *["Nesterov"] * row["nesterov"], *clip, *cached])


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss against FLOPs relative to GramMuon's, beside each other for the tasks."""
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(4.2 * len(results), 3.8), layout="constrained")
        axes = figure.subplots(1, len(results), squeeze=False)[0]
        for ax, (task, found) in zip(axes, results.items(), strict=True):
            rows = [row for row in found["methods"] if row["kind"] != "adamw"]
            gram = next(row for row in rows if row["kind"] == "gram")
            for row in rows:
                all_cached = row.get("cache_all", False)
                ax.errorbar(
                    row["flops"] / gram["flops"],
                    mean(row["losses"]),
                    yerr=2 * standard_error(row["losses"]),
                    color=drawing.colour(OptimizerConfig(row["kind"])),
                    marker=drawing.MARKERS[row["kind"]],
                    mfc="none" if all_cached else None,
                    capsize=2,
                    ls="",
                    label=LABELS[row["kind"]] + (f", from {row['min_rows']} rows on" if all_cached else ""),
                )
            ax.set(xlabel="executed FLOPs, relative to GramMuon", xlim=(0, None), ylabel=f"{task}: loss")
            ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        handles, columns = axes[-1].get_legend_handles_labels(), 2 * len(results)
        figure.legend(*handles, loc="outside lower center", ncols=columns)
        drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", help="train.bin and val.bin of bytes")
    parser.add_argument("--vocabulary", type=Path, metavar="DIR", help="the text is in these GPT-2 tokens")
    parser.add_argument("--images", type=Path, metavar="DIR", help="CIFAR-10's binary files")
    parser.add_argument(
        "--methods", nargs="*", choices=METHODS, default=METHODS, help=f"beside {', '.join(RIVALS)}"
    )
    add_arguments(parser, "runs/beyond")
    args = parser.parse_args()
    data = {task: path for task, path in (("text", args.text), ("images", args.images)) if path is not None}
    if not data:
        parser.error("name --text, --images, or both")
    if args.vocabulary is not None and "text" in data:
        data["text"] = as_bytes(data["text"], args.vocabulary, args.out / "bytes")
    try:
        results = Study(trainings_of(args), data, args.methods).results()
    except Stopped as stopped:
        print(stopped)
        return
    (args.out / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "beyond.png")
    tell(tables(results), args.page)


if __name__ == "__main__":
    main()
