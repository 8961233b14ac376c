"""Orthogonalizers: what a bucket does with its update. `Fresh` solves; `Cached` follows the schedule.

`Gated`, the paper's sibling of `Cached`, is in `gated.py`. The laboratory's rivals are siblings too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.gns import CacheGNS
from ..cache.reuse import Repair
from ..newton_schulz.solvers import Solver, cheaper
from ..newton_schulz.workspace import Workspace
from ..report.counters import EXPIRED, FIRST, HIT, UNCACHED
from .bucket import Bucket


@dataclass(slots=True, eq=False)
class Update:
    """What is orthogonalized at one step: `X = scale U (B, n, m)`, wide and normalized.

    Its `rows` are those of its bucket that take a step. U may be overwritten. A direction is multiplied by
    `gain (B, 1, 1)`, which is `-lr ratio`, and 0 where a gradient is not finite; `peak (B, 1, 1)` is not
    finite there, and 0 for a matrix of zeros. `kept` has what each matrix keeps from step to step, as a
    transform; `outcomes` are those that the schedule wants; `block` has the random vectors of this life;
    `solved` transforms of X that have been made already, on whichever rank.
    """

    bucket: Bucket
    rows: list[int]
    outcomes: list[int]
    U: Tensor
    scale: Tensor
    gain: Tensor
    peak: Tensor
    kept: list[Tensor]
    block: Tensor | None = None
    solved: Tensor | None = None

    def of(self, *outcomes: int) -> tuple[list[int], Update] | None:
        """The rows with one of these outcomes, and what belongs to them; None if there are none."""
        rows = [row for row, outcome in enumerate(self.outcomes) if outcome in outcomes]
        if not rows:
            return None
        return (rows, self) if len(rows) == len(self.outcomes) else (rows, self.at(rows))

    def at(self, rows: list[int]) -> Update:
        """Some of its rows: views where they follow one another, else copies."""
        return Update(
            self.bucket,
            [self.rows[row] for row in rows],
            [self.outcomes[row] for row in rows],
            rows_of(self.U, rows),
            rows_of(self.scale, rows),
            rows_of(self.gain, rows),
            rows_of(self.peak, rows),
            [self.kept[row] for row in rows] if self.kept else [],
            self.block,
            None if self.solved is None else rows_of(self.solved, rows),
        )


def rows_of(batch: Tensor, rows: list[int]) -> Tensor:
    """Rows of a batch, in ascending order: a view where they follow one another.

    >>> rows_of(torch.arange(4), [1, 2]), rows_of(torch.arange(4), [0, 3])
    (tensor([1, 2]), tensor([0, 3]))
    """
    if rows[-1] - rows[0] == len(rows) - 1:
        return batch[rows[0] : rows[-1] + 1]
    parts = batch.unbind(0)
    return torch.stack([parts[row] for row in rows])


@dataclass(slots=True, eq=False)
class Direction:
    """The steps `D (B, n, m)` of some rows of an update.

    `probed (B,)` are the residuals of cached directions, `refreshed` those of fresh ones with a transform.
    """

    update: Update
    rows: list[int]
    D: Tensor
    probed: Tensor | None = None
    refreshed: Tensor | None = None

    @property
    def bucket_rows(self) -> list[int]:
        """Which rows of the bucket these are."""
        return [self.update.rows[row] for row in self.rows]


class Orthogonalizer(Protocol):
    """What buckets ask at every step.

    Each matrix keeps an entry of its own in the state, if `entry` names one, of the shape that `kept_shape`
    gives for a wide n x m matrix.
    """

    @property
    def entry(self) -> str | None:
        """The name of the entry."""

    def kept_shape(self, n: int, m: int) -> tuple[int, int]:
        """The shape of what a matrix keeps."""

    def joins(self, other: Orthogonalizer) -> bool:
        """Whether it can take updates of buckets of `other` together with its own, of matrices with as many
        rows n.
        """

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Directions for all rows of the updates, each of which is used before the next one is asked for."""


