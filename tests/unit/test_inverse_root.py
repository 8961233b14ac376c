"""The inverse square root by partial fractions."""

import pytest
import torch

from cachemuon.cache.reuse import POLES, inverse_root


def scalar(x):
    return sum(w / (x + t) for t, w in POLES)


def test_the_sum_of_poles_is_the_inverse_root_to_one_percent():
    x = torch.logspace(0, 6, 2000, dtype=torch.float64)
    relative = scalar(x) * x.sqrt()
    assert 0.989 < relative.min() and relative.max() < 1.011
    beyond = torch.logspace(6, 12, 500, dtype=torch.float64)
    assert (scalar(beyond) <= 1.01 * beyond.rsqrt()).all()  # a longer direction is cut more, not less


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-10), (torch.float32, 5e-4)])
def test_a_matrix_has_the_roots_of_its_eigenvalues(dtype, error):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 20, 20, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, 5, 20, dtype=torch.float64)
    H = (basis * values) @ basis.mT
    expected = (basis * scalar(values)) @ basis.mT
    found = inverse_root(H.to(dtype)).double()
    # Rounding of an eigenvalue of 1e5 reaches those of 1, whose roots are the longest.
    assert torch.linalg.matrix_norm(found - expected, 2).max() < error
    assert torch.equal(inverse_root(H[1:2].to(dtype)), inverse_root(H.to(dtype))[1:2])
