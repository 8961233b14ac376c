"""The rules for a parameter group and for a saved state.

Every error names the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..distributed.placement import EXCHANGES, check_sharding
from ..engine.orthogonalize import TRANSFORM, Normalization
from ..engine.plan import ADJUST_LR_FNS
from ..newton_schulz import schedules
from ..newton_schulz.normalize import fits_dtype
from ..newton_schulz.schedules import QUINTIC, Schedule
from ..newton_schulz.solvers import GramNS, Solver
from ..report.counters import COLUMNS, NEVER, OUTCOMES, RESIDUALS, entry_name
from ..routing.layout import layout_of
from ..routing.names import ADAM_SETTINGS, MUON_SETTINGS, misspelled

Rule = tuple[Callable[[Any], bool], str]
"""Which values a setting may have, and in words."""

MOST = 2**53
"""More than any counter comes to."""

NAMED_SCHEDULES = {
    "gram": schedules.GRAM,
    "polar_express": schedules.POLAR_EXPRESS,
    "jordan": schedules.QUINTIC,
}
"""What `solver` may be as text: in `CacheMuon` a GramNS with that schedule, in `Muon` a StandardNS, but for
"gram", which is a GramNS in both.
"""

NORMALIZE = ("rows", "factored")
"""What the second moments are of that directions are divided by: of outputs, or of these and inputs."""

GATES = ("schedule", "residual")
"""How it is decided whether a transform is reused: by the step's number, or by reading its residual."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a setting is a number: also one of numpy's, or a tensor of one element.

    >>> is_number(0.1), is_number(torch.tensor(0.1)), is_number("0.1")
    (True, True, False)
    """
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _non_negative(value: object) -> bool:
    return is_number(value) and math.isfinite(float(value)) and float(value) >= 0


def _decay(value: object) -> bool:
    return is_number(value) and 0 <= float(value) < 1


def _split(value: object) -> bool:
    sizes = value if isinstance(value, tuple | list) else (value,)
    return bool(sizes) and all(type(size) is int and size >= 1 for size in sizes)


def _one_of(*allowed: object) -> Rule:
    return (lambda value: value in allowed), f"one of {', '.join(map(repr, allowed))}"


NON_NEGATIVE: Rule = _non_negative, "a number >= 0"
DECAY: Rule = _decay, "in [0, 1)"
BOOLEAN: Rule = (lambda value: isinstance(value, bool)), "True or False"
ABSENT: Rule = (lambda value: not value), "left out or False"
STEP: Rule = (lambda value: isinstance(value, int) and 0 <= value <= MOST), f"an integer from 0 to {MOST}"
LR: Rule = (
    # A tensor may lie on a device, and is not read.
    lambda value: value.numel() == 1 if isinstance(value, Tensor) else _non_negative(value),
    "a number >= 0 or a tensor of one element",
)

MUON_RULES: dict[str, Rule] = {
    "solver": (
        lambda value: isinstance(value, Solver),
        f"a Solver such as GramNS() or one of {', '.join(map(repr, NAMED_SCHEDULES))}",
    ),
    "lr": LR,
    "weight_decay": NON_NEGATIVE,
    "eps": NON_NEGATIVE,
    "momentum": DECAY,
    "maximize": ABSENT,
    "lr_ratio": ((lambda value: value is None), "left out of a group of Muon: it is a setting of Adam's"),
    "adjust_lr_fn": _one_of(*ADJUST_LR_FNS, None),
    "normalize": _one_of(*NORMALIZE, None),
    "split": (_split, "an integer >= 1 or a tuple of them"),
    "transposed": BOOLEAN,
    "max_workspace_bytes": (
        lambda value: value is None or (isinstance(value, int) and value > 0),
        "an integer > 0 or None",
    ),
    "step": STEP,
}
CACHE_RULES: dict[str, Rule] = {
    "solver": (lambda value: isinstance(value, GramNS), "a GramNS, which yields a transform"),
    "seed": ((lambda value: isinstance(value, int)), "an integer"),
    "min_rows": ((lambda value: isinstance(value, int) and value >= 0), "an integer >= 0"),
    "gate": _one_of(*GATES),
    "exchange": _one_of(*EXCHANGES, None),
    "cache_all": BOOLEAN,
    # Not bfloat16: as many bytes as float16, and eight times its error (docs/notebook/memory.md).
    "cache_dtype": _one_of(torch.float32, torch.float16, None),
}
ADAM_RULES: dict[str, Rule] = {
    "lr": LR,
    "lr_ratio": NON_NEGATIVE,
    "weight_decay": NON_NEGATIVE,
    "eps": NON_NEGATIVE,
    "betas": (
        lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_decay, value)),
        "two numbers in [0, 1)",
    ),
    "momentum": DECAY,
    "amsgrad": ABSENT,
    "maximize": ABSENT,
}


def check(group: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Refuse settings of a group that are out of range."""
    for name, (allows, allowed) in rules.items():
        if name in group and not allows(group[name]):
            raise ValueError(f"{name} must be {allowed}, got {group[name]!r}")


