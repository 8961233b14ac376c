"""The optimizers of the experiments, made from their configuration, and the baseline of mere reuse.

`Meter` steps an optimizer and reports what the steps took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from cachemuon import (
    POLAR_EXPRESS,
    QUINTIC,
    CacheMuon,
    GramNS,
    Muon,
    Solver,
    StandardNS,
    exact_residual,
    param_groups,
)
from cachemuon.distributed.placement import ranks_of
from cachemuon.engine.bucket import Choice, Prices
from cachemuon.engine.orthogonalize import Direction, Entry, Orthogonalizer, Update, keep
from cachemuon.engine.schedule import Life
from cachemuon.newton_schulz.normalize import computed_in
from cachemuon.newton_schulz.products import Workspace
from cachemuon.newton_schulz.workspace import solve_bytes
from cachemuon.optim.base import MatrixOptimizer
from cachemuon.optim.muon import solver_prices
from cachemuon.report.counters import EXPIRED, FIRST, HIT, OUTCOMES
from cachemuon.routing.layout import MatrixView, layout_of
from cachemuon_lab.config import CACHE_SETTINGS, OptimizerConfig
from cachemuon_lab.half import HALF, HalfProducts
from cachemuon_lab.rivals import AdaMuon, Dion2, Dion3, Rival, soap, soap_flops
from cachemuon_lab.totals import total

SOLVERS: dict[str, StandardNS | GramNS] = {
    "polar": StandardNS(POLAR_EXPRESS),
    "gram": GramNS(),
    "jordan": StandardNS(QUINTIC),
    "stale": GramNS(),
}

MISSES = tuple(outcome for outcome in OUTCOMES if outcome != "hit")


def make_optimizer(config: OptimizerConfig, model: nn.Module, copies: Any = None) -> Optimizer:
    """The optimizer that a configuration describes, for all trainable parameters of the model.

    `copies` is the process group whose ranks each have a copy of the model, if there is one.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> make_optimizer(OptimizerConfig("paper", gamma=2.0), model).defaults["gamma"]
    2.0
    """
    adam: dict[str, Any] = {
        "lr": config.adam_lr,
        "betas": config.adam_betas,
        "eps": 1e-8,
        "weight_decay": config.adam_weight_decay,
    }
    if config.kind == "adamw":
        return torch.optim.AdamW(model.named_parameters(), **adam)
    decay = {"weight_decay": config.adam_weight_decay}  # of everything, as in the paper
    groups = param_groups(model, head=config.head, adam=adam, vectors=decay)
    if config.kind == "soap":
        betas = (config.momentum, config.beta2)
        return soap(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    rival: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "adjust_lr_fn": config.adjust_lr_fn,
    }
    if config.kind == "dion2":
        return Dion2(groups, fraction=config.fraction, **rival)
    if config.kind == "dion3":
        return Dion3(groups, fraction=config.fraction, beta2=config.beta2, **rival)
    muon = {**rival, "nesterov": config.nesterov}
    if config.kind == "adamuon":
        return AdaMuon(groups, beta2=config.beta2, **muon)
    if config.normalize != "default":
        muon["normalize"] = config.normalize
    if config.precision is not None:
        muon["solver"] = replace(SOLVERS.get(config.kind, GramNS()), dtype=getattr(torch, config.precision))
    if config.kind != "stale":  # StaleMuon does not share work among ranks
        muon["process_group"] = copies
    if config.kind == "paper":
        return CacheMuon.paper(groups, gamma=config.gamma, **muon)
    if config.kind == "cache":
        return CacheMuon(groups, **muon, **{name: getattr(config, name) for name in CACHE_SETTINGS})
    if config.kind == "stale":
        return StaleMuon(groups, period=config.period, **muon)
    return Muon(groups, **{"solver": SOLVERS[config.kind], **muon})


@dataclass(frozen=True)
class Stale:
    """Take the direction of an earlier step as it is, until the schedule asks for a new one."""

    solver: Solver

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The direction, in its wide orientation."""
        return {"direction": Entry((min(rows, cols), max(rows, cols)))}

    def joins(self, other: Orthogonalizer) -> bool:
        """Solvers work on one shape."""
        return False

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Old directions, then new ones."""
        for update in updates:
            if (reused := update.of(HIT)) is not None:
                yield Direction(reused, torch.stack(reused.kept["direction"]) * reused.gain, reused=True)
            if (due := update.of(FIRST, EXPIRED)) is not None:
                D = self.solver.solve(due.U.mul_(due.scale), workspace)
                keep(due.kept["direction"], D, due.peak)
                yield Direction(due, D * due.gain, refreshed=exact_residual(D))


class StaleMuon(Muon):
    """GramMuon that solves at every `period`-th step, and takes the same direction until the next.

    Reuse without any cost or check: a cache must do better. A reused direction counts as a hit and costs no
    FLOPs.

    >>> W = nn.Parameter(torch.zeros(2, 3))
    >>> optimizer = StaleMuon([W], period=2)
    >>> for _ in range(4):
    ...     W.grad = torch.randn(2, 3)
    ...     optimizer.step()
    >>> optimizer.cache_stats()["hits"]
    2
    """

    settings = (*Muon.settings, "period")

    def __init__(self, params: ParamsT, *, period: int = 2, **settings: Any) -> None:
        super().__init__(params, solver=SOLVERS["stale"], **settings)
        self.defaults["period"] = period
        for group in self.param_groups:
            if group["use_muon"]:
                group.setdefault("period", period)

    def choose(self, group: dict[str, Any], param: Tensor, view: MatrixView, count: int) -> Choice:
        """All matrices are solved at the steps 1, 1 + period, 1 + 2 period, ..."""
        if ranks := ranks_of(group, param):
            raise ValueError(f"StaleMuon must have parameters of its own, got some that ranks {ranks} share")
        solver, period, (n, m) = group["solver"], group["period"], view.wide
        size = computed_in(param.dtype).itemsize
        fresh, paper = solver_prices(solver, n, m, solver.precision(param))
        executed, by_paper = ({"first": cost, "expired": cost} for cost in (fresh, paper))
        return Choice(
            Stale(solver),
            Life(max_age=period - 1, phase=period - 1),
            solve_bytes(n, m, size) + n * m * size,
            Prices(executed, by_paper, {}, fresh),
        )


class Meter:
    """Steps an optimizer; `read` returns what its steps did: seconds, hits and misses, FLOPs.

    The seconds of the orthogonalization are those of the optimizer's whole matrix part, momentum and
    update included; an optimizer without one, such as AdamW, has 0. `synchronize` waits for a GPU before
    each reading of the clock; without it the seconds are the host's. On a CPU, products of a solver that
    iterates in half precision are those of a GPU, emulated.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, synchronize: bool = True) -> None:
        self.optimizer = optimizer
        self._device = device if synchronize and device.type == "cuda" else None
        self.seconds = {"optimizer_seconds": 0.0, "orthogonalization_seconds": 0.0}
        self._before = self._outcomes()
        solvers = (group.get("solver") for group in optimizer.param_groups)
        half = device.type == "cpu" and any(getattr(solver, "dtype", None) in HALF for solver in solvers)
        self._products: AbstractContextManager[Any] = HalfProducts() if half else nullcontext()
        if isinstance(optimizer, MatrixOptimizer | Rival):
            optimizer.around_matrices = self._matrix_part

    @contextmanager
    def _matrix_part(self) -> Iterator[None]:
        began = self.now()
        yield
        self.seconds["orthogonalization_seconds"] = self.now() - began

    def now(self) -> float:
        """The clock, once the device has done all it was given."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def step(self) -> None:
        """One step of the optimizer."""
        began = self.now()
        with self._products:
            self.optimizer.step()
        self.seconds["optimizer_seconds"] = self.now() - began

    def read(self) -> dict[str, Any]:
        """The last step's seconds, the hits and misses since the last call, all FLOPs so far."""
        before, after = self._before, self._outcomes()
        self._before = after
        misses = {reason: number - before["misses"][reason] for reason, number in after["misses"].items()}
        return {**self.seconds, **after, "hits": after["hits"] - before["hits"], "misses": misses}

    def hit_rate(self) -> float | None:
        """Hits per call so far; None for an optimizer that cannot hit, or has not been called."""
        hits, calls = self._before["hits"], self._before["hits"] + sum(self._before["misses"].values())
        return hits / calls if calls and isinstance(self.optimizer, CacheMuon | StaleMuon) else None

    def saved_flops(self, steps: int) -> float | None:
        """The fraction of GramMuon's FLOPs in `steps` steps that was saved, by the paper's model."""
        shapes = []
        if not isinstance(self.optimizer, MatrixOptimizer | Rival):
            return None
        for group in self.optimizer.param_groups:
            if group.get("use_muon"):
                layouts = (layout_of(group, param) for param in group["params"])
                shapes += [view.sides for layout in layouts for view in layout.views]
        if not shapes:
            return None
        return float(1 - self._before["flops_paper"] / total(shapes, steps))

    def _outcomes(self) -> dict[str, Any]:
        misses = dict.fromkeys(MISSES, 0)
        if not isinstance(self.optimizer, MatrixOptimizer):
            calls, spent, by_paper = 0, soap_flops(self.optimizer), 0
            if isinstance(self.optimizer, Rival):
                calls, spent, by_paper = self.optimizer.counted()
            misses |= {"fresh": calls}
            return {"hits": 0, "misses": misses, "flops": spent, "flops_paper": by_paper}
        stats = self.optimizer.cache_stats()
        for entry in stats["matrices"].values():
            for reason, number in entry["misses"].items():
                misses[reason] += number
        return {key: stats[key] for key in ("hits", "flops", "flops_paper")} | {"misses": misses}
