"""One step over all matrices: this is the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .orthogonalize import Direction, Update
from .plan import Plan
from .readings import Readings


class Exchange(Protocol):
    """What is around the orthogonalization: where gradients come from, and where directions go."""

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """What is orthogonalized, of buckets that are worked on together; `outcomes` are what each matrix of
        the plan is to do.
        """

    def scatter(self, direction: Direction) -> None:
        """Take the steps of some rows of an update."""

    def measured(self) -> Readings:
        """What the step has measured, after all its directions."""


def take_step(plan: Plan, exchanges: Sequence[Exchange], number: int) -> list[str]:
    """Step `number`: momentum, direction and update of every matrix.

    What each matrix is to do follows from the number, and from what earlier steps have measured. What this
    step measures stays on the device until the next one begins. Returns what went wrong at earlier steps.
    """
    told = plan.learn()
    outcomes = plan.schedule.outcomes(number)
    plan.fill(number)
    readings = []
    for exchange in exchanges:
        for updates in exchange.gather(outcomes):
            orthogonalize = updates[0].bucket.orthogonalize
            for direction in orthogonalize(updates, number, plan.workspace):
                exchange.scatter(direction)
                del direction  # its memory is for the next one
            del updates
        readings.append(exchange.measured())
    plan.send(number, outcomes, readings)
    return told
