"""The break-even guard: a cache that doesn't pay is set aside, and what it has cost is bounded."""

import io
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from unclipped import unclipped as unguarded

from cachemuon import CacheGNS, CacheMuon, GramNS, Muon
from cachemuon.engine.guard import Guard
from cachemuon.flops import Executed, executed_by
from cachemuon.newton_schulz.solvers import cheaper
from cachemuon.report.counters import GUARD

unclipped = partial(unguarded, guard=True)
SHAPES = [(128, 128), (128, 256), (160, 160)]
every_shape = pytest.mark.parametrize("n, m", SHAPES)
GUARDS = [Guard.of(Executed(*shape, restarts=1), lagged=lagged) for shape in SHAPES for lagged in (0, 1)]
FIRST, LONGEST = Guard.INTERVALS


def play(guard, wanted):
    """What happens if each step that the guard lets through ends as wanted: `(outcome, wait, interval)`.

    The first step, and the first after a rest, has no transform and is cold.
    """
    (balance, wait, interval), cold = (0, 0, 0), True
    for outcome in wanted:
        resting = guard.resting(wait)
        done = "resting" if resting else "cold" if cold and outcome != "non-finite" else outcome
        balance, wait, interval = guard.after(done, balance, wait, interval)
        cold = resting or (cold and done == "non-finite")
        yield done, wait, interval


def rests_of(guard, wanted):
    """The length of each rest."""
    return [wait for done, wait, _ in play(guard, wanted) if done != "resting" and wait]


def extra(guard, outcomes):
    """What these outcomes cost more than fresh solves, in thousandths of one."""
    return -sum(guard.gains.get(outcome, 0) for outcome in outcomes)


@pytest.mark.parametrize("guard", GUARDS)
def test_hits_earn_and_misses_pay(guard):
    for outcome in ("hit", "cold", "residual", "stale"):
        gain = guard.gains[outcome]
        assert guard.after(outcome, 1000, 0, 0) == (1000 + gain, 0, 0)
        assert (gain > 0) == (outcome == "hit")
    assert guard.after("hit", Guard.CAP, 0, 0) == (Guard.CAP, 0, 0)
    assert guard.after("non-finite", -7, 0, 64) == (-7, 0, 64)
    assert guard.after("resting", 0, 5, 64) == (0, 4, 64)


@pytest.mark.parametrize("guard", GUARDS)
def test_rests_double_up_to_the_longest_and_begin_again_after_a_try_that_paid(guard):
    lengths = rests_of(guard, ["residual"] * 8000)
    doubling = [FIRST * 2**k for k in range(int(math.log2(LONGEST / FIRST)) + 1)]
    assert lengths[: len(doubling)] == doubling == [32, 64, 128, 256, 512, 1024]
    assert set(lengths[len(doubling) :]) == {LONGEST}

    assert guard.after("hit", 0, 0, 256)[1:] == (0, 256)  # one hit has not saved a whole solve yet
    balance, wait, interval = guard.after("hit", Guard.DEBT, 0, 256)
    assert (wait, interval) == (0, 0)
    while not wait:
        balance, wait, interval = guard.after("residual", balance, wait, interval)
    assert wait == interval == FIRST


@pytest.mark.parametrize("guard", GUARDS)
def test_a_second_try_is_for_half_the_debt(guard):
    def misses_until_rest(interval):
        (balance, wait), tries = (0, 0), 0
        while not wait:
            balance, wait, _ = guard.after("residual", balance, wait, interval)
            tries += 1
        return tries

    fee = -guard.gains["residual"]
    assert misses_until_rest(0) == math.ceil(Guard.DEBT / fee)
    assert misses_until_rest(FIRST) == math.ceil(Guard.DEBT / 2 / fee)


outcomes = st.lists(
    st.tuples(
        st.sampled_from(["hit", "residual", "residual", "residual", "stale", "non-finite"]),
        st.integers(1, 400),
    ),
    max_size=30,
).map(lambda runs: [outcome for outcome, times in runs for _ in range(times)])


