"""`break_even.DeviceCosts` of this machine: the time of calls, thin products and elements beside a FLOP's.

    python benchmarks/prices.py

Times whole steps in which every matrix is a hit, a miss, or solved fresh, for shapes from 32 x 288 to 512 x
512, alone and in groups of 4, 16 and 64, and fits the costs to the times by least squares of relative
errors. A miss is that of `gate="residual"` with a gamma of 0, which measures every cached direction and
refuses all of them. On a machine with CUDA it measures CUDA. `break_even.MEASURED` has the results. Nothing
else should run meanwhile.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import numpy as np
import torch

from cachemuon import CacheGNS, CacheMuon, GramNS, Muon
from cachemuon.flops import executed_by
from cachemuon_lab.timing import Drive, race

SHAPES = ((32, 288), (64, 64), (64, 576), (128, 128), (128, 512), (256, 256), (256, 1024), (512, 512))
NUMBERS = (1, 4, 16, 64)
LARGEST = 2**22  # elements, of all matrices together
CLIPS = (0.0, 1 / 16, 1 / 8)
ROUNDS = 11
NEVER = 2**31  # a max_age that no measurement comes to
COLUMNS = ("FLOPs", "thin FLOPs", "elements", "matrix", "cached", "every step", "solve", "probe", "clip")


def timed(n: int, m: int, number: int, device: str) -> dict[str, float]:
    """Median seconds of a step for each of `number` matrices."""
    makers = {"fresh": Muon}
    for clip in CLIPS:
        common = {"cache_all": True, "clip": clip}
        makers[f"hit {clip}"] = partial(CacheMuon, gamma=math.inf, max_age=NEVER, **common)
        makers[f"miss {clip}"] = partial(CacheMuon, gamma=0.0, gate="residual", **common)
    gradients = [[torch.randn(n, m, device=device)] for _ in range(number)]
    drives = {name: Drive(make, gradients) for name, make in makers.items()}
    for drive in drives.values():
        drive.load()
    seconds = race({name: drive.step for name, drive in drives.items()}, ROUNDS, device, warm=3)
    return {name: median(times) / number for name, times in seconds.items()}


def parts(n: int, m: int, number: int, name: str, dtype: torch.dtype) -> list[float]:
    """What such a step consists of, for one matrix."""
    kind, _, clip = name.partition(" ")
    rank = CacheGNS(clip=float(clip or 0)).rank(n)
    cost = executed_by(GramNS(), n, m, dtype, rank=rank)
    vectors = (2 if rank else 4) * cost.vectors * n * m
    flops = {"fresh": cost.baseline, "hit": cost.hit, "miss": cost.miss}[kind]
    thin = {"fresh": 0, "hit": vectors, "miss": vectors + cost.recheck}[kind]
    cached = kind != "fresh"
    shared = [1, kind != "hit", cached, cached and rank > 0]
    return [flops, thin, n * m, 1, cached, *(calls / number for calls in shared)]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows, seconds, names = [], [], []
    for n, m in SHAPES:
        for number in (number for number in NUMBERS if number * n * m <= LARGEST):
            for name, took in timed(n, m, number, device).items():
                rows.append(parts(n, m, number, name, dtype))
                seconds.append(took)
                names.append(f"{n} x {m}, {number}: {name}")
    table, taken = np.array(rows), np.array(seconds)
    found, *_ = np.linalg.lstsq(table / taken[:, None], np.ones(len(taken)), rcond=None)
    for name, value in zip(COLUMNS, found / found[0], strict=True):
        print(f"{name:12} {value:14,.0f} FLOPs of large products")
    print(f"{'':12} {1e-9 / found[0]:14,.0f} GFLOP/s")
    off = table @ found / taken
    print("predicted / measured, percentiles 5, 50, 95:", np.percentile(off, (5, 50, 95)).round(2))
    worst = np.abs(np.log(off)).argmax()
    print(f"worst: {names[worst]}, {off[worst]:.2f}")


if __name__ == "__main__":
    main()
