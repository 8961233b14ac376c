"""What may be said of a parameter group: Adam's defaults, torch's shorthands, and what is refused.

Every error names the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..distributed.placement import check_sharding
from ..engine.momentum import ADJUST_LR_FNS
from ..newton_schulz.normalize import fits_dtype
from ..newton_schulz.schedules import QUINTIC, Schedule
from ..newton_schulz.solvers import Solver
from ..report.counters import COLUMNS, NEVER, OUTCOMES, RESIDUALS, entry_name
from ..routing.layout import layout_of

MOST = 2**53
"""More than any counter comes to."""


def check_muon_group(group: dict[str, Any]) -> None:
    """Refuse settings of a Muon group that cannot be meant."""
    if not isinstance(group["solver"], Solver):
        raise ValueError(f"solver must be a Solver such as GramNS(), got {group['solver']!r}")
    check_non_negative(group, "lr", "weight_decay", "eps")
    check_decay("momentum", group["momentum"])
    check_absent(group, "maximize")
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise ValueError(
            f"adjust_lr_fn must be one of {', '.join(map(repr, ADJUST_LR_FNS))} or None (as in torch: "
            f"'original'), got {group['adjust_lr_fn']!r}"
        )
    check_split(group)
    size = group["max_workspace_bytes"]
    if size is not None and not (isinstance(size, int) and size > 0):
        raise ValueError(f"max_workspace_bytes must be an integer > 0 or None, got {size!r}")


CACHE_DTYPES = (torch.float32, torch.float16)
"""What a transform may be kept in. Not bfloat16, which takes as many bytes as float16 and rounds eight times
as much (docs/memory.md)."""


def check_cache_storage(group: dict[str, Any]) -> None:
    """Refuse a dtype that cannot store transforms."""
    dtype = group["cache_dtype"]
    if dtype is not None and dtype not in CACHE_DTYPES:
        allowed = ", ".join(map(str, CACHE_DTYPES))
        raise ValueError(f"cache_dtype must be one of {allowed} or None, got {dtype!r}")
    schedule = group["solver"].schedule
    if dtype is not None and not fits_dtype(dtype, schedule):
        needed = f"a transform of this solver, with entries up to {schedule.gain:.0f}"
        raise ValueError(f"cache_dtype must hold {needed}, got {dtype!r}")


def check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a value that is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_step(group: dict[str, Any]) -> None:
    """Refuse what is no number of steps."""
    if not (isinstance(group["step"], int) and 0 <= group["step"] <= MOST):
        raise ValueError(f"step must be an integer from 0 to {MOST}, got {group['step']!r}")


def check_split(group: dict[str, Any]) -> None:
    """Refuse parts and orientations that cannot be meant; parts as a list become a tuple."""
    if isinstance(group["split"], list):
        group["split"] = tuple(group["split"])
    sizes = group["split"] if isinstance(group["split"], tuple) else (group["split"],)
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(f"split must be an integer >= 1, or a tuple of them, got {group['split']!r}")
    if not isinstance(group["transposed"], bool):
        raise ValueError(f"transposed must be True or False, got {group['transposed']!r}")


def shorthand(coefficients: Any, steps: int | None, solver: Solver | None) -> Schedule:
    """torch.optim.Muon's `ns_coefficients` and `ns_steps`: one triple repeated; or a triple for each step."""
    if solver is not None:
        raise ValueError(
            f"solver and ns_coefficients or ns_steps exclude each other, got solver={solver!r}, "
            f"ns_coefficients={coefficients!r}, ns_steps={steps!r}"
        )
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"ns_steps must be an integer >= 1, got {steps!r}")
    triples = QUINTIC.triples[:1] if coefficients is None else tuple(coefficients)
    if triples and not isinstance(triples[0], Sequence):
        triples = (triples,)
    if len(triples) == 1:
        triples = triples * (5 if steps is None else steps)
    if steps is not None and len(triples) != steps:
        raise ValueError(f"ns_steps must be the number of ns_coefficients, {len(triples)}, got {steps!r}")
    return Schedule(triples)


def check_once(group: dict[str, Any]) -> None:
    """Refuse a parameter that a group has twice: it would be stepped twice, with one state."""
    if isinstance(group["params"], Tensor | set):  # a set is refused by torch
        return
    group["params"] = list(group["params"])  # it may be a generator
    seen: set[int] = set()
    for one in group["params"]:
        tensor = one[1] if isinstance(one, tuple) else one
        if not isinstance(tensor, Tensor):
            raise ValueError(f"params must be tensors, or pairs of a name and a tensor, got {one!r}")
        if id(tensor) in seen:
            got = f"the one of shape {tuple(tensor.shape)} twice"
            raise ValueError(f"params must have each parameter once, got {got}")
        seen.add(id(tensor))


def check_form(saved: Any) -> None:
    """Refuse what is not even the form of an optimizer's state."""
    found = saved if isinstance(saved, dict) else {}
    groups, state = found.get("param_groups"), found.get("state")
    if not (isinstance(groups, list) and isinstance(state, dict)):
        got = f"the keys {list(saved)}" if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"state_dict must have a list 'param_groups' and a dict 'state', got {got}")
    for number, group in enumerate(groups):
        keys = group.get("params") if isinstance(group, dict) else None
        if not (isinstance(keys, list) and all(isinstance(key, int | str) for key in keys)):
            raise ValueError(f"param_groups[{number}] must have a list 'params' of numbers, got {keys!r}")
    known = {key for group in groups for key in group["params"]}
    for key, entries in state.items():
        if key in known and not isinstance(entries, dict):
            raise ValueError(f"state[{key!r}] must be a dict, got {type(entries).__name__}")


