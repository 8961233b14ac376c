import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from unclipped import PAPERS

from cachemuon import CacheMuon, GramNS, StandardNS, flops
from cachemuon_lab import totals
from cachemuon_lab import train as train_module
from cachemuon_lab.checkpoint import load
from cachemuon_lab.config import (
    CACHE_SETTINGS,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    with_overrides,
)
from cachemuon_lab.data.images import ImageBatches
from cachemuon_lab.models import GPT2Config, ResNetConfig, build
from cachemuon_lab.optimizers import Meter, StaleMuon, make_optimizer
from cachemuon_lab.ranks import Ranks
from cachemuon_lab.record import Run
from cachemuon_lab.train import Interrupted, train

OPTIMIZERS = [
    OptimizerConfig("polar"),
    OptimizerConfig("gram"),
    OptimizerConfig("paper", gamma=2.0),
    OptimizerConfig("cache", gamma=2.0, max_age=2, clip=0.0),
    OptimizerConfig("cache", gamma=2.0, max_age=3, clip=0.25, cache_all=True),
    OptimizerConfig("cache", gamma=2.0, max_age=3, clip=0.25, gate="residual", cache_all=True),
    OptimizerConfig("jordan"),
    OptimizerConfig("adamw"),
    OptimizerConfig("stale"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """The subprocesses have one thread too, and the number of threads may decide the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return folder


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A folder in CIFAR-10's format: 60 images for training, 120 for validation."""
    folder = tmp_path_factory.mktemp("cifar")
    generator = np.random.default_rng(0)
    for name, count in (("data_batch_1.bin", 60), ("test_batch.bin", 120)):
        rows = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())
    return folder


class UncheckedImages(ImageBatches):
    def __init__(self, *arguments):
        super().__init__(*arguments, checksums={})


@pytest.fixture
def any_checksum(monkeypatch):
    monkeypatch.setattr(train_module, "ImageBatches", UncheckedImages)


def gpt2(corpus, **changes):
    config = RunConfig(
        name="tiny",
        model=GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256, dropout=0.1),
        data=DataConfig("python", path=str(corpus)),
        optimizer=OptimizerConfig("paper", gamma=2.0),
        schedule=ScheduleConfig("plateau_linear"),
        steps=7,
        batch_size=2,
        accumulation=2,
        validate_every=2,
        validation_batches=2,
        checkpoint_every=3,
    )
    return replace(config, **changes)


def resnet(cifar, **changes):
    config = RunConfig(
        name="tiny",
        model=ResNetConfig(width=4),
        data=DataConfig("cifar10", path=str(cifar)),
        optimizer=OptimizerConfig("paper", gamma=20.0, head="muon"),
        schedule=ScheduleConfig("cosine"),
        steps=6,
        batch_size=16,
        validate_every=4,
        validation_batches=None,
        checkpoint_every=2,
    )
    return replace(config, **changes)


def weights(folder):
    return load(folder / "checkpoints" / "latest.pt")["model"]


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Killed(Exception):
    pass


def dies_after(step):
    def on_progress(progress):
        if progress["step"] == step:
            raise Killed

    return on_progress


# What a run records


def test_a_run_records_every_step(corpus, tmp_path):
    seen = []
    run = train(gpt2(corpus), tmp_path, on_progress=seen.append)
    assert run.complete
    assert [line["step"] for line in run.steps] == list(range(1, 8))
    assert [line["step"] for line in run.validations] == [2, 4, 6, 7]
    assert [line["tokens"] for line in run.steps] == [2 * 2 * 16 * step for step in range(1, 8)]
    assert run.steps[0]["lr"] == 1e-3
    assert run.steps[-1]["lr"] == pytest.approx(5e-5)
    for line in run.steps:
        assert line["step_seconds"] > line["optimizer_seconds"] > line["orthogonalization_seconds"] > 0
        assert line["hits"] + sum(line["misses"].values()) == 4
    assert run.steps[0]["misses"]["first"] == 4
    assert run.end["best_loss"] == min(line["loss"] for line in run.validations)
    assert run.end["best_accuracy"] is None
    assert run.environment["data"]["train"]["sha256"]
    assert run.environment["device"] == "cpu"

    assert [progress["step"] for progress in seen] == list(range(1, 8))
    hits = sum(line["hits"] for line in run.steps)
    assert seen[-1]["hit_rate"] == hits / (7 * 4)
    gram = totals.total(totals.gpt2_shapes(1, 32), 7)
    assert seen[-1]["saved_flops"] == pytest.approx(1 - run.steps[-1]["flops_paper"] / gram)
    assert seen[-1]["validation"] == run.validations[-1]["loss"]
    assert seen[-1]["steps"] == 7 and seen[-1]["seconds_per_step"] > 0


