"""nanoGPT's training loop with CacheMuon: learning-rate schedule, accumulation, autocast, GradScaler, resume.

Run `python examples/nanogpt_loop.py`. `param_groups` takes the place of the model's `configure_optimizers`.
nanoGPT's loop writes one learning rate into all groups, and stays as it is: `lr_ratio` gives Adam a share of
it. `python examples/nanogpt_loop.py scaled` scales the learning rate that each group was made with instead.
"""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import toy

from cachemuon import CacheMuon, param_groups

learning_rate, min_lr, warmup_iters, lr_decay_iters = 0.03, 0.003, 4, 20
gradient_accumulation_steps, grad_clip, log_interval = 4, 1.0, 5
device = "cuda" if torch.cuda.is_available() else "cpu"


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + (1 + math.cos(math.pi * decay_ratio)) / 2 * (learning_rate - min_lr)


def make(scaled: bool) -> tuple[torch.nn.Module, CacheMuon]:
    model = toy.GPT().to(device)
    adam = dict(lr=2e-3) if scaled else dict(lr_ratio=2e-3 / learning_rate)
    groups = param_groups(model, muon=dict(weight_decay=0.1), adam=dict(betas=(0.9, 0.95), **adam))
    return model, CacheMuon(groups, lr=learning_rate)


def set_lr(optimizer: CacheMuon, lr: float, scaled: bool) -> None:
    for param_group in optimizer.param_groups:
        if scaled:  # `initial_lr` is saved with the state
            own = param_group.setdefault("initial_lr", param_group["lr"])
            param_group["lr"] = own * lr / learning_rate
        else:
            param_group["lr"] = lr


def train(model: torch.nn.Module, optimizer: CacheMuon, iterations: range, scaled: bool) -> list[float]:
    context = torch.autocast(device, torch.float16) if device == "cuda" else nullcontext()
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    losses = []
    for iter_num in iterations:
        set_lr(optimizer, get_lr(iter_num), scaled)
        for micro_step in range(gradient_accumulation_steps):
            tokens, targets = toy.batch(iter_num * gradient_accumulation_steps + micro_step, size=4)
            with context:
                loss = toy.loss_of(model, tokens.to(device), targets.to(device))
                loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * gradient_accumulation_steps)
        if (iter_num + 1) % log_interval == 0:
            metrics = optimizer.metrics()
            hits, saved = metrics["muon/hit_rate"], metrics["muon/flops_saved"]
            told = f"{hits:.0%} hits, {saved:.0%} of the FLOPs saved"
            print(f"iter {iter_num + 1}: loss {losses[-1]:.3f}, {told}")
    return losses


def main(folder: str = "runs/nanogpt", steps: int = 20, scaled: bool = False) -> dict:
    half, file = steps // 2, Path(folder) / "ckpt.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    model, optimizer = make(scaled)
    losses = train(model, optimizer, range(half), scaled)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses += train(model, optimizer, range(half, steps), scaled)

    checkpoint = torch.load(file, weights_only=True)
    resumed, other = make(scaled)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    again = train(resumed, other, range(half, steps), scaled)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; resumed at iteration {half}: {again[-1]:.2f}")
    return {"losses": losses, "again": again, "optimizer": other, "stats": other.cache_stats()}


if __name__ == "__main__":
    main(scaled="scaled" in sys.argv)
