"""Buckets: matrices of one shape, dtype, device and settings, which are worked on as one batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in
from ..routing.layout import MatrixLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .orthogonalize import Orthogonalizer


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed. Importing DTensor takes a second, and who has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: which one of which parameter, and its number in the plan.

    `place` is where it lies in what this rank has of the parameter; None if all of that is this matrix.
    """

    param: Tensor
    group: dict[str, Any]
    layout: MatrixLayout
    index: int
    number: int
    place: tuple[int | slice, ...] | None = None


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices of one shape, dtype, device and settings, filled once.

    On the device lie `factors (B, 4)` (`transfer.FACTORS`) and the random `block (n, columns)` of the
    transforms' life; `lr` is a learning rate that lies there, by which the factors are still to be
    multiplied. `room` is the working memory that the bucket takes, and `limit` what it may take, in bytes.
    """

    matrices: tuple[Matrix, ...]
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    orthogonalize: Orthogonalizer
    factors: Tensor
    block: Tensor | None
    lr: Tensor | None
    room: int
    limit: int

    @property
    def tall(self) -> bool:
        """Whether its matrices are worked on as their transposes."""
        return self.rows > self.cols

    @property
    def precision(self) -> torch.dtype:
        """The dtype that it is worked on in, and that of residuals."""
        return computed_in(self.dtype)

    def alike(self, other: Bucket) -> bool:
        """Whether the two may be worked on together."""
        same = self.block is other.block and (self.dtype, self.device) == (other.dtype, other.device)
        return same and self.orthogonalize.joins(other.orthogonalize)

    def wide(self, batch: Tensor) -> Tensor:
        """A batch `(B, rows, cols)` as `(B, n, m)` with n <= m, or the way back."""
        return batch.mT if self.tall else batch


def pieces(matrices: Iterable[Matrix], tensor_of: Callable[[Matrix], Tensor]) -> list[Tensor]:
    """For each matrix its piece of a tensor that has the shape of its parameter, as a view."""
    found: list[Tensor] = []
    last: Tensor | None = None
    for x in matrices:
        if x.place is not None:
            found.append(local(tensor_of(x))[x.place])
        elif len(x.layout.views) == 1 and not x.layout.lead:
            found.append(local(tensor_of(x)))
        else:  # a stack, or parts: cut once for all of its matrices
            if last is not x.param:
                last, parts = x.param, x.layout.split(local(tensor_of(x)))
            found.append(parts[x.index])
    return found
