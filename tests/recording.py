"""Real gradients: a small byte-level GPT trained for a while on a source file of Python's own library."""

import functools
import inspect
import pydoc

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    def __init__(self, width=32, layers=2, context=32):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, step, batch=16, context=32):
    text = torch.frombuffer(bytearray(inspect.getsource(pydoc), "utf8"), dtype=torch.uint8).long()
    starts = torch.randint(
        len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(step)
    ) + torch.arange(context + 1)
    windows = text[starts]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@functools.cache
def recorded_gradients(steps=60, width=32):
    """`{name: (initial weight, [gradient of each step])}` of the hidden matrices, in float32."""
    torch.manual_seed(0)
    model = ByteGPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hidden = {name: p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks")}
    start = {name: p.detach().clone() for name, p in hidden.items()}
    gradients = {name: [] for name in hidden}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for name, p in hidden.items():
            gradients[name].append(p.grad.clone())
        optimizer.step()
    return {name: (start[name], gradients[name]) for name in hidden}


def recorded_momentum(momentum=0.95, steps=60, width=32):
    """The EMA momentum of each hidden matrix after the last recorded step."""
    result = {}
    for name, (_, gradients) in recorded_gradients(steps, width).items():
        M = torch.zeros_like(gradients[0])
        for g in gradients:
            M = momentum * M + (1 - momentum) * g
        result[name] = M
    return result