def test_the_loss_falls(corpus, tmp_path):
    config = gpt2(
        corpus, steps=40, accumulation=1, validate_every=40, optimizer=OptimizerConfig("gram", lr=0.02)
    )
    run = train(config, tmp_path)
    assert run.steps[0]["loss"] == pytest.approx(math.log(256), rel=0.02)
    assert run.steps[-1]["loss"] < 3.5


def test_images_have_accuracy_and_cosine_by_epoch(cifar, any_checksum, tmp_path):
    run = train(resnet(cifar), tmp_path)
    assert [line["tokens"] for line in run.steps] == [16, 32, 48, 60, 76, 92]
    lrs = [line["lr"] for line in run.steps]
    assert lrs == [1e-3] * 4 + [pytest.approx(0.5e-3)] * 2
    assert all(0 <= line["accuracy"] <= 1 for line in run.validations)
    assert run.end["best_accuracy"] == max(line["accuracy"] for line in run.validations)
    assert run.steps[0]["misses"]["first"] == 21


def test_gram_by_the_papers_model_and_replicas(corpus, tmp_path):
    config = gpt2(corpus, optimizer=OptimizerConfig("gram"), accumulation=1, replicas=2, steps=2)
    seen = []
    run = train(config, tmp_path, on_progress=seen.append)
    assert run.steps[-1]["flops_paper"] == totals.total(totals.gpt2_shapes(1, 32), 2, replicas=2)
    assert seen[-1]["saved_flops"] == 0
    assert seen[-1]["hit_rate"] is None


def test_adamw_orthogonalizes_nothing(corpus, tmp_path):
    seen = []
    run = train(gpt2(corpus, optimizer=OptimizerConfig("adamw")), tmp_path, on_progress=seen.append)
    assert {line["orthogonalization_seconds"] for line in run.steps} == {0.0}
    assert run.steps[-1]["flops"] == 0
    assert seen[-1]["saved_flops"] is None
    assert run.steps[0]["lr"] == 2e-3


def test_two_micro_batches_are_one_batch(corpus, tmp_path):
    """A window of each micro-batch is a function of its number, so two processes' share is this too."""
    config = gpt2(corpus, model=replace(gpt2(corpus).model, dropout=0.0), optimizer=OptimizerConfig("gram"))
    split = train(config, tmp_path / "split")
    replicas = train(replace(config, accumulation=1, replicas=2), tmp_path / "replicas")
    assert [line["loss"] for line in split.steps] == [line["loss"] for line in replicas.steps]
    assert same_bits(weights(tmp_path / "split"), weights(tmp_path / "replicas"))


def test_bfloat16_is_left_to_devices_that_have_it(corpus, tmp_path):
    run = train(gpt2(corpus, steps=1, autocast="bfloat16"), tmp_path, device="cpu")
    assert run.environment["autocast"] is None


# What is refused


def test_a_run_is_not_overwritten_unless_told(corpus, tmp_path):
    config = gpt2(corpus, steps=2)
    first = train(config, tmp_path)
    with pytest.raises(
        ValueError, match="holds a finished run: resume goes on with it, overwrite begins anew"
    ):
        train(config, tmp_path)
    assert train(config, tmp_path, resume=True) == first
    other = train(replace(config, seed=1), tmp_path, overwrite=True)
    assert other.steps[0]["loss"] != first.steps[0]["loss"]
    with pytest.raises(ValueError, match="resume and overwrite exclude each other"):
        train(config, tmp_path, resume=True, overwrite=True)


def test_an_unfinished_run_is_not_overwritten_either(corpus, tmp_path):
    with pytest.raises(Killed):
        train(gpt2(corpus), tmp_path, on_progress=dies_after(1))
    with pytest.raises(ValueError, match="holds an unfinished run"):
        train(gpt2(corpus), tmp_path)


def test_another_configuration_is_not_resumed(corpus, tmp_path):
    with pytest.raises(Killed):
        train(gpt2(corpus), tmp_path, on_progress=dies_after(4))
    changed = with_overrides(gpt2(corpus), ["optimizer.gamma=9", "steps=8"])
    with pytest.raises(ValueError, match=r"steps is 7 there, not 8") as error:
        train(changed, tmp_path, resume=True)
    assert "optimizer.gamma is 2.0 there, not 9.0" in str(error.value)


