"""How a tensor is read as matrices: one, a stack of them, or parts of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from torch import Tensor

VIEWS = ("auto", "flatten", "batch")

Split = int | tuple[int, ...]
"""The number of equal parts that a matrix's outputs are cut into; or the size of each part."""


def matrix_shape(shape: Sequence[int], view: str = "auto") -> tuple[int, int, int]:
    """How Muon reads a tensor: `(count, rows, cols)`, the number of matrices and their shape.

    "flatten" keeps the first dimension as rows; "batch" takes the last two as the matrix; "auto" reads
    3-D as a batch (expert weights), 4-D and up flattened (convolutions).

    >>> matrix_shape((64, 3, 7, 7)), matrix_shape((8, 16, 32)), matrix_shape((8, 16, 32), "flatten")
    ((1, 64, 147), (8, 16, 32), (1, 8, 512))
    """
    lead = _lead(shape, view)
    return math.prod(shape[:lead]), shape[lead], math.prod(shape[lead + 1 :])


def _lead(shape: Sequence[int], view: str) -> int:
    """The number of leading dimensions that count matrices."""
    if view not in VIEWS:
        raise ValueError(f"view must be one of {VIEWS}, got {view!r}")
    if len(shape) < 2:
        raise ValueError(f"shape must have at least 2 dimensions, got {tuple(shape)!r}")
    return len(shape) - 2 if view == "batch" or (view == "auto" and len(shape) == 3) else 0


class MatrixView(NamedTuple):
    """One matrix of a tensor: at `stack_index` of a stack, and from `begin` to `end` along `dim`.

    `shape` is the matrix's own, with all dimensions of a convolution.
    """

    stack_index: tuple[int, ...]
    dim: int
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def wide(self) -> tuple[int, int]:
        """`(n, m)`: the smaller side, and the larger one."""
        return min(self.sides), max(self.sides)


class MatrixLayout(NamedTuple):
    """The matrices of a tensor: each slice of its first `lead` dimensions, cut into `sizes` along `dim`."""

    views: tuple[MatrixView, ...]
    lead: int
    dim: int
    sizes: tuple[int, ...]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Views of a tensor of that shape, one for each matrix."""
        found = [tensor]
        for _ in range(self.lead):  # not one view: a 4-D stack may be in channels_last
            found = [part for one in found for part in one.unbind(0)]
        if len(self.sizes) > 1:
            found = [part for one in found for part in one.split(self.sizes, self.dim)]
        return found


@cache
def matrix_layout(
    shape: tuple[int, ...], view: str = "auto", split: Split = 1, transposed: bool = False
) -> MatrixLayout:
    """How a tensor of that shape is read with these settings of its group.

    `split` cuts the outputs: the rows, or the columns of a matrix that is stored `transposed`, as (in, out).

    >>> [one.sides for one in matrix_layout((96, 32), split=3).views]
    [(32, 32), (32, 32), (32, 32)]
    >>> [one.sides for one in matrix_layout((2, 32, 96), split=(64, 32), transposed=True).views]
    [(32, 64), (32, 32), (32, 64), (32, 32)]
    """
    lead, dim = _lead(shape, view), int(transposed)
    rest = shape[lead:]
    sizes = parts(rest[dim], split)
    views = [
        MatrixView(stack_index, dim, end - size, end, (*rest[:dim], size, *rest[dim + 1 :]))
        for stack_index in product(*map(range, shape[:lead]))
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    return MatrixLayout(tuple(views), lead, dim, sizes)


def parts(length: int, split: Split) -> tuple[int, ...]:
    """The sizes of the parts that `length` outputs are cut into.

    >>> parts(96, 3), parts(96, (64, 16, 16))
    ((32, 32, 32), (64, 16, 16))
    """
    if isinstance(split, int):
        if split < 1 or length % split:
            raise ValueError(f"split must divide the {length} outputs of a matrix, got {split!r}")
        return (length // split,) * split
    if sum(split) != length or min(split) < 1:
        raise ValueError(f"split must be sizes that add up to the {length} outputs, got {split!r}")
    return tuple(split)


def layout_of(group: dict[str, Any], param: Tensor) -> MatrixLayout:
    """How a parameter of a Muon group is read."""
    return matrix_layout(tuple(param.shape), group["view"], group["split"], group["transposed"])


def number_name(group: int, place: int) -> str:
    """The name of a parameter without one.

    >>> number_name(0, 3)
    'group0.param3'
    """
    return f"group{group}.param{place}"


def named_params(group: dict[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the group with that index, with their names or numbers."""
    names = group.get("param_names") or [number_name(index, i) for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)
