"""Momentum of a small GPT in training, for benchmarks that need real matrices.

The GPT predicts the bytes of the running Python's standard-library sources and is trained with
`cachemuon.Muon` and its EMA momentum of 0.95. `record` returns the momentum of every matrix at the
steps asked for. Nothing is downloaded or written.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cachemuon import Muon, param_groups

VOCABULARY = 256
HEAD = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, d // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, HEAD)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position_embed = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position_embed.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> Tensor:
    """The standard library's top-level sources, in the order of their names, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def record(
    width: int = 192,
    depth: int = 2,
    steps: Iterable[int] = (5, 20, 40),
    *,
    seed: int = 0,
    batch: int = 8,
    context: int = 128,
    lr: float = 0.02,
    losses: list[float] | None = None,
) -> dict[int, dict[str, Tensor]]:
    """The momentum of each matrix by name, after each of `steps`: `record(...)[20]["blocks.0.qkv"]`.

    Matrices are `(out, in)`, as `nn.Linear` holds them. The same arguments give the same matrices on one
    machine; the global random state and number of threads are left as they were. `losses`, if given, gets
    the training loss of every step.
    """
    if width % HEAD:
        raise ValueError(f"width must be a multiple of {HEAD}, got {width}")
    wanted = set(steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the order of the sums depends on the number of cores
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _train(GPT(width, depth, context), wanted, batch, context, lr, losses)
    finally:
        torch.set_num_threads(threads)


def _train(
    model: GPT, wanted: set[int], batch: int, context: int, lr: float, losses: list[float] | None
) -> dict[int, dict[str, Tensor]]:
    data, window = corpus(), torch.arange(context + 1)
    groups = param_groups(model, adam={"lr": 2e-3})
    opt = Muon(groups, lr=lr, nesterov=False, weight_decay=1e-4, adjust_lr_fn="none")
    modules = model.blocks.named_modules(prefix="blocks")
    matrices = {name: module.weight for name, module in modules if isinstance(module, nn.Linear)}
    recorded = {}
    for step in range(1, max(wanted) + 1):
        start = torch.randint(len(data) - context, (batch, 1))
        tokens = data[start + window].long()  # (batch, context + 1)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if losses is not None:
            losses.append(loss.item())
        if step in wanted:
            recorded[step] = {name: opt.state[w]["momentum_buffer"].clone() for name, w in matrices.items()}
    return recorded
