import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cachemuon_lab import checkpoint
from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.models import GPT2Config
from cachemuon_lab.record import Run
from cachemuon_lab.train import interrupts, train

PROGRAM = """
import sys, time, torch
from cachemuon_lab.config import RunConfig
from cachemuon_lab.train import Interrupted, train
torch.set_num_threads(1)
slowly = lambda progress: time.sleep(0.02)  # or it could be done before the signal comes
try:
    train(RunConfig.from_json(sys.argv[1]), sys.argv[2], resume=True, on_progress=slowly)
except Interrupted as stopped:
    print(stopped)
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return RunConfig(
        name="tiny",
        model=GPT2Config(layers=2, heads=2, width=32, context=16, vocabulary=256, dropout=0.1),
        data=DataConfig("python", path=str(corpus)),
        optimizer=OptimizerConfig("cache", gamma=2.0, clip=0.0, cache_all=True),
        schedule=ScheduleConfig("plateau_linear"),
        steps=120,
        batch_size=2,
        validate_every=5,
        validation_batches=1,
        checkpoint_every=4,
    )


def weights(folder):
    return checkpoint.load(folder / "checkpoints" / "latest.pt")["model"]


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@contextmanager
def disk_full_after(size):
    """Files of this process cannot grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# The file


def test_a_state_is_read_back(tmp_path):
    path = tmp_path / "new" / "latest.pt"
    state = {"model": {"w": torch.arange(3.0)}, "standing": {"step": 3, "best_loss": None}}
    checkpoint.save(path, state)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    assert loaded["standing"] == state["standing"]
    assert [entry.name for entry in path.parent.iterdir()] == ["latest.pt"]


@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_a_full_disk_leaves_the_file_before(tmp_path, size):
    path = tmp_path / "latest.pt"
    checkpoint.save(path, {"w": torch.zeros(10)})
    with (
        disk_full_after(size),
        pytest.raises(OSError, match=r"latest.pt could not be written, the one before it is"),
    ):
        checkpoint.save(path, {"w": torch.zeros(100_000)})
    assert torch.equal(checkpoint.load(path)["w"], torch.zeros(10))
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.pt"]


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    path = tmp_path / "latest.pt"
    with pytest.raises(ValueError, match=r"there is no checkpoint .*latest.pt"):
        checkpoint.load(path)
    checkpoint.save(path, {"w": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"latest.pt is no readable checkpoint"):
        checkpoint.load(path)
    torch.save({"format": 99}, path)
    with pytest.raises(ValueError, match="must be a checkpoint of format 1, got 99"):
        checkpoint.load(path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"format": 1, "w": print}, tmp_path / "latest.pt")
    with pytest.raises(ValueError, match="is no readable checkpoint"):
        checkpoint.load(tmp_path / "latest.pt")


def test_generators_are_put_back():
    device = torch.device("cpu")
    states = checkpoint.generators(device)
    drawn = torch.rand(3)
    checkpoint.restore_generators(states, device)
    assert torch.equal(torch.rand(3), drawn)


# The run


def test_a_disk_that_fills_up_leaves_a_run_to_resume(config, tmp_path):
    config = replace(config, steps=10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up(progress):
        if progress["step"] == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    with pytest.raises(OSError, match=r"the checkpoint .* could not be written, the one before it is intact"):
        try:
            train(config, tmp_path / "run", on_progress=fill_up)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "latest.pt")["standing"]["step"] == 4
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "whole")
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_record_that_cannot_grow_says_so(config, tmp_path):
    def fill_up(progress):
        size = (tmp_path / "run" / "record.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError, match=r"the record .*record.jsonl could not be written at step 2"):
        try:
            train(config, tmp_path / "run", on_progress=fill_up)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(Run.open(tmp_path / "run").steps) == 1


def test_a_second_interrupt_is_not_held_back(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with interrupts() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def started(config, folder, lines):
    """A process that trains, once its record has that many lines more than it has now."""
    record = folder / "record.jsonl"
    before = record.read_bytes().count(b"\n") if record.exists() else 0
    command = [sys.executable, "-c", PROGRAM, config.to_json(), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if record.exists() and record.read_bytes().count(b"\n") >= before + lines:
            return process
        time.sleep(0.002)
    process.kill()
    raise AssertionError(f"the run did not get {lines} lines further: exit code {process.wait()}")


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(config, tmp_path):
    config = replace(config, checkpoint_every=2)  # many chances to be killed while one is written
    train(config, tmp_path / "whole")
    for lines, delay in ((7, 0.0), (11, 0.013)):
        process = started(config, tmp_path / "killed", lines)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert not Run.open(tmp_path / "killed").complete
    run = train(config, tmp_path / "killed", resume=True)
    assert [line["step"] for line in run.steps] == list(range(1, 121))
    assert same_bits(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_an_interrupted_run_is_saved_and_resumed(config, tmp_path):
    config = replace(config, checkpoint_every=1000)
    train(config, tmp_path / "whole")
    process = started(config, tmp_path / "stopped", 5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    steps = len(Run.open(tmp_path / "stopped").steps)
    assert said.startswith(f"stopped after step {steps}; resume")
    assert checkpoint.load(tmp_path / "stopped" / "checkpoints" / "latest.pt")["standing"]["step"] == steps
    train(config, tmp_path / "stopped", resume=True)
    assert same_bits(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
