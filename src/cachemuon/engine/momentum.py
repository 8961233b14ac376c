"""What happens element by element: momentum before the orthogonalization, decay and update after it.

Everything here works in the parameter's own layout, also for tall matrices, whose wide form is a transposed
view: adding a matrix to one that lies the other way takes ten times as long. Nothing reads a tensor on the
host.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ..newton_schulz.normalize import peak_of
from ..newton_schulz.workspace import Workspace


def weights(momentum: float, nesterov: bool) -> tuple[float, float]:
    """The weight of the gradient in what is orthogonalized, and of that in the momentum.

    With `M' = b M + (1 - b) G` Nesterov orthogonalizes `U = b M' + (1 - b) G = M + (1 - b^2) (G - M)`, and so
    `M' = M + (U - M) / (1 + b)`: M' needs no second look at G.

    >>> weights(0.5, nesterov=True), weights(0.5, nesterov=False)
    ((0.75, 0.6666666666666666), (0.5, 1.0))
    """
    return (1 - momentum**2, 1 / (1 + momentum)) if nesterov else (1 - momentum, 1.0)


def update_momentum(
    grads: list[Tensor],
    momenta: list[Tensor],
    weight: Tensor,
    share: Tensor,
    dtype: torch.dtype,
    workspace: Workspace,
    finite: Tensor | None = None,
    place: int = 0,
) -> tuple[Tensor, Tensor]:
    """Take gradients in. Returns `U (B, rows, cols)`, which is to be orthogonalized, and `max|U| (B, 1, 1)`.

    `weight` and `share (B, 1, 1)` are those of `weights`. A NaN or Inf is dealt with on the device: where
    `max|U|` is not finite, or `finite (B,)` not set, the momentum stays as it is; U has zeros for a NaN or
    Inf.
    """
    role = f"gradient {place}"
    G = workspace.stack(role, grads, dtype)
    M = workspace.stack("momentum", momenta, dtype)
    copied = len(grads) > 1 or momenta[0].dtype != dtype
    U = torch.lerp(M, G, weight, out=G if copied else workspace.like(role, M))
    peak = peak_of(U)
    U.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    M.lerp_(U, share * (torch.isfinite(peak) if finite is None else finite.view(-1, 1, 1)))
    if copied:
        torch._foreach_copy_(momenta, list(M.unbind(0)))
    return U, peak


def descend(params: list[Tensor], steps: list[Tensor], keep: Tensor) -> None:
    """`W <- keep W + step` for each, where `keep (B,)` is `1 - lr weight_decay`."""
    if len(params) == 1:
        torch.addcmul(steps[0], params[0], keep, out=params[0])
        return
    torch._foreach_mul_(params, list(keep.unbind(0)))
    torch._foreach_add_(params, steps)


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
