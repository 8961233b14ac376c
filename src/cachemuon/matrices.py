"""Parameters as matrices: views of one wide orientation, batches of one shape, momentum, update.

A parameter is one matrix, or a stack of them. For a step each becomes a `Matrix`; those that agree in
shape and settings are stacked and worked on together. Nothing here reads a tensor on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .groups import matrix_shape


@dataclass(slots=True, eq=False)
class Matrix:
    """One matrix at one step. `grad` and `momentum` are its wide views (n <= m); `param` is the
    parameter itself, or its slice where the parameter is a stack. What stands below `index` is
    filled in by CacheMuon while it decides.
    """

    name: str
    param: Tensor
    grad: Tensor
    momentum: Tensor
    tall: bool
    group: dict[str, Any]
    state: dict[str, Any]
    index: int  # in the stack
    counters: list[int] = field(default_factory=list)
    outcome: str = ""
    scale: Tensor | None = None  # of its normalization
    candidate: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, m)`, wide."""
        return self.grad.shape[0], self.grad.shape[1]


def matrices_of(name: str, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> list[Matrix]:
    """The matrices of a parameter that has a gradient; its momentum buffer is made on first sight."""
    assert param.grad is not None
    count, rows, cols = _matrix_shape(param.shape, group["view"])
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
    grads = param.grad.to(param.dtype).reshape(count, rows, cols)
    momenta = state["momentum_buffer"].view(count, rows, cols)
    tall = rows > cols
    if tall:
        grads, momenta = grads.mT, momenta.mT
    if count == 1:
        return [Matrix(name, param, grads[0], momenta[0], tall, group, state, 0)]
    slices = [param]
    for _ in range(param.ndim - 2):  # not one view: a 4-D stack may be in channels_last
        slices = [part for whole in slices for part in whole.unbind(0)]
    parts = zip(slices, grads.unbind(0), momenta.unbind(0), strict=True)
    return [Matrix(f"{name}[{i}]", p, g, m, tall, group, state, i) for i, (p, g, m) in enumerate(parts)]


def batches(matrices: Iterable[Matrix], key: Callable[[Matrix], Hashable]) -> Iterator[list[Matrix]]:
    """Matrices of one shape, dtype, device and key, as many at a time as their group's
    `max_workspace_bytes` hold, and at least one.
    """
    alike: dict[Hashable, list[Matrix]] = {}
    for x in matrices:
        alike.setdefault((x.shape, x.momentum.dtype, x.momentum.device, key(x)), []).append(x)
    for members in alike.values():
        ceiling = min(x.group["max_workspace_bytes"] for x in members)
        size = max(1, ceiling // workspace_bytes(*members[0].shape, members[0].momentum.dtype))
        for start in range(0, len(members), size):
            yield members[start : start + size]


def workspace_bytes(n: int, m: int, dtype: torch.dtype) -> int:
    """What working on one n x m matrix takes at most beside the state.

    Four n x m (stacked gradient and momentum, normalized matrix, direction), five n x n (the solver's).
    """
    return torch.promote_types(dtype, torch.float32).itemsize * (4 * n * m + 5 * n * n)


def stack(tensors: list[Tensor]) -> Tensor:
    """`(B, ...)`; a view for a single tensor, which saves a copy of every large matrix."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def accumulate(batch: list[Matrix], momentum: float) -> Tensor:
    """`M <- momentum M + (1 - momentum) G` for each matrix; returns where that is finite, `(B,)`.

    The decision is made on the device: a matrix whose average has a NaN or Inf keeps its momentum.
    """
    G, M = stack([x.grad for x in batch]), stack([x.momentum for x in batch])
    updated = torch.lerp(M, G, 1 - momentum)
    finite = torch.isfinite(updated.amax(dim=(1, 2))) & torch.isfinite(updated.amin(dim=(1, 2)))
    updated = torch.where(finite.view(-1, 1, 1), updated, M)
    torch._foreach_copy_([x.momentum for x in batch], list(updated.unbind(0)))
    return finite


def update_matrices(batch: list[Matrix], momentum: float, nesterov: bool, finite: Tensor | None) -> Tensor:
    """What is orthogonalized, `(B, n, m)`: M, or with Nesterov `momentum M + (1 - momentum) G`.

    `finite=None` promises that every gradient is.
    """
    M = stack([x.momentum for x in batch])
    if not nesterov:
        return M
    G = stack([x.grad for x in batch])
    if finite is not None:
        G = torch.where(finite.view(-1, 1, 1), G, M)
    return torch.lerp(G, M, momentum)


def apply_directions(batch: list[Matrix], directions: Tensor, finite: Tensor | None = None) -> None:
    """`W <- (1 - lr weight_decay) W - lr ratio D`; where a gradient was not finite, W stays.

    `directions (B, n, m)` are overwritten. `finite=None` promises that every gradient is.
    """
    params = [x.param for x in batch]
    steps = [
        (D.mT if x.tall else D).reshape(x.param.shape)
        for x, D in zip(batch, directions.unbind(0), strict=True)
    ]
    decays = [1 - x.group["lr"] * x.group["weight_decay"] for x in batch]
    _multiply(steps, [-x.group["lr"] * _ratio_of(x) for x in batch])
    if finite is None:
        _multiply(params, decays)
        torch._foreach_add_(params, steps)
        return
    moved = [param.clone() for param in params]
    _multiply(moved, decays)
    torch._foreach_add_(moved, steps)
    for param, new, ok in zip(params, moved, finite.unbind(0), strict=True):
        torch.where(ok, new, param, out=param)


def _multiply(tensors: list[Tensor], factors: list[Any]) -> None:
    if any(isinstance(factor, Tensor) for factor in factors):
        factors = [
            torch.as_tensor(factor, device=t.device) for t, factor in zip(tensors, factors, strict=True)
        ]
    torch._foreach_mul_(tensors, factors)


def _ratio_of(x: Matrix) -> float:
    n, m = x.shape
    rows, cols = (m, n) if x.tall else (n, m)
    return lr_ratio(x.group["adjust_lr_fn"], rows, cols)


ADJUST_LR_FNS = ("none", "original", "match_rms_adamw")


@cache
def lr_ratio(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """The factor on the learning rate of a rows x cols matrix.

    "none": 1. "original": `sqrt(max(1, rows / cols))`. "match_rms_adamw": `0.2 sqrt(max(rows, cols))`.
    None means "original", as it does in torch.optim.Muon.

    >>> lr_ratio("none", 400, 100), lr_ratio("original", 400, 100), lr_ratio("match_rms_adamw", 400, 100)
    (1.0, 2.0, 4.0)
    """
    if adjust_lr_fn == "none":
        return 1.0
    if adjust_lr_fn in (None, "original"):
        return math.sqrt(max(1, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


_matrix_shape = cache(matrix_shape)
