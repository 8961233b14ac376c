"""Theory, against the paper's pseudo-code in numpy, finite differences, random matrices and a toy run."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from cachemuon import theory
from cachemuon.newton_schulz.schedules import GRAM, POLAR_EXPRESS, QUINTIC, Schedule, polar_express

SCHEDULES = pytest.mark.parametrize("schedule", [GRAM, POLAR_EXPRESS, QUINTIC], ids=lambda s: s.name)
TAME = Schedule([(2.0, -1.5, 0.5), (1.8, -1.1, 0.3)])  # few enough steps that the bounds are near
CROOKED = Schedule([(1.0, 0.5, -0.7), (0.9, -3.0, 2.9), (0.5, 1.0, 1.0)])  # no sign pattern, steepest inside


def fresh_gns(X, triples, restart_set):
    """Algorithm A.3, line by line; `restart_set` as in its listing, tested at the top of iteration k."""
    eye = np.eye(len(X))
    Q_tot, R, Q = None, X @ X.T, eye
    for k, (a, b, c) in enumerate(triples, start=1):
        if k in restart_set:
            X = Q @ X
            Q_tot = Q if Q_tot is None else Q @ Q_tot
            R, Q = X @ X.T, eye
        Z = b * R + c * R @ R
        Q = Q @ Z + a * Q
        if k < len(triples) and k + 1 not in restart_set:
            RZ = R @ Z + a * R
            R = Z @ RZ + a * RZ
    return Q @ X, Q if Q_tot is None else Q @ Q_tot


def random_gram(rng, n, decades=3.0):
    """A random symmetric matrix with spectrum in [0, 1], of that many decades."""
    U, _ = np.linalg.qr(rng.standard_normal((n, n)))
    return U @ np.diag(10 ** rng.uniform(-decades, 0, n)) @ U.T


def psi_of(schedule, A):
    values, U = np.linalg.eigh(A)
    return U @ np.diag(theory.psi(schedule, torch.from_numpy(values)).numpy()) @ U.T


def spectral(A):
    return np.linalg.norm(A, 2)


# psi


@SCHEDULES
@pytest.mark.parametrize("restart_set", [set(), {2}, {3}, {2, 4}], ids=str)
def test_psi_is_the_solvers_transform_on_a_diagonal(schedule, restart_set):
    singular = np.array([1.0, 0.7, 0.2, 0.03, 1e-3, 0.0])
    direction, Q = fresh_gns(np.diag(singular), schedule.triples, restart_set)
    expected = theory.psi(schedule, torch.from_numpy(singular**2)).numpy()
    # float64 loses what psi's slope of 1e8 makes of 1e-16.
    np.testing.assert_allclose(np.diag(Q), expected, rtol=1e-6)
    np.testing.assert_allclose(np.diag(direction), singular * expected, rtol=1e-6)


def test_psi_is_the_solvers_transform_on_any_matrix():
    X = np.random.default_rng(0).standard_normal((6, 9))
    X /= np.linalg.norm(X)
    _, Q = fresh_gns(X, GRAM.triples, {3})
    np.testing.assert_allclose(Q, psi_of(GRAM, X @ X.T), rtol=1e-6, atol=1e-6)


def test_psi_takes_floats_decimals_and_tensors():
    points = [0.0, 1e-4, 0.3, 1.0]
    floats = [theory.psi(GRAM, x) for x in points]
    assert theory.psi(GRAM, torch.tensor(points, dtype=torch.float64)).tolist() == pytest.approx(
        floats, rel=1e-12
    )
    assert [float(theory.psi(GRAM, Decimal(x))) for x in points] == pytest.approx(floats, rel=1e-9)
    assert floats[0] == pytest.approx(math.prod(a for a, _, _ in GRAM.triples), rel=1e-14)
    assert theory.psi(GRAM, torch.tensor(points)).dtype == torch.float32


# Its coefficients and constants


def test_coefficients_are_the_polynomial_numpy_multiplies_out():
    P = np.polynomial.Polynomial
    r, q = P([0.0, 1.0]), P([1.0])
    for a, b, c in CROOKED.triples:
        p = a + b * r + c * r**2
        q, r = q * p, r * p * p
    np.testing.assert_allclose(
        [float(x) for x in theory.coefficients(CROOKED)], q.coef, rtol=1e-9, atol=1e-12
    )


def dual_psi(schedule, x):
    """psi and psi' at a Decimal, by dual numbers."""
    r, dr, q, dq = x, Decimal(1), Decimal(1), Decimal(0)
    for triple in schedule.triples:
        a, b, c = map(Decimal, triple)
        p, dp = a + b * r + c * r * r, (b + 2 * c * r) * dr
        q, dq = q * p, dq * p + q * dp
        r, dr = r * p * p, dr * p * p + 2 * r * p * dp
    return q, dq


