"""What Nesterov's update does to the cache: hits and residuals of one training, with and without it."""

import statistics
from typing import Any

import torch
from momentum import GPT, corpus
from torch.nn import functional as F

from cachemuon import CacheMuon, param_groups
from cachemuon_lab.diagnostics import PROBED

WIDTH, DEPTH, CONTEXT, BATCH, STEPS = 192, 2, 64, 16, 120

SETTINGS: dict[str, dict[str, Any]] = {
    "clip=0, gamma=5": {"clip": 0.0, "max_age": None, "gamma": 5.0, "gate": "residual"},
    "defaults": {},
}


def train(nesterov: bool, settings: dict[str, Any]) -> tuple[float, list[float], float]:
    """The hit rate, the residual of every probe, and the mean loss of the last 20 steps."""
    torch.manual_seed(0)
    model, data = GPT(WIDTH, DEPTH, CONTEXT), corpus()
    groups = param_groups(model, adam={"lr": 2e-3})
    shared = {"lr": 0.02, "weight_decay": 1e-4, "adjust_lr_fn": "none", "nesterov": nesterov}
    optimizer = CacheMuon(groups, **shared, **settings)
    residuals, losses = [], []
    for _ in range(STEPS):
        windows = data[torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        residuals += [e.residual for e in optimizer.events().values() if e.outcome in PROBED]
    return optimizer.cache_stats()["hit_rate"], residuals, statistics.mean(losses[-20:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'settings':18}{'nesterov':10}{'hits':>8}{'median residual':>18}{'training loss':>16}")
    for name, settings in SETTINGS.items():
        for nesterov in (False, True):
            hit_rate, residuals, loss = train(nesterov, settings)
            told = f"{hit_rate:>8.0%}{statistics.median(residuals):>18.2f}{loss:>16.4f}"
            print(f"{name:18}{nesterov!s:10}{told}")


if __name__ == "__main__":
    main()
