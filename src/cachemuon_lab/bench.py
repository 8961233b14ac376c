"""How long solvers and optimizer steps take on this machine, and what of it the cache saves.

Each part is a function that returns what `bench.json` holds of it; `performance` makes tables and pictures.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from cachemuon import (
    GRAM,
    POLAR_EXPRESS,
    QUINTIC,
    CacheGNS,
    CacheMuon,
    GramNS,
    Muon,
    StandardNS,
    normalize,
    param_groups,
    polar,
)
from cachemuon.base import MatrixOptimizer
from cachemuon.flops import Shape, gpt2_shapes
from cachemuon_lab.models.gpt2 import GPT2, GPT2Config
from cachemuon_lab.peers import installed
from cachemuon_lab.timing import Drive, machine, race, ratios, seconds_of, turns

Results = dict[str, Any]
Progress = Callable[[str], None]

SOLVED: dict[str, list[Shape]] = {
    "GPT-2 Small": [(768, 768), (768, 2304), (768, 3072)],
    "GPT-2 Large": [(1280, 1280), (1280, 3840), (1280, 5120)],
    "ResNet-18": [(64, 576), (128, 1152), (256, 2304), (512, 4608)],
}
PAPERS_HITS = 0.59  # of GPT-2 Small on OpenWebText at gamma 5
CLIP: float = signature(CacheMuon).parameters["clip"].default
SLOW = 5  # times GramMuon's
PARTS = ("solvers", "steps", "worst", "share", "growth")


def plain_gram_loop(M: Tensor) -> Tensor:
    """GramNS with a restart after the second iteration, as one would write it down with `torch.addmm`."""
    X, eye = M / (M.norm() + 1e-7), torch.eye(len(M), device=M.device)
    R, Q = X @ X.mT, None
    for k, (a, b, c) in enumerate(GRAM.triples):
        if k == 2 and Q is not None:
            X, Q = Q @ X, None
            R = X @ X.mT
        Z = torch.addmm(R, R, R, beta=b, alpha=c)
        Q = Z + a * eye if Q is None else torch.addmm(Q, Q, Z, beta=a)
        if k not in (1, len(GRAM.triples) - 1):
            RZ = torch.addmm(R, R, Z, beta=a)
            R = torch.addmm(RZ, Z, RZ, beta=a)
    assert Q is not None
    direction: Tensor = Q @ X
    return direction


def solvers(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Every solver on single matrices: ratios to the bare product `Q @ X`."""
    rows = []
    for model, shapes in SOLVED.items():
        for n, m in [(shapes[0][0] // 8, shapes[0][1] // 8)] if quick else shapes:
            tell(f"{model}, {n} x {m}")
            M = torch.randn(n, m, device=device)
            X, Q = normalize(M), GramNS().with_transform(M)[1]
            calls: dict[str, Callable[[], object]] = {
                "Q @ X": partial(torch.matmul, Q, X),
                "hit": partial(CacheGNS(), M, Q, math.inf),
                "hit, exact probe": partial(CacheGNS(probe="exact"), M, Q, math.inf),
                "hit, clipped": partial(CacheGNS(clip=CLIP), M, Q, math.inf),
                "miss": partial(CacheGNS(), M, Q, 0.0),
                "miss, clipped": partial(CacheGNS(clip=CLIP), M, Q, 0.0),
                "GramNS": partial(GramNS(), M),
                "plain Gram loop": partial(plain_gram_loop, M),
                "StandardNS": partial(StandardNS(POLAR_EXPRESS), M),
                "polar (default)": partial(polar, M),
            }
            seconds = race(calls, rounds, device)
            rows.append(
                {
                    "model": model,
                    "shape": [n, m],
                    "milliseconds": {name: 1e3 * statistics.median(t) for name, t in seconds.items()},
                    "to product": ratios(seconds, "Q @ X"),
                    "to GramNS": ratios(seconds, "GramNS"),
                    "to plain loop": ratios(seconds, "plain Gram loop"),
                }
            )
    return {"rows": rows, "rounds": rounds}


def smooth_gradients(shape: Shape, steps: int, device: str) -> list[Tensor]:
    """A matrix that changes from step to step by 10% to 50%, with two decades of singular values."""
    n, m = sorted(shape)
    chance = torch.Generator().manual_seed(n + m)
    basis = torch.linalg.qr(torch.randn(n, n, generator=chance)).Q * torch.logspace(0, -2, n)
    found: list[Tensor] = []
    for _ in range(steps):
        new = basis @ torch.randn(n, m, generator=chance)
        keep = 0.87 + 0.125 * torch.rand((), generator=chance).item()
        new = keep * found[-1] + math.sqrt(1 - keep**2) * new if found else new
        found.append(new)
    return [(M.mT.contiguous() if shape[0] > shape[1] else M).to(device) for M in found]


def gamma_for(gradients: Sequence[Tensor], hit_rate: float) -> float:
    """The gamma at which that part of the steps of a sequence hits, by bisection."""
    low, high = 0.1, 100.0
    for _ in range(8):
        gamma, transform, age, hits = math.sqrt(low * high), None, 0, 0
        for step, M in enumerate(gradients):
            _, transform, event = CacheGNS()(M, transform, gamma, age=age, step=step)
            age = event.age  # type: ignore[union-attr]
            hits += event.hit  # type: ignore[union-attr]
        low, high = (low, gamma) if hits / (len(gradients) - 1) > hit_rate else (gamma, high)
    return gamma


def _ours(gammas: Sequence[float]) -> dict[str, Callable[[list[Parameter]], Optimizer]]:
    def unclipped(params: list[Parameter]) -> Optimizer:
        groups = [{"params": [p], "gamma": gamma} for p, gamma in zip(params, gammas, strict=True)]
        return CacheMuon(groups, momentum=0.0, clip=0.0, max_age=None)

    fresh = {
        "GramMuon": GramNS(),
        "PolarExpMuon": StandardNS(POLAR_EXPRESS),
        "Muon, Jordan's quintic": StandardNS(QUINTIC),
    }
    return {
        "CacheMuon": partial(CacheMuon, momentum=0.0),
        "CacheMuon, lagged": partial(CacheMuon, momentum=0.0, gate="lagged"),
        "CacheMuon, clip=0": unclipped,
        **{name: partial(Muon, momentum=0.0, solver=solver) for name, solver in fresh.items()},
        "Muon (default)": partial(Muon, momentum=0.0),
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
        makers: dict[str, tuple[str, Callable[[list[Parameter]], Optimizer]]] = {
            name: ("fp32" if device == "cpu" else "fp16", make) for name, make in _ours(gammas).items()
        }
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
            # A cached step is now cheap, now dear: its mean counts, not its median.
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


def new_basis(n: int, m: int, steps: int, device: str) -> Iterator[Tensor]:
    """The worst case for a cache: each matrix has another left basis; three decades of singular values."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        basis = torch.linalg.qr(torch.randn(n, n, generator=chance)).Q * torch.logspace(0, -3, n)
        yield (basis @ torch.randn(n, m, generator=chance)).to(device)


def worst(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """CacheMuon where no step can hit, beside the cheapest fresh Muon: 300 steps from the first."""
    rows = []
    number = 40 if quick else 300
    for n, m in [(64, 64)] if quick else [(256, 256), (256, 1024), (512, 512), (512, 2048), (768, 768)]:
        tell(f"worst case, {n} x {m}")
        seconds: dict[str, list[float]] = {"CacheMuon": [], "Muon": [], "Muon again": []}
        makers = {"CacheMuon": CacheMuon, "Muon": Muon, "Muon again": Muon}
        params = {name: Parameter(torch.zeros(n, m, device=device)) for name in makers}
        optimizers = {name: make([params[name]], momentum=0.0) for name, make in makers.items()}
        for step, gradient in enumerate(new_basis(n, m, number, device)):
            for name in turns(makers, step):
                params[name].grad = gradient
                seconds[name].append(seconds_of(optimizers[name].step, device))
        # In tenths of the run: a sum over all steps, and yet a busy moment spoils only one of them.
        tenths = {
            name: [sum(times[i :: number // 10]) for i in range(number // 10)]
            for name, times in seconds.items()
        }
        stats = optimizers["CacheMuon"].cache_stats()
        rows.append(
            {
                "shape": [n, m],
                "steps": number,
                "CacheMuon / Muon": ratios(tenths, "Muon")["CacheMuon"],
                "Muon again / Muon": ratios(tenths, "Muon")["Muon again"],
                "outcomes": next(iter(stats["matrices"].values()))["misses"],
                "hits": stats["hits"],
            }
        )
    return {"rows": rows}


def share(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """How much of a training step is the optimizer's: two blocks of GPT-2 Small on 1,024 tokens a step."""
    tell("a training step")
    width, context = (64, 32) if quick else (768, 256)
    config = GPT2Config(layers=2, width=width, heads=width // 64, context=context, vocabulary=1024)
    torch.manual_seed(0)
    tokens = torch.randint(1024, (1024 // context, context + 1), device=device)
    seconds: dict[str, list[float]] = {}
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "CacheMuon": CacheMuon,
        "GramMuon": partial(Muon, solver=GramNS()),
        "PolarExpMuon": partial(Muon, solver=StandardNS(POLAR_EXPRESS)),
    }
    models = {name: GPT2(config).to(device) for name in makers}
    optimizers = {name: make(param_groups(models[name])) for name, make in makers.items()}
    for number in range(rounds + 1):
        tell(f"a training step: round {number} of {rounds}")
        for name, model in models.items():

            def pass_over(model: Any = model) -> None:
                model.zero_grad()
                model(tokens[:, :-1], targets=tokens[:, 1:]).backward()

            for part, call in ((f"{name}: model", pass_over), (name, optimizers[name].step)):
                took = seconds_of(call, device)
                if number:
                    seconds.setdefault(part, []).append(took)
    rows = []
    for name, optimizer in optimizers.items():
        step, model_part = (statistics.fmean(seconds[part]) for part in (name, f"{name}: model"))
        stats = optimizer.cache_stats() if isinstance(optimizer, CacheMuon) else None
        rows.append(
            {
                "name": name,
                "model milliseconds": 1e3 * model_part,
                "optimizer milliseconds": 1e3 * step,
                "share": step / (step + model_part),
                "hits": stats["hit_rate"] if stats else None,
            }
        )
    return {"rows": rows, "tokens": tokens[:, 1:].numel()}


def growth(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Step time against the size of one n x 4n matrix, and against the number of 64 x 64 matrices."""
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "hit": partial(CacheMuon, gamma=math.inf, max_age=None, guard=False),
        "miss": partial(CacheMuon, gamma=0.0, guard=False),
        "GramMuon": partial(Muon, solver=GramNS()),
        "PolarExpMuon": partial(Muon, solver=StandardNS(POLAR_EXPRESS)),
        "torch.optim.Muon": lambda params: torch.optim.Muon(params, lr=1e-3),
    }
    sizes = (16, 32) if quick else (128, 192, 256, 384, 512, 768, 1024, 1536)
    numbers = (1, 4) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    series: Results = {"size": {"x": list(sizes)}, "number": {"x": list(numbers)}}
    for axis, cases in {
        "size": [[(n, 4 * n)] for n in sizes],
        "number": [[(64, 64)] * number for number in numbers],
    }.items():
        for shapes in cases:
            tell(f"growth: {len(shapes)} of {shapes[0][0]} x {shapes[0][1]}")
            drives = {
                name: Drive(make, [[torch.randn(shape, device=device)] for shape in shapes])
                for name, make in makers.items()
            }
            for drive in drives.values():
                drive.load()
            heavy = shapes[0][0] >= 768
            seconds = race(
                {name: drive.step for name, drive in drives.items()}, 3 if heavy else rounds, device
            )
            for name, times in seconds.items():
                series[axis].setdefault(name, []).append(1e3 * statistics.median(times))
    return series


def run(out: Path, parts: Sequence[str], *, rounds: int, quick: bool, tell: Progress) -> Results:
    """Measure the parts that `out / "bench.json"` has not yet; it is written after every part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = out / "bench.json"
    results: Results = json.loads(path.read_text()) if path.is_file() else {}
    about = machine(device)
    if results and results["machine"] != about:
        raise ValueError(
            f"{path} was measured elsewhere ({results['machine']}): --overwrite, or another --out"
        )
    results |= {"machine": about}
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part not in results:
            results[part] = globals()[part](device, rounds, quick, tell)
            path.write_text(json.dumps(results, indent=1))
    return results
