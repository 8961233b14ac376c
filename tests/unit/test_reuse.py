"""Clipping: what a cached transform over-amplifies is cut, and the whole is never too long."""

import math

import pytest
import torch
from recording import recorded_gradients
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import CacheGNS, CacheMuon, exact_residual, normalize
from cachemuon.cache.reuse import POLES, paired_norms, random_block
from cachemuon.flops import executed_by


def spoiled(n=64, m=160, new=3, size=0.3):
    """A transform, and a matrix with a few directions that it was not made for."""
    g = torch.Generator().manual_seed(0)
    M = torch.randn(n, m, generator=g, dtype=torch.float64) * torch.logspace(0, -3, n).unsqueeze(1)
    _, Q, _ = CacheGNS()(M, None, 5.0)
    wild = torch.randn(n, new, generator=g, dtype=torch.float64)
    return Q, M + size * wild @ torch.randn(new, m, generator=g, dtype=torch.float64) / n


def direction_by_hand(Q, M, clip, vectors, step, max_norm):
    """The formulas, with eigenvalues for the roots, of which the sum of poles is within 1%."""
    X = normalize(M)
    n = len(X)
    rank = CacheGNS(clip=clip).rank(n)
    Y0 = random_block(n, vectors + rank, seed=0, step=step, dtype=X.dtype)[:, vectors:]
    C = Q @ X
    nystrom = C @ C.mT @ Y0 @ torch.linalg.inv(Y0.mT @ C @ C.mT @ Y0) @ Y0.mT @ C @ C.mT
    squares, span = torch.linalg.eigh(nystrom)  # of n x n, where clipping has r x r
    H = 1 + squares.clamp(min=0)
    roots = sum(w / (H + t) for t, w in POLES)
    # C + Y (H^(-1/2) - I) Y^T C with orthogonal columns Y, whose squared lengths are 1 - 1 / H.
    D = C + (span * ((1 - 1 / H) * (roots - 1))) @ span.mT @ C
    if max_norm is None:
        return D
    longest = (1 + n / rank / 25 + 0.9 / rank**0.5) * (rank / (1 / H[-rank:]).sum()).sqrt()
    return D * min(1, max_norm / longest)


@pytest.mark.parametrize("max_norm", [None, 2.0, 0.5])
def test_the_direction_is_that_of_the_formula(max_norm):
    Q, M = spoiled()
    D, kept, event = CacheGNS(clip=1 / 8, max_norm=max_norm)(M, Q, 1e9, step=4)
    expected = direction_by_hand(Q, M, 1 / 8, 8, 4, max_norm)
    assert event.hit and torch.equal(kept, Q)  # the repair is never kept
    # The shift before the Cholesky factor is 64 * 2e-16, and the root converges to 1e-9.
    assert torch.linalg.matrix_norm(D - expected, 2) < 1e-6


def test_long_directions_are_cut_to_between_one_and_a_sixth_more_and_short_ones_stay():
    # With as many vectors as rows V V^T is C C^T itself.
    lengths = torch.tensor([300.0, 40.0, 10.0, 5.0, 3.0, 2.0, 1.4, 0.7, 0.4, 0.1], dtype=torch.float64)
    n = len(lengths)
    g = torch.Generator().manual_seed(0)
    right = torch.linalg.qr(torch.randn(40, n, generator=g, dtype=torch.float64)).Q
    M = lengths.unsqueeze(1) * right.mT
    scale = torch.linalg.matrix_norm(M)  # so that Q X = M
    D, _, _ = CacheGNS(clip=1.0, max_norm=None)(M, torch.eye(n, dtype=torch.float64) * scale, 1e9)
    cut = torch.linalg.vector_norm(D, dim=1)  # rows are orthogonal
    assert (cut[lengths > 1.35] > 1 - 1e-2).all() and (cut[lengths > 1.35] < 1.16).all()
    assert (cut[lengths < 0.5] > 0.93 * lengths[lengths < 0.5]).all()
    assert (cut <= lengths.clamp(max=1.16)).all()


def test_the_residual_falls_and_is_that_of_the_repaired_direction():
    Q, M = spoiled()
    raw, _, _ = CacheGNS()(M, Q, 1e9)
    D, _, event = CacheGNS(clip=1 / 8, vectors=32, max_norm=None)(M, Q, 1e9)
    assert exact_residual(raw) > 10 and exact_residual(D) < 1.5
    assert torch.linalg.matrix_norm(raw, 2) > 5 and torch.linalg.matrix_norm(D, 2) < 2
    # 496 pairs of vectors: about 5% standard deviation where no direction dominates.
    assert event.residual == pytest.approx(float(exact_residual(D)), rel=0.2)
    shorter, _, same = CacheGNS(clip=1 / 8, vectors=32, max_norm=0.5)(M, Q, 1e9)
    assert torch.linalg.matrix_norm(shorter, 2) < 0.6 and same.residual == event.residual


def test_the_bound_holds_where_more_is_long_than_the_block_has_vectors():
    """Transforms of recorded momentum, applied to momentum of up to 12 steps later."""
    norms, free = [], []
    for start, gradients in recorded_gradients().values():
        momentum = torch.zeros_like(start)
        transforms = []
        for step, gradient in enumerate(gradients):
            momentum = torch.lerp(momentum, gradient, 0.1)
            update = torch.lerp(gradient, momentum, 0.9)
            transforms.append(CacheGNS()(update, None, 1.0)[1])
            for age in (1, 3, 6, 12):
                if step - age >= 8:
                    Q = transforms[step - age]
                    for limit, found in ((2.0, norms), (None, free)):
                        D, _, _ = CacheGNS(clip=None, max_norm=limit)(update, Q, math.inf, step=step)
                        found.append(torch.linalg.matrix_norm(D, 2))
    norms, free = torch.stack(norms), torch.stack(free)
    assert free.median() > 2 and free.quantile(0.99) > 4  # else nothing was tried
    assert norms.quantile(0.99) < 2.0 and norms.max() < 3
    assert norms.median() > 1.2  # and it is no shorter than it must be


