"""benchmarks/ledger.py: a study goes on from what another machine has finished."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import beyond
import ledger
import longer
import pytest
import rates
import study
from ledger import Finished, Ledger
from made_tokens import write_tokens
from pages import check_tables
from trainings import Trainings

from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import Run

ROOT = Path(__file__).parents[2]
TINY = ("model.width=32", "model.layers=1", "model.context=16", "batch_size=2", "validation_batches=2")


@pytest.fixture
def config(tmp_path):
    data = write_tokens(tmp_path / "text", train=4000, val=2000)
    settings = (*TINY, "steps=4", "validate_every=2", f"data.path={data}")
    return configure(recipe("gpt2-mini"), OptimizerConfig("stale", lr=0.01), settings)


def test_what_a_run_came_to_is_kept_and_not_trained_again(config, tmp_path):
    path = tmp_path / "results" / "ledger.jsonl"
    first = Trainings(tmp_path / "here", workers=1, ledger=path).run({"one": config})["one"]
    run = Run.open(tmp_path / "here" / "one")
    assert first == Finished.of(run)
    assert first.loss == pytest.approx(run.validations[-1]["loss"], abs=1e-5)
    assert [line["step"] for line in first.validations] == [2, 4]
    assert first.outcomes == {"first": 4, "hit": 8, "expired": 4} and first.flops == run.steps[-1]["flops"]

    moved = (tmp_path / "text").rename(tmp_path / "moved")  # another machine: other folders, no runs
    there = replace(config, data=replace(config.data, path=str(moved)))
    assert Trainings(tmp_path / "there", workers=1, ledger=path).run({"one": there}) == {"one": first}
    assert not (tmp_path / "there").exists()
    assert len(path.read_text().splitlines()) == 1


def test_other_settings_and_other_data_are_other_runs(config, tmp_path):
    path, finished = (
        tmp_path / "ledger.jsonl",
        Finished([{"step": 4, "loss": 2.0, "accuracy": None}], {}, None, None),
    )
    Ledger(path).add("one", config, finished)
    kept = Ledger(path)
    assert kept.find("one", config) == finished and kept.find("two", config) is None
    assert kept.find("one", replace(config, name="renamed")) == finished
    assert kept.find("one", replace(config, optimizer=replace(config.optimizer, lr=0.02))) is None
    other = write_tokens(tmp_path / "other", train=4001, val=2000)
    assert kept.find("one", replace(config, data=replace(config.data, path=str(other)))) is None

    line = json.loads(path.read_text())
    del line["config"]["optimizer"]["min_rows"]  # a setting that came after the line
    path.write_text(json.dumps(line) + "\n")
    assert Ledger(path).find("one", config) == finished
    later = replace(config, optimizer=replace(config.optimizer, min_rows=64))
    assert Ledger(path).find("one", later) is None


def test_a_line_of_before_the_schedule_is_read_in_todays_names(config, tmp_path):
    path = tmp_path / "ledger.jsonl"
    settings = {"cache_all": True, "min_rows": 64}
    config = replace(config, optimizer=OptimizerConfig("cache", **settings))
    Ledger(path).add("cache", config, Finished([{"step": 4, "loss": 2.0, "accuracy": None}], {}, None, None))
    line = json.loads(path.read_text())
    optimizer = line["config"]["optimizer"]
    del optimizer["cache_all"]
    optimizer |= {"guard": False, "gate": "sync"}
    line["name"] = "cache-guard0-min_rows64"
    line["outcomes"] = {"hit": 7, "cold": 4, "stale": 3, "residual": 2, "resting": 1, "non-finite": 5}
    path.write_text(json.dumps(line) + "\n")
    found = Ledger(path).find("cache-cache_all1-min_rows64", config)
    renamed = {"hit": 7, "first": 4, "expired": 3, "rejected": 2, "uncached": 1, "non-finite": 5}
    assert found.outcomes == renamed
    guarded = replace(config, optimizer=replace(config.optimizer, cache_all=False))
    assert Ledger(path).find("cache-cache_all1-min_rows64", guarded) is None


def test_the_newest_line_counts(config, tmp_path):
    kept = Ledger(tmp_path / "ledger.jsonl")
    for loss in (3.0, 2.0):
        kept.add("one", config, Finished([{"step": 4, "loss": loss, "accuracy": None}], {}, 1, None))
    assert Ledger(tmp_path / "ledger.jsonl").find("one", config).loss == 2.0


ALONE = """
import sys
from pathlib import Path
from cachemuon_lab.config import RunConfig
from trainings import Stopped, Trainings
if __name__ == "__main__":
    config = RunConfig.from_json(Path(sys.argv[1]).read_text())
    try:
        Trainings(Path(sys.argv[2]), workers=1).run({"one": config, "two": config, "three": config})
    except Stopped as stopped:
        print(stopped)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("how", ["ctrl-c", "kill -INT", "kill -KILL"])
