"""Measurements beside a run, which they never change: the paper's residual gate and age diagnostics.

An observer is asked before and after each optimizer step and returns lines for the record. It reads the
optimizer's state, computes on copies and draws from no generator of torch. A run with it takes the same
steps, bit for bit, as one without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.optim.optimizer import Optimizer

from cachemuon import CacheGNS, CacheMuon, GramNS, Muon, exact_residual, normalize
from cachemuon.cache.reuse import Repair
from cachemuon.newton_schulz.products import Workspace
from cachemuon.optim.cachemuon import block_of, cache_of
from cachemuon.report.counters import entry_name
from cachemuon.routing.layout import layout_of
from cachemuon_lab.config import RunConfig

Line = dict[str, Any]


class Observer(Protocol):
    """What a run asks: `before` and `after` each optimizer step, numbered from 1."""

    def before(self, step: int) -> None:
        """The gradients are there, the optimizer has not stepped yet."""

    def after(self, step: int) -> list[Line]:
        """The optimizer has stepped. Returns lines for the record, without their step."""


def make_observer(config: RunConfig, optimizer: Optimizer) -> Observer | None:
    """The observer that a run's `diagnostics` asks for; None if they are off."""
    if config.diagnostics == "gate":
        return GateObserver(optimizer, config.diagnose_every)
    if config.diagnostics == "age":
        return AgeObserver(optimizer, config.ages, config.diagnose_every)
    return None


PROBED = ("hit", "rejected", "bounded")
"""The outcomes of a cached direction whose residual was measured. Only a hit was accepted."""


class GateObserver:
    """At each probe of CacheMuon: what was decided, and how good the cached direction really was.

    The candidate is `Q X`, or what clipping and `max_norm` make of it, for the normalized momentum X. A
    line has the candidate's exact residual, whichever probe decided, its largest singular value (`norm`),
    and its cosine to the fresh direction of X. `age` counts the steps since the transform was made, this
    one included.
    """

    def __init__(self, optimizer: Optimizer, every: int = 1) -> None:
        if not isinstance(optimizer, CacheMuon):
            raise ValueError(f"optimizer must be a CacheMuon, got {type(optimizer).__name__}")
        self.optimizer, self.every = optimizer, every
        self._cached: dict[str, tuple[Tensor, int]] = {}
        self._momenta: dict[str, Tensor] = {}

    def before(self, step: int) -> None:
        """Copy the transforms: a miss will overwrite its own. And the momentum, which the step changes."""
        self._cached, self._momenta = {}, {}
        if step % self.every:
            return
        ages = {name: entry["age"] for name, entry in self.optimizer.cache_stats()["matrices"].items()}
        for name, state, _, index in _matrices(self.optimizer):
            transform = state.get(entry_name("transform", index, len(state["counters"])))
            if transform is not None and ages[name] is not None:
                self._cached[name] = transform.clone(), ages[name] + 1
        self._momenta = _momenta(self.optimizer)

    @torch.no_grad()
    def after(self, step: int) -> list[Line]:
        """A "probe" line for every matrix whose transform was probed."""
        lines: list[Line] = []
        events = self.optimizer.events() if self._cached else {}
        for name, state, group, index in _matrices(self.optimizer):
            if name not in self._cached or events[name].outcome not in PROBED:
                continue
            Q, age = self._cached.pop(name)
            X = _normalized(state, group, index, self._momenta.get(name))
            candidate = _candidate(group, X, Q.unsqueeze(0))
            fresh = group["solver"].solve(X, Workspace())
            measured = {"residual": exact_residual(candidate).item(), "cosine": _cosine(candidate, fresh)}
            measured["norm"] = torch.linalg.matrix_norm(candidate, 2).item()
            lines.append(
                {"kind": "probe", "name": name, **measured, "accepted": events[name].hit, "age": age}
            )
        return lines


