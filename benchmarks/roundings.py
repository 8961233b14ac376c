"""What a cached direction loses where its transform is kept in fewer bits.

    python benchmarks/roundings.py [--width 768] [--steps 20 60]

On the momentum of a one-block GPT in training (momentum.py): a transform is made at each of the steps,
rounded, and applied some steps later, in float32. On made matrices whose spectrum is the worst for it: a few
long directions, and all others so short that Q amplifies them as much as it can, 800 times. And in a training
of two blocks with `CacheMuon`, for each of two seeds. docs/notebook/memory.md has the tables.
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean, median
from typing import Any

import torch
from momentum import GPT, corpus, record
from spectra import measured
from torch import Tensor
from torch.nn import functional as F

from cachemuon import CacheGNS, CacheMuon, GramNS, param_groups
from cachemuon_lab.performance import Cells, to_markdown

AGES = (1, 3, 6, 10)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SPECTRA = {"one long, others 1e-4": (1, 1e-4), "four long, others 1e-3": (4, 1e-3)}
SEEDS = (0, 1)
TRAINING = 200


def rounded(before: Tensor, now: Tensor, step: int) -> dict[str, tuple[float, ...]]:
    """By the dtype of the transform that `before` has left: of the clipped direction the residual, the
    largest singular value, the cosine to the fresh one, and how far off it is from that of float32.
    """
    _, Q = GramNS().with_transform(before)
    fresh, solver = GramNS()(now), CacheGNS(clip=None, max_norm=None)
    full, found = solver(now, Q, math.inf, step=step)[0], {}
    for name, dtype in DTYPES.items():
        D = solver(now, Q.to(dtype).to(Q.dtype), math.inf, step=step)[0]
        residual, top, _, cosine = measured(D, fresh)
        off = torch.linalg.vector_norm(D - full) / torch.linalg.vector_norm(full)
        found[name] = residual, top, cosine, off.item()
    return found


def on_momentum(width: int, steps: list[int]) -> Cells:
    """A row for each age and each dtype, over all matrices and steps."""
    momentum = record(width, 1, {step + age for step in steps for age in (0, *AGES)}, batch=4)
    heads = ["age", "transform", "residual, median", "largest", "largest singular value", "cosine, median"]
    cells = [[*heads, "least", "off, median", "largest"]]
    for age in AGES:
        found = [
            rounded(before, momentum[start + age][name], start + age)
            for start in steps
            for name, before in momentum[start].items()
        ]
        for dtype in DTYPES:
            residuals, tops, cosines, offs = zip(*(one[dtype] for one in found), strict=True)
            lengths = [f"{median(residuals):.3f}", f"{max(residuals):.2f}", f"{max(tops):.2f}"]
            angles = [f"{median(cosines):.4f}", f"{min(cosines):.4f}"]
            cells.append([str(age), dtype, *lengths, *angles, f"{median(offs):.1%}", f"{max(offs):.1%}"])
    return cells


def on_made(n: int = 256, m: int = 512) -> Cells:
    """A row for each spectrum and each dtype. The matrix is the same as when its transform was made."""
    cells = [["singular values", "transform", "largest singular value", "cosine", "off"]]
    generator = torch.Generator().manual_seed(0)
    for title, (number, rest) in SPECTRA.items():
        U, V = (torch.linalg.qr(torch.randn(side, n, generator=generator)).Q for side in (n, m))
        values = torch.full((n,), rest)
        values[:number] = 1
        M = U * values @ V.mT
        for dtype, (_, top, cosine, off) in rounded(M, M, 1).items():
            cells.append([title, dtype, f"{top:.2f}", f"{cosine:.4f}", f"{off:.1%}"])
    return cells


class Unchecked(CacheMuon):
    """A CacheMuon that takes bfloat16 as `cache_dtype`, which the optimizer itself refuses."""

    def check_group(self, group: dict[str, Any]) -> None:
        pass


def trained(dtype: torch.dtype, seed: int, width: int = 256, context: int = 128) -> tuple[float, float]:
    """The mean training loss of the last 20 of `TRAINING` steps, and the share of hits."""
    data, window, losses = corpus(), torch.arange(context + 1), []
    torch.manual_seed(seed)
    model = GPT(width, 2, context)
    groups = param_groups(model, adam={"lr": 2e-3})
    optimizer = Unchecked(groups, lr=0.03, weight_decay=1e-4, cache_dtype=dtype)
    for _ in range(TRAINING):
        tokens = data[torch.randint(len(data) - context, (8, 1)) + window].long()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-20:]), optimizer.cache_stats()["hit_rate"]


def in_training() -> Cells:
    """A row for each dtype."""
    cells = [["transform", *(f"loss, seed {seed}" for seed in SEEDS), "hits"]]
    for name, dtype in DTYPES.items():
        losses, hits = zip(*(trained(dtype, seed) for seed in SEEDS), strict=True)
        cells.append([name, *(f"{loss:.4f}" for loss in losses), f"{fmean(hits):.0%}"])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 60])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for cells in (on_momentum(args.width, args.steps), on_made(), in_training()):
        print(to_markdown(cells), end="\n\n")


if __name__ == "__main__":
    main()
