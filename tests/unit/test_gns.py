"""CacheGNS, Algorithm A.4: measured, then accepted or solved."""

import math

import numpy as np
import pytest
import torch
from recording import recorded_gradients
from reference import paper
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import GRAM, QUINTIC, CacheGNS, GramNS, Schedule, StandardNS
from cachemuon.flops import ExecutedCost


def momenta(dtype=torch.float64, beta=0.9):
    """A recorded momentum sequence, wide."""
    _, gradients = recorded_gradients()["blocks.1.down.weight"]
    M, sequence = torch.zeros_like(gradients[0]), []
    for g in gradients:
        M = beta * M + (1 - beta) * g
        sequence.append(M.to(dtype))
    return sequence


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 5.0, 1e9])
def test_decisions_and_directions_are_those_of_the_papers_listing(gamma):
    transform, Q, outcomes = None, None, []
    for step, M in enumerate(momenta()):
        direction, transform, event = CacheGNS(probe="exact")(M, transform, gamma, step=step)
        if Q is None:
            (expected, Q), outcome, err = paper.fresh_gns(M.numpy(), GRAM.triples), "first", math.nan
        else:
            expected, Q, outcome, err = paper.cache_gns(M.numpy(), Q, GRAM.triples, gamma)
        assert event.outcome == outcome
        assert event.residual == pytest.approx(err, rel=1e-6, nan_ok=True)
        np.testing.assert_allclose(direction.numpy(), expected, atol=1e-8)
        outcomes.append(outcome)
    if gamma == 2.0:
        assert {"hit", "rejected"} < set(outcomes)


def test_the_sketched_gate_decides_as_the_exact_one_away_from_the_threshold():
    transform, agreed = None, 0
    for step, M in enumerate(momenta(torch.float32)):
        _, kept, exact = CacheGNS(probe="exact")(M, transform, 2.0)
        _, _, sketched = CacheGNS(vectors=16)(M, transform, 2.0, step=step)
        if step and not 1.2 < exact.residual < 3.4:
            assert exact.hit == sketched.hit
            agreed += 1
        transform = kept
    assert agreed > 5


def test_events_tell_age_and_residuals():
    M = momenta()[20]
    _, Q, first = CacheGNS()(M, None, 5.0)
    assert (first.outcome, first.reason, first.hit, first.age) == ("first", "first", False, 0)
    assert math.isnan(first.residual) and 0.05 < first.refresh_residual < 1.5
    _, same, hit = CacheGNS()(M, Q, 5.0, age=3)
    assert (hit.outcome, hit.reason, hit.hit, hit.age) == ("hit", None, True, 4)
    assert torch.equal(same, Q) and math.isnan(hit.refresh_residual)
    _, new, miss = CacheGNS()(momenta()[3], Q, 0.5, age=3)
    assert (miss.reason, miss.age) == ("rejected", 0)
    assert miss.residual > 0.5 and not torch.equal(new, Q)


def test_an_age_limit_makes_a_transform_stale():
    M = momenta()[20]
    _, Q, _ = CacheGNS()(M, None, 5.0)
    assert CacheGNS()(M, Q, 5.0, age=1, max_age=2)[2].hit
    expired = CacheGNS()(M, Q, 5.0, age=2, max_age=2)[2]
    assert expired.reason == "expired" and math.isnan(expired.residual) and expired.age == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_matrix_keeps_its_transform_and_does_not_move(bad):
    M = momenta()[20]
    _, Q, _ = CacheGNS()(M, None, 5.0)
    spoiled = M.clone()
    spoiled[2, 3] = bad
    direction, kept, event = CacheGNS()(spoiled, Q, 5.0)
    assert event.reason == "non-finite"
    assert torch.equal(kept, Q) and not direction.any()
    assert CacheGNS()(spoiled, None, 5.0)[1] is None


@pytest.mark.parametrize("probe", ["exact", "sketch"])
def test_a_batch_is_decided_matrix_by_matrix(probe):
    sequence = momenta()
    solver = CacheGNS(probe=probe)
    before, after = (
        torch.stack([sequence[20]] * 3),
        torch.stack([sequence[20] * 1.01, sequence[2], sequence[20]]),
    )
    after[2, 0, 0] = math.nan
    _, Q, first = solver(before, None, 1.0)
    assert [event.reason for event in first] == ["first"] * 3
    directions, kept, events = solver(after, Q, 1.0, step=5)
    assert [event.outcome for event in events] == ["hit", "rejected", "non-finite"]
    for i in range(2):
        direction, transform, event = solver(after[i], Q[i], 1.0, step=5)
        torch.testing.assert_close(directions[i], direction)
        torch.testing.assert_close(kept[i], transform)
        assert events[i].residual == pytest.approx(event.residual, rel=1e-9)


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_a_transform_beyond_the_range_of_float16_is_applied_all_the_same(clip):
    # A rank of two, so that the transform is the schedule's whole gain, 79,263, times nearly the identity.
    steep = Schedule(QUINTIC.triples[:1] * 8 + ((2.0, -1.5, 0.5),) * 2)
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(64, 2, generator=generator) @ torch.randn(2, 96, generator=generator)
    half, full = (CacheGNS(GramNS(steep, dtype=dtype), clip=clip) for dtype in (torch.float16, torch.float32))
    _, Q, _ = half(M, None, gamma=20.0)
    assert Q.max() > torch.finfo(torch.float16).max
    direction, _, event = half(M, Q, gamma=20.0, step=1)
    expected, _, _ = full(M, Q, gamma=20.0, step=1)
    assert event.hit
    assert torch.linalg.norm(direction - expected) < 0.02 * torch.linalg.norm(expected)


