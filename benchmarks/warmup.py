"""Residuals of cached directions in the first 500 steps of a training with warm-up, raw and repaired.

    python benchmarks/warmup.py [--width 256] [--depth 2] [--steps 500] [--warmup 100]

A GPT predicts the bytes of the running Python's sources (momentum.py). `CacheMuon` with its defaults trains
it; the learning rate grows linearly during the warm-up and is constant afterwards. At every step the residual
of each cached direction is measured twice: of `Q X` as it is, exactly, and of the repaired direction, as the
optimizer estimates it. docs/faq.md has the table.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from statistics import median

import torch
from momentum import GPT, corpus
from torch.nn import functional as F

from cachemuon import CacheMuon, exact_residual, normalize, param_groups
from cachemuon_lab.performance import to_markdown

CONTEXT, BATCH, LR = 128, 8, 0.04


def residuals(width: int, depth: int, steps: int, warmup: int) -> list[dict[str, list[float]]]:
    """The residuals of all cached directions at each step, "raw" and "repaired", and the number "bounded"."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, window = corpus(), torch.arange(CONTEXT + 1)
    model = GPT(width, depth, CONTEXT)
    groups = param_groups(model, adam={"lr": 2e-3})
    optimizer = CacheMuon(groups, lr=LR, momentum=0.9, weight_decay=1e-4, adjust_lr_fn="none")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup))
    found = []
    for _ in range(steps):
        tokens = data[torch.randint(len(data) - CONTEXT, (BATCH, 1)) + window].long()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        raw = {
            name: value for group in optimizer.param_groups for name, value in unrepaired(optimizer, group)
        }
        optimizer.step()
        schedule.step()
        cached = {name: event for name, event in optimizer.events().items() if name in raw}
        cached = {name: one for name, one in cached.items() if one.outcome in ("hit", "bounded")}
        found.append(
            {
                "raw": [raw[name] for name in cached],
                "repaired": [event.residual for event in cached.values()],
                "bounded": [1.0 for event in cached.values() if event.outcome == "bounded"],
            }
        )
    return found


def unrepaired(optimizer: CacheMuon, group: dict) -> list[tuple[str, float]]:
    """The residuals of `Q X` of the matrices of a group, for the step that comes next."""
    if not group["use_muon"]:
        return []
    found, weight = [], 1 - group["momentum"] ** 2  # of the gradient in Nesterov's update
    for name, W in zip(group["param_names"], group["params"], strict=True):
        state = optimizer.state.get(W, {})
        if "transform" in state:
            X = normalize(torch.lerp(state["momentum_buffer"], W.grad, weight))
            X = X if X.shape[0] <= X.shape[1] else X.mT
            found.append((name, exact_residual(state["transform"] @ X).item()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=100)
    args = parser.parse_args()
    found = residuals(args.width, args.depth, args.steps, args.warmup)
    bounds = sorted({0, min(10, args.steps), args.warmup, args.steps})
    cells = [["steps", "raw, median", "largest", "repaired, median", "largest", "bounded"]]
    for begin, end in pairwise(bounds):
        some = found[begin:end]
        row = [f"{begin + 1} to {end}"]
        for kind in ("raw", "repaired"):
            values = [value for step in some for value in step[kind]]
            row += [f"{median(values):.2f}", f"{max(values):.1f}"]
        bounded, cached = (sum(len(step[kind]) for step in some) for kind in ("bounded", "raw"))
        cells.append([*row, f"{bounded} of {cached}"])
    print(to_markdown(cells))


if __name__ == "__main__":
    main()
