"""States of other optimizers, told apart by what their groups hold, and read as ours.

What they have gathered is taken over: momentum, which is an average here, and Adam's moments. Their settings
are not, since one name means different formulas in different libraries: the live ones stay, and what
differs is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.optim.optimizer import StateDict

from ..routing.layout import named_params


@dataclass(frozen=True)
class ForeignFormat:
    """Another optimizer, and the settings by which its groups are known.

    With `sums` its momentum is `B <- momentum B + G`, which is our average divided by `1 - momentum`.
    """

    name: str
    has: frozenset[str]
    lacks: frozenset[str] = frozenset()
    sums: bool = False


ADAM = "torch.optim.Adam"

FOREIGN_FORMATS = (
    ForeignFormat("timm's Muon", frozenset({"conv_mode"})),
    ForeignFormat("torch.optim.Muon", frozenset({"ns_coefficients", "adjust_lr_fn"})),
    ForeignFormat("pytorch_optimizer's Muon", frozenset({"use_muon", "weight_decouple"})),
    ForeignFormat("Moonlight's Muon", frozenset({"wd", "adamw_betas"}), sums=True),
    ForeignFormat("dion's Muon", frozenset({"mu", "algorithm"}), sums=True),
    ForeignFormat(ADAM, frozenset({"betas", "amsgrad"})),
    ForeignFormat("Keller Jordan's Muon", frozenset({"momentum", "weight_decay"}), frozenset({"nesterov"})),
    ForeignFormat("Keller Jordan's Muon", frozenset({"betas", "use_muon"})),
)
"""Those that are known. A group is of the first whose settings it has."""

_OURS = {"solver", "process_group", "decoupled_weight_decay"}  # beside use_muon, one of them

_MATRIX = {"momentum": "momentum_buffer"}
_ADAM = {"momentum": "exp_avg", "variance": "exp_avg_sq", "moment1": "exp_avg", "moment2": "exp_avg_sq"}

_SETTINGS = {
    **{name: name for name in ("lr", "weight_decay", "momentum", "nesterov", "eps", "betas", "adjust_lr_fn")},
    "wd": "weight_decay",
    "mu": "momentum",
    "weight_decouple": "decoupled_weight_decay",
    "use_adjusted_lr": "adjust_lr_fn",
    "adjust_lr": "adjust_lr_fn",
}
_RATIOS = {None: "original", False: "original", True: "match_rms_adamw", "rms_norm": "match_rms_adamw"}


def convert(state_dict: StateDict, live: Sequence[dict[str, Any]]) -> tuple[StateDict, str]:
    """A state of another optimizer as one for the `live` groups, and what to warn of; ours as it is.

    A state of a single group, in which others keep matrices and the rest together, is cut at the live groups.
    """
    saved = state_dict["param_groups"]
    if all("use_muon" in group and _OURS & group.keys() for group in saved):
        return state_dict, ""
    peers = [format_of(group) for group in saved]
    if any(group["use_muon"] for group in live) and {peer.name for peer in peers} == {ADAM}:
        raise ValueError(
            f"state_dict is of {ADAM} or AdamW: Adam trained the matrices that Muon trains here, and its "
            f"moments are no momentum, so a new optimizer must start for them. Load the model's weights "
            f"without this state, and choose the learning rate as for a new training (docs/learning-rate.md)"
        )
    sizes, wanted = ([len(group["params"]) for group in groups] for groups in (saved, live))
    if sizes != wanted and (len(sizes) > 1 or sizes != [sum(wanted)]):
        raise ValueError(
            f"a state of {peers[0].name} must have groups of as many parameters as this optimizer, {wanted}, "
            f"or all in a single one, got {sizes}"
        )
    if len(saved) == 1:
        saved, peers = saved * len(live), peers * len(live)
    keys = iter([key for group in state_dict["param_groups"] for key in group["params"]])
    known = {key for group in state_dict["param_groups"] for key in group["params"]}
    state: dict[Any, Any] = {key: value for key, value in state_dict["state"].items() if key not in known}
    groups, told = [], []
    for index, (group, other, peer) in enumerate(zip(live, saved, peers, strict=True)):
        own = list(islice(keys, len(group["params"])))
        groups.append({"params": own, **{key: group[key] for key in ("fused",) if key in group}})
        for key, (name, _) in zip(own, named_params(group, index), strict=True):
            if entries := _entries(name, group, other, peer, state_dict["state"].get(key, {})):
                state[key] = entries
        if differences := "; ".join(_differences(group, other)):
            told.append(f"group {index}: {differences}")
    text = (
        f"a state of {peers[0].name} was loaded: momentum and moments are from there, the settings stay this "
        f"optimizer's. They differ in {'. '.join(told)}"
    )
    return {**state_dict, "state": state, "param_groups": groups}, text if told else ""


def format_of(group: dict[str, Any]) -> ForeignFormat:
    """Whose group it is.

    >>> format_of(torch.optim.Muon([torch.zeros(2, 3)]).state_dict()["param_groups"][0]).name
    'torch.optim.Muon'
    """
    for peer in FOREIGN_FORMATS:
        if peer.has <= group.keys() and not peer.lacks & group.keys():
            return peer
    known = ", ".join(dict.fromkeys(peer.name for peer in FOREIGN_FORMATS))
    raise ValueError(
        f"state_dict must be of this optimizer, or of one of {known}; got groups with "
        f"{sorted(group.keys() - {'params'})}. To begin with fresh momentum, load nothing"
    )


def _entries(
    name: str, group: dict[str, Any], other: dict[str, Any], peer: ForeignFormat, saved: dict[str, Any]
) -> dict[str, Any]:
    """What was saved for one parameter, by our names and in our scale."""
    names = _MATRIX if group["use_muon"] else _ADAM
    # Some keep there how they have routed it.
    found = {names.get(key, key): value for key, value in saved.items() if key != "use_muon"}
    if not found:
        return {}
    if not group["use_muon"] and "step" in other:
        found.setdefault("step", other["step"])  # counted for the group
    needed = {"momentum_buffer"} if group["use_muon"] else {"exp_avg", "exp_avg_sq", "step"}
    if found.keys() != needed:
        raise ValueError(
            f"{name}: with use_muon={group['use_muon']} its state must be {sorted(needed)}, got "
            f"{sorted(found)} of {peer.name}. Give each parameter to the algorithm that trained it there "
            f"(use_muon=True or False), in the same order; or load no state, and start a new optimizer"
        )
    if group["use_muon"] and peer.sums:
        momentum = other["mu"] if "mu" in other else other["momentum"]
        found["momentum_buffer"] = (1 - momentum) * found["momentum_buffer"]
    if "step" in found:
        found["step"] = torch.as_tensor(found["step"], dtype=torch.float32)
    return found


def _differences(group: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for key, value in other.items():
        name = _SETTINGS.get(key, "")
        if not group["use_muon"]:
            name = name or {"adamw_betas": "betas", "adamw_eps": "eps"}.get(key, "")
        if name not in group:
            continue
        kept, said = group[name], value
        if name == "adjust_lr_fn":
            kept = _RATIOS.get(kept, kept)
            value = "none" if key == "adjust_lr" and value is None else _RATIOS.get(value, value)
        if kept != (tuple(value) if isinstance(value, list) else value):
            as_saved = f"{said!r}" if key == name else f"{key}={said!r}"
            yield f"kept {name}={group[name]!r}, saved {as_saved}"
    coefficients, steps = other.get("ns_coefficients", other.get("ns_coeffs")), other.get("ns_steps")
    schedule = getattr(group.get("solver"), "schedule", None)
    if coefficients and steps and schedule and schedule.triples != _triples(coefficients, steps):
        yield f"kept the schedule {schedule.name!r}, saved {coefficients!r} for {steps} steps"


def _triples(coefficients: Any, steps: int) -> Any:
    if isinstance(coefficients, str):
        return coefficients  # a name, of a table that is not here
    rows = list(coefficients) if isinstance(coefficients[0], Sequence) else [coefficients]
    return tuple(tuple(map(float, row)) for row in (rows + rows[-1:] * steps)[:steps])
