"""What both ways of sharing a matrix have in common: whose gradients are good, and what has been measured."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..engine.bucket import Bucket, Matrix, is_dtensor, local
from ..engine.local import gradient
from ..engine.plan import Plan
from ..engine.readings import PEAK, Readings
from ..engine.schedule import MISSING
from .placement import Placement
from .rank_group import RankGroup

NON_FINITE, GOOD = 0.0, 1.0
"""Flags of a gradient beside `MISSING`. The least of all ranks' flags is that of the matrix."""


class Shared:
    """Matrices that a rank group shares, in an order that all its ranks know.

    Every rank issues the same collectives at every step, whatever gradients it has: a gradient that is missing
    or not finite is a flag on the device. A matrix is stepped only if all ranks have a gradient of it.
    """

    def __init__(
        self,
        plan: Plan,
        rank_group: RankGroup,
        matrices: list[Matrix],
        placements: dict[int, Placement],
        buckets: list[Bucket],
    ) -> None:
        """`buckets` are those whose directions are made on this rank; of their matrices it may own only some."""
        self.plan, self.rank_group = plan, rank_group
        self.matrices, self.placements, self.buckets = matrices, placements, buckets
        self.place = {x.number: place for place, x in enumerate(matrices)}
        self.readings = Readings(buckets)
        self.flags = torch.empty(0)
        self.device = local(matrices[0].param).device
        dtypes = {torch.promote_types(x.param.dtype, torch.float32) for x in matrices}
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._grads: dict[Tensor, Tensor | None] = {}
        self._places: dict[Bucket, Tensor] = {}

    def gradient(self, x: Matrix) -> Tensor:
        """The gradient of a matrix's parameter on this rank; its momentum, which changes nothing, if missing."""
        grad = self._grads[x.param]
        return self.plan.momentum(x) if grad is None else grad

    def collect_flags(self) -> None:
        """Take the gradients of this step. Afterwards `flags (N,)` are the same on all ranks."""
        self._grads = {}
        self.flags = torch.full((len(self.matrices),), GOOD, dtype=self._dtype, device=self.device)
        for place, x in enumerate(self.matrices):
            if x.param not in self._grads:
                self._grads[x.param] = _placed_gradient(x)
            placement = self.placements[x.number]
            part = placement.slices.get(placement.rank)
            if part is None:
                continue
            grad = self._grads[x.param]
            if grad is None:
                self.flags[place].fill_(MISSING)
            else:
                ends = torch.stack(torch.aminmax(local(grad)[part.place]))
                self.flags[place].copy_(torch.isfinite(ends).all())
        self.rank_group.all_reduce("flags", self.flags, torch.distributed.ReduceOp.MIN)

    def flags_of(self, bucket: Bucket, rows: list[int] | None = None) -> Tensor:
        """The flags of a bucket's matrices, or of some rows of it: its places were uploaded once."""
        if bucket not in self._places:
            places = [self.place[x.number] for x in bucket.matrices]
            self._places[bucket] = torch.tensor(places).to(self.device)
        places = self._places[bucket]
        flags = self.flags.index_select(0, places)
        return flags if rows is None else torch.stack([flags[row] for row in rows])

    def measured(self) -> Readings:
        """What the owners have measured, on all ranks."""
        everyone = Readings.of([x.number for x in self.matrices], self._dtype, self.device)
        values = everyone.tensors[0].zero_()
        for tensor, (rows, places) in zip(self.readings.tensors, self._owned, strict=True):
            if len(rows):
                values.index_copy_(0, places, tensor.index_select(0, rows).to(values))
        self.rank_group.all_reduce("residuals", values)
        flags, peaks = self.flags, values[:, PEAK]
        peaks.copy_(torch.where(flags == NON_FINITE, torch.nan, peaks))
        peaks.masked_fill_(flags == MISSING, MISSING)
        everyone.present = [x.number for x in self.matrices if self._grads[x.param] is not None]
        self._grads = {}
        return everyone

    @cached_property
    def _owned(self) -> list[tuple[Tensor, Tensor]]:
        """For each tensor of the readings its rows of matrices that this rank owns, and their places."""
        found, numbers = [], iter(self.readings.numbers)
        for tensor in self.readings.tensors:
            own = [
                (row, self.place[number])
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
