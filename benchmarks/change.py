"""A training whose text changes abruptly half way, with CacheMuon and with GramMuon: losses at both ends.

    python benchmarks/change.py [--width 256] [--depth 2] [--steps 400] [--seeds 1]

A GPT predicts the bytes of the running Python's sources (momentum.py). Half way every byte is renamed by a
random permutation of the alphabet, so that cached transforms meet gradients that they were never made for.
The learning rate is constant. One thread. docs/notebook/log.md has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from momentum import GPT, corpus
from torch.nn import functional as F

from cachemuon import CacheMuon, GramNS, Muon, param_groups
from cachemuon_lab.performance import Cells, to_markdown

CONTEXT, BATCH, LR, LAST = 128, 8, 0.04, 25
MAKERS: dict[str, Callable[..., Any]] = {"GramMuon": partial(Muon, solver=GramNS()), "CacheMuon": CacheMuon}


def losses(
    make: Callable[..., Any], width: int, depth: int, steps: int, seed: int
) -> tuple[list[float], Any]:
    """The loss at each step, and the optimizer's statistics at its end."""
    torch.manual_seed(seed)
    data, window = corpus(), torch.arange(CONTEXT + 1)
    renamed = torch.randperm(256)
    model = GPT(width, depth, CONTEXT)
    groups = param_groups(model, adam={"lr": 2e-3})
    optimizer = make(groups, lr=LR, momentum=0.9, weight_decay=1e-4, nesterov=True, adjust_lr_fn="none")
    found = []
    for step in range(steps):
        tokens = data[torch.randint(len(data) - CONTEXT, (BATCH, 1)) + window].long()
        tokens = tokens if step < steps // 2 else renamed[tokens]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, optimizer.cache_stats()


def table(width: int, depth: int, steps: int, seeds: int) -> Cells:
    """A row for each optimizer and seed: mean losses before the change, after it, and at the end."""
    half = steps // 2
    cells = [["", "seed", "before", f"{LAST} steps after", "at the end", "hits", "bounded"]]
    for seed in range(1, seeds + 1):
        for name, make in MAKERS.items():
            found, stats = losses(make, width, depth, steps, seed)
            bounded = sum(one["misses"].get("bounded", 0) for one in stats["matrices"].values())
            ends = (half, half + LAST, steps)
            shown = [f"{fmean(found[end - LAST : end]):.3f}" for end in ends]
            cells.append([name, str(seed), *shown, f"{stats['hit_rate']:.0%}", str(bounded)])
            print(*cells[-1], flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(to_markdown(table(args.width, args.depth, args.steps, args.seeds)))


if __name__ == "__main__":
    main()
