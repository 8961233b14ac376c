"""Outcomes of one matrix at one step, and the table in which they are counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

OUTCOMES = ("hit", "first", "expired", "rejected", "bounded", "uncached", "fresh", "non-finite")
"""What can happen to a matrix at a step.

`hit`: the cached transform was applied. The other outcomes of `CacheMuon` are misses: `first` (solved: there
was no transform), `expired` (solved: the transform was due), `rejected` (solved: the gate measured a residual
above gamma), `bounded` (the schedule applied a transform whose residual was above gamma, and shortened the
step), `uncached` (solved without a cache, which does not pay or is suspended), `non-finite` (NaN or Inf in
the gradient: nothing was changed). `fresh`: solved by an optimizer that has no cache.
"""

HIT, FIRST, EXPIRED, REJECTED, BOUNDED, UNCACHED, FRESH, NON_FINITE = range(len(OUTCOMES))

REFRESHES = (FIRST, EXPIRED, REJECTED)
"""The outcomes that solve and replace the transform."""

COLUMNS = (*OUTCOMES, "made", "last", "until", "wait")
"""The columns of a matrix's counters: how often each outcome, the step that made the transform, the last
outcome's index, the step up to which the cache is suspended, and how many steps the last suspension took."""

MADE, LAST, UNTIL, WAIT = range(len(OUTCOMES), len(COLUMNS))

NEVER = -1
"""The step that made a transform which does not exist."""

RESIDUALS = ("probed", "refreshed")
"""The columns of a matrix's residuals: of the last cached direction, and of the last fresh one."""

PROBED, REFRESHED = range(len(RESIDUALS))


def new_counters() -> list[int]:
    """The counters of a matrix that has not been stepped.

    >>> dict(zip(COLUMNS, new_counters()))["made"]
    -1
    """
    return [0] * len(OUTCOMES) + [NEVER, -1, 0, 0]


def entry_name(entry: str, index: int, number: int) -> str:
    """The name of a state entry that each of a parameter's `number` matrices has for itself.

    >>> entry_name("transform", 0, 1), entry_name("transform", 2, 8)
    ('transform', 'transform.2')
    """
    return entry if number == 1 else f"{entry}.{index}"


@dataclass(frozen=True)
class Event:
    """One decision about one matrix.

    `residual` is that of the cached direction (NaN if none was measured), `refresh_residual` that of the
    fresh direction when the transform was made (NaN if unknown), `age` the steps since then.

    >>> Event("rejected", residual=7.5, refresh_residual=0.3, age=0).hit
    False
    """

    outcome: str
    residual: float = math.nan
    refresh_residual: float = math.nan
    age: int = 0

    @property
    def hit(self) -> bool:
        """Whether the cached transform was used as it is."""
        return self.outcome == "hit"

    @property
    def reason(self) -> str | None:
        """Why it was not a hit: one of `OUTCOMES`; None for a hit."""
        return None if self.hit else self.outcome


def last_event(counters: Sequence[int], residuals: Sequence[float], step: int) -> Event:
    """The last event of a matrix, from its counters and residuals.

    >>> last_event([0, 1, 0, 0, 0, 0, 0, 0, 5, FIRST, 0, 0], [math.nan, 0.3], step=5)
    Event(outcome='first', residual=nan, refresh_residual=0.3, age=0)
    """
    code, made = counters[LAST], counters[MADE]
    probed = residuals[PROBED] if code in (HIT, REJECTED, BOUNDED) else math.nan
    return Event(OUTCOMES[code], probed, residuals[REFRESHED], 0 if made == NEVER else step - made)