def test_trainings_end_with_the_study_that_asked_for_them(config, tmp_path, how):
    """By Ctrl-C all its processes are told; by kill it alone, or not even that."""
    (tmp_path / "config.json").write_text(replace(config, steps=10**6, checkpoint_every=10**6).to_json())
    (tmp_path / "alone.py").write_text(ALONE)
    begun = subprocess.Popen(
        [sys.executable, tmp_path / "alone.py", tmp_path / "config.json", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    record = tmp_path / "out" / "one" / "record.jsonl"
    with begun as study:
        try:
            assert _within(60, lambda: record.exists() and record.stat().st_size > 0)
            if how == "kill -KILL":
                study.kill()
            else:
                (os.killpg if how == "ctrl-c" else os.kill)(study.pid, signal.SIGINT)
                assert "goes on" in study.communicate(timeout=60)[0]
            assert _within(30, lambda: not _alive(study.pid))
        finally:
            if _alive(study.pid):
                os.killpg(study.pid, signal.SIGKILL)
    assert (tmp_path / "out" / "one" / "checkpoints" / "latest.pt").exists()
    assert not (tmp_path / "out" / "two").exists()


def _alive(group):
    """Whether a process of that group does something; one that has ended and nobody asked about does not."""
    found = subprocess.run(
        ["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    return any(
        int(pgid) == group and not stat.startswith("Z") for pgid, stat in map(str.split, found.splitlines())
    )


def _within(seconds, true):
    end = time.time() + seconds
    while not (done := true()) and time.time() < end:
        time.sleep(0.1)
    return done


class Known:
    """Trainings of a ledger alone, wherever their data is."""

    def __init__(self, path, monkeypatch):
        self.ledger = Ledger(path)
        data = {line["config"]["data"]["kind"]: line["data"] for line in self.ledger.lines}
        monkeypatch.setattr(ledger, "data_of", lambda config: data[config.data.kind])

    def run(self, configs):
        found = {name: self.ledger.find(name, config) for name, config in configs.items()}
        assert None not in found.values(), [name for name, finished in found.items() if finished is None]
        return found


def test_the_pages_have_what_the_ledger_says_of_text_and_images(monkeypatch):
    known = Known(ROOT / "benchmarks" / "results" / "beyond.jsonl", monkeypatch)
    results = beyond.Study(known, {task: Path(task) for task in ("text", "images")}).results()
    check_tables(beyond.tables(results))
    for found in results.values():
        assert {row["kind"] for row in found["methods"]} == {*beyond.METHODS} - {beyond.CACHE_64}


def test_the_pages_have_what_the_ledger_says_of_longer_trainings(monkeypatch):
    known = Known(ROOT / "benchmarks" / "results" / "longer.jsonl", monkeypatch)
    results = longer.Longer(Path("text"), known, steps=2000, search=500).results()
    check_tables(longer.tables(results))
    rows = {row["name"]: row["losses"] for row in results["methods"] if len(row["losses"]) == 2}
    assert len(results["methods"]) == 8 and rows.keys() == {"gram", "normuon", "cache-none", "cache"}
    assert sum(rows["cache"]) < min(sum(rows["normuon"]), sum(rows["gram"]))  # as the pages say


def test_the_pages_have_what_the_ledger_says_of_learning_rates(monkeypatch):
    known = Known(ROOT / "benchmarks" / "results" / "rates.jsonl", monkeypatch)
    methods = [name for name in rates.METHODS if name != "gram-factored"]
    rows = rates.losses(known, {"text": Path("text")}, methods, [0])
    check_tables(rates.tables(rows))
    assert len(rows) == 5 * 5
    losses = {(row["method"], row["lr"]): row["losses"][0] for row in rows}
    for lr in (0.01, 0.02, 0.04):  # what README says of these rates
        fresh = min(losses[method, lr] for method in ("gram", "jordan", "normuon"))
        assert losses["cache", lr] < fresh - 0.02


def test_the_pages_have_what_the_ledger_says_of_normalization(monkeypatch):
    known = Known(ROOT / "benchmarks" / "results" / "study.jsonl", monkeypatch)
    names = ("gram", "jordan", "normuon", "cache")
    results = study.Study(known, {"text": Path("text")}, names, trials=2, seeds=3).results()
    check_tables(study.tables(results))
    assert [len(row["losses"]) for row in results["text"]["methods"]] == [3] * 4
    names = ("gram", "normuon", "cache")
    results = study.Study(known, {"images": Path("images")}, names, trials=6).results()
    check_tables(study.tables(results))
    assert [len(row["losses"]) for row in results["images"]["methods"]] == [5] * 3
