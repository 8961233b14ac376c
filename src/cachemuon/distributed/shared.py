"""What both ways of sharing matrices have in common: which gradients are good, and what has been measured."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.bucket import Bucket, Matrix, is_dtensor, local
from ..engine.local import gradient, normalized, step_down, take_in
from ..engine.orthogonalize import Direction, Update, rows_of
from ..engine.plan import Plan
from ..engine.readings import PEAK, Readings
from ..engine.schedule import MISSING
from .placement import Placement
from .rank_group import RankGroup

NON_FINITE, GOOD = 0.0, 1.0
"""Flags of a gradient beside `MISSING`. The flag of a matrix is the least of all ranks' flags."""


class Shared:
    """Matrices that a rank group shares, in an order that all its ranks know.

    Every rank issues the same collectives at every step, whatever gradients it has: one that is missing or
    not finite is a flag on the device. Only where all ranks have a good gradient a matrix is stepped.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        matrices: list[Matrix],
        placements: dict[int, Placement],
        buckets: list[Bucket],
        pieces: list[Bucket],
    ) -> None:
        """`buckets` are those whose directions are made on this rank; of their matrices it may own only some.
        `pieces` are buckets of what else this rank has.
        """
        self.plan, self.rank_group = plan, rank_group
        self.matrices, self.placements, self.buckets = matrices, placements, buckets
        self.readings = Readings(buckets)
        self.device = local(matrices[0].param).device
        self.good: dict[Bucket, Tensor] = {}  # (B,) for each bucket, in this step
        dtypes = {torch.promote_types(x.param.dtype, torch.float32) for x in matrices}
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._measures = any(plan.choices[x.number].life.always is None for x in matrices)
        self._grads: dict[Tensor, Tensor | None] = {}
        self._flags = torch.empty(0)
        place = {x.number: row for row, x in enumerate(matrices)}
        self._buckets = [*buckets, *pieces]
        rows = [place[x.number] for bucket in self._buckets for x in bucket.matrices]
        self._rows = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._owned = self._owned_rows(place)

    def begin(self) -> None:
        """Take the gradients of this step. Afterwards `good` is the same on all ranks."""
        self.readings.clear()
        self._grads = {}
        nothing = torch.zeros((), dtype=self._dtype, device=self.device)
        extremes, missing = [], []
        for row, x in enumerate(self.matrices):
            if x.param not in self._grads:
                self._grads[x.param] = _placed_gradient(x)
                self.plan.momentum(x)  # a rank that has no part of a matrix counts its steps too
            grad, part = self._grads[x.param], self.placements[x.number].here
            if part is None or grad is None:
                extremes += [nothing, nothing]
                missing += [] if part is None else [row]
            else:
                extremes += torch.aminmax(local(grad)[part.place])
        self._flags = torch.stack(extremes).isfinite().view(-1, 2).all(1).to(self._dtype)
        for row in missing:
            self._flags[row].fill_(MISSING)
        self.rank_group.all_reduce("flags", self._flags, torch.distributed.ReduceOp.MIN)
        good = self._flags.index_select(0, self._rows) == GOOD
        parts = good.split([len(bucket.matrices) for bucket in self._buckets])
        self.good = dict(zip(self._buckets, parts, strict=True))

    def gradient(self, x: Matrix) -> Tensor:
        """The gradient of a matrix's parameter on this rank. Momentum stands in for one that is missing."""
        grad = self._grads[x.param]
        return self.plan.momentum(x) if grad is None else grad

    def take_in(self, bucket: Bucket, rows: list[int], place: int = 0) -> tuple[Tensor, Tensor]:
        """The momentum of some rows takes in their gradients where these are good: `engine.local.take_in`."""
        return take_in(bucket, rows, self.plan, self.gradient, rows_of(self.good[bucket], rows), place)

    def update(self, bucket: Bucket, rows: list[int], outcomes: list[int], U: Tensor, peak: Tensor) -> Update:
        """What is orthogonalized, from `U (B, rows, cols)`. The direction of a bad gradient is 0."""
        good = rows_of(self.good[bucket], rows)
        peak = torch.where(good.view(-1, 1, 1), peak, torch.nan)
        matrices = [bucket.matrices[row] for row in rows]
        wanted, kept = [outcomes[x.number] for x in matrices], self.plan.kept(bucket, matrices)
        update = normalized(bucket, rows, wanted, U, peak, kept)
        self.readings.note_peaks(update)
        return update

    def step_down(self, direction: Direction) -> None:
        """Decay and update of parameters that are whole on this rank, where their gradients are good."""
        bucket, rows = direction.update.bucket, direction.bucket_rows
        step_down(bucket, rows, bucket.wide(direction.D).unbind(0), rows_of(self.good[bucket], rows))

    def measured(self) -> Readings:
        """What the owners have measured, on all ranks."""
        everyone = Readings.of([x.number for x in self.matrices], self._dtype, self.device)
        values = everyone.tensors[0]
        if self._measures:
            for tensor, (rows, places) in zip(self.readings.tensors, self._owned, strict=True):
                values.index_copy_(0, places, tensor.index_select(0, rows).to(self._dtype))
            self.rank_group.all_reduce("residuals", values)
        peaks = torch.where(self._flags == NON_FINITE, torch.nan, values[:, PEAK])
        values[:, PEAK] = torch.where(self._flags == MISSING, MISSING, peaks)
        everyone.present = [x.number for x in self.matrices if self._grads[x.param] is not None]
        self._grads, self.good = {}, {}
        return everyone

    def _owned_rows(self, place: dict[int, int]) -> list[tuple[Tensor, Tensor]]:
        """For each tensor of the readings: rows of matrices that this rank owns, and their places in all."""
        found, numbers = [], iter(self.readings.numbers)
        for tensor in self.readings.tensors:
            own = [
                (row, place[number])
                for row, number in zip(range(len(tensor)), numbers, strict=False)
                if self.placements[number].owned
            ]
            pairs = torch.tensor(own, dtype=torch.int64).view(-1, 2).to(tensor.device)
            found.append((pairs[:, 0], pairs[:, 1]))
        return found


def _placed_gradient(x: Matrix) -> Tensor | None:
    """A parameter's gradient, placed as the parameter is."""
    if x.param.grad is None:
        return None
    grad, param = gradient(x), x.param
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad
