import numpy as np
import pytest
import torch
from recording import recorded_momentum
from reference import paper

from cachemuon import GramNS, exact_residual, normalize, sketched_residual
from cachemuon.cache.reuse import random_block


def cached_pair(seed=0):
    """A real momentum and the transform of a nearby one: the residual is far from zero."""
    M = next(iter(recorded_momentum().values()))
    drift = torch.randn(M.shape, generator=torch.Generator().manual_seed(seed)) * M.std() * 0.1
    return GramNS().with_transform(M)[1], normalize((M + drift).mT if M.shape[0] > M.shape[1] else M + drift)


def test_exact_residual_is_the_papers():
    Q, X = cached_pair()
    C = Q @ X
    assert float(exact_residual(C)) == pytest.approx(paper.residual(C.double().numpy()), rel=1e-5)


def test_exact_residual_of_a_batch():
    C = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [paper.residual(c) for c in C.numpy()]
    np.testing.assert_allclose(exact_residual(C).numpy(), expected, rtol=1e-12)


def test_the_sketch_is_unbiased_in_the_square():
    Q, X = (t.double() for t in cached_pair())
    exact = float(exact_residual(Q @ X)) ** 2
    squares = []
    for step in range(2000):
        z = random_block(len(Q), 8, seed=3, step=step, dtype=torch.float64)
        squares.append(float(sketched_residual(z, Q, X)) ** 2)
    error = np.std(squares) / np.sqrt(len(squares))
    assert exact > 0.1
    assert abs(np.mean(squares) - exact) < 4 * error


def test_a_sketch_with_the_identity_as_block_is_exact():
    Q, X = (t.double() for t in cached_pair())
    n = len(Q)
    z = torch.eye(n, dtype=torch.float64)
    # |B z|_F^2 / (k n) with z = I and k = n is |B|_F^2 / n^2; err^2 is |B|_F^2 / n.
    assert float(sketched_residual(z, Q, X)) * n**0.5 == pytest.approx(float(exact_residual(Q @ X)), rel=1e-9)


def test_a_product_and_its_factors_have_one_estimate():
    Q, X = (t.double() for t in cached_pair())
    z = random_block(len(Q), 5, seed=0, step=0, dtype=torch.float64)
    torch.testing.assert_close(sketched_residual(z, Q, X), sketched_residual(z, Q @ X))


def test_the_block_is_a_pure_function_of_seed_step_and_rows():
    block = random_block(16, 4, seed=1, step=2)
    torch.manual_seed(123)
    assert torch.equal(block, random_block(16, 4, seed=1, step=2))
    for other in (random_block(16, 4, seed=2, step=2), random_block(16, 4, seed=1, step=3)):
        assert not torch.equal(block, other)
    assert not torch.equal(block, random_block(17, 4, seed=1, step=2)[:16])


def test_drawing_a_block_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    random_block(16, 4, seed=1, step=2)
    assert torch.equal(torch.rand(3), expected)
