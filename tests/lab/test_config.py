import json
from dataclasses import replace

import pytest
import torch

from cachemuon_lab.config import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    differences,
    with_overrides,
)
from cachemuon_lab.models import GPT2Config, ResNetConfig
from cachemuon_lab.record import Record, Run, read_lines

GPT2 = RunConfig(
    name="tiny",
    model=GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256),
    data=DataConfig("python"),
    optimizer=OptimizerConfig("paper", gamma=2.0),
    schedule=ScheduleConfig("plateau_linear"),
    steps=10,
    batch_size=2,
)
RESNET = replace(
    GPT2,
    model=ResNetConfig(width=4),
    data=DataConfig("cifar10", path="somewhere"),
    optimizer=OptimizerConfig("gram", head="muon", adam_betas=(0.8, 0.9)),
    schedule=ScheduleConfig("cosine"),
    diagnostics="age",
    ages=(1, 4),
    autocast="bfloat16",
    validation_batches=None,
)


NOTHING = {"hits": 0, "misses": {}, "flops": 0, "flops_paper": 0}


@pytest.mark.parametrize("config", [GPT2, RESNET], ids=["gpt2", "resnet"])
def test_json_round_trip(config):
    assert RunConfig.from_json(config.to_json()) == config


def test_json_names_the_model():
    assert json.loads(GPT2.to_json())["model"]["kind"] == "gpt2"
    assert json.loads(RESNET.to_json())["model"]["kind"] == "resnet18"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(stesp=3), "unknown key 'stesp'.*steps"),
        (lambda v: v["optimizer"].update(gama=3), "unknown key 'optimizer.gama'.*gamma"),
        (lambda v: v.pop("steps"), "steps is missing"),
        (lambda v: v.update(steps=1.5), "steps must be an integer, got 1.5"),
        (lambda v: v.update(steps=True), "steps must be an integer, got True"),
        (lambda v: v["optimizer"].update(lr="high"), "optimizer.lr must be a number, got 'high'"),
        (lambda v: v["optimizer"].update(adam_betas=[0.9]), "optimizer.adam_betas must have 2 values"),
        (
            lambda v: v["model"].update(kind="gpt3"),
            "model.kind must be one of 'gpt2', 'resnet18', got 'gpt3'",
        ),
        (lambda v: v.update(data=[]), r"data must be an object, got \[\]"),
    ],
)
def test_wrong_json_is_refused(change, message):
    values = json.loads(GPT2.to_json())
    change(values)
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(json.dumps(values))


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="must be JSON, got 'steps: 3'"):
        RunConfig.from_json("steps: 3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig("sgd"), "optimizer.kind must be one of 'polar', .*'soap', got 'sgd'"),
        (
            lambda: OptimizerConfig("cache", gate="no"),
            "optimizer.gate must be one of 'schedule', 'residual', got",
        ),
        (lambda: OptimizerConfig("gram", lr=-1.0), r"optimizer.lr must be a number >= 0, got -1.0"),
        (lambda: OptimizerConfig("gram", momentum=1.0), r"optimizer.momentum must be in \[0, 1\), got 1.0"),
        (lambda: OptimizerConfig("cache", max_age=-1), "optimizer.max_age must be an integer of at least 0"),
        (
            lambda: OptimizerConfig("cache", max_age=None),
            "optimizer.max_age must be an integer with gate='schedule', got None",
        ),
        (
            lambda: OptimizerConfig("cache", clip=-0.5),
            "optimizer.clip must be a fraction, from 0 to 1, or none, got -0.5",
        ),
        (lambda: OptimizerConfig("cache", max_norm=0.0), "optimizer.max_norm must be a number > 0 or none"),
        (lambda: OptimizerConfig("stale", period=0), "optimizer.period must be an integer of at least 1"),
        (lambda: DataConfig("mnist"), "data.kind must be one of 'python', 'tokens', 'cifar10', got 'mnist'"),
        (lambda: DataConfig("cifar10", context=8), "data.context must be None"),
        (lambda: ScheduleConfig("step"), "schedule.kind must be one of .*got 'step'"),
        (lambda: ScheduleConfig("cosine", constant_lr_ratio=1.0), "schedule.constant_lr_ratio .* got 1.0"),
        (lambda: ScheduleConfig("cosine", min_lr_ratio=2.0), "schedule.min_lr_ratio must be from 0 to 1"),
        (lambda: replace(GPT2, steps=0), "steps must be an integer of at least 1, got 0"),
        (lambda: replace(GPT2, name=""), "name must not be empty"),
        (
            lambda: replace(GPT2, autocast="float16"),
            "autocast must be one of 'bfloat16', None, got 'float16'",
        ),
        (lambda: replace(GPT2, ages=(2, 1)), r"ages must be increasing integers .* got \(2, 1\)"),
        (lambda: replace(GPT2, diagnostics="age"), "optimizer.kind must be 'gram' for diagnostics='age'"),
        (lambda: replace(RESNET, diagnostics="gate"), "optimizer.kind must be 'paper' or 'cache' for"),
        (lambda: replace(GPT2, data=DataConfig("cifar10")), "data.kind must be 'python' or 'tokens'"),
        (lambda: replace(RESNET, data=DataConfig("python")), "data.kind must be 'cifar10'"),
        (lambda: replace(GPT2, data=DataConfig("python", context=17)), "data.context must be at most .*16"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Overrides


def test_overrides_are_typed():
    changed = with_overrides(
        GPT2,
        [
            "optimizer.lr=2e-2",
            "optimizer.gamma=3",
            "optimizer.adam_betas=0.8,0.95",
            "optimizer.max_age=7",
            "optimizer.clip=0.75",
            "optimizer.cache_all=true",
            "model.width=64",
            "model.bias=false",
            "steps=100",
            "data.path=/a=b",
            "validation_batches=none",
            "autocast=bfloat16",
            "ages=1,2,4",
        ],
    )
    assert (changed.optimizer.lr, changed.optimizer.gamma, changed.steps) == (0.02, 3.0, 100)
    assert isinstance(changed.optimizer.gamma, float)
    assert changed.optimizer.adam_betas == (0.8, 0.95)
    assert (changed.optimizer.max_age, changed.validation_batches) == (7, None)
    assert (changed.optimizer.clip, changed.optimizer.cache_all) == (0.75, True)
    assert (changed.model.width, changed.model.bias) == (64, False)
    assert (changed.data.path, changed.autocast, changed.ages) == ("/a=b", "bfloat16", (1, 2, 4))
    assert GPT2.steps == 10


def test_overrides_are_checked_together():
    changed = with_overrides(GPT2, ["diagnostics=age", "optimizer.kind=gram"])
    assert changed.diagnostics == "age"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "an override must be key=value, got 'steps'"),
        ("setps=3", "unknown key 'setps'; known in place of 'setps': name, model, .*steps"),
        ("optimizer.rl=3", "unknown key 'optimizer.rl'; .*: kind, lr, momentum"),
        ("model.classes=3", "unknown key 'model.classes'; .*: layers, heads"),
        ("optimiser.lr=3", "unknown key 'optimiser.lr'; .*optimizer"),
        ("steps.more=3", "unknown key 'steps.more'; known in place of 'more': nothing"),
        ("optimizer=gram", "'optimizer' is no single value; set one of optimizer.kind, optimizer.lr"),
        ("model=gpt2", "'model' is no single value; set one of model.layers"),
        ("steps=many", "steps must be an integer, got 'many'"),
        ("steps=1.5", "steps must be an integer, got '1.5'"),
        ("steps=none", "steps must be an integer, got 'none'"),
        ("optimizer.lr=nan", "optimizer.lr must be a number >= 0, got nan"),
        ("optimizer.kind=sgd", "optimizer.kind must be one of .*got 'sgd'"),
        ("model.bias=maybe", "model.bias must be true or false, got 'maybe'"),
        ("optimizer.adam_betas=0.9", "optimizer.adam_betas must have 2 values"),
    ],
)
def test_wrong_overrides_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(GPT2, [override])


