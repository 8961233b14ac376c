"""The paper's gate as an orthogonalizer: measure, read, accept or refresh, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cache.gns import CacheGNS
from ..newton_schulz.workspace import Workspace
from ..report.counters import HIT
from .orthogonalize import Direction, Orthogonalizer, Update, keep, rows_of, solved


@dataclass(frozen=True)
class Gated:
    """CacheMuon, Algorithm A.5: for every matrix that has a transform, Algorithm A.4 decides
    (`CacheGNS.gate`).

    It reads the residuals of a bucket on the host before any of its directions is applied.
    """

    cache: CacheGNS
    gamma: float
    entry: str | None = "transform"

    def kept_shape(self, n: int, m: int) -> tuple[int, int]:
        """The transform's."""
        return (n, n)

    def joins(self, other: Orthogonalizer) -> bool:
        """Bucket by bucket."""
        return False

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Accepted directions, refused ones solved, and those that had no transform."""
        for update in updates:
            if (probed := update.of(HIT)) is not None:
                yield from self._judged(update, *probed, workspace)
            yield from solved(self.cache, update, workspace)

    def _judged(
        self, update: Update, rows: list[int], some: Update, workspace: Workspace
    ) -> Iterator[Direction]:
        assert some.block is not None
        residual, parts = self.cache.gate(
            some.U, some.scale, some.gain, some.peak, some.kept, self.gamma, some.block, workspace
        )
        for part in parts:
            if part.transform is not None:
                keep([some.kept[row] for row in part.rows], part.transform, rows_of(some.peak, part.rows))
            own = [rows[row] for row in part.rows]
            yield Direction(update, own, part.direction, rows_of(residual, part.rows), part.residual)