def test_the_paired_estimate_is_unbiased():
    g = torch.Generator().manual_seed(1)
    C = torch.randn(24, 60, generator=g, dtype=torch.float64) / 6
    squares = []
    for step in range(400):
        z = random_block(24, 8, seed=0, step=step, dtype=torch.float64)
        squares.append(float(paired_norms(z, (E := z.mT.unsqueeze(0) @ C) @ E.mT)) ** 2)
    mean = sum(squares) / len(squares)
    assert mean == pytest.approx(float(exact_residual(C)) ** 2, rel=0.06)  # standard error 1.5%


def test_a_batch_is_clipped_matrix_by_matrix():
    Q, M = spoiled()
    solver = CacheGNS(clip=1 / 8)
    both, _, events = solver(torch.stack([M, 2 * M]), torch.stack([Q, Q]), 1e9, step=2)
    alone, _, event = solver(M, Q, 1e9, step=2)
    torch.testing.assert_close(both[0], alone)
    torch.testing.assert_close(both[1], alone)
    assert events[0].residual == pytest.approx(event.residual, rel=1e-6)


@pytest.mark.parametrize("n, m", [(24, 24), (24, 60), (260, 600)])
def test_it_costs_what_flops_says(n, m):
    g = torch.Generator().manual_seed(0)
    M, other = torch.randn(n, m, generator=g), torch.randn(n, m, generator=g)
    solver = CacheGNS(clip=1 / 8)
    cost = executed_by(solver.fresh, n, m, rank=solver.rank(n))
    Q = solver(M, None, 1.0)[1]
    for outcome, call in {
        "first": lambda: solver(M, None, 1.0),
        "hit": lambda: solver(M, Q, 1e9),
        "rejected": lambda: solver(other, Q, 0.0),
    }.items():
        with FlopCounterMode(display=False) as counter:
            event = call()[2]
        assert event.outcome == outcome
        assert counter.get_total_flops() == cost.price_of(outcome)


def test_the_gate_accepts_more_often_and_flops_are_counted_right():
    def hits(clip):
        weights = {
            name: torch.nn.Parameter(start.clone()) for name, (start, _) in recorded_gradients().items()
        }
        settings = {"momentum": 0.9, "gamma": 2.0, "max_age": None, "cache_all": True}
        optimizer = CacheMuon(weights.items(), clip=clip, gate="residual", **settings)
        with FlopCounterMode(display=False) as counter:
            for step in range(40):
                for name, weight in weights.items():
                    weight.grad = recorded_gradients()[name][1][step]
                optimizer.step()
        stats = optimizer.cache_stats()
        assert stats["flops"] == counter.get_total_flops()
        return stats["hit_rate"]

    assert hits(0.25) > hits(0.0) + 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(clip=-0.1), "clip must be a fraction of the rows, from 0 to 1, or None, got -0.1"),
        (dict(clip=2), "clip must be a fraction .* got 2"),
        (dict(max_norm=0), "max_norm must be a number > 0 or None, got 0"),
        (dict(clip=0.1, probe="exact"), "clip needs probe='sketch' .* got probe='exact'"),
        (dict(clip=0.1, vectors=1), "clip needs .* at least two vectors, got probe='sketch', vectors=1"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        CacheGNS(**settings)
    with pytest.raises(ValueError, match=words):
        CacheMuon([torch.nn.Parameter(torch.eye(2))], **settings)


@pytest.mark.parametrize("gate", ["schedule", "residual"])
def test_the_defaults_are_what_the_study_found_and_each_of_them_acts(gate):
    g = torch.Generator().manual_seed(0)
    W = torch.nn.Parameter(torch.zeros(64, 96))
    optimizer = CacheMuon([W], lr=1.0, weight_decay=0.0, cache_all=True, gate=gate)
    group = optimizer.param_groups[0]
    assert (group["gamma"], group["max_age"], group["clip"], group["max_norm"]) == (20.0, 10, None, 2.0)

    def another():
        basis = torch.linalg.qr(torch.randn(64, 64, generator=g)).Q
        return basis * torch.logspace(0, -4, 64) @ torch.randn(64, 96, generator=g)

    base, seen, lengths = another(), [], []
    for step in range(80):
        # A slow drift, and at some steps another matrix altogether.
        W.grad = 1e4 * another() if step % 40 == 39 else base * (1 + 0.1 * torch.randn(96, generator=g))
        before = W.detach().clone()
        optimizer.step()
        (event,) = optimizer.events().values()
        seen.append(event)
        if event.outcome in ("hit", "bounded"):
            lengths.append(torch.linalg.matrix_norm(W.detach() - before, 2).item())
    assert all(event.residual <= 20 for event in seen if event.hit)
    refused = [event for event in seen if event.outcome in ("rejected", "bounded")]
    assert refused and all(event.residual > 20 for event in refused)
    assert {event.outcome for event in refused} == {"bounded" if gate == "schedule" else "rejected"}
    ages = [event.age for event in seen]
    assert max(ages) == 10 and sum(event.outcome == "expired" for event in seen) >= 3
    # A residual of 20 alone would allow 12.7.
    assert max(lengths) < 2.2
