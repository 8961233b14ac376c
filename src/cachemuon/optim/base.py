"""What both optimizers are around their orthogonalization: groups, the step, state, statistics."""

from __future__ import annotations

import functools
import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from ..distributed.connect import Connections
from ..distributed.placement import Placement, placements, ranks_of
from ..distributed.rank_group import as_process_group
from ..engine.kinds import Choice
from ..engine.plan import Plan
from ..engine.step import Exchange, take_step
from ..newton_schulz.normalize import full_precision
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import Solver
from ..report import summary
from ..report.counters import Event
from ..routing.layout import MatrixView, named_params
from . import checkpoint
from .adam import ADAM_DEFAULTS, adam_step
from .settings import check_adam_group, check_muon_group, check_once, check_param, shorthand

logger = logging.getLogger("cachemuon")


class MatrixOptimizer(Optimizer):
    """Momentum, decay and update for matrices, Adam for the rest; subclasses say how matrices are
    orthogonalized.

    Everything that must survive is in `param_groups` and `state`: torch drops an optimizer's other attributes
    in `deepcopy` and pickling. The plan and the exchanges are made from these, and made again when they
    change.
    """

    settings: tuple[str, ...] = ("solver", "eps")
    """The settings that matrices must share to be worked on together."""

    around_matrices: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What makes the context that each step enters for its matrices, after Adam: for a clock or a
    profiler.
    """

    def __init__(
        self, params: ParamsT, solver: Solver, eps: float | None, process_group: Any, **settings: Any
    ) -> None:
        settings |= {"solver": solver, "eps": getattr(solver, "eps", None) if eps is None else eps}
        settings["process_group"] = as_process_group(process_group)
        layout = {"view": "auto", "split": 1, "transposed": False}
        self._forget()
        super().__init__(params, {"use_muon": True, **layout, "step": 0, **settings})

    @abstractmethod
    def choose(self, group: dict[str, Any], param: Tensor, view: MatrixView, count: int) -> Choice:
        """How a matrix of a parameter is orthogonalized, of whose kind there are `count`."""

    @abstractmethod
    def _solver_of(self, schedule: Schedule) -> Solver:
        """The solver that torch.optim.Muon's `ns_coefficients` and `ns_steps` ask for."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse settings of a Muon group that are out of range."""
        check_muon_group(group)

    def _forget(self) -> None:
        self._made: Plan | None = None
        self._exchanges: list[Exchange] = []
        self._placed: dict[int, Placement] | None = None
        self._connections = Connections()
        self._reported: summary.Counts = {}  # what the last metrics() had counted
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        self._learn()
        return {**super().__getstate__(), "_reported": self._reported}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_connections" not in self.__dict__:  # a copy, or from a pickle; torch also calls this in a load
            self._forget()
        self._made = None
        super().__setstate__(state)

    def loaded(self) -> None:
        """Begin with the state as it is now: after it was loaded, nothing is known of it."""
        self._made = None
        self._connections.agreed.clear()
        self._reported = summary.counted(self._plan())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the given dict is not changed.

        `use_muon=False` makes it Adam's. A matrix group may have settings of its own.
        """
        if not (isinstance(param_group, dict) and "params" in param_group):
            raise ValueError(f"a parameter group must be a dict with 'params', got {param_group!r:.80}")
        group = dict(param_group)
        own_eps = "eps" in group
        check_once(group)
        if group.get("use_muon", True):
            triples = group.pop("ns_coefficients", None), group.pop("ns_steps", None)
            if triples != (None, None):
                group["solver"] = self._solver_of(shorthand(*triples, group.get("solver")))
            group.setdefault("step", max((g.get("step", 0) for g in self.param_groups), default=0))
            if "process_group" in group:
                group["process_group"] = as_process_group(group["process_group"])
        else:
            group = {**ADAM_DEFAULTS, **group}
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            if group["use_muon"]:
                if "solver" in param_group and not own_eps and isinstance(group["solver"], Solver):
                    group["eps"] = group["solver"].eps
                self.check_group(group)
            else:
                for key in self.defaults.keys() - ADAM_DEFAULTS.keys() - {"use_muon"} - param_group.keys():
                    del group[key]
                check_adam_group(group)
            for name, param in named_params(group, len(self.param_groups) - 1):
                check_param(name, param, group)
        except Exception:
            self.param_groups.pop()
            raise

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """The step with torch's hooks around it, as torch asks for it once for each class; never compiled."""
        hooked = torch.compiler.disable(
            Optimizer.profile_hook_step(func), reason="a step decides on the host what each matrix needs"
        )

        @functools.wraps(func)  # a disabled function itself would lose its `self` to some versions of torch
        def step(*args: Any, **kwargs: Any) -> Any:
            return hooked(*args, **kwargs)

        return step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure`, if given, recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [self._with_grad(number, group) for number, group in enumerate(self.param_groups)]
        plan = self._plan()
        with full_precision(*plan.device_types):
            for group, params in zip(self.param_groups, with_grad, strict=True):
                if not group["use_muon"]:
                    adam_step(group, params, self.state)
            if plan.matrices:
                number = 1 + max(group["step"] for group in self.param_groups if group["use_muon"])
                for group in self.param_groups:
                    if group["use_muon"]:
                        group["step"] = number
                if not self._exchanges:
                    self._exchanges = self._connections.exchanges(plan, self._placements())
                with self.around_matrices():
                    messages = take_step(plan, self._exchanges, number)
                self._warn_once(messages)
        return loss

    def _with_grad(self, number: int, group: dict[str, Any]) -> list[Tensor]:
        found = []
        for name, param in named_params(group, number):
            if param.grad is None or param.numel() == 0:
                continue
            if param.grad.is_sparse:
                raise ValueError(f"{name}: its gradient must be dense, got {param.grad.layout}")
            found.append(param)
        return found

    def _plan(self) -> Plan:
        """The plan for groups and state as they are now."""
        plan = self._made
        if plan is not None:
            plan.state = self.state
        if plan is None or not plan.fits(self.param_groups):
            self._learn()
            for group in self.param_groups:
                if group["use_muon"]:
                    self.check_group(group)
            plan = self._made = Plan(self.param_groups, self.state, self, ranks_of)
            self._exchanges, self._placed = [], None
            counts = summary.counted(plan)  # fewer where the state was cleared
            before = self._reported.items()
            self._reported = {name: row for name, row in before if sum(row) <= sum(counts.get(name, ()))}
            if plan.kinds and all(kind.choice.why for kind in plan.kinds):
                logger.info("no matrix is cached; print(optimizer.explain()) tells why of each")
        return plan

    def _placements(self) -> dict[int, Placement]:
        plan = self._plan()
        if self._placed is None:
            self._placed = placements(plan.kinds)
        return self._placed

    def _learn(self) -> None:
        """Bring the counters up to date with what is still on its way to the host."""
        if self._made is not None:
            self._made.state = self.state
            self._warn_once(self._made.learn())

    def _warn_once(self, texts: list[str]) -> None:
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                warnings.warn(text, RuntimeWarning, stacklevel=3)

    def cache_stats(self) -> dict[str, Any]:
        """What was done so far: see `report.summary.cache_stats`."""
        self._learn()
        sent = [ranks.bytes_sent for ranks in self._connections.rank_groups.values()]
        return summary.cache_stats(self._plan(), self._placements(), sent)

    def events(self) -> dict[str, Event]:
        """The last outcome of each matrix that was stepped, by name. Waits for the last step."""
        self._learn()
        return summary.events(self._plan())

    def metrics(self, prefix: str = "muon/") -> dict[str, float]:
        """Numbers for a log, always under the same names: see `report.summary.metrics`."""
        self._learn()
        plan, before = self._plan(), self._reported
        self._reported = summary.counted(plan)
        found = summary.metrics(plan, self._placements(), before)
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def explain(self) -> summary.Explanation:
        """Where each parameter went and why, and what its cache did: see `report.summary.explain`."""
        self._learn()
        return summary.explain(self._plan(), self._placements())

    def state_dict(self) -> StateDict:
        """The state. Solvers, which `weights_only=True` would not load, are written as their text."""
        self._learn()
        return checkpoint.save(self, super().state_dict)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a state: of `Muon` or `CacheMuon`, or of another optimizer (docs/migration.md).

        The live solvers stay, with a warning if their text differs from the saved one. Settings that the
        saved groups lack stay as they are. From another optimizer, momentum and Adam's moments are taken
        over, and all settings stay, with one warning that names those that differ. Nothing of `state_dict` is
        shared or changed; a load that is refused changes nothing.
        """
        self._learn()
        checkpoint.load(self, state_dict, super().load_state_dict)
