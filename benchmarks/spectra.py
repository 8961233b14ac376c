"""What a cached direction looks like, raw and clipped, by the age of its transform: on real momentum.

    python benchmarks/spectra.py [--width 768] [--steps 20 60]

The momentum is that of a one-block GPT in training (momentum.py). A transform is made at each of the steps,
and applied to the momentum some steps later. docs/notebook/clipping.md has the table.
"""

from __future__ import annotations

import argparse
import math
from statistics import median

import torch
from momentum import record

from cachemuon import CacheGNS, GramNS
from cachemuon_lab.performance import to_markdown

AGES = (1, 3, 6, 12)
CLIPS = (0.0, 1 / 32, 1 / 16, 1 / 8)
FRESH = 1.0  # in the place of a clip: the fresh direction itself


def measured(D: torch.Tensor, fresh: torch.Tensor) -> tuple[float, float, float, float]:
    """Residual, largest and median singular value, and cosine to the fresh direction."""
    gram = D @ D.mT if D.shape[0] <= D.shape[1] else D.mT @ D
    squares = torch.linalg.eigvalsh(gram).clamp(min=0)
    residual = torch.linalg.vector_norm(squares - 1) / math.sqrt(len(squares))
    cosine = torch.cosine_similarity(D.flatten(), fresh.flatten(), dim=0)
    return residual.item(), squares[-1].sqrt().item(), squares.median().sqrt().item(), cosine.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 60])
    args = parser.parse_args()
    momentum = record(args.width, 1, {step + age for step in args.steps for age in (0, *AGES)}, batch=4)
    found: dict[tuple[int, float], list[tuple[float, float, float, float]]] = {}
    for start in args.steps:
        for name, before in momentum[start].items():
            _, Q = GramNS().with_transform(before)
            for age in AGES:
                now = momentum[start + age][name]
                fresh = GramNS()(now)
                found.setdefault((age, FRESH), []).append(measured(fresh, fresh))
                for clip in CLIPS:
                    D, _, _ = CacheGNS(clip=clip, max_norm=None)(now, Q, math.inf, step=start + age)
                    found.setdefault((age, clip), []).append(measured(D, fresh))
    cells = [["age", "clip", "residual, median", "largest", "largest singular value", "median", "cosine"]]
    for (age, clip), values in sorted(found.items()):
        residuals, tops, middles, cosines = zip(*values, strict=True)
        share = "fresh" if clip == FRESH else f"1/{1 / clip:g}" if clip else "0"
        spread = [f"{median(residuals):.2f}", f"{max(residuals):.1f}", f"{max(tops):.1f}"]
        cells.append([str(age), share, *spread, f"{median(middles):.2f}", f"{median(cosines):.2f}"])
    print(to_markdown(cells))


if __name__ == "__main__":
    main()
