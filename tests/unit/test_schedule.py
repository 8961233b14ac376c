"""The refresh schedule: a step follows from its number, and from what earlier steps have measured."""

import io
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import recorded_gradients
from reference import paper
from torch.utils.flop_counter import FlopCounterMode
from unclipped import unclipped

from cachemuon import GRAM, CacheMuon, GramNS, Muon
from cachemuon.cache.reuse import random_block
from cachemuon.engine.schedule import MISSING, Life, Schedule
from cachemuon.newton_schulz.solvers import cheaper
from cachemuon.report.counters import FRESH, MADE, OUTCOMES, UNCACHED, UNTIL, WAIT

scheduled = partial(unclipped, gate="schedule", max_age=10)


class Slow:
    """One matrix of a schedule, loop by loop, in plain numbers."""

    def __init__(self, max_age, phase, gamma, always=None):
        self.max_age, self.phase, self.gamma = max_age, phase, gamma
        self.always = None if always is None else OUTCOMES[always]
        self.made, self.until, self.wait = None, 0, 0
        self.counts, self.last = Counter(), None

    def wanted(self, step):
        if self.always is not None:
            return self.always
        if step <= self.until:
            return "uncached"
        if self.made is None:
            return "first"
        if self.max_age is None:
            return "hit"
        due = (step + self.phase) % (self.max_age + 1) == 0 or step > self.made + self.max_age
        return "expired" if due else "hit"

    def took(self, step, wanted, peak, probed, refreshed):
        if peak == MISSING:
            return
        if not math.isfinite(peak):
            self.last = "non-finite"
        elif self.always is not None:
            self.last = self.always
        elif wanted == "hit" and refreshed:
            self.last, self.made = "rejected", step if peak > 0 else None
        elif wanted == "hit" and peak > 0 and not probed <= self.gamma:
            self.last, self.made = "bounded", None
            self.wait = 32 if self.wait == 0 else min(2 * self.wait, 1024)
            self.until = step + self.wait
        else:
            self.last = wanted
            if wanted in ("first", "expired"):
                self.made = step if peak > 0 else None
            if wanted == "expired":
                self.wait = 0
        self.counts[self.last] += 1


