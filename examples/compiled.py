"""torch.compile: the model is compiled, the step runs as it is.

Run `python examples/compiled.py`; the first step takes some seconds.

The optimizer's step is not compiled: its time is in batched products, where a compiler has nothing to gain. A
compiled function may call it all the same.
"""

import time

import torch
import toy
from torch import nn

from cachemuon import CacheMuon, param_groups


def main(steps: int = 20, backend: str = "inductor") -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(toy.VOCABULARY, toy.WIDTH),
        nn.Linear(toy.WIDTH, 4 * toy.WIDTH),
        nn.GELU(),
        nn.Linear(4 * toy.WIDTH, toy.WIDTH),
        nn.Linear(toy.WIDTH, toy.VOCABULARY),
    )
    compiled = torch.compile(model, backend=backend)
    # `compiled` would do as well: `param_groups` sees through the wrapper.
    optimizer = CacheMuon(param_groups(model, adam=dict(lr=5e-3)), lr=0.05)
    losses, seconds = [], []
    for number in range(steps):
        start = time.perf_counter()
        loss = toy.loss_of(compiled, *toy.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    stats = optimizer.cache_stats()
    print(f"first step {seconds[0]:.1f} s, with compiling; last {seconds[-1] * 1000:.0f} ms")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {stats['hits']} of {stats['calls']} directions cached")
    return {"losses": losses, "stats": stats}


if __name__ == "__main__":
    main()
