"""Events and counters: what each decision was and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTCOMES = ("hit", "cold", "residual", "stale", "non-finite", "fresh")
"""What can happen to a matrix at a step.

`hit`: the cached transform was applied. The other four of a cache are misses: `cold` (no transform
yet), `residual` (above gamma), `stale` (older than max_age), `non-finite` (NaN or Inf in the
gradient: nothing was changed). `fresh`: solved by an optimizer that has no cache.
"""

REFRESHES = ("cold", "residual", "stale")
"""The outcomes that solve anew and replace the transform."""


@dataclass(frozen=True)
class Event:
    """One decision about one matrix.

    `residual` is the probe's number (NaN where none was made), `refresh_residual` that of the fresh
    direction when the transform was made (NaN where not known), `age` the steps since then.

    >>> Event("residual", residual=7.5, refresh_residual=0.3, age=0).hit
    False
    """

    outcome: str
    residual: float = math.nan
    refresh_residual: float = math.nan
    age: int = 0

    @classmethod
    def of(cls, counters: Sequence[int], residual: float, refresh_residual: float) -> Event:
        """The last event of a matrix, from its counters and residuals.

        >>> Event.of(count(new_counters(), "cold"), float("nan"), 0.3)
        Event(outcome='cold', residual=nan, refresh_residual=0.3, age=0)
        """
        outcome = OUTCOMES[counters[LAST]]
        probed = outcome in ("hit", "residual")
        return cls(outcome, residual if probed else math.nan, refresh_residual, max(counters[AGE], 0))

    @property
    def hit(self) -> bool:
        """Whether the cached transform was used."""
        return self.outcome == "hit"

    @property
    def reason(self) -> str | None:
        """Why it was not a hit: one of `OUTCOMES`; None for a hit."""
        return None if self.hit else self.outcome


COLUMNS = (*OUTCOMES, "age", "last")
"""The columns of a matrix's counters: how often each outcome, the age, the last outcome's index."""

AGE, LAST = COLUMNS.index("age"), COLUMNS.index("last")
NO_AGE = -1
"""The age of a transform that doesn't exist."""


def new_counters() -> list[int]:
    """The counters of a matrix that has not been seen yet."""
    return [0] * len(OUTCOMES) + [NO_AGE, -1]


def count(counters: Sequence[int], outcome: str) -> list[int]:
    """The counters after one more outcome; a solve that refreshes the transform sets its age to 0.

    >>> COLUMNS[-2], count(new_counters(), "cold")[-2], count(count(new_counters(), "cold"), "hit")[-2]
    ('age', 0, 1)
    """
    row = list(counters)
    index = OUTCOMES.index(outcome)
    row[index] += 1
    row[LAST] = index
    if outcome in REFRESHES:
        row[AGE] = 0
    elif row[AGE] != NO_AGE:
        row[AGE] += 1
    return row


def summary(counters: Sequence[int], residual: float, refresh_residual: float) -> dict[str, Any]:
    """One matrix's entry of `cache_stats()["matrices"]`."""
    outcomes = outcome_counts(counters)
    misses = {reason: number for reason, number in outcomes.items() if reason != "hit"}
    return {
        "calls": sum(outcomes.values()),
        "hits": outcomes["hit"],
        "misses": misses,
        "residual": residual,
        "refresh_residual": refresh_residual,
        "age": None if counters[AGE] == NO_AGE else counters[AGE],
        "last": None if counters[LAST] < 0 else OUTCOMES[counters[LAST]],
    }


def outcome_counts(counters: Sequence[int]) -> dict[str, int]:
    """The counters as a mapping from outcome to how often it happened."""
    return dict(zip(OUTCOMES, counters, strict=False))


class Readback:
    """A small tensor on its way to the host; nobody waits for it.

    >>> Readback(torch.tensor([1.0, 2.0])).poll()
    [1.0, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def poll(self) -> list[Any] | None:
        """The values as a list, or None while they are still on their way."""
        if self._arrived is not None and not self._arrived.query():
            return None
        return list(self._host.tolist())
