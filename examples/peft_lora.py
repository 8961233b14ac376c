"""LoRA with peft: what Muon means for thin factors, and what the cache does there (nothing).

Run `python examples/peft_lora.py`.

LoRA trains W + B A with B (d x r) and A (r x d), r much smaller than d. Muon's step for a factor is the polar
factor of its momentum: all r directions of A, and of B, move equally far. The step of the product B A is no
polar factor: it is dB A + B dA, and its length depends on A and B.

A solve for an r x d matrix has r x r and r x d products only, here less than a hundredth of one for d x d.
There is nothing to save, and by default such a matrix is not cached: CacheMuon then does the same FLOPs as
Muon.

Use it where a recipe has Muon already and LoRA should keep to it, or to try steps of equal length in all r
directions. AdamW is the usual choice for LoRA: start with that. CacheMuon is for training or fine-tuning
whole weights.
"""

import torch
import toy
from peft import LoraConfig, get_peft_model

from cachemuon import CacheMuon, param_groups


def muon(model: torch.nn.Module) -> CacheMuon:
    # Frozen weights are left out. No decay: it would pull the product towards 0, which is the base model.
    return CacheMuon(param_groups(model, muon=dict(weight_decay=0.0)), lr=0.02)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)


def train(make_optimizer, steps: int):
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["qkv", "out", "up", "down"])
    model = get_peft_model(toy.GPT(), config)
    optimizer = make_optimizer(model)
    losses = []
    for number in range(steps):
        loss = toy.loss_of(model, *toy.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def main(steps: int = 30) -> dict:
    losses, optimizer = train(muon, steps)
    adams, _ = train(adamw, steps)
    print(optimizer.explain())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} with Muon, {adams[0]:.2f} -> {adams[-1]:.2f} with AdamW")
    return {"losses": losses, "adams": adams, "optimizer": optimizer}


if __name__ == "__main__":
    main()
