"""What Nesterov's update does to the cache: hits and residuals of one training, with and without it."""

import statistics

import torch
from momentum import GPT, corpus
from torch.nn import functional as F

from cachemuon import CacheMuon, param_groups

WIDTH, DEPTH, CONTEXT, BATCH, STEPS = 192, 2, 64, 16, 120


def train(nesterov: bool) -> tuple[float, list[float], float]:
    """The hit rate, the residual of every probe, and the mean loss of the last 20 steps."""
    torch.manual_seed(0)
    model, data = GPT(WIDTH, DEPTH, CONTEXT), corpus()
    optimizer = CacheMuon(param_groups(model, adam={"lr": 2e-3}), lr=0.02, gamma=5.0, nesterov=nesterov)
    residuals, losses = [], []
    for _ in range(STEPS):
        windows = data[torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        residuals += [e.residual for e in optimizer.events().values() if e.outcome in ("hit", "residual")]
    return optimizer.cache_stats()["hit_rate"], residuals, statistics.mean(losses[-20:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'nesterov':10}{'hits':>8}{'median residual':>18}{'training loss':>16}")
    for nesterov in (False, True):
        hit_rate, residuals, loss = train(nesterov)
        print(f"{nesterov!s:10}{hit_rate:>8.0%}{statistics.median(residuals):>18.2f}{loss:>16.4f}")


if __name__ == "__main__":
    main()