@pytest.mark.parametrize("schedule", [GRAM, QUINTIC], ids=lambda s: s.name)
def test_lipschitz_sum_is_the_slope_at_minus_one(schedule):
    # The coefficients alternate, so j |alpha_j| adds up to -psi'(-1), where nothing cancels.
    alpha = theory.coefficients(schedule)
    assert len(alpha) == 1563
    assert all((coefficient > 0) == (j % 2 == 0) for j, coefficient in enumerate(alpha))
    value, slope = dual_psi(schedule, Decimal(-1))
    assert abs(sum(map(abs, alpha)) / value - 1) < Decimal("1e-24")
    assert abs(theory.lipschitz_sum(schedule) / -slope - 1) < Decimal("1e-24")  # 28 digits of the duals


def test_lipschitz_sum_of_gram_overflows_a_float():
    assert Decimal("6.92e958") < theory.lipschitz_sum(GRAM) < Decimal("6.94e958")


@SCHEDULES
def test_largest_slope_is_at_zero_for_the_schedules_here(schedule):
    # psi'(0) / psi(0) = sum of b_k / a_k, each times r'(0) = the product of the a^2 before it.
    a, b = (np.array([t[i] for t in schedule.triples]) for i in (0, 1))
    before = np.concatenate([[1.0], np.cumprod(a**2)[:-1]])
    assert theory.largest_slope(schedule) == pytest.approx(-np.prod(a) * np.sum(b / a * before), rel=1e-12)


@pytest.mark.parametrize(
    "schedule", [TAME, CROOKED, polar_express(3, 1.05)], ids=["tame", "crooked", "three"]
)
def test_largest_slope_is_that_of_finite_differences(schedule):
    x = np.linspace(0, 1, 1_000_001)
    y = theory.psi(schedule, torch.from_numpy(x)).numpy()
    measured = np.abs(np.diff(y) / np.diff(x)).max()
    # Short by at most 2%, the grid's limit; the differences by 3e-4 on `three`.
    assert 0.98 * measured < theory.largest_slope(schedule) < 1.001 * measured


def test_largest_slope_works_without_grad_mode():
    with torch.no_grad():
        assert theory.largest_slope(TAME) > 0


@pytest.mark.parametrize(
    "schedule", [TAME, CROOKED, polar_express(3, 1.05)], ids=["tame", "crooked", "three"]
)
def test_chebyshev_sum_is_numpys_chebyshev_series(schedule):
    c = np.polynomial.chebyshev.chebinterpolate(
        lambda y: theory.psi(schedule, torch.from_numpy((y + 1) / 2)).numpy(), (5**schedule.steps - 1) // 2
    )
    expected = 2 * np.sum(np.arange(len(c)) ** 2 * np.abs(c))
    assert theory.chebyshev_sum(schedule) == pytest.approx(expected, rel=1e-9)


@SCHEDULES
def test_the_two_spectral_bounds_meet(schedule):
    upper, lower = theory.chebyshev_sum(schedule), theory.largest_slope(schedule)
    assert lower <= upper <= lower * (1 + 1e-9)


def test_the_two_spectral_bounds_need_not_meet():
    assert theory.chebyshev_sum(CROOKED) > 1.01 * theory.largest_slope(CROOKED)


def test_chebyshev_telescoping_holds_for_matrices_that_do_not_commute():
    def chebyshev(first, A, count):  # T from first = A, U from first = 2A
        out = [np.eye(len(A)), first]
        while len(out) < count:
            out.append(2 * A @ out[-1] - out[-2])
        return out

    rng = np.random.default_rng(1)
    A, B = (2 * random_gram(rng, 5) - np.eye(5) for _ in range(2))
    T_A, T_B, U_B = chebyshev(A, A, 8), chebyshev(B, B, 8), chebyshev(2 * B, B, 8)
    for j in range(1, 8):
        terms = [(1 if k == 0 else 2) * T_A[k] @ (A - B) @ U_B[j - 1 - k] for k in range(j)]
        np.testing.assert_allclose(sum(terms), T_A[j] - T_B[j], atol=1e-12)
        assert sum((1 if k == 0 else 2) * (j - k) for k in range(j)) == j**2


