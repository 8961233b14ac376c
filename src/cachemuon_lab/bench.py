"""How long solvers and optimizer steps take on this machine, and what of it the cache saves.

Each part is a function that returns what `bench.json` holds of it; `performance` makes tables and pictures.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from cachemuon import (
    POLAR_EXPRESS,
    CacheGNS,
    CacheMuon,
    GramNS,
    Muon,
    StandardNS,
    normalize,
    param_groups,
    polar,
)
from cachemuon.newton_schulz.products import Workspace
from cachemuon_lab.models.gpt2 import GPT2, GPT2Config
from cachemuon_lab.stepping import Progress, Results, ceilings, even, host, steps
from cachemuon_lab.timing import Drive, machine, race, ratios, seconds_of, turns
from cachemuon_lab.totals import Shape
from cachemuon_lab.workloads import full_gram_loop, new_basis, plain_gram_loop

SOLVED: dict[str, list[Shape]] = {
    "GPT-2 Small": [(768, 768), (768, 2304), (768, 3072)],
    "GPT-2 Large": [(1280, 1280), (1280, 3840), (1280, 5120)],
    "ResNet-18": [(64, 576), (128, 1152), (256, 2304), (512, 4608)],
}
CLIP: float | None = signature(CacheMuon).parameters["clip"].default
CLIPS = (16, 8)


def solvers(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """Every solver on single matrices: ratios to the bare product `Q @ X`, and to GramNS."""
    rows = []
    for model, shapes in SOLVED.items():
        for n, m in [(shapes[0][0] // 8, shapes[0][1] // 8)] if quick else shapes:
            tell(f"{model}, {n} x {m}")
            M = torch.randn(n, m, device=device)
            X, Q = normalize(M), GramNS().with_transform(M)[1]
            kept = [Workspace() for _ in range(2)]
            calls: dict[str, Callable[[], object]] = {
                "Q @ X": partial(torch.mm, Q, X, out=torch.empty_like(X)),
                "hit": _kept_hit(X, Q, 0.0),
                **{f"hit, clip 1/{k}": _kept_hit(X, Q, 1 / k) for k in CLIPS},
                "hit, exact probe": partial(CacheGNS(probe="exact"), M, Q, math.inf),
                "miss": partial(CacheGNS(), M, Q, 0.0),
                "miss, clipped": partial(CacheGNS(clip=CLIP), M, Q, 0.0),
                "GramNS": partial(GramNS(), M),
                "GramNS, kept memory": partial(GramNS(restarts=()).solve, X.unsqueeze(0), kept[0]),
                "full products": partial(full_gram_loop, X.unsqueeze(0), kept[1]),
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
                    "to full products": ratios(seconds, "full products"),
                }
            )
    return {"rows": rows, "rounds": rounds}


def _kept_hit(X: Tensor, Q: Tensor, clip: float) -> Callable[[], Tensor]:
    """A hit as the optimizer makes it, in kept memory: probe, repair, product; no normalization."""
    cache, workspace = CacheGNS(clip=clip), Workspace()
    U, Qs, one = X.unsqueeze(0), Q.unsqueeze(0), X.new_ones(1, 1, 1)
    block = torch.randn(len(Q), cache.columns(len(Q)), device=X.device)

    def hit() -> Tensor:
        return cache.reuse([U], one, one, Qs, block, math.inf, workspace)[0][0]

    return hit


def worst(device: str, rounds: int, quick: bool, tell: Progress) -> Results:
    """CacheMuon where no transform fits the next step, beside the cheapest fresh Muon, for 300 steps."""
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
        "hit": partial(CacheMuon, gamma=math.inf, max_age=2**31, cache_all=True),
        "miss": partial(CacheMuon, gamma=0.0, gate="residual", cache_all=True),
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


PARTS: dict[str, Callable[[str, int, bool, Progress], Results]] = {
    "solvers": solvers,
    "steps": steps,
    "even": even,
    "host": host,
    "ceilings": ceilings,
    "worst": worst,
    "share": share,
    "growth": growth,
}
"""What can be measured, each by a function of device, rounds, whether it must be quick, and whom to tell."""


def measured(path: Path) -> Results:
    """What an earlier run has written."""
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(results, dict) or not all(isinstance(part, dict) for part in results.values()):
        raise ValueError(f"{path} must be an object of objects, as `cachemuon bench` writes it")
    return results


def run(out: Path, parts: Iterable[str], *, rounds: int, quick: bool, tell: Progress) -> Results:
    """Measure the parts that `out / "bench.json"` has not yet; it is written after every part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = out / "bench.json"
    results = measured(path) if path.is_file() else {}
    about = machine(device)
    if results and results.get("machine") != about:
        raise ValueError(
            f"{path} was measured elsewhere ({results.get('machine')}): --overwrite, or another --out"
        )
    results |= {"machine": about}
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part not in results:
            results[part] = PARTS[part](device, rounds, quick, tell)
            path.write_text(json.dumps(results, indent=1))
    return results
