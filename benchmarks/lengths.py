"""How long accepted cached directions are in training: spectral norms, with and without the trust region.

    python benchmarks/lengths.py --text DIR [--lr 0.06] [--momentum 0.9] [--out runs/lengths]

The training is that of docs/notebook/search.md's text, `DIR` has its `train.bin` and `val.bin` of bytes. At
every fourth step the direction of each matrix is computed once more, and its singular values. Called again,
finished runs are read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig
from cachemuon_lab.performance import to_markdown
from cachemuon_lab.recipes import recipe
from cachemuon_lab.train import train

VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "max_norm=None": ("optimizer.max_norm=none",),
    "clip=1/16, max_norm=None": ("optimizer.clip=0.0625", "optimizer.max_norm=none"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", type=Path, metavar="DIR", required=True, help="train.bin and val.bin of bytes"
    )
    parser.add_argument("--lr", type=float, default=0.06)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/lengths"))
    args = parser.parse_args()
    optimizer = OptimizerConfig("cache", lr=args.lr, momentum=args.momentum, nesterov=True, normalize=None)
    measured = (f"data.path={args.text}", "diagnostics=gate", "diagnose_every=4")
    cells = [["", "hits", "measured", "median", "90%", "99%", "largest", "cosine", "validation loss"]]
    for number, (name, settings) in enumerate(VARIANTS.items()):
        config = configure(recipe("gpt2-mini"), optimizer, (*measured, *settings))
        run = train(config, args.out / f"{args.lr:g}-{args.momentum:g}-{number}", resume=True)
        accepted = [line for line in run.probes if line["accepted"]]
        norms = [line["norm"] for line in accepted]
        quantiles = [f"{value:.2f}" for value in np.quantile(norms, (0.5, 0.9, 0.99, 1))]
        cells.append(
            [
                name,
                f"{run.hit_rate:.0%}",
                f"{len(norms):,}",
                *quantiles,
                f"{np.median([line['cosine'] for line in accepted]):.2f}",
                f"{run.validations[-1]['loss']:.4f}",
            ]
        )
    print(to_markdown(cells))


if __name__ == "__main__":
    main()
