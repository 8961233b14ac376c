"""CacheMuon, which solves when it must: settings, checks, and the paper's own algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..cache.gns import CacheGNS, check_gate
from ..engine.break_even import LEAST, saving
from ..engine.bucket import Choice, Prices
from ..engine.gated import Gated
from ..engine.orthogonalize import Cached, Fresh
from ..engine.schedule import Block, Life
from ..flops import OUTCOMES, ExecutedCost, executed_by, paper_cost
from ..newton_schulz.normalize import computed_in
from ..newton_schulz.schedules import Schedule
from ..newton_schulz.solvers import GramNS, cheaper
from ..newton_schulz.workspace import hit_bytes, solve_bytes
from ..report.counters import UNCACHED
from ..routing.layout import MatrixView
from .base import MatrixOptimizer, arguments, normalized
from .settings import CACHE_RULES, check, check_cache_dtype


class CacheMuon(MatrixOptimizer):
    """Muon that reuses the left transform of an earlier solve, and repairs what it over-amplifies.

    The transform Q of a matrix's last solve is applied to its new momentum, and the directions that Q
    over-amplifies are cut to a singular value of about 1 (`cache.reuse` has the formulas). Each matrix is
    solved again every `max_age + 1` steps; the solves of different matrices fall on different steps. No step
    reads from the device. `CacheMuon.paper` is the paper's own algorithm.

    Settings that torch.optim.Muon has too keep its meanings and defaults. The others:

    - `normalize`: "factored" divides a direction by the roots of running mean squares (0.95), of each output
      and then of each input; "rows" of each output only, as NorMuon does. Then it gets the Frobenius norm of
      the matrix's last solved direction, so that a learning rate means what it does in `Muon`. None: neither.
    - `max_age`: the number of steps that a transform is reused. With 0 a group is never cached.
    - `gamma`: a cached direction with a residual above gamma is shortened to a norm of about 1. Its matrix is
      then solved fresh for 32 steps, after the next such residual for 64, up to 1,024.
    - `clip`: the fraction of the rows whose directions may be cut; None: an eighth, more for small matrices.
    - `max_norm`: with `normalize=None`, the spectral norm that a longer cached direction is shortened to.
    - `gate`: "schedule"; or "residual", which measures each cached direction, reads its residual on the host,
      and solves again where it is above gamma (Algorithms A.4 and A.5). `max_age=None` is then no limit.
    - `probe`: "sketch" estimates the residual from `vectors` random vectors drawn from `seed`; "exact"
      computes it, and goes with `clip=0`.
    - `cache_all`: cache every matrix, even where a fresh solve is faster.
    - `min_rows`: never cache a matrix whose smaller side is below it.
    - `cache_dtype`: `torch.float16` stores transforms in half the bytes (docs/settings.md).
    - `solver`: a GramNS, or the name of a schedule: "gram", "polar_express", "jordan".
    - `process_group`: the ranks that have copies of plain parameters, as under DistributedDataParallel.
      Sharded parameters (FSDP2, tensor parallel) are recognized. Each matrix has one owner rank, which solves
      for it.
    - `exchange`: what owners send to ranks with copies: "transforms", which all ranks apply, or "directions",
      which takes fewer FLOPs and more bytes; None: directions from 4 ranks on (docs/multi-gpu.md).

    >>> import torch
    >>> W = torch.nn.Parameter(torch.zeros(256, 384))
    >>> opt = CacheMuon([W], lr=0.01)
    >>> for _ in range(3):
    ...     W.grad = torch.eye(256, 384)
    ...     opt.step()
    >>> stats = opt.cache_stats()
    >>> stats["calls"], stats["hits"], stats["matrices"]["group0.param0"]["misses"]["first"]
    (3, 2, 1)
    """

    settings = (
        *MatrixOptimizer.settings,
        *("gamma", "probe", "vectors", "max_age", "clip", "max_norm", "seed", "gate"),
        *("cache_all", "min_rows", "cache_dtype", "exchange"),
    )

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
        normalize: str | None = "factored",
        gamma: float = 20.0,
        probe: str = "sketch",
        vectors: int = 8,
        max_age: int | None = 10,
        clip: float | None = None,
        max_norm: float | None = 2.0,
        seed: int = 0,
        gate: str = "schedule",
        cache_all: bool = False,
        min_rows: int = 0,
        cache_dtype: torch.dtype | None = None,
        solver: GramNS | str | None = None,
        max_workspace_bytes: int | None = None,
        process_group: Any = None,
        exchange: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    @classmethod
    def paper(cls, params: ParamsT, lr: float | Tensor = 1e-3, gamma: float = 5.0, **settings: Any) -> Self:
        """The paper's Algorithms A.4 and A.5: exact probe, no clip, no age limit; every matrix is cached.

        `settings` are those of Muon, with the paper's defaults: an average without Nesterov's step, a
        `weight_decay` of 1e-4, an `adjust_lr_fn` of "none". A `gamma` of 0 makes it GramMuon.
        """
        fixed: dict[str, Any] = {
            "gate": "residual",
            "probe": "exact",
            "max_age": None,
            "clip": 0.0,
            "cache_all": True,
            "normalize": None,
        }
        added = fixed.keys() | {"vectors", "max_norm", "seed", "min_rows", "cache_dtype"}
        if taken := sorted(added & settings.keys()):
            raise ValueError(f"CacheMuon.paper takes no {', '.join(taken)}: the paper's algorithm has none")
        settings = {"weight_decay": 1e-4, "nesterov": False, "adjust_lr_fn": "none", **settings}
        return cls(params, lr=lr, gamma=gamma, **settings, **fixed)

    def choose(self, group: dict[str, Any], param: Tensor, view: MatrixView, count: int) -> Choice:
        """A matrix is cached where that pays for its shape, number and device."""
        solver, (n, m) = group["solver"], view.wide
        cache, cost = cache_of(group), cost_of(group, param, view)
        dtype, size = solver.precision(param), computed_in(param.dtype).itemsize
        cheapest, paper = cheaper(solver, n, m, dtype), paper_cost(solver, n, m)
        room = solve_bytes(n, m, size)
        executed, by_paper = ({one: model.price_of(one) for one in OUTCOMES} for model in (cost, paper))
        copy = {one: cost.price_of_copy(one) for one in OUTCOMES}
        prices = Prices(executed, by_paper, copy, cost.baseline, cost.transform)
        if why := _why_not_cached(group, cost, count, param.device.type):
            choice = Choice(Fresh(cheapest), Life(always=UNCACHED), room, prices, why=why)
            return normalized(choice, group, param, view)
        life, block = Life(group["max_age"], gamma=float(group["gamma"])), block_of(group, n)
        choice = Choice(
            (Cached if group["gate"] == "schedule" else Gated)(cache, life.gamma),
            life,
            max(room, hit_bytes(n, m, block.columns, size)) + n * n * size,
            prices,
            block,
        )
        return normalized(choice, group, param, view)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse settings of a group that are out of range."""
        super().check_group(group)
        if not group["use_muon"]:
            return
        check(group, CACHE_RULES)
        check_gate(group["gamma"], group["max_age"])
        if group["gate"] == "schedule" and group["max_age"] is None:
            raise ValueError("max_age must be an integer >= 0 with gate='schedule', got None")
        cache_of({**group, "normalize": None})  # checks its own settings, `max_norm` too
        check_cache_dtype(group)

    def solver_of(self, schedule: Schedule | None) -> GramNS:
        """A GramNS with a schedule."""
        return GramNS() if schedule is None else GramNS(schedule)


