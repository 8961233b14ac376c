"""What both exchanges between ranks have in common: flags of gradients, and measurements for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..engine.bucket import Bucket, Kind, Matrix, is_dtensor, local
from ..engine.orthogonalize import Direction, Update, rows_of
from ..engine.plan import Chunk, Plan
from ..engine.schedule import MISSING, PEAK, PROBED, REFRESHED, Readings
from ..engine.step import gradient, make_update, step_down, take_in
from ..newton_schulz.normalize import computed_in
from .placement import Placement
from .rank_group import RankGroup

NON_FINITE, GOOD = 0.0, 1.0
"""Flags of a gradient, beside `MISSING`. The flag of a matrix is the least of all ranks' flags."""

T = TypeVar("T")
Member = tuple[Kind, Matrix]
Placements = dict[int, Placement]


class Shared:
    """Matrices of one dtype that a rank group shares, in an order that all its ranks know.

    Every rank issues the same collectives at every step, whatever gradients exist: a missing or non-finite
    gradient is a flag on the device. A matrix takes a step only if all ranks have a good gradient of it.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        placements: Placements,
        members: list[Member],
        buckets: list[Bucket],
        pieces: Sequence[Bucket] = (),
    ) -> None:
        """This rank makes the directions of `buckets`; `pieces` are its parts of sharded matrices."""
        self.plan, self.rank_group, self.placements = plan, rank_group, placements
        self.matrices, self.parts = [x for _, x in members], [*buckets, *pieces]
        self.readings = Readings(buckets)
        param = self.matrices[0].param
        self.device, self.dtype, self.precision = local(param).device, param.dtype, computed_in(param.dtype)
        self._measures = any(plan.choices[x.number].life.always is None for x in self.matrices)
        row_of = {x.number: row for row, x in enumerate(self.matrices)}
        rows = [row_of[x.number] for part in self.parts for x in part.matrices]
        owned = [(i, row_of[k]) for i, k in enumerate(self.readings.numbers) if placements[k].owned]
        self._rows = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._owned = torch.tensor(owned, dtype=torch.int64).view(-1, 2).T.contiguous().to(self.device)
        # Of the current step: for each parameter and bucket, and for each matrix.
        self._grads: dict[Tensor, Tensor | None] = {}
        self.good: dict[Bucket, Tensor] = {}
        self._flags = torch.empty(0)

    def begin(self) -> None:
        """Take the gradients of this step. Afterwards `good` is the same on all ranks."""
        self.readings.clear()
        zero = torch.zeros((), dtype=self.precision, device=self.device)
        one, extremes = torch.ones_like(zero), list[Tensor]()
        for x in self.matrices:
            if x.param not in self._grads:
                self._grads[x.param] = _gradient(x)
                self.plan.momentum(x)  # a rank that stores no part of a matrix counts its steps too
            grad, part = self._grads[x.param], self.placements[x.number].here
            if part is None:
                extremes += (zero, zero)
            elif grad is None:
                extremes += (one, zero)  # a minimum above the maximum: there is no gradient
            else:
                extremes += torch.aminmax(local(grad)[part.place])
        low, high = torch.stack(extremes).view(-1, 2).unbind(1)
        finite = (low.isfinite() & high.isfinite()).to(self.precision)
        self._flags = torch.where(low > high, MISSING, finite)
        self.rank_group.all_reduce("flags", self._flags, ReduceOp.MIN)
        good = self._flags.index_select(0, self._rows) == GOOD
        self.good = dict(zip(self.parts, good.split([len(one.matrices) for one in self.parts]), strict=True))

    def gradient(self, x: Matrix) -> Tensor:
        """The gradient of a matrix's parameter on this rank. Momentum stands in for a missing one."""
        grad = self._grads[x.param]
        return self.plan.momentum(x) if grad is None else grad

    def take_in(self, bucket: Bucket, rows: list[int], place: int = 0) -> tuple[Tensor, Tensor]:
        """Update the momentum of some rows where their gradients are good: `engine.step.take_in`."""
        return take_in(bucket, rows, self.plan, self.gradient, rows_of(self.good[bucket], rows), place)

    def update(self, bucket: Bucket, rows: list[int], outcomes: list[int], U: Tensor, peak: Tensor) -> Update:
        """What is orthogonalized, from `U (B, rows, cols)`. The direction of a bad gradient is 0."""
        good = rows_of(self.good[bucket], rows)
        peak = torch.where(good.view(-1, 1, 1), peak, torch.nan)
        matrices = [bucket.matrices[row] for row in rows]
        wanted, kept = [outcomes[x.number] for x in matrices], self.plan.kept(bucket, matrices)
        update = make_update(bucket, rows, wanted, U, peak, kept)
        self.readings.note(update, PEAK, update.peak)
        return update

    def note(self, direction: Direction) -> None:
        """The residuals of a direction."""
        self.readings.note(direction.update, PROBED, direction.probed)
        self.readings.note(direction.update, REFRESHED, direction.refreshed)

    def step_down(self, direction: Direction) -> None:
        """Decay and update of parameters that are whole on this rank, where their gradients are good."""
        bucket, rows = direction.update.bucket, direction.update.rows
        step_down(bucket, rows, bucket.wide(direction.D).unbind(0), rows_of(self.good[bucket], rows))

    def measured(self) -> Readings:
        """What the owners have measured, on all ranks."""
        everyone = Readings.of([x.number for x in self.matrices], self.precision, self.device)
        values = everyone.tensors[0]
        if self._measures:
            for own in self.readings.tensors:  # one, unless this rank makes no directions
                values.index_copy_(0, self._owned[1], own.index_select(0, self._owned[0]))
            self.rank_group.all_reduce("residuals", values)
        peaks = torch.where(self._flags == NON_FINITE, torch.nan, values[:, PEAK])
        values[:, PEAK] = torch.where(self._flags == MISSING, MISSING, peaks)
        everyone.present = [x.number for x in self.matrices if self._grads[x.param] is not None]
        self._grads, self.good = {}, {}
        return everyone


