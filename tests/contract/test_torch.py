"""What torch's own tests ask of an optimizer: hooks, extra entries, kinds of numbers, schedulers, copies."""

import copy
import logging
import pickle
import warnings
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from contract.test_state import through_a_file
from contract.variants import (
    TASKS,
    assert_same,
    both_optimizers,
    caches,
    decisions,
    every_variant,
    exactly,
    gradient,
    optimizer_for,
    parameter,
    run,
    snapshot,
    train,
)
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from cachemuon import CacheMuon, GramNS, Muon, param_groups

SHAPES = [(12, 20), (3, 12, 20), (9,)]


def made(make, **settings):
    """An optimizer of two matrix parameters and a vector, and these."""
    params = [parameter(shape, i) for i, shape in enumerate(SHAPES)]
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False, "lr": 0.01}]
    return make(groups, **{"lr": 0.1, **settings}), params


# Hooks


@both_optimizers
def test_hooks_around_a_step_are_called_in_torchs_order(make):
    optimizer, params = made(make)
    called = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("every pre")),
        register_optimizer_step_post_hook(lambda *_: called.append("every post")),
        optimizer.register_step_pre_hook(lambda *_: called.append("pre")),
        optimizer.register_step_post_hook(lambda *_: called.append("post")),
    ]
    try:
        run(optimizer, params, range(2))
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["every pre", "pre", "post", "every post"] * 2
    run(optimizer, params, range(2, 3))
    assert len(called) == 8


@both_optimizers
def test_a_hook_may_change_the_arguments_of_a_step(make):
    optimizer, params = made(make)
    optimizer.register_step_pre_hook(lambda its, args, kwargs: ((its, lambda: 7.0), {}))
    for param in params:
        param.grad = torch.ones_like(param)
    assert optimizer.step() == 7.0


@both_optimizers
def test_a_hook_before_a_state_is_made_may_leave_an_entry_in_it(make):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    optimizer.register_state_dict_pre_hook(lambda its: its.state.update(test=1))
    assert optimizer.state_dict()["state"]["test"] == 1
    run(optimizer, params, range(2, 4))


@both_optimizers
def test_hooks_after_a_state_is_made_see_what_is_saved(make):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    seen = []

    def note(its, packed):
        assert its is optimizer
        seen.append(packed["param_groups"][0]["solver"])
        packed["note"] = 1

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_state_dict_post_hook(note, prepend=True)
    packed = through_a_file(optimizer.state_dict())
    assert packed["note"] == 1
    assert seen == [repr(optimizer.param_groups[0]["solver"])] * 2
    optimizer.load_state_dict(packed)


@pytest.mark.parametrize("other", [{"wrapped": 1}, {"param_groups": "none of ours"}, [1, 2], 3], ids=str)
@both_optimizers
def test_what_a_hook_makes_of_a_state_is_returned_as_it_is(make, other):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    optimizer.register_state_dict_post_hook(lambda its, packed: other)
    assert optimizer.state_dict() is other


@both_optimizers
def test_a_hook_may_unwrap_the_state_that_is_loaded(make):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    saved = {"optimizer": optimizer.state_dict()}
    other, others = made(make)
    other.register_load_state_dict_pre_hook(lambda its, state: state["optimizer"])
    other.load_state_dict(saved)
    for param, copied in zip(params, others, strict=True):
        copied.data.copy_(param.data)
    assert_same(optimizer, other)


@pytest.mark.parametrize("prepend", [False, True])
@both_optimizers
def test_hooks_before_a_load_run_in_torchs_order(make, prepend):
    optimizer, _ = made(make)
    state = optimizer.state_dict()

    def in_place(its, state):
        state["param_groups"][0]["lr"] = 0.25

    def replaced(its, state):
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.5
        return state

    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.register_load_state_dict_pre_hook(replaced, prepend=prepend)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == (0.25 if prepend else 0.5)


