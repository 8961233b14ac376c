"""The optimizers: Muon, which solves at every step, and CacheMuon, which solves when it must."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from .base import MAX_WORKSPACE_BYTES, MatrixOptimizer
from .cache import GATES, CacheGNS, Candidate, Guard, check_gate, decide, probed
from .flops import Executed, Paper, executed_by, price
from .groups import matrix_shape
from .matrices import (
    Matrix,
    accumulate,
    batches,
    descend,
    stack,
    step_lengths,
    update_of,
)
from .polar import AutoNS, GramNS, Solver, StandardNS, cheaper, computed_in, normalize, normalizer, rescale
from .probe import random_block
from .schedules import QUINTIC, Schedule
from .stats import (
    AGE,
    COLUMNS,
    FINITE,
    GUARD,
    NO_AGE,
    OUTCOMES,
    PROBED,
    REFRESHED,
    REFRESHES,
    WAIT,
    Ledger,
    Readback,
    count,
)
from .workspace import Workspace


class Muon(MatrixOptimizer):
    """Muon with any solver, and Adam for the parameters that are not matrices.

    For a matrix W with gradient G: `M <- momentum M + (1 - momentum) G`, `D = solver(M)`,
    `W <- (1 - lr weight_decay) W - lr ratio D`. The ratio is 1 unless `adjust_lr_fn` is given.
    `Muon(solver=GramNS())` is the paper's GramMuon, `Muon(solver=StandardNS(POLAR_EXPRESS))` its
    PolarExpMuon; the default solver is the cheaper of the two for each shape. docs/optimizers.md has
    every setting and the call that equals torch.optim.Muon.

    >>> from cachemuon import ExactPolar
    >>> W = torch.nn.Parameter(torch.eye(2, 3))
    >>> W.grad = torch.tensor([[0.0, 3.0, 0.0], [1.0, 0.0, 0.0]])
    >>> Muon([W], lr=0.5, weight_decay=0.0, solver=ExactPolar()).step()
    >>> W.data
    tensor([[ 1.0000, -0.5000,  0.0000],
            [-0.5000,  1.0000,  0.0000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 1e-4,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        eps: float | None = None,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = "none",
        *,
        solver: Solver | None = None,
        max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    ) -> None:
        if ns_coefficients is not None or ns_steps is not None:
            solver = StandardNS(_shorthand(ns_coefficients, ns_steps, solver))
        super().__init__(
            params,
            AutoNS() if solver is None else solver,
            eps,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
            max_workspace_bytes=max_workspace_bytes,
        )

    def _orthogonalize(self, matrices: list[Matrix]) -> None:
        self._warn_of_last_step()
        workspace, flags = self._workspace(), []
        for batch in batches(matrices):
            finite, D = self._solve(batch, workspace)
            descend(batch, D.mul_(step_lengths(batch, D, finite)), finite)
            _count_on_device(batch, finite)
            flags.append(finite.all())
        self._flags = Readback(torch.stack([flag.to(flags[0].device) for flag in flags]))

    def _solve(self, batch: list[Matrix], workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Accumulate momentum and solve: which gradients are finite, and the wide directions."""
        group = batch[0].group
        update = accumulate(batch, workspace)
        X = normalize(update.U, group["eps"], _scratch(workspace, update.U), update.peak)
        return update.finite, group["solver"].solve(X, workspace)

    def _warn_of_last_step(self) -> None:
        # One step late, and only if it has arrived: to warn at once would wait for the device.
        flags: Readback | None = self.__dict__.pop("_flags", None)
        if flags is not None and not all(flags.poll() or [True]):
            _warn_non_finite(self)

    def _price(self, group: dict[str, Any], param: Tensor, outcomes: dict[str, int]) -> tuple[int, int]:
        solver, (n, m) = group["solver"], _wide_shape(group, param)
        if isinstance(solver, AutoNS):
            solver = solver.choose(n, m, solver.precision(param))
        if isinstance(solver, GramNS):
            executed = executed_by(solver, n, m, solver.precision(param))
            return outcomes["fresh"] * executed.gram, outcomes["fresh"] * _paper(solver, n, m).gram
        if isinstance(solver, StandardNS):
            executed = Executed(n, m, solver.schedule.steps)
            return outcomes["fresh"] * executed.standard, outcomes["fresh"] * _paper(solver, n, m).standard
        return 0, 0  # a solver of the user's own, or the SVD: not counted


class CacheMuon(MatrixOptimizer):
    """CacheMuon: Muon that reuses the left transform of an earlier solve, as Algorithm A.5 does, and clips.

    The transform Q of a matrix's last solve is applied to its new momentum, and the `clip n` directions that
    it over-amplifies are replaced by their polar factor (`CacheGNS`). If the residual of the result is at
    most `gamma`, it is the direction (a hit); else, and after `max_age` steps, it is solved anew and Q
    replaced (a miss). `cache_stats()` tells what was decided. Clipping and a short life make a cached
    direction as good as a fresh one (docs/beyond-the-paper.md): gamma only stops what has gone wrong.
    `CacheMuon.paper` is the paper's own algorithm.

    `probe="sketch"` estimates the residual from `vectors` random vectors, `probe="exact"` computes it, and
    goes with `clip=0`.

    `gate="sync"` reads all residuals of a step on the host together, then decides. `gate="lagged"`
    decides on the last residual known for a transform, which was read while other work went on: the
    host never waits, and a transform that has gone bad is used once before it is replaced.
    `guard=True` sets the cache of a matrix aside while it costs more than it saves (`cache.Guard`), and for
    good where the matrix is small.

    >>> W = torch.nn.Parameter(torch.zeros(128, 192))
    >>> opt = CacheMuon([W], lr=0.01)
    >>> for _ in range(3):
    ...     W.grad = torch.eye(128, 192)
    ...     opt.step()
    >>> stats = opt.cache_stats()
    >>> stats["calls"], stats["hits"], stats["matrices"]["group0.param0"]["misses"]["cold"]
    (3, 2, 1)
    """

    counters_on_host = True  # the gate decides on the host
    RECIPE = (*MatrixOptimizer.RECIPE, "probe", "vectors", "clip", "seed", "gate")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 1e-4,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        eps: float | None = None,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = "none",
        *,
        gamma: float = 20.0,
        probe: str = "sketch",
        vectors: int = 8,
        max_age: int | None = 6,
        clip: float = 1 / 16,
        seed: int = 0,
        gate: str = "sync",
        guard: bool = True,
        solver: GramNS | None = None,
        max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    ) -> None:
        if ns_coefficients is not None or ns_steps is not None:
            solver = GramNS(_shorthand(ns_coefficients, ns_steps, solver))
        super().__init__(
            params,
            GramNS() if solver is None else solver,
            eps,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
            gamma=gamma,
            probe=probe,
            vectors=vectors,
            max_age=max_age,
            clip=clip,
            seed=seed,
            gate=gate,
            guard=guard,
            max_workspace_bytes=max_workspace_bytes,
        )

    @classmethod
    def paper(cls, params: ParamsT, lr: float | Tensor = 1e-3, gamma: float = 5.0, **settings: Any) -> Self:
        """The paper's algorithm, A.4 and A.5, and nothing else: exact probe, no clip, age limit or guard.

        `settings` are those of Muon (momentum, weight_decay, ...); a `gamma` of 0 makes it GramMuon.
        """
        added = {"probe", "vectors", "max_age", "clip", "seed", "gate", "guard"}
        if taken := sorted(added.intersection(settings)):
            raise ValueError(f"CacheMuon.paper takes no {', '.join(taken)}: the paper's algorithm has none")
        return cls(params, lr=lr, gamma=gamma, probe="exact", max_age=None, clip=0.0, guard=False, **settings)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_gate(group["gamma"], group["max_age"])
        if not isinstance(group["solver"], GramNS):
            raise ValueError(f"solver must be a GramNS, which yields a transform, got {group['solver']!r}")
        if not isinstance(group["seed"], int):
            raise ValueError(f"seed must be an integer, got {group['seed']!r}")
        if group["gate"] not in GATES:
            raise ValueError(f"gate must be one of {', '.join(map(repr, GATES))}, got {group['gate']!r}")
        if not isinstance(group["guard"], bool):
            raise ValueError(f"guard must be True or False, got {group['guard']!r}")
        cache_of(group)

    def _orthogonalize(self, matrices: list[Matrix]) -> None:
        self._settle()
        states = list({id(x.state): x.state for x in matrices}.values())
        counters = [state["counters"] for state in states]
        rows = [row for tensor in counters for row in self._ledger("counters").rows(tensor)]
        guards: dict[Any, Guard | None] = {}  # one for each kind of matrix
        for x, row in zip(matrices, rows, strict=True):
            x.counters = row
            key = (x.kind[:2], id(x.group))
            if key not in guards:
                guards[key] = _guard_of(x) if x.group["guard"] else None
            x.guard = guards[key]
            x.probed = not _resting(x) and probed(_next_age(x), x.group["max_age"])
        blocks = _Blocks()
        lagged = [x for x in matrices if x.group["gate"] == "lagged"]
        for window in _windows([x for x in matrices if x.group["gate"] == "sync"]):
            self._gate(*self._probe(window, blocks))
            self._resolve(window, blocks)
        if lagged:
            self._step_lagged(lagged, blocks)
        after = iter(matrices)
        self._ledger("counters").post(counters, [[next(after).counters for _ in t] for t in counters])
        if lagged:
            self._send(lagged, {id(x): row for x, row in zip(matrices, rows, strict=True)})

    def _ceiling(self, group: dict[str, Any]) -> int:
        # Half is for what waits for the gate.
        return super()._ceiling(group) // (2 if _leaves(group) else 1)

    def _probe(self, window: list[Matrix], blocks: _Blocks) -> tuple[list[Matrix], Tensor]:
        """Accumulate momentum, measure residuals. Returns `(2, N)` on the device: finite, residual."""
        order, finite_parts, residual_parts = [], [], []
        for batch in batches(window, key=lambda x: x.probed):
            finite, U, scale = self._update(batch)
            residual = scale.new_full((len(batch),), math.nan)
            if batch[0].probed:
                residual = self._measure(batch, U, scale, blocks)
            for x, factor in zip(batch, scale.unbind(0), strict=True):
                x.scale = factor
            order += batch
            finite_parts.append(finite)
            residual_parts.append(residual)
        device = residual_parts[0].device
        residuals = torch.cat([part.to(device, non_blocking=True) for part in residual_parts])
        finites = torch.cat([part.to(device, non_blocking=True) for part in finite_parts])
        return order, torch.stack((finites.to(residuals.dtype), residuals))

    def _gate(self, window: list[Matrix], readings: Tensor) -> None:
        """Decide for every matrix. The one place that waits for the device: all residuals at once."""
        for x, finite, residual in zip(window, *readings.tolist(), strict=True):
            _decide(x, bool(finite), residual)
        if any(x.outcome == "non-finite" for x in window):
            _warn_non_finite(self)

    def _resolve(self, window: list[Matrix], blocks: _Blocks) -> None:
        """Apply the accepted transforms, solve the rest, and take the step."""
        for batch in batches((x for x in window if x.outcome != "non-finite"), key=_remedy):
            self._take_step(
                batch,
                update_of(batch, self._workspace()),
                stack([x.scale for x in batch if x.scale is not None]),
                blocks,
            )

    def _step_lagged(self, matrices: list[Matrix], blocks: _Blocks) -> None:
        """Decide on the residuals known from earlier steps, and leave this step's for the next."""
        ledger = self._ledger("residuals")
        for x in matrices:
            _decide(x, True, ledger.rows(x.state["residuals"])[x.index][PROBED])
        for batch in batches(matrices, key=_remedy):
            finite, U, scale = self._update(batch)
            shorter = None
            if batch[0].outcome == "hit":
                shorter = _shortening(batch, self._measure(batch, U, scale, blocks))
            self._take_step(batch, U, scale, blocks, finite, shorter)
            _record(batch, FINITE, finite.to(scale.dtype))

    def _update(self, batch: list[Matrix]) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate momentum: which gradients are finite, what is orthogonalized, its normalizer."""
        workspace = self._workspace()
        update = accumulate(batch, workspace)
        scratch = _scratch(workspace, update.U)
        return update.finite, update.U, normalizer(update.U, batch[0].group["eps"], scratch, update.peak)

    def _measure(self, batch: list[Matrix], U: Tensor, scale: Tensor, blocks: _Blocks) -> Tensor:
        """The residuals of the cached transforms, recorded; exact candidates are kept."""
        Q = stack([_transform(x) for x in batch])
        cache = cache_of(batch[0].group)
        residual, candidate = cache.measure(U, scale, Q, blocks.of(batch), self._workspace())
        for i, x in enumerate(batch):
            x.candidate = None if candidate.empty else candidate[i : i + 1]
        _record(batch, PROBED, residual)
        return residual

    def _take_step(
        self,
        batch: list[Matrix],
        U: Tensor,
        scale: Tensor,
        blocks: _Blocks,
        finite: Tensor | None = None,
        shorter: Tensor | None = None,
    ) -> None:
        """Do what was decided for a batch with one outcome; `finite=None`: all gradients are."""
        group, workspace = batch[0].group, self._workspace()
        cache, lengths = cache_of(group), step_lengths(batch, scale, finite)
        if shorter is not None:
            lengths = lengths * shorter
        if batch[0].outcome == "hit":
            Q = stack([_transform(x) for x in batch])
            candidate = Candidate.joined([x.candidate for x in batch if x.candidate is not None])
            D = cache.apply(U, scale, Q, candidate, workspace, lengths)
        else:
            X = rescale(U, scale, out=_scratch(workspace, U))
            if batch[0].outcome == "guarded":
                D = cheaper(cache.fresh, *batch[0].shape, cache.fresh.precision(X)).solve(X, workspace)
            else:
                D, Q, residual = cache.refresh(X, blocks.of(batch), workspace)
                _keep(batch, Q, residual, finite)
            D.mul_(lengths)
        descend(batch, D, finite)
        for x in batch:
            x.candidate = None

    def _ledger(self, entry: str) -> Ledger:
        ledger: Ledger = self.__dict__.setdefault("_ledgers", {}).setdefault(entry, Ledger())
        return ledger

    def _send(self, lagged: list[Matrix], before: dict[int, list[int]]) -> None:
        """Send the residuals on their way to the host; `before` are the counters without this step."""
        tensors = list({id(x.state): x.state["residuals"] for x in lagged}.values())
        device = tensors[0].device
        values = torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
        sent = [(x.state, x.index, before[id(x)]) for x in lagged]
        self.__dict__["_sent"] = Readback(values), tensors, [t._version for t in tensors], sent

    def _settle(self) -> None:
        """What a lagged gate sent to the host at the last step is there: steps that did not happen,
        since the gradient was not finite, are counted as such, and the residuals are known.
        """
        readback, tensors, versions, sent = self.__dict__.pop("_sent", (None, [], [], []))
        if readback is None or [tensor._version for tensor in tensors] != versions:
            return
        values = readback.wait()
        skipped = [where for where, readings in zip(sent, values, strict=True) if not readings[FINITE]]
        for state, index, counters in skipped:
            state["counters"][index] = torch.tensor(count(counters, "non-finite"))
        if skipped:
            _warn_non_finite(self)
        rest = iter(values)
        self._ledger("residuals").learn(tensors, [[next(rest) for _ in tensor] for tensor in tensors])

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        state: dict[str, Any] = super().__getstate__()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a state; see `MatrixOptimizer.load_state_dict`."""
        self._settle()
        super().load_state_dict(state_dict)

    def _price(self, group: dict[str, Any], param: Tensor, outcomes: dict[str, int]) -> tuple[int, int]:
        solver, (n, m) = group["solver"], _wide_shape(group, param)
        rank = cache_of(group).rank(n)
        sketch = {"probe": group["probe"], "vectors": group["vectors"], "rank": rank}
        executed = executed_by(solver, n, m, solver.precision(param), **sketch)
        paper = price(_paper(solver, n, m), outcomes)
        if group["gate"] == "lagged":  # solves without a probe
            outcomes = {**outcomes, "residual": 0, "cold": outcomes["cold"] + outcomes["residual"]}
        return price(executed, outcomes), paper


class _Blocks:
    """The random blocks of one step, each drawn once."""

    def __init__(self) -> None:
        self._drawn: dict[Any, Tensor] = {}

    def of(self, batch: list[Matrix]) -> Tensor:
        x = batch[0]
        n, group = x.shape[0], x.group
        dtype = computed_in(x.momentum.dtype)
        key = (n, cache_of(group).columns(n), group["seed"], group["step"], x.momentum.device, dtype)
        if key not in self._drawn:
            self._drawn[key] = random_block(
                n, key[1], seed=key[2], step=key[3], device=x.momentum.device, dtype=dtype
            )
        return self._drawn[key]


def _leaves(group: dict[str, Any]) -> bool:
    """Whether its probes leave something large that waits for the gate."""
    return bool(group["gate"] == "sync" and (group["probe"] == "exact" or group["clip"] > 0))


def _left_bytes(x: Matrix) -> int:
    if x.group["probe"] == "exact":
        return x.grad.numel() * 4
    n = x.shape[0]
    return 2 * cache_of(x.group).rank(n) * n * 4


def _windows(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """Parts that share one reading: all matrices, unless what probes leave would fill the workspace."""
    window: list[Matrix] = []
    held = 0
    for x in matrices:
        size = _left_bytes(x) if _leaves(x.group) else 0
        if window and held + size > x.ceiling:
            yield window
            window, held = [], 0
        window.append(x)
        held += size
    if window:
        yield window


def cache_of(group: dict[str, Any]) -> CacheGNS:
    """The solver with the settings of a parameter group of CacheMuon."""
    return CacheGNS(group["solver"], group["probe"], group["vectors"], group["clip"])


def _next_age(x: Matrix) -> int:
    return NO_AGE if x.counters[AGE] == NO_AGE else x.counters[AGE] + 1


def _resting(x: Matrix) -> bool:
    return x.guard is not None and x.guard.resting(x.counters[WAIT])


def _guard_of(x: Matrix) -> Guard:
    solver, group = x.group["solver"], x.group
    lagged = group["gate"] == "lagged"
    sketch = (group["probe"], group["vectors"], cache_of(group).rank(x.shape[0]))
    return _guard(solver, *x.shape, solver.precision(x.momentum), *sketch, lagged)


@functools.cache
def _guard(
    solver: GramNS, n: int, m: int, dtype: torch.dtype, probe: Any, vectors: int, rank: int, lagged: bool
) -> Guard:
    return Guard.of(executed_by(solver, n, m, dtype, probe=probe, vectors=vectors, rank=rank), lagged=lagged)


def _decide(x: Matrix, finite: bool, residual: float) -> None:
    group = x.group
    x.outcome = decide(
        finite=finite,
        age=_next_age(x),
        residual=residual,
        gamma=group["gamma"],
        max_age=group["max_age"],
        resting=_resting(x),
    )
    x.counters = count(x.counters, x.outcome)
    if x.guard is not None:
        x.counters[GUARD] = x.guard.after(x.outcome, *x.counters[GUARD])


def _shortening(batch: list[Matrix], residual: Tensor) -> Tensor:
    """A lagged gate has accepted what it had not measured. Where it would have refused, the direction is
    shortened to singular values of at most 1: none is above `sqrt(1 + |C C^T - I|_F)`.
    """
    n = batch[0].shape[0]
    gammas = torch.tensor([x.group["gamma"] for x in batch], dtype=residual.dtype, device=residual.device)
    bound = torch.rsqrt(1 + residual * math.sqrt(n)).nan_to_num(0)
    return torch.where(residual <= gammas, 1, bound).view(-1, 1, 1)


def _remedy(x: Matrix) -> str:
    return "refresh" if x.outcome in REFRESHES else x.outcome


def _transform(x: Matrix) -> Tensor:
    """The matrix's place in its parameter's `transform`, which is made on first use."""
    n = x.shape[0]
    if "transform" not in x.state:
        number = len(x.state["counters"])
        dtype = computed_in(x.momentum.dtype)
        shape = (n, n) if number == 1 else (number, n, n)
        x.state["transform"] = x.momentum.new_zeros(shape, dtype=dtype)
    transform: Tensor = x.state["transform"]
    return transform if transform.ndim == 2 else transform[x.index]


def _keep(batch: list[Matrix], Q: Tensor, residual: Tensor, finite: Tensor | None) -> None:
    """Keep the transforms of a solve; where a lagged gate had to solve without a good gradient, the old."""
    kept = [_transform(x) for x in batch]
    if finite is None:
        torch._foreach_copy_(kept, list(Q.unbind(0)))
        _record(batch, REFRESHED, residual)
        return
    for old, new, ok in zip(kept, Q.unbind(0), finite.unbind(0), strict=True):
        torch.where(ok, new, old, out=old)
    for column in (PROBED, REFRESHED):  # a lagged gate decides on the last one known for its transform
        before = stack([x.state["residuals"][x.index, column] for x in batch])
        _record(batch, column, torch.where(finite, residual.to(before.dtype), before))


def _record(batch: list[Matrix], column: int, values: Tensor) -> None:
    places = [x.state["residuals"][x.index, column] for x in batch]
    torch._foreach_copy_(places, list(values.to(places[0].dtype).unbind(0)))


def _scratch(workspace: Workspace, U: Tensor) -> Tensor:
    return workspace.like("scratch", U, computed_in(U.dtype))


def _count_on_device(batch: list[Matrix], finite: Tensor) -> None:
    outcomes = torch.tensor([OUTCOMES.index("non-finite"), OUTCOMES.index("fresh")], device=finite.device)
    columns = torch.arange(len(COLUMNS), device=finite.device)
    increments = torch.where(finite, outcomes[1], outcomes[0]).view(-1, 1) == columns
    torch._foreach_add_([x.state["counters"][x.index] for x in batch], list(increments.unbind(0)))


def _wide_shape(group: dict[str, Any], param: Tensor) -> tuple[int, int]:
    _, rows, cols = matrix_shape(param.shape, group["view"])
    return min(rows, cols), max(rows, cols)


def _paper(solver: StandardNS | GramNS, n: int, m: int) -> Paper:
    steps = solver.schedule.steps
    return Paper(n, m, steps, min(1, steps - 1))  # S = {2}, whatever restarts this precision needs


def _shorthand(coefficients: Any, steps: int | None, solver: Solver | None) -> Schedule:
    """torch.optim.Muon's `ns_coefficients` and `ns_steps`: one triple repeated; or a triple for each step."""
    if solver is not None:
        raise ValueError(
            f"solver and ns_coefficients or ns_steps exclude each other, got solver={solver!r}, "
            f"ns_coefficients={coefficients!r}, ns_steps={steps!r}"
        )
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"ns_steps must be an integer >= 1, got {steps!r}")
    triples = QUINTIC.triples[:1] if coefficients is None else tuple(coefficients)
    if triples and not isinstance(triples[0], Sequence):
        triples = (triples,)
    if len(triples) == 1:
        triples = triples * (5 if steps is None else steps)
    if steps is not None and len(triples) != steps:
        raise ValueError(f"ns_steps must be the number of ns_coefficients, {len(triples)}, got {steps!r}")
    return Schedule(triples)


def _warn_non_finite(optimizer: MatrixOptimizer) -> None:
    if not optimizer.__dict__.get("_warned"):
        optimizer.__dict__["_warned"] = True
        warnings.warn(
            "a gradient has a NaN or Inf: that matrix, its momentum and its transform were left as they "
            "were for the step; cache_stats() counts such steps as 'non-finite'. This is said once.",
            RuntimeWarning,
            stacklevel=2,
        )
