"""Symmetric products: half of them is computed, and nothing else changes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import GramNS, StandardNS
from cachemuon.flops import executed_by
from cachemuon.newton_schulz import products
from cachemuon.newton_schulz.products import Workspace, panels, symmetric, symmetric_flops


def gram(n, batch=2, dtype=torch.float32):
    X = torch.randn(batch, n, n + 70, generator=torch.Generator().manual_seed(n), dtype=dtype) / n**0.5
    return X, X @ X.mT


@pytest.mark.parametrize("n", [8, 639, 640, 701, 771])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_full_product_and_exactly_symmetric(n, dtype):
    X, R = gram(n, dtype=dtype)
    for out in (torch.empty_like(R), torch.full_like(R, torch.nan)):
        assert symmetric(X, X.mT, out) is out
        torch.testing.assert_close(out, R)
        if panels(n, dtype) > 1:
            corners = symmetric(X, X.mT, torch.empty_like(R), symmetrize_diagonal=True)
            assert torch.equal(corners, corners.mT)
            torch.testing.assert_close(corners, R)
    torch.testing.assert_close(
        symmetric(R, R, torch.empty_like(R), plus=R, beta=-2.0, alpha=0.5), 0.5 * R @ R - 2 * R
    )


@pytest.mark.parametrize("n", [8, 640, 701, 771])
def test_it_multiplies_what_its_formula_says(n):
    X, R = gram(n, batch=1)
    with FlopCounterMode(display=False) as counter:
        symmetric(X, X.mT, torch.empty_like(R))
    assert counter.get_total_flops() == symmetric_flops(n, X.shape[-1], panels(n, torch.float32))
    assert symmetric_flops(n, 5) == 2 * n * n * 5


@pytest.mark.parametrize("m", [640, 1920])
def test_solvers_multiply_less_and_are_as_exact(m, monkeypatch):
    # Three decades of singular values, float32 against float64: 8e-5 instead of 4e-5 with a restart, 2.0e-4
    # instead of 1.6e-4 without; on momentum there is no difference (docs/notebook/restarts.md).
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(640, 640, generator=g, dtype=torch.float64)).Q
    M = (basis * torch.logspace(0, -3, 640, dtype=torch.float64)) @ torch.randn(640, m, generator=g).double()
    for solver in (GramNS(), StandardNS()):
        exact, errors, counts = solver(M), [], []
        for smallest in (640, 10**6):
            monkeypatch.setattr(products, "MIN_ROWS", smallest)
            with FlopCounterMode(display=False) as counter:
                direction = solver(M.float()).double()
            counts.append(counter.get_total_flops())
            errors.append((torch.dist(direction, exact) / exact.norm()).item())
        assert counts[0] < 0.85 * counts[1]
        assert errors[0] < 2.2 * errors[1]


def test_a_refresh_costs_what_flops_says():
    solver, (X, _) = GramNS(), gram(640, batch=1)
    for count in ("gram", "transform"):
        with FlopCounterMode(display=False) as counter:
            (solver.solve if count == "gram" else solver.solve_with_transform)(X / X.norm(), Workspace())
        assert counter.get_total_flops() == getattr(executed_by(solver, *X.shape[1:]), count)
