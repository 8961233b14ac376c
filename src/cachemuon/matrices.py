"""Parameters as matrices: batches of one shape, their momentum, their step.

A parameter is one matrix, or a stack of them. For a step each becomes a `Matrix`; those that agree in
shape and settings are stacked and worked on together. Nothing here reads a tensor on the host.
Everything element by element happens in the parameter's own layout, also for tall matrices, whose wide
form is a transposed view: adding a matrix to one that lies the other way takes ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .cache import Candidate, Guard
from .groups import matrix_shape
from .polar import computed_in, peak_of
from .workspace import Workspace, workspace_bytes


@dataclass(slots=True, eq=False)
class Matrix:
    """One matrix at one step. `grad` and `momentum` are rows x cols; `param` is the parameter itself,
    or its slice where the parameter is a stack. What stands below `index` is filled in by CacheMuon
    while it decides.
    """

    name: str
    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    kind: tuple[Any, ...]  # of one kind are matrices that can be worked on together
    ceiling: int  # bytes of workspace
    index: int = 0  # in the stack
    counters: list[int] = field(default_factory=list)
    guard: Guard | None = None
    probed: bool = False
    outcome: str = ""
    scale: Tensor | None = None  # of its normalization
    candidate: Candidate | None = None

    @property
    def tall(self) -> bool:
        """Whether it is worked on as its transpose."""
        return self.grad.shape[0] > self.grad.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, m)`, wide."""
        rows, cols = self.grad.shape
        return (cols, rows) if rows > cols else (rows, cols)


def matrices_of(
    name: str, param: Tensor, group: dict[str, Any], state: dict[str, Any], recipe: Hashable, ceiling: int
) -> list[Matrix]:
    """The matrices of a parameter that has a gradient; its momentum buffer is made on first sight.

    `recipe` are the settings that matrices must share to be worked on together, in `ceiling` bytes.
    """
    assert param.grad is not None
    count, rows, cols = _matrix_shape(param.shape, group["view"])
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
    grad, momentum = param.grad, state["momentum_buffer"]
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    kind = (rows, cols, param.dtype, param.device, recipe)
    if count == 1:
        grad, momentum = grad.reshape(rows, cols), momentum.view(rows, cols)
        return [Matrix(name, param, grad, momentum, group, state, kind, ceiling)]
    slices = [param]
    for _ in range(param.ndim - 2):  # not one view: a 4-D stack may be in channels_last
        slices = [part for whole in slices for part in whole.unbind(0)]
    grads, momenta = grad.reshape(count, rows, cols), momentum.view(count, rows, cols)
    parts = zip(slices, grads.unbind(0), momenta.unbind(0), strict=True)
    return [
        Matrix(f"{name}[{i}]", p, g, m, group, state, kind, ceiling, i) for i, (p, g, m) in enumerate(parts)
    ]


