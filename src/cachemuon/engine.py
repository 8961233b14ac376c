"""A step with a cache: probe, gate (sync or lagged), resolve.

Which matrices are worked on together never changes a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import Candidate, decide, gathered, probed
from .fresh import ceiling_of, prepared_batches, scratch_like, solve_step
from .host import Kept, read
from .matrices import (
    GAMMA,
    Matrix,
    Update,
    accumulate,
    batches,
    descend,
    factor,
    promoted,
    stack,
    step_lengths,
    update_of,
)
from .plan import Policy
from .polar import GramNS, Solver, cheaper, normalizer, rescale
from .probe import random_block
from .stats import AGE, EARLY, GUARD, NO_AGE, PROBED, REFRESHED, WAIT, count


@dataclass(slots=True, eq=False)
class Decision:
    """What is decided about one matrix at one step. `counters` and `residuals` become those after it."""

    matrix: Matrix
    policy: Policy
    counters: list[int]
    residuals: list[float]
    early: int = 0  # by how much a first life is shorter
    before: list[int] = field(init=False)  # the counters
    age: int = field(init=False)  # of the transform, this step included
    life: int | None = field(init=False)  # the age up to which it is used
    resting: bool = field(init=False)  # its cache is set aside at this step
    probed: bool = field(init=False)  # it depends on the residual
    outcome: str = ""
    scale: tuple[Tensor, int] | None = None  # of its normalization: a batch's, and its place there
    candidate: tuple[Candidate, int] | None = None

    def __post_init__(self) -> None:
        self.before = counters = self.counters
        guard = self.policy.guard
        limit = self.matrix.group["max_age"]
        self.age = NO_AGE if counters[AGE] == NO_AGE else counters[AGE] + 1
        self.life = None if limit is None else max(limit - counters[EARLY], 0)
        self.resting = guard is not None and guard.resting(counters[WAIT])
        self.probed = not self.resting and probed(self.age, self.life)

    def note(self, column: int, residual: float) -> None:
        """Write down a residual."""
        self.residuals = list(self.residuals)
        self.residuals[column] = residual

    def take(self, finite: bool, residual: float = math.nan) -> None:
        """Decide, and count it."""
        self.outcome = decide(
            finite=finite,
            age=self.age,
            residual=residual,
            gamma=self.matrix.group["gamma"],
            max_age=self.life,
            resting=self.resting,
        )
        self.counters = count(self.counters, self.outcome, self.early)
        if (guard := self.policy.guard) is not None:
            self.counters[GUARD] = guard.after(self.outcome, *self.counters[GUARD])


class Unread(NamedTuple):
    """What a batch has left on the device: which gradients are finite, and residuals for these columns."""

    batch: list[Decision]
    finite: Tensor
    residual: Tensor | None = None
    columns: tuple[int, ...] = ()


class CachedStep:
    """A step of CacheMuon for many matrices.

    With `gate="sync"` all are probed, all readings are read together, and what was decided is done. With
    `gate="lagged"` the residuals of earlier steps decide, and this step's are left for the next. A cache that
    rests takes part in neither.
    """

    def __init__(self, kept: Kept, blocks: Mapping[Hashable, Tensor]) -> None:
        self.kept, self.blocks = kept, blocks
        self.unread: list[Unread] = []

    def take(self, decisions: list[Decision]) -> None:
        """Decide about every matrix, and do it."""
        by_gate: dict[str, list[Decision]] = {"resting": [], "sync": [], "lagged": []}
        for d in decisions:
            by_gate["resting" if d.resting else d.matrix.group["gate"]].append(d)
        self._rest(by_gate["resting"])
        self._sync(by_gate["sync"])
        self._lagged(by_gate["lagged"])

    def _rest(self, decisions: list[Decision]) -> None:
        """Solve by the cheapest solver, and keep nothing."""
        of = {id(d.matrix): d for d in decisions}
        for d in decisions:
            d.take(True)
        for batch, finite in solve_step([d.matrix for d in decisions], self.kept, _cheapest):
            self.unread.append(Unread([of[id(x)] for x in batch], finite))

    def _sync(self, decisions: list[Decision]) -> None:
        """Probe, decide, do it."""
        for window, ceiling in _windows(decisions):
            self._gate(*self._probe(window, ceiling))
            self._resolve(window, ceiling)

    def _probe(self, window: list[Decision], ceiling: int) -> tuple[list[Decision], Tensor]:
        """Accumulate momentum, measure the residuals of what is probed, and solve at once what is not.

        Returns an order and, on the device, whether the gradient of each is finite, then the residuals: each
        one's of the probe or of the fresh direction.
        """
        order: list[Decision] = []
        finites, residuals = [], []
        window = sorted(window, key=lambda d: not d.probed)
        for batch in self._batches(window, _kind, _first_room, ceiling):
            update, scale = self._update(batch)
            number = sum(d.probed for d in batch)
            if number:
                residuals.append(self._measure(batch[:number], update.U[:number], scale[:number]))
                for place, d in enumerate(batch[:number]):
                    d.scale = scale, place
            if rest := batch[number:]:
                part = slice(number, None)
                residuals.append(self._refresh(rest, update.U[part], scale[part], update.finite[part]))
            order += batch
            finites.append(update.finite)
        device, dtype = finites[0].device, promoted([d.matrix for d in window])
        parts = (*finites, *residuals)
        return order, torch.cat([part.to(device, dtype, non_blocking=True) for part in parts])

    def _gate(self, order: list[Decision], readings: Tensor) -> None:
        """Decide for every matrix. The one place that waits for the device: all readings at once."""
        values = read(readings)
        for d, finite, residual in zip(order, values[: len(order)], values[len(order) :], strict=True):
            d.take(bool(finite), residual)
            if d.probed or finite:
                d.note(PROBED if d.probed else REFRESHED, residual)

    def _resolve(self, window: list[Decision], ceiling: int) -> None:
        """Apply the accepted transforms, solve where one was refused, and take the step."""
        done = (d for d in window if d.probed and d.outcome != "non-finite")
        for batch in self._batches(done, lambda d: (d.matrix.kind, d.outcome), _room, ceiling):
            U = update_of([d.matrix for d in batch], self.kept.workspace)
            scale = gathered([d.scale for d in batch if d.scale is not None])
            if batch[0].outcome == "hit":
                self._hit(batch, U, scale)
            else:
                residual = self._refresh(batch, U, scale)
                finite = torch.ones_like(residual, dtype=torch.bool)  # as was read
                self.unread.append(Unread(batch, finite, residual, (REFRESHED,)))

    def _lagged(self, decisions: list[Decision]) -> None:
        """Decide on the residuals known from earlier steps, and do it."""
        for d in decisions:
            d.take(True, d.residuals[PROBED])
        decisions = sorted(decisions, key=lambda d: d.outcome != "hit")
        for batch in self._batches(decisions, _kind, _room, ceiling_of(d.matrix for d in decisions)):
            update, scale = self._update(batch)
            hits = sum(d.outcome == "hit" for d in batch)
            if hit := batch[:hits]:
                U, factors, finite = update.U[:hits], scale[:hits], update.finite[:hits]
                residual = self._measure(hit, U, factors)
                self._hit(hit, U, factors, finite, residual)
                self.unread.append(Unread(hit, finite, residual, (PROBED,)))
            if rest := batch[hits:]:
                U, factors, finite = update.U[hits:], scale[hits:], update.finite[hits:]
                residual = self._refresh(rest, U, factors, finite)
                # The gate decides on the last one known for its transform: after a refresh on that one's.
                self.unread.append(Unread(rest, finite, residual, (PROBED, REFRESHED)))

    def _batches(
        self,
        decisions: Iterable[Decision],
        kind: Callable[[Decision], Hashable],
        room: Callable[[Decision], int],
        ceiling: int,
    ) -> Iterator[list[Decision]]:
        return prepared_batches(decisions, lambda d: d.matrix, kind, room, ceiling, self.kept)

    def _update(self, batch: list[Decision]) -> tuple[Update, Tensor]:
        """Accumulate momentum; and the normalizers of what is orthogonalized."""
        workspace, matrices = self.kept.workspace, [d.matrix for d in batch]
        update = accumulate(matrices, workspace)
        eps, scratch = matrices[0].group["eps"], scratch_like(workspace, update.U)
        return update, normalizer(update.U, eps, scratch, update.peak)

    def _measure(self, batch: list[Decision], U: Tensor, scale: Tensor) -> Tensor:
        """Their residuals under the cached transforms. What hits can use of that is left in the decisions."""
        Q = stack([_transform(d.matrix) for d in batch])
        cache = batch[0].policy.cache
        residual, candidate = cache.measure(U, scale, Q, self._block(batch), self.kept.workspace)
        for place, d in enumerate(batch):
            d.candidate = candidate, place
        return residual

    def _hit(
        self,
        batch: list[Decision],
        U: Tensor,
        scale: Tensor,
        finite: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Apply the cached transforms, and take the step. `finite=None` promises that all gradients are;
        `residual` are those that nobody has read.
        """
        matrices, workspace = [d.matrix for d in batch], self.kept.workspace
        lengths = step_lengths(matrices, scale, finite)
        Q = stack([_transform(x) for x in matrices])
        candidate = Candidate.gathered([d.candidate for d in batch if d.candidate is not None])
        D = batch[0].policy.cache.apply(U, scale, Q, candidate, workspace, lengths)
        if residual is not None:
            D.mul_(_cut(D, lengths, residual <= factor(matrices, GAMMA, residual)))
        descend(matrices, D, finite)
        for d in batch:
            d.candidate = d.scale = None

    def _refresh(
        self, batch: list[Decision], U: Tensor, scale: Tensor, finite: Tensor | None = None
    ) -> Tensor:
        """Solve, keep the transforms, and take the step. Returns the residuals of the fresh directions."""
        matrices, workspace = [d.matrix for d in batch], self.kept.workspace
        X = rescale(U, scale, out=scratch_like(workspace, U))
        D, Q, residual = batch[0].policy.cache.refresh(X, self._block(batch), workspace)
        _keep([_transform(x) for x in matrices], Q, finite)
        descend(matrices, D.mul_(step_lengths(matrices, scale, finite)), finite)
        return residual

    def _block(self, batch: list[Decision]) -> Tensor:
        return self.blocks[_block_of(batch[0])]


