"""What a step measures of each matrix, on the device until the next step begins."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .bucket import Bucket
from .orthogonalize import Direction, Update
from .schedule import MISSING

COLUMNS = ("peak", "probed", "refreshed")
PEAK, PROBED, REFRESHED = range(len(COLUMNS))


class Readings:
    """`(N, 3)` on each device: `max|U|`, the residual of a cached direction, and that of a fresh one with a
    transform; 0 where there is none, and `MISSING` for the peak of a matrix that took no step.

    `numbers` are those of the N matrices, `tensors` one for each device and dtype; `present` the numbers of
    matrices that this rank has a gradient of, and that another rank may lack.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[Bucket]] = {}
        for bucket in buckets:
            alike.setdefault((bucket.device, bucket.precision), []).append(bucket)
        self.numbers: list[int] = []
        self.tensors: list[Tensor] = []
        self.present: list[int] = []
        self._of: dict[Bucket, Tensor] = {}
        for (device, dtype), members in alike.items():
            numbers = [x.number for bucket in members for x in bucket.matrices]
            self._add(numbers, dtype, device)
            parts = self.tensors[-1].split([len(bucket.matrices) for bucket in members])
            self._of |= dict(zip(members, parts, strict=True))
        self.clear()

    @classmethod
    def of(cls, numbers: list[int], dtype: torch.dtype, device: torch.device) -> Readings:
        """Readings of matrices with these numbers, in one tensor."""
        readings = cls([])
        readings._add(numbers, dtype, device)
        return readings

    def _add(self, numbers: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.numbers += numbers
        self.tensors.append(torch.zeros(len(numbers), len(COLUMNS), dtype=dtype, device=device))

    @cached_property
    def order(self) -> Tensor:
        """The numbers of the matrices, on the host."""
        return torch.tensor(self.numbers, dtype=torch.int64, device="cpu")

    def clear(self) -> None:
        """Nothing has taken a step."""
        for tensor in self.tensors:
            tensor.zero_()[:, PEAK].fill_(MISSING)

    def note_peaks(self, update: Update) -> None:
        """These rows take a step, and so large is what they orthogonalize."""
        _write(self._of[update.bucket], update.rows, PEAK, update.peak)

    def note(self, direction: Direction) -> None:
        """The residuals of some rows of an update."""
        for column, residual in ((PROBED, direction.probed), (REFRESHED, direction.refreshed)):
            if residual is not None:
                _write(self._of[direction.update.bucket], direction.bucket_rows, column, residual)


def _write(readings: Tensor, rows: list[int], column: int, values: Tensor) -> None:
    if rows[-1] - rows[0] == len(rows) - 1:
        readings[rows[0] : rows[-1] + 1, column] = values.flatten()
    else:
        torch._foreach_copy_([readings[row, column] for row in rows], list(values.flatten().unbind(0)))
