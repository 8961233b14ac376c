"""How long whole optimizer steps take: beside other Muons, one beside the next, on the host, by memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from cachemuon import POLAR_EXPRESS, QUINTIC, CacheMuon, GramNS, Muon, StandardNS
from cachemuon.optim.base import MatrixOptimizer
from cachemuon_lab.peers import installed
from cachemuon_lab.timing import Drive, race, ratios, seconds_of, turns
from cachemuon_lab.totals import Shape, gpt2_shapes
from cachemuon_lab.workloads import gamma_for, smooth_gradients

Results = dict[str, Any]
Progress = Callable[[str], None]

PAPERS_HITS = 0.59  # of GPT-2 Large on OpenWebText at gamma 5
SLOW = 5  # times GramMuon's


Maker = Callable[[list[Parameter]], Optimizer]


def _ours(gammas: Sequence[float], device: str) -> dict[str, tuple[str, Maker]]:
    """The precision in which each of our optimizers iterates, and what makes it."""

    def unclipped(params: list[Parameter]) -> Optimizer:
        groups = [{"params": [p], "gamma": gamma} for p, gamma in zip(params, gammas, strict=True)]
        return CacheMuon(groups, momentum=0.0, clip=0.0, gate="residual", max_age=None)

    fresh = {
        "GramMuon": GramNS(),
        "PolarExpMuon": StandardNS(POLAR_EXPRESS),
        "Muon (Jordan)": StandardNS(QUINTIC),
    }
    own: dict[str, Maker] = {
        "CacheMuon": partial(CacheMuon, momentum=0.0),
        "CacheMuon, residual gate": partial(CacheMuon, momentum=0.0, gate="residual"),
        "CacheMuon, residual gate, clip=0": unclipped,
        **{name: partial(Muon, momentum=0.0, solver=solver) for name, solver in fresh.items()},
        "Muon (default)": partial(Muon, momentum=0.0),
    }
    half = GramNS(dtype=torch.bfloat16)
    return {name: ("fp32" if device == "cpu" else "fp16", make) for name, make in own.items()} | {
        "CacheMuon, half precision": ("bf16", partial(CacheMuon, momentum=0.0, solver=half)),
        "GramMuon, half precision": ("bf16", partial(Muon, momentum=0.0, solver=half)),
    }


def steps(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Whole optimizer steps, beside every peer that is installed."""
    block = gpt2_shapes(1, 64 if quick else 768)
    small = [(16, 16)] * 8 if quick else [(64, 64)] * 256
    workloads = {
        "a block of GPT-2 Small": block,
        f"{len(small)} matrices of {small[0][0]} x {small[0][1]}": small,
    }
    results: Results = {"rounds": rounds, "workloads": {}}
    for title, shapes in workloads.items():
        tell(f"{title}: gradients")
        made: dict[Shape, tuple[list[Tensor], float]] = {}
        for shape in shapes:
            if shape not in made:
                sequence = smooth_gradients(shape, rounds + 1, device)
                made[shape] = sequence, gamma_for(sequence, PAPERS_HITS)
        gradients, gammas = [made[s][0] for s in shapes], [made[s][1] for s in shapes]
        makers = _ours(gammas, device)
        makers |= {name: (precision, make) for name, (precision, _, make) in installed().items()}
        drives = {name: Drive(make, gradients) for name, (_, make) in makers.items()}
        whole: dict[str, list[float]] = {name: [] for name in drives}
        matrix_part: dict[str, list[float]] = {name: [] for name in drives}
        for number in range(rounds + 1):
            tell(f"{title}: round {number} of {rounds}")
            for name in turns(drives, number):
                if number > 1 and statistics.fmean(whole[name]) > SLOW * statistics.fmean(whole["GramMuon"]):
                    continue  # one round tells enough
                drive = drives[name]
                drive.load()
                took = seconds_of(drive.step, device)
                if number:  # the first is a cold one, and compiles where a peer does
                    whole[name].append(took)
                    matrix_part[name].append(drive.meter.seconds["orthogonalization_seconds"])
        rows = []
        for name, drive in drives.items():
            stats = drive.optimizer.cache_stats() if isinstance(drive.optimizer, CacheMuon) else None
            # Some steps of a cache are cheap and some are not: the mean counts, not the median.
            rows.append(
                {
                    "name": name,
                    "precision": makers[name][0],
                    "milliseconds": 1e3 * statistics.fmean(whole[name]),
                    "to GramMuon": statistics.fmean(whole[name]) / statistics.fmean(whole["GramMuon"]),
                    "spread": ratios(whole, "GramMuon")[name],
                    "matrix part to GramMuon": statistics.fmean(matrix_part[name])
                    / statistics.fmean(matrix_part["GramMuon"])
                    if isinstance(drive.optimizer, MatrixOptimizer)
                    else None,
                    "hits": stats["hits"] / (stats["calls"] - len(shapes)) if stats else None,
                    "peak MiB": max(drive.peak_bytes() for _ in range(8 if stats else 1)) / 2**20,
                }
            )
        results["workloads"][title] = rows
    results["peers"] = {name: number for name, (_, number, _) in installed().items()}
    return results


