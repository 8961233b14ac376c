"""Groups with settings of their own, Adam inside, schedulers, and what is refused."""

import copy
import math
from functools import partial

import pytest
import torch
from contract.variants import (
    TASKS,
    TRAINING_STEPS,
    ageless,
    assert_same,
    both_optimizers,
    decisions,
    every_task,
    every_variant,
    exactly,
    gated_variants,
    gradient,
    optimizer_for,
    parameter,
    run,
    scheduled_variants,
    snapshot,
    train,
    train_step,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from unclipped import PAPERS, unclipped

from cachemuon import (
    POLAR_EXPRESS,
    QUINTIC,
    CacheGNS,
    CacheMuon,
    ExactPolar,
    GramNS,
    Muon,
    Schedule,
    StandardNS,
    param_groups,
)

# Groups

OWN_SETTINGS = [
    {"lr": 0.05},
    {"momentum": 0.5},
    {"weight_decay": 0.9},
    {"nesterov": True},
    {"eps": 0.1},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"max_workspace_bytes": 1},
    {"solver": GramNS(QUINTIC)},
]
OWN_CACHE_SETTINGS = [
    {"gamma": 0.5},
    {"probe": "exact"},
    {"max_age": 1},
    {"vectors": 2, "gamma": 1.0},
    {"seed": 5, "gamma": 1.0},
    {"clip": 0.25},
    {"clip": 0.25, "vectors": 4},
    {"clip": 0.25, "max_norm": 0.5},
]


@pytest.mark.parametrize(
    ("make", "own"),
    [(partial(Muon, **PAPERS), own) for own in [*OWN_SETTINGS, {"solver": ExactPolar()}]]
    + [(unclipped, own) for own in OWN_SETTINGS + OWN_CACHE_SETTINGS],
    ids=str,
)
def test_a_group_with_settings_of_its_own(make, own):
    shapes = [(12, 20), (20, 12)]
    params = [parameter(shape, i) for i, shape in enumerate(shapes * 2)]
    optimizer = make([{"params": params[:2]}, {"params": params[2:], **own}], lr=0.1)
    run(optimizer, params, range(6))

    apart = [parameter(shape, i) for i, shape in enumerate(shapes * 2)]
    plain, special = make(apart[:2], lr=0.1), make(apart[2:], **{"lr": 0.1, **own})
    for step in range(6):
        for i, param in enumerate(apart):
            param.grad = gradient(param.shape, i, step)
        plain.step()
        special.step()
    # Other batches than before: float32 products in another order.
    torch.testing.assert_close(params, apart, rtol=0, atol=1e-5)
    assert decisions(optimizer) == decisions(plain) + decisions(special)
    for key, value in own.items():
        assert optimizer.param_groups[1][key] == value
        assert optimizer.param_groups[0][key] != value or key == "max_workspace_bytes"


@pytest.mark.parametrize(
    "own", [{"lr": 0.05}, {"momentum": 0.5}, {"weight_decay": 0.9}, {"gamma": 0.5}], ids=str
)
def test_settings_changed_in_mid_run_are_taken(own):
    params = [parameter((12, 20), i) for i in range(2)]
    optimizer = unclipped(params, lr=0.1)
    run(optimizer, params, range(3))
    twin = copy.deepcopy(optimizer)
    optimizer.param_groups[0].update(own)
    run(optimizer, params, range(3, 6))
    twins = twin.param_groups[0]["params"]
    run(twin, twins, range(3, 6))
    assert not torch.equal(params[0], twins[0])


@every_variant
def test_a_group_added_in_mid_run(make):
    params = [parameter((12, 20), i) for i in range(3)]
    optimizer = ageless(make(params[:1], lr=0.1))
    run(optimizer, params[:1], range(3))
    added = {"params": [params[1]], "lr": 0.3}
    optimizer.add_param_group(added)
    optimizer.add_param_group({"params": [params[2]], "use_muon": False})
    ageless(optimizer)
    assert added == {"params": [params[1]], "lr": 0.3}
    assert [row.to for row in optimizer.explain().rows] == ["muon", "muon", "adam"]  # before a step too
    run(optimizer, params, range(3, 7))
    assert [m["calls"] for m in optimizer.cache_stats()["matrices"].values()] == [7, 4]

    # The first goes on as if it were alone, the second as if it had been there from the start: its probes
    # draw the vectors of the optimizer's step.
    first, late = parameter((12, 20), 0), parameter((12, 20), 1)
    alone = ageless(make([{"params": [first]}, {"params": [late], "lr": 0.3}], lr=0.1))
    for step in range(7):
        first.grad = gradient((12, 20), 0, step)
        late.grad = gradient((12, 20), 1, step) if step >= 3 else None
        alone.step()
    torch.testing.assert_close(params[:2], [first, late], rtol=0, atol=1e-5)  # other batches
    assert decisions(optimizer) == decisions(alone)
    residuals, expected = (each.state[p]["residuals"] for each, p in ((optimizer, params[1]), (alone, late)))
    torch.testing.assert_close(residuals, expected, rtol=1e-4, atol=0, equal_nan=True)  # other vectors: 10%


