"""A loop like nanoGPT's: gradient accumulation, warm-up and cosine by hand, autocast, GradScaler.

Run `python examples/nanogpt_loop.py`. `param_groups` takes the place of the model's `configure_optimizers`.
"""

import math
from contextlib import nullcontext

import torch
import toy

from cachemuon import CacheMuon, param_groups


def scale_of(step: int, warmup: int, steps: int, least: float = 0.1) -> float:
    """The part of each group's own learning rate that is used at a step."""
    if step < warmup:
        return (step + 1) / warmup
    return least + (1 - least) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def main(steps: int = 20, warmup: int = 4, accumulation: int = 4) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, torch.float16) if device == "cuda" else nullcontext()
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    model = toy.GPT().to(device)
    groups = param_groups(model, muon=dict(weight_decay=0.1), adam=dict(lr=2e-3, betas=(0.9, 0.95)))
    optimizer = CacheMuon(groups, lr=0.03)
    rates = [group["lr"] for group in optimizer.param_groups]  # Muon's and Adam's differ, and stay apart

    losses = []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale_of(step, warmup, steps)
        for micro in range(accumulation):
            tokens, targets = toy.batch(step * accumulation + micro, size=4)
            with autocast:
                loss = toy.loss_of(model, tokens.to(device), targets.to(device)) / accumulation
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * accumulation)
        if step % 5 == 4:
            told = optimizer.metrics()
            hits, saved = told["muon/hit_rate"], told["muon/flops_saved"]
            print(f"step {step + 1}: loss {losses[-1]:.3f}, {hits:.0%} hits, {saved:.0%} of the FLOPs saved")
    return {"losses": losses, "metrics": told, "optimizer": optimizer, "rates": rates}


if __name__ == "__main__":
    main()