@pytest.mark.parametrize("schedule", [TAME, CROOKED, GRAM], ids=["tame", "crooked", "gram"])
def test_the_constants_bound_random_pairs_and_the_nearest_pair_attains_them(schedule):
    rng = np.random.default_rng(2)
    slope, chebyshev = theory.largest_slope(schedule), theory.chebyshev_sum(schedule)
    for trial in range(100):
        A = random_gram(rng, 6, decades=1 + trial % 8)
        B = 0.9 * A + 0.1 * random_gram(rng, 6, decades=3) if trial % 2 else random_gram(rng, 6)
        change = psi_of(schedule, A) - psi_of(schedule, B)
        assert np.linalg.norm(change) <= 1.02 * slope * np.linalg.norm(A - B)
        assert spectral(change) <= chebyshev * spectral(A - B)
    x = np.linspace(0, 1, 200_001) if schedule is not GRAM else np.array([0.0, 1e-9])
    y = theory.psi(schedule, torch.from_numpy(x)).numpy()
    assert np.abs(np.diff(y) / np.diff(x)).max() > 0.98 * slope


# Staleness, errors


def normalized(rng, *shape):
    X = rng.standard_normal(shape)
    return torch.from_numpy(X / np.linalg.norm(X, axis=(-2, -1), keepdims=True))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_staleness_is_numpys_spectral_norm_batched_and_in_the_wide_orientation(shape):
    rng = np.random.default_rng(3)
    X, anchor = normalized(rng, 2, 3, *shape), normalized(rng, 2, 3, *shape)
    tau = theory.staleness(X, anchor)
    assert tau.shape == (2, 3)
    for i in np.ndindex(2, 3):
        x, y = (z[i].numpy() if shape[0] <= shape[1] else z[i].numpy().T for z in (X, anchor))
        assert tau[i].item() == pytest.approx(spectral(x @ x.T - y @ y.T), rel=1e-12)
    assert 0 < tau.max() <= 1
    assert theory.staleness(X, -X).max() == 0
    assert theory.staleness(X.float(), anchor.float()).dtype == torch.float64


def test_the_proposition_holds_for_cached_directions():
    rng = np.random.default_rng(4)
    for scale in (1e-3, 1e-1, 1.0):
        X, noise = normalized(rng, 6, 10), normalized(rng, 6, 10)
        anchor = X + scale * noise
        anchor = anchor / anchor.norm()
        U, _, Vh = np.linalg.svd(X.numpy(), full_matrices=False)
        fresh, cached = (torch.from_numpy(psi_of(TAME, (Y @ Y.mT).numpy())) @ X for Y in (X, anchor))
        exact = torch.from_numpy(U @ Vh)
        eps_ref = theory.reference_error(fresh, exact).item()
        tau = theory.staleness(X, anchor).item()
        limit = theory.delta(tau, theory.chebyshev_sum(TAME), eps_ref)
        assert 0 < theory.reference_error(cached, exact).item() <= limit


def test_reference_error_is_the_largest_singular_value_of_the_difference():
    rng = np.random.default_rng(5)
    X, Y = normalized(rng, 3, 4, 7), normalized(rng, 3, 4, 7)
    expected = [spectral((x - y).numpy()) for x, y in zip(X, Y, strict=True)]
    assert theory.reference_error(X.float(), Y.float()).tolist() == pytest.approx(expected, rel=1e-5)


def test_least_delta_is_below_every_matrix_and_attained_by_a_uniform_one():
    rng = np.random.default_rng(6)
    n = 5
    for _ in range(200):
        U, _, Vh = np.linalg.svd(rng.standard_normal((n, 8)), full_matrices=False)
        D = U @ np.diag(10 ** rng.uniform(-1, 0.7, n)) @ Vh
        residual = np.linalg.norm(D @ D.T - np.eye(n)) / math.sqrt(n)
        assert theory.least_delta(residual) <= spectral(D - U @ Vh) + 1e-12
    assert theory.least_delta(np.linalg.norm(6.0 * np.eye(n) - np.eye(n)) / math.sqrt(n)) == pytest.approx(
        math.sqrt(6) - 1
    )


def test_delta_is_linear_and_survives_the_papers_constant():
    assert theory.delta(1e-8, 8e7, 0.1) == pytest.approx(0.9)
    assert theory.delta(0.0, theory.lipschitz_sum(TAME) * Decimal("1e900"), 0.1) == 0.1
    assert theory.delta(1e-9, Decimal("1e959"), 0.1) == math.inf
    assert theory.delta(1e-300, Decimal("1e300"), 0.25) == pytest.approx(1.25)


# The bound

ARGUMENTS = dict(
    steps=100,
    lr=0.01,
    momentum=0.9,
    smoothness=2.0,
    noise=0.5,
    rho=3.0,
    initial_gap=4.0,
    initial_error=5.0,
    delta=0.5,
)


def bound(**changes):
    return theory.convergence_bound(**(ARGUMENTS | changes))