@settings(deadline=None)
@given(st.sampled_from(GUARDS), outcomes)
def test_what_the_guard_lets_through_costs_at_most_its_debts(guard, wanted):
    played = list(play(guard, wanted))
    cost, fee = extra(guard, [done for done, _, _ in played]), -min(guard.gains.values())
    rests = sum(1 for done, wait, _ in played if done != "resting" and wait)
    # A debt is passed by less than one fee. Each try, also one that first earned and then lost it all,
    # costs at most a debt, and between two tries lie `FIRST` steps at least.
    assert cost <= (rests + 1) * (Guard.DEBT + fee)
    assert rests <= len(wanted) / (FIRST + 1) + 1


@settings(deadline=None)
@given(st.sampled_from(GUARDS), outcomes)
def test_a_cache_that_never_pays_costs_the_logarithm_of_the_steps(guard, wanted):
    never = [outcome for outcome in wanted if outcome != "hit"]
    cost, fee = extra(guard, [done for done, _, _ in play(guard, never)]), -min(guard.gains.values())
    # k tries after the first need 32 (2^k - 1) steps of rest, up to the longest rest.
    tries = min(math.log2(len(never) / FIRST + 1), 6) + len(never) / LONGEST
    assert cost <= Guard.DEBT + fee + tries * (Guard.DEBT / 2 + fee)


def test_hits_alone_never_rest_and_a_rate_below_break_even_does():
    for guard in GUARDS:
        enough = 1 + math.ceil(-guard.gains["residual"] / guard.gains["hit"])
        assert not rests_of(guard, (["residual"] + ["hit"] * enough) * 100)
        p = guard.gains["residual"] / (guard.gains["residual"] - guard.gains["hit"])  # break-even
        generator = torch.Generator().manual_seed(0)
        rare = torch.rand(2000, generator=generator) < p / 3
        assert rests_of(guard, ["hit" if hit else "residual" for hit in rare])


def test_where_not_even_a_hit_pays_the_cache_always_rests():
    guard = Guard.of(Executed(10, 512))
    assert guard.gains["hit"] < Guard.LEAST and guard.always_rests
    assert {done for done, _, _ in play(guard, ["hit"] * 100)} == {"resting"}
    W = torch.nn.Parameter(torch.zeros(10, 512))
    optimizer = unclipped([W], solver=GramNS(restarts=()))
    for _ in range(3):
        W.grad = torch.ones(10, 512)
        optimizer.step()
    assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["resting"] == 3
    assert "transform" not in optimizer.state[W]


# In the optimizer


