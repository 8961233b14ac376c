"""Kinds of matrices: those of one shape, dtype, device and settings, and what is done with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..report.counters import FIRST, HIT, OUTCOMES
from ..routing.layout import MatrixView, layout_of
from .bucket import Matrix
from .orthogonalize import Orthogonalizer
from .schedule import Life
from .transfer import Block

Group = dict[str, Any]
Ranks = tuple[int, ...]
RanksOf = Callable[[Group, Tensor], Ranks]
"""The ranks that share a parameter; none if this rank has it alone."""


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
    """What is to be done with one kind of matrix.

    `room` are the bytes that each takes in a batch; `why` tells why there is no cache.
    """

    orthogonalizer: Orthogonalizer
    life: Life
    room: int
    prices: Prices
    block: Block | None = None
    why: str = ""

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


@dataclass(eq=False)
class Kind:
    """Matrices of one shape, dtype, device and settings; which ranks share them; and what is done with
    them.
    """

    matrices: list[Matrix]
    ranks: tuple[int, ...]
    choice: Choice
    phases: list[int]


def matrices_of(groups: list[Group]) -> Iterator[Matrix]:
    """The matrices of all Muon groups, numbered in their order. Empty parameters are never stepped."""
    number = 0
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            if param.numel():
                layout = layout_of(group, param)
                for index in range(len(layout.views)):
                    yield Matrix(param, group, layout, index, number)
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
    for (ranks, *_), matrices in alike.items():
        first = matrices[0]
        view = first.layout.views[first.index]
        choice = method.choose(first.group, first.param, view, len(matrices))
        kind = Kind(matrices, ranks, choice, [choice.life.phase or 0] * len(matrices))
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


def on_device(value: Any) -> bool:
    """Whether a setting is a tensor that lies on a device, and must not be read."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def settings_of(groups: list[Group], settings: tuple[str, ...]) -> list[Any]:
    """What a plan depends on beside the parameters themselves."""
    names = (*settings, "view", "split", "transposed", "max_workspace_bytes", "adjust_lr_fn", "process_group")
    return [
        (*(group[name] for name in names), id(group["lr"]) if on_device(group["lr"]) else 0)
        for group in groups
        if group["use_muon"]
    ]
