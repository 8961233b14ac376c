"""State: what is saved goes on bit for bit, wherever and however it is loaded."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from contract.variants import (
    TASKS,
    assert_same,
    both_optimizers,
    cache_variants,
    caches,
    decisions,
    every_task,
    every_variant,
    exactly,
    optimizer_for,
    parameter,
    run,
    snapshot,
    train,
)
from unclipped import unclipped

from cachemuon import QUINTIC, CacheMuon, GramNS, Muon, StandardNS
from cachemuon.report.counters import COLUMNS

TRANSFORMER = TASKS["transformer"]  # attention, a tied embedding, tall and wide matrices
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(state_dict):
    return [value for entries in state_dict["state"].values() for value in entries.values()]


@every_dtype
@every_task
@every_variant
def test_a_saved_run_goes_on_bit_for_bit(make, task, dtype):
    model = task.model(dtype=dtype)
    optimizer = optimizer_for(make, model)
    train(task, model, optimizer, range(5))

    resumed_model = copy.deepcopy(model)
    resumed = optimizer_for(make, resumed_model)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(optimizer, resumed)

    losses = train(task, model, optimizer, range(5, 12))
    assert train(task, resumed_model, resumed, range(5, 12)) == losses
    assert_same(optimizer, resumed)


@cache_variants
def test_the_runs_of_these_tests_hit_and_miss_after_the_save(make):
    # Otherwise nothing above would depend on the transform.
    model = TRANSFORMER.model()
    optimizer = optimizer_for(make, model)
    train(TRANSFORMER, model, optimizer, range(5))
    before = optimizer.cache_stats()
    train(TRANSFORMER, model, optimizer, range(5, 12))
    after = optimizer.cache_stats()
    assert after["hits"] > before["hits"]
    assert after["misses"] > before["misses"]


def test_a_resumed_run_without_the_transform_differs():
    # The transform really is part of the state: left out, the next step is another one.
    params = [parameter((12, 20), i) for i in range(2)]
    optimizer = unclipped(params, lr=0.1)
    run(optimizer, params, range(6))
    others = copy.deepcopy(params)
    other = unclipped(others, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    for param in others:
        other.state[param]["transform"].mul_(0.9)
    run(optimizer, params, [6])
    run(other, others, [6])
    assert any(event.hit for event in optimizer.events().values())
    assert not all(map(torch.equal, params, others))


@every_variant
def test_copied_and_pickled_pairs_go_on_bit_for_bit(make):
    model = TRANSFORMER.model()
    optimizer = optimizer_for(make, model)
    train(TRANSFORMER, model, optimizer, range(5))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]

    losses = train(TRANSFORMER, model, optimizer, range(5, 10))
    for copied_model, copied in copies:
        assert copied.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
        assert train(TRANSFORMER, copied_model, copied, range(5, 10)) == losses
        assert_same(optimizer, copied)


@both_optimizers
def test_a_copy_tells_what_is_new_since_the_originals_last_metrics(make):
    params = [parameter((12, 20))]
    optimizer = make(params)
    run(optimizer, params, range(3))
    assert optimizer.metrics("")["calls"] == 3
    run(optimizer, params, range(3, 5))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), optimizer):
        assert other.metrics("")["calls"] == 2
        assert other.metrics("")["calls"] == 0


@every_variant
def test_every_entry_but_momentum_keeps_its_dtype(make):
    # Torch casts what it loads to the parameter's dtype; in bf16 a counter of 1001 becomes 1000.
    params = [parameter((6, 10), dtype=torch.bfloat16)]
    optimizer = make(params)
    run(optimizer, params, range(3))
    decisions(optimizer)
    optimizer.state[params[0]]["counters"][0, 0] = 1001
    resumed = make(copy.deepcopy(params))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    state = resumed.state[resumed.param_groups[0]["params"][0]]
    assert state["counters"][0, 0].item() == 1001
    dtypes = {key: value.dtype for key, value in state.items()}
    expected = {
        "momentum_buffer": torch.bfloat16,
        "counters": torch.int64,
        "residuals": torch.float64,
        "transform": optimizer.param_groups[0].get("cache_dtype") or torch.float32,
        "moments": torch.float32,
    }
    if not caches(optimizer):
        del expected["transform"]
    if optimizer.param_groups[0]["normalize"] is None:
        del expected["moments"]
    assert dtypes == expected


@every_variant
def test_loading_neither_shares_nor_changes_the_source(make):
    model = TRANSFORMER.model()
    optimizer = optimizer_for(make, model)
    train(TRANSFORMER, model, optimizer, range(3))
    saved = optimizer.state_dict()
    before, kept = copy.deepcopy(saved), snapshot(optimizer)

    loaded_model = copy.deepcopy(model)
    loaded = optimizer_for(make, loaded_model)
    loaded.load_state_dict(saved)
    pointers = {tensor.data_ptr() for tensor in tensors_of(saved)}
    assert pointers.isdisjoint(tensor.data_ptr() for tensor in tensors_of(loaded.state_dict()))

    train(TRANSFORMER, loaded_model, loaded, range(3, 6))
    assert_same(kept, optimizer)
    assert saved["param_groups"] == before["param_groups"]
    for now, then in zip(tensors_of(saved), tensors_of(before), strict=True):
        exactly(now, then)


@both_optimizers
def test_a_solver_that_differs_from_the_saved_one_stays_with_a_warning(make):
    params = [parameter((6, 10))]
    live = GramNS(restarts=(2,))
    optimizer = make(params, solver=live)
    saved = make(params, solver=GramNS(restarts=(1,))).state_dict()
    with pytest.warns(UserWarning, match=r"solver GramNS.*restarts=\(1,\).*restarts=\(2,\)") as caught:
        optimizer.load_state_dict(saved)
    assert len(caught) == 1
    assert optimizer.param_groups[0]["solver"] is live
    optimizer.load_state_dict(make(params, solver=GramNS(restarts=(2,))).state_dict())  # warnings are errors


@both_optimizers
def test_settings_that_the_saved_groups_lack_stay_as_they_are(make):
    # A state of an older version: the settings of later ones are not in it.
    w, b = parameter((6, 10)), parameter((6,), 1)

    def groups():
        own = {} if make is Muon else {"gamma": 3.0, "max_age": 7}
        return [
            {"params": [w], "max_workspace_bytes": 12_345, **own},
            {"params": [b], "use_muon": False, "betas": (0.8, 0.9)},
        ]

    optimizer = make(groups(), lr=0.5)
    run(optimizer, [w, b], range(2))
    saved = make(groups(), lr=0.25).state_dict()
    for group in saved["param_groups"]:
        for key in ("gamma", "max_age", "max_workspace_bytes", "view", "betas", "fused", "solver"):
            group.pop(key, None)
    live = copy.deepcopy(optimizer.param_groups)
    optimizer.load_state_dict(saved)
    for group, before in zip(optimizer.param_groups, live, strict=True):
        assert group.keys() == before.keys()
        for key in ("gamma", "max_age", "max_workspace_bytes", "view", "betas", "fused", "solver"):
            assert group.get(key) == before.get(key), key
    assert optimizer.param_groups[0]["lr"] == 0.25  # what the saved group has is taken
    run(optimizer, [w, b], range(2))


@both_optimizers
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_state_of_torch_muon_is_taken_over(make, nesterov):
    params = [parameter((12, 20), 0), parameter((20, 8), 1)]
    theirs = torch.optim.Muon(params, lr=0.03, momentum=0.9, nesterov=nesterov)
    run(theirs, params, range(4))
    saved = through_a_file(theirs.state_dict())

    mine = copy.deepcopy(params)
    solver = StandardNS(QUINTIC, dtype=torch.bfloat16) if make is Muon else GramNS(QUINTIC)
    make = partial(make, normalize=None)
    settings = {"lr": 0.03, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "adjust_lr_fn": None}
    optimizer = make(mine, solver=solver, **settings)
    before = dict(optimizer.param_groups[0])
    optimizer.load_state_dict(saved)  # without a warning: nothing differs
    assert {**optimizer.param_groups[0], "params": mine} == {**before, "params": mine}
    for a, b in zip(params, mine, strict=True):
        exactly(optimizer.state[b]["momentum_buffer"], theirs.state[a]["momentum_buffer"])

    start = [p.detach().clone() for p in params]
    run(theirs, params, [4])
    run(optimizer, mine, [4])
    for a, b, before in zip(params, mine, start, strict=True):
        torch.testing.assert_close(
            optimizer.state[b]["momentum_buffer"], theirs.state[a]["momentum_buffer"], rtol=1e-6, atol=1e-7
        )
        # Torch iterates in bf16, whose direction is 2 to 7% off; the two also round in another order.
        assert torch.dist(a, b) < 0.15 * torch.dist(a, before)


@both_optimizers
def test_the_two_optimizers_take_over_each_others_state(make):
    other = unclipped if make is Muon else Muon
    params = [parameter((12, 20), i) for i in range(2)]
    optimizer = other(params, solver=GramNS())
    run(optimizer, params, range(3))
    momentum = optimizer.state[params[0]]["momentum_buffer"].clone()
    switched = make(params, solver=GramNS())
    switched.load_state_dict(through_a_file(optimizer.state_dict()))
    exactly(switched.state[params[0]]["momentum_buffer"], momentum)
    run(switched, params, range(3, 6))
    stats = switched.cache_stats()
    assert stats["calls"] == 12  # goes on counting where the other one stopped
    if caches(switched):
        assert [m["misses"]["first"] for m in stats["matrices"].values()] == [1, 1]


@both_optimizers
def test_counters_and_residuals_stay_on_the_host(make):
    # Decisions are made on the host. "meta" stands for a device here.
    params = [parameter((6, 10)), parameter((3, 6, 10), 1)]
    optimizer = make(params)
    run(optimizer, params, range(3))
    elsewhere = [torch.nn.Parameter(p.detach().to("meta")) for p in params]
    loaded = make(elsewhere)
    loaded.load_state_dict(optimizer.state_dict())
    for param, source in zip(elsewhere, params, strict=True):
        state = loaded.state[param]
        for key, value in state.items():
            if key in ("counters", "residuals"):
                assert value.device.type == "cpu"
                exactly(value, optimizer.state[source][key])
            else:
                assert value.device.type == "meta"


@both_optimizers
def test_settings_changed_during_a_run_are_restored(make):
    params = [parameter((6, 10))]
    optimizer = make(params, lr=0.1)
    run(optimizer, params, range(2))
    optimizer.param_groups[0].update(lr=0.03, momentum=0.8, weight_decay=0.5)
    resumed = make(copy.deepcopy(params), lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    group = resumed.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["step"]) == (0.03, 0.8, 0.5, 2)


@both_optimizers
def test_names_survive_a_state_without_names(make):
    named = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 3, bias=False)})
    params = list(named.parameters())
    unnamed = make(params)
    run(unnamed, params, range(2))
    optimizer = make(named.named_parameters())
    optimizer.load_state_dict(unnamed.state_dict())
    assert list(optimizer.cache_stats()["matrices"]) == ["first.weight"]


@both_optimizers
def test_a_hook_may_replace_the_state_that_is_loaded(make):
    # torch's documented way to load a state of another parameter order.
    params = [parameter((6, 10), 0), parameter((8, 12), 1)]
    optimizer = make(params)
    run(optimizer, params, range(3))
    decisions(optimizer)
    optimizer.state[params[0]]["counters"][0, 0] = 77
    backwards = make(copy.deepcopy(params)[::-1])

    def reorder(_, state_dict):
        return {**state_dict, "state": {i: state_dict["state"][1 - i] for i in (0, 1)}}

    backwards.register_load_state_dict_pre_hook(reorder)
    backwards.load_state_dict(optimizer.state_dict())
    for mine, source in zip(backwards.param_groups[0]["params"], params[::-1], strict=True):
        for key, value in optimizer.state[source].items():
            exactly(backwards.state[mine][key], value)


@both_optimizers
def test_a_state_of_other_groups_is_refused_and_nothing_changes(make):
    params = [parameter((6, 10), 0), parameter((6, 10), 1)]
    optimizer = make(params)
    run(optimizer, params, range(2))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(make(params[:1]).state_dict())
    assert_same(before, optimizer)


@both_optimizers
def test_adam_state_loads_into_another_memory_layout(make):
    # The fused kernel walks over memory: moments in another layout than the weight would be mixed up.
    weight = parameter((6, 4, 3, 3))
    adam = {"use_muon": False, "lr": 0.1}
    optimizer = make([{"params": [weight], **adam}])
    run(optimizer, [weight], range(3))
    other = torch.nn.Parameter(weight.detach().clone(memory_format=torch.channels_last))
    resumed = make([{"params": [other], **adam}])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, [weight], range(3, 6))
    run(resumed, [other], range(3, 6))
    torch.testing.assert_close(other, weight, rtol=0, atol=1e-6)  # elementwise: rounding only


def test_a_fresh_optimizer_has_an_empty_state_to_save_and_load():
    model = TRANSFORMER.model()
    saved = through_a_file(optimizer_for(unclipped, model).state_dict())
    optimizer = optimizer_for(unclipped, model)
    optimizer.load_state_dict(saved)
    assert not optimizer.state
    train(TRANSFORMER, model, optimizer, range(2))
    assert {row[1] for row in decisions(optimizer)} == {1}  # each was solved once for lack of a transform


def test_a_stack_and_a_group_added_later_are_saved_too():
    stack = parameter((3, 6, 10))
    optimizer = unclipped([stack], gamma=100.0)
    run(optimizer, [stack], range(3))
    late = parameter((6, 10), 1)
    optimizer.add_param_group({"params": [late], "gamma": 0.0})
    run(optimizer, [stack, late], range(3, 5))

    copies = copy.deepcopy([stack, late])
    resumed = unclipped([{"params": copies[:1]}, {"params": copies[1:]}], gamma=50.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [group["gamma"] for group in resumed.param_groups] == [100.0, 0.0]
    run(optimizer, [stack, late], range(5, 8))
    run(resumed, copies, range(5, 8))
    assert_same(optimizer, resumed)


@pytest.mark.parametrize(
    ("entry", "spoiled"),
    [
        ("counters", lambda saved: saved[:, :-1]),
        ("residuals", lambda saved: saved[:, :1]),
        ("transform", lambda saved: saved[:-1]),
        ("momentum_buffer", lambda saved: saved[:, :-1]),
    ],
)
def test_a_load_that_is_refused_changes_nothing(entry, spoiled):
    params = [parameter((6, 10), i, torch.bfloat16) for i in range(2)]
    optimizer = unclipped(params, lr=0.1)
    run(optimizer, params, range(3))
    before = snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    saved["state"][1][entry] = spoiled(saved["state"][1][entry])
    with pytest.raises(ValueError, match=f"group0.param1: {entry} must have shape"):
        optimizer.load_state_dict(saved)
    assert_same(before, optimizer)
    twin = copy.deepcopy(optimizer)  # and it goes on as if nothing had been tried
    run(optimizer, params, range(3, 6))
    run(twin, twin.param_groups[0]["params"], range(3, 6))
    assert_same(optimizer, twin)


def put(*path, value):
    """Replace what lies there in a state, by a value, or by what a function makes of it."""

    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value(saved[path[-1]]) if callable(value) else value

    return change


def remove(*path):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


def counter(name, number):
    def change(saved):
        saved["state"][0]["counters"][0, COLUMNS.index(name)] = number

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("param_groups"), "state_dict must have a list 'param_groups' and a dict 'state'"),
        (put("state", value=[]), "state_dict must have a list 'param_groups' and a dict 'state'"),
        (put("state", 0, value=None), r"state\[0\] must be a dict, got NoneType"),
        (remove("param_groups", 0, "params"), r"param_groups\[0\] must have a list 'params'"),
        (put("param_groups", 1, value=3), r"param_groups\[1\] must have a list 'params'"),
        (
            put("param_groups", 0, "use_muon", value=False),
            r"use_muon of param_groups\[0\] .* got False, and True",
        ),
        (put("param_groups", 0, "gamma", value="x"), "gamma must be a number >= 0, got 'x'"),
        (put("param_groups", 0, "eps", value=-1.0), "eps must be a number >= 0, got -1.0"),
        (put("param_groups", 0, "step", value=-10), "step must be an integer from 0"),
        (put("param_groups", 0, "transposed", value=3), "transposed must be True or False, got 3"),
        (put("param_groups", 0, "split", value=4), "split must divide the 6 outputs"),
        (
            put("param_groups", 1, "betas", value=(0.9, 1.5)),
            r"betas must be two numbers in \[0, 1\), got \(0.9, 1.5\)",
        ),
        (remove("state", 0, "residuals"), "group0.param0: its state must have .* and lacks residuals"),
        (
            remove("state", 0, "momentum_buffer"),
            "group0.param0: its state must have .* lacks momentum_buffer",
        ),
        (put("state", 0, "counters", value=None), "group0.param0: counters must be a dense tensor, got None"),
        (
            put("state", 0, "transform", value=torch.Tensor.to_sparse),
            "transform must be a dense tensor, got one",
        ),
        (
            put("state", 0, "transform", value=lambda t: t.to("meta")),
            "transform must be a dense tensor, got one",
        ),
        (
            put("state", 0, "counters", value=torch.Tensor.double),
            "counters must be torch.int64, got torch.float64",
        ),
        (put("state", 0, "transform", value=torch.Tensor.int), "transform must be real floating point, got"),
        (counter("hit", -1), "group0.param0: the counter 'hit' must be from 0 to .*, got -1"),
        (counter("last", 99), "group0.param0: the counter 'last' must be from -1 to 7, got 99"),
        (counter("made", -7), "the counter 'made' must be from -1 to .*, got -7"),
        (counter("wait", 2**62), "the counter 'wait' must be from 0 to .*, got 4611686018427387904"),
        # The fused kernel would have read and written beyond its end.
        (put("state", 1, "exp_avg", value=lambda t: t[:1]), r"group1.param0: exp_avg must have shape \(9,\)"),
        (
            put("state", 1, "step", value=torch.zeros(3)),
            r"group1.param0: step must have shape \(1,\), got \(3,\)",
        ),
        (put("state", 1, "step", value=torch.tensor(-1.0)), "group1.param0: step must be a number >= 0"),
        (remove("state", 1, "step"), "group1.param0: its state must have step, exp_avg, .* lacks step"),
    ],
)
def test_a_damaged_state_is_named_and_changes_nothing(change, words):
    params = [parameter((6, 10)), parameter((9,), 1)]
    optimizer = unclipped([{"params": params[:1]}, {"params": params[1:], "use_muon": False}], lr=0.1)
    run(optimizer, params, range(3))
    before, saved = snapshot(optimizer), copy.deepcopy(optimizer.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert_same(before, optimizer)
    run(optimizer, params, range(3, 5))


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(
        ValueError, match="state_dict must have a list 'param_groups' and a dict 'state', got"
    ):
        unclipped([parameter((6, 10))]).load_state_dict(state)


def test_a_state_goes_on_in_another_precision():
    params = [parameter((6, 10))]
    optimizer = unclipped(params)
    run(optimizer, params, range(3))
    wider = [parameter((6, 10), dtype=torch.float64)]
    resumed = unclipped(wider)
    resumed.load_state_dict(optimizer.state_dict())
    run(resumed, wider, range(3, 6))
    assert resumed.cache_stats()["hits"] > 0


def test_a_state_without_a_transform_is_solved_anew_whenever_its_gradient_comes():
    params = [parameter((24, 32), index) for index in range(2)]
    optimizer = unclipped(params, max_age=None, gamma=1e9)
    run(optimizer, params, range(3))
    state = optimizer.state_dict()
    saved = {**state, "state": {number: dict(entries) for number, entries in state["state"].items()}}
    del saved["state"][0]["transform"]
    resumed = unclipped(params, max_age=None, gamma=1e9)
    resumed.load_state_dict(saved)
    params[0].grad = None
    run(resumed, params[1:], range(3, 5))  # the first parameter has no gradient yet
    before = params[0].detach().clone()
    run(resumed, params, range(5, 6))
    assert not torch.equal(params[0], before)
    events = resumed.events()
    assert events["group0.param0"].reason == "first" and events["group0.param1"].hit


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_complete_while_a_cache_is_suspended(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))
        return model, CacheMuon(model.parameters(), lr=0.01, gamma=2.0)

    def gradients(model, step):
        generator = torch.Generator().manual_seed(step)
        model[0].weight.grad = torch.randn(256, 256, generator=generator) * 10.0 ** torch.arange(256).div(64)
        model[1].weight.grad = torch.eye(256)

    model, optimizer = made()
    for step in range(12):
        gradients(model, step)
        optimizer.step()
    assert optimizer.events()["group0.param0"].outcome == "uncached"
    assert optimizer.events()["group0.param1"].hit
    assert "its residual was above gamma" in optimizer.explain().rows[0].cache
    named = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(named, checkpoint_id=tmp_path / "saved", no_dist=True)

    other, resumed = made()
    named = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
    dcp.load(named, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(other, resumed, model_state_dict=named["model"], optim_state_dict=named["optimizer"])
    assert [row.cache for row in resumed.explain().rows] == [row.cache for row in optimizer.explain().rows]
    for step in range(12, 50):  # the suspension ends, and a cache begins again
        for each, its in ((model, optimizer), (other, resumed)):
            gradients(each, step)
            its.step()
    assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["first"] > 1
    exactly([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])
    assert decisions(resumed) == decisions(optimizer)


@both_optimizers
def test_a_reading_that_changes_in_mid_run_is_refused(make):
    param = parameter((24, 32))
    optimizer = make([param])
    run(optimizer, [param], [0])
    optimizer.param_groups[0]["split"] = 2
    for ask in (lambda: run(optimizer, [param], [1]), optimizer.cache_stats, optimizer.explain):
        with pytest.raises(ValueError, match=r"view and split must stay as they were .* got 2 matrices"):
            ask()


def without_transforms(state):
    """A state as a whole one of a single rank is: nothing of the cache but the counters."""
    lean = {
        number: {name: value for name, value in entries.items() if not name.startswith("transform")}
        for number, entries in state["state"].items()
    }
    return {**state, "state": lean}


def test_a_transform_that_was_never_there_is_no_hit_two_checkpoints_later():
    params = [parameter((24, 32), index) for index in range(2)]
    optimizer = CacheMuon(params, lr=0.1, cache_all=True)
    run(optimizer, params, range(3))
    second = CacheMuon(params, lr=0.1, cache_all=True)
    second.load_state_dict(without_transforms(optimizer.state_dict()))
    params[0].grad = None
    run(second, params[1:], [3])  # the first parameter lies idle, and is saved like that
    third = CacheMuon(params, lr=0.1, cache_all=True)
    third.load_state_dict(through_a_file(second.state_dict()))
    before = params[0].detach().clone()
    run(third, params, [4])
    assert third.events()["group0.param0"].reason == "first"
    assert (params[0] - before).norm() > 0.1


def test_muon_takes_over_from_cachemuon_without_its_transforms():
    params = [parameter((24, 32), index) for index in range(2)]
    cached = CacheMuon(params, lr=0.1, cache_all=True)
    run(cached, params, range(3))
    fresh = Muon(params, lr=0.1, solver=GramNS())
    fresh.load_state_dict(cached.state_dict())
    run(fresh, params, [3])
    for param in params:
        assert set(fresh.state[param]) == {"momentum_buffer", "counters", "residuals", "moments"}
    assert [entry["age"] for entry in fresh.cache_stats()["matrices"].values()] == [None, None]