def turning(n, m, steps, seed=0):
    """Gradients with a new left basis at each step: what no transform of an earlier one fits."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        basis = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
        yield (basis * torch.logspace(0, -3, n)) @ torch.randn(n, m, generator=generator)


def trained(make, gradients, **settings):
    """The optimizer after these gradients, its outcomes step by step, and the FLOPs that torch counted."""
    gradients = list(gradients)
    W = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer, seen = make([W], lr=0.01, **settings), []
    with FlopCounterMode(display=False) as counter:
        for W.grad in gradients:
            optimizer.step()
            seen += [event.outcome for event in optimizer.events().values()]
    return optimizer, seen, counter.get_total_flops()


@pytest.mark.parametrize(
    "n, m, probe, clip",
    [(*shape, probe, 0.0) for shape in SHAPES for probe in ("sketch", "exact")]
    + [(192, 256, "sketch", 1 / 16)],
)
def test_a_cache_that_cannot_hit_is_set_aside_and_costs_three_percent_at_most(n, m, probe, clip):
    gradients = list(turning(n, m, 300))
    optimizer, seen, counted = trained(unclipped, gradients, momentum=0.0, probe=probe, clip=clip)
    assert seen[:120].count("resting") >= 100  # 109 to 112 were seen
    assert "hit" not in seen
    assert seen.count("cold") >= 3  # it was tried again, without the transform of before
    stats = optimizer.cache_stats()
    assert stats["flops"] == counted
    fresh = trained(Muon, gradients, momentum=0.0)[0].cache_stats()["flops"]
    assert fresh < stats["flops"] <= 1.03 * fresh  # 1.004 to 1.013 were seen


def test_the_papers_mode_and_guard_false_have_no_guard():
    gradients = list(turning(128, 128, 60))
    for make in (CacheMuon.paper, partial(unclipped, guard=False)):
        optimizer, seen, _ = trained(make, gradients, momentum=0.0)
        assert seen == ["cold"] + ["residual"] * 59
        assert optimizer.param_groups[0]["guard"] is False
        (state,) = optimizer.state.values()
        assert state["counters"][0, GUARD].tolist() == [0, 0, 0]


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_with_a_gradient_that_stays_nothing_is_resting(gate):
    (gradient,) = turning(128, 128, 1)
    _, seen, _ = trained(unclipped, [gradient] * 100, gate=gate)
    assert seen == ["cold"] + ["hit"] * 99


@pytest.mark.parametrize("gate", ["sync", "lagged"])
@pytest.mark.parametrize(
    "n, m, clip, outcomes",
    [
        (96, 128, 1 / 16, ["resting"] * 4),
        (96, 128, 0.0, ["cold", "hit", "hit", "hit"]),
        (256, 1024, 1 / 16, ["cold", "hit", "hit", "hit"]),
    ],
)
def test_where_a_clipped_hit_is_too_many_calls_the_cache_always_rests(n, m, clip, outcomes, gate):
    cost = executed_by(GramNS(), n, m, rank=CacheGNS(clip=clip).rank(n))
    always = Guard.of(cost, lagged=gate == "lagged").resting(wait=0)
    assert always == (outcomes[0] == "resting")
    optimizer, seen, _ = trained(unclipped, list(turning(n, m, 1)) * 4, clip=clip, gate=gate)
    assert seen == outcomes
    (state,) = optimizer.state.values()
    assert ("transform" in state) == (not always)


@every_shape
def test_a_resting_step_is_that_of_the_cheapest_fresh_solver(n, m):
    gradients = list(turning(n, m, 30))
    optimizer, seen, _ = trained(unclipped, gradients, momentum=0.0, weight_decay=0.0)
    solver = cheaper(GramNS(), n, m, torch.float32)
    assert seen[-1] == "resting"
    for resting in (optimizer, Muon([torch.nn.Parameter(torch.zeros(n, m))], solver=solver)):
        group = resting.param_groups[0]
        group.update(lr=0.01, momentum=0.0, weight_decay=0.0)
        (W,) = group["params"]
        W.detach().zero_()
        W.grad = next(turning(n, m, 1, seed=7))
        resting.step()
        torch.testing.assert_close(W.detach(), -0.01 * solver(W.grad), rtol=0, atol=1e-8)
    exact = optimizer.param_groups[0]["params"][0], W
    assert torch.equal(*exact)  # as bits: the same products of the same numbers


def test_the_guard_goes_on_where_its_saved_state_stood():
    gradients = list(turning(128, 128, 60))
    for stop in (2, 20, 45):  # in debt, resting, after a second try
        optimizer, _, _ = trained(unclipped, gradients[:stop], momentum=0.0)
        (W,) = optimizer.param_groups[0]["params"]
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin = torch.nn.Parameter(W.detach().clone())
        resumed = unclipped([twin])
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert any(resumed.state[twin]["counters"][0, GUARD].tolist())
        for gradient in gradients[stop:]:
            W.grad = twin.grad = gradient
            optimizer.step()
            resumed.step()
            assert torch.equal(W, twin)
        for key, value in optimizer.state[W].items():
            torch.testing.assert_close(value, resumed.state[twin][key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"guard": 1}, "guard must be True or False, got 1"),
        ({"gate": "late"}, "gate must be one of 'sync', 'lagged', got 'late'"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        CacheMuon([torch.nn.Parameter(torch.eye(3))], **setting)


@pytest.mark.parametrize("key", ["gate", "guard"])
def test_the_papers_mode_takes_neither(key):
    with pytest.raises(ValueError, match=f"CacheMuon.paper takes no {key}"):
        CacheMuon.paper([torch.nn.Parameter(torch.eye(3))], **{key: True})
