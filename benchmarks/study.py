"""CacheMuon and its rivals, all tuned with the same number of trials: loss against FLOPs and against seconds.

    python benchmarks/study.py --text DIR --images DIR [--long] [--trials 24] [--out runs/study] [--workers 2]
    python benchmarks/study.py --text DIR --images DIR --times      # at the end, with nothing else running

The text is `train.bin` and `val.bin` with bytes as uint16 (`cachemuon prepare text --tokenizer bytes`); with
`--vocabulary DIR`, GPT-2's `encoder.json` and `vocab.bpe`, it is in GPT-2's tokens, and made bytes in the
folder of the study. The images are CIFAR-10's binary files.

Each method has three settings with a ladder of values each (`METHODS`). The search begins in the middle, on
images where an earlier one had found fresh Muons best (docs/notebook/search.md), with seed 0. The next
trial is always the untried setting that is fewest rungs away from the best one so far; of several the one
whose earlier settings differ most, and of these the higher one. Every method gets the same number of
trials. Trials are judged by the first half of the validation text or test images. The best setting of each
method is then trained with other seeds and judged by the second half, which chose nothing.

`--long` begins at the best settings on text, and trains 2,000 steps of twice the batch: three learning rates
for each method with seed 0, then the best with three other seeds.

Called again, the study goes on. It writes `study.json` and `study.png`, and with `--page` the tables of that
page.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, mean, median, stdev
from typing import Any

import numpy as np
from ledger import Finished
from matplotlib import rc_context
from matplotlib.figure import Figure
from trainings import Stopped, Trainings, add_arguments, tell, trainings_of

from cachemuon_lab import drawing
from cachemuon_lab.compare import configure
from cachemuon_lab.config import CACHING, OptimizerConfig, RunConfig
from cachemuon_lab.data.prepare import SPLITS
from cachemuon_lab.data.tokens import FILE_DTYPE, TOKENIZERS, gpt2_encoding
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe
from cachemuon_lab.timing import train_in_turns

TRIALS, TUNING, SEEDS = 24, 0, (1, 2, 3, 4, 5)
TIMED = 22  # steps: two lives of a transform
RATES = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
ADAM_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 1.6e-2)
MOMENTA = (0.7, 0.8, 0.9, 0.95, 0.98)
SECOND = (0.8, 0.9, 0.95, 0.99, 0.999)
Place = tuple[int, ...]
"""A rung on the ladder of each setting."""


@dataclass(frozen=True)
class Method:
    """An optimizer, and the ladders of the settings that it is tuned by; the search begins with `base`'s."""

    label: str
    base: OptimizerConfig
    ladders: dict[str, tuple[Any, ...]] = field(hash=False)

    def at(self, place: Place) -> OptimizerConfig:
        """The optimizer with the settings of a place."""
        rungs = zip(self.ladders.items(), place, strict=True)
        return replace(self.base, **{name: ladder[rung] for (name, ladder), rung in rungs})

    def start(self, begin: Mapping[str, float]) -> Place:
        """The place of the base, but for these settings if its ladders have them all."""
        known = all(value in self.ladders.get(name, ()) for name, value in begin.items())
        one = replace(self.base, **begin) if known else self.base  # type: ignore[arg-type]
        return tuple(ladder.index(getattr(one, name)) for name, ladder in self.ladders.items())

    def next(self, tried: Mapping[Place, float], free: int | None = None) -> Place | None:
        """The next trial after these losses; only the first `free` settings change. None if none is left."""
        best = min(tried, key=lambda place: tried[place])
        ranges = [range(len(ladder)) for ladder in self.ladders.values()]
        places = product(*ranges[:free], *([at] for at in best[len(ranges[:free]) :]))

        def order(place: Place) -> tuple[Any, ...]:
            apart = [to - at for to, at in zip(place, best, strict=True)]
            return sum(map(abs, apart)), [-abs(one) for one in apart], [-one for one in apart]

        return min((place for place in places if place not in tried), key=order, default=None)

    def told(self, one: OptimizerConfig) -> str:
        """The settings that were chosen, beside the learning rate."""
        return ", ".join(_told(name, getattr(one, name)) for name in list(self.ladders)[1:])


