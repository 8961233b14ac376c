"""The optimizers of the experiments, from their configuration: among them the baseline of mere reuse.

`Meter` steps an optimizer and tells what that took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
    flops,
    param_groups,
)
from cachemuon.distributed.exchange import Shared
from cachemuon.engine.fresh import directions, send
from cachemuon.engine.matrices import Matrix, accumulate, descend, step_lengths
from cachemuon.optim.base import MatrixOptimizer
from cachemuon.report.counters import OUTCOMES
from cachemuon.routing.layout import layout_of
from cachemuon_lab.config import CACHE_SETTINGS, OptimizerConfig

SOLVERS: dict[str, Solver] = {
    "polar": StandardNS(POLAR_EXPRESS),
    "gram": GramNS(),
    "jordan": StandardNS(QUINTIC),
    "stale": GramNS(),
}

MISSES = tuple(outcome for outcome in OUTCOMES if outcome != "hit")


def make_optimizer(config: OptimizerConfig, model: nn.Module, copies: Any = None) -> Optimizer:
    """The optimizer that a configuration describes, for all trainable parameters of the model.

    `copies` is the process group of which every rank has a copy of the model, if there is one.

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
    muon: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "weight_decay": config.weight_decay,
        "adjust_lr_fn": config.adjust_lr_fn,
    }
    if config.kind != "stale":  # which shares no work
        muon["process_group"] = copies
    if config.kind == "paper":
        return CacheMuon.paper(groups, gamma=config.gamma, **muon)
    if config.kind == "cache":
        return CacheMuon(groups, **muon, **{name: getattr(config, name) for name in CACHE_SETTINGS})
    if config.kind == "stale":
        return StaleMuon(groups, period=config.period, **muon)
    return Muon(groups, solver=SOLVERS[config.kind], **muon)


class StaleMuon(Muon):
    """GramMuon that solves at every `period`-th step, and takes the same direction until the next.

    Reuse without any cost or check: what a cache must be better than. A reused direction counts as a hit,
    and costs no FLOPs.

    >>> W = nn.Parameter(torch.zeros(2, 3))
    >>> optimizer = StaleMuon([W], period=2)
    >>> for _ in range(4):
    ...     W.grad = torch.randn(2, 3)
    ...     optimizer.step()
    >>> optimizer.cache_stats()["hits"]
    2
    """

    def __init__(self, params: ParamsT, *, period: int = 2, **settings: Any) -> None:
        super().__init__(params, solver=SOLVERS["stale"], **settings)
        self.defaults["period"] = period
        for group in self.param_groups:
            if group["use_muon"]:
                group.setdefault("period", period)

    def _orthogonalize(self, matrices: list[Matrix], shared: list[Shared]) -> None:
        if shared:
            raise ValueError("StaleMuon must have parameters of its own, got some that are sharded or shared")
        self._settle(wait=False)
        send(matrices, {})
        by_group: dict[int, list[Matrix]] = {}
        for x in matrices:
            by_group.setdefault(id(x.group), []).append(x)
        for members in by_group.values():
            group = members[0].group
            reuse = (group["step"] - 1) % group["period"] > 0
            done = self._reuse(members) if reuse else self._renew(members)
            self._claim("hit" if reuse else "fresh", done, members)

    def _renew(self, matrices: list[Matrix]) -> Iterator[tuple[list[Matrix], Tensor]]:
        for batch, D, finite in directions(matrices, self._kept, lambda x: x.group["solver"]):
            torch._foreach_copy_([_direction(x) for x in batch], list(D.unbind(0)))
            descend(batch, D.mul_(step_lengths(batch, D, finite)), finite)
            yield batch, finite

    def _reuse(self, matrices: list[Matrix]) -> Iterator[tuple[list[Matrix], Tensor]]:
        for x in matrices:
            finite, D = accumulate([x], self._kept.workspace).finite, _direction(x).unsqueeze(0)
            descend([x], D * step_lengths([x], D, finite), finite)
            yield [x], finite


def _direction(x: Matrix) -> Tensor:
    """The matrix's place in its parameter's `direction`, wide; made on first use."""
    if "direction" not in x.state:
        x.state["direction"] = torch.zeros_like(x.state["momentum_buffer"])
    direction: Tensor = x.state["direction"].view(-1, *x.grad.shape)[x.index]
    return direction.mT if x.tall else direction


class Meter:
    """Steps an optimizer; `read` tells what its steps did: seconds, hits and misses, FLOPs.

    The seconds of the orthogonalization are those of the optimizer's whole matrix part, momentum and
    update included; an optimizer without one, as AdamW, has 0. `synchronize` waits for a GPU before each
    reading of the clock; without it the seconds are the host's.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, synchronize: bool = True) -> None:
        self.optimizer = optimizer
        self._device = device if synchronize and device.type == "cuda" else None
        self.seconds = {"optimizer_seconds": 0.0, "orthogonalization_seconds": 0.0}
        self._before = self._outcomes()
        if isinstance(optimizer, MatrixOptimizer):
            orthogonalize = optimizer._orthogonalize

            def timed(*args: Any) -> None:
                began = self.now()
                orthogonalize(*args)
                self.seconds["orthogonalization_seconds"] = self.now() - began

            optimizer.__dict__["_orthogonalize"] = timed

    def now(self) -> float:
        """The clock, once the device has done all it was given."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def step(self) -> None:
        """One step of the optimizer."""
        began = self.now()
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
        for group in self.optimizer.param_groups:
            if group.get("use_muon"):
                readings = (layout_of(group, param) for param in group["params"])
                shapes += [piece.sides for read in readings for piece in read.pieces]
        if not shapes:
            return None
        return float(1 - self._before["flops_paper"] / flops.total(shapes, steps))

    def _outcomes(self) -> dict[str, Any]:
        misses = dict.fromkeys(MISSES, 0)
        if not isinstance(self.optimizer, MatrixOptimizer):
            return {"hits": 0, "misses": misses, "flops": 0, "flops_paper": 0}
        stats = self.optimizer.cache_stats()
        for entry in stats["matrices"].values():
            for reason, number in entry["misses"].items():
                misses[reason] += number
        return {key: stats[key] for key in ("hits", "flops", "flops_paper")} | {"misses": misses}
