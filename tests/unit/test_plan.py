"""What is known before the first step: first lives of all lengths, so that no step has all the solves."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachemuon import CacheMuon
from cachemuon.engine.plan import Plan, spread
from cachemuon.flops import gpt2_shapes


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_places_are_in_order_and_their_sums_differ_by_one_weight_at_most(weights, places):
    found = spread(weights, places)
    assert found == sorted(found) and 0 <= found[0] and found[-1] < places
    sums = [sum(w for w, place in zip(weights, found, strict=True) if place == p) for p in range(places)]
    assert all(abs(total - sum(weights) / places) <= max(weights) for total in sums)


def zeros(shapes):
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


@pytest.mark.parametrize("max_age", [6, 10])
def test_a_model_of_twelve_blocks_has_even_steps(max_age):
    params, steps = zeros(gpt2_shapes(12, 64)), max_age + 1
    plan = Plan(CacheMuon(params, guard=False, max_age=max_age).param_groups)
    flops = [0] * steps
    for param in params:
        (policy,), (early,) = plan.of(param)
        flops[early] += policy.cold
    assert max(flops) <= 1.15 * sum(flops) / steps
    # Those of one shape are due together: a step solves one or two shapes, not all four.
    kinds = [{p.shape for p in params if plan.of(p)[1] == [step]} for step in range(steps)]
    assert sum(map(len, kinds)) <= 4 + max_age


def run(optimizer, params, steps):
    """The refreshes of each step."""
    found, before = [], 0
    for step in steps:
        for i, param in enumerate(params):
            g = torch.Generator().manual_seed(1000 * i + step)
            param.grad = torch.eye(*param.shape) + 0.01 * torch.randn(param.shape, generator=g)
        optimizer.step()
        matrices = optimizer.cache_stats()["matrices"].values()
        solved = sum(entry["misses"]["cold"] + entry["misses"]["stale"] for entry in matrices)
        found.append(solved - before)
        before = solved
    return found


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_refreshes_are_spread_over_the_steps_at_the_same_number(gate):
    params = zeros(gpt2_shapes(12, 16))
    refreshes = run(CacheMuon(params, guard=False, gate=gate, max_age=6), params, range(71))
    assert refreshes[0] == 48
    assert min(refreshes[1:]) >= 5 and max(refreshes[1:]) <= 9  # 48 / 7 = 6.9, by FLOPs
    assert sum(refreshes[1:]) == 480  # as all together at every seventh step would be


def test_lives_after_the_first_are_whole_and_a_resumed_run_keeps_its_places():
    shapes = gpt2_shapes(2, 16)
    make = partial(CacheMuon, guard=False, max_age=4)
    params, twins = zeros(shapes), zeros(shapes)
    optimizer, resumed = make(params), make(twins)
    run(optimizer, params, range(3))
    resumed.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param.data)
    assert run(optimizer, params, range(3, 20)) == run(resumed, twins, range(3, 20))
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
    ages = [entry["age"] for entry in optimizer.cache_stats()["matrices"].values()]
    assert len(set(ages)) > 2 and max(ages) <= 4


def test_a_plan_is_made_anew_when_groups_change():
    params = zeros([(32, 48)] * 4)
    optimizer = CacheMuon(params[:3], guard=False)
    run(optimizer, params[:3], range(2))
    first = optimizer._kept.plan
    run(optimizer, params[:3], range(2, 3))
    assert optimizer._kept.plan is first
    optimizer.add_param_group({"params": params[3:]})
    run(optimizer, params, range(3, 5))
    assert optimizer._kept.plan is not first
    second = optimizer._kept.plan
    optimizer.param_groups[0]["max_age"] = 3
    run(optimizer, params, range(5, 6))
    assert optimizer._kept.plan is not second


def test_prices_know_precision_and_room_knows_bytes():
    dtypes = (torch.float32, torch.float64)
    params = [torch.nn.Parameter(torch.zeros(256, 512, dtype=dtype)) for dtype in dtypes]
    plan = Plan(CacheMuon(params).param_groups)
    single, double = (plan.of(param)[0][0] for param in params)
    assert single.guard.gains != double.guard.gains  # float64 has no restart
    for room in ("left", "hit_room", "solve_room"):
        assert getattr(double, room) == 2 * getattr(single, room)


def test_on_a_device_where_calls_are_dear_a_cache_rests_that_pays_on_a_cpu():
    # Few matrices: five microseconds for each launch are more than their products. Many share them.
    def rests(device, number):
        params = [torch.nn.Parameter(torch.empty(256, 512, device=device)) for _ in range(number)]
        return Plan(CacheMuon(params).param_groups).of(params[0])[0][0].always_rests

    assert [rests("cpu", 1), rests("meta", 1), rests("meta", 1000)] == [False, True, False]


def test_a_parameter_that_gets_another_shape_is_planned_anew():
    param = torch.nn.Parameter(torch.randn(2, 24, 32))
    optimizer = CacheMuon([param], guard=False, min_rows=16)
    for number, rows in ((2, 24), (4, 24), (4, 8)):
        param.data = torch.randn(number, rows, 32)
        optimizer.state.pop(param, None)
        param.grad = torch.randn_like(param)
        optimizer.step()
        stats = optimizer.cache_stats()["matrices"].values()
        assert len(stats) == number
        assert {entry["last"] for entry in stats} == {"cold" if rows >= 16 else "resting"}


@pytest.mark.parametrize("wrong", [{"gate": "bogus"}, {"max_age": -1}, {"clip": 2.0}])
def test_a_setting_that_cannot_be_meant_is_named_in_mid_run_too(wrong):
    param = torch.nn.Parameter(torch.randn(24, 32))
    optimizer = CacheMuon([param], guard=False)
    param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.param_groups[0] |= wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimizer.step()
