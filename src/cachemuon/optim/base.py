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
from ..engine.bucket import Choice
from ..engine.orthogonalize import Normalization
from ..engine.plan import Plan
from ..engine.step import Exchange, take_step
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.products import full_precision
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import Solver
from ..report import summary
from ..report.counters import Event
from ..routing.layout import MatrixView, named_params
from . import checkpoint
from .adam import ADAM_DEFAULTS, adam_step
from .rates import RateWatch, learning_rate
from .settings import (
    ADAM_RULES,
    MUON_RULES,
    NAMED_SCHEDULES,
    check,
    check_once,
    check_param,
    check_spelling,
    shorthand,
)

logger = logging.getLogger("cachemuon")


def arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The settings among the `locals()` with which a constructor begins.

    >>> arguments({"self": None, "params": [], "lr": 0.1})
    {'lr': 0.1}
    """
    return {name: value for name, value in values.items() if name not in ("self", "params", "__class__")}


def normalized(choice: Choice, group: dict[str, Any], param: Tensor, view: MatrixView) -> Choice:
    """A choice for matrices of a group with the group's normalization, if it has one."""
    normalization = Normalization.of(group, *view.sides)
    if normalization is None:
        return choice
    # Its temporaries: a dozen numbers for each row and column.
    room = choice.room + 12 * sum(view.sides) * computed_in(param.dtype).itemsize
    return choice._replace(room=room, normalization=normalization)


