"""How a tensor is read as matrices: one, a stack of them, or parts of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

VIEWS = ("auto", "flatten", "batch")

Split = int | tuple[int, ...]
"""Into how many equal parts the outputs of a matrix are divided; or the size of each part."""


def matrix_shape(shape: Sequence[int], view: str = "auto") -> tuple[int, int, int]:
    """How Muon reads a tensor: `(count, rows, cols)`, a number of matrices and their shape.

    "flatten" keeps the first dimension as rows; "batch" takes the last two as the matrix; "auto" reads
    3-D as a batch (expert weights), 4-D and up flattened (convolutions).

    >>> matrix_shape((64, 3, 7, 7)), matrix_shape((8, 16, 32)), matrix_shape((8, 16, 32), "flatten")
    ((1, 64, 147), (8, 16, 32), (1, 8, 512))
    """
    if view not in VIEWS:
        raise ValueError(f"view must be one of {VIEWS}, got {view!r}")
    if len(shape) < 2:
        raise ValueError(f"shape must have at least 2 dimensions, got {tuple(shape)!r}")
    if _stacked(shape, view):
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def _stacked(shape: Sequence[int], view: str) -> bool:
    return view == "batch" or (view == "auto" and len(shape) == 3)


class MatrixView(NamedTuple):
    """One matrix of a tensor: at `stack_index` in its stack, if that is one, and there from `begin` to `end`
    along `dim`, if that is split. `shape` is its own, a convolution's with all dimensions.
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
        rows, cols = self.sides
        return (rows, cols) if rows <= cols else (cols, rows)


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

    `split` divides the outputs: the rows, or, where a matrix lies `transposed` as (in, out), the columns.

    >>> [piece.sides for piece in matrix_layout((96, 32), split=3).views]
    [(32, 32), (32, 32), (32, 32)]
    >>> [piece.sides for piece in matrix_layout((2, 32, 96), split=(64, 32), transposed=True).views]
    [(32, 64), (32, 32), (32, 64), (32, 32)]
    """
    matrix_shape(shape, view)  # refuses what cannot be read
    lead = len(shape) - 2 if _stacked(shape, view) else 0
    rest, dim = shape[lead:], int(transposed)
    sizes = parts(rest[dim], split)
    found = []
    for stack_index in product(*map(range, shape[:lead])):
        begin = 0
        for size in sizes:
            own = (*rest[:dim], size, *rest[dim + 1 :])
            found.append(MatrixView(stack_index, dim, begin, begin + size, own))
            begin += size
    return MatrixLayout(tuple(found), lead, dim, sizes)


def parts(length: int, split: Split) -> tuple[int, ...]:
    """The sizes of the parts that so many outputs are divided into.

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
    """The name of a parameter that was given none.

    >>> number_name(0, 3)
    'group0.param3'
    """
    return f"group{group}.param{place}"


def named_params(group: dict[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the group with that index, with their names or numbers."""
    names = group.get("param_names") or [number_name(index, i) for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)