def test_other_data_is_not_resumed(corpus, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for path in corpus.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = gpt2(folder)
    with pytest.raises(Killed):
        train(config, tmp_path / "run", on_progress=dies_after(4))
    (folder / "m0.py").write_text("changed = True\n" * 50)
    with pytest.raises(ValueError, match=r"the data is not what the run in .* began with"):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize("kind", ["tokens", "cifar10"])
def test_a_missing_path_is_named(corpus, tmp_path, kind):
    config = gpt2(corpus) if kind == "tokens" else resnet(corpus)
    with pytest.raises(ValueError, match=r"data.path must be a folder with"):
        train(replace(config, data=DataConfig(kind)), tmp_path)
    assert not any(tmp_path.iterdir())


# Resuming


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.slug)
def test_a_resumed_run_ends_with_the_same_bits(corpus, tmp_path, optimizer):
    config = gpt2(corpus, optimizer=optimizer)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        train(config, tmp_path / "cut", on_progress=dies_after(5))  # the checkpoint is of step 3
    torch.manual_seed(99)
    cut = train(config, tmp_path / "cut", resume=True)
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    for key in ("loss", "lr", "tokens", "hits", "misses", "flops", "flops_paper"):
        assert [line[key] for line in cut.steps] == [line[key] for line in whole.steps], key
    assert [line["loss"] for line in cut.validations] == [line["loss"] for line in whole.validations]
    assert cut.end["best_loss"] == whole.end["best_loss"]


def test_a_resumed_resnet_ends_with_the_same_bits(cifar, any_checksum, tmp_path):
    train(resnet(cifar), tmp_path / "whole")
    with pytest.raises(Killed):
        train(resnet(cifar), tmp_path / "cut", on_progress=dies_after(5))
    train(resnet(cifar), tmp_path / "cut", resume=True)
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_a_run_killed_before_its_first_checkpoint_begins_again(corpus, tmp_path):
    with pytest.raises(Killed):
        train(gpt2(corpus), tmp_path / "cut", on_progress=dies_after(2))
    cut, whole = train(gpt2(corpus), tmp_path / "cut", resume=True), train(gpt2(corpus), tmp_path / "whole")
    assert [line["step"] for line in cut.steps] == list(range(1, 8))
    assert [line["loss"] for line in cut.steps] == [line["loss"] for line in whole.steps]


def test_a_run_killed_before_its_last_line_is_finished(corpus, tmp_path):
    with pytest.raises(Killed):
        train(gpt2(corpus), tmp_path, on_progress=dies_after(7))
    assert not Run.open(tmp_path).complete
    run = train(gpt2(corpus), tmp_path, resume=True)
    assert run.complete and len(run.steps) == 7


def test_stop_ends_after_a_whole_step(corpus, tmp_path):
    answers = iter([False, True])
    with pytest.raises(Interrupted, match=r"stopped after step 2; resume the run in") as error:
        train(gpt2(corpus), tmp_path / "cut", stop=lambda: next(answers))
    assert (error.value.folder, error.value.step) == (tmp_path / "cut", 2)
    train(gpt2(corpus), tmp_path / "cut", resume=True)
    train(gpt2(corpus), tmp_path / "whole")
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


# Several processes

WORKER = """
import gc, sys, torch
from torch import distributed as dist
from cachemuon_lab.config import RunConfig
from cachemuon_lab.train import train
torch.set_num_threads(1)
text, folder, store, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
run = train(RunConfig.from_json(text), folder, device="cpu")
assert run.complete and run.environment["processes"] == 2
gc.collect()  # the wrapped model, which keeps gloo's threads
dist.destroy_process_group()
"""


