"""A mixture of experts: 3-D weights are stacks of matrices, each with its own cache; the router is Adam's.

Run `python examples/mixture_of_experts.py`.
"""

import torch
import toy
from torch import Tensor, nn

from cachemuon import CacheMuon, param_groups

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    """Every token goes to the CHOSEN experts that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(toy.WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, toy.WIDTH, 2 * toy.WIDTH) / toy.WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * toy.WIDTH, toy.WIDTH) / (2 * toy.WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        liking, best = self.router(x).softmax(-1).topk(CHOSEN, dim=-1)
        gates = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, best, liking)
        hidden = nn.functional.gelu(torch.einsum("btd,edh->beth", x, self.up))  # all experts, for brevity
        return torch.einsum("beth,ehd,bte->btd", hidden, self.down, gates)


def main(steps: int = 20) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(toy.VOCABULARY, toy.WIDTH),
        nn.RMSNorm(toy.WIDTH),
        Experts(),
        nn.RMSNorm(toy.WIDTH),
        nn.Linear(toy.WIDTH, toy.VOCABULARY),
    )
    # A router is no hidden layer: its rows compete, and equal steps for all of them are not what it wants.
    groups = param_groups(model, adam=dict(lr=2e-3))
    print(groups)
    optimizer = CacheMuon(groups, lr=0.02)
    losses = []
    for number in range(steps):
        loss = toy.loss_of(model, *toy.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    stats = optimizer.cache_stats()
    for name, entry in stats["matrices"].items():  # "2.up[0]", ...: each expert on its own
        print(f"{name:10} {entry['hits']} of {entry['calls']} directions were cached")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return {"losses": losses, "stats": stats, "routes": groups.routes}


if __name__ == "__main__":
    main()
