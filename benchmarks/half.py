"""Trainings whose iterations are in half precision, emulated on a CPU: GramMuon and CacheMuon on text.

    python benchmarks/half.py --text DIR [--lr 0.02] [--out runs/half] [--workers 2] [--ledger FILE]

`DIR` has `train.bin` and `val.bin` with bytes as uint16, as for `study.py`. Products of the iterations have
rounded factors, sums in float32 and a rounded result (`cachemuon_lab.half`), as on a GPU; momentum, norms,
residuals and parameters are float32. Momentum, Nesterov, decay and the ratio of the learning rate are
torch.optim.Muon's defaults. Three seeds for each optimizer and precision. Called again, the runs go on;
`--page` renews the table of that page.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from ledger import Finished
from study import standard_error
from trainings import Stopped, Trainings, add_arguments, tell, trainings_of

from cachemuon_lab.compare import configure
from cachemuon_lab.config import LABELS, OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells
from cachemuon_lab.recipes import recipe

KINDS, PRECISIONS, SEEDS = ("gram", "cache"), (None, "float16", "bfloat16"), (0, 1, 2)
SHARED = OptimizerConfig(
    "gram", momentum=0.95, nesterov=True, weight_decay=0.1, adjust_lr_fn="original", adam_lr=2e-3
)
SETTINGS: tuple[str, ...] = ("checkpoint_every=1000000",)
Trained = dict[tuple[str, str | None], list[Finished]]
"""The runs of the seeds, by kind and precision."""


def config(data: Path, kind: str, precision: str | None, lr: float, seed: int) -> RunConfig:
    """One training."""
    optimizer = replace(SHARED, kind=kind, lr=lr, precision=precision)
    return configure(recipe("gpt2-mini"), optimizer, (*SETTINGS, f"data.path={data}", f"seed={seed}"))


def trained(trainings: Trainings, data: Path, lr: float) -> Trained:
    """Train everything that is not finished yet."""
    names = {
        (kind, precision, seed): f"{kind}-{precision or 'float32'}-{lr:g}-s{seed}"
        for kind, precision, seed in product(KINDS, PRECISIONS, SEEDS)
    }
    done = trainings.run(
        {
            names[kind, precision, seed]: config(data, kind, precision, lr, seed)
            for kind, precision, seed in names
        }
    )
    return {
        (kind, precision): [done[names[kind, precision, seed]] for seed in SEEDS]
        for kind, precision in product(KINDS, PRECISIONS)
    }


def table(runs: Trained) -> Cells:
    """A row for each optimizer and precision; differences are those to its own float32, seed by seed."""
    cells = [["", "iterates in", "loss", "to float32", "±", *(f"seed {seed}" for seed in SEEDS)]]
    for (kind, precision), of_seeds in runs.items():
        losses = [run.loss for run in of_seeds]
        full = [run.loss for run in runs[kind, None]]
        apart = [one - other for one, other in zip(losses, full, strict=True)]
        beside = ["", ""] if precision is None else [f"{mean(apart):+.4f}", f"{standard_error(apart):.4f}"]
        each = [f"{loss:.4f}" for loss in losses]
        cells.append([LABELS[kind], precision or "float32", f"{mean(losses):.4f}", *beside, *each])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="DIR", required=True, help="train.bin, val.bin of bytes")
    parser.add_argument("--lr", type=float, metavar="X", default=0.02)
    add_arguments(parser, "runs/half")
    args = parser.parse_args()
    try:
        runs = trained(trainings_of(args), args.text, args.lr)
    except Stopped as stopped:
        print(stopped)
        return
    tell({"half": ("Half precision, emulated", table(runs))}, args.page)


if __name__ == "__main__":
    main()
