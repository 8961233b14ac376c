"""Whether a shape is cached at all: a static question, and settings that answer it without asking."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from unclipped import unclipped

from cachemuon import CacheGNS, CacheMuon, GramNS, Muon
from cachemuon.engine.break_even import LEAST, saving
from cachemuon.flops import ExecutedCost, executed_by
from cachemuon.newton_schulz.solvers import cheaper

sides = st.integers(1, 4096)
counts = st.integers(1, 500)


def cost_of(n, m, clip=None):
    return executed_by(GramNS(), n, m, rank=CacheGNS(clip=clip).rank(min(n, m)))


@given(sides, sides, counts, st.sampled_from(["cpu", "cuda"]), st.sampled_from([0.0, 1 / 8, None]))
def test_caching_saves_less_than_everything_and_longer_lives_save_no_less_where_hits_do(
    n, m, count, device, clip
):
    cost = cost_of(n, m, clip)
    by_age = [saving(cost, max_age, count, device) for max_age in (1, 2, 10, 100, None)]
    assert max(by_age) < 1
    # A refresh saves nothing, so a life's mean lies between that of a refresh and that of a hit.
    assert by_age == sorted(by_age) or by_age == sorted(by_age, reverse=True)


@given(sides, sides, st.sampled_from(["cpu", "cuda"]))
def test_a_matrix_that_is_never_reused_saves_nothing(n, m, device):
    assert saving(cost_of(n, m), 0, 4, device) < 0


@given(st.integers(64, 1024), counts)
def test_the_calls_of_a_bucket_are_shared(n, count):
    # A clipped hit starts more operations than a solve, and the matrices of a bucket share them.
    cost = cost_of(n, n)
    assert saving(cost, 10, 2 * count, "cpu") >= saving(cost, 10, count, "cpu")


def test_a_hit_that_multiplies_more_than_a_solve_never_pays():
    last_layer = ExecutedCost(10, 512)
    assert last_layer.hit > last_layer.baseline
    assert saving(last_layer, None, 1, "cpu") < LEAST
    W = torch.nn.Parameter(torch.zeros(10, 512))
    optimizer = unclipped([W], solver=GramNS(restarts=()), cache_all=False)
    for _ in range(3):
        W.grad = torch.ones(10, 512)
        optimizer.step()
    assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["uncached"] == 3
    assert "transform" not in optimizer.state[W]


def test_where_calls_take_long_a_cache_does_not_pay_that_pays_on_a_cpu():
    # Five microseconds for each launch are more than the products of few matrices. Many share them.
    def cached(device, number):
        params = [torch.nn.Parameter(torch.empty(256, 512, device=device)) for _ in range(number)]
        (row, *_) = CacheMuon(params).explain().rows
        return row.cache == "no transform yet"

    assert [cached("cpu", 1), cached("meta", 1), cached("meta", 1000)] == [True, False, True]


# In the optimizer


def gradients_of(n, m, steps):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(n, m, generator=generator)
    return [base + 0.3 * torch.randn(n, m, generator=generator) for _ in range(steps)]


def trained(make, shape, steps, **settings):
    """The optimizer after some steps, its outcomes, and the FLOPs that torch counted."""
    W = torch.nn.Parameter(torch.zeros(shape))
    optimizer, seen = make([W], lr=0.01, **settings), []
    with FlopCounterMode(display=False) as counter:
        for W.grad in gradients_of(*shape, steps):
            optimizer.step()
            seen += [event.outcome for event in optimizer.events().values()]
    return optimizer, seen, counter.get_total_flops()


scheduled = partial(unclipped, gate="schedule", max_age=10, gamma=math.inf)


@pytest.mark.parametrize("make", [unclipped, scheduled], ids=["residual", "schedule"])
@pytest.mark.parametrize(
    "n, m, clip, cached",
    [(96, 128, 1 / 16, False), (96, 128, 0.0, True), (256, 1024, 1 / 16, True), (64, 64, None, False)],
)
def test_the_question_is_asked_once_for_each_shape(make, n, m, clip, cached):
    max_age = make.keywords["max_age"]
    saved = saving(cost_of(n, m, clip), max_age, 1, "cpu")
    assert (saved >= LEAST) == cached
    optimizer, seen, counted = trained(make, (n, m), 4, clip=clip, cache_all=False)
    assert seen == (["first", "hit", "hit", "hit"] if cached else ["uncached"] * 4)
    (state,) = optimizer.state.values()
    assert ("transform" in state) == cached
    assert optimizer.cache_stats()["flops"] == counted
    _, everything, _ = trained(make, (n, m), 4, clip=clip, cache_all=True)
    assert everything == ["first", "hit", "hit", "hit"]


def test_matrices_of_one_shape_are_asked_about_together():
    # Sixteen of 128 x 128 share the operations of a hit; one alone would take longer with a cache.
    assert saving(cost_of(128, 128), 10, 1, "cpu") < 0 < LEAST < saving(cost_of(128, 128), 10, 16, "cpu")
    for number, cache in ((1, "not cached: a fresh solve is faster"), (16, "no transform yet")):
        params = [torch.nn.Parameter(torch.zeros(128, 128)) for _ in range(number)]
        assert {row.cache for row in CacheMuon(params).explain().rows} == {cache}


@pytest.mark.parametrize("n, m", [(128, 128), (128, 256)])
@pytest.mark.parametrize("settings", [{"max_age": 0}, {"min_rows": 129}, {"cache_all": False}], ids=str)
def test_a_matrix_without_a_cache_takes_the_steps_of_the_cheapest_fresh_solver(n, m, settings):
    optimizer, seen, counted = trained(CacheMuon, (n, m), 5, **{"cache_all": True, **settings})
    solver = cheaper(GramNS(), n, m, torch.float32)
    fresh, _, flops = trained(Muon, (n, m), 5, solver=solver, normalize="factored")
    assert seen == ["uncached"] * 5 and counted == flops
    (W,), (other,) = (one.param_groups[0]["params"] for one in (optimizer, fresh))
    assert torch.equal(W, other)  # the same products of the same numbers


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"cache_all": 1}, "cache_all must be True or False, got 1"),
        ({"gate": "late"}, "gate must be one of 'schedule', 'residual', got 'late'"),
        ({"max_age": None}, "max_age must be an integer >= 0 with gate='schedule', got None"),
        ({"min_rows": -1}, "min_rows must be an integer >= 0, got -1"),
        ({"min_rows": 1.5}, "min_rows must be an integer >= 0, got 1.5"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        CacheMuon([torch.nn.Parameter(torch.eye(3))], **setting)