def blocks_for(decisions: list[Decision]) -> dict[Hashable, tuple[Tensor, torch.device]]:
    """The random blocks that these will ask for, on the host, each drawn once; and where they are wanted."""
    found: dict[Hashable, tuple[Tensor, torch.device]] = {}
    for d in decisions:
        if (key := _block_of(d)) not in found:
            n, columns, seed, step, dtype, device = key
            found[key] = random_block(n, columns, seed=seed, step=step, dtype=dtype), device
    return found


def _block_of(d: Decision) -> tuple[int, int, int, int, torch.dtype, torch.device]:
    x = d.matrix
    n, group = x.shape[0], x.group
    return n, d.policy.cache.columns(n), group["seed"], group["step"], x.precision, x.momentum.device


def _kind(d: Decision) -> Hashable:
    return d.matrix.kind


def _first_room(d: Decision) -> int:
    return d.policy.hit_room if d.probed else d.policy.solve_room


def _room(d: Decision) -> int:
    return d.policy.hit_room if d.outcome == "hit" else d.policy.solve_room


def _left(d: Decision) -> int:
    return d.policy.left if d.probed else 0


def _windows(decisions: list[Decision]) -> Iterator[tuple[list[Decision], int]]:
    """Parts that share one reading, and what they leave of the ceiling for a batch: all matrices together,
    unless what probes leave until the gate has decided would fill half of it.
    """
    ceiling = ceiling_of(d.matrix for d in decisions)
    for window in batches(decisions, lambda d: None, _left, ceiling // 2):
        yield window, max(ceiling - sum(map(_left, window)), 1)


def _cheapest(x: Matrix) -> Solver:
    """The fresh solver that a matrix has while its cache is resting."""
    solver: GramNS = x.group["solver"]
    return cheaper(solver, *x.shape, solver.precision(x.momentum))


def _cut(D: Tensor, lengths: Tensor, good: Tensor) -> Tensor:
    """A lagged gate has accepted what it had not measured. Where it would have refused, the step D is cut to
    a Frobenius norm of its length, and so to singular values of at most that: the direction's are at most 1.
    """
    norm = torch.linalg.vector_norm(D, dim=(-2, -1), keepdim=True)
    cut = (lengths.abs() / norm).nan_to_num(0, posinf=0)
    return torch.where(good.view(-1, 1, 1), 1, cut)


def _transform(x: Matrix) -> Tensor:
    """The matrix's place in its parameter's `transform`, which is made on first use."""
    n = x.shape[0]
    if "transform" not in x.state:
        number = len(x.state["counters"])
        shape = (n, n) if number == 1 else (number, n, n)
        x.state["transform"] = x.momentum.new_zeros(shape, dtype=x.precision)
    transform: Tensor = x.state["transform"]
    return transform if transform.ndim == 2 else transform[x.index]


def _keep(transforms: list[Tensor], Q: Tensor, finite: Tensor | None) -> None:
    """Keep the transforms of a solve; where it was made without a good gradient, the old ones."""
    if finite is None:
        torch._foreach_copy_(transforms, list(Q.unbind(0)))
        return
    for old, new, ok in zip(transforms, Q.unbind(0), finite.unbind(0), strict=True):
        torch.where(ok, new, old, out=old)
