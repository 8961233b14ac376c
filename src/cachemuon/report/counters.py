"""Events and counters: what each decision was and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OUTCOMES = ("hit", "cold", "residual", "stale", "non-finite", "fresh", "resting")
"""What can happen to a matrix at a step.

`hit`: the cached transform was applied. The others of a cache are misses: `cold` (no transform
yet), `residual` (above gamma), `stale` (older than max_age), `non-finite` (NaN or Inf in the
gradient: nothing was changed), `resting` (solved without cache, which does not pay or has no room).
`fresh`: solved by an optimizer that has no cache.
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


COLUMNS = (*OUTCOMES, "age", "last", "early", "balance", "wait", "interval")
"""The columns of a matrix's counters: how often each outcome, the age, the last outcome's index, by how many
steps this transform's life is shorter than `max_age`, and the guard's three (`guard.Guard`)."""

AGE, LAST, EARLY, WAIT = (COLUMNS.index(name) for name in ("age", "last", "early", "wait"))
GUARD = slice(COLUMNS.index("balance"), len(COLUMNS))
RESIDUALS = ("probed", "refreshed")
"""The columns of a matrix's residuals: of the last probe (for a lagged gate the last one known of its
transform), and of the last refresh."""

PROBED, REFRESHED = range(len(RESIDUALS))
NO_AGE = -1
"""The age of a transform that doesn't exist."""


def transform_name(index: int, number: int) -> str:
    """What the state of a parameter calls the transform of one of its `number` matrices.

    Each has an entry of its own, since they may be kept on different ranks.

    >>> transform_name(0, 1), transform_name(2, 8)
    ('transform', 'transform.2')
    """
    return "transform" if number == 1 else f"transform.{index}"


def new_counters() -> list[int]:
    """The counters of a matrix that has not been seen yet."""
    return [0] * len(OUTCOMES) + [NO_AGE, -1, 0, 0, 0, 0]


_INDEX = {outcome: index for index, outcome in enumerate(OUTCOMES)}


def count(counters: Sequence[int], outcome: str, early: int = 0) -> list[int]:
    """The counters after one more outcome, the guard's apart.

    A solve that refreshes the transform sets its age to 0; one without cache leaves none. The life of a first
    transform is `early` steps shorter, so that not all matrices are due at one step.

    >>> row = count(new_counters(), "cold")
    >>> row[AGE], count(row, "hit")[AGE], count(row, "resting")[AGE] == NO_AGE
    (0, 1, True)
    """
    row = list(counters)
    index = _INDEX[outcome]
    row[index] += 1
    row[LAST] = index
    if outcome in REFRESHES:
        row[AGE] = 0
        row[EARLY] = early if outcome == "cold" else 0
    elif outcome == "resting":
        row[AGE] = NO_AGE
    elif row[AGE] != NO_AGE:
        row[AGE] += 1
    return row


def skipped(now: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The counters of which it turns out that a step, from `before` to `after`, met a gradient that was not
    finite, and did not happen.

    >>> before = count(new_counters(), "fresh")
    >>> after = count(before, "fresh")
    >>> outcome_counts(skipped(count(after, "fresh"), before, after))
    {'hit': 0, 'cold': 0, 'residual': 0, 'stale': 0, 'non-finite': 1, 'fresh': 2, 'resting': 0}
    """
    right = count(before, "non-finite")
    if list(now) == list(after):
        return right
    number = len(OUTCOMES)  # later steps have gone on from there: only how often each outcome was is mended
    counts = [n - a + r for n, a, r in zip(now[:number], after, right, strict=False)]
    return [*counts, *now[number:]]


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
