"""The laboratory on several ranks: the record of one, checkpoints for any number of ranks, restarts."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import distributed as dist

from cachemuon_lab import train as train_module
from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.data.images import ImageBatches
from cachemuon_lab.models import GPT2Config, ResNetConfig
from cachemuon_lab.record import Run, held
from cachemuon_lab.train import Interrupted, train

OPTIMIZERS = {
    "polar": OptimizerConfig("polar"),
    "gram": OptimizerConfig("gram", nesterov=True),
    "paper": OptimizerConfig("paper", gamma=2.0),
    "cache": OptimizerConfig("cache", gamma=2.0, max_age=3, cache_all=True),
    "residual": OptimizerConfig("cache", gamma=2.0, max_age=3, gate="residual", cache_all=True),
    "adamw": OptimizerConfig("adamw"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return folder


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    for name, count in (("data_batch_1.bin", 64), ("test_batch.bin", 40)):
        rows = np.random.default_rng(0).integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())
    return folder


def text(corpus, kind, **changes):
    config = RunConfig(
        name="tiny",
        model=GPT2Config(layers=2, heads=2, width=24, context=16, vocabulary=256),
        data=DataConfig("python", path=str(corpus)),
        optimizer=OPTIMIZERS[kind],
        schedule=ScheduleConfig("plateau_linear"),
        steps=8,
        batch_size=2,
        accumulation=6,
        validate_every=4,
        validation_batches=2,
        checkpoint_every=3,
    )
    return replace(config, **changes)


def images(cifar):
    return RunConfig(
        name="tiny",
        model=ResNetConfig(width=4),
        data=DataConfig("cifar10", path=str(cifar)),
        optimizer=OptimizerConfig("cache", head="muon", gamma=5.0, cache_all=True, max_age=3),
        schedule=ScheduleConfig("cosine"),
        steps=4,
        batch_size=8,
        accumulation=2,
        validate_every=2,
        validation_batches=None,
        checkpoint_every=2,
    )


class UncheckedImages(ImageBatches):
    def __init__(self, *arguments):
        super().__init__(*arguments, checksums={})


def train_on_ranks(rank, world, config, folder, strategy, stop_at):
    train_module.ImageBatches = UncheckedImages
    steps = iter(range(1, config.steps + 1))
    try:
        train(config, folder, resume=True, strategy=strategy, stop=lambda: next(steps) == stop_at)
    except Interrupted:
        return "interrupted"
    return "finished"


def refused_on_ranks(rank, world, config, folder):
    try:
        train(config, folder)
    except ValueError as error:
        return str(error)


def test_all_ranks_hear_that_a_folder_is_in_use(ranks, corpus, tmp_path):
    config = text(corpus, "gram", steps=2)
    with held(tmp_path):
        told = ranks(refused_on_ranks, 2, config, str(tmp_path))
    assert told[0] == told[1] and f"is in use by process {os.getpid()} on" in told[0]
    assert (
        ranks(train_on_ranks, 2, config, str(tmp_path), "ddp", None) == ["finished"] * 2
    )  # one lock for both


def losses(folder):
    run = Run.open(folder)
    assert run.complete
    return [line["loss"] for line in (*run.steps, *run.validations)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_write_the_record_of_one(ranks, corpus, tmp_path, strategy, kind):
    config = text(corpus, kind)
    train(config, tmp_path / "one")
    assert ranks(train_on_ranks, 2, config, str(tmp_path / "two"), strategy, None) == ["finished"] * 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = Run.open(tmp_path / "one").steps, Run.open(tmp_path / "two").steps
    assert [line["hits"] for line in two] == [line["hits"] for line in one]
    if strategy == "fsdp" or kind in ("polar", "gram"):
        assert two[-1]["flops"] == one[-1]["flops"]
    assert two[-1]["flops_paper"] == one[-1]["flops_paper"]


@pytest.mark.parametrize("kind", ["cache", "adamw"])
def test_a_run_goes_on_with_other_ranks_and_the_other_strategy(ranks, corpus, tmp_path, kind):
    config = text(corpus, kind)
    train(config, tmp_path / "one")
    folder = str(tmp_path / "many")
    assert ranks(train_on_ranks, 3, config, folder, "fsdp", 2) == ["interrupted"] * 3
    assert ranks(train_on_ranks, 2, config, folder, "ddp", 2) == ["interrupted"] * 2
    assert ranks(train_on_ranks, 2, config, folder, "fsdp", 2) == ["interrupted"] * 2
    train(config, folder, resume=True)
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert [line["hits"] for line in Run.open(folder).steps] == [
        line["hits"] for line in Run.open(tmp_path / "one").steps
    ]


def test_sharded_convolutions_train(ranks, cifar, tmp_path):
    answers = ranks(train_on_ranks, 2, images(cifar), str(tmp_path / "two"), "fsdp", None)
    assert answers == ["finished"] * 2
    assert np.isfinite(losses(tmp_path / "two")).all() and Run.open(tmp_path / "two").hit_rate > 0


def test_the_same_ranks_go_on_bit_for_bit(ranks, corpus, tmp_path):
    for strategy in ("ddp", "fsdp"):
        config = text(corpus, "cache")
        ranks(train_on_ranks, 2, config, str(tmp_path / strategy / "whole"), strategy, None)
        ranks(train_on_ranks, 2, config, str(tmp_path / strategy / "parts"), strategy, 5)
        ranks(train_on_ranks, 2, config, str(tmp_path / strategy / "parts"), strategy, None)
        assert losses(tmp_path / strategy / "parts") == losses(tmp_path / strategy / "whole")


def refused(rank, world, config, folder, strategy):
    try:
        train(config, folder, strategy=strategy)
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()


def test_what_cannot_be_sharded_is_refused(ranks, corpus, tmp_path):
    diagnosed = text(corpus, "cache", diagnostics="gate")
    for told in ranks(refused, 2, diagnosed, str(tmp_path / "a"), "fsdp"):
        assert told == "strategy must be 'ddp' for diagnostics of whole matrices, got 'fsdp'"
    for told in ranks(refused, 2, text(corpus, "cache"), str(tmp_path / "b"), "zero"):
        assert told == "strategy must be one of ddp, fsdp, got 'zero'"


def torchrun(arguments, *options):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [*run, "-m", "cachemuon_lab.cli", "train", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def process_of(rank, parent):
    """The process that torchrun has started for a rank."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                told = (folder / "environ").read_bytes().split(b"\0")
                ours = int(re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())[1]) == parent
            except (OSError, TypeError):
                continue
            if ours and f"RANK={rank}".encode() in told:
                return int(folder.name)
    return None


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank's process in /proc")
def test_a_run_goes_on_after_a_rank_was_killed(ranks, corpus, tmp_path, strategy="fsdp"):
    sets = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "batch_size=2"]
    sets += ["accumulation=2", "validation_batches=1", "steps=150", "checkpoint_every=5", "validate_every=75"]
    sets += [f"data.path={corpus}"]
    arguments = ["gpt2-nano", "--optimizer", "cache", *(w for one in sets for w in ("--set", one))]
    arguments += ["--strategy", strategy]
    out = tmp_path / "out"
    process = torchrun([*arguments, "--out", str(out)], "--max-restarts", "1")
    until = time.monotonic() + 150
    while time.monotonic() < until and not (out / "record.jsonl").exists():
        time.sleep(0.05)
    while time.monotonic() < until and (out / "record.jsonl").read_text().count('"step_seconds"') < 12:
        time.sleep(0.02)
    os.kill(process_of(1, process.pid), signal.SIGKILL)
    told, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    run = Run.open(out)
    assert run.complete and [line["step"] for line in run.steps] == list(range(1, 151))
    assert told.count("The run is in") == 1
    ranks(train_on_ranks, 2, run.config, str(tmp_path / "quiet"), strategy, None)
    assert losses(out) == losses(tmp_path / "quiet")
