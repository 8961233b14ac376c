"""One step over all matrices: this is the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .bucket import Bucket
from .orthogonalize import Direction, Update
from .plan import Plan
from .readings import Readings


class Exchange(Protocol):
    """What is around the orthogonalization: where gradients come from, and where directions go."""

    def gather(self, outcomes: list[int]) -> Iterator[tuple[Bucket, Update]]:
        """Buckets with what they orthogonalize; `outcomes` are what each matrix of the plan is to do."""

    def scatter(self, bucket: Bucket, update: Update, direction: Direction) -> None:
        """Take the steps of some rows of an update."""

    def measured(self) -> Readings:
        """What the step has measured, after all its directions."""


def take_step(plan: Plan, exchanges: Sequence[Exchange], number: int) -> list[str]:
    """Step `number`: momentum, direction and update of every matrix.

    What each matrix is to do follows from the number, and from what earlier steps have measured. What this step
    measures stays on the device until the next one begins. Returns what went wrong at earlier steps.
    """
    told = plan.learn()
    outcomes = plan.schedule.outcomes(number)
    plan.fill(number)
    readings = []
    for exchange in exchanges:
        for bucket, update in exchange.gather(outcomes):
            for direction in bucket.orthogonalize(update, number, plan.workspace):
                exchange.scatter(bucket, update, direction)
        readings.append(exchange.measured())
    plan.send(number, outcomes, readings)
    return told
