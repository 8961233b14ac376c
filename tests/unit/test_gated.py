"""The paper's gate, Algorithms A.4 and A.5: in `CacheMuon.paper`, and in CacheMuon with gate="residual"."""

import math

import numpy as np
import pytest
import torch
from recording import recorded_gradients
from reference import paper
from unclipped import PAPERS, unclipped

from cachemuon import GRAM, CacheGNS, CacheMuon, GramNS, Muon
from cachemuon.flops import OUTCOMES as PRICED
from cachemuon.flops import PaperCost
from cachemuon.report.counters import OUTCOMES


def replay(make, dtype=torch.float32, steps=50):
    """Drive an optimizer with recorded gradients; the weights of every matrix after each step, and events."""
    recording = recorded_gradients()
    weights = {name: torch.nn.Parameter(start.to(dtype, copy=True)) for name, (start, _) in recording.items()}
    optimizer = make(weights.items())
    trace, events = [], {name: [] for name in weights}
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = recording[name][1][step].to(dtype)
        optimizer.step()
        trace.append({name: weight.detach().clone() for name, weight in weights.items()})
        for name, event in optimizer.events().items():
            events[name].append(event)
    return trace, events, optimizer


def by_the_paper(name, steps=50, **settings):
    start, gradients = recorded_gradients()[name]
    as_numpy = [g.double().numpy() for g in gradients[:steps]]
    return paper.cache_muon(start.double().numpy(), as_numpy, GRAM.triples, **settings)


@pytest.mark.parametrize("gamma", [1.5, 3.0])
def test_the_paper_mode_follows_the_papers_pseudocode(gamma):
    settings = dict(lr=0.02, momentum=0.9, gamma=gamma, weight_decay=0.01)
    trace, events, optimizer = replay(lambda p: CacheMuon.paper(p, **settings), torch.float64)
    total = {"hit": 0, "rejected": 0, "first": 0}
    for name in recorded_gradients():
        weights, decisions = by_the_paper(name, **settings)
        assert [event.outcome for event in events[name]] == [outcome for outcome, _ in decisions]
        for event, (_, err) in zip(events[name], decisions, strict=True):
            assert event.residual == pytest.approx(err, rel=1e-6, nan_ok=True)
        for t, step in enumerate(trace):
            np.testing.assert_allclose(step[name].numpy(), weights[t], atol=1e-9)
        stats = optimizer.cache_stats()["matrices"][name]
        for key in total:
            count = sum(outcome == key for outcome, _ in decisions)
            assert (stats["hits"] if key == "hit" else stats["misses"][key]) == count
            total[key] += count
    assert min(total.values()) >= 8  # both hits and misses


def test_the_sequence_of_decisions_is_the_papers_in_float32():
    settings = dict(lr=0.02, momentum=0.9, gamma=3.0)
    _, events, _ = replay(lambda p: CacheMuon.paper(p, **settings))
    for name in recorded_gradients():
        _, decisions = by_the_paper(name, **settings)
        # No residual of this recording is within 0.1% of gamma, float32's error in it.
        assert all(not 0.999 < err / 3.0 < 1.001 for _, err in decisions)
        assert [event.outcome for event in events[name]] == [outcome for outcome, _ in decisions]


def test_gamma_zero_is_gram_muon_bit_for_bit():
    settings = dict(lr=0.02, momentum=0.9, weight_decay=0.01)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for make in (CacheMuon.paper, unclipped):
            cached, _, optimizer = replay(lambda p, m=make: m(p, gamma=0.0, **settings), dtype, steps=20)
            fresh, _, _ = replay(lambda p: Muon(p, solver=GramNS(), **PAPERS | settings), dtype, steps=20)
            for a, b in zip(cached, fresh, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a)
            assert optimizer.cache_stats()["hits"] == 0


def test_the_paper_mode_has_none_of_what_is_ours_whatever_the_defaults():
    class Other(CacheMuon):
        def __init__(self, params, max_age=3, clip=0.5, cache_all=False, gate="schedule", **settings):
            super().__init__(params, max_age=max_age, clip=clip, cache_all=cache_all, gate=gate, **settings)

    for make in (CacheMuon, Other):
        group = make.paper([torch.nn.Parameter(torch.eye(3))]).param_groups[0]
        ours = {key: group[key] for key in ("probe", "clip", "max_age", "cache_all", "gate")}
        assert ours == {
            **{"probe": "exact", "clip": 0, "max_age": None},
            **{"cache_all": True, "gate": "residual"},
        }


@pytest.mark.parametrize(
    "key", ["gate", "cache_all", "probe", "vectors", "max_age", "clip", "max_norm", "seed", "min_rows"]
)
def test_the_paper_mode_takes_none_of_what_is_ours(key):
    with pytest.raises(ValueError, match=f"CacheMuon.paper takes no {key}"):
        CacheMuon.paper([torch.nn.Parameter(torch.eye(3))], **{key: 1})


