"""The refresh schedule: what the host knows of every matrix, and what it wants done at a step.

A transform lives for `max_age` steps, and each matrix is refreshed every `max_age + 1` steps, at the steps
that its phase says. So what a step does follows from its number. What a step measured is read when the next
one begins: a matrix whose residual was above gamma is solved fresh for 32 steps, then for 64, up to 1,024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
    PROBED,
    REFRESHED,
    REJECTED,
    RESIDUALS,
    UNCACHED,
    UNTIL,
    WAIT,
    new_counters,
)

SUSPENSIONS = (32, 1024)
"""For how many steps a matrix is solved fresh after its first bounded step, and at most."""

FOREVER = 2**62

MISSING = -1.0
"""The peak of a matrix that some rank had no gradient for."""


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
        ages = [FOREVER if life.max_age is None else life.max_age for life in lives]
        self._max_age = torch.tensor(ages, dtype=torch.int64, device="cpu")
        self._phase = torch.tensor([life.phase or 0 for life in lives], dtype=torch.int64, device="cpu")
        self._gamma = torch.tensor([life.gamma for life in lives], dtype=torch.float64, device="cpu")
        self._always = [life.always for life in lives]
        self.all_fixed = all(outcome is not None for outcome in self._always)

    def outcomes(self, step: int) -> list[int]:
        """What each matrix is to do at a step."""
        if self.all_fixed:
            return self._always  # type: ignore[return-value]
        made, until = self.counters[:, MADE], self.counters[:, UNTIL]
        due = (step - made > self._max_age) | ((step + self._phase) % (self._max_age + 1) == 0)
        wanted = torch.where(due, EXPIRED, HIT).masked_fill_(made == NEVER, FIRST)
        wanted.masked_fill_(until >= step, UNCACHED)
        pairs = zip(wanted.tolist(), self._always, strict=True)
        return [now if always is None else always for now, always in pairs]

    def learn(self, step: int, wanted: list[int], readings: Tensor) -> bool:
        """Count what a step did: what was wanted of each matrix, and what was measured. Returns whether all
        gradients were finite.

        `readings (N, 3)` are `max|U|`, or `MISSING` where no step was taken; the residual of a cached
        direction; and that of a fresh one with a transform; 0 where there is none.
        """
        outcome = torch.tensor(wanted, device="cpu")
        peak, probed, refreshed = readings.unbind(1)
        stepped, finite = peak != MISSING, torch.isfinite(peak)
        good = stepped & finite
        if not self.all_fixed:
            outcome = self._learn_residuals(step, outcome, good, peak, probed, refreshed)
        outcome = torch.where(finite, outcome, NON_FINITE).unsqueeze(1)
        self.counters.scatter_add_(1, outcome, stepped.unsqueeze(1).long())
        last = self.counters[:, LAST]
        last.copy_(torch.where(stepped, outcome.squeeze(1), last))
        return bool(finite.all())

    def _learn_residuals(
        self, step: int, wanted: Tensor, good: Tensor, peak: Tensor, probed: Tensor, refreshed: Tensor
    ) -> Tensor:
        """What transforms were made, which are not good enough, and what happened instead of what was
        wanted.
        """
        made = good & (refreshed != 0)
        hit = wanted == HIT
        over = good & hit & ~made & (peak > 0) & ~(probed <= self._gamma)
        for column, residual, known in ((PROBED, probed, good & (probed != 0)), (REFRESHED, refreshed, made)):
            before = self.residuals[:, column]
            before.copy_(torch.where(known, residual, before))
        before = self.counters[:, MADE]
        before.copy_(torch.where(made, torch.where(peak > 0, step, NEVER), before))
        self.counters[:, WAIT].masked_fill_(made & (wanted == EXPIRED), 0)  # a whole life: all is well again
        for number in torch.nonzero(over).flatten().tolist() if over.any() else ():
            self._suspend(number, step)
        return torch.where(over, BOUNDED, torch.where(hit & made, REJECTED, wanted))

    def _suspend(self, number: int, step: int) -> None:
        """Solve a matrix fresh for a while: its transform is not good enough."""
        row, (first, longest) = self.counters[number], SUSPENSIONS
        row[WAIT] = min(max(first, 2 * int(row[WAIT])), longest)
        row[UNTIL] = step + row[WAIT]
        row[MADE] = NEVER
