"""Weights & Biases: metrics() is a flat dict of numbers, which `run.log` takes as it is.

Run `python examples/wandb_offline.py`. Offline, nothing needs a network; `wandb sync runs/wandb/offline-
run-*` uploads it later, if you like.
"""

from pathlib import Path

import toy
import wandb

from cachemuon import CacheMuon, param_groups


def main(folder: str = "runs", steps: int = 15) -> dict:
    Path(folder).mkdir(parents=True, exist_ok=True)
    model = toy.GPT(layers=1)
    optimizer = CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)
    with wandb.init(project="cachemuon", dir=folder, mode="offline") as run:  # or WANDB_MODE=offline
        for number in range(steps):
            loss = toy.loss_of(model, *toy.batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": loss.item(), **optimizer.metrics()})
        summary = dict(run.summary)
    print(f"loss {summary['loss']:.2f}, {summary['muon/flops_saved']:.0%} of the last step's FLOPs saved")
    return {"summary": summary}


if __name__ == "__main__":
    main()
