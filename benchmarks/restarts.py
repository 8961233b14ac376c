"""Where GramNS should restart: its error against float64, by precision, restart and kind of matrix.

    python benchmarks/restarts.py [--quick | --products | --schedules] [--json docs/notebook/restarts.json]

docs/notebook/restarts.md says what the tables mean. Half precision is emulated: a product is accumulated in
float32 and rounded once, as on tensor cores, so the numbers do not depend on a CPU's kernels.
"""

from __future__ import annotations

import os

# Some virtual machines announce AMX but trap its tile instructions.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import argparse
import json
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from momentum import record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cachemuon import GRAM, QUINTIC, GramNS, Schedule, StandardNS, polar_express
from cachemuon.flops import ExecutedCost
from cachemuon.newton_schulz import products
from cachemuon.newton_schulz.normalize import widen
from cachemuon.newton_schulz.products import Workspace

Restarts = tuple[int, ...]
RESTARTS: tuple[Restarts, ...] = ((), (1,), (2,), (3,), (4,), (2, 3), (2, 4))
LISTED: tuple[Restarts, ...] = ((), (1,), (2,), (3,))
HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)

# (width, depth) of each GPT; the steps at which its momentum is taken; n of the synthetic matrices
FULL = ((192, 2), (768, 1)), (1, 5, 20, 40), (16, 64, 256, 768)
QUICK = ((64, 1),), (5,), (16, 64)


# Each is optimal on the interval that the steps before it leave, from [0.001, 1] on.
CANS_RAW = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

CANS = Schedule.safe(
    CANS_RAW,
    1.01,
    name="cans",
    source="Grishina, Smirnov, Rakhuba: Accelerating Newton-Schulz, 2025, arXiv:2506.10935; triples of "
    "NVIDIA's Emerging-Optimizers",
)
"""CANS in five steps. Its triples leave no room above 1: the safety factor, `POLAR_EXPRESS`'s, is ours."""