@both_optimizers
def test_the_callers_groups_are_not_changed(make):
    w, b = parameter((6, 10)), parameter((6,), 1)
    betas = [0.8, 0.9]
    given = [
        {"params": [w], "lr": 0.1, "solver": GramNS(QUINTIC)},
        {"params": [b], "use_muon": False, "betas": betas},
    ]
    before = [dict(group) for group in given]
    for _ in range(2):  # the same dicts serve a second optimizer
        optimizer = make(given, lr=0.5)
        run(optimizer, [w, b], range(2))
    assert given == before
    assert given[0]["params"][0] is w
    assert betas == [0.8, 0.9]
    assert optimizer.param_groups[0] is not given[0]


@both_optimizers
def test_one_call_takes_every_form_of_parameters(make):
    def ends(form):
        w = parameter((6, 10))
        optimizer = make(form(w), lr=0.1)
        run(optimizer, [w], range(3))
        return w

    expected = ends(lambda w: [w])
    for form in (
        lambda w: iter([w]),
        lambda w: [("name", w)],
        lambda w: [{"params": w}],
        lambda w: [{"params": iter([("name", w)])}],
        lambda w: nn.ParameterDict({"name": w}).named_parameters(),
    ):
        exactly(ends(form), expected)


# What is refused: the message names the argument, the value and what is allowed

MATRIX = (4, 6)

REFUSED = {
    "negative lr": ({"lr": -0.1}, ["lr", "-0.1", ">= 0"]),
    "nan lr": ({"lr": math.nan}, ["lr", "nan", ">= 0"]),
    "no lr": ({"lr": None}, ["lr", "None", ">= 0"]),
    "text as lr": ({"lr": "fast"}, ["lr", "'fast'", ">= 0"]),
    "a vector as lr": ({"lr": torch.ones(2)}, ["lr", "tensor([1., 1.])", "one element"]),
    "negative weight_decay": ({"weight_decay": -1e-4}, ["weight_decay", "-0.0001", ">= 0"]),
    "infinite weight_decay": ({"weight_decay": math.inf}, ["weight_decay", "inf", ">= 0"]),
    "negative eps": ({"eps": -1e-7}, ["eps", "-1e-07", ">= 0"]),
    "momentum 1": ({"momentum": 1.0}, ["momentum", "1.0", "[0, 1)"]),
    "negative momentum": ({"momentum": -0.5}, ["momentum", "-0.5", "[0, 1)"]),
    "no momentum": ({"momentum": None}, ["momentum", "None", "[0, 1)"]),
    "unknown adjust_lr_fn": (
        {"adjust_lr_fn": "rms"},
        ["adjust_lr_fn", "'rms'", "'none'", "'original'", "'match_rms_adamw'"],
    ),
    "no workspace": ({"max_workspace_bytes": 0}, ["max_workspace_bytes", "0", "> 0"]),
    "half a workspace": ({"max_workspace_bytes": 0.5}, ["max_workspace_bytes", "0.5", "integer"]),
    "unknown solver": ({"solver": "grams"}, ["solver", "'grams'", "GramNS", "'gram'", "'polar_express'"]),
    "a schedule as solver": ({"solver": QUINTIC}, ["solver", "Schedule", "GramNS"]),
    "a class as solver": ({"solver": GramNS}, ["solver", "GramNS"]),
}
REFUSED_BY_CACHE = {
    "negative gamma": ({"gamma": -1.0}, ["gamma", "-1.0", ">= 0"]),
    "nan gamma": ({"gamma": math.nan}, ["gamma", "nan", ">= 0"]),
    "no gamma": ({"gamma": None}, ["gamma", "None", ">= 0"]),
    "unknown probe": ({"probe": "guess"}, ["probe", "'guess'", "'sketch'", "'exact'"]),
    "no vectors": ({"vectors": 0}, ["vectors", "0", ">= 1"]),
    "half a vector": ({"vectors": 1.5}, ["vectors", "1.5", "integer"]),
    "negative max_age": ({"max_age": -1}, ["max_age", "-1", ">= 0", "None"]),
    "half a max_age": ({"max_age": 1.5}, ["max_age", "1.5", "integer", "None"]),
    "half a seed": ({"seed": 0.5}, ["seed", "0.5", "integer"]),
    "StandardNS": ({"solver": StandardNS(POLAR_EXPRESS)}, ["solver", "StandardNS", "GramNS"]),
    "ExactPolar": ({"solver": ExactPolar()}, ["solver", "ExactPolar", "GramNS"]),
}
REFUSED_CASES = [
    pytest.param(make, *case, id=f"{kind}, {name}")
    for kind, make, cases in (
        ("Muon", Muon, REFUSED),
        ("CacheMuon", unclipped, REFUSED | REFUSED_BY_CACHE),
    )
    for name, case in cases.items()
]