@pytest.mark.parametrize(
    "probe, clip, gamma", [("exact", 0.0, 6.0), ("sketch", 0.0, 6.0), ("sketch", 0.25, 1.2)]
)
@pytest.mark.parametrize("max_age", [None, 4])
def test_the_optimizer_decides_as_the_solver_does_and_takes_its_directions(probe, clip, gamma, max_age):
    # One matrix: of several, each has a phase of its own, and falls due earlier than its age says.
    lr, beta = 0.02, 0.9
    start, gradients = recorded_gradients()["blocks.1.down.weight"]
    W = torch.nn.Parameter(start.double())
    settings = dict(gamma=gamma, momentum=beta, weight_decay=0.0, max_age=max_age, seed=3)
    optimizer = unclipped([W], lr=lr, probe=probe, clip=clip, **settings)
    solver = CacheGNS(probe=probe, clip=clip)
    expected, M, Q, age, seen = W.detach().clone(), torch.zeros_like(W), None, 0, []
    for step, gradient in enumerate(gradients[:40], start=1):
        W.grad = gradient.double()
        optimizer.step()
        (found,) = optimizer.events().values()
        M = beta * M + (1 - beta) * W.grad
        due = max_age is not None and (step + (max_age + 1) // 2) % (max_age + 1) == 0
        if due and Q is not None:
            age = max_age
        D, Q, event = solver(M, Q, gamma, age=age, max_age=max_age, seed=3, step=step)
        age = event.age
        expected -= lr * D
        assert (found.outcome, found.age) == (event.outcome, event.age)
        assert found.residual == pytest.approx(event.residual, rel=1e-6, nan_ok=True)
        torch.testing.assert_close(W.detach(), expected, rtol=0, atol=1e-9)
        seen.append(found.outcome)
    assert seen.count("hit") >= 3 and seen.count("rejected") >= 2
    assert (seen.count("expired") >= 2) == (max_age is not None)


def test_a_batch_is_decided_matrix_by_matrix_as_each_alone():
    # Eight matrices of one shape, of which some hit and others do not.
    recording = recorded_gradients()["blocks.1.up.weight"]
    scales = [1.0, 0.3, 3.0, 0.1]
    weights, twins = ([torch.nn.Parameter(recording[0].double()) for _ in scales] for _ in range(2))
    settings = dict(lr=0.02, gamma=3.0, momentum=0.5)
    together, alone = unclipped(weights, **settings), [unclipped([twin], **settings) for twin in twins]
    mixed = 0
    for step in range(30):
        for i, (W, twin) in enumerate(zip(weights, twins, strict=True)):
            W.grad = (recording[1][step] + scales[i] * recording[1][(step + 7 * i) % 50]).double()
            twin.grad = W.grad.clone()
        together.step()
        for one in alone:
            one.step()
        outcomes = [event.outcome for event in together.events().values()]
        assert outcomes == [event.outcome for one in alone for event in one.events().values()]
        mixed += len(set(outcomes)) > 1
        for W, twin in zip(weights, twins, strict=True):
            torch.testing.assert_close(W.detach(), twin.detach(), rtol=0, atol=1e-9)
    assert mixed >= 3


def test_sketched_cachemuon_stays_near_the_exact_one():
    settings = dict(lr=0.02, momentum=0.9, gamma=3.0)
    exact, _, _ = replay(lambda p: CacheMuon.paper(p, **settings))
    sketched, _, optimizer = replay(lambda p: unclipped(p, vectors=32, **settings))
    stats = optimizer.cache_stats()
    assert 0.1 < stats["hit_rate"] < 0.95
    for name, (start, _) in recorded_gradients().items():
        moved = torch.linalg.norm(exact[-1][name] - start)
        # Decisions near the threshold differ, and from then on the transforms: the paths stay close.
        assert torch.linalg.norm(sketched[-1][name] - exact[-1][name]) < 0.25 * moved


def test_max_age_bounds_the_hits():
    for max_age, rate in ((0, 0.0), (1, 0.5), (4, 0.8), (9, 0.9)):
        _, _, optimizer = replay(lambda p, a=max_age: unclipped(p, gamma=math.inf, max_age=a))
        stats = optimizer.cache_stats()
        # Lives of the first transforms have all lengths: at most one solve more for each matrix.
        assert rate - 1 / 50 <= stats["hit_rate"] <= rate
        assert all((entry["age"] or 0) <= max_age for entry in stats["matrices"].values())


def test_after_a_sudden_change_the_gate_solves_at_once_and_the_schedule_a_step_later():
    generator = torch.Generator().manual_seed(0)
    base, other = (torch.randn(16, 24, generator=generator) for _ in range(2))
    outcomes = {}
    for gate, settings in (("residual", {}), ("schedule", {"gate": "schedule", "max_age": 50})):
        W = torch.nn.Parameter(torch.zeros(16, 24))
        optimizer = unclipped([W], momentum=0.0, **settings)
        outcomes[gate] = []
        for step in range(8):
            W.grad = base if step < 4 else other * torch.logspace(0, -3, 16).unsqueeze(1)
            optimizer.step()
            outcomes[gate] += [event.outcome for event in optimizer.events().values()]
    assert outcomes["residual"] == ["first", *["hit"] * 3, "rejected", *["hit"] * 3]
    assert outcomes["schedule"] == ["first", *["hit"] * 3, "bounded", *["uncached"] * 3]


def test_statistics_by_the_papers_model():
    _, _, optimizer = replay(lambda p: CacheMuon.paper(p, gamma=2.0, momentum=0.9))
    for name, entry in optimizer.cache_stats()["matrices"].items():
        cost = PaperCost(*recorded_gradients()[name][0].shape)
        hits, misses = entry["hits"], entry["misses"]["rejected"]
        assert entry["flops_paper"] == cost.refresh + hits * cost.hit + misses * cost.miss
    assert set(OUTCOMES) == set(PRICED)
