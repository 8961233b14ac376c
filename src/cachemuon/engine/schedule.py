"""The refresh schedule: what each matrix does at a step, and what crosses between host and device for that.

A transform lives for `max_age` steps, and each matrix is refreshed every `max_age + 1` steps, at the steps
that its phase says. So what a step does follows from its number (`Schedule`). What a step measured
(`Readings`) is read when the next one begins: a matrix whose residual was above gamma is solved fresh for 32
steps, then for 64, up to 1,024.

Within a step the host never waits for a device. `torch.tensor(list, device=...)`, `.item()`, `tolist` and
copies to the host would. What a step knows on the host goes to the device in one copy from pinned memory,
where it has changed (`DeviceValues`); what the device measures arrives beside the work that follows
(`read_back`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..cache.reuse import random_block
from ..report.counters import (
    BOUNDED,
    COLUMNS,
    EXPIRED,
    FIRST,
    HIT,
    LAST,
    MADE,
    NEVER,
    NON_FINITE,
    REJECTED,
    RESIDUALS,
    UNCACHED,
    UNTIL,
    WAIT,
    new_counters,
)

if TYPE_CHECKING:
    from .bucket import Bucket
    from .orthogonalize import Update

SUSPENSIONS = (32, 1024)
"""For how many steps a matrix is solved fresh after its first bounded step, and at most."""

MISSING = -1.0
"""The peak of a matrix that some rank had no gradient for."""

PEAK, PROBED, REFRESHED = range(3)
"""The columns of readings."""


class Life(NamedTuple):
    """How long the transforms of one matrix live: `max_age` steps, refreshed where `step + phase` is a
    multiple of `max_age + 1`; a residual above `gamma` ends one. A matrix without a cache has one outcome,
    always. Without a phase the plan chooses one, so that all steps cost the same.
    """

    max_age: int | None = None
    phase: int | None = None
    gamma: float = math.inf
    always: int | None = None  # an outcome


class Schedule:
    """Counters and residuals of all matrices, and what follows from them.

    >>> from cachemuon.report.counters import OUTCOMES
    >>> schedule = Schedule([Life(max_age=2, phase=1)])
    >>> for step in range(1, 6):
    ...     outcomes = schedule.outcomes(step)
    ...     peak, probed, refreshed = 1.0, 0.5, float(outcomes[0] != HIT)
    ...     readings = torch.tensor([[peak, probed, refreshed]], dtype=torch.float64)
    ...     finite = schedule.learn(step, outcomes, readings)
    ...     print(step, OUTCOMES[outcomes[0]])
    1 first
    2 expired
    3 hit
    4 hit
    5 expired
    """

    def __init__(self, lives: Sequence[Life]) -> None:
        self.counters = torch.tensor([new_counters()] * len(lives), dtype=torch.int64, device="cpu")
        self.counters = self.counters.view(-1, len(COLUMNS))
        self.residuals = torch.full((len(lives), len(RESIDUALS)), math.nan, dtype=torch.float64, device="cpu")
        self._lives = list(lives)
        self._cached = any(life.always is None for life in lives)

    def outcomes(self, step: int) -> list[int]:
        """What each matrix is to do at a step."""
        wanted = []
        made, until = self.counters[:, MADE].tolist(), self.counters[:, UNTIL].tolist()
        for (max_age, phase, _, always), born, suspended in zip(self._lives, made, until, strict=True):
            if always is not None:
                wanted.append(always)
            elif suspended >= step:
                wanted.append(UNCACHED)
            elif born == NEVER:
                wanted.append(FIRST)
            elif max_age is not None and (
                step - born > max_age or (step + (phase or 0)) % (max_age + 1) == 0
            ):
                wanted.append(EXPIRED)
            else:
                wanted.append(HIT)
        return wanted

    def learn(self, step: int, wanted: list[int], readings: Tensor) -> bool:
        """Count what a step did: what was wanted of each matrix, and what was measured (`Readings`). Returns
        whether all gradients were finite.
        """
        if self._cached:
            known = (readings[:, PROBED:] != 0) & torch.isfinite(readings[:, :PROBED])
            torch.where(known, readings[:, PROBED:], self.residuals, out=self.residuals)
        outcomes = list(wanted)
        for number, (peak, probed, refreshed) in enumerate(readings.tolist()):
            if peak == MISSING:
                outcomes[number] = -1
            elif not math.isfinite(peak):
                outcomes[number] = NON_FINITE
            elif refreshed:  # solved, with a transform; a matrix of zeros makes none
                self.counters[number, MADE] = step if peak else NEVER
                if wanted[number] == EXPIRED:  # a whole life went well
                    self.counters[number, WAIT] = 0
                elif wanted[number] == HIT:
                    outcomes[number] = REJECTED
            elif wanted[number] == HIT and peak and not probed <= self._lives[number].gamma:
                self._suspend(number, step)
                outcomes[number] = BOUNDED
        outcome, last = torch.tensor(outcomes, device="cpu"), self.counters[:, LAST]
        stepped = outcome >= 0
        self.counters.scatter_add_(1, outcome.clamp(min=0).unsqueeze(1), stepped.long().unsqueeze(1))
        torch.where(stepped, outcome, last, out=last)
        return NON_FINITE not in outcomes

    def _suspend(self, number: int, step: int) -> None:
        """Solve a matrix fresh for a while: its transform is not good enough."""
        row, (first, longest) = self.counters[number], SUSPENSIONS
        row[WAIT] = min(max(first, 2 * int(row[WAIT])), longest)
        row[UNTIL] = step + row[WAIT]
        row[MADE] = NEVER


class Readings:
    """What a step measures of each matrix, on the device until the next step begins: `(N, 3)` on each device.

    The columns are `max|U|`, the residual of a cached direction, and that of a fresh one with a transform; 0
    where there is none, and `MISSING` for the peak of a matrix that took no step. `numbers` are those of the
    N matrices, `tensors` one for each device and dtype; `present` the numbers of matrices that this rank has
    a gradient of, and that another rank may lack.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[Bucket]] = {}
        for bucket in buckets:
            alike.setdefault((bucket.device, bucket.precision), []).append(bucket)
        self.numbers: list[int] = []
        self.tensors: list[Tensor] = []
        self.present: list[int] = []
        self._of: dict[Bucket, Tensor] = {}
        for (device, dtype), members in alike.items():
            self._add([x.number for bucket in members for x in bucket.matrices], dtype, device)
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
        self.tensors.append(torch.zeros(len(numbers), 3, dtype=dtype, device=device))

    def clear(self) -> None:
        """Nothing has taken a step."""
        for tensor in self.tensors:
            tensor.zero_()[:, PEAK].fill_(MISSING)

    def note(self, update: Update, column: int, values: Tensor | None) -> None:
        """What was measured of the rows of an update, if anything was."""
        if values is None:
            return
        readings, rows = self._of[update.bucket], update.rows
        if rows[-1] - rows[0] == len(rows) - 1:
            readings[rows[0] : rows[-1] + 1, column] = values.flatten()
        else:
            torch._foreach_copy_([readings[row, column] for row in rows], list(values.flatten().unbind(0)))