@pytest.mark.parametrize("prepend", [False, True])
@every_variant
def test_a_hook_after_a_load_sees_a_complete_optimizer(make, prepend):
    optimizer, params = made(make)
    run(optimizer, params, range(4))
    saved = through_a_file(optimizer.state_dict())
    plain, others = made(make)
    hooked, twins = made(make)
    solver, group = hooked.param_groups[0]["solver"], hooked.param_groups[0]["process_group"]
    seen = []

    def look(its):
        assert its.param_groups[0]["solver"] is solver
        assert its.param_groups[0]["process_group"] is group
        seen.append((its.cache_stats()["calls"], its.state[twins[0]]["momentum_buffer"].clone()))
        its.state["loaded"] = True
        run(its, twins, range(4, 5))

    hooked.register_load_state_dict_post_hook(look, prepend=prepend)
    for each, its in ((plain, others), (hooked, twins)):
        for param, source in zip(its, params, strict=True):
            param.data.copy_(source.data)
        each.load_state_dict(saved)
    run(plain, others, range(4, 5))
    ((calls, momentum),) = seen
    assert calls == 4 * 4
    exactly(momentum, optimizer.state[params[0]]["momentum_buffer"])
    assert hooked.state.pop("loaded")
    assert_same(plain, hooked)
    for each, its in ((plain, others), (hooked, twins)):
        run(each, its, range(5, 8))
    assert_same(plain, hooked)


def test_a_transform_that_a_hook_replaces_after_a_load_stays():
    make = partial(CacheMuon, cache_all=True, max_age=100)
    optimizer, params = made(make)
    run(optimizer, params, range(3))
    other, others = made(make)

    def replace(its):
        its.state[others[0]]["transform"] = torch.eye(12)

    other.register_load_state_dict_post_hook(replace)
    other.load_state_dict(optimizer.state_dict())
    exactly(other.state[others[0]]["transform"], torch.eye(12))
    run(other, others, range(3, 4))
    assert other.events()["group0.param0"].hit
    exactly(other.state[others[0]]["transform"], torch.eye(12))


@both_optimizers
def test_a_load_that_a_hook_refuses_changes_nothing(make):
    optimizer, params = made(make)
    run(optimizer, params, range(3))
    saved = optimizer.state_dict()
    other, others = made(make)
    run(other, others, range(2))
    other.metrics()
    run(other, others, range(2, 3))
    before = snapshot(other)

    def refuse(its):
        raise RuntimeError("not this one")

    handle = other.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        other.load_state_dict(saved)
    assert_same(before, other)
    assert other.metrics("")["calls"] == 4  # since the metrics() above
    handle.remove()
    run(other, others, range(3, 5))


# Entries that are not of a parameter


@every_variant
def test_other_entries_of_the_state_are_saved_and_loaded_and_change_nothing(make):
    optimizer, params = made(make)
    twin, twins = made(make)
    optimizer.state["epoch"] = 3
    for each, its in ((optimizer, params), (twin, twins)):
        run(each, its, range(4))
    optimizer.state["seen"] = {"tokens": torch.tensor(7)}
    saved = through_a_file(optimizer.state_dict())
    assert saved["state"]["epoch"] == 3
    resumed, others = made(make)
    for param, source in zip(others, params, strict=True):
        param.data.copy_(source.data)
    resumed.load_state_dict(saved)
    assert resumed.state["epoch"] == 3 and resumed.state["seen"] == {"tokens": torch.tensor(7)}
    for each, its in ((optimizer, params), (twin, twins), (resumed, others)):
        run(each, its, range(4, 8))
    for each in (resumed, copy.deepcopy(resumed), pickle.loads(pickle.dumps(resumed))):
        assert each.state["epoch"] == 3
    assert_same(optimizer, twin)
    assert_same(optimizer, resumed)