def _told(name: str, value: Any) -> str:
    if name == "nesterov":
        return "Nesterov" if value else "no Nesterov"
    text = "/".join(f"{one:g}" for one in value) if isinstance(value, tuple) else f"{value:g}"
    return text if name == "momentum" else f"{name.removeprefix('adam_')} {text}"


def _muon(
    label: str, kind: str, knob: str = "nesterov", ladder: tuple[Any, ...] = (True, False), **own: Any
) -> Method:
    shared = {"lr": 0.04, "momentum": 0.9, "adam_lr": 2e-3, **own}
    base = OptimizerConfig(kind, **shared)  # type: ignore[arg-type]
    return Method(label, base, {"lr": RATES, "momentum": MOMENTA, knob: ladder})


LIVES = (5, 10, 20)
METHODS = {
    "gram": _muon("GramMuon", "gram", nesterov=True),
    "jordan": _muon("Muon (Jordan)", "jordan", nesterov=True),
    "normuon": _muon("NorMuon", "gram", nesterov=True, normalize="rows"),
    "normuon-jordan": _muon("NorMuon (Jordan)", "jordan", nesterov=True, normalize="rows"),
    "dion2-quarter": _muon("Dion2, 1/4", "dion2", "weight_decay", (1e-4, 0.01, 0.1), fraction=0.25),
    "dion2-half": _muon("Dion2, 1/2", "dion2", "weight_decay", (1e-4, 0.01, 0.1), fraction=0.5),
    "dion3-quarter": _muon("Dion3, 1/4", "dion3", "beta2", SECOND, fraction=0.25),
    "dion3-half": _muon("Dion3, 1/2", "dion3", "beta2", SECOND, fraction=0.5),
    "adamuon": _muon("AdaMuon", "adamuon", "beta2", SECOND, nesterov=True),
    "soap": Method(
        "SOAP",
        OptimizerConfig("soap", lr=3e-3, momentum=0.95, beta2=0.95, adam_lr=2e-3),
        {"lr": ADAM_RATES, "momentum": MOMENTA, "beta2": SECOND},
    ),
    "adamw": Method(
        "AdamW",
        OptimizerConfig("adamw", adam_lr=2e-3, adam_betas=(0.9, 0.99)),
        {
            "adam_lr": ADAM_RATES,
            "adam_betas": ((0.8, 0.95), (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.95, 0.999)),
            "adam_weight_decay": (1e-4, 0.01, 0.1),
        },
    ),
    "cache": _muon("CacheMuon", "cache", "max_age", LIVES, nesterov=True),
    "cache-rows": _muon("CacheMuon, rows", "cache", "max_age", LIVES, nesterov=True, normalize="rows"),
    "cache-none": _muon(
        "CacheMuon, normalize=None", "cache", "max_age", LIVES, nesterov=True, normalize=None
    ),
}


@dataclass(frozen=True)
class Task:
    """A recipe with settings of its own, for trials and for what is reported."""

    recipe: str
    settings: tuple[str, ...] = ()
    tune: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    head: str = "adam"
    begin: Mapping[str, float] = field(default_factory=dict, hash=False)


TASKS = {
    "text": Task("gpt2-mini", tune=("validate_every=300",), report=("validation_batches=160",)),
    "images": Task("resnet-mini", head="muon", begin={"lr": 0.06, "momentum": 0.8}),
    "long": Task(
        "gpt2-mini",
        ("steps=2000", "batch_size=16", "validate_every=200"),
        report=("validation_batches=80",),
        seeds=SEEDS[:3],
    ),
}
LONG_TRIALS = 3


