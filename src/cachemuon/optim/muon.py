"""Muon, which solves at every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from ..distributed.exchange import Shared, apart, travel, worked_on
from ..distributed.layout import Work
from ..engine.fresh import send, solve_step
from ..engine.host import Claim, Edits
from ..engine.matrices import Matrix
from ..flops.model import Executed, executed_by, paper_cost
from ..newton_schulz.products import panels
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import AutoNS, GramNS, Solver, StandardNS
from ..report.accounts import Record
from ..report.counters import AGE, NO_AGE, count
from ..routing.layout import Piece, reading_of
from .base import MatrixOptimizer
from .settings import shorthand


class Muon(MatrixOptimizer):
    """Muon with any solver, and Adam for the parameters that are not matrices.

    For a matrix W with gradient G: `M <- momentum M + (1 - momentum) G`, `U = momentum M + (1 - momentum) G`
    (without `nesterov`: M), `D = solver(U)`, `W <- (1 - lr weight_decay) W - lr ratio D`; the ratio is
    `sqrt(max(1, rows / cols))` unless `adjust_lr_fn` says otherwise. Settings and defaults are those of
    torch.optim.Muon, but for the solver: `solver=GramNS()` is the paper's GramMuon,
    `solver=StandardNS(POLAR_EXPRESS)` its PolarExpMuon, the default the cheaper of the two for each shape,
    `solver=StandardNS(QUINTIC)` is torch's. docs/optimizers.md has every setting. Among the ranks of a
    `process_group`, or of sharded parameters, each matrix has an owner that solves for it.

    >>> import torch
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
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        eps: float | None = None,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        solver: Solver | None = None,
        max_workspace_bytes: int | None = None,
        process_group: Any = None,
    ) -> None:
        if ns_coefficients is not None or ns_steps is not None:
            solver = self._repeated(shorthand(ns_coefficients, ns_steps, solver))
        super().__init__(
            params,
            AutoNS() if solver is None else solver,
            eps,
            process_group,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
            max_workspace_bytes=max_workspace_bytes,
        )

    def _repeated(self, schedule: Schedule) -> StandardNS:
        return StandardNS(schedule)

    def _load(self, state_dict: StateDict) -> None:
        """Without the transforms of a state of CacheMuon, which nothing here would use or renew."""
        super()._load(state_dict)
        edits = Edits(self._kept.counters)
        for state in self.state.values():
            for name in [name for name in state if name.startswith("transform")]:
                del state[name]
            for row in edits.rows(state["counters"]) if "counters" in state else ():
                row[AGE] = NO_AGE
        edits.post()

    def _orthogonalize(self, matrices: list[Matrix], shared: list[Shared]) -> None:
        self._settle(wait=False)  # a gradient that was not finite is told when that is known
        own, moving = apart(shared)
        send([*matrices, *own, *worked_on(moving)], {})
        done = list(self._solved(matrices))
        list(self._solved(own))
        travel(moving, lambda arrived: list(self._solved(arrived)), self._kept.workspace)
        done += [([s.matrix], s.matrix.finite.view(1)) for s in shared if s.matrix.finite is not None]
        self._claim("fresh", done, [*matrices, *(s.matrix for s in shared)])

    def _solved(self, matrices: list[Matrix]) -> Iterator[tuple[list[Matrix], Tensor]]:
        return solve_step(matrices, self._kept, lambda x: x.group["solver"])

    def _works(self, group: dict[str, Any], param: Tensor) -> list[Work]:
        found = []
        for piece in reading_of(group, param).pieces:
            n, m = piece.wide
            flops, _ = self._price(group, param, piece, {"fresh": 1})
            found.append(Work(flops or n * n * m, 0))
        return found

    def _claim(
        self, outcome: str, done: Iterable[tuple[list[Matrix], Tensor]], matrices: list[Matrix]
    ) -> None:
        """Count an outcome for all matrices, as if all gradients were finite, and send whether they were."""
        flags, order = [], []
        for batch, finite in done:
            flags.append(finite)
            order += batch
        before = self._rows("counters", order)
        after = [count(row, outcome) for row in before]
        steps = zip(order, before, after, strict=True)
        claims = [Claim(x.state, x.index, old, new) for x, old, new in steps]
        counted = {id(x): row for x, row in zip(order, after, strict=True)}
        self._post("counters", matrices, [counted[id(x)] for x in matrices])
        self._kept.send(claims, flags, [])

    def _price(
        self, group: dict[str, Any], param: Tensor, piece: Piece, outcomes: dict[str, int]
    ) -> tuple[int, int]:
        solver, (n, m), calls = group["solver"], piece.wide, outcomes["fresh"]
        dtype = solver.precision(param)
        if isinstance(solver, AutoNS):
            solver = solver.choose(n, m, dtype)
        if isinstance(solver, GramNS):
            executed = executed_by(solver, n, m, dtype)
            return calls * executed.gram, calls * paper_cost(solver, n, m).gram
        if isinstance(solver, StandardNS):
            schedule = solver.schedule
            executed = Executed(n, m, schedule.steps, pieces=panels(n, dtype), cubic=schedule.cubic)
            return calls * executed.standard, calls * paper_cost(solver, n, m).standard
        return 0, 0  # a solver of the user's own, or the SVD: not counted

    def _price_fresh(self, group: dict[str, Any], param: Tensor, piece: Piece) -> int:
        return self._price(group, param, piece, {"fresh": 1})[0]

    def _standings(self, records: list[Record]) -> list[str]:
        return ["none: Muon solves at every step"] * len(records)