PEAKS = [1.0] * 12 + [0.0, math.nan, math.inf, MISSING]
RESIDUALS = [0.5] * 8 + [2.0, 2.0001, math.nan, math.inf]
lives = st.builds(
    Life,
    st.sampled_from([0, 1, 2, 5, 10, None]),
    st.integers(0, 10),
    st.sampled_from([2.0, 2.0, math.inf]),
    st.sampled_from([None, None, None, UNCACHED, FRESH]),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(lives, min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_outcomes_and_counts_are_those_of_a_loop_over_matrices_and_steps(lives, gates, random):
    schedule, slow = Schedule(lives), [Slow(*life) for life in lives]
    for step in range(1, 120):
        outcomes = schedule.outcomes(step)
        wanted = [one.wanted(step) for one in slow]
        assert [OUTCOMES[outcome] for outcome in outcomes] == wanted
        readings = []
        for one, name in zip(slow, wanted, strict=True):
            peak = random.choice(PEAKS)
            probed = random.choice(RESIDUALS) if name == "hit" and peak != MISSING else 0.0
            refused = gates and name == "hit" and not probed <= one.gamma
            made = peak != MISSING and (refused or name in ("first", "expired"))
            readings.append((peak, probed, 0.25 if made else 0.0))
            one.took(step, name, *readings[-1])
        readings = torch.tensor(readings, dtype=torch.float64)
        finite = schedule.learn(step, outcomes, readings)
        assert finite == bool(readings[:, 0].isfinite().all())
        for row, one in zip(schedule.counters.tolist(), slow, strict=True):
            assert row[: len(OUTCOMES)] == [one.counts[name] for name in OUTCOMES]
            if one.always is None:
                last = -1 if one.last is None else OUTCOMES.index(one.last)
                made = -1 if one.made is None else one.made
                assert row[len(OUTCOMES) :] == [made, last, one.until, one.wait]


def played(schedule, residual, steps, begin=1):
    """Outcomes of one matrix whose cached directions all have that residual."""
    seen = []
    for step in range(begin, begin + steps):
        (outcome,) = schedule.outcomes(step)
        name = OUTCOMES[outcome]
        reading = [1.0, residual if name == "hit" else 0.0, 0.3 if name in ("first", "expired") else 0.0]
        schedule.learn(step, [outcome], torch.tensor([reading], dtype=torch.float64))
        seen.append("bounded" if name == "hit" and residual > 2 else name)
    return seen


def test_suspensions_double_from_32_to_1024_steps_and_begin_again_after_a_whole_life():
    schedule = Schedule([Life(max_age=10, phase=0, gamma=2.0)])
    seen = played(schedule, 3.0, 6000)
    bounded = [step for step, name in enumerate(seen) if name == "bounded"]
    lengths = [seen[step + 1 :].index("first") for step in bounded[:-1]]
    assert lengths == [32, 64, 128, 256, 512, 1024, 1024, 1024, 1024]
    assert set(seen) <= {"first", "bounded", "uncached", "expired"}

    schedule = Schedule([Life(max_age=10, phase=0, gamma=2.0)])
    played(schedule, 3.0, 100)
    assert schedule.counters[0, WAIT] == 64
    seen = played(schedule, 1.0, 30, begin=101)
    assert seen[:2] == ["first", "hit"] and seen.count("expired") == 2
    assert schedule.counters[0, WAIT] == 0
    played(schedule, 3.0, 2, begin=133)
    assert schedule.counters[0, WAIT] == 32 and schedule.counters[0, MADE] == -1


# In the optimizer


def gradients_of(seed=0, shape=(16, 24), steps=30, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return [base + noise * torch.randn(shape, generator=generator) for _ in range(steps)]


def started(shape=(16, 24), steps=0, make=scheduled, **settings):
    """A matrix after some steps, and its optimizer."""
    W = torch.nn.Parameter(torch.zeros(shape))
    optimizer = make([W], lr=0.02, **settings)
    for W.grad in gradients_of(shape=shape, steps=steps):
        optimizer.step()
    return W, optimizer


def event(optimizer):
    (entry,) = optimizer.events().values()
    return entry


@pytest.mark.parametrize("probe", ["exact", "sketch"])
@pytest.mark.parametrize("max_age", [1, 4, 10])
def test_outcomes_and_weights_are_those_of_a_plain_simulation_in_float64(probe, max_age):
    gamma, beta, lr, steps = 40.0, 0.9, 0.02, 60
    names = ["blocks.0.down.weight", "blocks.1.down.weight"]
    recording = {name: recorded_gradients()[name] for name in names}
    weights = {name: torch.nn.Parameter(start.double()) for name, (start, _) in recording.items()}
    options = dict(lr=lr, gamma=gamma, momentum=beta, weight_decay=0.01, probe=probe, max_age=max_age)
    optimizer = scheduled(weights.items(), **options)
    # Matrices of one cost have their phases at equal distances.
    slow = {
        name: Slow(max_age, (2 * place + 1) * (max_age + 1) // 4, gamma) for place, name in enumerate(names)
    }
    expected = {name: start.double().numpy() for name, (start, _) in recording.items()}
    M, Q, seen = dict.fromkeys(names, 0.0), {}, Counter()
    for step in range(1, steps + 1):
        for name in names:
            weights[name].grad = recording[name][1][step - 1].double()
        optimizer.step()

        for name, one in slow.items():
            wanted, probed = one.wanted(step), 0.0
            M[name] = beta * M[name] + (1 - beta) * recording[name][1][step - 1].double().numpy()
            if wanted == "hit":
                D = Q[name] @ M[name] / (np.linalg.norm(M[name]) + paper.EPS)
                probed, length = paper.residual(D), np.linalg.norm(D)
                if probe == "sketch":
                    life = step // (max_age + 1)
                    z = random_block(len(D), 8, seed=0, step=life, dtype=torch.float64).numpy()
                    probed = np.linalg.norm(D @ (D.T @ z) - z) / math.sqrt(z.size)
                    length = np.linalg.norm(z.T @ D) / math.sqrt(8)
                if probed > gamma:  # no singular value is above the Frobenius norm
                    D = D / max(length, 1)
            else:
                D, new = paper.fresh_gns(M[name], GRAM.triples)
                Q[name] = None if wanted == "uncached" else new
            one.took(step, wanted, 1.0, probed, float(wanted != "hit"))
            assert not abs(probed / gamma - 1) < 1e-6  # no outcome hangs on rounding
            expected[name] = (1 - lr * 0.01) * expected[name] - lr * D
            np.testing.assert_allclose(weights[name].detach().numpy(), expected[name], atol=1e-8)
        events = optimizer.events()
        assert {name: events[name].outcome for name in names} == {name: slow[name].last for name in names}
        seen.update(one.last for one in slow.values())
    assert seen["hit"] >= 10 and min(seen[name] for name in ("first", "expired")) >= 2
    assert seen["bounded"] >= 1 and seen["uncached"] >= 12


def test_phases_are_spread_so_that_each_step_refreshes_as_much():
    params = [torch.nn.Parameter(torch.zeros(12, 16)) for _ in range(11)]
    optimizer = scheduled(params, gamma=math.inf)
    refreshed = []
    for step in range(1, 40):
        for i, param in enumerate(params):
            param.grad = torch.eye(12, 16) * (1 + i + step)
        optimizer.step()
        refreshed.append([i for i, one in enumerate(optimizer.events().values()) if not one.hit])
    assert refreshed[0] == list(range(11))
    assert all(len(rows) == 1 for rows in refreshed[1:])
    assert refreshed[11:22] == refreshed[22:33] and {row for (row,) in refreshed[11:22]} == set(range(11))


def test_a_zero_momentum_makes_no_transform():
    W = torch.nn.Parameter(torch.ones(16, 24))
    optimizer = scheduled([W], weight_decay=0.0, max_age=20)
    seen = []
    for W.grad in [torch.zeros(16, 24)] * 2 + gradients_of(steps=2):
        optimizer.step()
        seen.append(event(optimizer).outcome)
        if seen == ["first"] * 2:
            assert (W == 1).all() and not optimizer.state[W]["transform"].any()
    assert seen == ["first", "first", "first", "hit"]


def test_a_zero_momentum_is_no_reason_to_suspend_a_cache():
    W, optimizer = started(steps=1, momentum=0.0, weight_decay=0.0)
    before = W.detach().clone()
    W.grad = torch.zeros_like(W)  # its cached direction is zero, with a residual of 1
    optimizer.param_groups[0]["gamma"] = 0.5
    optimizer.step()
    assert event(optimizer).outcome == "hit" and torch.equal(W, before)


@pytest.mark.parametrize("clip", [0.0, None])
@pytest.mark.parametrize("first", ["rank one", "another basis"])
def test_a_step_whose_residual_is_above_gamma_is_shortened_at_once_and_solved_fresh_afterwards(first, clip):
    # The transform of a small singular value enlarges 800 times; so does the step, if that turns large.
    generator = torch.Generator().manual_seed(0)
    n = 64
    before = {
        "rank one": torch.randn(n, 1, generator=generator) @ torch.randn(1, n, generator=generator),
        "another basis": torch.logspace(0, -3, n).diag() @ torch.randn(n, n, generator=generator),
    }[first]
    W = torch.nn.Parameter(torch.zeros(n, n))
    optimizer = scheduled([W], lr=1.0, weight_decay=0.0, clip=clip, gamma=0.5, momentum=0.0)
    after = [torch.randn(n, n, generator=generator) for _ in range(34)]
    # The length of the cached direction is estimated from 8 vectors.
    for W.grad, longest in ((before, 1.13), (after[0], 1.2)):
        start = W.detach().clone()
        optimizer.step()
        length = torch.linalg.matrix_norm(W.detach() - start, 2)
        assert 0 < length <= longest
    assert optimizer.state[W]["counters"][0, UNTIL] == 0  # nothing has been read yet
    assert event(optimizer).outcome == "bounded" and event(optimizer).residual > 0.5
    assert optimizer.state[W]["counters"][0, UNTIL] == 34
    solver = cheaper(GramNS(), n, n, torch.float32)
    for gradient in after[1:33]:
        W.grad = gradient
        start = W.detach().clone()
        optimizer.step()
        assert event(optimizer).outcome == "uncached"
        torch.testing.assert_close(W.detach(), start - solver(gradient), rtol=0, atol=1e-5)
    optimizer.step()
    assert event(optimizer).outcome == "first"


def test_a_bounded_step_is_shorter_than_a_solve_whatever_the_estimate_was():
    # The estimate of a norm may be off, with one vector the most.
    n, lengths = 24, []
    for seed in range(40):
        W = torch.nn.Parameter(torch.zeros(n, 2 * n))
        options = dict(lr=1.0, weight_decay=0.0, momentum=0.0, vectors=1, seed=seed, gamma=1.5)
        optimizer = scheduled([W], **options)
        for W.grad in gradients_of(seed=seed, shape=(n, 2 * n), steps=20, noise=0.7):
            start = W.detach().clone()
            optimizer.step()
            if event(optimizer).outcome == "bounded":
                lengths.append(torch.linalg.matrix_norm(W.detach() - start, 2).item())
    assert len(lengths) > 30 and max(lengths) <= 1


@pytest.mark.parametrize(
    "settings", [{}, {"clip": None}, {"probe": "exact"}], ids=["sketch", "clip", "exact"]
)
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30])
def test_a_transform_that_is_not_finite_moves_nothing_and_is_given_up(factor, settings):
    W, optimizer = started(steps=1, **settings)
    before = W.detach().clone()
    optimizer.state[W]["transform"].mul_(factor)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    W.grad = gradients_of(seed=5, steps=1)[0]
    optimizer.step()
    assert torch.equal(W, before) and event(optimizer).outcome == "bounded"
    optimizer.step()
    assert event(optimizer).outcome == "uncached" and not torch.equal(W, before)
    assert W.isfinite().all()


@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.filterwarnings("ignore:a gradient has a NaN or Inf:RuntimeWarning")
def test_a_zero_matrix_without_eps_stays_where_it_is(clip, value):
    # Its scale is 1e38.
    W = torch.nn.Parameter(torch.ones(16, 24))
    optimizer = scheduled([W], eps=0.0, clip=clip, weight_decay=0.0)
    for grad in (0.0, value, 0.0):
        W.grad = torch.full_like(W, grad)
        optimizer.step()
    assert (W == 1).all()


STAGES = {  # settings, the number of good steps before, and what the next one would be
    "first": ({}, 0),
    "hit": ({"max_age": 20}, 4),
    "expired": ({"max_age": 1}, 4),
    "uncached": ({"gamma": 0.0}, 20),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_non_finite_gradient_changes_nothing_but_its_count(value, stage, nesterov):
    settings, steps = STAGES[stage]
    options = dict(weight_decay=0.5, nesterov=nesterov, **settings)
    twin, other = started(steps=steps, **options)
    twin.grad = gradients_of(seed=3, steps=1)[0]
    other.step()
    assert event(other).outcome == stage
    W, optimizer = started(steps=steps, **options)
    counted = optimizer.cache_stats()["matrices"].get("group0.param0")
    before = {key: entry.clone() for key, entry in optimizer.state[W].items()}
    before["weight"] = W.detach().clone()
    bad = gradients_of(seed=3, steps=1)[0]
    bad[3, 4] = value
    W.grad = bad
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="NaN or Inf") as caught:
        entry = optimizer.cache_stats()["matrices"]["group0.param0"]
    assert len(caught) == 1
    assert (entry["last"], entry["misses"]["non-finite"]) == ("non-finite", 1)
    assert entry["calls"] == steps + 1
    if counted:
        assert entry["hits"] == counted["hits"]
        assert entry["refresh_residual"] == pytest.approx(counted["refresh_residual"], abs=0, nan_ok=True)
        after = optimizer.state[W] | {"weight": W.detach()}
        for key in {"weight", "momentum_buffer", "transform"} & before.keys():
            assert torch.equal(after[key], before[key]), key
        for column in (MADE, UNTIL, WAIT):
            assert after["counters"][0, column] == before["counters"][0, column]
    else:
        assert not W.any() and not optimizer.state[W]["momentum_buffer"].any()
    optimizer.step()
    assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["non-finite"] == 2  # said once
    W.grad = gradients_of(steps=1)[0]
    optimizer.step()
    assert W.isfinite().all() and not torch.equal(W, before["weight"])


@pytest.mark.parametrize("stop", [1, 2, 5, 9, 30])
@pytest.mark.parametrize("clip", [0.0, None])
def test_a_run_saved_in_between_goes_on_bit_for_bit(stop, clip):
    gradients = gradients_of(noise=1.0, steps=50)
    gradients[4] = gradients[4].clone().fill_(math.nan)  # still on its way to the host when saved at 5
    gradients[7] = gradients_of(seed=9, steps=1)[0] * torch.logspace(3, 0, 16).unsqueeze(1)  # is bounded
    settings = {"gamma": 1.5, "momentum": 0.0, "max_age": 3, "clip": clip}
    runs = []
    for _ in range(2):
        W = torch.nn.Parameter(torch.zeros(16, 24))
        runs.append((W, scheduled([W], lr=0.02, **settings)))
    (W, optimizer), (undisturbed, plain) = runs
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        for step, gradient in enumerate(gradients):
            W.grad = undisturbed.grad = gradient
            optimizer.step()
            plain.step()
            if step + 1 == stop:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                W = torch.nn.Parameter(W.detach().clone())
                optimizer = scheduled([W], lr=0.5)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
            assert torch.equal(W, undisturbed)
        stats = plain.cache_stats()
        optimizer.cache_stats()  # now nothing is on its way to the host
    misses = stats["matrices"]["group0.param0"]["misses"]
    assert min(misses[name] for name in ("first", "bounded", "uncached", "non-finite")) >= 1
    for key, value in plain.state[undisturbed].items():
        torch.testing.assert_close(optimizer.state[W][key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("probe, clip", [("sketch", 0.0), ("exact", 0.0), ("sketch", 0.25)])
def test_statistics_are_priced_as_executed(probe, clip):
    recording = recorded_gradients()
    weights = {name: torch.nn.Parameter(start.clone()) for name, (start, _) in recording.items()}
    options = dict(gamma=2.0, momentum=0.9, probe=probe, clip=clip, max_age=4)
    optimizer = scheduled(weights.items(), lr=0.02, **options)
    with FlopCounterMode(display=False) as counter:
        for step in range(40):
            for name, weight in weights.items():
                weight.grad = recording[name][1][step]
            optimizer.step()
    stats = optimizer.cache_stats()
    assert stats["flops"] == counter.get_total_flops()
    seen = Counter()
    for entry in stats["matrices"].values():
        seen.update(entry["misses"])
    assert stats["hits"] and all(seen[name] for name in ("first", "expired", "bounded", "uncached"))


def test_both_gates_in_one_optimizer_decide_each_for_itself():
    options = {"lr": 0.02, "momentum": 0.5, "gamma": 2.0}
    weights, twins = ([torch.nn.Parameter(torch.zeros(16, 24)) for _ in range(2)] for _ in range(2))
    gates = [{"gate": "schedule", "max_age": 10}, {}]
    mixed = unclipped([{"params": [W], **gate} for W, gate in zip(weights, gates, strict=True)], **options)
    alone = [unclipped([twin], **gate, **options) for twin, gate in zip(twins, gates, strict=True)]
    for gradient in gradients_of(noise=1.0, steps=12):
        for W in (*weights, *twins):
            W.grad = gradient
        for optimizer in (mixed, *alone):
            optimizer.step()
    mixed.cache_stats()
    for W, twin, optimizer in zip(weights, twins, alone, strict=True):
        optimizer.cache_stats()
        assert torch.equal(W, twin)
        assert torch.equal(mixed.state[W]["counters"], optimizer.state[twin]["counters"])
    assert not torch.equal(weights[0], weights[1])  # the gates differ in what they decided


def test_the_worst_case_costs_little_more_than_fresh_muon():
    # Each step has a basis of its own, which no earlier transform fits.
    n, m, steps = 128, 128, 300
    generator = torch.Generator().manual_seed(0)
    W, other = (torch.nn.Parameter(torch.zeros(n, m)) for _ in range(2))
    optimizer = CacheMuon([W], cache_all=True, momentum=0.0)
    fresh = Muon([other], momentum=0.0)
    for _ in range(steps):
        basis = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
        W.grad = (basis * torch.logspace(0, -4, n)) @ torch.randn(n, m, generator=generator)
        other.grad = W.grad
        optimizer.step()
        fresh.step()
    entry, flops = optimizer.cache_stats()["matrices"]["group0.param0"], fresh.cache_stats()["flops"]
    assert entry["misses"]["uncached"] > 200 and entry["misses"]["bounded"] >= 2
    assert 0.97 * flops < entry["flops"] <= 1.03 * flops
