"""What both optimizers are around their solve: groups, state, the step, Adam."""

from __future__ import annotations

import functools
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from ..distributed.exchange import Shared, agree_on_finite, shared_of
from ..distributed.homes import Homes, by_mesh, sharded_as
from ..distributed.layout import Work
from ..distributed.rank_group import Party, as_replicas
from ..engine.host import Kept, Ledger
from ..engine.matrices import Matrix, matrices_of
from ..newton_schulz.normalize import full_precision
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import Solver
from ..report.accounts import Accounts
from ..report.counters import COLUMNS, RESIDUALS, new_counters
from ..routing.layout import reading_of
from .import_state import as_ours
from .settings import (
    ADAM_DEFAULTS,
    check_adam_group,
    check_entries,
    check_form,
    check_muon_group,
    check_once,
    check_param,
    check_pieces,
    check_step,
    named_params,
    shorthand,
)


class MatrixOptimizer(Accounts):
    """Momentum, decay and update for matrices, Adam for the rest; subclasses supply the solve.

    Everything that must survive is in `param_groups` and `state`: torch drops an optimizer's other
    attributes in `deepcopy` and pickling.
    """

    RECIPE: tuple[str, ...] = ("solver", "eps", "momentum", "nesterov", "step")
    """The settings that matrices must share to be worked on together; lr and decay may differ."""

    def __init__(
        self, params: ParamsT, solver: Solver, eps: float | None, process_group: Any, **settings: Any
    ) -> None:
        settings |= {"solver": solver, "eps": getattr(solver, "eps", None) if eps is None else eps}
        settings["process_group"] = as_replicas(process_group)
        read = {"view": "auto", "split": 1, "transposed": False}
        super().__init__(params, {"use_muon": True, **read, "step": 0, **settings})
        self._kept = Kept()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**super().__getstate__(), "told": self._kept.told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "told"})
        before: Kept | None = self.__dict__.get("_kept")  # when torch loads a state: ranks stay who they are
        self._kept = Kept(told=state.get("told", {}), parties=before.parties if before else {})

    @abstractmethod
    def _orthogonalize(self, matrices: list[Matrix], shared: list[Shared]) -> None:
        """Accumulate momentum, find the directions, and apply them; for what other ranks have too, with
        them.
        """

    def _agree(self, parties: list[Party]) -> None:
        """Come to terms with these ranks again, since one of them has something new: groups, settings, a
        state that was loaded.
        """

    @abstractmethod
    def _works(self, group: dict[str, Any], param: Tensor) -> list[Work]:
        """What each matrix of a parameter costs its owner."""

    @abstractmethod
    def _repeated(self, schedule: Schedule) -> Solver:
        """The solver that torch.optim.Muon's `ns_coefficients` and `ns_steps` ask for."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse settings of a Muon group that cannot be meant."""
        check_muon_group(group)

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
                group["solver"] = self._repeated(shorthand(*triples, group.get("solver")))
            group.setdefault("step", max((g.get("step", 0) for g in self.param_groups), default=0))
            if "process_group" in group:
                group["process_group"] = as_replicas(group["process_group"])
        else:
            group = {**ADAM_DEFAULTS, **group}
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            if group["use_muon"]:
                if "solver" in param_group and not own_eps and isinstance(group["solver"], Solver):
                    group["eps"] = group["solver"].eps
                self._check_group(group)
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
        named = [list(self._with_grad(i, group)) for i, group in enumerate(self.param_groups)]
        with full_precision(*{param.device.type for members in named for _, param in members}):
            self._step(named)
        return loss

    def _step(self, named: list[list[tuple[str, Tensor]]]) -> None:
        matrices: list[Matrix] = []
        shared: list[Shared] = []
        present, everywhere, changed = self._homes().present(new=not self._kept.reconciled)
        if changed or not self._kept.reconciled:
            self._agree(changed)
            self._kept.reconciled = True
        homes = self._homes()
        if not everywhere:
            self._warn_once(
                "a parameter has a gradient on some ranks and none on others: no rank steps it. This is said "
                "once."
            )
        for group, members in zip(self.param_groups, named, strict=True):
            if not group["use_muon"]:
                self._adam(group, [param for _, param in members])
                continue
            group["step"] += 1
            recipe = tuple(group[key] for key in self.RECIPE)
            for _, param in members:
                home = homes.of.get(id(param))
                if home is None:
                    matrices += matrices_of(param, group, self._matrix_state(param, group), recipe)
                elif id(param) in present:
                    shared += shared_of(param, group, self._matrix_state(param, group), recipe, home)
        agree_on_finite(shared)
        if matrices or shared:
            self._orthogonalize(matrices, shared)

    def _homes(self) -> Homes:
        """Where the parameters are that other ranks have too."""
        homes: Homes | None = self._kept.homes
        if homes is None or not homes.fits(self.param_groups):
            homes = self._kept.homes = Homes(self.param_groups, self._kept.parties, self._works)
            self._kept.reconciled = False
        return homes

    def _rows(self, entry: str, matrices: list[Matrix]) -> list[list[Any]]:
        """The "counters" or "residuals" of each matrix, which the host knows by heart."""
        ledger: Ledger = getattr(self._kept, entry)
        return [ledger.rows(x.state[entry])[x.index] for x in matrices]

    def _post(self, entry: str, matrices: list[Matrix], rows: list[list[Any]]) -> None:
        """Write the "counters" or "residuals" of each matrix; those of a stack follow one another."""
        tensors: list[Tensor] = []
        parts: list[list[list[Any]]] = []
        for x, row in zip(matrices, rows, strict=True):
            if x.index == 0:
                tensors.append(x.state[entry])
                parts.append([])
            parts[-1].append(row)
        ledger: Ledger = getattr(self._kept, entry)
        ledger.post(tensors, parts)

    def _settle(self, *, wait: bool = True) -> None:
        if not self._kept.settle(wait=wait):
            self._warn_non_finite()

    def _warn_non_finite(self) -> None:
        self._warn_once(
            "a gradient has a NaN or Inf: that matrix, its momentum and its transform were left as they "
            "were for the step; cache_stats() counts such steps as 'non-finite'. This is said once."
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._kept.warned:
            self._kept.warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _with_grad(self, index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name, param in named_params(group, index):
            if param.grad is None or param.numel() == 0:
                continue
            if param.grad.is_sparse:
                raise ValueError(f"{name}: its gradient must be dense, got {param.grad.layout}")
            yield name, param

    def _matrix_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        number = len(reading_of(group, param).pieces)
        if "counters" not in state:
            # On the host, which decides by them, and knows what it has written.
            state["counters"] = torch.empty(number, len(COLUMNS), dtype=torch.int64, device="cpu")
            self._kept.counters.post([state["counters"]], [[new_counters()] * number])
            state["residuals"] = torch.empty(number, len(RESIDUALS), dtype=torch.float64, device="cpu")
            self._kept.residuals.post([state["residuals"]], [[[math.nan] * len(RESIDUALS)] * number])
        elif state["counters"].device.type != "cpu":  # moved there with all of a state, as Lightning does
            state["counters"], state["residuals"] = state["counters"].cpu(), state["residuals"].cpu()
        check_pieces(param, number, state)
        return state

    def _adam(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                where = param.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=where)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        for alike in by_mesh(params):
            self._adam_step(group, alike)

    def _adam_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        # The fused kernel would walk over the gaps of one that is every second column of a tensor.
        dense = [param if _without_gaps(param) else param.clone() for param in params]
        pairs = [(one, param.grad) for one, param in zip(dense, params, strict=True)]
        adam(
            dense,
            [_laid_out_as(one, grad) for one, grad in pairs if grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False if group["fused"] else None,
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for param, one in zip(params, dense, strict=True):
            if one is not param:
                param.copy_(one)

    def state_dict(self) -> StateDict:
        """The state; solvers, which `weights_only=True` would not load, are written as their text."""
        self._settle()
        packed = super().state_dict()
        for group in packed["param_groups"]:
            if "solver" in group:
                group["solver"] = repr(group["solver"])
            if "process_group" in group:  # of this process: the one that loads has its own
                group["process_group"] = None
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a state: of `Muon` or `CacheMuon`, or of another optimizer (docs/migration.md).

        The live solvers stay, with a warning if their text differs from the saved one. Settings that
        the saved groups lack stay as they are. From another optimizer, one of `foreign.PEERS`, momentum and
        Adam's moments are taken over, and all settings stay, with one warning that names those that differ.
        Nothing of `state_dict` is shared or changed; a load that is refused changes nothing.
        """
        self._settle()
        if not isinstance(state_dict, dict):
            check_form(state_dict)
        before = {key: self.__dict__[key] for key in ("state", "param_groups", "_kept")}
        try:
            self._load(state_dict)
        except Exception:
            self.__dict__.update(before)  # torch has made them anew: these are as they were
            raise

    def _load(self, state_dict: StateDict) -> None:
        live = [dict(group) for group in self.param_groups]
        loaded: list[tuple[StateDict, str]] = []  # what the user's own hooks made of it, and what to warn of

        def translate(_: torch.optim.Optimizer, final: StateDict) -> StateDict:
            check_form(final)
            loaded.append(as_ours(final, live))
            self._check_saved(loaded[0][0])
            return loaded[0][0]

        handle = self.register_load_state_dict_pre_hook(translate)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        state_dict, differences = loaded[0]
        saved_groups = state_dict["param_groups"]
        for group, before, saved in zip(self.param_groups, live, saved_groups, strict=True):
            for key, value in before.items():
                group.setdefault(key, value)
            if "solver" not in before:
                continue
            group["solver"], group["process_group"] = before["solver"], before["process_group"]
            if saved.get("solver", repr(before["solver"])) != repr(before["solver"]):
                warnings.warn(
                    f"the saved state was made with solver {saved['solver']}, going on with "
                    f"{before['solver']!r}",
                    stacklevel=3,
                )
        saved_keys = [key for group in saved_groups for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved_keys, params, strict=True):
            for entry, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    restored = self._restored(param, entry, value, self.state[param][entry])
                    self.state[param][entry] = restored
        self._kept.reconciled = False
        self._kept.told = self._counted()
        if differences:
            warnings.warn(differences, stacklevel=3)

    def _check_saved(self, saved: StateDict) -> None:
        """Refuse a state that cannot be gone on from, before any of it is taken."""
        for index, (live, old) in enumerate(zip(self.param_groups, saved["param_groups"], strict=False)):
            kept = ("params", "param_names", "solver", "process_group")
            group = live | {key: value for key, value in old.items() if key not in kept}
            if group["use_muon"] is not live["use_muon"]:
                got = f"{group['use_muon']!r}, and {live['use_muon']!r} here"
                raise ValueError(
                    f"use_muon of param_groups[{index}] must be the same in a saved state, got {got}"
                )
            if not group["use_muon"]:
                check_adam_group(group)
            else:
                check_step(group)
                self._check_group(group)
            for key, (name, param) in zip(old["params"], named_params(live, index), strict=False):
                check_param(name, param, group)
                check_entries(name, param, group, saved["state"].get(key, {}))

    def _restored(self, param: Tensor, entry: str, saved: Tensor, loaded: Tensor) -> Tensor:
        # Torch casts what it loads to the parameter's dtype: in bf16 a counter of 1001 becomes 1000.
        if entry in ("counters", "residuals"):
            dtype = torch.int64 if entry == "counters" else torch.float64
            return saved.to("cpu", dtype, copy=True)
        if entry.startswith("transform"):
            return saved.to(loaded.device, copy=True)
        loaded = sharded_as(param, loaded)
        if entry == "momentum_buffer":
            return loaded.clone(memory_format=torch.contiguous_format)
        return _laid_out_as(param, loaded).clone()


def _without_gaps(tensor: Tensor) -> bool:
    if tensor.is_contiguous():  # nearly all are, and this is asked at every step
        return True
    sides = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    return all(stride == math.prod(size for _, size in sides[:i]) for i, (stride, _) in enumerate(sides))


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the parameter's memory layout: the fused kernel walks over both alike."""
    if tensor.shape != param.shape or tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)