def cache_of(group: dict[str, Any]) -> CacheGNS:
    """The solver with the settings of a parameter group. Normalized directions have a length of their own."""
    max_norm = group["max_norm"] if group["normalize"] is None else None
    return CacheGNS(group["solver"], group["probe"], group["vectors"], group["clip"], max_norm)


def block_of(group: dict[str, Any], n: int) -> Block:
    """The random vectors of matrices with n rows: drawn once for each life of the schedule; with the paper's
    gate, which has no schedule, at every step.
    """
    period = group["max_age"] + 1 if group["gate"] == "schedule" else 1
    return Block(n, cache_of(group).columns(n), group["seed"], period)


def cost_of(group: dict[str, Any], param: Tensor, view: MatrixView) -> ExecutedCost:
    """What each outcome of one of a parameter's matrices costs, as executed."""
    n, m = view.wide
    solver, sketch = group["solver"], {"probe": group["probe"], "vectors": group["vectors"]}
    return executed_by(solver, n, m, solver.precision(param), rank=cache_of(group).rank(n), **sketch)


def _why_not_cached(group: dict[str, Any], cost: ExecutedCost, count: int, device: str) -> str:
    """Why matrices of one kind are not cached; empty if they are."""
    if group["max_age"] == 0:
        return "max_age=0"
    if cost.n < group["min_rows"]:
        return f"fewer than min_rows={group['min_rows']} rows"
    if group["cache_all"]:
        return ""
    saved = saving(cost, group["max_age"], count, device)
    if saved >= LEAST:
        return ""
    return (
        "a fresh solve is faster" if saved <= 0 else f"too small to pay (it would save {saved:.0%} of a step)"
    )