@both_optimizers
def test_other_entries_of_another_optimizers_state_are_loaded_too(make):
    params = [parameter((12, 20), i) for i in range(2)]
    theirs = torch.optim.Muon(params, lr=0.1, weight_decay=0.1)
    theirs.state["epoch"] = 3
    run(theirs, params, range(2))
    settings = {"solver": GramNS()} if make is not Muon else {}
    optimizer = make(params, lr=0.1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that differ
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state["epoch"] == 3
    exactly(optimizer.state[params[0]]["momentum_buffer"], theirs.state[params[0]]["momentum_buffer"])


@both_optimizers
def test_an_entry_that_the_user_adds_to_a_parameters_state_is_kept(make):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    optimizer.state[params[0]]["mask"] = torch.ones(12, 20)
    optimizer.state[params[2]]["level"] = 3
    saved = through_a_file(optimizer.state_dict())
    resumed, others = made(make)
    resumed.load_state_dict(saved)
    exactly(resumed.state[others[0]]["mask"], torch.ones(12, 20))
    assert resumed.state[others[2]]["level"] == 3
    run(resumed, others, range(2, 4))


# Numbers of any kind


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor], ids=["float32", "float64", "tensor"])
@every_variant
def test_settings_may_be_numbers_of_numpy_and_tensors(make, kind):
    values = {"lr": 2.0**-4, "weight_decay": 2.0**-3, "momentum": 1 - 2.0**-4}  # exact in float32
    adam = {"lr": 2.0**-6, "weight_decay": 2.0**-3, "betas": (1 - 2.0**-3, 1 - 2.0**-7), "eps": 2.0**-20}
    runs = []
    for of in (float, kind):
        params = [parameter(shape, i) for i, shape in enumerate(SHAPES)]
        group = {key: tuple(map(of, x)) if key == "betas" else of(x) for key, x in adam.items()}
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False, **group}]
        optimizer = make(groups, eps=of(2.0**-20), **{key: of(value) for key, value in values.items()})
        run(optimizer, params, range(4))
        runs.append((optimizer, params))
    (plain, expected), (optimizer, params) = runs
    exactly(params, expected)
    assert decisions(optimizer) == decisions(plain)

    saved = through_a_file(optimizer.state_dict())
    resumed = make([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
    resumed.load_state_dict(saved)
    for key, value in values.items():
        assert resumed.param_groups[0][key] == value
    for key, value in adam.items():
        assert resumed.param_groups[1][key] == value
    run(resumed, params, range(4, 7))
    run(plain, expected, range(4, 7))
    exactly(params, expected)


@pytest.mark.parametrize("kind", [np.float32, torch.tensor], ids=["float32", "tensor"])
@both_optimizers
def test_a_scheduler_may_set_numbers_of_any_kind(make, kind):
    optimizer, params = made(make, lr=0.25)
    by_hand, twins = made(make, lr=0.25)
    optimizer.param_groups[1]["lr"] = by_hand.param_groups[1]["lr"] = 2.0**-6
    scheduler = torchs.LambdaLR(optimizer, lambda step: kind(0.5**step))
    for step in range(4):
        for group, lr in zip(by_hand.param_groups, (0.25, 2.0**-6), strict=True):
            group["lr"] = lr * 0.5**step
        run(optimizer, params, [step])
        run(by_hand, twins, [step])
        scheduler.step()
        for group in optimizer.param_groups:
            group["weight_decay"] = kind(0.125)
        for group in by_hand.param_groups:
            group["weight_decay"] = 0.125
    exactly(params, twins)
    through_a_file(optimizer.state_dict())


@both_optimizers
def test_adams_step_may_be_a_plain_number_in_a_state(make):
    for fused in (True, False):
        param, twin = parameter((9,)), parameter((9,))
        group = {"use_muon": False, "lr": 0.01, "fused": fused}
        optimizer, other = make([{"params": [param], **group}]), make([{"params": [twin], **group}])
        run(optimizer, [param], range(3))
        twin.data.copy_(param.data)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"] = saved["state"][0]["step"].item()
        other.load_state_dict(saved)
        run(optimizer, [param], range(3, 6))
        run(other, [twin], range(3, 6))
        assert other.state[twin]["step"] == torch.tensor(6.0)
        exactly(param, twin)


# A step that torch takes for itself


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@every_variant
def test_a_state_that_is_asked_for_before_the_first_step_changes_nothing(make):
    # torch steps all parameters with gradients of zero and a learning rate of zero.
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def build():
        model = TASKS["experts"].model()
        return model, make(param_groups(model), lr=0.02)

    (model, optimizer), (other, twin) = build(), build()
    wrapped = nn.ParameterDict({"bias": nn.Parameter(model.head.bias.detach().clone())})
    adam = torch.optim.AdamW(wrapped.parameters(), weight_decay=1e-4)
    get_optimizer_state_dict(model, optimizer)
    get_optimizer_state_dict(wrapped, adam)
    exactly([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()])
    assert all(event.outcome != "hit" for event in optimizer.events().values())
    if caches(optimizer):
        assert {entry["age"] for entry in optimizer.cache_stats()["matrices"].values()} == {None}

    twin.param_groups[0]["step"] = 1  # the schedule goes by the number of the step
    for step in range(6):
        train(TASKS["experts"], model, optimizer, [step])
        for param, its in zip(other.parameters(), model.parameters(), strict=True):
            param.grad = its.grad.clone()
        wrapped["bias"].grad = model.head.bias.grad.clone()
        twin.step()
        adam.step()
        for group, same in zip(optimizer.param_groups, twin.param_groups, strict=True):
            if group["use_muon"]:
                exactly([p.detach() for p in group["params"]], [p.detach() for p in same["params"]])
    # Adam counts that step, as torch's own does.
    torch.testing.assert_close(model.head.bias, wrapped["bias"], rtol=0, atol=1e-6)
    calls = {name: entry["calls"] for name, entry in twin.cache_stats()["matrices"].items()}
    assert optimizer.cache_stats()["calls"] == sum(calls.values()) + len(calls)


# Nothing warns where all is well


def test_nothing_warns_when_no_cache_pays(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "cachemuon"):
        warnings.simplefilter("error")
        model = TASKS["transformer"].model()
        optimizer = optimizer_for(CacheMuon, model)
        train(TASKS["transformer"], model, optimizer, range(3))
        saved = through_a_file(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        assert optimizer.cache_stats()["hits"] == 0
        assert "a fresh solve is faster" in str(optimizer.explain())
        optimizer.metrics()
        pickle.loads(pickle.dumps(optimizer)).events()
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert "no matrix is cached" in caplog.text


# Schedulers

SCHEDULERS = {
    "LambdaLR": lambda its: torchs.LambdaLR(its, lambda step: 0.9**step),
    "MultiplicativeLR": lambda its: torchs.MultiplicativeLR(its, lambda step: 0.95),
    "StepLR": lambda its: torchs.StepLR(its, step_size=3, gamma=0.5),
    "MultiStepLR": lambda its: torchs.MultiStepLR(its, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda its: torchs.ConstantLR(its, factor=0.5, total_iters=4),
    "LinearLR": lambda its: torchs.LinearLR(its, start_factor=0.1, total_iters=5),
    "ExponentialLR": lambda its: torchs.ExponentialLR(its, gamma=0.9),
    "SequentialLR": lambda its: torchs.SequentialLR(
        its, [torchs.LinearLR(its, 0.1, total_iters=3), torchs.ExponentialLR(its, 0.9)], milestones=[3]
    ),
    "PolynomialLR": lambda its: torchs.PolynomialLR(its, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda its: torchs.CosineAnnealingLR(its, T_max=8),
    "ChainedScheduler": lambda its: torchs.ChainedScheduler(
        [torchs.LinearLR(its, 0.1, total_iters=3), torchs.ExponentialLR(its, 0.9)], optimizer=its
    ),
    "ReduceLROnPlateau": lambda its: torchs.ReduceLROnPlateau(its, patience=0),
    "CyclicLR": lambda its: torchs.CyclicLR(its, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda its: torchs.CosineAnnealingWarmRestarts(its, T_0=3),
    "OneCycleLR": lambda its: torchs.OneCycleLR(its, max_lr=0.1, total_steps=10),
    "SWALR": lambda its: SWALR(its, swa_lr=0.01, anneal_epochs=4),
}


def next_lr(scheduler, step):
    if isinstance(scheduler, torchs.ReduceLROnPlateau):
        scheduler.step(1.0)  # never better
    else:
        scheduler.step()


@pytest.mark.filterwarnings("ignore:all parameter groups:RuntimeWarning")  # CyclicLR and OneCycleLR
@pytest.mark.parametrize("name", SCHEDULERS)
@both_optimizers
def test_every_scheduler_of_torch_is_followed_and_resumes(make, name):
    def start():
        optimizer, params = made(make)
        return optimizer, params, SCHEDULERS[name](optimizer)

    def steps(optimizer, params, scheduler, which):
        lrs = []
        for step in which:
            lrs.append([group["lr"] for group in optimizer.param_groups])
            run(optimizer, params, [step])
            next_lr(scheduler, step)
        return lrs

    # The same numbers as of an optimizer of torch.
    reference = torch.optim.SGD(
        [{"params": [parameter((9,))], "lr": lr, "momentum": 0.9} for lr in (0.1, 0.01)], lr=0.1
    )
    expected, theirs = [], SCHEDULERS[name](reference)
    for step in range(8):
        expected.append([group["lr"] for group in reference.param_groups])
        reference.step()
        next_lr(theirs, step)

    optimizer, params, scheduler = start()
    before = [param.detach().clone() for param in params]
    first = steps(optimizer, params, scheduler, range(4))
    assert first == expected[:4]
    assert all(
        param.isfinite().all() and not torch.equal(param, old)
        for param, old in zip(params, before, strict=True)
    )

    saved = [through_a_file(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())]
    resumed, others, again = start()
    for param, source in zip(others, params, strict=True):
        param.data.copy_(source.data)
    again.load_state_dict(saved[1])  # first, as torch asks
    resumed.load_state_dict(saved[0])
    assert steps(optimizer, params, scheduler, range(4, 8)) == expected[4:]
    assert steps(resumed, others, again, range(4, 8)) == expected[4:]
    assert_same(optimizer, resumed)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda its: torchs.OneCycleLR(its, max_lr=0.1, total_steps=10, base_momentum=0.5, max_momentum=0.9),
        lambda its: torchs.CyclicLR(
            its, base_lr=0.01, max_lr=0.1, step_size_up=3, base_momentum=0.5, max_momentum=0.9
        ),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
@pytest.mark.filterwarnings("ignore:all parameter groups:RuntimeWarning")
@both_optimizers
def test_a_momentum_that_a_scheduler_moves_is_beta1_of_adam(make, schedule):
    optimizer, params = made(make)
    twin = parameter(SHAPES[2], 2)
    reference = torch.optim.AdamW([twin], lr=0.01, weight_decay=1e-4)
    scheduler, theirs = schedule(optimizer), schedule(reference)
    moved = []
    for step in range(8):
        run(optimizer, params, [step])
        twin.grad = params[2].grad.clone()
        reference.step()
        moved.append(optimizer.param_groups[1]["momentum"])
        assert moved[-1] == optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["betas"][0]
        torch.testing.assert_close(params[2], twin, rtol=0, atol=1e-6)  # another order of float32
        scheduler.step()
        theirs.step()
    assert max(moved) - min(moved) > 0.3
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


@both_optimizers
def test_a_momentum_out_of_range_is_refused_in_an_adam_group(make):
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.5"):
        make([{"params": [parameter((9,))], "use_muon": False, "momentum": 1.5}])


# State that the user clears, moves or replaces


@every_variant
def test_a_state_that_is_cleared_begins_anew(make):
    optimizer, params = made(make)
    run(optimizer, params, range(6))
    optimizer.metrics()
    for clear in (lambda: optimizer.state.clear(), lambda: setattr(optimizer, "state", defaultdict(dict))):
        fresh, others = made(make)
        for param, source in zip(others, params, strict=True):
            param.data.copy_(source.data)
        fresh.param_groups[0]["step"] = optimizer.param_groups[0]["step"]
        clear()
        before = [param.detach().clone() for param in params]
        run(optimizer, params, range(6, 10))
        assert optimizer.metrics("")["calls"] == 4 * 4
        run(fresh, others, range(6, 10))
        assert_same(optimizer, fresh)
        assert not any(map(torch.equal, params, before))
        if caches(optimizer):
            assert {m["misses"]["first"] for m in optimizer.cache_stats()["matrices"].values()} == {1}


@every_variant
def test_the_state_of_one_parameter_that_is_cleared_begins_anew(make):
    # Between two steps, so that nothing else tells of it.
    optimizer, params = made(make)
    run(optimizer, params, range(6))
    del optimizer.state[params[0]]
    before = params[0].detach().clone()
    run(optimizer, params, range(6, 7))
    assert (params[0] - before).norm() > 0.05
    entry = optimizer.cache_stats()["matrices"]["group0.param0"]
    assert entry["calls"] == 1
    assert entry["misses"]["first"] == (1 if caches(optimizer) else 0)
    assert optimizer.cache_stats()["calls"] == 1 + 3 * 7


def moved_in_place(state):
    for entries in state.values():
        for key, value in entries.items():
            entries[key] = value.clone()


def moved_apart(state):
    for param, entries in list(state.items()):
        state[param] = {key: value.clone() for key, value in entries.items()}


def widened(state):
    for entries in state.values():
        for key, value in entries.items():
            entries[key] = value.double() if value.is_floating_point() else value


@pytest.mark.parametrize("move", [moved_in_place, moved_apart, widened])
@every_variant
def test_a_state_whose_tensors_are_replaced_goes_on(make, move):
    # As Lightning does, which moves them from one device to another, one by one.
    (optimizer, params), (twin, twins) = made(make), made(make)
    for each, its in ((optimizer, params), (twin, twins)):
        run(each, its, range(5))
    matrices = {param: optimizer.state[param] for param in params[:2]}
    move(matrices if move is widened else optimizer.state)
    optimizer.state.update(matrices if move is widened else {})
    for each, its in ((optimizer, params), (twin, twins)):
        run(each, its, range(5, 9))
    exactly(params, twins)
    assert decisions(optimizer) == decisions(twin)
    assert optimizer.cache_stats()["matrices"].keys() == twin.cache_stats()["matrices"].keys()
    for name, entry in twin.cache_stats()["matrices"].items():
        exactly(optimizer.cache_stats()["matrices"][name]["residual"], entry["residual"])
    if move is not widened:
        assert_same(optimizer, twin)


# Copies, names, averages


@every_variant
def test_copies_have_all_public_attributes(make):
    optimizer, params = made(make)
    run(optimizer, params, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        public, its = ({key for key in vars(each) if key[0] != "_"} for each in (optimizer, other))
        assert its == public
        assert type(other) is type(optimizer)
        assert str(other).startswith(type(optimizer).__name__)


@both_optimizers
def test_a_subclass_steps_and_pickles(make):
    optimizer, params = made(Derived if make is not Muon else DerivedFromMuon)
    run(optimizer, params, range(3))
    assert optimizer.called == 3
    other, others = pickle.loads(pickle.dumps((optimizer, params)))
    run(optimizer, params, range(3, 5))
    run(other, others, range(3, 5))
    assert_same(optimizer, other)


class Derived(CacheMuon):
    called = 0

    def step(self, closure=None):
        self.called += 1
        return super().step(closure)


class DerivedFromMuon(Muon):
    called = 0

    def step(self, closure=None):
        self.called += 1
        return super().step(closure)


@pytest.mark.parametrize("named", [(False, True), (True, False), (True, True)])
@both_optimizers
def test_names_are_kept_by_either_side_of_a_load(make, named):
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(3, 5, bias=False)})
    first, second = (make(model.named_parameters() if each else model.parameters()) for each in named)
    run(first, list(model.parameters()), range(2))
    second.load_state_dict(through_a_file(first.state_dict()))
    run(second, list(model.parameters()), range(2, 3))
    assert second.state_dict()["param_groups"][0]["param_names"] == ["a.weight", "b.weight"]
    assert second.cache_stats()["matrices"].keys() == {"a.weight", "b.weight"}


@both_optimizers
def test_a_state_is_the_same_for_equal_parameters_and_through_a_file(make):
    (optimizer, params), (twin, twins) = made(make), made(make)
    for each, its in ((optimizer, params), (twin, twins)):
        run(each, its, range(3))
    states = [optimizer.state_dict(), twin.state_dict(), through_a_file(optimizer.state_dict())]
    for other in states[1:]:
        assert other["param_groups"] == states[0]["param_groups"]
        exactly(other["state"], states[0]["state"])
    twin.param_groups.extend(twin.param_groups)  # repeated parameters have the same numbers
    assert twin.state_dict()["param_groups"][-1] == states[0]["param_groups"][-1]


@both_optimizers
def test_parameters_that_torch_refuses_are_refused(make):
    w = parameter((4, 6))
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [w]}, {"params": [w]}])
    with pytest.raises(ValueError, match="non-leaf"):
        make([w * 2])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        make(w)


@both_optimizers
def test_a_step_without_gradients_or_with_a_frozen_parameter(make):
    frozen, w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), parameter((4, 6))
    before = frozen.clone()
    optimizer = make([frozen, w])
    assert optimizer.step(lambda: 1.0) == 1.0
    w.grad = gradient((4, 6))
    optimizer.step()
    exactly(frozen, before)
    assert optimizer.cache_stats()["matrices"].keys() == {"group0.param1"}


@both_optimizers
def test_weights_are_averaged_as_torch_averages_them(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4))
    averaged = AveragedModel(model)
    optimizer = make(param_groups(model, adam={"lr": 1e-2}), lr=0.02)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sums = [torch.zeros_like(param) for param in model.parameters()]
    for _ in range(5):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        for total, param in zip(sums, model.parameters(), strict=True):
            total += param.detach()
    for total, param in zip(sums, averaged.module.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), total / 5, rtol=1e-5, atol=1e-6)
    update_bn([images], averaged)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@both_optimizers
def test_gradients_are_clipped_and_scaled_as_torch_does(make):
    runs = []
    for scaled in (False, True):
        optimizer, params = made(make)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        for step in range(4):
            for i, param in enumerate(params):
                param.grad = gradient(param.shape, i, step) * scaler.get_scale()
            scaler.scale(torch.ones(()))  # begins to scale
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        runs.append((optimizer, params))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][0].cache_stats()["calls"] == 16
