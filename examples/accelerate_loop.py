"""accelerate: gradient accumulation, metrics, save_state and load_state.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Prepare the model first: under DDP `param_groups` then finds the ranks, and they share the solves. Plugins
that shard want model and optimizer in one call of `prepare`; CacheMuon recognizes sharded parameters by
itself.
"""

import torch
import toy
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from cachemuon import CacheMuon, param_groups


def make(accelerator: Accelerator):
    model = accelerator.prepare(toy.GPT())
    muon = CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)
    data = TensorDataset(*(torch.cat(part) for part in zip(*map(toy.batch, range(20)), strict=True)))
    # `optimizer` wraps `muon`, and has only what torch's optimizers have. For metrics(), explain() and
    # cache_stats() keep the name `muon`, or say `optimizer.optimizer`.
    optimizer, loader = accelerator.prepare(muon, DataLoader(data, batch_size=8))
    return model, optimizer, muon, loader


def train(accelerator: Accelerator, model, optimizer, muon: CacheMuon, loader) -> list[float]:
    losses = []
    for tokens, targets in loader:
        with accelerator.accumulate(model):  # every second batch, step() really steps
            loss = toy.loss_of(model, tokens, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    metrics = muon.metrics()
    accelerator.log(metrics)  # to the trackers of Accelerator(log_with=...), where there are some
    told = f"{metrics['muon/hit_rate']:.0%} hits, {metrics['muon/flops_saved']:.0%} of the FLOPs saved"
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {told}")
    return losses


def main(folder: str = "runs/accelerate") -> dict:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    parts = make(accelerator)
    train(accelerator, *parts)
    accelerator.save_state(folder)
    losses, stats = train(accelerator, *parts), parts[2].cache_stats()
    accelerator.load_state(folder)
    again, stats_again = train(accelerator, *parts), parts[2].cache_stats()
    accelerator.print(f"the same losses after load_state: {again == losses}")
    accelerator.end_training()
    return {"losses": losses, "again": again, "stats": stats, "stats_again": stats_again}


if __name__ == "__main__":
    main()
