"""What is known before the first step: buckets, prices, and phases so that no step has all the solves."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachemuon import CacheMuon
from cachemuon.engine.bucket import spread
from cachemuon_lab.totals import gpt2_shapes


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
    plan = CacheMuon(zeros(gpt2_shapes(12, 64)), cache_all=True, max_age=max_age)._plan()
    flops, kinds = [0] * (max_age + 1), [0] * (max_age + 1)
    for kind in plan.kinds:
        for phase in kind.phases:
            flops[phase] += kind.choice.refresh
        for phase in set(kind.phases):
            kinds[phase] += 1
    assert max(flops) <= 1.15 * sum(flops) / len(flops)
    # Those of one shape are due together: a step solves one or two shapes, not all four.
    assert len(plan.kinds) == 4 and sum(kinds) <= 4 + max_age


def run(optimizer, params, steps):
    """The refreshes of each step, and its FLOPs."""
    found, before = [], (0, 0)
    for step in steps:
        for i, param in enumerate(params):
            g = torch.Generator().manual_seed(1000 * i + step)
            param.grad = torch.eye(*param.shape) + 0.01 * torch.randn(param.shape, generator=g)
        optimizer.step()
        stats = optimizer.cache_stats()
        matrices = stats["matrices"].values()
        solved = sum(entry["misses"]["first"] + entry["misses"]["expired"] for entry in matrices)
        now = solved, stats["flops"]
        found.append((now[0] - before[0], now[1] - before[1]))
        before = now
    return found


@pytest.mark.parametrize("gate", ["schedule", "residual"])
def test_refreshes_are_spread_over_the_steps_so_that_all_cost_the_same(gate):
    params = zeros(gpt2_shapes(12, 16))
    optimizer = CacheMuon(params, cache_all=True, gate=gate, max_age=6)
    (first, *solved), (_, *flops) = zip(*run(optimizer, params, range(71)), strict=True)
    assert first == 48
    assert min(solved) >= 5 and max(solved) <= 10  # 48 / 7 = 6.9; of small ones more at a step
    assert sum(solved) == 480  # as all together at every seventh step would be
    assert max(flops) <= 1.05 * sum(flops) / len(flops)


def test_lives_after_the_first_are_whole_and_a_resumed_run_keeps_its_places():
    shapes = gpt2_shapes(2, 16)
    make = partial(CacheMuon, cache_all=True, max_age=4)
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
    optimizer = CacheMuon(params[:3], cache_all=True)
    run(optimizer, params[:3], range(2))
    first = optimizer._made
    run(optimizer, params[:3], range(2, 3))
    assert optimizer._made is first
    optimizer.add_param_group({"params": params[3:]})
    run(optimizer, params, range(3, 5))
    assert optimizer._made is not first
    second = optimizer._made
    optimizer.param_groups[0]["max_age"] = 3
    run(optimizer, params, range(5, 6))
    assert optimizer._made is not second


def test_prices_know_precision_and_room_knows_bytes():
    dtypes = (torch.float32, torch.float64)
    params = [torch.nn.Parameter(torch.zeros(256, 512, dtype=dtype)) for dtype in dtypes]
    single, double = CacheMuon(params)._plan().choices.values()
    assert single.prices.executed["first"] > double.prices.executed["first"]  # float64 has no restart
    assert single.prices.paper == double.prices.paper
    assert double.room == 2 * single.room


def test_matrices_of_one_shape_dtype_and_settings_are_one_bucket():
    params = zeros([(24, 32), (24, 32), (32, 24), (24, 32), (3, 24, 32), (24, 32)])
    params[3].data = params[3].data.double()
    optimizer = CacheMuon([{"params": params[:5]}, {"params": params[5:], "gamma": 7.0}], cache_all=True)
    matrices = [[x.number for x in kind.matrices] for kind in optimizer._plan().kinds]
    # By the rows and columns that they have, not turned; a stack's matrices are as any others.
    assert sorted(matrices) == [[0, 1, 4, 5, 6], [2], [3], [7]]


def test_a_parameter_that_gets_another_shape_is_planned_anew():
    param = torch.nn.Parameter(torch.randn(2, 24, 32))
    optimizer = CacheMuon([param], cache_all=True, min_rows=16)
    for number, rows in ((2, 24), (4, 24), (4, 8)):
        param.data = torch.randn(number, rows, 32)
        optimizer.state.pop(param, None)
        param.grad = torch.randn_like(param)
        optimizer.step()
        stats = optimizer.cache_stats()["matrices"].values()
        assert len(stats) == number
        assert {entry["last"] for entry in stats} == {"first" if rows >= 16 else "uncached"}


@pytest.mark.parametrize("wrong", [{"gate": "bogus"}, {"max_age": -1}, {"clip": 2.0}])
def test_a_setting_that_cannot_be_meant_is_named_in_mid_run_too(wrong):
    param = torch.nn.Parameter(torch.randn(24, 32))
    optimizer = CacheMuon([param], cache_all=True)
    param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.param_groups[0] |= wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimizer.step()