CUBIC5 = Schedule(
    # `1.3 (3 y - y^3) / 2` with `y = x sqrt(3 / (l^2 + l u + u^2))`, on [l, u] = [0.007, 1] first, then on
    # [p(l), 1.3]: of all cubics that stay below 1.3 the one with the largest least value.
    (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    name="cubic5",
    source="Huang: How Much Orthogonalization Does Muon Need?, 2026, arXiv:2606.00371; triples of "
    "NVIDIA's Emerging-Optimizers",
)
"""The relaxed cubic: c = 0, so each step saves a product. It lifts less (gain 119), to 0.77 to 1.3."""

DEEPSEEK_V4 = Schedule(
    QUINTIC.triples[:1] * 8 + ((2.0, -1.5, 0.5),) * 2,
    name="deepseek-v4",
    source="DeepSeek-AI: DeepSeek-V4, 2026, section 2.4",
)
"""DeepSeek-V4's ten steps: eight of Jordan's, which lift, then two that settle at 1."""


class RoundedOnce(TorchDispatchMode):
    """Products of half-precision matrices in float32, rounded at the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
        if product and args[0].dtype in HALF:
            return func(*(factor.float() for factor in args), **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@dataclass
class Case:
    """One matrix, normalized and wide `(1, n, m)`; its errors by dtype name and column."""

    kind: str
    name: str
    X: Tensor
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def spectra(n: int) -> Iterator[tuple[str, Tensor]]:
    index = torch.arange(n, dtype=torch.float64)
    yield "log to 1e-3", 10 ** (-3 * index / (n - 1))
    yield "log to 1e-8", 10 ** (-8 * index / (n - 1))
    yield "rank 1", (index < 1).double()
    yield "rank 3", (index < 3).double()
    yield "spiked", torch.where(index < 1, 1.0, 1e-3).double()
    yield "half rank", (index < n // 2).double()


def synthetic(sizes: Iterable[int]) -> Iterator[Case]:
    for n in sizes:
        for m in (n, 4 * n):
            g = torch.Generator().manual_seed(n + m)
            yield Case("Gaussian", f"{n} x {m}", widen(torch.randn(n, m, generator=g)))
            U = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
            V = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64)).Q
            for kind, S in spectra(n):
                yield Case(kind, f"{n} x {m}", widen(((U * S) @ V.mT).float()))


def real(models: Iterable[tuple[int, int]], steps: Sequence[int]) -> Iterator[Case]:
    for width, depth in models:
        for step, matrices in record(width, depth, steps).items():
            for name, M in matrices.items():
                yield Case(f"momentum, width {width}", f"{name} at step {step}", widen(M))


def listing(X: Tensor, S: frozenset[int], dtype: torch.dtype) -> Tensor:
    """Algorithm A.2 as printed: `k in S` is tested before iteration k, and `a_k` never joins Z."""
    identity = torch.eye(X.shape[-2], dtype=dtype).expand(len(X), -1, -1)
    Y, Q = X.to(dtype), identity
    R = Y @ Y.mT
    for k, (a, b, c) in enumerate(GRAM.triples, start=1):
        if k in S:
            Y = Q @ Y
            R, Q = Y @ Y.mT, identity
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
        Q = torch.baddbmm(Q, Q, Z, beta=a)
        if k < GRAM.steps and k + 1 not in S:
            RZ = torch.baddbmm(R, R, Z, beta=a)
            R = torch.baddbmm(RZ, Z, RZ, beta=a)
    return (Q @ Y).to(X.dtype)


def measure(case: Case) -> None:
    reference = StandardNS(GRAM).solve(case.X.double(), Workspace())
    norm = torch.linalg.norm(reference)

    def error(D: Tensor) -> float:
        e = float(torch.linalg.norm(D - reference) / norm)
        return math.inf if math.isnan(e) else e

    for dtype in DTYPES:
        X = case.X.double() if dtype == torch.float64 else case.X
        row = case.errors.setdefault(name_of(dtype), {})
        with RoundedOnce() if dtype in HALF else nullcontext():
            if dtype in HALF:
                row["input"] = error(StandardNS(GRAM).solve(X.to(dtype).double(), Workspace()))
            if dtype != torch.float64:
                row["StandardNS"] = error(StandardNS(GRAM, dtype=dtype).solve(X, Workspace()))
                for restarts in LISTED:
                    row[f"listing {label(restarts)}"] = error(
                        listing(X, frozenset(k + 1 for k in restarts), dtype)
                    )
            for restarts in LISTED if dtype == torch.float64 else RESTARTS:
                D, Q = GramNS(restarts=restarts, dtype=dtype).solve_with_transform(X, Workspace())
                row[label(restarts)] = error(D)
                row[f"QX {label(restarts)}"] = error(Q @ X)


def compare_kernels(cases: Iterable[Case]) -> dict[str, float]:
    """By dtype: the largest factor between the errors of this CPU's half products and the emulated ones."""
    factors = {name_of(dtype): 1.0 for dtype in HALF}
    for case in cases:
        reference = StandardNS(GRAM).solve(case.X.double(), Workspace())
        for dtype in HALF:
            D = GramNS(restarts=(2,), dtype=dtype).solve(case.X, Workspace())
            native = float(torch.linalg.norm(D - reference) / torch.linalg.norm(reference))
            ratio = native / case.errors[name_of(dtype)]["2"]
            factors[name_of(dtype)] = max(factors[name_of(dtype)], ratio, 1 / ratio)
    return factors


def growth(restarts: Restarts) -> float:
    """The most that a small negative eigenvalue of R grows before the next restart, to first order.

    One update takes an eigenvalue r to `r (a + b r + c r^2)^2`, so a small one grows by `a^2`.
    """
    largest = factor = 1.0
    for k, (a, _, _) in enumerate(GRAM.triples[:-1], start=1):
        factor = 1.0 if k in restarts else factor * a**2
        largest = max(largest, factor)
    return largest


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(restarts: Restarts) -> str:
    return ",".join(map(str, restarts)) or "none"


def number(x: float) -> str:
    if not math.isfinite(x):
        return "inf"
    digits, _, exponent = (f"{x:.0e}" if x >= 100 else f"{x:.2g}").partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def spread(values: Sequence[float]) -> str:
    return f"{number(median(values))} / {number(max(values))}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for line in lines:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")


