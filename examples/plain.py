"""Plain PyTorch: a schedule, gradient clipping, a checkpoint that is resumed exactly, TensorBoard.

Run `python examples/plain.py`, then `tensorboard --logdir runs/plain`.
"""

from pathlib import Path

import torch
import toy
from torch.utils.tensorboard import SummaryWriter

from cachemuon import CacheMuon, param_groups


def make(steps: int) -> dict:
    model = toy.GPT()
    optimizer = CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)
    # A scheduler multiplies the lr of every group: Muon's and Adam's keep their proportion.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(parts: dict, numbers: range, writer: SummaryWriter) -> list[float]:
    model, optimizer, scheduler = parts.values()
    losses = []
    for number in numbers:
        loss = toy.loss_of(model, *toy.batch(number))
        loss.backward()
        # Muon's direction has no scale. Clipping still says how much a step weighs in the momentum, and
        # Adam's parameters need it as ever.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        writer.add_scalar("loss", losses[-1], number)
        if number % 5 == 4:  # they count since the last call, so call them as often as you log
            for name, value in optimizer.metrics().items():
                writer.add_scalar(name, value, number)
    return losses


def main(folder: str = "runs/plain", steps: int = 20) -> dict:
    half, file = steps // 2, Path(folder) / "half.pt"
    with SummaryWriter(folder) as writer:
        parts = make(steps)
        losses = train(parts, range(half), writer)
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        losses += train(parts, range(half, steps), writer)

        resumed = make(steps)
        for name, state in torch.load(file, weights_only=True).items():
            resumed[name].load_state_dict(state)
        again = train(resumed, range(half, steps), writer)

    print(parts["optimizer"].explain())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; resumed at step {half}: {again[-1]:.2f}")
    return {"losses": losses, "again": again, "parts": parts, "resumed": resumed}


if __name__ == "__main__":
    main()
