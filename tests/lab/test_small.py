"""benchmarks/small.py: the search, interruption, and what it says."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_tokens import write_tokens
from trainings import Stopped, Trainings, best_of

from cachemuon_lab.record import Run

TINY = ("model.width=16", "model.heads=2", "model.layers=1", "model.vocabulary=32", "model.context=8")


@pytest.fixture
def small(monkeypatch):
    import small as module

    own = ("data.context=8", "batch_size=2", "accumulation=1", "autocast=none", "validation_batches=2")
    monkeypatch.setattr(module, "SETTINGS", (*own, *TINY))
    monkeypatch.setattr(module, "SHORTER", ())
    monkeypatch.setattr(module, "OFTEN", 2)
    monkeypatch.setattr(module, "TIMED", 2)
    monkeypatch.setattr(module, "LADDER", (0.01, 0.02))
    monkeypatch.setattr(module, "FIRST", dict.fromkeys(module.SEARCHED, (0, 1)))
    return module


@pytest.fixture
def data(tmp_path):
    return write_tokens(tmp_path, train=400, val=200, vocabulary=32)


def test_runs_stop_in_time_and_go_on(small, data, tmp_path, capfd):
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        small.Small(data, Trainings(out, workers=1, minutes=0), steps=6, search=3).results()
    first = Run.open(out / "search-gram-0.01")
    assert [line["step"] for line in first.steps] == [1] and not first.complete
    results = small.Small(data, Trainings(out), steps=6, search=3).results()
    assert [row["name"] for row in results["methods"]] == [*small.SEARCHED, *small.UNTUNED]
    rates = {row["name"]: row["lr"] for row in results["methods"]}
    assert rates["normuon"] == rates["cache"] == rates["gram"]
    assert "6 of 6 steps" in capfd.readouterr().out
    losses = results["searched"]["gram"]
    assert losses.keys() == {0.01, 0.02} and losses[rates["gram"]] == min(losses.values())
    assert results["searched"].keys() == set(small.SEARCHED)
    for row in results["methods"]:
        assert row["steps"] == [2, 4, 6]
        assert row["seconds"] == pytest.approx([step * row["step_seconds"] for step in (2, 4, 6)], abs=0.01)
        assert 0 < row["optimizer_seconds"] <= row["step_seconds"]  # both rounded
    small.draw(results, out / "small.png")
    assert (out / "small.png").stat().st_size > 10_000
    cells = small.table(results)
    assert len(cells) == 6 and cells[1][0] == "GramMuon" and cells[1][-1] == "1.00"


def test_the_search_climbs_until_a_rate_is_worse(small, monkeypatch):
    losses = {0.01: 4.0, 0.02: 3.0, 0.04: 2.0, 0.08: 1.0, 0.16: 2.0}
    monkeypatch.setattr(small, "LADDER", (0.005, *losses))
    monkeypatch.setattr(small, "FIRST", {"gram": (2, 3), "cache-none": (4, 5)})
    tried = []

    def trained(self, configs):
        tried.append([(config.optimizer.kind, config.optimizer.lr) for config in configs.values()])
        return {name: SimpleNamespace(loss=losses[config.optimizer.lr]) for name, config in configs.items()}

    monkeypatch.setattr(Trainings, "run", trained)
    found = small.Small(Path(), Trainings(Path()), 2, 2, names=("cache-none",)).searched()
    gram, cache = (("gram", rate) for rate in (0.02, 0.04, 0.08, 0.16)), (("cache", r) for r in (0.08, 0.16))
    rates = [*gram], [*cache]
    assert tried == [[*rates[0][:2], *rates[1]], [rates[0][2], ("cache", 0.04)], [rates[0][3]]]
    assert list(found["gram"]) == [0.02, 0.04, 0.08, 0.16] and best_of(found["gram"]) == 0.08


def test_the_time_to_a_loss_lies_between_two_validations(small):
    row = {"losses": [4.0, 3.0, 2.0], "seconds": [10.0, 20.0, 40.0]}
    assert small.seconds_to(row, 4.5) == 10
    assert small.seconds_to(row, 3.5) == 15
    assert small.seconds_to(row, 2.25) == 35
    assert small.seconds_to(row, 1.9) is None


def test_the_command_writes_its_results(small, data, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in ("small", "small_search")))
    out = tmp_path / "out"
    told = ["--data", data, "--out", out, "--steps", 2, "--search", 2, "--workers", 1, "--page", page]
    monkeypatch.setattr(sys, "argv", ["small.py", *map(str, told)])
    small.main()
    assert len(json.loads((out / "small.json").read_text())["methods"]) == 5
    assert page.read_text().count("| GramMuon |") == 2 and "| 0.01 | 0.02 |" in page.read_text()


def test_times_alone(small, data, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table times -->\n<!-- end -->\n")
    told = ["--data", data, "--out", tmp_path / "out", "--times", "--page", page]
    monkeypatch.setattr(sys, "argv", ["small.py", *map(str, told)])
    small.main()
    assert not (tmp_path / "out").exists()
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 6 and rows[1].startswith("| GramMuon |") and rows[1].endswith("| 1.00 |")
    assert "of GramMuon's step" in capsys.readouterr().out
