"""Muon, which solves at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..engine.bucket import Choice, Prices
from ..engine.orthogonalize import Fresh
from ..engine.schedule import Life
from ..flops import ExecutedCost, executed_by, paper_cost
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.products import panels
from ..newton_schulz.schedules import GRAM, Schedule
from ..newton_schulz.solvers import AutoNS, GramNS, Solver, StandardNS
from ..newton_schulz.workspace import solve_bytes
from ..report.counters import FRESH
from ..routing.layout import MatrixView
from .base import MatrixOptimizer, arguments, normalized


class Muon(MatrixOptimizer):
    """Muon with any solver, and Adam for the parameters that are not matrices.

    For a matrix W with gradient G: `M <- momentum M + (1 - momentum) G`, `U = momentum M + (1 - momentum) G`
    (without `nesterov`: M), `D = solver(U)`, `W <- (1 - lr weight_decay) W - lr ratio D`. The ratio is
    `sqrt(max(1, rows / cols))` unless `adjust_lr_fn` says otherwise. Settings and defaults are those of
    torch.optim.Muon, except the solver, whose default is the cheapest for each shape. `solver=GramNS()`, or
    "gram", is the paper's GramMuon, and `solver=StandardNS(POLAR_EXPRESS)`, or "polar_express", its
    PolarExpMuon. `solver=StandardNS(QUINTIC)`, or "jordan", is torch's. `normalize="rows"` makes it NorMuon,
    and "factored" normalizes inputs too (`CacheMuon` has the formula). docs/settings.md has every setting.
    Among the ranks of a `process_group`, or of sharded parameters, each matrix has an owner that solves for
    it.

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
        normalize: str | None = None,
        solver: Solver | str | None = None,
        max_workspace_bytes: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def choose(self, group: dict[str, Any], param: Tensor, view: MatrixView, count: int) -> Choice:
        """Every matrix is solved at every step."""
        solver, (n, m) = group["solver"], view.wide
        dtype, size = solver.precision(param), computed_in(param.dtype).itemsize
        fresh, paper = solver_prices(solver, n, m, dtype)
        prices = Prices({"fresh": fresh}, {"fresh": paper}, {}, fresh)
        choice = Choice(Fresh(solver), Life(always=FRESH), solve_bytes(n, m, size), prices)
        return normalized(choice, group, param, view)

    def solver_of(self, schedule: Schedule | None) -> Solver:
        """A StandardNS with a schedule, but GramNS with GramMuon's; without one AutoNS."""
        return AutoNS() if schedule is None else (GramNS if schedule is GRAM else StandardNS)(schedule)


def solver_prices(solver: Solver, n: int, m: int, dtype: torch.dtype) -> tuple[int, int]:
    """The FLOPs of a solve of a wide n x m matrix: as executed, and as the paper counts them.

    0 for the SVD and for a solver of the user's own, which are not counted.

    >>> solver_prices(GramNS(), 768, 3072, torch.float32)[1] == paper_cost(GramNS(), 768, 3072).gram
    True
    """
    if isinstance(solver, AutoNS):
        solver = solver.choose(n, m, dtype)
    if isinstance(solver, GramNS):
        return executed_by(solver, n, m, dtype).gram, paper_cost(solver, n, m).gram
    if isinstance(solver, StandardNS):
        cost = ExecutedCost(n, m, solver.schedule.steps, pieces=panels(n, dtype))
        return cost.standard, paper_cost(solver, n, m).standard
    return 0, 0