class Uncached:
    """An orthogonalizer that keeps nothing."""

    entry: str | None = None

    def kept_shape(self, n: int, m: int) -> tuple[int, int]:
        """Nothing."""
        return (0, 0)

    def joins(self, other: Orthogonalizer) -> bool:
        """Solvers work on one shape."""
        return False


@dataclass(frozen=True)
class Fresh(Uncached):
    """Solve for every matrix at every step."""

    solver: Solver

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """All rows at once."""
        for update in updates:
            D = self.solver.solve(update.U.mul_(update.scale), workspace).mul_(update.gain)
            yield Direction(update, list(range(len(D))), D)


@dataclass(frozen=True)
class Cached:
    """Apply the cached transforms; solve for those matrices whose transform is due.

    Nothing is read within a step. A residual above gamma bounds the step on the device, and the schedule
    knows of it at the next one.
    """

    cache: CacheGNS
    gamma: float
    entry: str | None = "transform"

    def kept_shape(self, n: int, m: int) -> tuple[int, int]:
        """The transform's."""
        return (n, n)

    def joins(self, other: Orthogonalizer) -> bool:
        """Transforms are n x n, whatever the width of their matrices; the exact probe works on one shape."""
        alike = isinstance(other, Cached) and (other.cache, other.gamma) == (self.cache, self.gamma)
        return alike and self.cache.probe == "sketch"

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Reused directions, refreshed ones, and those whose cache is suspended."""
        reused = [(update, *found) for update in updates if (found := update.of(HIT)) is not None]
        if reused:
            parts = [some for *_, some in reused]
            block = parts[0].block
            assert block is not None
            U = [some.U for some in parts]
            Q = workspace.stack("transforms", [kept for some in parts for kept in some.kept], U[0].dtype)
            scale, gain = joined([some.scale for some in parts]), joined([some.gain for some in parts])
            D, residual = self.cache.reuse(U, scale, gain, Q, block, self.gamma, workspace)
            residuals = residual.split([len(one) for one in U])
            for (update, rows, _), own, probed in zip(reused, D, residuals, strict=True):
                yield Direction(update, rows, own, probed=probed)
        for update in updates:
            yield from solved(self.cache, update, workspace)


def solved(cache: CacheGNS, update: Update, workspace: Workspace) -> Iterator[Direction]:
    """The rows that the schedule wants solved: with a new transform to keep, or, suspended, without."""
    if (due := update.of(FIRST, EXPIRED)) is not None:
        rows, some = due
        assert some.block is not None
        if some.solved is None:
            D, Q, residual = cache.refresh(some.U.mul_(some.scale), some.block, workspace)
        else:
            D, Q = applied(cache, some, some.solved, workspace), some.solved
            residual = cache.recheck(D, some.block)
        keep(some.kept, Q, some.peak)
        yield Direction(update, rows, D.mul_(some.gain), refreshed=residual)
    if (suspended := update.of(UNCACHED)) is not None:
        rows, some = suspended
        if some.solved is None:
            X = some.U.mul_(some.scale)
            D = cheaper(cache.fresh, X.shape[1], X.shape[2], cache.fresh.precision(X)).solve(X, workspace)
        else:
            D = applied(cache, some, some.solved, workspace)
        yield Direction(update, rows, D.mul_(some.gain))


def applied(cache: CacheGNS, update: Update, Q: Tensor, workspace: Workspace) -> Tensor:
    """`Q X`, as it is."""
    one = torch.ones_like(update.scale)
    return cache.apply([update.U], update.scale, one, Q, Repair(one), workspace)[0]


def joined(parts: list[Tensor]) -> Tensor:
    """Batches as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keep(kept: list[Tensor], made: Tensor, peak: Tensor) -> None:
    """Keep new transforms; the old one where the momentum was not finite, or zero, which makes none."""
    good = torch.isfinite(peak) & (peak > 0)
    for old, new, ok in zip(kept, made.unbind(0), good.unbind(0), strict=True):
        torch.where(ok, new.to(old.dtype), old, out=old)
