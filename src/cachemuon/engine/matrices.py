"""Parameters as matrices: batches of one shape, their momentum, their step.

A parameter is one matrix, or a stack of them. For a step each becomes a `Matrix`; those that agree in
shape and settings are stacked and worked on together. Nothing here reads a tensor on the host.
Everything element by element happens in the parameter's own layout, also for tall matrices, whose wide
form is a transposed view: adding a matrix to one that lies the other way takes ten times as long.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in, peak_of
from ..newton_schulz.workspace import Workspace
from ..routing.layout import reading_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed. Importing DTensor takes a second, and who has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@dataclass(slots=True, eq=False)
class Matrix:
    """One matrix at one step. `momentum` is rows x cols; `param` and `grad` have the shape that they have in
    the parameter, or in its slice where that is a stack.

    One that other ranks have too belongs to a party, and to one owner there. Where it is sharded, its update
    has `arrived` at the owner, rows x cols, and its step will be `leaving`: `param`, `grad` and `momentum`
    are not the whole of it then.
    """

    whole: Tensor  # the parameter
    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    kind: tuple[Any, ...]  # of one kind are matrices that can be worked on together
    shape: tuple[int, int]  # (n, m), wide
    tall: bool  # worked on as its transpose
    index: int = 0  # in the stack
    factors: Tensor | None = None  # `-lr ratio`, `-lr weight_decay`, gamma and `owned`, on the device
    party: Any = None  # distributed.Party
    owner: int = 0  # its rank there
    copied: bool = False  # whole on all ranks of its party, and worked on by all
    finite: Tensor | None = None  # whether its gradient is, on all ranks
    arrived: Tensor | None = None
    leaving: Tensor | None = None

    @property
    def owned(self) -> bool:
        """Whether this rank is the one that solves for it."""
        return self.party is None or self.owner == self.party.rank

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns."""
        n, m = self.shape
        return (m, n) if self.tall else (n, m)

    @property
    def precision(self) -> torch.dtype:
        """The dtype that it is worked on in, and that of its residual."""
        return computed_in(self.momentum.dtype)

    @property
    def cached_in(self) -> torch.dtype:
        """The dtype that its transform is kept in, and sent."""
        return cached_in(self.group, self.momentum.dtype)


def identity(param: Tensor) -> tuple[Any, ...]:
    """What tells that a parameter is still the one that it was, and has not got another shape."""
    return id(param), param.shape, param.dtype, param.device


