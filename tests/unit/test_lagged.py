"""`gate="lagged"`: decisions on what earlier steps have measured, and no wait for the device."""

import io
import math
import warnings

import pytest
import torch
from recording import recorded_gradients
from torch.utils.flop_counter import FlopCounterMode
from unclipped import unclipped

from cachemuon import GramNS
from cachemuon.cache.residual import exact_residual, random_block, sketched_residual
from cachemuon.newton_schulz.normalize import widen
from cachemuon.newton_schulz.workspace import Workspace
from cachemuon.report.counters import AGE, LAST, OUTCOMES

NAME = "blocks.1.down.weight"


def gradients_of(seed=0, shape=(16, 24), steps=30, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return [base + noise * torch.randn(shape, generator=generator) for _ in range(steps)]


def lagged(weights, **settings):
    return unclipped(weights, gate="lagged", **{"lr": 0.02, "guard": False, **settings})


def started(shape=(16, 24), steps=0, **settings):
    """A matrix after some steps of a lagged cache, and its optimizer."""
    W = torch.nn.Parameter(torch.zeros(shape))
    optimizer = lagged([W], **settings)
    for W.grad in gradients_of(shape=shape, steps=steps):
        optimizer.step()
    return W, optimizer


def event(optimizer):
    (entry,) = optimizer.events().values()
    return entry


@pytest.mark.parametrize("probe", ["sketch", "exact"])
@pytest.mark.parametrize("max_age", [None, 1])
def test_decisions_and_weights_are_those_of_a_plain_simulation(probe, max_age):
    gamma, beta, lr = 3.0, 0.9, 0.02
    start, gradients = recorded_gradients()[NAME]
    W = torch.nn.Parameter(start.clone())
    optimizer = lagged([W], gamma=gamma, momentum=beta, weight_decay=0.0, probe=probe, max_age=max_age)
    expected, M, Q, known, age, seen = start.clone(), torch.zeros_like(start), None, math.nan, 0, []
    life = math.inf
    for step, W.grad in enumerate(gradients[:50], start=1):
        optimizer.step()

        M = beta * M + (1 - beta) * W.grad
        X = widen(M)
        z = random_block(X.shape[1], 8, seed=0, step=step, dtype=X.dtype)
        age += 1
        stale = Q is not None and age > life
        assert not abs(known / gamma - 1) < 1e-3  # no decision hangs on rounding
        if Q is not None and not stale and known <= gamma:
            outcome, D = "hit", Q @ X
            known = float(exact_residual(D) if probe == "exact" else sketched_residual(z, Q, X))
            if known > gamma:  # too late to refuse it: no singular value is above the Frobenius norm
                D = D / torch.linalg.matrix_norm(D)
        else:
            outcome = "cold" if Q is None else "stale" if stale else "residual"
            D, Q = GramNS().solve_with_transform(X, Workspace())
            known, age = float(sketched_residual(z, D)), 0
            if max_age is not None:  # the first life of a single matrix is half as long
                life = max_age // 2 if outcome == "cold" else max_age
        tall = W.shape[0] > W.shape[1]
        expected -= lr * (D.mT if tall else D)[0]

        seen.append(outcome)
        counters = optimizer.state[W]["counters"][0].tolist()  # events() would not leave them on their way
        assert (OUTCOMES[counters[LAST]], counters[AGE]) == (outcome, age)
        # Float32 in another order: 1.2e-6 was seen within 50 steps.
        torch.testing.assert_close(W.detach(), expected, rtol=0, atol=1e-5)
    assert seen.count("hit") >= 10
    assert seen.count("residual") >= 3 if max_age is None else seen.count("stale") >= 3


def test_after_a_sudden_change_the_transform_is_used_once_more_and_then_replaced():
    changed = gradients_of(seed=1, steps=1)[0] * torch.logspace(0, -3, 16).unsqueeze(1)
    outcomes = {"sync": [], "lagged": []}
    for gate, seen in outcomes.items():
        W, optimizer = started(steps=5, momentum=0.0)
        optimizer.param_groups[0]["gate"] = gate
        for _ in range(4):
            W.grad = changed
            optimizer.step()
            seen.append(event(optimizer).outcome)
    assert outcomes["sync"] == ["residual", "hit", "hit", "hit"]
    assert outcomes["lagged"] == ["hit", "residual", "hit", "hit"]


@pytest.mark.parametrize("first", ["zero", "rank one", "another basis"])
def test_the_one_bad_use_is_no_longer_than_a_step(first):
    # The transform of a small singular value enlarges 800 times; so does the step, if that turns large.
    generator = torch.Generator().manual_seed(0)
    n = 64
    before = {
        "zero": torch.zeros(n, n),
        "rank one": torch.randn(n, 1, generator=generator) @ torch.randn(1, n, generator=generator),
        "another basis": torch.logspace(0, -3, n).diag() @ torch.randn(n, n, generator=generator),
    }[first]
    W = torch.nn.Parameter(torch.zeros(n, n))
    optimizer = lagged([W], lr=1.0, weight_decay=0.0)
    # A fresh direction's largest singular value is 1.13; that of what the gate would have refused is 1.
    for W.grad, longest in ((before, 1.13), (torch.randn(n, n, generator=generator), 1 + 1e-5)):
        start = W.detach().clone()
        optimizer.step()
        assert torch.linalg.matrix_norm(W.detach() - start, 2) <= longest


def test_no_cut_is_longer_than_one_whatever_the_estimate_was():
    # The estimate of a residual may be far off: with one vector by a factor of three and more.
    n, cuts = 24, []
    for seed in range(40):
        W = torch.nn.Parameter(torch.zeros(n, 2 * n))
        optimizer = lagged([W], lr=1.0, weight_decay=0.0, momentum=0.0, vectors=1, seed=seed, gamma=1.5)
        for W.grad in gradients_of(seed=seed, shape=(n, 2 * n), steps=20, noise=0.7):
            start = W.detach().clone()
            optimizer.step()
            last = event(optimizer)
            if last.hit and last.residual > 1.5:
                cuts.append(torch.linalg.matrix_norm(W.detach() - start, 2).item())
    assert len(cuts) > 50 and max(cuts) <= 1 + 1e-5


@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_zero_matrix_without_eps_stays_where_it_is(clip, value):
    # Its scale is 1e38, and with the transform of a zero matrix, 800 I, infinite.
    W = torch.nn.Parameter(torch.ones(16, 24))
    optimizer = lagged([W], eps=0.0, clip=clip, weight_decay=0.0)
    with warnings.catch_warnings(action="ignore"):  # the NaN's
        for grad in (0.0, value, 0.0):
            W.grad = torch.full_like(W, grad)
            optimizer.step()
    assert (W == 1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", ["cold", "hit", "residual", "resting"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_non_finite_gradient_changes_nothing_but_its_count(value, at, nesterov):
    settings = {"hit": {}, "cold": {}, "residual": {"gamma": 0.0}, "resting": {"gamma": 0.0, "guard": True}}
    steps = {"cold": 0, "resting": 20}.get(at, 4)
    W, optimizer = started(steps=steps, weight_decay=0.5, nesterov=nesterov, **settings[at])
    if steps:
        assert event(optimizer).outcome == at
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
        assert torch.equal(after["counters"][0, -3:], before["counters"][0, -3:])  # the guard's
    else:
        assert not W.any() and not optimizer.state[W]["momentum_buffer"].any()
    optimizer.step()
    assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["non-finite"] == 2  # said once
    W.grad = gradients_of(steps=1)[0]
    optimizer.step()
    assert W.isfinite().all() and not torch.equal(W, before["weight"])
    assert event(optimizer).outcome == ("resting" if at == "resting" else at)


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
@pytest.mark.parametrize("guard", [False, True])
def test_a_run_saved_in_between_goes_on_bit_for_bit(stop, guard):
    shape = (128, 160) if guard else (16, 24)  # smaller ones would always rest
    gradients = gradients_of(shape=shape, noise=1.0, steps=20)
    gradients[4] = gradients[4].clone().fill_(math.nan)  # still on its way to the host when saved at 5
    settings = {"gamma": 1.0, "momentum": 0.5, "guard": guard}
    runs = []
    for _ in range(2):
        W = torch.nn.Parameter(torch.zeros(shape))
        runs.append((W, lagged([W], **settings)))
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
                optimizer = lagged([W], lr=0.5)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
            assert torch.equal(W, undisturbed)
        stats = plain.cache_stats()
        optimizer.cache_stats()  # now nothing is on its way to the host
    assert stats["hits"] and stats["matrices"]["group0.param0"]["misses"]["residual"]
    assert stats["matrices"]["group0.param0"]["misses"]["non-finite"] == 1
    for key, value in plain.state[undisturbed].items():
        torch.testing.assert_close(optimizer.state[W][key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("probe", ["sketch", "exact"])
def test_statistics_are_priced_as_executed(probe):
    recording = recorded_gradients()
    weights = {name: torch.nn.Parameter(start.clone()) for name, (start, _) in recording.items()}
    optimizer = lagged(weights.items(), gamma=2.0, momentum=0.9, probe=probe, max_age=8)
    with FlopCounterMode(display=False) as counter:
        for step in range(40):
            for name, weight in weights.items():
                weight.grad = recording[name][1][step]
            optimizer.step()
    stats = optimizer.cache_stats()
    assert stats["flops"] == counter.get_total_flops()
    misses = [entry["misses"] for entry in stats["matrices"].values()]
    assert stats["hits"] and all(sum(m[why] for m in misses) for why in ("cold", "residual"))


def test_both_gates_in_one_optimizer_decide_each_for_itself():
    settings = {"lr": 0.02, "guard": False, "momentum": 0.5}
    weights, twins = ([torch.nn.Parameter(torch.zeros(16, 24)) for _ in range(2)] for _ in range(2))
    mixed = unclipped([{"params": weights[:1], "gate": "lagged"}, {"params": weights[1:]}], **settings)
    alone = [unclipped([twins[0]], gate="lagged", **settings), unclipped([twins[1]], **settings)]
    for gradient in gradients_of(noise=1.0, steps=12):
        for W in (*weights, *twins):
            W.grad = gradient
        for optimizer in (mixed, *alone):
            optimizer.step()
    for W, twin, optimizer in zip(weights, twins, alone, strict=True):
        assert torch.equal(W, twin)
        assert torch.equal(mixed.state[W]["counters"], optimizer.state[twin]["counters"])
    assert not torch.equal(weights[0], weights[1])  # the gates differ in what they decided
