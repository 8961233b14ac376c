"""How transforms are kept: of which matrices, in which dtype, and within which budget."""

import copy
from functools import partial

import pytest
import torch
from contract.variants import assert_same, gradient, parameter, run
from hypothesis import given, settings
from hypothesis import strategies as st
from unclipped import unclipped

from cachemuon import CacheMuon
from cachemuon.engine.plan import Plan

SHAPES = [(24, 96), (32, 32), (16, 64), (32, 32), (3, 12, 40), (24, 96)]
cached = partial(CacheMuon, gamma=20.0, max_age=4, guard=False)


def parameters(shapes=SHAPES):
    return [parameter(shape, index) for index, shape in enumerate(shapes)]


def transforms(optimizer):
    """By parameter, then by name."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            found.append({key: value for key, value in state.items() if key.startswith("transform")})
    return found


def held(optimizer):
    return sum(value.nbytes for one in transforms(optimizer) for value in one.values())


ALL = 4 * (2 * 24**2 + 2 * 32**2 + 16**2 + 3 * 12**2)  # bytes, float32


# The dtype


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_a_direction_of_a_rounded_transform_is_that_of_a_solver_with_it(gate):
    param, other = parameter((24, 40)), parameter((24, 40))
    rounded = unclipped([param], lr=1.0, weight_decay=0, cache_dtype=torch.float16, gate=gate)
    full = unclipped([other], lr=1.0, weight_decay=0, gate=gate)
    for optimizer, one in ((rounded, param), (full, other)):
        run(optimizer, [one], [0])
    assert torch.equal(param, other)  # a fresh direction is not rounded
    kept = rounded.state[param]["transform"]
    assert kept.dtype == torch.float16
    assert torch.equal(kept, full.state[other]["transform"].half())
    full.state[other]["transform"].copy_(kept)
    for optimizer, one in ((rounded, param), (full, other)):
        run(optimizer, [one], [1])
        assert optimizer.events()["group0.param0"].hit
    assert torch.equal(param, other)  # products of float32, with the rounded entries


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_float16_costs_no_flops_and_little_of_the_path(gate):
    ends, stats = [], []
    for dtype in (None, torch.float16):
        params = parameters()
        optimizer = cached(params, lr=0.05, weight_decay=0.0, gate=gate, cache_dtype=dtype)
        run(optimizer, params, range(12))
        ends.append(torch.cat([param.detach().flatten() for param in params]))
        stats.append(optimizer.cache_stats())
    start = torch.cat([param.detach().flatten() for param in parameters()])
    assert stats[0]["flops"] == stats[1]["flops"] and stats[0]["hits"] == stats[1]["hits"] > 0
    assert 0 < torch.dist(*ends) < 0.005 * torch.dist(ends[0], start)  # seen: 0.0007


def test_parameters_of_float64_may_keep_float32():
    param = parameter((24, 40), dtype=torch.float64)
    optimizer = unclipped([param], cache_dtype=torch.float32)
    run(optimizer, [param], range(3))
    assert optimizer.state[param]["transform"].dtype == torch.float32
    assert optimizer.cache_stats()["hits"] == 2


def test_a_dtype_that_is_changed_counts_from_the_next_step():
    params = parameters()
    optimizer = cached(params)
    run(optimizer, params, range(2))
    hits = optimizer.cache_stats()["hits"]
    optimizer.param_groups[0]["cache_dtype"] = torch.float16
    run(optimizer, params, range(2, 3))
    assert optimizer.cache_stats()["hits"] > hits
    assert held(optimizer) == ALL / 2


def test_groups_may_keep_their_transforms_in_different_dtypes():
    params = parameters([(24, 40), (24, 40)])
    groups = [
        {"params": [param], "cache_dtype": d} for param, d in zip(params, (None, torch.float16), strict=True)
    ]
    optimizer = unclipped(groups)
    run(optimizer, params, range(3))
    assert [one["transform"].dtype for one in transforms(optimizer)] == [torch.float32, torch.float16]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cache_dtype": torch.bfloat16}, r"torch.float32, torch.float16 or None, got torch.bfloat16"),
        ({"cache_dtype": "float16"}, "got 'float16'"),
        ({"cache_dtype": torch.float16, "ns_steps": 10}, "entries up to 235105"),
        ({"max_cache_bytes": -1}, "max_cache_bytes must be an integer >= 0 or None, got -1"),
        ({"max_cache_bytes": 1e6}, "got 1000000.0"),
        ({"min_rows": -1}, "min_rows must be an integer >= 0, got -1"),
        ({"min_rows": 1.5}, "got 1.5"),
    ],
)
def test_what_cannot_be_kept_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        CacheMuon([parameter((6, 10))], **wrong)


# The rows


def test_matrices_of_few_rows_are_left_out_whatever_the_guard_says():
    params = parameters()
    optimizer = cached(params, min_rows=24, max_age=None)
    run(optimizer, params, range(3))
    assert [len(one) for one in transforms(optimizer)] == [1, 1, 0, 1, 0, 1]  # of 16 and of 12 rows: none
    told = {row.name: row.cache for row in optimizer.explain().rows}
    assert told["group0.param2"] == "rests: fewer than min_rows=24 rows"
    assert "transform" in told["group0.param0"]
    same = parameters()
    run(everything := cached(same, max_age=None), same, range(3))
    for index in (0, 1, 3, 5):
        assert torch.equal(params[index], same[index])  # the others are cached as ever
    everything.param_groups[0]["min_rows"] = 33
    run(everything, same, [3])
    assert held(everything) == 0  # from the next step on


# The budget


@given(st.integers(0, ALL + 100), st.sampled_from([None, torch.float16]))
@settings(deadline=None, max_examples=12)
def test_the_bytes_that_are_kept_never_pass_the_budget(budget, dtype):
    params = parameters()
    optimizer = cached(params, max_cache_bytes=budget, cache_dtype=dtype)
    for step in range(3):
        run(optimizer, params, [step])
        assert held(optimizer) <= budget
    whole = ALL if dtype is None else ALL // 2
    assert held(optimizer) > budget - 32**2 * 4 or held(optimizer) == whole  # no room is left for another
    stats = optimizer.cache_stats()["matrices"].values()
    assert {entry["misses"]["resting"] for entry in stats} <= {0, 3}


def test_the_bytes_go_where_each_saves_most():
    # On a CPU: a byte saves more in a wider matrix, whose transform is no larger, and in a larger one.
    shapes = [(64, 64), (128, 128), (128, 512), (64, 256), (128, 512)]
    params = parameters(shapes)
    plan = Plan(cached(params).param_groups)
    worth = [plan.of(param)[0][0].worth for param in params]
    order = sorted(range(len(shapes)), key=lambda place: -worth[place])
    assert order == [2, 4, 1, 3, 0]
    bytes_ = [4 * min(shape) ** 2 for shape in shapes]
    for number in range(len(shapes) + 1):
        budget = sum(bytes_[place] for place in order[:number])
        plan = Plan(cached(params, max_cache_bytes=budget).param_groups)
        cached_now = {place for place, param in enumerate(params) if not plan.of(param)[0][0].aside}
        assert cached_now == set(order[:number])
    # What is too large for the rest of a budget leaves it to smaller ones.
    plan = Plan(cached(params, max_cache_bytes=3 * 4 * 64**2).param_groups)
    assert [not plan.of(param)[0][0].aside for param in params] == [True, False, False, True, False]


def test_a_budget_of_nothing_is_muon_by_the_cheapest_solver_and_says_so():
    params = parameters()
    optimizer = cached(params, max_cache_bytes=0)
    run(optimizer, params, range(2))
    assert held(optimizer) == 0
    stats = optimizer.cache_stats()
    assert stats["calls"] == sum(entry["misses"]["resting"] for entry in stats["matrices"].values()) == 16
    assert {row.cache for row in optimizer.explain().rows} == {"rests: no room within max_cache_bytes"}
    assert "no room" in str(cached(parameters(), max_cache_bytes=0).explain())  # before the first step too


def test_what_the_guard_lets_rest_takes_no_bytes_of_the_budget():
    small, large = parameter((16, 16)), parameter((256, 384), 1)
    optimizer = CacheMuon([small, large], max_cache_bytes=4 * 256**2)
    run(optimizer, [small, large], range(2))
    rows = [row.cache for row in optimizer.explain().rows]
    assert rows[0].startswith("rests: hits alone") and rows[1] == "transform of age 1"


def test_so_few_of_a_kind_that_they_would_not_pay_leave_their_bytes():
    # Sixteen of 128 x 128 share the calls of a probe; one alone pays more for them than its hits save.
    params = parameters([(128, 128)] * 16)
    groups = CacheMuon(params, max_cache_bytes=4 * 128**2).param_groups
    assert all(one.aside for param in params for one in Plan(groups).of(param)[0])
    assert not any(one.aside for param in params for one in Plan(CacheMuon(params).param_groups).of(param)[0])


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_a_budget_that_is_changed_counts_from_the_next_step(gate):
    params = parameters()
    optimizer = cached(params, gate=gate)
    run(optimizer, params, range(3))
    assert held(optimizer) == ALL
    params[1].grad, idle = None, params[1]  # which is not stepped, and gives up its transform all the same
    for budget in (2_000, None, 0, ALL):
        optimizer.param_groups[0]["max_cache_bytes"] = budget
        for index, param in enumerate(params):
            param.grad = None if param is idle else gradient(param.shape, index, 3)
        optimizer.step()
        assert held(optimizer) <= (ALL if budget is None else budget)
    run(optimizer, params, range(4, 6))
    assert held(optimizer) == ALL
    # No transform that was given up was ever applied: every return begins cold.
    outcomes = optimizer.cache_stats()["matrices"]
    assert outcomes["group0.param1"]["misses"]["cold"] == 2
    assert outcomes["group0.param5"]["misses"]["cold"] == 3


def test_where_groups_differ_the_smallest_budget_counts():
    params = parameters()
    groups = [{"params": params[:3], "max_cache_bytes": None}, {"params": params[3:]}]
    optimizer = cached(groups, max_cache_bytes=5_000)
    run(optimizer, params, range(2))
    assert 0 < held(optimizer) <= 5_000


def test_a_budget_is_saved_and_goes_on_bit_for_bit():
    params, twins = parameters(), parameters()
    optimizer = cached(params, max_cache_bytes=6_000, cache_dtype=torch.float16)
    run(optimizer, params, range(4))
    resumed = cached(twins)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param.data)
    for one, own in ((optimizer, params), (resumed, twins)):
        run(one, own, range(4, 9))
    assert_same(optimizer, resumed)


def test_a_smaller_budget_than_that_of_the_saved_state_gives_transforms_up():
    params, twins = parameters(), parameters()
    optimizer = cached(params)
    run(optimizer, params, range(3))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["max_cache_bytes"] = 3_000
    resumed = cached(twins)
    resumed.load_state_dict(saved)
    run(resumed, twins, [3])
    assert 0 < held(resumed) <= 3_000


def test_a_cache_that_the_guard_sets_aside_is_given_back():
    param = parameter((224, 224))
    optimizer = unclipped([param], gamma=0.0, guard=True)  # every transform is refused
    resting = []
    for step in range(12):
        run(optimizer, [param], [step])
        if optimizer.events()["group0.param0"].outcome == "resting":
            resting.append(held(optimizer))
    assert len(resting) > 4
    assert resting[1:] == [0] * (len(resting) - 1)