def test_bound_is_the_theorems_right_side():
    # 2 [4/1 + 10/10 + 2*0.9*2*0.01*1.5/0.1 + 2*3*0.5*sqrt(0.1) + 0.01*2.25]
    assert bound() == pytest.approx(2 * (4 + 1 + 0.54 + 3 * math.sqrt(0.1) + 0.0225), rel=1e-12)


def test_bound_reduces_term_by_term():
    nothing = dict(smoothness=0.0, noise=0.0, initial_gap=0.0, initial_error=0.0, delta=0.0)
    assert bound(**nothing) == 0
    assert bound(**nothing | dict(initial_gap=4.0)) == pytest.approx(4 / (100 * 0.01))
    assert bound(**nothing | dict(initial_error=5.0)) == pytest.approx(2 * 5 / (100 * 0.1))
    assert bound(**nothing | dict(noise=0.5)) == pytest.approx(2 * 3 * 0.5 * math.sqrt(0.1))
    assert bound(**nothing | dict(smoothness=2.0, momentum=0.0)) == pytest.approx(2.0 * 0.01 / 2)
    assert bound(delta=0.0) < bound(delta=0.5) < bound(delta=0.99) / 10


def test_bound_falls_with_the_fourth_root_of_the_steps():
    def tuned(N):
        return bound(steps=N, lr=N**-0.75, momentum=1 - N**-0.5)

    assert tuned(16 * 10**12) / tuned(10**12) == pytest.approx(0.5, rel=1e-3)


def test_bound_holds_on_a_quadratic_with_an_inexact_direction():
    # F(W) = |W|_F^2 / 2: its gradient is W, and |W|_tr <= n |W|_sp makes L = n. No noise, so no expectation.
    rng = np.random.default_rng(7)
    n, steps, lr, momentum, delta = 4, 200, 0.02, 0.9, 0.4
    W = rng.standard_normal((n, n))
    gap = 0.5 * np.linalg.norm(W) ** 2
    M, error, trace_norms = np.zeros((n, n)), 0.0, []
    for t in range(steps):
        M = momentum * M + (1 - momentum) * W
        if t == 0:
            error = np.linalg.norm(M - W, "nuc")
        trace_norms.append(np.linalg.norm(W, "nuc"))
        U, _, Vh = np.linalg.svd(M)
        wrong = rng.standard_normal((n, n))
        W = W - lr * (U @ Vh + delta * wrong / spectral(wrong))
    limit = bound(
        steps=steps,
        lr=lr,
        momentum=momentum,
        smoothness=n,
        noise=0.0,
        initial_gap=gap,
        initial_error=error,
        delta=delta,
    )
    assert limit / 20 < np.mean(trace_norms) <= limit


# Refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bound(delta=1.0), "delta must be at least 0 and less than 1, got 1.0"),
        (lambda: bound(delta=math.inf), "delta must be .* got inf"),
        (lambda: bound(delta=-0.1), "delta must be .* got -0.1"),
        (lambda: bound(momentum=1.0), "momentum must be .* less than 1, got 1.0"),
        (lambda: bound(steps=0), "steps must be at least 1, got 0"),
        (lambda: bound(lr=0.0), "lr must be positive, got 0.0"),
        (lambda: bound(smoothness=-1.0), "smoothness must be at least 0, got -1.0"),
        (lambda: bound(noise=math.nan), "noise must be at least 0, got nan"),
        (lambda: bound(rho=-1.0), "rho must be"),
        (lambda: bound(initial_gap=-1.0), "initial_gap must be"),
        (lambda: bound(initial_error=-1.0), "initial_error must be"),
        (lambda: theory.delta(-1.0, 1.0, 0.0), "tau must be finite and at least 0, got -1.0"),
        (lambda: theory.delta(0.0, math.inf, 0.0), "lipschitz must be finite .* got inf"),
        (lambda: theory.delta(0.0, Decimal("nan"), 0.0), "lipschitz must be finite"),
        (lambda: theory.delta(0.0, 1.0, math.nan), "eps_ref must be finite .* got nan"),
        (lambda: theory.least_delta(-0.5), "residual must be at least 0, got -0.5"),
        (lambda: theory.staleness(torch.eye(2) / 2, torch.eye(3) / 2), r"anchor must have .* got \(3, 3\)"),
        (lambda: theory.staleness(torch.eye(4), torch.eye(4) / 2), "X must be normalized.* got 2.0"),
        (
            lambda: theory.staleness(torch.eye(4) / 2, torch.full((4, 4), math.nan)),
            "anchor must be normalized",
        ),
    ],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(call, words):
    with pytest.raises(ValueError, match=words):
        call()