def test_differences_name_dotted_keys():
    other = with_overrides(GPT2, ["optimizer.lr=0.5", "steps=11"])
    assert differences(GPT2, other) == {"optimizer.lr": (0.001, 0.5), "steps": (10, 11)}
    assert differences(GPT2, GPT2) == {}
    assert differences(GPT2, RESNET)["model.classes"] == (None, 10)


# Names


@pytest.mark.parametrize(
    ("optimizer", "label", "slug"),
    [
        (OptimizerConfig("polar"), "PolarExpMuon", "polar"),
        (OptimizerConfig("gram"), "GramMuon", "gram"),
        (OptimizerConfig("jordan"), "Muon (Jordan)", "jordan"),
        (OptimizerConfig("adamw"), "AdamW", "adamw"),
        (OptimizerConfig("stale"), "StaleMuon", "stale"),
        (OptimizerConfig("stale", period=4), "StaleMuon period=4", "stale-period4"),
        (OptimizerConfig("paper", gamma=5.0), "CacheMuon.paper gamma=5", "paper-gamma5"),
        (OptimizerConfig("paper", gamma=0.5), "CacheMuon.paper gamma=0.5", "paper-gamma0.5"),
        (
            OptimizerConfig("paper", gamma=5.0, max_age=99, cache_all=True),
            "CacheMuon.paper gamma=5",
            "paper-gamma5",
        ),
        (OptimizerConfig("cache"), "CacheMuon", "cache"),
        (OptimizerConfig("cache", lr=0.5, period=4), "CacheMuon", "cache"),
        (OptimizerConfig("cache", gamma=0.5), "CacheMuon gamma=0.5", "cache-gamma0.5"),
        (OptimizerConfig("cache", max_age=99), "CacheMuon max_age=99", "cache-age99"),
        (OptimizerConfig("cache", clip=0.75), "CacheMuon clip=0.75", "cache-clip0.75"),
        (OptimizerConfig("cache", gate="residual"), "CacheMuon gate=residual", "cache-gateresidual"),
        (OptimizerConfig("cache", cache_all=True), "CacheMuon cache_all=True", "cache-cache_allTrue"),
        (
            OptimizerConfig("cache", gamma=2.0, vectors=4, max_age=99, gate="residual"),
            "CacheMuon gamma=2, vectors=4, max_age=99, gate=residual",
            "cache-gamma2-vectors4-age99-gateresidual",
        ),
    ],
)
def test_labels_and_slugs(optimizer, label, slug):
    assert (optimizer.label, optimizer.slug) == (label, slug)


