"""FSDP2: sharded parameters and momentum, and a checkpoint of torch.distributed.checkpoint.

Run `torchrun --nproc-per-node 2 examples/fsdp2.py`.

The owner rank of a matrix gathers its update, orthogonalizes it, and sends each rank its part of the
direction. The checkpoint can be loaded by any number of ranks.
"""

import sys

import toy
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cachemuon import CacheMuon, param_groups


def make(seed: int, mesh):
    model = toy.GPT(seed=seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)  # after sharding


def train(model, optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = toy.loss_of(model, *toy.batch(number * dist.get_world_size() + dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str = "runs/fsdp2", steps: int = 14) -> None:
    dist.init_process_group("gloo")
    mesh, half = init_device_mesh("cpu", (dist.get_world_size(),)), steps // 2
    model, optimizer = make(0, mesh)
    losses = train(model, optimizer, range(half))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(states, checkpoint_id=folder)
    losses += train(model, optimizer, range(half, steps))

    model, optimizer = make(1, mesh)  # another start, which the checkpoint replaces
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    again = train(model, optimizer, range(half, steps))

    if dist.get_rank() == 0:
        stats = optimizer.cache_stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['hit_rate']:.0%} hits")
        print(f"resumed at step {half}: {again[-1]:.3f}, the same losses: {again == losses[half:]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])  # the folder of the checkpoint
