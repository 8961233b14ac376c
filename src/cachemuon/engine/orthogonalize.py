"""Orthogonalizers: what a bucket does with its update. `Fresh` solves; `Cached` follows the schedule.

`Gated`, the paper's sibling of `Cached`, is in `gated.py`. The laboratory's rivals are siblings too. What
they make, `Normalization` divides by its second moments where `normalize` asks for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..cache.reuse import Repair, Reuse, sketched_residual
from ..newton_schulz.products import Workspace
from ..newton_schulz.solvers import Solver, cheaper
from ..report.counters import EXPIRED, FIRST, HIT, UNCACHED
from .bucket import Bucket

TRANSFORM = "transform"
"""The state entry of a matrix's transform."""

MOMENTS = "moments"
"""The state entry of a normalized matrix: the Frobenius norm of its last solved direction, then a running
mean square for each output, and with "factored" for each input.
"""

BETA, EPS = 0.95, 1e-8
"""The weight of the past in these means, and what is added to their roots."""


@dataclass(slots=True, eq=False)
class Update:
    """What is orthogonalized at one step: `X = scale U (B, n, m)`, wide and normalized.

    Its `rows` are those of its bucket that take a step. U may be overwritten. A direction is multiplied by
    `gain (B, 1, 1)`, which is `-lr ratio`, and 0 where a gradient is not finite; `peak (B, 1, 1)` is not
    finite there, and 0 for a matrix of zeros. `factor` is `-lr ratio` too: where directions are normalized,
    that multiplies them by it, and `gain` is 1. `kept` has for each entry what the matrices keep from step to
    step, as transforms; `outcomes` are those that the schedule wants; `block` has the random vectors of this
    life; `solved` transforms of X that have been made already, on whichever rank.
    """

    bucket: Bucket
    rows: list[int]
    outcomes: list[int]
    U: Tensor
    scale: Tensor
    gain: Tensor
    peak: Tensor
    kept: dict[str, list[Tensor]]
    factor: Tensor
    block: Tensor | None = None
    solved: Tensor | None = None

    def of(self, *outcomes: int) -> Update | None:
        """The rows with one of these outcomes: views where they follow one another, else copies."""
        rows = [row for row, outcome in enumerate(self.outcomes) if outcome in outcomes]
        if not rows or len(rows) == len(self.outcomes):
            return self if rows else None
        return Update(
            self.bucket,
            [self.rows[row] for row in rows],
            [self.outcomes[row] for row in rows],
            *(rows_of(self.U, rows), rows_of(self.scale, rows)),
            *(rows_of(self.gain, rows), rows_of(self.peak, rows)),
            {entry: [kept[row] for row in rows] for entry, kept in self.kept.items()},
            rows_of(self.factor, rows),
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
    cuts = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    runs = pairwise([0, *cuts, len(rows)])
    return torch.cat([batch[rows[begin] : rows[end - 1] + 1] for begin, end in runs])


@dataclass(slots=True, eq=False)
class Direction:
    """The steps `D (B, n, m)` of an update, or of some rows of it (`Update.of`); `reused` or solved.

    `probed (B,)` are the residuals of cached directions, `refreshed` those of fresh ones with a transform.
    """

    update: Update
    D: Tensor
    reused: bool = False
    probed: Tensor | None = None
    refreshed: Tensor | None = None


class Entry(NamedTuple):
    """What a matrix keeps from step to step: zeros of this shape at first. `compact` entries have the
    group's `cache_dtype`, if it has one.
    """

    shape: tuple[int, ...]
    compact: bool = False


class Normalization(NamedTuple):
    """What divides the directions of a bucket by the root of their second moments: `normalize`.

    `turned` says that outputs are columns of the wide form. A reused direction gets the Frobenius norm of the
    last solved one; where its residual is above gamma it stays as short as it was cut.
    """

    factored: bool
    turned: bool = False
    gamma: float = math.inf

    @classmethod
    def of(cls, group: Mapping[str, Any], rows: int, cols: int) -> Normalization | None:
        """That of a group's rows x cols matrices; None without one."""
        if group["normalize"] is None:
            return None
        turned = (rows > cols) is not group["transposed"]
        return cls(group["normalize"] == "factored", turned, float(group.get("gamma", math.inf)))

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The moments of each matrix."""
        inputs, outputs = sorted((rows, cols), reverse=not self.turned)
        return {MOMENTS: Entry((1 + outputs + (inputs if self.factored else 0),))}

    def apply(self, direction: Direction) -> None:
        """Normalize a direction in place, by moments that take it in."""
        update, D, lengthen = direction.update, direction.D, None
        if direction.reused and direction.probed is not None:
            lengthen = (direction.probed <= self.gamma).view(-1, 1)
        good = (torch.isfinite(update.peak) & (update.peak > 0)).flatten(1)
        spare = torch.empty_like(D) if D is update.U else update.U  # which is done with
        moments = torch.stack(update.kept[MOMENTS])
        if self.turned:
            D, spare = D.mT, spare.mT
        normalize_directions(D, moments, update.factor.flatten(1), good, lengthen, spare)
        torch._foreach_copy_(update.kept[MOMENTS], list(moments.unbind(0)))


def normalize_directions(
    D: Tensor, moments: Tensor, factor: Tensor, good: Tensor, lengthen: Tensor | None, spare: Tensor
) -> None:
    """Divide `D (B, outputs, inputs)` by the root of each output's mean square; then by that of each input's,
    if `moments` has them. Then it is multiplied by one number, for a Frobenius norm of `factor (B, 1)` times
    what it was; those to `lengthen (B, 1)` get the norm of the last direction that was not reused.

    D and `moments (B, 1 + outputs)` or `(B, 1 + outputs + inputs)` are changed in place; the moments only
    where `good (B, 1)`. `spare` is memory like D. With None for `lengthen`, D was solved.

    >>> D, moments = torch.tensor([[[4.0, 0.0], [0.0, 3.0]]]), torch.zeros(1, 3)
    >>> one = torch.ones(1, 1)
    >>> normalize_directions(D, moments, one, one > 0, None, torch.empty_like(D))
    >>> D  # rows of one length, and the norm that it had
    tensor([[[3.5355, 0.0000],
             [0.0000, 3.5355]]])
    """
    outputs, taken = D.shape[1], good.to(D.dtype) * (1 - BETA)
    norm, by_output, by_input = moments.split([1, outputs, moments.shape[1] - 1 - outputs], dim=1)
    sums = torch.mul(D, D, out=spare).sum(-1)
    length = sums.sum(-1, keepdim=True).sqrt()
    scale = by_output.lerp_(sums / D.shape[2], taken).sqrt().add_(EPS).reciprocal_()
    if factored := by_input.shape[1] > 0:
        D.mul_(scale.unsqueeze(-1))
        sums = torch.mul(D, D, out=spare).sum(-2)
        scale = by_input.lerp_(sums / outputs, taken).sqrt().add_(EPS).reciprocal_()
    if lengthen is None:
        norm.copy_(torch.where(good, length, norm))
    else:
        length = torch.where(lengthen & (norm > 0), norm, length)
    made = (sums * scale.square()).sum(-1, keepdim=True).sqrt()
    scale *= torch.where(made > 0, factor * length / made, 0)
    D.mul_(scale.unsqueeze(-2 if factored else -1))


class Orthogonalizer(Protocol):
    """What buckets ask at every step."""

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The state entries that each rows x cols matrix keeps, by name."""

    def joins(self, other: Orthogonalizer) -> bool:
        """Whether it can take updates of buckets of `other` together with its own, of matrices with as many
        rows n.
        """

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Directions for all rows of the updates, each of which is used before the next one is asked for."""


@dataclass(frozen=True)
class Fresh:
    """Solve for every matrix at every step."""

    solver: Solver

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """None."""
        return {}

    def joins(self, other: Orthogonalizer) -> bool:
        """Solvers work on one shape."""
        return False

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """All rows at once."""
        for update in updates:
            D = self.solver.solve(update.U.mul_(update.scale), workspace).mul_(update.gain)
            yield Direction(update, D)


@dataclass(frozen=True)
class Cached:
    """Apply the cached transforms; solve for those matrices whose transform is due.

    Nothing is read within a step. A residual above gamma bounds the step on the device, and the schedule
    knows of it at the next one.
    """

    cache: Reuse
    gamma: float

    def entries(self, rows: int, cols: int) -> dict[str, Entry]:
        """The transform."""
        return {TRANSFORM: Entry((min(rows, cols),) * 2, compact=True)}

    def joins(self, other: Orthogonalizer) -> bool:
        """Transforms are n x n, whatever the width of their matrices; the exact probe works on one shape."""
        return isinstance(other, Cached) and other == self and self.cache.probe == "sketch"

    def __call__(self, updates: Sequence[Update], step: int, workspace: Workspace) -> Iterator[Direction]:
        """Reused directions, refreshed ones, and those whose cache is suspended."""
        reused = [found for update in updates if (found := update.of(HIT)) is not None]
        if reused:
            U, block = [one.U for one in reused], reused[0].block
            assert block is not None
            kept = [Q for one in reused for Q in one.kept[TRANSFORM]]
            Q = workspace.stack("transforms", kept, U[0].dtype)
            scale, gain = reused[0].scale, reused[0].gain
            if len(reused) > 1:
                scale, gain = (
                    torch.cat([one.scale for one in reused]),
                    torch.cat([one.gain for one in reused]),
                )
            D, residual = self.cache.reuse(U, scale, gain, Q, block, self.gamma, workspace)
            residuals = residual.split([len(one) for one in U])
            for one, own, probed in zip(reused, D, residuals, strict=True):
                yield Direction(one, own, reused=True, probed=probed)
        for update in updates:
            yield from solved(self.cache, update, workspace)


def solved(cache: Reuse, update: Update, workspace: Workspace) -> Iterator[Direction]:
    """The rows that the schedule wants solved: with a new transform to keep, or, suspended, without."""
    if (due := update.of(FIRST, EXPIRED)) is not None:
        assert due.block is not None
        if (Q := due.solved) is None:
            D, Q = cache.fresh.solve_with_transform(due.U.mul_(due.scale), workspace)
        else:
            D = applied(cache, due, Q, workspace)
        residual = sketched_residual(due.block[:, : cache.vectors], D)
        keep(due.kept[TRANSFORM], Q, due.peak)
        yield Direction(due, D.mul_(due.gain), refreshed=residual)
    if (suspended := update.of(UNCACHED)) is not None:
        if suspended.solved is None:
            X = suspended.U.mul_(suspended.scale)
            D = cheaper(cache.fresh, X.shape[1], X.shape[2], cache.fresh.precision(X)).solve(X, workspace)
        else:
            D = applied(cache, suspended, suspended.solved, workspace)
        yield Direction(suspended, D.mul_(suspended.gain))


def applied(cache: Reuse, update: Update, Q: Tensor, workspace: Workspace) -> Tensor:
    """`Q X`, as it is."""
    one = torch.ones_like(update.scale)
    return cache.apply([update.U], update.scale, one, Q, Repair(one), workspace)[0]


def keep(kept: list[Tensor], made: Tensor, peak: Tensor) -> None:
    """Keep new transforms; the old one where the momentum was not finite, or zero, which makes none."""
    good = torch.isfinite(peak) & (peak > 0)
    for old, new, ok in zip(kept, made.unbind(0), good.unbind(0), strict=True):
        torch.where(ok, new.to(old.dtype), old, out=old)