class Study:
    """The runs of a folder, and what they came to."""

    def __init__(
        self,
        trainings: Trainings,
        data: Mapping[str, Path],
        names: Sequence[str] = tuple(METHODS),
        trials: int = TRIALS,
        seeds: int = len(SEEDS),
    ) -> None:
        self.trainings, self.data, self.trials, self.seeds = trainings, data, trials, seeds
        self.names = [name for name in METHODS if name in names]

    def config(self, task: str, part: str, one: OptimizerConfig, seed: int) -> RunConfig:
        """The training of a method's settings; `part` is "tune" or "report"."""
        own = TASKS[task]
        settings = [
            *own.settings,
            *(own.tune if part == "tune" else own.report),
            f"data.path={self.data[task]}",
        ]
        settings += [
            f"data.part={part}",
            f"seed={seed}",
            "checkpoint_every=1000000",
            f"optimizer.head={own.head}",
        ]
        return configure(recipe(own.recipe), one, settings)

    def results(self) -> dict[str, Any]:
        """Search, train the best with other seeds, and sum it up."""
        results, best = {}, {}
        for task in self.data:
            long = task == "long"
            begin = TASKS[task].begin
            begun = {name: best["text", name] if long else METHODS[name].start(begin) for name in self.names}
            tried = self.search(task, LONG_TRIALS if long else self.trials, begun, 1 if long else None)
            for name in self.names:
                best[task, name] = min(tried[name], key=lambda place: tried[name][place])
            results[task] = self._reported(task, {name: best[task, name] for name in self.names}, tried)
        return results

    def search(
        self, task: str, trials: int, begun: Mapping[str, Place], free: int | None
    ) -> dict[str, dict[Place, float]]:
        """The losses of each method's trials, method by method in turns."""
        tried: dict[str, dict[Place, float]] = {name: {} for name in self.names}
        for _ in range(trials):
            wanted = {}
            for name, losses in tried.items():
                place = METHODS[name].next(losses, free) if losses else begun[name]
                if place is not None:
                    wanted[name] = place
            jobs = [(name, METHODS[name].at(place), TUNING) for name, place in wanted.items()]
            for (name, place), run in zip(wanted.items(), self._train(task, "tune", jobs), strict=True):
                tried[name][place] = run.loss if math.isfinite(run.loss) else math.inf
        return tried

    def _train(
        self, task: str, part: str, jobs: Sequence[tuple[str, OptimizerConfig, int]]
    ) -> list[Finished]:
        configs = {
            slug(task, part, name, one, seed): self.config(task, part, one, seed) for name, one, seed in jobs
        }
        done = self.trainings.run(configs)
        return [done[name] for name in configs]

    def _reported(
        self, task: str, best: Mapping[str, Place], tried: Mapping[str, Mapping[Place, float]]
    ) -> dict[str, Any]:
        chosen = {name: METHODS[name].at(place) for name, place in best.items()}
        seeds = TASKS[task].seeds[: self.seeds]
        runs = iter(self._train(task, "report", [(*one, seed) for one in chosen.items() for seed in seeds]))
        rows = [
            {
                "name": name,
                "place": best[name],
                "kind": one.kind,
                "lr": getattr(one, rate_of(METHODS[name])),
                "settings": METHODS[name].told(one),
                **summary([next(runs) for _ in seeds]),
            }
            for name, one in chosen.items()
        ]
        search = [
            {
                "name": name,
                "lr": getattr(one, rate_of(METHODS[name])),
                "settings": METHODS[name].told(one),
                "loss": loss,
            }
            for name, losses in tried.items()
            for one, loss in ((METHODS[name].at(place), loss) for place, loss in losses.items())
        ]
        return {"methods": rows, "search": search}

    def times(self, results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
        """By task and method the median seconds of a training step, and of these its optimizer's.

        The methods take turns step by step. The optimizer's seconds are means: a refresh counts.
        """
        found = {}
        for task, result in results.items():
            rows = result["methods"]
            chosen = [METHODS[row["name"]].at(tuple(row["place"])) for row in rows]
            configs = [self.config(task, "report", one, SEEDS[0]) for one in chosen]
            took = train_in_turns(configs, TIMED)
            found[task] = {
                row["name"]: {
                    "optimizer": fmean(step["optimizer_seconds"] for step in steps),
                    "step": median(step["step_seconds"] - step["optimizer_seconds"] for step in steps)
                    + fmean(step["optimizer_seconds"] for step in steps),
                }
                for row, steps in zip(rows, took, strict=True)
            }
        return found


def rate_of(method: Method) -> str:
    """The name of the learning rate that a method is tuned by."""
    return next(iter(method.ladders))


def slug(task: str, part: str, name: str, one: OptimizerConfig, seed: int) -> str:
    """The name of a run's folder."""
    method = METHODS[name]
    settings = method.told(one).replace(", ", "-").replace(" ", "").replace("/", "_")
    return f"{task}-{part}-{name}-{getattr(one, rate_of(method)):g}-{settings}-s{seed}"


def summary(runs: Sequence[Finished]) -> dict[str, Any]:
    """What a row of a table needs, from the runs of its seeds."""
    outcomes: Counter[str] = sum((Counter(run.outcomes) for run in runs), Counter())
    return {
        "losses": [round(run.loss, 4) for run in runs],
        "accuracies": [run.validations[-1]["accuracy"] for run in runs],
        "outcomes": dict(outcomes),
        "flops": round(mean(run.flops or 0 for run in runs)),
    }


def standard_error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return stdev(values) / math.sqrt(len(values))


def hits(row: Mapping[str, Any]) -> str:
    """The share of hits, where there can be any."""
    if row["kind"] not in (*CACHING, "stale"):
        return ""
    return f"{row['outcomes'].get('hit', 0) / sum(row['outcomes'].values()):.0%}"


def best_fresh(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The method that reuses nothing with the lowest mean loss."""
    return min(
        (row for row in rows if row["kind"] not in (*CACHING, "stale")), key=lambda row: mean(row["losses"])
    )


def tables(results: Mapping[str, Any]) -> dict[str, tuple[str, Cells]]:
    """A title and the cells of each table, for the page."""
    made = {}
    for task, found in results.items():
        made[f"study_{task}"] = f"{task}: methods", methods_table(found["methods"])
        made[f"study_{task}_seeds"] = f"{task}: seeds", seeds_table(found["methods"])
        made[f"study_{task}_search"] = f"{task}: search", search_table(found["search"])
    return made


def methods_table(rows: Sequence[dict[str, Any]]) -> Cells:
    """A row for each method, the lowest loss first. ± is the standard error of what stands before it."""
    rows = sorted(rows, key=lambda row: mean(row["losses"]))
    best, scale = best_fresh(rows), unit(rows)
    images, timed = rows[0]["accuracies"][0] is not None, all("step" in row for row in rows)
    heads = ["", "lr", "settings", "loss", "±", "to the best fresh", "±", "lower with"]
    heads += [*["accuracy"] * images, "hits", "FLOPs", *["s a step", "its optimizer"] * timed]
    cells = [heads]
    for row in rows:
        losses = row["losses"]
        apart = [one - other for one, other in zip(losses, best["losses"], strict=True)]
        lower = f"{sum(one < 0 for one in apart)} of {len(apart)}"
        beside = (
            ["", "", ""] if row is best else [f"{mean(apart):+.4f}", f"{standard_error(apart):.4f}", lower]
        )
        line = [METHODS[row["name"]].label, f"{row['lr']:g}", row["settings"], f"{mean(losses):.4f}"]
        line += [f"{standard_error(losses):.4f}", *beside]
        line += [f"{mean(row['accuracies']):.1%}"] if images else []
        line += [hits(row), f"{row['flops'] / scale:.0%}" if row["flops"] else ""]
        line += [f"{row['step']:.3f}", f"{row['optimizer']:.3f}"] if timed else []
        cells.append(line)
    return cells


def unit(rows: Sequence[dict[str, Any]]) -> float:
    """The FLOPs that others are told in: GramMuon's, or the most if it is not there."""
    gram = [row["flops"] for row in rows if row["name"] == "gram"]
    return float(gram[0] if gram else max(row["flops"] for row in rows) or 1)


def seeds_table(rows: Sequence[dict[str, Any]]) -> Cells:
    """A row for each method, a column for each seed."""
    seeds = range(1, 1 + len(rows[0]["losses"]))
    lines = [[METHODS[row["name"]].label, *(f"{loss:.4f}" for loss in row["losses"])] for row in rows]
    return [["", *(f"seed {seed}" for seed in seeds)], *lines]


def search_table(trials: Sequence[dict[str, Any]]) -> Cells:
    """A row for each method and settings, its losses by learning rate."""
    rates = sorted({trial["lr"] for trial in trials})
    lines: dict[str, dict[float, float]] = {}
    for trial in trials:
        line = lines.setdefault(f"{METHODS[trial['name']].label}: {trial['settings']}", {})
        line[trial["lr"]] = trial["loss"]
    cells = [["", *(f"{rate:g}" for rate in rates)]]
    for name, losses in lines.items():
        cells.append([name, *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates)])
    return cells


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Loss against FLOPs, and against seconds where they were measured; a row of panels for each task."""
    timed = all("step" in row for found in results.values() for row in found["methods"])
    with rc_context(drawing.STYLE):
        figure = Figure(figsize=(4.2 * (1 + timed), 3.2 * len(results) + 0.8), layout="constrained")
        axes = figure.subplots(len(results), 1 + timed, squeeze=False)
        for row_of_axes, (task, found) in zip(axes, results.items(), strict=True):
            rows = [row for row in found["methods"] if row["flops"]]
            scale = unit(rows)
            _scatter(
                row_of_axes[0],
                task,
                "FLOPs, relative to GramMuon",
                rows,
                [row["flops"] / scale for row in rows],
            )
            if timed:
                rows = found["methods"]
                _scatter(row_of_axes[1], task, "seconds a step", rows, [row["step"] for row in rows])
        handles = {
            label: handle
            for ax in axes.flat
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
        drawing.save(figure, path)


def _scatter(ax: Any, task: str, what: str, rows: Sequence[dict[str, Any]], values: Sequence[float]) -> None:
    for row, value in zip(rows, values, strict=True):
        method = METHODS[row["name"]]
        plain = method.base.normalize == (None if method.base.kind == "cache" else "default")
        ax.errorbar(
            value,
            mean(row["losses"]),
            yerr=2 * standard_error(row["losses"]),
            color=drawing.colour(method.base),
            marker=drawing.MARKERS[row["kind"]],
            mfc="none" if plain == (method.base.kind == "cache") or method.base.fraction > 0.25 else None,
            capsize=2,
            ls="",
            label=method.label,
        )
    lowest = min(mean(row["losses"]) for row in rows)
    middle = median(mean(row["losses"]) for row in rows)
    ax.set(
        xlabel=what,
        ylabel=f"{task}: loss",
        xlim=(0, None),
        ylim=(None, max(middle + 3 * (middle - lowest), lowest + 0.01)),
    )


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
    parser.add_argument("--long", action="store_true", help="2,000 steps of text, too")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--trials", type=int, metavar="N", default=TRIALS, help="of each method")
    parser.add_argument("--seeds", type=int, metavar="N", default=len(SEEDS), help="for the best, 2 or more")
    parser.add_argument(
        "--times", action="store_true", help="measure the times of steps, when all is trained"
    )
    add_arguments(parser, "runs/study")
    args = parser.parse_args()
    text = args.text
    if text is not None and args.vocabulary is not None:
        text = as_bytes(text, args.vocabulary, args.out / "bytes")
    folders = {"text": text, "images": args.images, "long": text if args.long else None}
    data = {task: folder for task, folder in folders.items() if folder is not None}
    if not data:
        parser.error("name --text, --images, or both")
    study = Study(trainings_of(args), data, args.methods, args.trials, args.seeds)
    try:
        results = study.results()
    except Stopped as stopped:
        print(stopped)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    clock = args.out / "times.json"
    if args.times:
        clock.write_text(json.dumps(study.times(results), indent=1) + "\n")
    if clock.exists():
        took = json.loads(clock.read_text())
        for task, found in results.items():
            for row in found["methods"]:
                row |= took.get(task, {}).get(row["name"], {})
    (args.out / "study.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "study.png")
    tell(tables(results), args.page)


if __name__ == "__main__":
    main()