def by_kind(cases: Sequence[Case]) -> dict[str, list[Case]]:
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    kinds["all momentum"] = [case for case in cases if case.kind.startswith("momentum")]
    kinds["all synthetic"] = [case for case in cases if not case.kind.startswith("momentum")]
    return kinds


def error_table(title: str, cases: Sequence[Case], dtype: torch.dtype, columns: Sequence[str]) -> None:
    def cells(members: Sequence[Case]) -> list[str]:
        return [spread([case.errors[name_of(dtype)][column] for case in members]) for column in columns]

    rows = [[kind, str(len(members)), *cells(members)] for kind, members in by_kind(cases).items()]
    headings = [column.removeprefix("QX ") for column in columns]
    table(f"{title}, {name_of(dtype)}: median / worst", ["matrices", "number", *headings], rows)


def form_table(cases: Sequence[Case]) -> None:
    rows = []
    for dtype in DTYPES[:3]:
        for kind in ("all momentum", "all synthetic"):
            errors = [case.errors[name_of(dtype)] for case in by_kind(cases)[kind]]
            for restarts in LISTED:
                ours = [e[label(restarts)] for e in errors]
                listed = [e[f"listing {label(restarts)}"] for e in errors]
                both = [b / a for a, b in zip(ours, listed, strict=True) if math.isfinite(a + b)]
                ratios = " / ".join(map(number, (min(both), median(both), max(both))))
                rows.append(
                    [name_of(dtype), kind, label(restarts), spread(ours), spread(listed), ratios],
                )
    headings = ["dtype", "matrices", "restarts", "(P R) P", "listing", "ratio: least / median / most"]
    table("Direction, two forms of the update of R: median / worst", headings, rows)


def size_table(cases: Sequence[Case]) -> None:
    shapes: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        n, m = case.X.shape[-2:]
        shapes.setdefault((n, m), []).append(case)
    columns = ("StandardNS", "none", "2", "3")
    rows = [
        [f"{n} x {m}", str(len(members))]
        + [spread([case.errors["float32"][column] for case in members]) for column in columns]
        for (n, m), members in sorted(shapes.items())
    ]
    table("Direction, float32 by shape: median / worst", ["shape", "number", *columns], rows)


def growth_table() -> None:
    def cost(restarts: Restarts, m: int) -> str:
        price = ExecutedCost(2, m, GRAM.steps, len(restarts))  # every term is of the third degree
        return f"{price.gram / 8:g} / {price.transform / 8:g}"

    rows = [
        [label(restarts), f"{growth(restarts):.0f}"]
        + [number(growth(restarts) * torch.finfo(dtype).eps / 2) for dtype in DTYPES]
        + [cost(restarts, m) for m in (2, 3, 6, 8)]
        for restarts in RESTARTS
    ]
    costs = [f"m = {ratio}" for ratio in ("n", "1.5n", "3n", "4n")]
    title = "g: growth of a small eigenvalue of R; u: unit roundoff; FLOPs / n^3, without / with transform"
    table(title, ["restarts", "g", *(f"g u, {name_of(dtype)}" for dtype in DTYPES), *costs], rows)


def report(cases: Sequence[Case]) -> None:
    names = [label(restarts) for restarts in RESTARTS]
    growth_table()
    for dtype in DTYPES:
        columns = [c for c in ("input", "StandardNS", *names) if c in cases[0].errors[name_of(dtype)]]
        error_table("Direction", cases, dtype, columns)
    for dtype in DTYPES[:3]:
        error_table("Q X", cases, dtype, [f"QX {name}" for name in names])
    size_table(cases)
    form_table(cases)