def cached_in(group: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """The dtype that transforms of a group's parameters of that dtype are kept in."""
    return group["cache_dtype"] or computed_in(dtype)


def matrices_of(
    param: Tensor, group: dict[str, Any], state: dict[str, Any], recipe: Hashable
) -> list[Matrix]:
    """The matrices of a parameter that has a gradient; its momentum buffer is made on first sight.

    `recipe` are the settings that matrices must share to be worked on together.
    """
    assert param.grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
    own, grad, momentum = (local(tensor) for tensor in (param, param.grad, state["momentum_buffer"]))
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    read = reading_of(group, param)
    found = []
    parts = zip(read.pieces, read.cut(own), read.cut(grad), read.cut(momentum), strict=True)
    for index, (piece, p, g, m) in enumerate(parts):
        rows, cols = piece.sides
        kind = (rows, cols, param.dtype, param.device, recipe)
        found.append(
            Matrix(param, p, g, m.view(rows, cols), group, state, kind, piece.wide, rows > cols, index)
        )
    return found


Item = TypeVar("Item")


def batches(
    items: Iterable[Item], kind: Callable[[Item], Hashable], room: Callable[[Item], int], ceiling: int
) -> Iterator[list[Item]]:
    """Those of one kind, in their order, as many at a time as the ceiling has room for, and at least one.

    >>> list(batches("aAbBcC", str.islower, lambda letter: 1, ceiling=2))
    [['a', 'b'], ['c'], ['A', 'B'], ['C']]
    """
    alike: dict[Hashable, list[Item]] = {}
    for item in items:
        alike.setdefault(kind(item), []).append(item)
    for members in alike.values():
        batch: list[Item] = []
        taken = 0
        for item in members:
            size = room(item)
            if batch and taken + size > ceiling:
                yield batch
                batch, taken = [], 0
            batch.append(item)
            taken += size
        yield batch


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

    The decision is made on the device: a matrix whose average has a NaN or Inf keeps its momentum. What has
    arrived from other ranks was accumulated there.
    """
    if batch[0].arrived is not None:
        return Update(update_of(batch, workspace), agreed(batch), None)
    G, M = _gradients(batch), stack([x.momentum for x in batch])
    updated = torch.lerp(M, G, 1 - batch[0].group["momentum"], out=workspace.like("scratch", M))
    peak = peak_of(updated)
    finite = torch.isfinite(peak)
    if batch[0].finite is not None:
        finite &= agreed(batch).view(-1, 1, 1)
    torch.where(finite, updated, M, out=M)
    if len(batch) > 1:
        torch._foreach_copy_([x.momentum for x in batch], list(M.unbind(0)))
    if batch[0].group["nesterov"]:
        G = torch.where(finite, G, M, out=updated)  # a bad gradient leaves M as it is
        return Update(_ahead(batch, G, M, workspace), finite.flatten(), None)
    # The direction of a matrix that stays where it is only has to be finite, whatever its scale.
    return Update(_wide(batch, M), finite.flatten(), torch.where(finite, peak, 1))


def update_of(batch: list[Matrix], workspace: Workspace, finite: Tensor | None = None) -> Tensor:
    """The same `U` again. `finite=None` promises that every gradient is."""
    if batch[0].arrived is not None:
        return _wide(batch, stack([x.arrived for x in batch if x.arrived is not None]))
    M = stack([x.momentum for x in batch])
    if not batch[0].group["nesterov"]:
        return _wide(batch, M)
    G = _gradients(batch)
    if finite is not None:
        G = torch.where(finite.view(-1, 1, 1), G, M)
    return _ahead(batch, G, M, workspace)


def _gradients(batch: list[Matrix]) -> Tensor:
    """`(B, rows, cols)`. Those in channels_last are copied here, when it is their turn, not all at once."""
    return stack([x.grad.reshape(x.momentum.shape) for x in batch])


def agreed(batch: list[Matrix]) -> Tensor:
    """Which gradients are finite on all ranks, `(B,)`."""
    return torch.stack([x.finite for x in batch if x.finite is not None])


def _ahead(batch: list[Matrix], G: Tensor, M: Tensor, workspace: Workspace) -> Tensor:
    """Nesterov's `momentum M + (1 - momentum) G`, wide; written over M where that is a copy."""
    out = M if len(batch) > 1 else workspace.like("update", M)
    return _wide(batch, torch.lerp(G, M, batch[0].group["momentum"], out=out))


def _wide(batch: list[Matrix], tensor: Tensor) -> Tensor:
    return tensor.mT if batch[0].tall else tensor


LENGTH, DECAY, GAMMA, OWNED = range(4)
"""The columns of `factors_of`."""


def factors_of(matrices: list[Matrix]) -> Tensor:
    """`-lr ratio`, `-lr weight_decay`, gamma (0 without a cache) and whether this rank is the owner, for each
    matrix, `(N, 4)` on the host.

    An lr that lies on a device is left out: `assign_factors` multiplies with it there.
    """
    rows = []
    for x in matrices:
        group = x.group
        lr = 1.0 if _on_device(group["lr"]) else float(group["lr"])
        outputs, inputs = reversed(x.sides) if group["transposed"] else x.sides
        ratio = lr_ratio(group["adjust_lr_fn"], outputs, inputs)
        rows.append((-lr * ratio, -lr * group["weight_decay"], group.get("gamma", 0.0), float(x.owned)))
    return torch.tensor(rows, dtype=promoted(matrices), device="cpu")


def promoted(matrices: list[Matrix]) -> torch.dtype:
    """float64 if any of them is worked on in it, else float32."""
    doubles = any(x.momentum.dtype == torch.float64 for x in matrices)
    return torch.float64 if doubles else torch.float32


def assign_factors(matrices: list[Matrix], factors: Tensor) -> None:
    """Give each matrix its row of the factors, which are on its device now."""
    for x, row in zip(matrices, factors.unbind(0), strict=True):
        x.factors = row
        if _on_device(lr := x.group["lr"]):
            row[:GAMMA].mul_(lr.to(row.device).reshape(()))


def _on_device(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def step_lengths(batch: list[Matrix], like: Tensor, finite: Tensor | None = None) -> Tensor:
    """`-lr ratio` for each matrix, `(B, 1, 1)` in the dtype of `like`; 0 where a gradient was not finite."""
    return factor(batch, LENGTH, like, finite).view(-1, 1, 1)


def descend(batch: list[Matrix], steps: Tensor, finite: Tensor | None = None) -> None:
    """`W <- W - lr weight_decay W + step`; where a gradient was not finite, W stays.

    `steps`, wide `(B, n, m)`, carry their lengths. `finite=None` promises that every gradient is. What has
    arrived from other ranks is left to go back.
    """
    own = list(_wide(batch, steps).unbind(0))
    if batch[0].arrived is None:
        add(batch, own, finite)
        return
    for x, step in zip(batch, own, strict=True):
        x.leaving = step.clone(memory_format=torch.contiguous_format)


def add(batch: list[Matrix], steps: list[Tensor], finite: Tensor | None) -> None:
    """The same, for steps that lie as their parameters do."""
    params = [x.param for x in batch]
    if any(x.group["weight_decay"] for x in batch):
        torch._foreach_addcmul_(params, params, list(factor(batch, DECAY, steps[0], finite).unbind(0)))
    if any(param.ndim > 2 for param in params):  # a convolution may have the sides of a linear layer
        steps = [step.reshape(param.shape) for step, param in zip(steps, params, strict=True)]
    torch._foreach_add_(params, steps)


def factor(batch: list[Matrix], column: int, like: Tensor, finite: Tensor | None = None) -> Tensor:
    """One column of the factors `(B,)` in the dtype of `like`; 0 where a gradient was not finite."""
    rows = stack([x.factors for x in batch if x.factors is not None])
    factors = rows[:, column].to(like.dtype)
    return factors if finite is None else torch.where(finite, factors, 0)


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