def test_two_processes_train_as_one(corpus, tmp_path):
    model = replace(gpt2(corpus).model, dropout=0.0)
    config = gpt2(corpus, model=model, optimizer=OptimizerConfig("gram"), replicas=2, steps=4)
    one = train(config, tmp_path / "one")
    arguments = [config.to_json(), tmp_path / "two", tmp_path / "store"]
    command = [sys.executable, "-c", WORKER, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    two = Run.open(tmp_path / "two")
    assert [line["tokens"] for line in two.steps] == [line["tokens"] for line in one.steps]
    losses = [[line["loss"] for line in run.steps] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # gradients are summed in another order
    assert two.steps[-1]["flops"] == one.steps[-1]["flops"]  # each matrix is solved by one of them
    assert two.steps[-1]["flops_paper"] == one.steps[-1]["flops_paper"]


def test_micro_batches_must_be_divisible():
    with pytest.raises(ValueError, match="divisible by the number of processes, 2, got 3"):
        Ranks(0, 2).share(3)


@pytest.mark.parametrize("make", [gpt2, resnet])
def test_the_part_of_the_validation_changes_nothing_else(make, corpus, cifar, any_checksum, tmp_path):
    config, runs = make(corpus if make is gpt2 else cifar), {}
    for part in ("all", "tune", "report"):
        run = replace(config, steps=2, validate_every=2, data=replace(config.data, part=part))
        runs[part] = train(run, tmp_path / part)
        assert same_bits(weights(tmp_path / part), weights(tmp_path / "all"))
    assert len({run.validations[-1]["loss"] for run in runs.values()}) == 3


# Optimizers


def test_optimizers_are_what_their_names_say():
    model = build(GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256))
    made = {config.kind: make_optimizer(config, model) for config in reversed(OPTIMIZERS)}
    assert isinstance(made["polar"].param_groups[0]["solver"], StandardNS)
    assert made["polar"].param_groups[0]["solver"] != made["jordan"].param_groups[0]["solver"]
    assert made["gram"].param_groups[0]["solver"] == GramNS()
    paper = made["paper"].param_groups[0]
    assert (paper["probe"], paper["gamma"], paper["max_age"], paper["clip"]) == ("exact", 2.0, None, 0.0)
    assert (paper["gate"], paper["cache_all"]) == ("residual", True)
    assert made["adamw"].param_groups[0]["lr"] == 2e-3
    cache = made["cache"].param_groups[0]
    assert (cache["probe"], cache["gamma"], cache["max_age"], cache["vectors"]) == ("sketch", 2.0, 2, 8)
    assert made["stale"].param_groups[0]["period"] == 2
    adam = made["gram"].param_groups[-1]
    assert (adam["use_muon"], adam["lr"], adam["betas"], adam["eps"]) == (False, 2e-3, (0.9, 0.999), 1e-8)


def test_cachemuon_has_all_settings_of_its_configuration():
    settings = {"gamma": 3.0, "vectors": 4, "max_age": 9, "clip": 0.75}
    settings |= {"max_norm": 3.0, "gate": "residual", "cache_all": True, "min_rows": 2}
    assert settings.keys() == set(CACHE_SETTINGS)
    optimizer = make_optimizer(OptimizerConfig("cache", **settings), build(ResNetConfig(width=4)))
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in settings} == settings


def test_the_defaults_are_those_of_cachemuon():
    """Else a run called CacheMuon would not be what `CacheMuon(params)` is."""
    config, optimizer = OptimizerConfig("cache"), CacheMuon([torch.nn.Parameter(torch.eye(3))])
    for name in CACHE_SETTINGS:
        assert getattr(config, name) == optimizer.defaults[name], name


def test_the_head_goes_where_it_is_told():
    for head, matrices in (("adam", 20), ("muon", 21)):
        optimizer = make_optimizer(OptimizerConfig("gram", head=head), build(ResNetConfig(width=4)))
        assert len(optimizer.param_groups[0]["params"]) == matrices


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_stale_takes_its_previous_direction_again(shape):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = StaleMuon([parameter], period=3, **PAPERS | {"lr": 1.0, "weight_decay": 0.0})
    moves, momentum, expected = [], torch.zeros(shape), []
    for step in range(6):
        gradient = torch.randn(shape, generator=generator)
        momentum = torch.lerp(momentum, gradient, 1 - 0.95)
        if step % 3 == 0:
            direction = GramNS()(momentum)
        expected.append(-direction)
        before, parameter.grad = parameter.detach().clone(), gradient
        optimizer.step()
        moves.append(parameter.detach() - before)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(moves, expected, strict=True))
    stats = optimizer.cache_stats()
    assert (stats["hits"], stats["misses"]) == (4, 2)
    assert stats["flops_paper"] == 2 * flops.PaperCost(3, 5).gram


def test_stale_leaves_a_matrix_whose_gradient_is_not_finite():
    parameter = torch.nn.Parameter(torch.eye(3, 5))
    optimizer = StaleMuon([parameter])
    for value in (1.0, math.nan):
        parameter.grad = torch.full((3, 5), value)
        before = parameter.detach().clone()
        optimizer.step()
    assert torch.equal(parameter, before)
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        assert optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]["non-finite"] == 1


def test_stale_with_period_one_is_gram(corpus, tmp_path):
    for kind in ("gram", "stale"):
        train(gpt2(corpus, optimizer=OptimizerConfig(kind, period=1)), tmp_path / kind)
    assert same_bits(weights(tmp_path / "gram"), weights(tmp_path / "stale"))


def test_the_meter_changes_nothing():
    moved = []
    for metered in (False, True):
        model = torch.nn.Linear(5, 3, bias=False)
        parameter = torch.nn.init.eye_(model.weight)
        optimizer = make_optimizer(OptimizerConfig("paper"), model)
        step = Meter(optimizer, torch.device("cpu")).step if metered else optimizer.step
        for _ in range(3):
            parameter.grad = torch.ones(3, 5).tril()
            step()
        moved.append(parameter.detach())
    assert torch.equal(*moved)