class AgeObserver:
    """In a run that solves at every step: the cosine of `Q_(t-h) X_t` to the fresh direction, for ages h.

    The transforms are kept for this alone. A run that was resumed has none at first, and its first lines
    of age h come h steps later.
    """

    def __init__(self, optimizer: Optimizer, ages: tuple[int, ...], every: int = 1) -> None:
        if not isinstance(optimizer, Muon):
            raise ValueError(f"optimizer must be a Muon, got {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            if group["use_muon"] and not isinstance(group["solver"], GramNS):
                raise ValueError(
                    f"solver must be a GramNS, which yields a transform, got {group['solver']!r}"
                )
        self.optimizer, self.ages, self.every = optimizer, ages, every
        self._kept: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=max(ages) + 1)
        self._momenta: dict[str, Tensor] = {}

    def before(self, step: int) -> None:
        """Copy the momentum, which the step changes."""
        self._momenta = _momenta(self.optimizer) if self._wanted(step) else {}

    def _wanted(self, step: int) -> bool:
        """Whether a measurement asks for this step's transforms: its own, or one of a later step."""
        return any((step + age) % self.every == 0 for age in (0, *self.ages))

    @torch.no_grad()
    def after(self, step: int) -> list[Line]:
        """An "age" line for every matrix and every age whose transform is kept."""
        if not self._wanted(step):
            return []
        due = step % self.every == 0
        lines: list[Line] = []
        transforms: dict[str, Tensor] = {}
        kept = dict(self._kept)
        for name, state, group, index in _matrices(self.optimizer):
            X = _normalized(state, group, index, self._momenta.get(name))
            fresh, transforms[name] = group["solver"].solve_with_transform(X, Workspace())
            for age in self.ages if due else ():
                if name in kept.get(step - age, {}):
                    candidate = _cached_direction(group, X, kept[step - age][name])
                    lines.append(
                        {"kind": "age", "name": name, "age": age, "cosine": _cosine(candidate, fresh)}
                    )
        self._kept.append((step, transforms))
        while self._kept[0][0] <= step - max(self.ages):
            self._kept.popleft()
        return lines


def _cached_direction(group: dict[str, Any], X: Tensor, Q: Tensor) -> Tensor:
    """`Q X`, as the paper has it, in the precision of the group's solver."""
    one = X.new_ones(1, 1, 1)
    return CacheGNS(group["solver"]).apply([X], one, one, Q, Repair(one), Workspace())[0]


def _matrices(optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], int]]:
    """Name, state, group and index of every matrix that has been stepped, named as in `cache_stats()`."""
    for number, group in enumerate(optimizer.param_groups):
        if not group["use_muon"]:
            continue
        names = group.get("param_names") or [f"group{number}.param{i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            state = optimizer.state.get(param, {})
            if "momentum_buffer" in state:
                count = len(layout_of(group, param).views)
                for index in range(count):
                    yield name if count == 1 else f"{name}[{index}]", state, group, index


def _momentum(state: dict[str, Any], group: dict[str, Any], index: int) -> Tensor:
    momentum: Tensor = state["momentum_buffer"]
    return layout_of(group, momentum).split(momentum)[index].flatten(1)


def _momenta(optimizer: Optimizer) -> dict[str, Tensor]:
    """The momentum of every matrix, copied, where Nesterov's update will ask for it."""
    return {
        name: _momentum(state, group, index).clone()
        for name, state, group, index in _matrices(optimizer)
        if group["nesterov"]
    }


def _normalized(state: dict[str, Any], group: dict[str, Any], index: int, before: Tensor | None) -> Tensor:
    """What the solver was given, `(1, n, m)`, normalized and wide; `before` is the momentum before the step.

    Nesterov's update `b M + (1 - b) G` is `M + b (M - M_before)`, for which no gradient must be kept.
    """
    M = _momentum(state, group, index)
    if group["nesterov"]:
        M = M + group["momentum"] * (M if before is None else M - before)
    return normalize(M.mT if M.shape[0] > M.shape[1] else M, group["eps"]).unsqueeze(0)


def _candidate(group: dict[str, Any], X: Tensor, Q: Tensor) -> Tensor:
    """The cached direction that this step measured: the step's own random vectors find what is clipped."""
    cache, one = cache_of(group), X.new_ones(1, 1, 1)
    block = block_of(group, X.shape[-2]).draw(group["step"], X.dtype).to(X.device)
    _, repair = cache.measure([X], one, Q, block)
    return cache.apply([X], one, one, Q, repair, Workspace())[0]


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))
