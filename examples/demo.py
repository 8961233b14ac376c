"""A minute of training with the paper's three optimizers, on the bytes of Python's own library.

Every optimizer sees the same batches from the same start. Printed: the validation loss, how often the
cached transform was good enough, what the orthogonalization cost, and the seconds of an optimizer step.
"""

import pathlib
import sysconfig
import time

import torch
from torch import nn
from torch.nn import functional as F

from cachemuon import POLAR_EXPRESS, CacheMuon, GramNS, Muon, StandardNS, param_groups

WIDTH, LAYERS, CONTEXT, BATCH, STEPS = 128, 3, 64, 32, 150


class ByteGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = dict(
            dim_feedforward=4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def corpus() -> torch.Tensor:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def loss_of(model: nn.Module, data: torch.Tensor, seed: int) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    windows = data[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(make, data: torch.Tensor) -> tuple[float, dict, float]:
    torch.manual_seed(0)
    model, split = ByteGPT(), len(data) * 9 // 10
    optimizer = make(param_groups(model, adam=dict(lr=2e-3)))
    seconds = 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:  # a linear decay over the second half
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * min(1.0, 2 * (1 - step / STEPS))
        optimizer.zero_grad()
        loss_of(model, data[:split], seed=step).backward()
        start = time.perf_counter()
        optimizer.step()
        seconds += time.perf_counter() - start
    with torch.no_grad():
        loss = sum(loss_of(model, data[split:], seed=i).item() for i in range(8)) / 8
    return loss, optimizer.cache_stats(), seconds / STEPS


def main() -> None:
    optimizers = {
        "PolarExpMuon": lambda p: Muon(p, lr=0.02, solver=StandardNS(POLAR_EXPRESS)),
        "GramMuon": lambda p: Muon(p, lr=0.02, solver=GramNS()),
        "CacheMuon, paper, gamma=5": lambda p: CacheMuon.paper(p, lr=0.02, gamma=5.0),
        "CacheMuon, sketch, gamma=5": lambda p: CacheMuon(p, lr=0.02, gamma=5.0),
    }
    data = corpus()
    print(
        f"{len(data) / 1e6:.1f} MB of Python sources, {LAYERS} blocks of width {WIDTH}, {STEPS} steps each\n"
    )
    print(f"{'':28}{'validation':>12}{'hits':>8}{'FLOPs of GramMuon':>20}{'optimizer step':>16}")
    rows = {
        name: train(make, data)
        for name, make in optimizers.items()
        if print(f"  {name} ...", end="\r") is None
    }
    gram = rows["GramMuon"][1]["flops"]
    for name, (loss, stats, seconds) in rows.items():
        hits = f"{stats['hit_rate']:.0%}" if name.startswith("Cache") else "-"
        print(f"{name:28}{loss:>12.4f}{hits:>8}{stats['flops'] / gram:>20.0%}{seconds * 1e3:>13.1f} ms")
    print(
        "\nFLOPs are the matrix products of the orthogonalization, as executed. One seed: differences of 0.02"
    )
    print("in the loss are noise. README.md has the five lines that put CacheMuon into your own training.")


if __name__ == "__main__":
    main()