def as_json(cases: Sequence[Case]) -> str:
    """One line for each case. Errors have two digits; null is an overflow or NaN."""
    head = {
        "schedule": GRAM.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]},
        "growth": {label(restarts): float(f"{growth(restarts):.3g}") for restarts in RESTARTS},
    }
    rows = []
    for case in cases:
        n, m = case.X.shape[-2:]
        errors = {
            dtype: {c: float(f"{e:.1e}") if math.isfinite(e) else None for c, e in row.items()}
            for dtype, row in case.errors.items()
        }
        rows.append(json.dumps({"kind": case.kind, "name": case.name, "n": n, "m": m, "errors": errors}))
    return json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(rows) + "\n]}\n"


def products_table() -> None:
    """Symmetric products computed by half beside full ones: float32 errors, n = 768."""
    cases = [*real([(768, 1)], (20, 40)), *synthetic([768])]
    rows = []
    for kind, members in by_kind(cases).items():
        cells = [kind, str(len(members))]
        for restarts in ((), (2,)):
            for smallest in (10**9, products.MIN_ROWS):
                errors = []
                with mock.patch.object(products, "MIN_ROWS", smallest):
                    for case in members:
                        exact = StandardNS(GRAM).solve(case.X.double(), Workspace())
                        D = GramNS(GRAM, restarts).solve(case.X, Workspace())
                        errors.append(float(torch.linalg.norm(D - exact) / torch.linalg.norm(exact)))
                cells.append(spread(errors))
        rows.append(cells)
    heads = [f"{label(restarts)}, {how}" for restarts in ((), (2,)) for how in ("full", "by half")]
    table("Symmetric products", ["matrices", "number", *heads], rows)


def schedules_table() -> None:
    """Other schedules: float32 errors without a restart, with one, and with the default, n = 16 to 256."""
    cases = [*real([(64, 1)], (5, 20)), *synthetic([16, 64, 256])]
    rows = []
    for schedule in (GRAM, QUINTIC, CANS, CUBIC5, polar_express(8, 1.05), DEEPSEEK_V4):
        default = GramNS(schedule).restarts_at(16, 16, torch.float32)
        errors: dict[str, list[float]] = {}
        for case in cases:
            exact = StandardNS(schedule).solve(case.X.double(), Workspace())
            solvers = {"StandardNS": StandardNS(schedule)}
            solvers |= {label(r): GramNS(schedule, r) for r in ((), (2,), default)}
            for name, solver in solvers.items():
                D = solver.solve(case.X, Workspace())
                errors.setdefault(name, []).append(
                    float(torch.linalg.norm(D - exact) / torch.linalg.norm(exact))
                )
        columns = [spread(errors[name]) for name in ("StandardNS", "none", "2", label(default))]
        rows.append([schedule.name, str(schedule.steps), *columns, f"({label(default)})"])
    heads = ["schedule", "steps", "StandardNS", "none", "(2,)", "default", "which is"]
    table(f"Schedules, {len(cases)} matrices, float32: median / worst", heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", action="store_true", help="only symmetric products by half and in full")
    parser.add_argument("--schedules", action="store_true", help="only the errors of other schedules")
    parser.add_argument("--quick", action="store_true", help="small matrices only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every error to PATH")
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    if args.products:
        return products_table()
    if args.schedules:
        return schedules_table()
    models, steps, sizes = QUICK if args.quick else FULL
    cases = [*real(models, steps), *synthetic(sizes)]
    for i, case in enumerate(cases, start=1):
        if sys.stderr.isatty():
            print(f"\r{i} of {len(cases)}", end="", file=sys.stderr, flush=True)
        measure(case)
    kernels = compare_kernels(case for case in cases if case.X.shape[-2] == 64)
    report(cases)
    for dtype, factor in kernels.items():
        print(f"\n{dtype}: errors with this CPU's own products within a factor of {factor:.2f}, n = 64")
    if args.json:
        args.json.write_text(as_json(cases))


if __name__ == "__main__":
    main()
