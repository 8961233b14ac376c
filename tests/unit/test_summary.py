"""What an optimizer tells of itself: metrics for a log, and an explanation for people."""

import copy
import math

import pytest
import torch
from torch import nn

from cachemuon import CacheMuon, Muon, param_groups

NAMES = [
    *("calls", "hit_rate", "refreshed", "rejected", "bounded", "uncached", "non_finite"),
    *("flops", "flops_saved"),
    *("last/hit_rate", "last/residual", "last/residual_max", "last/age"),
    *("lr", "lr_adam"),
]


def network(width=128, blocks=4):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width)]
    for _ in range(blocks):
        layers += [nn.GELU(), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def trained(model, optimizer, steps, begin=0):
    target = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    for step in range(begin, begin + steps):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(1)).backward()
        optimizer.step()


def shares(told):
    return {name.removeprefix("muon/"): value for name, value in told.items()}


@pytest.mark.parametrize("gate", ["schedule", "residual"])
def test_metrics_are_since_the_last_call_and_add_up(gate):
    model = network()
    optimizer = CacheMuon(param_groups(model), lr=0.02, gate=gate)
    first = optimizer.metrics()
    assert list(first) == [f"muon/{name}" for name in NAMES] and first["muon/calls"] == 0
    assert math.isnan(first["muon/hit_rate"]) and math.isnan(first["muon/last/age"])
    parts = []
    for begin, steps in ((0, 3), (3, 11), (14, 5)):
        trained(model, optimizer, steps, begin)
        parts.append(shares(optimizer.metrics()))
        told = parts[-1]
        assert told["calls"] == 9 * steps
        whole = told["hit_rate"] + told["refreshed"] + told["bounded"] + told["uncached"]
        assert whole == pytest.approx(1)
        assert 0 <= told["rejected"] <= told["refreshed"] and told["non_finite"] == 0
    stats = optimizer.cache_stats()
    assert sum(told["calls"] for told in parts) == stats["calls"]
    assert sum(told["calls"] * told["hit_rate"] for told in parts) == pytest.approx(stats["hits"])
    assert sum(told["flops"] for told in parts) == pytest.approx(stats["flops"])
    events = optimizer.events().values()
    assert parts[-1]["last/hit_rate"] == sum(event.hit for event in events) / len(events)
    residuals = [event.residual for event in events if not math.isnan(event.residual)]
    assert parts[-1]["last/residual_max"] == max(residuals)


def test_metrics_begin_anew_where_a_state_is_loaded():
    model = network()
    optimizer = CacheMuon(param_groups(model), lr=0.02)
    trained(model, optimizer, 4)
    other = CacheMuon(param_groups(model), lr=0.02)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.metrics()["muon/calls"] == 0
    trained(model, other, 2, begin=4)
    assert other.metrics()["muon/calls"] == 18


def test_metrics_count_bad_gradients_and_fresh_solves():
    W = nn.Parameter(torch.zeros(16, 24))
    optimizer = Muon([W], lr=0.1)
    W.grad = torch.ones(16, 24)
    optimizer.step()
    W.grad = torch.full((16, 24), math.nan)
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        optimizer.step()
        told = shares(optimizer.metrics())
    assert told["calls"] == 2 and told["non_finite"] == 0.5 and told["hit_rate"] == 0
    assert told["flops_saved"] == 0


def test_twenty_steps_of_a_small_model_show_hits():
    model = network(width=128)
    optimizer = CacheMuon(param_groups(model), lr=0.02)
    trained(model, optimizer, 20)
    told = shares(optimizer.metrics())
    assert told["hit_rate"] > 0.6 and told["flops_saved"] > 0.5