def test_tall_is_wide_transposed():
    M = momenta()[20]
    wide, Q, _ = CacheGNS()(M, None, 5.0)
    tall, Q_tall, _ = CacheGNS()(M.mT, None, 5.0)
    torch.testing.assert_close(tall, wide.mT)
    torch.testing.assert_close(Q_tall, Q)


@pytest.mark.parametrize("probe", ["exact", "sketch"])
@pytest.mark.parametrize("n, m", [(24, 24), (24, 60), (260, 600)])
def test_each_outcome_costs_what_flops_says(probe, n, m):
    g = torch.Generator().manual_seed(0)
    M, other = torch.randn(n, m, generator=g), torch.randn(n, m, generator=g)
    solver = CacheGNS(probe=probe)
    restarts = len(solver.fresh.restarts_at(n, m, torch.float32))
    cost = ExecutedCost(n, m, restarts=restarts, probe=probe, vectors=8)
    Q = solver(M, None, 1.0)[1]
    for outcome, call in {
        "first": lambda: solver(M, None, 1.0),
        "hit": lambda: solver(M, Q, 1e9),
        "rejected": lambda: solver(other, Q, 0.0),
        "expired": lambda: solver(other, Q, 1e9, age=9, max_age=3),
        "non-finite": lambda: solver(M * math.nan, None, 1.0),
    }.items():
        with FlopCounterMode(display=False) as counter:
            event = call()[2]
        assert event.outcome == outcome
        assert counter.get_total_flops() == cost.price_of(outcome)


@pytest.mark.parametrize("probe", ["exact", "sketch"])
def test_a_residual_of_gamma_is_accepted_and_none_above_it(probe):
    M, later = momenta()[20], momenta()[22]
    solver = CacheGNS(probe=probe)
    _, Q, _ = solver(M, None, 5.0)
    residual = solver(later, Q, math.inf)[2].residual
    assert solver(later, Q, residual)[2].hit
    assert solver(later, Q, math.nextafter(residual, 0))[2].outcome == "rejected"


@pytest.mark.parametrize("factor, gamma", [(math.nan, math.inf), (math.inf, math.inf), (1e200, 1e9)])
def test_a_transform_that_overflows_or_has_a_nan_is_replaced(factor, gamma):
    M = momenta()[20]
    direction, Q, _ = CacheGNS()(M, None, 5.0)
    again, new, event = CacheGNS()(M, Q * factor, gamma)
    assert event.outcome == "rejected" and not event.residual <= 1e9
    assert torch.equal(new, Q) and torch.equal(again, direction)


def test_a_bad_matrix_is_non_finite_whatever_its_transform_is_due_for():
    M = momenta()[20]
    _, Q, _ = CacheGNS()(M, None, 5.0)
    events = [CacheGNS()(M * math.nan, Q, 5.0, age=age, max_age=2)[2] for age in (0, 2)]
    assert [event.outcome for event in events] == ["non-finite"] * 2


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda M: CacheGNS(probe="guess"), "probe must be one of 'sketch', 'exact', got 'guess'"),
        (lambda M: CacheGNS(vectors=0), "vectors must be an integer >= 1, got 0"),
        (
            lambda M: CacheGNS(StandardNS()),
            "fresh must be a GramNS, .* got StandardNS",
        ),
        (lambda M: CacheGNS()(M, None, -1.0), "gamma must be a number >= 0, got -1.0"),
        (lambda M: CacheGNS()(M, None, math.nan), "gamma must be a number >= 0, got nan"),
        (lambda M: CacheGNS()(M, None, 1.0, max_age=-1), "max_age must be an integer >= 0 or None, got -1"),
        (lambda M: CacheGNS()(M, M[:2, :2], 1.0), r"transform must have shape \(3, 3\), got \(2, 2\)"),
        (lambda M: CacheGNS(GramNS())(M[0], None, 1.0), "M must be real floating point"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.eye(3))
