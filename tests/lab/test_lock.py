"""One folder, one writer: real processes, one of which is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachemuon_lab.compare import compare
from cachemuon_lab.config import with_overrides
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import LOCK, Run, held
from cachemuon_lab.sweep import sweep
from cachemuon_lab.train import Interrupted, train

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "batch_size=2"]
TINY += ["validation_batches=1", "validate_every=1000000", "checkpoint_every=10"]
NANO = recipe("gpt2-nano")


def contents(folder: Path):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    out = tmp_path / "run"
    settings = [word for one in (*TINY, "steps=1000000") for word in ("--set", one)]
    command = [sys.executable, "-m", "cachemuon_lab.cli", "train", "gpt2-nano", "--out", str(out), *settings]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while not (out / "checkpoints").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        second = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=100)
        assert second.returncode == 2
        told = f"cachemuon: {out} is in use by process {first.pid} on "
        assert second.stderr.startswith(told) and second.stderr.count("\n") == 1
        config = Run.open(out).config
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match=f"is in use by process {first.pid} on "):
                train(config, out, **how)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    steps = len(Run.open(out).steps)
    with pytest.raises(Interrupted) as stopped:  # it goes on, as if nobody else had been there
        train(config, out, resume=True, stop=lambda: True)
    assert 10 < stopped.value.step <= steps + 1


@pytest.fixture
def config():
    return with_overrides(NANO.base, [*TINY, "steps=2"])


def test_a_finished_run_is_read_whoever_holds_it(config, tmp_path):
    train(config, tmp_path)
    with held(tmp_path):
        assert train(config, tmp_path, resume=True).complete
    with held(tmp_path):
        pass


def test_a_comparison_does_not_remove_a_run_in_training(tmp_path):
    which = {"variants": NANO.variants[:1], "overrides": [*TINY, "steps=2"]}
    (run,) = compare(NANO, tmp_path, **which)
    with held(run.folder):
        before = contents(run.folder)
        with pytest.raises(ValueError, match="is in use by process"):
            compare(NANO, tmp_path, resume=False, **which)
        assert contents(run.folder) == before
    assert compare(NANO, tmp_path, resume=False, **which)[0].complete


def test_a_second_search_is_refused(tmp_path):
    with held(tmp_path), pytest.raises(ValueError, match="is in use by process"):
        sweep(NANO, tmp_path, steps=2, trials=1, overrides=TINY)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path, monkeypatch):
    import shutil

    from cachemuon_lab import record

    lock = record._lock

    def late(handle):
        lock(handle)
        shutil.rmtree(tmp_path / "run")  # by a process that held the lock, just before

    monkeypatch.setattr(record, "_lock", late)
    with pytest.raises(ValueError, match="was just removed"), record.held(tmp_path / "run"):
        pass