def even(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Twelve blocks of GPT-2 Small: how much longer the longest step is than the median, after the first."""
    shapes, number = gpt2_shapes(12, 32 if quick else 768), 8 if quick else 29
    gradients = [[torch.randn(shape, device=device)] for shape in shapes]
    drives = {
        "CacheMuon": Drive(partial(CacheMuon, cache_all=quick), gradients),
        "GramMuon": Drive(partial(Muon, solver=GramNS()), gradients),
    }
    seconds: dict[str, list[float]] = {name: [] for name in drives}
    for step in range(number):
        tell(f"twelve blocks: step {step} of {number}")
        for name, drive in drives.items():
            if step > 5 and name == "GramMuon" and not quick:
                continue  # its steps are all alike
            drive.load()
            took = seconds_of(drive.step, device)
            if step:
                seconds[name].append(took)
    stats = drives["CacheMuon"].optimizer.cache_stats()  # type: ignore[attr-defined]
    rows = [
        {
            "name": name,
            "steps": len(times),
            "median milliseconds": 1e3 * statistics.median(times),
            "largest": max(times) / statistics.median(times),
            "smallest": min(times) / statistics.median(times),
            "mean to GramMuon": statistics.fmean(times) / statistics.fmean(seconds["GramMuon"]),
            "hits": stats["hit_rate"] if name == "CacheMuon" else None,
        }
        for name, times in seconds.items()
    ]
    return {"rows": rows}


def host(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """What the host does: matrices so small that their products take no time, beside GramMuon and Muon."""
    tell("the host's part")
    blocks, small = gpt2_shapes(12, 16), [(16, 512)] * (8 if quick else 256)
    cases: dict[str, tuple[list[Shape], str, dict[str, Callable[[Any], Optimizer]]]] = {
        "48 cached matrices, GPT-2 Small's at width 16": (
            blocks,
            "GramMuon",
            {
                "GramMuon": partial(Muon, solver=GramNS()),
                "CacheMuon": partial(CacheMuon, cache_all=True),
                "CacheMuon, residual gate": partial(CacheMuon, cache_all=True, gate="residual"),
                "CacheMuon, clip=0": partial(CacheMuon, cache_all=True, clip=0.0),
            },
        ),
        f"{len(small)} matrices of 16 x 512, none cached": (
            small,
            "Muon",
            {"Muon": Muon, "CacheMuon": CacheMuon},
        ),
    }
    rows = []
    for title, (shapes, base, makers) in cases.items():
        gradients = [[torch.randn(shape, device=device)] for shape in shapes]
        drives = {name: Drive(make, gradients) for name, make in makers.items()}
        for drive in drives.values():
            drive.load()
        calls = {name: drive.step for name, drive in drives.items()}
        seconds = race(calls, 7 if quick else max(70, rounds), device, warm=8)
        # Steps have more or fewer refreshes: means of seven are compared.
        sevens = {
            name: [statistics.fmean(times[i : i + 7]) for i in range(0, len(times) - 6, 7)]
            for name, times in seconds.items()
        }
        for name, times in seconds.items():
            rows.append(
                {
                    "case": title,
                    "name": name,
                    "milliseconds": 1e3 * statistics.fmean(times),
                    "base": base,
                    "ratio": ratios(sevens, base)[name],
                }
            )
    return {"rows": rows}


def ceilings(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Steps of models of several widths under several ceilings on working memory."""
    sizes = (2**16, 2**20) if quick else (1, 2**24, 2**26, 2**28)
    models = {16: 1} if quick else {64: 12, 128: 12, 256: 12, 512: 3, 768: 3}
    rows = []
    for width, layers in models.items():
        tell(f"ceilings at width {width}")
        gradients = [[torch.randn(shape, device=device)] for shape in gpt2_shapes(layers, width)]
        makers: dict[str, Callable[..., Optimizer]] = {
            "CacheMuon": CacheMuon,
            "GramMuon": partial(Muon, solver=GramNS()),
        }
        drives = {
            f"{name} {size}": Drive(partial(make, max_workspace_bytes=size), gradients)
            for name, make in makers.items()
            for size in sizes
        }
        for drive in drives.values():
            drive.load()
        calls = {name: drive.step for name, drive in drives.items()}
        seconds = race(calls, 4 if quick else 14, device, warm=2)
        means = {name: statistics.fmean(times) for name, times in seconds.items()}
        rows.append(
            {
                "width": width,
                "layers": layers,
                **{name: [1e3 * means[f"{name} {size}"] for size in sizes] for name in makers},
            }
        )
    return {"rows": rows, "sizes": list(sizes)}