def _gradient(x: Matrix) -> Tensor | None:
    """A parameter's gradient, with the placements of the parameter."""
    if x.param.grad is None:
        return None
    grad, param = gradient(x), x.param
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


def chunks_of(
    plan: Plan, members: list[Member], share: int = 1, pieces: Placements | None = None
) -> list[Chunk]:
    """Matrices in chunks of one kind (`Plan.chunks`); with `pieces` of one shape of what this rank stores."""
    alike: dict[tuple[Kind, tuple[int, int] | None], list[Matrix]] = {}
    for kind, x in members:
        part = None if pieces is None else pieces[x.number].here
        sides = None if part is None else (part.shape[0], prod(part.shape[1:]))
        alike.setdefault((kind, sides), []).append(x)
    return [
        chunk
        for (kind, sides), matrices in alike.items()
        for chunk in plan.chunks(kind, matrices, share, piece=sides)
    ]


def in_rounds(members: Iterable[tuple[T, int, float]]) -> list[list[T]]:
    """As many members at a time as their owners have room for, with work for every owner in each round.

    Beside each member stand its owner and the part of the owner's room that it takes; a member that takes
    more than all shares its round with no other of its owner.

    >>> in_rounds([("a", 0, 0.5), ("b", 0, 0.5), ("c", 0, 0.5), ("d", 1, 0.5)])
    [['a', 'b', 'd'], ['c']]
    """
    rounds: list[list[T]] = []
    last: dict[int, tuple[int, float]] = {}  # of each owner: its last round, and what is taken of its room
    for member, owner, share in members:
        number, taken = last.get(owner, (0, 0.0))
        if taken and taken + share > 1:
            number, taken = number + 1, 0.0
        last[owner] = number, taken + share
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(member)
    return rounds