def check_entries(name: str, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse saved entries that are not this parameter's, of another version of this library, or damaged.

    None at all are fine, and those that are not known here.
    """
    expected: dict[str, tuple[int, ...] | None]  # shapes; None: one number
    if group["use_muon"]:
        pieces = layout_of(group, param).views
        number, sides = len(pieces), [piece.wide[0] for piece in pieces]
        together = ("counters", "residuals", "momentum_buffer")
        expected = {
            "counters": (number, len(COLUMNS)),
            "residuals": (number, len(RESIDUALS)),
            "momentum_buffer": tuple(param.shape),
            **{entry_name("transform", index, number): (n, n) for index, n in enumerate(sides)},
        }
        begun = "counters" in saved or "residuals" in saved
    else:
        together = ("step", "exp_avg", "exp_avg_sq")
        expected = {"step": None, "exp_avg": tuple(param.shape), "exp_avg_sq": tuple(param.shape)}
        begun = any(entry in saved for entry in together)
    if begun and (missing := [entry for entry in together if entry not in saved]):
        raise ValueError(f"{name}: its state must have {', '.join(together)}, and lacks {', '.join(missing)}")
    for entry, shape in expected.items():
        if entry not in saved:
            continue
        value = saved[entry]
        if entry == "step" and is_number(value):
            value = torch.tensor(float(value), device="cpu")
        if not (isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"):
            got = (
                f"one in {value.layout} on {value.device}" if isinstance(value, Tensor) else repr(value)[:60]
            )
            raise ValueError(f"{name}: {entry} must be a dense tensor, got {got}")
        if tuple(value.shape) != shape if shape is not None else value.numel() != 1:
            raise ValueError(
                f"{name}: {entry} must have shape {shape or (1,)}, got {tuple(value.shape)}: of another "
                f"parameter, or of another version"
            )
        if not (value.dtype == torch.int64 if entry == "counters" else value.is_floating_point()):
            wanted = "torch.int64" if entry == "counters" else "real floating point"
            raise ValueError(f"{name}: {entry} must be {wanted}, got {value.dtype}")
        if entry == "step" and not 0 <= value.item() <= MOST:
            raise ValueError(f"{name}: step must be a number >= 0, got {value.item()}")
    for row in saved["counters"].tolist() if group["use_muon"] and begun else ():
        check_counters(name, row)


def check_counters(name: str, row: list[int]) -> None:
    """Refuse counters that no sequence of steps leads to."""
    lowest = {"made": NEVER, "last": -1}
    highest = {"last": len(OUTCOMES) - 1}
    for column, value in zip(COLUMNS, row, strict=True):
        low, high = lowest.get(column, 0), highest.get(column, MOST)
        if not low <= value <= high:
            raise ValueError(f"{name}: the counter {column!r} must be from {low} to {high}, got {value}")


def check_param(name: str, param: Tensor, group: dict[str, Any]) -> None:
    """Refuse a parameter that cannot be stepped, or not as a matrix."""
    if not param.is_floating_point():
        raise ValueError(f"{name}: parameters must be real floating point, got {param.dtype}")
    if param.layout != torch.strided:
        raise ValueError(f"{name}: parameters must be dense, got {param.layout}")
    check_sharding(name, param)
    if not group["use_muon"]:
        return
    if param.ndim < 2:
        raise ValueError(
            f"{name}: a parameter of a Muon group must have at least 2 dimensions, got shape "
            f"{tuple(param.shape)}; param_groups(model) gives the others to Adam (use_muon=False)"
        )
    try:
        layout_of(group, param)
    except ValueError as error:
        raise ValueError(f"{name} of shape {tuple(param.shape)}: {error}") from None


def check_adam_group(group: dict[str, Any]) -> None:
    """Refuse settings of an Adam group that cannot be meant, or are not offered."""
    check_non_negative(group, "lr", "weight_decay", "eps")
    betas = group["betas"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        check_decay("betas", beta)
    check_decay("momentum", group.get("momentum", 0.0))
    check_absent(group, "amsgrad", "maximize")


def check_absent(group: dict[str, Any], *keys: str) -> None:
    """Refuse what would otherwise silently not be done."""
    for key in keys:
        if group.get(key):
            raise ValueError(f"{key} must be left out or False, got {group[key]!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a setting is a number: also one of numpy's, or a tensor of one element.

    >>> is_number(0.1), is_number(torch.tensor(0.1)), is_number("0.1")
    (True, True, False)
    """
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_decay(key: str, value: object) -> None:
    """Refuse what is no factor of an average."""
    if not (is_number(value) and 0 <= float(value) < 1):
        raise ValueError(f"{key} must be in [0, 1), got {value!r}")


def check_non_negative(group: dict[str, Any], *keys: str) -> None:
    """Refuse what is no number, or a negative one."""
    for key in keys:
        value = group[key]
        if isinstance(value, Tensor) and key == "lr":
            if value.numel() != 1:
                raise ValueError(
                    f"{key} must be a number or a tensor of one element, got shape {value.shape}"
                )
        elif not (is_number(value) and math.isfinite(float(value)) and float(value) >= 0):
            raise ValueError(f"{key} must be a number >= 0, got {value!r}")