FACTORS = 4
"""Numbers on the device for each matrix: `-lr ratio`, `1 - lr weight_decay`, and the weights of momentum."""


class Block(NamedTuple):
    """Random vectors that matrices with n rows share for one life of their transforms, of `period` steps."""

    n: int
    columns: int
    seed: int
    period: int

    def draw(self, step: int, dtype: torch.dtype) -> Tensor:
        """Those of a step, on the host: a pure function of seed and life."""
        return random_block(self.n, self.columns, seed=self.seed, step=step // self.period, dtype=dtype)


class DeviceValues:
    """The host's numbers for one device and dtype, in one tensor there: factors of each matrix, and random
    blocks.

    >>> values = DeviceValues(torch.device("cpu"), torch.float32, 2, [Block(4, 3, seed=0, period=11)])
    >>> values.fill([(1.0, 1.0, 1.0, 1.0)] * 2, step=1)
    >>> values.factors.sum(), values.blocks[Block(4, 3, 0, 11)].shape
    (tensor(8.), torch.Size([4, 3]))
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, matrices: int, blocks: Iterable[Block]
    ) -> None:
        self.device = device
        ordered = sorted(set(blocks))
        sizes = [matrices * FACTORS, *(block.n * block.columns for block in ordered)]
        self._host = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        self._there = self._host if device.type == "cpu" else self._host.to(device)
        ends = list(accumulate(sizes))
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        factors, *parts = (self._there[span] for span in self._spans)
        self.factors = factors.view(matrices, FACTORS)
        self.blocks = {block: part.view(block.n, -1) for block, part in zip(ordered, parts, strict=True)}
        self._drawn = dict.fromkeys(ordered, -1)  # the life that each block was drawn for

    def fill(self, factors: list[tuple[float, ...]] | None, step: int) -> None:
        """Bring the device up to date: with factors, unless they are as they were, and with blocks whose life
        begins. One copy, of all that lies between the first and the last that changed.
        """
        changed = []
        if factors is not None:
            self._host[self._spans[0]] = torch.tensor(factors, dtype=torch.float64, device="cpu").flatten()
            changed.append(self._spans[0])
        for (block, drawn), span in zip(self._drawn.items(), self._spans[1:], strict=True):
            if drawn != step // block.period:
                self._host[span] = block.draw(step, self._host.dtype).flatten()
                self._drawn[block] = step // block.period
                changed.append(span)
        if changed and self._there is not self._host:
            span = slice(changed[0].start, changed[-1].stop)
            staged = _pinned(self._host[span])
            self._there[span].copy_(staged.copy_(self._host[span]), non_blocking=True)


def read_back(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A small tensor on its way to the host, in memory there, and the event of its arrival; nobody has to
    wait for it.

    >>> read_back(torch.tensor([1.0, 2.0]))
    (tensor([1., 2.]), None)
    """
    if values.device.type == "cpu":
        return values.clone(), None
    host = _pinned(values)
    host.copy_(values, non_blocking=True)
    # On the stream of the copy, that of the tensor's device, whichever device is the current one.
    arrived = torch.Event(values.device)
    arrived.record(torch.accelerator.current_stream(values.device))
    return host, arrived


def on_device(value: object) -> bool:
    """Whether a setting is a tensor that lies on a device, and must not be read."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _pinned(like: Tensor) -> Tensor:
    """Memory of the host that a device copies from and to by itself. New for each copy: torch's allocator
    gives it away again only when that copy is done.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
