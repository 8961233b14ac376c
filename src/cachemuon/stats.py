"""Events and counters: what each decision was and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTCOMES = ("hit", "cold", "residual", "stale", "non-finite", "fresh", "guarded")
"""What can happen to a matrix at a step.

`hit`: the cached transform was applied. The others of a cache are misses: `cold` (no transform
yet), `residual` (above gamma), `stale` (older than max_age), `non-finite` (NaN or Inf in the
gradient: nothing was changed), `guarded` (solved without cache, since the cache has not paid).
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


COLUMNS = (*OUTCOMES, "age", "last", "balance", "wait", "interval")
"""The columns of a matrix's counters: how often each outcome, the age, the last outcome's index, and
the guard's three (`cache.Guard`)."""

AGE, LAST, WAIT = COLUMNS.index("age"), COLUMNS.index("last"), COLUMNS.index("wait")
GUARD = slice(COLUMNS.index("balance"), len(COLUMNS))
READINGS = ("probed", "refreshed", "finite")
"""The columns of a matrix's residuals: of the last probe (for a lagged gate the last one known of its
transform), of the last refresh, and whether its last gradient was finite."""

PROBED, REFRESHED, FINITE = range(len(READINGS))
NO_AGE = -1
"""The age of a transform that doesn't exist."""


def new_counters() -> list[int]:
    """The counters of a matrix that has not been seen yet."""
    return [0] * len(OUTCOMES) + [NO_AGE, -1, 0, 0, 0]


def count(counters: Sequence[int], outcome: str) -> list[int]:
    """The counters after one more outcome, the guard's apart.

    A solve that refreshes the transform sets its age to 0; one without cache leaves none.

    >>> row = count(new_counters(), "cold")
    >>> row[AGE], count(row, "hit")[AGE], count(row, "guarded")[AGE] == NO_AGE
    (0, 1, True)
    """
    row = list(counters)
    index = OUTCOMES.index(outcome)
    row[index] += 1
    row[LAST] = index
    if outcome in REFRESHES:
        row[AGE] = 0
    elif outcome == "guarded":
        row[AGE] = NO_AGE
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
    """A small tensor on its way to the host; nobody has to wait for it.

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

    def wait(self) -> list[Any]:
        """The values as a list, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._host.tolist())


class Ledger:
    """Tensors of the state that the host knows by heart, and so need not be read at every step.

    A tensor that was replaced or written to since then, as by `load_state_dict`, is read again.

    >>> ledger, counters = Ledger(), torch.zeros(1, 2)
    >>> ledger.post([counters], [[[1.0, 2.0]]])
    >>> ledger.rows(counters), counters
    ([[1.0, 2.0]], tensor([[1., 2.]]))
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, list[list[Any]]]] = {}

    def rows(self, tensor: Tensor) -> list[list[Any]]:
        """The rows of a tensor of two dimensions."""
        known, version, rows = self._known.get(id(tensor), (None, 0, []))
        return rows if known is tensor and version == tensor._version else tensor.tolist()

    def learn(self, tensors: list[Tensor], rows: list[list[list[Any]]]) -> None:
        """These are the rows of these tensors; whatever else was known is forgotten."""
        self._known = {id(t): (t, t._version, r) for t, r in zip(tensors, rows, strict=True)}

    def post(self, tensors: list[Tensor], rows: list[list[list[Any]]]) -> None:
        """Write these rows into the tensors."""
        written = torch.tensor([row for part in rows for row in part], dtype=tensors[0].dtype)
        torch._foreach_copy_(tensors, list(written.split([len(part) for part in rows])))
        self.learn(tensors, rows)
