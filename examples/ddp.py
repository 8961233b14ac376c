"""DistributedDataParallel: ranks share the solves.

Run `torchrun --nproc-per-node 2 examples/ddp.py`.

Each matrix has an owner rank, which solves for it and sends the transform to the others; all of them apply
it. From 4 ranks on the owner sends the direction instead.
"""

import gc

import torch
import toy
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cachemuon import CacheMuon, param_groups


def main(steps: int = 15) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(toy.GPT())
    # After wrapping, so that `param_groups` finds the ranks; elsewhere: CacheMuon(..., process_group=group).
    optimizer = CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)
    losses = []
    for number in range(steps):
        loss = toy.loss_of(model, *toy.batch(number * world + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    stats = optimizer.cache_stats()  # does not wait for other ranks: each knows all outcomes
    share, sent = stats["flops_here"] / stats["flops"], stats["bytes_sent"]["transforms"]
    weight = model.module.blocks[0].up.weight.detach()
    first = weight.clone()
    dist.broadcast(first, src=0)
    print(
        f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['hit_rate']:.0%} hits, "
        f"{share:.0%} of all FLOPs, {sent} bytes of transforms sent, "
        f"weights as on rank 0: {torch.equal(weight, first)}\n",
        end="",
    )


if __name__ == "__main__":
    main()
    # The wrapped model is in a reference cycle. While it lives, so do gloo's threads, and one of them that
    # lets go of a tensor while the interpreter ends makes the process abort.
    gc.collect()
    dist.destroy_process_group()