def test_an_explanation_has_every_parameter_and_says_why_there_is_no_cache():
    model = network()
    optimizer = CacheMuon([*param_groups(model)], lr=0.02, gamma=100.0)  # at 20 its third step is bounded
    rows = {row.name: row for row in optimizer.explain().rows}
    assert rows.keys() == dict(model.named_parameters()).keys()
    assert rows["0.bias"].to == "adam" and rows["0.bias"].solve == 0
    assert rows["2.weight"].to == "muon" and rows["2.weight"].cache == "no transform yet"
    assert rows["0.weight"].cache == "not cached: a fresh solve is faster"
    assert math.isnan(rows["2.weight"].hits)
    trained(model, optimizer, 5)
    rows = {row.name: row for row in optimizer.explain().rows}
    stats = optimizer.cache_stats()["matrices"]
    assert rows["2.weight"].hits == stats["2.weight"]["hits"] / 5
    assert 0.3 < rows["2.weight"].saved < 0.8 and rows["0.weight"].saved == 0
    assert rows["2.weight"].cache == f"transform of age {stats['2.weight']['age']}"
    lines = str(optimizer.explain()).splitlines()
    assert len(lines) == 1 + len(rows) and lines[0].split()[:4] == ["name", "shape", "to", "why"]


@pytest.mark.parametrize(
    ("shape", "settings", "cache"),
    [
        ((64, 96), {}, "not cached: a fresh solve is faster"),
        ((16, 64), {"clip": 0.0}, "not cached: too small to pay (it would save 5% of a step)"),
        ((256, 384), {"max_age": 0}, "not cached: max_age=0"),
        ((256, 384), {"min_rows": 257}, "not cached: fewer than min_rows=257 rows"),
        ((256, 384), {}, "no transform yet"),
        ((64, 96), {"cache_all": True}, "no transform yet"),
    ],
)
def test_each_reason_for_no_cache_is_given_before_the_first_step(shape, settings, cache):
    W = nn.Parameter(torch.zeros(shape))
    (row,) = CacheMuon([("W", W)], **settings).explain().rows
    assert row.cache == cache


def test_an_explanation_names_the_step_up_to_which_a_cache_is_suspended():
    W = nn.Parameter(torch.zeros(192, 256))
    optimizer = CacheMuon([("W", W)], lr=0.1, gamma=1e-6)
    for seed in range(34):
        W.grad = torch.randn(192, 256, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        (row,) = optimizer.explain().rows
        if 2 <= seed + 1 < 34:  # the second step is bounded
            assert row.cache == "suspended until step 34: its residual was above gamma"
    assert row.hits == 0 and row.cache == "no transform yet"


def test_an_explanation_of_a_stack_and_of_muon():
    W = nn.Parameter(torch.zeros(3, 16, 24))
    (row,) = Muon([("W", W)]).explain().rows
    assert row.why == "as given, 3 matrices" and row.cache == "solved at every step"


def test_that_no_matrix_is_cached_is_logged_once(caplog):
    W = nn.Parameter(torch.zeros(8, 64))  # as a LoRA factor
    W.grad = torch.ones(8, 64)
    with caplog.at_level("INFO", logger="cachemuon"):
        optimizer = CacheMuon([W])
        optimizer.step()
        optimizer.step()
        assert [record.message for record in caplog.records] == [
            "no matrix is cached; print(optimizer.explain()) says why for each"
        ]
        caplog.clear()
        for others in (CacheMuon([W], cache_all=True), CacheMuon([W, nn.Parameter(torch.zeros(256, 384))])):
            others.step()
        Muon([W]).step()
    assert not caplog.records


def test_two_parameters_of_one_name_are_told_apart():
    params = [nn.Parameter(torch.zeros(8, 12)) for _ in range(2)]
    optimizer = Muon([{"params": [("weight", param)]} for param in params])
    for number in range(3):
        for param in params[: 1 if number else 2]:
            param.grad = torch.eye(8, 12)
        optimizer.step()
        params[1].grad = None
    calls = {name: entry["calls"] for name, entry in optimizer.cache_stats()["matrices"].items()}
    assert calls == {"weight": 3, "group1.param0": 1}
    assert optimizer.metrics()["muon/calls"] == 4 and optimizer.metrics()["muon/calls"] == 0
    assert set(optimizer.events()) == set(calls)