def batches(
    matrices: Iterable[Matrix], key: Callable[[Matrix], Hashable] = lambda x: None
) -> Iterator[list[Matrix]]:
    """Matrices of one kind and key, as many at a time as their ceiling allows, and at least one."""
    alike: dict[Hashable, list[Matrix]] = {}
    for x in matrices:
        alike.setdefault((x.kind, key(x)), []).append(x)
    for members in alike.values():
        ceiling = min(x.ceiling for x in members)
        size = max(1, ceiling // workspace_bytes(*members[0].shape, _itemsize(members[0])))
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _itemsize(x: Matrix) -> int:
    return computed_in(x.momentum.dtype).itemsize


def prepare(batch: list[Matrix], workspace: Workspace) -> None:
    """Make room for a batch."""
    ceiling = min(x.ceiling for x in batch)
    workspace.prepare(len(batch), *batch[0].shape, _itemsize(batch[0]), ceiling)


def stack(tensors: list[Tensor]) -> Tensor:
    """`(B, ...)`; a view for a single tensor, which saves a copy of every large matrix."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


@dataclass(slots=True, eq=False)
class Update:
    """What a batch orthogonalizes: `U (B, n, m)`, wide.

    `finite (B,)` tells which gradients could be taken in; `peak (B, 1, 1)` is `max|U|` if it is known.
    """

    U: Tensor
    finite: Tensor
    peak: Tensor | None


def accumulate(batch: list[Matrix], workspace: Workspace) -> Update:
    """`M <- momentum M + (1 - momentum) G` for each matrix.

    The decision is made on the device: a matrix whose average has a NaN or Inf keeps its momentum.
    """
    prepare(batch, workspace)
    G, M = stack([x.grad for x in batch]), stack([x.momentum for x in batch])
    updated = torch.lerp(M, G, 1 - batch[0].group["momentum"], out=workspace.like("scratch", M))
    peak = peak_of(updated)
    finite = torch.isfinite(peak)
    torch.where(finite, updated, M, out=M)
    if len(batch) > 1:
        torch._foreach_copy_([x.momentum for x in batch], list(M.unbind(0)))
    if batch[0].group["nesterov"]:
        G = torch.where(finite, G, M, out=updated)  # a bad gradient leaves M as it is
        return Update(_ahead(batch, G, M, workspace), finite.flatten(), None)
    # The direction of a matrix that stays where it is only has to be finite, whatever its scale.
    return Update(_wide(batch, M), finite.flatten(), torch.where(finite, peak, 1))


def update_of(batch: list[Matrix], workspace: Workspace) -> Tensor:
    """The same `U` again, when every gradient is known to be finite."""
    prepare(batch, workspace)
    M = stack([x.momentum for x in batch])
    if not batch[0].group["nesterov"]:
        return _wide(batch, M)
    return _ahead(batch, stack([x.grad for x in batch]), M, workspace)


def _ahead(batch: list[Matrix], G: Tensor, M: Tensor, workspace: Workspace) -> Tensor:
    """Nesterov's `momentum M + (1 - momentum) G`, wide; written over M where that is a copy."""
    out = M if len(batch) > 1 else workspace.like("update", M)
    return _wide(batch, torch.lerp(G, M, batch[0].group["momentum"], out=out))


def _wide(batch: list[Matrix], tensor: Tensor) -> Tensor:
    return tensor.mT if batch[0].tall else tensor


def step_lengths(batch: list[Matrix], like: Tensor, finite: Tensor | None = None) -> Tensor:
    """`-lr ratio` for each matrix, `(B, 1, 1)` in the dtype of `like`; 0 where a gradient was not finite."""
    return _factors([-x.group["lr"] * _ratio_of(x) for x in batch], like, finite).view(-1, 1, 1)


def descend(batch: list[Matrix], steps: Tensor, finite: Tensor | None = None) -> None:
    """`W <- W - lr weight_decay W + step`; where a gradient was not finite, W stays.

    `steps`, wide `(B, n, m)`, carry their lengths. `finite=None` promises that every gradient is.
    """
    params = [x.param for x in batch]
    decays = [-x.group["lr"] * x.group["weight_decay"] for x in batch]
    if any(isinstance(decay, Tensor) or decay for decay in decays):
        factors = list(_factors(decays, steps, finite).unbind(0))
        torch._foreach_addcmul_(params, params, factors)
    own = list(_wide(batch, steps).unbind(0))
    if any(param.ndim > 2 for param in params):
        own = [step.reshape(param.shape) for step, param in zip(own, params, strict=True)]
    torch._foreach_add_(params, own)


def _factors(values: list[Any], like: Tensor, finite: Tensor | None) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        scalars = [torch.as_tensor(v, dtype=like.dtype, device=like.device).reshape(()) for v in values]
        factors = torch.stack(scalars)
    else:
        factors = torch.tensor(values, dtype=like.dtype, device=like.device)
    return factors if finite is None else torch.where(finite, factors, 0)


def _ratio_of(x: Matrix) -> float:
    return lr_ratio(x.group["adjust_lr_fn"], *x.grad.shape)


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
