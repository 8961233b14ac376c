"""State dicts: what is written, and what is accepted back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from ..distributed.state import sharded_as
from ..routing.layout import named_params
from .adam import laid_out_as
from .import_state import convert
from .settings import check_entries, check_form, check_param

if TYPE_CHECKING:
    from .base import MatrixOptimizer

LIVE = ("solver", "process_group")
"""Settings that are not taken from a saved state."""


def save(optimizer: Optimizer, pack: Callable[[], StateDict]) -> StateDict:
    """The state dict, of plain values. Hooks of the user see it as it will be saved, and may change it."""
    handle = optimizer.register_state_dict_post_hook(_as_plain, prepend=True)
    try:
        return pack()
    finally:
        handle.remove()


def _as_plain(_: Optimizer, packed: StateDict) -> None:
    """Values that `torch.load(weights_only=True)` takes: a solver as its text, no process group."""
    for group in packed["param_groups"]:
        if "solver" in group:
            group["solver"] = repr(group["solver"])
        if "process_group" in group:  # of this process: the one that loads has its own
            group["process_group"] = None
        for key, value in group.items():
            group[key] = _plain(value)


def _plain(value: Any) -> Any:
    """A number of numpy's as one of Python's, also within a tuple."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, Real) and type(value).__module__ != "builtins":
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def load(optimizer: MatrixOptimizer, state_dict: StateDict, unpack: Callable[[StateDict], None]) -> None:
    """Continue from a state. A state that is refused changes nothing.

    Hooks of the user run around this: before it they may change the state, after it they see an optimizer
    that is complete.
    """
    if not isinstance(state_dict, dict):
        check_form(state_dict)
    before, agreed = dict(optimizer.__dict__), dict(optimizer._connections.agreed)
    live = [dict(group) for group in optimizer.param_groups]
    loaded: list[StateDict] = []
    told: list[str] = []

    def translate(_: Optimizer, final: StateDict) -> StateDict:
        check_form(final)
        converted, differences = convert(final, live)
        _check_saved(optimizer, converted)
        loaded.append(converted)
        told.extend([differences] if differences else [])
        return converted

    def restore(_: Optimizer) -> None:
        told.extend(_restore_groups(optimizer, live, loaded[0]))
        _restore_state(optimizer, loaded[0])
        optimizer.loaded()

    handles = (
        optimizer.register_load_state_dict_pre_hook(translate),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        unpack(state_dict)
        for text in told:  # here, since a warning may be an error
            warnings.warn(text, stacklevel=3)
    except Exception:
        optimizer.__dict__.update(before)  # torch has made another state and other groups
        optimizer._connections.agreed = agreed  # else this rank alone would ask the others to agree again
        raise
    finally:
        for handle in handles:
            handle.remove()


def _check_saved(optimizer: MatrixOptimizer, saved: StateDict) -> None:
    """Refuse a state that does not fit, before any of it is taken."""
    for index, (live, old) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        kept = ("params", "param_names", *LIVE)
        group = live | {key: value for key, value in old.items() if key not in kept}
        if group["use_muon"] is not live["use_muon"]:
            got = f"{group['use_muon']!r}, and {live['use_muon']!r} here"
            raise ValueError(f"use_muon of param_groups[{index}] must be that of the live group, got {got}")
        optimizer.check_group(group)
        for key, (name, param) in zip(old["params"], named_params(live, index), strict=False):
            check_param(name, param, group)
            check_entries(name, param, group, saved["state"].get(key, {}))


def _restore_groups(optimizer: MatrixOptimizer, live: list[dict[str, Any]], saved: StateDict) -> list[str]:
    """Settings that the saved groups lack, and those that stay as they are. Returns what to warn of."""
    told = []
    for group, before, old in zip(optimizer.param_groups, live, saved["param_groups"], strict=True):
        group.update({key: value for key, value in before.items() if key in LIVE or key not in group})
        if "solver" in before and old.get("solver", repr(before["solver"])) != repr(before["solver"]):
            told.append(f"the saved state has solver {old['solver']}; {before['solver']!r} stays in use")
    return told


def _restore_state(optimizer: MatrixOptimizer, saved: StateDict) -> None:
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in zip(keys, params, strict=True):
        entries = optimizer.state[param] if key in saved["state"] else {}
        for entry, value in saved["state"].get(key, {}).items():
            if isinstance(value, Tensor):
                entries[entry] = _restored(param, entry, value, entries[entry])


def _restored(param: Tensor, entry: str, saved: Tensor, loaded: Tensor) -> Tensor:
    """An entry in the dtype that it was saved in, but for momentum: torch casts all to the parameter's."""
    if entry in ("counters", "residuals"):
        return saved.to("cpu", copy=True)
    if entry.startswith("transform") or saved.shape != param.shape:
        return saved.to(loaded.device, copy=True)
    loaded = sharded_as(param, loaded)
    if entry == "momentum_buffer":
        return loaded.clone(memory_format=torch.contiguous_format)
    return laid_out_as(param, loaded).clone()