def assert_names(error, words):
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {str(error.value)!r}"


@pytest.mark.parametrize(("make", "bad", "words"), REFUSED_CASES)
def test_settings_refused_by_the_constructor(make, bad, words):
    with pytest.raises(ValueError) as error:
        make([parameter(MATRIX)], **bad)
    assert_names(error, words)


@pytest.mark.parametrize(("make", "bad", "words"), REFUSED_CASES)
def test_a_refused_group_leaves_the_optimizer_as_it_was(make, bad, words):
    w = parameter(MATRIX)
    optimizer, twin = make([w]), make([parameter(MATRIX)])
    for each in (optimizer, twin):
        run(each, each.param_groups[0]["params"], range(2))
    with pytest.raises(ValueError) as error:
        optimizer.add_param_group({"params": [parameter(MATRIX, 1)], **bad})
    assert_names(error, words)
    assert_same(twin, optimizer)
    for each in (optimizer, twin):
        run(each, each.param_groups[0]["params"], range(2, 4))
    assert_same(twin, optimizer)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"params": [("gain", parameter((4,)))]}, ["gain", "(4,)", "2 dimensions", "Adam"]),
        ({"params": [("gain", nn.Parameter(torch.tensor(1.0)))]}, ["gain", "()", "2 dimensions"]),
        (
            {"params": [("w", nn.Parameter(torch.zeros(MATRIX, dtype=torch.complex64)))]},
            ["w", "complex64", "real floating point"],
        ),
        (
            {"params": [("w", nn.Parameter(torch.zeros(MATRIX, dtype=torch.int32), requires_grad=False))]},
            ["w", "int32", "real floating point"],
        ),
        ({"params": [("w", parameter(MATRIX))], "view": "rows"}, ["view", "'rows'", "'flatten'", "'batch'"]),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "lr": -1.0}, ["lr", "-1.0", ">= 0"]),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "lr": None}, ["lr", "None", ">= 0"]),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "eps": -1.0}, ["eps", "-1.0", ">= 0"]),
        (
            {"params": [("b", parameter((4,)))], "use_muon": False, "betas": (1.0, 0.9)},
            ["betas", "1.0", "[0, 1)"],
        ),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "betas": (0.9,)}, ["betas", "(0.9,)"]),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "amsgrad": True}, ["amsgrad", "True"]),
        ({"params": [("b", parameter((4,)))], "use_muon": False, "maximize": True}, ["maximize", "True"]),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
@both_optimizers
def test_parameters_and_groups_refused(make, group, words):
    with pytest.raises(ValueError) as error:
        make([group])
    assert_names(error, words)

    optimizer = make([("first", parameter(MATRIX))])
    run(optimizer, optimizer.param_groups[0]["params"], range(2))
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.add_param_group(group)
    assert_names(error, words)
    assert_same(before, optimizer)


@pytest.mark.parametrize("restarts", [(5,), (0,), (-1,), (2, 1), (2, 2), (1.5,)])
def test_restarts_outside_the_iterations_are_refused(restarts):
    with pytest.raises(ValueError) as error:
        GramNS(restarts=restarts)
    assert_names(error, ["restarts", repr(restarts), "from 1 to 4", "None"])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GramNS(Schedule([(1.5, -0.5, 0.0)]), restarts=(1,)), ["restarts", "(1,)"]),
        (lambda: GramNS(eps=-1.0), ["eps", "-1.0", ">= 0"]),
        (lambda: StandardNS(dtype=torch.int32), ["dtype", "int32", "floating point"]),
        (lambda: StandardNS((3.4, -4.7, 2.0)), ["schedule", "(3.4, -4.7, 2.0)", "Schedule"]),
        (lambda: Schedule([]), ["triples", "()"]),
        (lambda: CacheGNS(StandardNS()), ["fresh", "StandardNS", "GramNS"]),
        (lambda: CacheGNS(probe="guess"), ["probe", "'guess'", "'sketch'", "'exact'"]),
        (lambda: CacheGNS(vectors=0), ["vectors", "0", ">= 1"]),
        (lambda: CacheGNS()(torch.ones(MATRIX), None, gamma=-1.0), ["gamma", "-1.0", ">= 0"]),
        (lambda: CacheGNS()(torch.ones(MATRIX), None, gamma=1.0, max_age=-1), ["max_age", "-1", ">= 0"]),
    ],
)
def test_solvers_refuse(build, words):
    with pytest.raises(ValueError) as error:
        build()
    assert_names(error, words)


@pytest.mark.parametrize("name", ["probe", "vectors", "max_age", "clip", "max_norm", "seed"])
def test_the_papers_algorithm_takes_none_of_our_settings(name):
    value = {"probe": "exact", "vectors": 8, "max_age": 3, "clip": 0.1, "max_norm": None, "seed": 0}[name]
    with pytest.raises(ValueError, match=rf"CacheMuon\.paper takes no {name}"):
        CacheMuon.paper([parameter(MATRIX)], **{name: value})