# Schedules


def test_plateau_linear_is_its_closed_form():
    schedule = ScheduleConfig("plateau_linear", constant_lr_ratio=0.4, min_lr_ratio=0.05)
    factors = [schedule.factor(step, steps=3814) for step in range(1, 3815)]
    plateau = int(0.4 * 3814)
    assert factors[:plateau] == [1.0] * plateau
    assert factors[plateau] < 1.0
    assert factors[-1] == 0.05
    decay = torch.tensor(factors[plateau:], dtype=torch.float64)
    slope = (1 - 0.05) / (0.6 * 3814)
    assert torch.allclose(-decay.diff(), torch.full((len(decay) - 1,), slope, dtype=torch.float64))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_plateau_linear_ends_low_however_short(steps):
    assert ScheduleConfig("plateau_linear").factor(steps, steps) == 0.05


def test_cosine_is_torchs_stepped_once_per_epoch():
    epochs, epoch = 10, 7
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    expected = []
    for _ in range(epochs):
        for _ in range(epoch):
            optimizer.step()
            expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    schedule = ScheduleConfig("cosine")
    lrs = [0.3 * schedule.factor(step, epochs * epoch, epoch) for step in range(1, epochs * epoch + 1)]
    assert torch.allclose(torch.tensor(lrs), torch.tensor(expected), rtol=1e-6, atol=0)
    assert lrs[0] == 0.3


def test_constant_is_constant():
    assert {ScheduleConfig("constant").factor(step, 50) for step in range(1, 51)} == {1.0}


# The record


def write_run(folder, steps=3):
    with Record(folder, GPT2, {"python": "3"}) as record:
        for step in range(1, steps + 1):
            record.write("step", step, loss=1.0 / step, **NOTHING)
            record.write("validation", step, loss=2.0, accuracy=None)
        record.write("probe", steps, name="w", residual=1.0, cosine=0.5, accepted=True, age=1)
        record.write("age", steps, name="w", age=1, cosine=0.5)
        record.write("end", steps, seconds=1.0, best_loss=2.0, best_step=1, best_accuracy=None)


def test_a_run_is_read_back(tmp_path):
    write_run(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert (run.config, run.environment, run.complete) == (GPT2, {"python": "3"}, True)
    assert [line["step"] for line in run.steps] == [1, 2, 3]
    assert (len(run.validations), len(run.probes), len(run.ages)) == (3, 1, 1)
    assert run.end["best_loss"] == 2.0


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_that_was_broken_off_is_left_out(tmp_path, cut):
    write_run(tmp_path)
    path = tmp_path / "record.jsonl"
    path.write_bytes(path.read_bytes()[: -1 - cut])
    run = Run.open(tmp_path)
    assert not run.complete
    assert len(run.steps) == 3


def test_a_line_broken_in_the_middle_is_an_error(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "record.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:10], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2, is no record"):
        Run.open(tmp_path)


def test_a_resumed_record_is_cut_back(tmp_path):
    write_run(tmp_path)
    with Record(tmp_path, GPT2, {}, step=2) as record:
        record.write("step", 3, loss=9.0, **NOTHING)
    assert [(line["kind"], line["step"]) for line in read_lines(tmp_path / "record.jsonl")] == [
        ("step", 1),
        ("validation", 1),
        ("step", 2),
        ("validation", 2),
        ("step", 3),
    ]


def test_a_new_record_begins_empty(tmp_path):
    write_run(tmp_path)
    Record(tmp_path, GPT2, {}).__exit__(None, None, None)
    assert read_lines(tmp_path / "record.jsonl") == []


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no run: it has no config.json"):
        Run.open(tmp_path)


def test_an_unknown_kind_is_refused(tmp_path):
    with Record(tmp_path, GPT2, {}) as record:
        record.write("stpe", 1)
    with pytest.raises(ValueError, match="kind 'stpe'"):
        Run.open(tmp_path)
