"""Matrices sorted into kinds and buckets: what is to be done with them, known before the first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ..report.counters import FIRST, HIT, OUTCOMES
from ..routing.layout import MatrixLayout, MatrixView, layout_of
from .schedule import Block, Life, on_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .orthogonalize import Entry, Normalization, Orthogonalizer

Group = dict[str, Any]
Ranks = tuple[int, ...]
RanksOf = Callable[[Group, Tensor], Ranks]
"""The ranks that share a parameter; none if this rank has it alone."""


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed. Importing DTensor takes a second; a program with one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


class Prices(NamedTuple):
    """FLOPs of one matrix by outcome: as executed, as the paper counts, and on a rank that has a copy and
    does not own it; an outcome that is missing costs nothing. `solve` is the cheapest fresh solve,
    `transform` one that makes a transform.
    """

    executed: dict[str, int]
    paper: dict[str, int]
    copy: dict[str, int]
    solve: int
    transform: int = 0


class Choice(NamedTuple):
    """What is done with one kind of matrix. `room` are the bytes that each takes in a batch; `why` tells why
    there is no cache.
    """

    orthogonalizer: Orthogonalizer
    life: Life
    room: int
    prices: Prices
    block: Block | None = None
    why: str = ""
    normalization: Normalization | None = None

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The state entries that each rows x cols matrix keeps, by name."""
        found = self.orthogonalizer.entries(rows, cols)
        return found if self.normalization is None else found | self.normalization.entries(rows, cols)

    @property
    def every_step(self) -> int:
        """The FLOPs that a matrix takes at every step."""
        always = HIT if self.life.always is None else self.life.always
        return self.prices.executed.get(OUTCOMES[always], 0)

    @property
    def refresh(self) -> int:
        """The FLOPs that a refresh adds."""
        if self.life.always is not None:
            return 0
        return self.prices.executed.get(OUTCOMES[FIRST], 0) - self.every_step


class Method(Protocol):
    """What an optimizer adds to momentum and update: how its matrices are orthogonalized."""

    settings: tuple[str, ...]
    """The settings of a group that matrices of one bucket share; another plan is made when one changes."""

    def choose(self, group: Group, param: Tensor, view: MatrixView, count: int) -> Choice:
        """For a matrix of a parameter, of whose kind there are `count`."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: which one of which parameter, and its number in the plan.

    `sharded` ones are parts of a DTensor. `place` is where it lies in what this rank has of the parameter;
    None if all of that is this matrix.
    """

    param: Tensor
    group: Group
    layout: MatrixLayout
    index: int
    number: int
    sharded: bool
    place: tuple[int | slice, ...] | None = None


@dataclass(eq=False)
class Kind:
    """Matrices of one shape, dtype, device and settings; ranks that share them; what is done with them."""

    matrices: list[Matrix]
    ranks: Ranks
    choice: Choice
    phases: list[int]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices of one kind that are worked on as one batch, filled once.

    They are worked on in `precision`, and as their transposes where they are `tall`; each
    keeps `entries`, in `precision` or in `compact`. On the device lie
    `factors (B, 4)` (`schedule.FACTORS`) and the random `block (n, columns)` of the transforms' life; `lr` is
    a learning rate that lies there, by which the factors are still to be multiplied. `room` is the working
    memory that the bucket takes, and `limit` what it may take, in bytes.
    """

    matrices: tuple[Matrix, ...]
    rows: int
    cols: int
    tall: bool
    dtype: torch.dtype
    precision: torch.dtype
    compact: torch.dtype
    device: torch.device
    orthogonalize: Orthogonalizer
    normalization: Normalization | None
    entries: dict[str, Entry]
    factors: Tensor
    block: Tensor | None
    lr: Tensor | None
    room: int
    limit: int

    def alike(self, other: Bucket) -> bool:
        """Whether the two may be worked on together."""
        same = self.block is other.block and (self.dtype, self.device) == (other.dtype, other.device)
        return same and self.orthogonalize.joins(other.orthogonalize)

    def wide(self, batch: Tensor) -> Tensor:
        """A batch `(B, rows, cols)` as `(B, n, m)` with n <= m, or the way back."""
        return batch.mT if self.tall else batch


def grouped(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that are worked on together, as far as they fit their limit of working memory."""
    found: list[list[Bucket]] = []
    for bucket in buckets:
        for group in found:
            first, taken = group[0], sum(one.room for one in group)
            if bucket.alike(first) and taken + bucket.room <= first.limit:
                group.append(bucket)
                break
        else:
            found.append([bucket])
    return found


def matrices_of(groups: list[Group]) -> Iterator[Matrix]:
    """The matrices of all Muon groups, numbered in their order. Empty parameters are never stepped."""
    number = 0
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            if param.numel():
                layout = layout_of(group, param)
                for index in range(len(layout.views)):
                    yield Matrix(param, group, layout, index, number, is_dtensor(param))
                    number += 1


def kinds_of(matrices: list[Matrix], method: Method, ranks_of: RanksOf) -> list[Kind]:
    """Matrices sorted into kinds. Refreshes of the matrices that a rank group shares are spread over the
    steps of a life, so that all steps cost the same.
    """
    alike: dict[Any, list[Matrix]] = {}
    for x in matrices:
        lr = x.group["lr"]
        shared = tuple(x.group[name] for name in method.settings)
        key = x.layout.views[x.index].sides, x.param.dtype, x.param.device, shared
        alike.setdefault((ranks_of(x.group, x.param), key, id(lr) if on_device(lr) else 0), []).append(x)
    found: list[Kind] = []
    due: dict[tuple[Ranks, int], list[Kind]] = {}
    for (ranks, *_), members in alike.items():
        first = members[0]
        choice = method.choose(first.group, first.param, first.layout.views[first.index], len(members))
        kind = Kind(members, ranks, choice, [choice.life.phase or 0] * len(members))
        if choice.refresh and choice.life.phase is None and choice.life.max_age is not None:
            due.setdefault((ranks, choice.life.max_age), []).append(kind)
        found.append(kind)
    for (_, max_age), kinds in due.items():
        costs = [kind.choice.refresh for kind in kinds for _ in kind.matrices]
        phases = iter(spread(costs, max_age + 1))
        for kind in kinds:
            kind.phases = [next(phases) for _ in kind.matrices]
    return found


def spread(weights: list[int], places: int) -> list[int]:
    """A place for each weight, in their order, so that all places have about the same sum.

    >>> spread([3, 3, 1, 1, 1, 1, 1, 1], 4)
    [0, 1, 2, 2, 2, 3, 3, 3]
    """
    total, before, found = sum(weights), 0, []
    for weight in weights:
        found.append((2 * before + weight) * places // (2 * total))  # where its middle lies
        before += weight
    return found