@both_optimizers
def test_the_shorthands_exclude_a_solver(make):
    with pytest.raises(ValueError) as error:
        make([parameter(MATRIX)], solver=GramNS(), ns_steps=3)
    assert_names(error, ["solver", "ns_steps", "GramNS", "3"])
    with pytest.raises(ValueError) as error:
        make([parameter(MATRIX)], solver=GramNS(), ns_coefficients=(3.4, -4.7, 2.0))
    assert_names(error, ["solver", "ns_coefficients", "3.4"])
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError) as error:
            make([parameter(MATRIX)], ns_steps=steps)
        assert_names(error, ["ns_steps", str(steps), ">= 1"])
    with pytest.raises(ValueError) as error:
        make([parameter(MATRIX)], ns_steps=3, ns_coefficients=[(3.4, -4.7, 2.0)] * 2)
    assert_names(error, ["ns_steps", "2", "3"])


@both_optimizers
@pytest.mark.parametrize("where", ["muon", "adam"])
def test_a_step_refused_for_a_sparse_gradient_changes_nothing(make, where):
    model = TASKS["mlp"].model()
    optimizer = optimizer_for(make, model)
    train(TASKS["mlp"], model, optimizer, range(2))
    before = snapshot(optimizer)
    for i, param in enumerate(model.parameters()):
        param.grad = gradient(param.shape, i, 2)
    name, param = {
        "muon": ("mid2.weight", model.mid2.weight),
        "adam": ("embedding.weight", model.embedding.weight),
    }[where]
    param.grad = param.grad.to_sparse()
    with pytest.raises(ValueError) as error:
        optimizer.step()
    assert_names(error, [name, "sparse", "dense"])
    assert_same(before, optimizer)
    train(TASKS["mlp"], model, optimizer, range(2, 4))  # and it goes on


@both_optimizers
def test_a_sparse_gradient_at_the_first_step_leaves_no_state(make):
    embedding = nn.Embedding(10, 4, sparse=True)
    w = parameter(MATRIX)
    optimizer = make([{"params": [w]}, {"params": embedding.parameters(), "use_muon": False}])
    w.grad = gradient(MATRIX)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        optimizer.step()
    assert not optimizer.state
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_variant
def test_a_gradient_of_higher_precision_than_its_parameter(make, dtype):
    # torch allows it by `grad_dtype`; the average is then taken in the momentum's dtype.
    w, twin = parameter(MATRIX, dtype=dtype), parameter(MATRIX, dtype=dtype)
    w.grad_dtype = torch.float32
    optimizers = [make([w], lr=0.1), make([twin], lr=0.1)]
    for step in range(3):
        twin.grad = gradient(MATRIX, 0, step, dtype=dtype)
        w.grad = twin.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert w.dtype == dtype
    # The same values in both: at most the rounding of one average and one step apart.
    torch.testing.assert_close(w.detach(), twin.detach(), rtol=2**-7, atol=2**-7)


# Adam


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@both_optimizers
def test_adam_groups_are_torchs_adam(make, decoupled, fused):
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    shapes = [(7,), (5, 3), (), (2, 3, 4)]
    mine, theirs = ([parameter(shape, i) for i, shape in enumerate(shapes)] for _ in range(2))
    group = {"params": mine, "use_muon": False, "decoupled_weight_decay": decoupled, "fused": fused}
    optimizer = make([{**group, **settings}], lr=123.0)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    for step in range(20):
        run(optimizer, mine, [step])
        run(reference, theirs, [step])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # another order of elementwise float32
        assert optimizer.state[a].keys() == reference.state[b].keys()
        for key in reference.state[b]:
            torch.testing.assert_close(optimizer.state[a][key], reference.state[b][key], rtol=1e-5, atol=1e-6)


@both_optimizers
def test_a_state_of_torchs_adamw_is_taken_over(make):
    params = [parameter((7,)), parameter((5, 3), 1)]
    reference = torch.optim.AdamW(params, lr=0.01)
    run(reference, params, range(5))
    mine = copy.deepcopy(params)
    optimizer = make([{"params": mine, "use_muon": False, "lr": 0.01, "weight_decay": 0.01}])
    keys = optimizer.param_groups[0].keys()
    optimizer.load_state_dict(reference.state_dict())  # without a warning: nothing differs
    assert optimizer.param_groups[0].keys() == keys
    run(reference, params, range(5, 10))
    run(optimizer, mine, range(5, 10))
    torch.testing.assert_close(mine, params, rtol=0, atol=1e-6)