class MatrixOptimizer(Optimizer):
    """Momentum, decay and update for matrices, Adam for the rest; subclasses say how matrices are
    orthogonalized.

    Everything that must survive is in `param_groups` and `state`: torch drops an optimizer's other attributes
    in `deepcopy` and pickling. The plan and the exchanges are made from these, and made again when they
    change.
    """

    settings: tuple[str, ...] = ("solver", "eps", "normalize", "transposed")
    """The settings that matrices must share to be worked on together."""

    around_matrices: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What makes the context that each step enters for its matrices, after Adam: for a clock or a
    profiler.
    """

    def __init__(self, params: ParamsT, settings: dict[str, Any]) -> None:
        layout = {"view": "auto", "split": 1, "transposed": False}
        self._forget()
        super().__init__(params, {"use_muon": True, **layout, "step": 0, **self._resolved(settings)})

    @abstractmethod
    def choose(self, group: dict[str, Any], param: Tensor, view: MatrixView, count: int) -> Choice:
        """How a matrix of a parameter is orthogonalized, of whose kind there are `count`."""

    @abstractmethod
    def solver_of(self, schedule: Schedule | None) -> Solver:
        """The solver with a schedule, as of torch.optim.Muon's `ns_coefficients`; the default without one."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse settings of a group that are out of range."""
        check(group, MUON_RULES if group["use_muon"] else ADAM_RULES)
        if isinstance(group.get("split"), list):
            group["split"] = tuple(group["split"])

    def _resolved(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of the constructor or of a Muon group with a solver where one is named or described."""
        settings, solver = dict(settings), settings.get("solver")
        triples = settings.pop("ns_coefficients", None), settings.pop("ns_steps", None)
        if triples != (None, None):
            solver = self.solver_of(shorthand(*triples, solver))
        elif isinstance(solver, str) and solver in NAMED_SCHEDULES:
            solver = self.solver_of(NAMED_SCHEDULES[solver])
        elif "solver" in settings and solver is None:
            solver = self.solver_of(None)
        if "solver" in settings and settings.get("eps") is None:
            settings["eps"] = getattr(solver, "eps", None)
        if "process_group" in settings:
            settings["process_group"] = as_process_group(settings["process_group"])
        return settings if solver is None else {**settings, "solver": solver}

    def _forget(self) -> None:
        self._made: Plan | None = None
        self._exchanges: list[Exchange] = []
        self._placed: dict[int, Placement] | None = None
        self._connections = Connections()
        self._reported: summary.Counts = {}  # what the last metrics() had counted
        self._warned: set[str] = set()
        self._rates = RateWatch()

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
        self._rates = RateWatch(self.param_groups)
        self._reported = summary.counted(self._plan())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the given dict is not changed.

        `use_muon=False` makes it Adam's. A matrix group may have settings of its own.
        """
        if not (isinstance(param_group, dict) and "params" in param_group):
            raise ValueError(f"a parameter group must be a dict with 'params', got {param_group!r:.80}")
        group = {"use_muon": True, **param_group}
        check_once(group)
        check_spelling(group)
        if group["use_muon"]:
            group = self._resolved(group)
            group.setdefault("step", max((g.get("step", 0) for g in self.param_groups), default=0))
        else:
            own_lr = {"lr": self.defaults["lr"]} if "lr_ratio" in group else {}
            group = {**ADAM_DEFAULTS, **own_lr, **group}
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            if not group["use_muon"]:  # torch has given it the defaults of Muon
                for key in self.defaults.keys() - ADAM_DEFAULTS.keys() - {"use_muon"} - param_group.keys():
                    del group[key]
            self.check_group(group)
            for name, param in named_params(group, len(self.param_groups) - 1):
                check_param(name, param, group)
        except Exception:
            self.param_groups.pop()
            raise
        self._rates.add(group)

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
        if len(self.param_groups) > 1:
            self._warn_once(self._rates.check(self.param_groups))
        plan = self._plan()
        with full_precision(*plan.device_types):
            for group, params in zip(self.param_groups, with_grad, strict=True):
                if not group["use_muon"]:
                    adam_step(group, params, self.state)
            if plan.matrices:
                muon_groups = [group for group in self.param_groups if group["use_muon"]]
                number = 1 + max(group["step"] for group in muon_groups)
                for group in muon_groups:
                    group["step"] = number
                if not self._exchanges:
                    self._exchanges = self._connections.exchanges(plan, self._placements())
                with self.around_matrices():
                    messages = take_step(plan, self._exchanges, number)
                if messages:
                    self._warn_once(*messages)
        return loss

    def _with_grad(self, number: int, group: dict[str, Any]) -> list[Tensor]:
        found = [p for p in group["params"] if p.grad is not None and p.numel()]
        for param in found:
            if (grad := param.grad) is not None and grad.is_sparse:
                name = next(name for name, one in named_params(group, number) if one is param)
                raise ValueError(f"{name}: its gradient must be dense, got {grad.layout}")
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
                logger.info("no matrix is cached; print(optimizer.explain()) says why for each")
            self._log_embeddings()
        return plan

    def _log_embeddings(self) -> None:
        """Log, once, matrices that nobody has routed and that look like embeddings or heads."""
        if names := summary.suspects(self.param_groups).difference(self._warned):
            self._warned |= names
            logger.warning(
                "Muon was given %s, by name or shape an embedding or an output head, which train better with "
                "Adam: param_groups(model) gives them to Adam",
                ", ".join(sorted(names)),
            )

    def _placements(self) -> dict[int, Placement]:
        plan = self._plan()
        if self._placed is None:
            self._placed = placements(plan.kinds)
        return self._placed

    def _learn(self) -> None:
        """Bring the counters up to date with what is still on its way to the host."""
        if self._made is not None:
            self._made.state = self.state
            self._warn_once(*self._made.learn())

    def _warn_once(self, *texts: str) -> None:
        for text in texts:
            if text and text not in self._warned:
                self._warned.add(text)
                warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _learning_rates(self) -> list[float]:
        return [float(learning_rate(group)) for group in self.param_groups]

    def _counted(self) -> Plan:
        self._learn()
        return self._plan()

    def cache_stats(self) -> dict[str, Any]:
        """Counts since the beginning: see `report.summary.cache_stats`."""
        sent = [ranks.bytes_sent for ranks in self._connections.rank_groups.values()]
        return summary.cache_stats(self._counted(), self._placements(), sent)

    def events(self) -> dict[str, Event]:
        """The last outcome of each matrix that was stepped, by name. Waits for the last step."""
        return summary.events(self._counted())

    def metrics(self, prefix: str = "muon/") -> dict[str, float]:
        """Numbers for a log, always under the same names: see `report.summary.metrics`."""
        plan, before = self._counted(), self._reported
        self._reported = summary.counted(plan)
        found = summary.metrics(plan, self._placements(), before, self._learning_rates())
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def explain(self) -> summary.Explanation:
        """Where each parameter went and why, and what its cache did: see `report.summary.explain`."""
        return summary.explain(self._counted(), self._placements(), self._learning_rates())

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
