"""What the state of a parameter has: counters, and a transform for each matrix that is cached."""

import copy
from functools import partial

import pytest
import torch
from contract.variants import gradient, parameter, run
from unclipped import unclipped

from cachemuon import CacheMuon
from cachemuon.report.counters import COLUMNS, HIT

SHAPES = [(24, 96), (32, 32), (16, 64), (32, 32), (3, 12, 40), (24, 96)]
cached = partial(CacheMuon, gamma=20.0, max_age=4, cache_all=True)
GATES = {"schedule": {"gate": "schedule", "max_age": 10}, "residual": {"gate": "residual"}}
both_gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


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


@both_gates
def test_a_direction_of_a_rounded_transform_is_that_of_a_solver_with_it(gate):
    param, other = parameter((24, 40)), parameter((24, 40))
    rounded = unclipped([param], lr=1.0, weight_decay=0, cache_dtype=torch.float16, **gate)
    full = unclipped([other], lr=1.0, weight_decay=0, **gate)
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


@both_gates
def test_float16_costs_no_flops_and_little_of_the_path(gate):
    ends, stats = [], []
    for dtype in (None, torch.float16):
        params = parameters()
        settings = {"lr": 0.05, "weight_decay": 0.0, "cache_dtype": dtype, **gate, "max_age": 4}
        optimizer = cached(params, **settings)
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
        ({"cache_dtype": torch.bfloat16}, "one of torch.float32, torch.float16, None, got torch.bfloat16"),
        ({"cache_dtype": "float16"}, "got 'float16'"),
        ({"cache_dtype": torch.float16, "ns_steps": 10}, "entries up to 235105"),
        ({"min_rows": -1}, "min_rows must be an integer >= 0, got -1"),
        ({"min_rows": 1.5}, "got 1.5"),
    ],
)
def test_what_cannot_be_kept_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        CacheMuon([parameter((6, 10))], **wrong)


# Which matrices have one


def test_matrices_of_few_rows_are_left_out_also_where_all_are_cached():
    params = parameters()
    optimizer = cached(params, min_rows=24)
    run(optimizer, params, range(3))
    assert [len(one) for one in transforms(optimizer)] == [1, 1, 0, 1, 0, 1]  # of 16 and of 12 rows: none
    rows = {row.name: row.cache for row in optimizer.explain().rows}
    assert rows["group0.param2"] == "not cached: fewer than min_rows=24 rows"
    assert "transform" in rows["group0.param0"]


def test_a_group_whose_rows_become_too_few_gives_up_its_transforms_at_the_next_step():
    params = parameters()
    optimizer = cached(params)
    run(optimizer, params, range(3))
    assert held(optimizer) == ALL
    params[1].grad = None  # it is not stepped, and gives up its transform all the same
    optimizer.param_groups[0]["min_rows"] = 33
    for index, param in enumerate(params):
        param.grad = None if index == 1 else gradient(param.shape, index, 3)
    optimizer.step()
    assert held(optimizer) == 0
    optimizer.param_groups[0]["min_rows"] = 0
    run(optimizer, params, range(4, 6))
    assert held(optimizer) == ALL
    firsts = [entry["misses"]["first"] for entry in optimizer.cache_stats()["matrices"].values()]
    assert firsts == [2] * len(firsts)  # none goes on with a transform of before


@both_gates
def test_a_matrix_is_never_cached_that_the_settings_leave_out(gate):
    params = parameters()
    run(everything := cached(params, **gate), params, range(2))
    assert held(everything) == ALL
    for left_out in ({"max_age": 0}, {"min_rows": 33}, {"cache_all": False}):
        params = parameters()
        optimizer = cached(params, **{**gate, **left_out})
        run(optimizer, params, range(2))
        assert held(optimizer) == 0
        stats = optimizer.cache_stats()
        assert stats["calls"] == sum(e["misses"]["uncached"] for e in stats["matrices"].values()) == 16


# Counters


def test_the_counters_of_a_parameter_are_those_that_the_statistics_tell():
    params = parameters()
    optimizer = cached(params)
    for step in range(5):
        params[3].grad = None
        for index, param in enumerate(params):
            param.grad = gradient(param.shape, index, step) if index != 3 or step % 2 else None
        optimizer.step()
    stats = optimizer.cache_stats()["matrices"]
    assert [entry["calls"] for entry in stats.values()] == [5, 5, 5, 2, 5, 5, 5, 5]
    rows = [row for param in params for row in optimizer.state[param]["counters"].tolist()]
    columns = ("hits", "misses")
    for entry, row in zip(stats.values(), rows, strict=True):
        found = dict(zip(COLUMNS, row, strict=True))
        assert [found["hit"], {name: found[name] for name in entry["misses"]}] == [entry[c] for c in columns]


def test_counters_of_a_deep_copy_and_of_a_loaded_state_are_its_own():
    params = parameters()
    optimizer, other = cached(params), cached(parameters())
    run(optimizer, params, range(3))
    twin = copy.deepcopy(optimizer)
    other.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(3, 5))
    assert [one.cache_stats()["calls"] for one in (optimizer, twin, other)] == [40, 24, 24]


def test_counters_that_are_changed_by_hand_count():
    params = parameters([(24, 40)])
    optimizer = cached(params, max_age=20)
    run(optimizer, params, range(4))
    optimizer.cache_stats()  # before it the fourth step is still to be counted
    optimizer.state[params[0]]["counters"][0, HIT] = 70
    run(optimizer, params, [4])
    assert optimizer.cache_stats()["hits"] == 71
