"""The paper's gate as an orthogonalizer: measure, read, accept or refresh, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cache.gns import CacheGNS
from ..newton_schulz.products import Workspace
from ..report.counters import HIT, NON_FINITE
from .orthogonalize import TRANSFORM, Cached, Direction, Entry, Orthogonalizer, Update, keep, rows_of, solved


@dataclass(frozen=True)
class Gated:
    """CacheMuon, Algorithm A.5: for every matrix that has a transform, Algorithm A.4 decides
    (`CacheGNS.gate`).

    It reads the residuals of a bucket on the host before any of its directions is applied.
    """

    cache: CacheGNS
    gamma: float

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The transform."""
        return Cached(self.cache, self.gamma).entries(rows, cols)

    def joins(self, other: Orthogonalizer) -> bool:
        """Bucket by bucket."""
        return False

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Accepted directions, refused ones solved, and those that had no transform."""
        for update in updates:
            if (probed := update.of(HIT)) is not None:
                yield from self._judged(probed, workspace)
            yield from solved(self.cache, update, workspace)

    def _judged(self, update: Update, workspace: Workspace) -> Iterator[Direction]:
        assert update.block is not None
        residual, parts = self.cache.gate(
            *(update.U, update.scale, update.gain, update.peak, update.kept[TRANSFORM]),
            *(self.gamma, update.block, workspace),
        )
        update.outcomes = [NON_FINITE] * len(update.rows)
        for part in parts:
            for row in part.rows:
                update.outcomes[row] = part.outcome
            some = update.of(part.outcome)
            assert some is not None
            if part.transform is not None:
                keep(some.kept[TRANSFORM], part.transform, some.peak)
            probed, reused = rows_of(residual, part.rows), part.transform is None
            yield Direction(some, part.direction, reused, probed, part.residual)