def check_cache_dtype(group: dict[str, Any]) -> None:
    """Refuse a dtype that is too coarse for the transforms of the solver."""
    dtype, schedule = group["cache_dtype"], group["solver"].schedule
    if dtype is not None and not fits_dtype(dtype, schedule):
        needed = f"a transform of this solver, with entries up to {schedule.gain:.0f}"
        raise ValueError(f"cache_dtype must hold {needed}, got {dtype!r}")


def check_spelling(group: dict[str, Any]) -> None:
    """Refuse a key that misspells a setting; other keys are the program's own."""
    known = MUON_SETTINGS | {"view", "split", "transposed"} if group["use_muon"] else ADAM_SETTINGS
    for key in group.keys() - {"params", "use_muon", "reasons", "step"}:
        if nearest := misspelled(key, known):
            raise ValueError(f"a parameter group has no setting {key!r}: did you mean {nearest!r}?")


def shorthand(coefficients: Any, steps: int | None, solver: object) -> Schedule:
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
            f"{tuple(param.shape)}. Where the program says model.parameters(), write "
            f"CacheMuon(param_groups(model), ...): it gives vectors, embeddings and heads to Adam"
        )
    try:
        layout_of(group, param)
    except ValueError as error:
        raise ValueError(f"{name} of shape {tuple(param.shape)}: {error}") from None


def check_form(saved: Any) -> None:
    """Refuse what does not have the form of an optimizer's state."""
    found = saved if isinstance(saved, dict) else {}
    groups, state = found.get("param_groups"), found.get("state")
    if not (isinstance(groups, list) and isinstance(state, dict)):
        got = f"the keys {list(saved)}" if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"state_dict must have a list 'param_groups' and a dict 'state', got {got}")
    for number, group in enumerate(groups):
        keys = group.get("params") if isinstance(group, dict) else None
        if not (isinstance(keys, list) and all(isinstance(key, int | str) for key in keys)):
            raise ValueError(f"param_groups[{number}] must have a list 'params' of numbers, got {keys!r}")
        for key in keys:
            if not isinstance(state.get(key, {}), dict):
                raise ValueError(f"state[{key!r}] must be a dict, got {type(state[key]).__name__}")


def check_entries(name: str, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse saved entries that belong to another parameter or another version, or are damaged.

    A parameter may have none; entries that this library does not know are let through.
    """
    shape = tuple(param.shape)
    needed: dict[str, tuple[int, ...]] = {"step": (1,), "exp_avg": shape, "exp_avg_sq": shape}
    others: dict[str, tuple[int, ...]] = {}
    if group["use_muon"]:
        views = layout_of(group, param).views
        number = len(views)
        needed = {"counters": (number, len(COLUMNS)), "residuals": (number, len(RESIDUALS))}
        for i, view in enumerate(views):
            n, normalization = view.wide[0], Normalization.of(group, *view.sides)
            entries: dict[str, tuple[int, ...]] = {TRANSFORM: (n, n)}
            if normalization is not None:
                entries |= {name: entry.shape for name, entry in normalization.entries(*view.sides).items()}
            others |= {entry_name(name, i, number): sides for name, sides in entries.items()}
    begun = bool(needed.keys() & saved.keys())
    if group["use_muon"]:
        needed["momentum_buffer"] = shape  # which other optimizers have too
    if begun and (missing := [entry for entry in needed if entry not in saved]):
        raise ValueError(f"{name}: its state must have {', '.join(needed)}, and lacks {', '.join(missing)}")
    for entry, expected in (needed | others).items():
        if entry in saved:
            _check_entry(f"{name}: {entry}", entry, saved[entry], expected)
    for row in saved["counters"].tolist() if begun and group["use_muon"] else ():
        for column, value in zip(COLUMNS, row, strict=True):
            low = {"made": NEVER, "last": -1}.get(column, 0)
            high = len(OUTCOMES) - 1 if column == "last" else MOST
            if not low <= value <= high:
                raise ValueError(f"{name}: the counter {column!r} must be from {low} to {high}, got {value}")


def _check_entry(what: str, entry: str, value: Any, shape: tuple[int, ...]) -> None:
    if entry == "step" and is_number(value):
        value = value.reshape(1) if isinstance(value, Tensor) else torch.tensor([float(value)], device="cpu")
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} must be a dense tensor, got {value!r:.60}")
    if value.layout != torch.strided or value.device.type == "meta":
        raise ValueError(f"{what} must be a dense tensor, got one in {value.layout} on {value.device}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}, got {tuple(value.shape)}: of another parameter?")
    wanted = "torch.int64" if entry == "counters" else "real floating point"
    if not (value.dtype == torch.int64 if entry == "counters" else value.is_floating_point()):
        raise ValueError(f"{what} must be {wanted}, got {value.dtype}")
    if entry == "step" and not 0 <= value.item() <= MOST:
        raise ValueError(f"{what} must be a number >= 0, got {value.item()}")
