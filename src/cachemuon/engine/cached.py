"""A step with a cache: probe, gate (sync or lagged), resolve.

Which matrices are worked on together never changes a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.gns import Candidate, decide, gathered, probed
from ..cache.residual import random_block
from ..distributed.rank_group import Party
from ..newton_schulz.normalize import normalizer, rescale
from ..newton_schulz.solvers import GramNS, Solver, cheaper
from ..report.counters import (
    AGE,
    EARLY,
    GUARD,
    NO_AGE,
    PROBED,
    REFRESHED,
    REFRESHES,
    WAIT,
    count,
    skipped,
    transform_name,
)
from .fresh import ceiling_of, prepared_batches, scratch_like, solve_step
from .host import Edits, Kept, read, together
from .matrices import (
    GAMMA,
    OWNED,
    Matrix,
    Update,
    accumulate,
    agreed,
    batches,
    descend,
    factor,
    promoted,
    stack,
    step_lengths,
    update_of,
)
from .plan import Policy


@dataclass(slots=True, eq=False)
class Decision:
    """What is decided about one matrix at one step. `counters` and `residuals` become those after it."""

    matrix: Matrix
    policy: Policy
    counters: list[int]
    residuals: list[float]
    early: int = 0  # by how much a first life is shorter
    gamma: float = field(init=False)
    gate: str = field(init=False)
    before: list[int] = field(init=False)  # the counters
    age: int = field(init=False)  # of the transform, this step included
    life: int | None = field(init=False)  # the age up to which it is used
    resting: bool = field(init=False)  # its cache is set aside at this step
    probed: bool = field(init=False)  # it depends on the residual
    outcome: str = ""
    scale: tuple[Tensor, int] | None = None  # of its normalization: a batch's, and its place there
    candidate: tuple[Candidate, int] | None = None
    seen: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # residuals on the device, by column

    def __post_init__(self) -> None:
        self.before = counters = self.counters
        group = self.matrix.group  # whose settings may be others when an owner's residuals arrive
        self.gamma, self.gate, limit = group["gamma"], group["gate"], group["max_age"]
        self.age = NO_AGE if counters[AGE] == NO_AGE else counters[AGE] + 1
        self.life = None if limit is None else max(limit - counters[EARLY], 0)
        self.resting = self.policy.resting(counters[WAIT])
        self.probed = not self.resting and probed(self.age, self.life)

    @property
    def party(self) -> Party | None:
        """Those who do the same with their copies; none where the matrix is worked on by its owner alone."""
        return self.matrix.party if self.matrix.copied else None

    def note(self, column: int, residual: float) -> None:
        """Write down a residual."""
        self.residuals = list(self.residuals)
        self.residuals[column] = residual

    def follow(self) -> None:
        """What is known of a decision that another rank makes: all, unless a residual decides that nobody has
        told yet.
        """
        if not self.outcome and (self.resting or self.gate == "lagged"):
            self.take(True, self.residuals[PROBED])

    def take(self, finite: bool, residual: float = math.nan) -> None:
        """Decide, and count it."""
        self.outcome = decide(
            finite=finite,
            age=self.age,
            residual=residual,
            gamma=self.gamma,
            max_age=self.life,
            resting=self.resting,
        )
        self.counters = count(self.counters, self.outcome, self.early)
        if (guard := self.policy.guard) is not None:
            self.counters[GUARD] = guard.after(self.outcome, *self.counters[GUARD])


@dataclass(slots=True, eq=False)
class Told:
    """That the owner of a matrix tells its residuals, of the probe and of a refresh; other ranks decide by
    them as it did.

    Until they arrive, a step later, the decision is kept, and none of its step's tensors: a gradient would
    live through the next backward pass.
    """

    decision: Decision
    state: dict[str, Any] = field(init=False)
    index: int = field(init=False)
    owned: bool = field(init=False)

    numbers = 2

    def __post_init__(self) -> None:
        d = self.decision
        self.state, self.index, self.owned = d.matrix.state, d.matrix.index, d.matrix.owned
        del d.matrix, d.scale, d.candidate, d.seen

    def settle(self, finite: bool, numbers: list[float], counters: Edits, residuals: Edits) -> None:
        """Write down what was told."""
        d = self.decision
        if self.owned:
            return
        probe, refresh = numbers
        state, index, before = self.state, self.index, d.before
        rows = counters.rows(state["counters"])
        if d.outcome and not finite:
            rows[index] = skipped(rows[index], before, d.counters)
        elif not d.outcome:
            d.take(finite, probe)
            rows[index] = d.counters
        lagged, row = d.gate == "lagged", residuals.rows(state["residuals"])[index]
        if d.outcome in REFRESHES and finite:
            row[REFRESHED] = refresh
        if d.probed if not lagged else finite and not d.resting:
            row[PROBED] = refresh if lagged and d.outcome in REFRESHES else probe


def residuals_of(decisions: list[Decision]) -> Tensor:
    """What their owners have measured at this step, `(N, 2)` on the device: zeros elsewhere."""
    dtype, device = promoted([d.matrix for d in decisions]), decisions[0].matrix.momentum.device
    found = torch.zeros(len(decisions), 2, dtype=dtype, device=device)
    for row, d in zip(found.unbind(0), decisions, strict=True):
        for column, (residual, place) in d.seen.items() if d.matrix.owned else ():
            row[column] = residual[place]
    return found


GATED = ("resting", "sync", "lagged")


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
    rests takes part in neither. Of matrices that other ranks have too, all apply the transforms, and owners
    solve: their residuals decide, and their transforms travel.
    """

    def __init__(self, kept: Kept, blocks: Mapping[Hashable, Tensor]) -> None:
        self.kept, self.blocks = kept, blocks
        self.unread: list[Unread] = []

    def take(self, decisions: list[Decision]) -> None:
        """Decide about every matrix, and do it."""
        alike: dict[tuple[str, Party | None], list[Decision]] = {}
        for d in decisions:
            gate = "resting" if d.resting else d.gate
            alike.setdefault((gate, d.party), []).append(d)
        for gate, party in sorted(alike, key=lambda pair: GATED.index(pair[0])):
            {"resting": self._rest, "sync": self._sync, "lagged": self._lagged}[gate](alike[gate, party])

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
        """Accumulate momentum, and measure the residuals of what is probed.

        Returns an order and, on the device, whether the gradient of each is finite, then those residuals.
        """
        order: list[Decision] = []
        finites, residuals = [], []
        for batch in self._batches(sorted(window, key=_not_probed), _kind, _hit_room, ceiling):
            update, scale = self._update(batch)
            for place, d in enumerate(batch):
                d.scale = scale, place
            if number := sum(d.probed for d in batch):
                residuals.append(self._measure(batch[:number], update.U[:number], scale[:number]))
            order += batch
            finites.append(update.finite)
            del update  # or its memory would live beside the next batch's
        dtype = promoted([d.matrix for d in window])
        if (party := window[0].party) is not None and residuals:
            residuals = [party.total(together(residuals, dtype))]
        return order, together([*finites, *residuals], dtype)

    def _gate(self, order: list[Decision], readings: Tensor) -> None:
        """Decide for every matrix. The one place that waits for the device: all readings at once."""
        values = read(readings)
        residuals = iter(values[len(order) :])
        for d, finite in zip(order, values[: len(order)], strict=True):
            residual = next(residuals) if d.probed else math.nan
            d.take(bool(finite), residual)
            if d.probed:
                d.note(PROBED, residual)
            if d.outcome != "hit":
                d.candidate = None  # of a transform that was refused

    def _resolve(self, window: list[Decision], ceiling: int) -> None:
        """Apply the accepted transforms, solve where there is none, and take the step."""
        done = [d for d in window if d.outcome != "non-finite"]
        hits = [d for d in done if d.outcome == "hit"]
        for batch in self._batches(hits, _kind, _room, ceiling):
            self._hit(batch, self._again(batch), _scale(batch))
        misses = [d for d in done if d.outcome != "hit"]
        if window[0].party is not None:
            self._renew(misses, ceiling)
            return
        for batch in self._batches(misses, _kind, _room, ceiling):
            residual = self._refresh(batch, self._again(batch), _scale(batch))
            self._leave(batch, torch.ones_like(residual, dtype=torch.bool), residual)  # finite, as was read

    def _lagged(self, decisions: list[Decision]) -> None:
        """Decide on the residuals known from earlier steps, and do it."""
        for d in decisions:
            d.take(True, d.residuals[PROBED])
        ceiling, party = ceiling_of(d.matrix for d in decisions), decisions[0].party
        misses: list[Decision] = []
        for batch in self._batches(sorted(decisions, key=_not_hit), _kind, _room, ceiling):
            misses += self._take_unread(batch, party)
        if party is not None:
            self._renew(misses, ceiling)

    def _take_unread(self, batch: list[Decision], party: Party | None) -> list[Decision]:
        """Do what was decided, hits first, and leave the residuals on the device. Returns those of a party
        that are to be renewed.
        """
        update, scale = self._update(batch)
        hits = sum(d.outcome == "hit" for d in batch)
        if hit := batch[:hits]:
            U, factors, finite = update.U[:hits], scale[:hits], update.finite[:hits]
            residual = self._measure(hit, U, factors)
            if party is not None:
                residual = party.total(residual)
            self._hit(hit, U, factors, finite, residual)
            self.unread.append(Unread(hit, finite, residual, (PROBED,)))
        misses = batch[hits:]
        U, factors, finite = update.U[hits:], scale[hits:], update.finite[hits:]
        if misses and party is None:
            # The gate decides on the last one known for its transform: after a refresh on that one's.
            self._leave(misses, finite, self._refresh(misses, U, factors, finite))
            return []
        for place, d in enumerate(misses):
            d.scale = factors, place
        return misses

    def _renew(self, decisions: list[Decision], ceiling: int) -> None:
        """Refresh what other ranks have too: the owner solves, all get its transform and apply it.

        All ranks do so with the same calls, so that their copies of a parameter stay equal to the last bit.
        """
        for bucket in batches(decisions, _cached_in, _transform_bytes, max(ceiling // 4, 1)):
            party: Party = bucket[0].matrix.party
            made: dict[int, Tensor] = {}
            for batch in self._batches((d for d in bucket if d.matrix.owned), _kind, _room, ceiling):
                made |= self._transforms(batch)
            matrices = [d.matrix for d in bucket]
            transforms = dict(zip(map(id, matrices), party.spread(matrices, made), strict=True))
            for batch in self._batches(bucket, _kind, _room, ceiling):
                finite = _masked(batch)
                Q = _stacked(batch, [transforms[id(d.matrix)] for d in batch])
                residual = self._renewed(batch, self._again(batch, finite), Q, finite)
                known = torch.ones_like(residual, dtype=torch.bool) if finite is None else finite
                self._leave(batch, known, party.total(residual))
                del Q  # or its memory would live beside the next batch's

    def _transforms(self, batch: list[Decision]) -> dict[int, Tensor]:
        """The new transform of each, by its matrix."""
        X = rescale(self._again(batch, _masked(batch)), _scale(batch))
        Q = batch[0].policy.cache.fresh.transform(X, self.kept.workspace)
        Q = Q.to(batch[0].matrix.cached_in, copy=True)  # rounded here, so that it is the same for all
        return {id(d.matrix): one for d, one in zip(batch, Q.unbind(0), strict=True)}

    def _renewed(self, batch: list[Decision], U: Tensor, Q: Tensor, finite: Tensor | None) -> Tensor:
        """Apply new transforms, keep them, and take the step. Returns the residuals of owned directions."""
        matrices, workspace, cache = [d.matrix for d in batch], self.kept.workspace, batch[0].policy.cache
        D = cache.apply(U, _scale(batch), Q, Candidate(), workspace)
        residual = torch.zeros_like(D[:, 0, 0])
        for place, x in enumerate(matrices):
            if x.owned:
                residual[place] = cache.recheck(D[place], self._block(batch))
        _keep([_transform(x) for x in matrices], Q, finite)
        descend(matrices, D.mul_(step_lengths(matrices, D, finite)), finite)
        return residual

    def _leave(self, batch: list[Decision], finite: Tensor, residual: Tensor) -> None:
        """What a refresh has left on the device."""
        lagged = batch[0].gate == "lagged"
        self.unread.append(Unread(batch, finite, residual, (PROBED, REFRESHED) if lagged else (REFRESHED,)))
        for place, d in enumerate(batch):
            d.seen[REFRESHED] = residual, place

    def _again(self, batch: list[Decision], finite: Tensor | None = None) -> Tensor:
        return update_of([d.matrix for d in batch], self.kept.workspace, finite)

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
        Q = _stacked(batch, [_transform(d.matrix) for d in batch])
        cache = batch[0].policy.cache
        residual, candidate = cache.measure(U, scale, Q, self._block(batch), self.kept.workspace)
        for place, d in enumerate(batch):
            d.candidate = candidate, place
            d.seen[PROBED] = residual, place
        if batch[0].party is not None:  # the owner's counts
            owned = factor([d.matrix for d in batch], OWNED, residual)
            residual = torch.where(owned > 0, residual, 0)
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
        Q = _stacked(batch, [_transform(x) for x in matrices])
        candidate = Candidate.gathered([d.candidate for d in batch if d.candidate is not None])
        D = batch[0].policy.cache.apply(U, scale, Q, candidate, workspace, lengths)
        if residual is not None:
            _cut(D, lengths, residual <= factor(matrices, GAMMA, residual))
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


def _not_probed(d: Decision) -> bool:
    return not d.probed


def _not_hit(d: Decision) -> bool:
    return d.outcome != "hit"


def _hit_room(d: Decision) -> int:
    return d.policy.hit_room


def _transform_bytes(d: Decision) -> int:
    return 2 * d.matrix.shape[0] ** 2 * d.matrix.cached_in.itemsize


def _scale(batch: list[Decision]) -> Tensor:
    return gathered([d.scale for d in batch if d.scale is not None])


def _masked(batch: list[Decision]) -> Tensor | None:
    """Which gradients are finite, of matrices that other ranks have too; None where that was read."""
    if batch[0].gate == "sync":
        return None
    return agreed([d.matrix for d in batch])


def _cached_in(d: Decision) -> Hashable:
    return d.matrix.cached_in, d.matrix.momentum.device


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


def _cut(D: Tensor, lengths: Tensor, good: Tensor) -> None:
    """A lagged gate has accepted what it had not measured. Where it would have refused, the step D is cut to
    a Frobenius norm of its length, and so to singular values of at most that: the direction's are at most 1.
    What is not finite, as of a zero matrix with `eps=0`, is no step at all.
    """
    norm = torch.linalg.vector_norm(D, dim=(-2, -1), keepdim=True)
    cut = (lengths.abs() / norm).nan_to_num(0, posinf=0)
    share = torch.where(good.view(-1, 1, 1), 1, cut)
    D.mul_(share).masked_fill_(share == 0, 0)


def transform_of(x: Matrix) -> Tensor | None:
    """The transform of a matrix that this rank keeps, if it does."""
    return x.state.get(transform_name(x.index, len(x.state["counters"])))


def drop_transform(x: Matrix) -> None:
    """Forget a transform that this rank does not work with."""
    x.state.pop(transform_name(x.index, len(x.state["counters"])), None)


def _transform(x: Matrix) -> Tensor:
    """The same, made on first use, in the dtype that the group asks for now."""
    transform, name = transform_of(x), transform_name(x.index, len(x.state["counters"]))
    if transform is None:
        n = x.shape[0]
        transform = x.state[name] = x.momentum.new_zeros((n, n), dtype=x.cached_in)
    elif transform.dtype != x.cached_in:
        transform = x.state[name] = transform.to(x.cached_in)
    return transform


def _stacked(batch: list[Decision], transforms: list[Tensor]) -> Tensor:
    """The transforms of a batch in the precision that they are worked with."""
    return stack(transforms).to(batch[0].matrix.precision)


def _keep(transforms: list[Tensor], Q: Tensor, finite: Tensor | None) -> None:
    """Keep the transforms of a solve; where it was made without a good gradient, the old ones."""
    if finite is None:
        torch._foreach_copy_(transforms, list(Q.unbind(0)))
        return
    for old, new, ok in zip(transforms, Q.unbind(0), finite.unbind(0), strict=True):
        torch.where(ok, new.to(old.dtype), old, out=old)
