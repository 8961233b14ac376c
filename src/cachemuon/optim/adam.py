"""Adam for the parameters that are no matrices: torch's own, group by group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..distributed.state import group_by_mesh
from .rates import learning_rate

ADAM_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-4,
    "decoupled_weight_decay": True,
    "fused": True,
}
"""The settings of a group with `use_muon=False`; it inherits none of Muon's.

With `lr_ratio` the learning rate is that times the group's `lr`, which is then by default the optimizer's.
Schedulers that move the momentum, as OneCycleLR, write `momentum` into every group. Here it stands for beta1.
"""


def adam_step(group: dict[str, Any], params: list[Tensor], state: dict[Tensor, dict[str, Any]]) -> None:
    """One step for these parameters of a group."""
    for param in params:
        entries = state[param]
        if "exp_avg" not in entries:
            entries["exp_avg"], entries["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            entries["step"] = 0
        if not isinstance(entries["step"], Tensor):  # others save a plain number
            where = param.device if group["fused"] else torch.device("cpu")
            entries["step"] = torch.full((), float(entries["step"]), dtype=torch.float32, device=where)
    for alike in group_by_mesh(params):
        _step(group, alike, [state[param] for param in alike])


def _step(group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> None:
    beta1, beta2 = group["betas"]
    # The fused kernel would walk over the gaps of one that is every second column of a tensor.
    dense = [param if _without_gaps(param) else param.clone() for param in params]
    pairs = [(one, param.grad) for one, param in zip(dense, params, strict=True)]
    adam(
        dense,
        [laid_out_as(one, grad) for one, grad in pairs if grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=False if group["fused"] else None,
        fused=group["fused"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=False,
        beta1=float(group.get("momentum", beta1)),
        beta2=float(beta2),
        lr=learning_rate(group),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=False,
    )
    for param, one in zip(params, dense, strict=True):
        if one is not param:
            param.copy_(one)


def _without_gaps(tensor: Tensor) -> bool:
    if tensor.is_contiguous():  # nearly all are, and this is asked at every step
        return True
    sides = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    return all(stride == math.prod(size for _, size in sides[:i]) for i, (stride, _) in enumerate(sides))


def laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the parameter's memory layout: the fused kernel walks over both alike."""
    if tensor.shape != param.shape or tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)