@both_optimizers
def test_adam_inherits_nothing_from_muon(make):
    w, b = parameter(MATRIX), parameter((4,), 1)
    optimizer = make(
        [{"params": [w]}, {"params": [b], "use_muon": False}],
        lr=0.5,
        weight_decay=0.25,
        eps=0.125,
        momentum=0.5,
    )
    group = optimizer.param_groups[1]
    assert {key: value for key, value in group.items() if key != "params"} == {
        "use_muon": False,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-4,
        "decoupled_weight_decay": True,
        "fused": True,
    }
    assert optimizer.param_groups[0].keys().isdisjoint({"betas", "decoupled_weight_decay", "fused"})


@both_optimizers
def test_adam_is_not_changed_by_the_matrices_beside_it(make):
    w, b, twin = parameter(MATRIX), parameter((4,), 1), parameter((4,), 1)
    optimizer = make([{"params": [w]}, {"params": [b], "use_muon": False, "lr": 0.01}], lr=0.5)
    reference = torch.optim.AdamW([twin], lr=0.01, weight_decay=1e-4)
    for step in range(20):
        run(optimizer, [w, b], [step])
        twin.grad = b.grad.clone()
        reference.step()
    torch.testing.assert_close(b, twin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@both_optimizers
def test_adam_with_a_gradient_of_another_memory_layout(make, fused):
    # The fused kernel walks over memory: a weight and a gradient that lie differently would be mixed up.
    w = nn.Parameter(parameter((6, 4, 3, 3)).detach().clone(memory_format=torch.channels_last))
    twin = parameter((6, 4, 3, 3))
    optimizer = make([{"params": [w], "use_muon": False, "lr": 0.1, "fused": fused}])
    reference = torch.optim.AdamW([twin], lr=0.1, weight_decay=1e-4)
    for step in range(4):
        w.grad, twin.grad = gradient(w.shape, 0, step), gradient(w.shape, 0, step)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(w.detach(), twin.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@both_optimizers
def test_adam_with_a_parameter_that_is_part_of_a_tensor(make, fused):
    # The fused kernel walks over memory: it would step what lies between, and leave out the rest.
    whole = torch.ones(4, 12)
    w, twin = nn.Parameter(whole[:, ::2]), nn.Parameter(torch.ones(4, 6))
    optimizer = make([{"params": [w], "use_muon": False, "lr": 0.1, "fused": fused}])
    reference = torch.optim.AdamW([twin], lr=0.1, weight_decay=1e-4)
    for step in range(4):
        w.grad, twin.grad = gradient(w.shape, 0, step), gradient(w.shape, 0, step)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(w.detach(), twin.detach(), rtol=0, atol=1e-6)
    assert (whole[:, 1::2] == 1).all()


@both_optimizers
def test_adam_counts_its_steps_whatever_the_default_dtype(make):
    torch.set_default_dtype(torch.bfloat16)  # which has no number between 256 and 258
    try:
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
        optimizer = make([{"params": [param], "use_muon": False}])
        for _ in range(300):
            param.grad = torch.ones_like(param)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["step"] == 300


@both_optimizers
def test_adam_with_a_tensor_as_learning_rate(make):
    b, twin = parameter((4,)), parameter((4,))
    optimizer = make([{"params": [b], "use_muon": False, "lr": torch.tensor(0.01)}])
    reference = torch.optim.AdamW([twin], lr=0.01, weight_decay=1e-4)
    run(optimizer, [b], range(5))
    run(reference, [twin], range(5))
    torch.testing.assert_close(b, twin, rtol=0, atol=1e-6)


@both_optimizers
def test_adam_alone_and_muon_alone(make):
    model = TASKS["mlp"].model()
    adam = make([{"params": list(model.parameters()), "use_muon": False}])
    train(TASKS["mlp"], model, adam, range(2))
    assert adam.cache_stats()["calls"] == 0
    matrices = [p for p in model.parameters() if p.ndim == 2]
    muon = make(matrices)
    train(TASKS["mlp"], model, muon, range(2))
    assert muon.cache_stats()["calls"] == 2 * len(matrices)


@every_task
def test_the_settings_of_param_groups_reach_the_groups(task):
    model = task.model()
    groups = param_groups(model, muon={"gamma": 3.0, "lr": 0.1}, adam={"lr": 2e-3, "eps": 1e-6})
    optimizer = CacheMuon(groups, lr=0.5, gamma=7.0)
    for group in optimizer.param_groups:
        if group["use_muon"]:
            assert (group["lr"], group["gamma"], group["eps"]) == (0.1, 3.0, 1e-7)
        else:
            assert (group["lr"], group["eps"]) == (2e-3, 1e-6)
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    assert total == len(list(model.parameters()))


# Schedulers


@pytest.mark.parametrize("as_tensor", [False, True])
@every_variant
def test_a_lambda_schedule_is_the_learning_rate_set_by_hand(make, as_tensor):
    def factor(step):
        return 0.5**step

    w, twin = parameter((12, 20)), parameter((12, 20))
    lr = torch.tensor(0.25) if as_tensor else 0.25
    optimizer, by_hand = make([w], lr=lr), make([twin], lr=0.25)
    scheduler = LambdaLR(optimizer, factor)
    for step in range(5):
        by_hand.param_groups[0]["lr"] = 0.25 * factor(step)
        run(optimizer, [w], [step])
        run(by_hand, [twin], [step])
        scheduler.step()
    # A tensor rounds lr * weight_decay to float32 earlier than Python's float64 does.
    torch.testing.assert_close(w, twin, rtol=0, atol=1e-6 if as_tensor else 0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25 * factor(5)


@every_variant
def test_one_cycle_moves_the_momentum_of_the_matrices(make):
    w, b = parameter((12, 20)), parameter((12,), 1)
    optimizer = make([{"params": [w]}, {"params": [b], "use_muon": False}], lr=0.1)
    scheduler = OneCycleLR(
        optimizer, [0.1, 0.01], total_steps=8, pct_start=0.5, base_momentum=0.8, max_momentum=0.95
    )
    expected, seen = torch.zeros(12, 20), []
    for step in range(8):
        momentum = optimizer.param_groups[0]["momentum"]
        seen.append(momentum)
        run(optimizer, [w, b], [step])
        expected = momentum * expected + (1 - momentum) * w.grad
        torch.testing.assert_close(optimizer.state[w]["momentum_buffer"], expected, rtol=1e-5, atol=1e-6)
        if step < 7:
            scheduler.step()
    assert min(seen) == pytest.approx(0.8)
    assert max(seen) == pytest.approx(0.95)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert w.isfinite().all()


@both_optimizers
def test_a_cosine_schedule_trains_and_resumes(make):
    task = TASKS["mlp"]

    def start():
        model = task.model()
        optimizer = optimizer_for(make, model, lr=0.05)
        return model, optimizer, CosineAnnealingLR(optimizer, T_max=TRAINING_STEPS)

    def steps(model, optimizer, scheduler, which):
        losses = []
        for step in which:
            losses.append(train_step(task, model, optimizer, step))
            scheduler.step()
        return losses

    model, optimizer, scheduler = start()
    first = steps(model, optimizer, scheduler, range(TRAINING_STEPS // 2))
    saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, scheduler)])
    rest = steps(model, optimizer, scheduler, range(TRAINING_STEPS // 2, TRAINING_STEPS))
    assert rest[-1] < task.goal * first[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0, abs=1e-9)

    resumed = start()
    for each, state in zip(resumed, saved, strict=True):
        each.load_state_dict(state)
    assert steps(*resumed, range(TRAINING_STEPS // 2, TRAINING_STEPS)) == rest
    assert_same(optimizer, resumed[1])


@gated_variants
def test_gamma_may_be_scheduled(make):
    # It is a plain value of the group: whoever changes it there changes the gate.
    params = [parameter((12, 20), i) for i in range(2)]
    optimizer = make(params, lr=0.1)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["gamma"] = 0.0
    hits = optimizer.cache_stats()["hits"]
    run(optimizer, params, range(2, 5))
    assert optimizer.cache_stats()["hits"] == hits
    optimizer.param_groups[0].update(gamma=math.inf, max_age=None)
    run(optimizer, params, range(5, 8))
    assert optimizer.cache_stats()["hits"] == hits + 6


@scheduled_variants
def test_gamma_may_be_changed_under_the_schedule(make):
    params = [parameter((12, 20), i) for i in range(2)]
    optimizer = ageless(make(params, lr=0.1))
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["gamma"] = math.inf
    run(optimizer, params, range(2, 5))
    assert optimizer.cache_stats()["hits"] == 2 * 4
    optimizer.param_groups[0]["gamma"] = 0.0
    run(optimizer, params, range(5, 8))
    for entry in optimizer.cache_stats()["matrices"].values():
        assert (entry["hits"], entry["misses"]["bounded"], entry["misses"]["uncached"]) == (4, 1, 2)


@both_optimizers
def test_a_parameter_given_twice_is_refused(make):
    w = parameter((4, 6))
    for params in ([w, w], [("a", w), ("b", w)], (p for p in (w, w))):
        with pytest.raises(ValueError, match=r"params must have each parameter once, got .* \(4, 6\) twice"):
            make(params)


@both_optimizers
def test_a_group_that_is_none_is_refused(make):
    w = parameter((4, 6))
    optimizer = make([w])
    for wrong in ([w], {"lr": 1.0}, w):
        with pytest.raises(ValueError, match="a parameter group must be a dict with 'params', got "):
            optimizer.add_param_group(wrong)
    with pytest.raises(ValueError, match="params must be tensors, or pairs of a name and a tensor, got 1"):
        make([1, 1])


@pytest.mark.parametrize("settings", [{"ns_steps": 2}, {"ns_coefficients": (2.0, -1.5, 0.5)}], ids=str)
def test_torchs_settings_of_the_iteration_may_be_a_groups_own(settings):
    # torch iterates in bfloat16.
    moved = []
    for cls in (torch.optim.Muon, Muon, partial(CacheMuon, normalize=None)):
        w = parameter((12, 16))
        before, w.grad = w.detach().clone(), gradient(w.shape)
        cls([{"params": [w], **settings}], lr=1.0, weight_decay=0.0).step()
        moved.append(w.detach() - before)
    for ours in moved[1:]:
        assert (ours - moved[0]).norm() < 0.02 * moved[0].norm()


@both_optimizers
def test_maximize_is_refused_where_it_would_not_be_done(make):
    with pytest.raises(ValueError, match="maximize must be left out or False, got True"):
        make([{"params": [parameter((4, 6))], "maximize": True}])


@pytest.mark.parametrize("way", ["backend", "all backends", "old"])
@both_optimizers
def test_a_step_is_in_float32_whatever_is_allowed_outside(make, way):
    class Watched(GramNS):
        def solve_with_transform(self, X, workspace, **how):
            seen.append([m.fp32_precision for m in matmuls])
            return super().solve_with_transform(X, workspace, **how)

    seen, matmuls = [], (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    w = parameter((4, 6))
    optimizer = make([w], solver=Watched())
    before = torch.backends.fp32_precision
    try:
        if way == "backend":
            for matmul in matmuls:
                matmul.fp32_precision = "tf32"
        elif way == "old":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.fp32_precision = "tf32"
        run(optimizer, [w], range(2))
        assert seen and all(precision == ["ieee"] * 2 for precision in seen)
        assert [matmul.fp32_precision for matmul in matmuls] == ["tf32"] * 2
        if way == "all backends":
            torch.backends.fp32_precision = "ieee"
            assert [matmul.fp32_precision for matmul in matmuls] == ["ieee"] * 2  # still inherited
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = before
        for matmul in matmuls:
            matmul.fp32_precision = "none"


# Learning rates of all groups


def groups_with_rates(make, **adam):
    w, b = parameter((6, 10)), parameter((9,), 1)
    return make([{"params": [w]}, {"params": [b], "use_muon": False, **adam}], lr=0.02), [w, b]


@both_optimizers
def test_one_learning_rate_written_into_all_groups_is_warned_of_once(make):
    optimizer, params = groups_with_rates(make, lr=0.002)
    with pytest.warns(
        RuntimeWarning, match="learning rate, 0.0006: .* were 0.02 and 0.002 before.*lr_ratio"
    ) as caught:
        for step in range(4):  # as nanoGPT does, with a warm-up
            for group in optimizer.param_groups:
                group["lr"] = 0.0006 * (step + 1)
            run(optimizer, params, [step])
    assert len(caught) == 1


@both_optimizers
def test_one_learning_rate_is_warned_of_also_later_and_not_as_the_end_of_a_schedule(make):
    optimizer, params = groups_with_rates(make, lr=0.002)
    for group, lr in zip(optimizer.param_groups, (0.01, 0.001), strict=True):
        run(optimizer, params, [0])
        group["lr"] = lr
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    run(optimizer, params, [1])  # a cosine's floor
    for group, lr in zip(optimizer.param_groups, (0.01, 0.001), strict=True):
        group["lr"] = lr
    run(optimizer, params, [2])
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    with pytest.warns(RuntimeWarning, match="learning rate, 0.01: .* were 0.01 and 0.001 before"):
        run(optimizer, params, [3])


@pytest.mark.parametrize("adam", [{"lr": 0.02}, {"lr_ratio": 0.1}, {"lr": 0.002, "lr_ratio": 1.0}], ids=str)
@both_optimizers
def test_groups_made_with_one_learning_rate_or_with_a_ratio_are_not_warned_of(make, adam):
    optimizer, params = groups_with_rates(make, **adam)
    for step in range(3):
        run(optimizer, params, [step])
        for group in optimizer.param_groups if "lr_ratio" not in adam or "lr" not in adam else ():
            group["lr"] = 0.01
    copy.deepcopy(optimizer).step()


@both_optimizers
def test_a_ratio_makes_adams_rate_of_its_groups_own(make):
    optimizer, params = groups_with_rates(make, lr_ratio=0.1, weight_decay=0.1)
    assert optimizer.param_groups[1]["lr"] == 0.02
    twin = parameter((9,), 1)
    reference = torch.optim.AdamW([twin], lr=0.002, weight_decay=0.1)
    schedules = [CosineAnnealingLR(each, T_max=6) for each in (optimizer, reference)]
    for step in range(6):
        run(optimizer, params, [step])
        twin.grad = params[1].grad.clone()
        reference.step()
        torch.testing.assert_close(params[1], twin, rtol=0, atol=1e-7)
        told, rows = optimizer.metrics(), optimizer.explain().rows
        rates = [each.param_groups[0]["lr"] for each in (optimizer, reference)]
        assert [told["muon/lr"], told["muon/lr_adam"]] == pytest.approx(rates)
        assert [row.lr for row in rows] == pytest.approx(rates)
        for schedule in schedules:
            schedule.step()
    resumed, _ = groups_with_rates(make)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[1]["lr_ratio"] == 0.1


def test_a_ratio_through_param_groups_survives_a_loop_that_writes_all_groups():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = CacheMuon(param_groups(model, adam=dict(lr_ratio=0.1)), lr=0.02)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    by_name = {row.name: row.lr for row in optimizer.explain().rows}
    assert by_name == pytest.approx({"0.weight": 0.01, "1.weight": 0.001, "0.bias": 0.001, "1.bias": 0.001})
    assert "  0.001  " in str(optimizer.explain())


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"weight_decy": 0.1}, "no setting 'weight_decy': did you mean 'weight_decay'?"),
        ({"learning_rate": 0.1}, "no setting 'learning_rate': did you mean 'lr'?"),
        ({"use_muon": False, "beta": (0.9, 0.95)}, "no setting 'beta': did you mean 'betas'?"),
        ({"lr_ratio": 0.1}, "lr_ratio must be left out of a group of Muon"),
        ({"use_muon": False, "lr_ratio": -0.1}, "lr_ratio must be a number >= 0, got -0.1"),
    ],
)
@both_optimizers
def test_a_misspelled_setting_of_a_group_is_refused(make, group, words):
    with pytest.raises(ValueError) as error:
        make([{"params": [parameter(MATRIX)], **group}])
    assert_names(error, [words])


@both_optimizers
def test_a_group_may_have_keys_of_the_programs_own(make):
    own = {"name": "decay", "initial_lr": 0.1, "lr_scale": 0.5, "weight_decay_mult": 2.0, "max_momentum": 0.9}
    optimizer = make([{"params": [parameter(MATRIX)], **own}])
    assert own.items() <= optimizer.param_groups[0].items()


SOLVERS_BY_NAME = {
    "gram": (GramNS(), GramNS()),
    "polar_express": (StandardNS(POLAR_EXPRESS), GramNS(POLAR_EXPRESS)),
    "jordan": (StandardNS(QUINTIC), GramNS(QUINTIC)),
}


@pytest.mark.parametrize("name", SOLVERS_BY_NAME)
def test_solvers_by_name(name):
    for make, expected in zip((Muon, CacheMuon), SOLVERS_BY_NAME[name], strict=True):
        optimizer = make([parameter(MATRIX)], solver=name)
        optimizer.add_param_group({"params": [parameter(MATRIX, 1)], "solver": name})
        for group in optimizer.param_groups:
            assert (group["solver"], group["eps"]) == (expected, expected.eps)


@both_optimizers
def test_all_parameters_of_a_model_are_refused_with_what_to_write(make):
    with pytest.raises(
        ValueError, match=r"model.parameters\(\), write CacheMuon\(param_groups\(model\), ...\)"
    ):
        make(nn.Linear(3, 4).parameters())


@both_optimizers
def test_a_matrix_that_looks_like_an_embedding_or_a_head_is_logged_once(make, caplog):
    named = {
        "wte.weight": (64, 32),
        "lm_head.weight": (64, 32),
        "vocabulary": (5000, 128),
        "up.weight": (512, 128),
        "lora_B": (4096, 8),
    }
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in named.items()}
    optimizer = make(params.items(), lr=0.1)
    rows = {row.name: row.why for row in optimizer.explain().rows}
    optimizer.explain(), optimizer.metrics(), optimizer.step()
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "Muon was given lm_head.weight, vocabulary, wte.weight, by name" in record.message
    assert [name for name, why in rows.items() if "looks like" in why] == list(named)[:3]

    caplog.clear()
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 512), nn.Linear(512, 16))
    routed = make(param_groups(model, overrides={"0.weight": "muon"}), lr=0.1)  # by choice
    assert not any("looks like" in row.why for row in routed.explain().rows) and not caplog.records


# Clipped gradients


@pytest.mark.parametrize("coefficient", [1e-8, 1e-12])
@both_optimizers
def test_without_eps_a_gradient_that_was_clipped_to_nothing_makes_the_same_step(make, coefficient):
    both = [[parameter((12, 20)), parameter((20, 8), 1)] for _ in range(2)]
    optimizers = [make(params, lr=0.1, eps=0.0) for params in both]
    for step in range(5):
        for params, optimizer in zip(both, optimizers, strict=True):
            for i, param in enumerate(params):
                param.grad = gradient(param.shape, i, step)
            if params is both[1]:
                norm = nn.utils.get_total_norm([param.grad for param in params])
                nn.utils.clip_grads_with_norm_(params, float(norm) * coefficient, norm)
            optimizer.step()
    torch.testing.assert_close(*both, rtol=0, atol=1e-4)
