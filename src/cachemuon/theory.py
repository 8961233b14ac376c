"""The paper's convergence theory as numbers: the map psi, its Lipschitz constants, staleness, the bound.

A fresh solve multiplies the normalized X by a polynomial of its Gram matrix: `polar(X) ~ psi(X X^T) X`. A
cached transform is psi of an older Gram matrix: a hit errs by at most a Lipschitz constant of psi times their
distance tau. Three constants, over symmetric matrices of spectrum in [0, 1]:

    lipschitz_sum    the paper's, admissible in the spectral norm: 7e958 for GRAM
    chebyshev_sum    the same argument in the Chebyshev basis, admissible in both norms: 7.9e7 for GRAM
    largest_slope    exact in the Frobenius norm, a lower bound in the spectral one: 7.9e7 for GRAM
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import TypeVar

import torch
from torch import Tensor

from .newton_schulz.schedules import Schedule

Number = TypeVar("Number", float, Decimal, Tensor)
_HUGE = Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN)  # coefficients pass 10^300


def psi(schedule: Schedule, x: Number) -> Number:
    """The scalar map of the fresh solver's transform, `polar(X) ~ psi(X X^T) X`; elementwise on a tensor.

    A singular value s becomes `s psi(s^2)`. Restarts do not change the map.

    >>> from cachemuon import Schedule
    >>> psi(Schedule([(1.5, -0.5, 0.0)]), 1.0)  # one classical step: (3 - x) / 2
    1.0
    """
    r, q = x, x * 0 + 1
    for triple in schedule.triples:
        # Decimal does not mix with float; Decimal(float) is exact.
        a, b, c = map(Decimal, triple) if isinstance(x, Decimal) else triple
        p = a + b * r + c * r * r
        q = q * p
        r = r * p * p
    return q


def coefficients(schedule: Schedule) -> list[Decimal]:
    """The coefficients alpha_j of psi, constant first, to 100 digits; its degree is (5^K - 1)/2.

    No digit cancels for a > 0, b < 0, c > 0, where the signs alternate.

    >>> from cachemuon import Schedule
    >>> [float(c) for c in coefficients(Schedule([(2.0, -1.5, 0.5)]))]
    [2.0, -1.5, 0.5]
    """
    with localcontext(_HUGE):
        q, r = [Decimal(1)], [Decimal(0), Decimal(1)]
        for k, triple in enumerate(schedule.triples, start=1):
            a, b, c = map(Decimal, triple)
            p = [c * x for x in _product(r, r)]
            for j, x in enumerate(r):
                p[j] += b * x
            p[0] += a
            q = _product(q, p)
            if k < schedule.steps:  # the last r is never used, and five times as long
                r = _product(_product(r, p), p)
        return q


def _product(x: list[Decimal], y: list[Decimal]) -> list[Decimal]:
    out = [Decimal(0)] * (len(x) + len(y) - 1)
    for i, a in enumerate(x):
        if a:
            for j, b in enumerate(y, start=i):
                out[j] += a * b
    return out


def lipschitz_sum(schedule: Schedule) -> Decimal:
    """The paper's admissible L_Q in the spectral norm: the sum of j |alpha_j|.

    It bounds psi on the whole unit disc, where psi is huge, though only [0, 1] matters.

    >>> from .newton_schulz.schedules import GRAM
    >>> f"{lipschitz_sum(GRAM):.1e}"
    '6.9e+958'
    """
    with localcontext(_HUGE):
        return sum((j * abs(alpha) for j, alpha in enumerate(coefficients(schedule))), Decimal(0))


def chebyshev_sum(schedule: Schedule) -> float:
    """An admissible L_Q in the spectral norm that fits a float: 2 sum j^2 |c_j|, psi = sum c_j T_j(2x - 1).

    The paper's telescoping in another basis. For A and B of spectrum in [-1, 1]

        T_j(A) - T_j(B) = sum over k < j of w_k T_k(A) (A - B) U_(j-1-k)(B),  w_0 = 1, else w_k = 2,

    and there |T_k| <= 1, |U_i| <= i + 1: the norm is at most j^2 |A - B|. The 2 is from x -> 2x - 1. Where
    the c_j alternate in sign, as for GRAM, POLAR_EXPRESS and QUINTIC to rounding, the sum is |psi'(0)|, the
    smallest constant there is. Float64 overstates it by less than 1e-8 of itself up to K = 8. Costs 5^K.
    """
    size = 2 ** math.ceil(math.log2(_degree(schedule) + 1))
    j = torch.arange(size, dtype=torch.float64)
    values = psi(schedule, torch.cos((j + 0.5) * (math.pi / size) / 2) ** 2)
    # A cosine transform: Fourier of the even extension, turned back by half a step.
    spectrum = torch.fft.fft(torch.cat([values, values.flip(0)]))[:size]
    c = (spectrum * torch.exp(-0.5j * math.pi / size * j)).real / size
    return float(2 * (j**2 * c.abs()).sum())


def largest_slope(schedule: Schedule) -> float:
    """The largest |psi'| on [0, 1], in float64: the smallest Lipschitz constant in the Frobenius norm.

    In the eigenbases of A and B every entry of psi(A) - psi(B) is that of A - B times a divided difference of
    psi. In the spectral norm this is only a lower bound: take A and B scalar.

    Found on a grid with both ends and 8 points per degree: at most 2% too small. Costs 5^K.
    """
    size = 8 * (_degree(schedule) + 1)
    angles = torch.arange(size + 1, dtype=torch.float64) * (math.pi / 2 / size)
    x = torch.sin(angles).square()  # dense at 0, where psi is steep, and at 1
    with torch.enable_grad():
        x.requires_grad_()
        (slope,) = torch.autograd.grad(psi(schedule, x).sum(), x)
    return float(slope.abs().max())


def _degree(schedule: Schedule) -> int:
    return int(5**schedule.steps) // 2  # each step has degree 2 in r, and r grows fivefold


def staleness(X: Tensor, anchor: Tensor) -> Tensor:
    """tau = |X X^T - anchor anchor^T| in the spectral norm, of normalized matrices (..., n, m), in float64.

    Tall matrices are transposed first, as in the solvers. At most 1: both Gram matrices lie in [0, I].

    >>> staleness(torch.tensor([[0.5, 0.0]]), torch.tensor([[0.0, 0.75]])).item()  # |0.25 - 0.5625|
    0.3125
    """
    if X.shape[-2:] != anchor.shape[-2:]:
        raise ValueError(
            f"anchor must have X's rows and columns, {tuple(X.shape)}, got {tuple(anchor.shape)}"
        )
    grams = []
    for name, matrix in (("X", X.double()), ("anchor", anchor.double())):
        norm = float(matrix.norm(dim=(-2, -1)).max())
        if not norm <= 1 + 1e-2:  # bf16 normalizes to 0.4%
            raise ValueError(f"{name} must be normalized, of Frobenius norm at most 1, got {norm}")
        wide = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
        grams.append(wide @ wide.mT)
    tau: Tensor = torch.linalg.eigvalsh(grams[0] - grams[1]).abs().amax(-1)
    return tau


def reference_error(direction: Tensor, exact: Tensor) -> Tensor:
    """|direction - exact| in the spectral norm, batched: eps_ref of a fresh solve, delta_t of a cached one.

    The theorem's proof needs only this to be at most delta: once measured, it replaces the bound by tau.

    >>> reference_error(torch.diag(torch.tensor([1.5, 1.0])), torch.eye(2)).item()
    0.5
    """
    error: Tensor = torch.linalg.matrix_norm(direction.double() - exact.double(), ord=2)
    return error


def least_delta(residual: float) -> float:
    """The smallest delta of any direction with that residual |D D^T - I|_F / sqrt(n).

    Some squared singular value is that far from 1, where a polar factor has 1 (or 0, if it lacks rank; then
    this holds above 1): delta is at least `sqrt(1 + residual) - 1`. Above 3 the theorem does not apply.

    >>> least_delta(3.0)
    1.0
    """
    _check_nonnegative(residual=residual)
    return math.sqrt(1 + residual) - 1


def _check_nonnegative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")


def delta(tau: float, lipschitz: float | Decimal, eps_ref: float) -> float:
    """delta = L_Q tau + eps_ref, the theorem's inexactness; inf where it exceeds float's range.

    >>> delta(0.0, Decimal("1e959"), 0.2), delta(1e-6, Decimal("1e959"), 0.2)
    (0.2, inf)
    """
    for name, value in (("tau", tau), ("lipschitz", lipschitz), ("eps_ref", eps_ref)):
        if not (Decimal(value).is_finite() and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    return float(Decimal(lipschitz) * Decimal(tau)) + eps_ref


def convergence_bound(
    *,
    steps: int,
    lr: float,
    momentum: float,
    smoothness: float,
    noise: float,
    rho: float,
    initial_gap: float,
    initial_error: float,
    delta: float,
) -> float:
    """The theorem's right side: a bound of the mean over N steps of E |grad F(W_t)| in the trace norm.

    N is `steps`, eta `lr`, beta `momentum`, L `smoothness` (spectral to trace norm) and sigma `noise`.
    `initial_gap` is Delta_1 = F(W_1) - inf F, and `initial_error` is E e_1 = E |M_1 - grad F(W_1)|_tr.
    `rho` has |Z|_tr <= rho |Z|_F, so it is sqrt(min(n, m)) for one matrix.

        1/(1-delta) [ Delta_1/(N eta) + 2 e_1/(N (1-beta)) + 2 beta L eta (1+delta)/(1-beta)
                      + 2 rho sigma sqrt(1-beta) + L eta/2 (1+delta)^2 ]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr!r}")
    for name, value in (("momentum", momentum), ("delta", delta)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}")
    _check_nonnegative(smoothness=smoothness, noise=noise, rho=rho)
    _check_nonnegative(initial_gap=initial_gap, initial_error=initial_error)
    start = initial_gap / (steps * lr) + 2 * initial_error / (steps * (1 - momentum))
    drift = 2 * momentum * smoothness * lr * (1 + delta) / (1 - momentum)
    spread = 2 * rho * noise * math.sqrt(1 - momentum)
    curvature = smoothness * lr / 2 * (1 + delta) ** 2
    return (start + drift + spread + curvature) / (1 - delta)
