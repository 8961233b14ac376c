"""benchmarks/study.py: equal budgets, a search that climbs, and what the command writes."""

import json
import math
import sys
from pathlib import Path

import pytest
import study
from ledger import Finished
from made_tokens import write_tokens
from trainings import Trainings

TINY = ("model.width=32", "model.layers=1", "model.context=16", "batch_size=2", "steps=2", "validate_every=2")
FEW = ("validation_batches=2",)


class Counted:
    """Trainings whose loss is a function of the settings, with its minimum off the start."""

    def __init__(self):
        self.configs = {}

    def run(self, configs):
        assert not self.configs.keys() & configs.keys()  # nothing twice
        self.configs |= configs
        return {name: self.finished(config) for name, config in configs.items()}

    def finished(self, config):
        one = config.optimizer
        lr = one.adam_lr if one.kind == "adamw" else one.lr
        loss = abs(math.log(lr / 0.13)) + 10 * abs(one.momentum - 0.98) + 0.01 * config.seed
        loss += abs(one.beta2 - 0.999) + 0.001 * abs((one.max_age or 0) - 5) + 0.1 * one.nesterov
        validations = [{"step": 1, "loss": loss, "accuracy": None}]
        outcomes = {"hit": 9, "expired": 1} if one.kind == "cache" else {"fresh": 10}
        return Finished(validations, outcomes, 0 if one.kind == "adamw" else 100, None)


def test_every_method_has_the_same_number_of_trials_and_climbs():
    made = Counted()
    results = study.Study(made, {"images": Path("images")}).results()
    for task, found in results.items():
        by_name = {name: [one for one in found["search"] if one["name"] == name] for name in study.METHODS}
        assert {len(trials) for trials in by_name.values()} == {24}
        rows = {row["name"]: row for row in found["methods"]}
        assert rows.keys() == study.METHODS.keys()
        assert all(len(row["losses"]) == 5 for row in rows.values())
        assert (rows["gram"]["lr"], rows["gram"]["settings"]) == (0.12, "0.98, no Nesterov")
        assert (rows["dion3-half"]["lr"], rows["dion3-half"]["settings"]) == (0.12, "0.98, beta2 0.999")
        assert rows["cache"]["settings"].endswith("max_age 5")
        assert rows["adamw"]["lr"] == max(study.ADAM_RATES)
        parts = {config.data.part for name, config in made.configs.items() if name.startswith(task)}
        assert parts == {"tune", "report"}
    for name, config in made.configs.items():
        assert (config.data.part == "tune") == (config.seed == 0) == ("-tune-" in name)
    assert len(set(made.configs.values())) == len(made.configs) == 14 * (24 + 5)


def test_long_trainings_begin_at_the_best_of_the_text():
    made = Counted()
    data = dict.fromkeys(("text", "long"), Path("text"))
    results = study.Study(made, data, ["gram", "cache"], trials=6).results()
    best = {row["name"]: row["lr"] for row in results["text"]["methods"]}
    for name, lr in best.items():
        rates = [one["lr"] for one in results["long"]["search"] if one["name"] == name]
        assert rates[0] == lr and len(rates) == 3
        assert len({one["settings"] for one in results["long"]["search"] if one["name"] == name}) == 1
    assert {len(row["losses"]) for row in results["long"]["methods"]} == {3}
    steps = {(config.steps, config.batch_size) for name, config in made.configs.items() if "long" in name}
    assert steps == {(2000, 16)}


def test_the_next_trial_is_the_nearest_untried_setting():
    method = study.METHODS["gram"]
    start = method.start({})
    assert (method.at(start).lr, method.at(start).momentum, method.at(start).nesterov) == (0.04, 0.9, True)
    elsewhere = method.at(method.start({"lr": 0.06, "momentum": 0.8}))
    assert (elsewhere.lr, elsewhere.momentum, elsewhere.nesterov) == (0.06, 0.8, True)
    soap = study.METHODS["soap"]  # whose ladder has no such rate
    assert soap.start({"lr": 0.06, "momentum": 0.8}) == soap.start({})
    tried, seen = {start: 1.0}, []
    for _ in range(5):
        seen.append(method.next(tried))
        tried[seen[-1]] = 2.0
    rate, momentum, knob = start
    assert seen == [
        (rate + 1, momentum, knob),
        (rate - 1, momentum, knob),
        (rate, momentum + 1, knob),
        (rate, momentum - 1, knob),
        (rate, momentum, knob + 1),
    ]
    tried[seen[1]] = 0.5
    assert method.next(tried) == (rate - 2, momentum, knob)
    every = {(a, b, c): 1.0 for a in range(12) for b in range(5) for c in range(2)}
    assert method.next(every) is None
    assert method.next({start: 1.0, seen[0]: 2.0, seen[1]: 2.0}, free=1) == (rate + 2, momentum, knob)


def test_a_training_that_diverged_is_the_worst():
    class Diverged(Counted):
        def finished(self, config):
            found = super().finished(config)
            if config.optimizer.lr > 0.02 and config.seed == 0:
                found.validations[0]["loss"] = math.nan
            return found

    results = study.Study(Diverged(), {"text": Path("text")}, ["gram"], trials=8).results()
    assert results["text"]["methods"][0]["lr"] <= 0.02


@pytest.fixture
def tiny(monkeypatch):
    tasks = {"text": study.Task("gpt2-mini", (*TINY, *FEW), seeds=(1, 2))}
    tasks["long"] = study.Task("gpt2-mini", (*TINY, *FEW, "steps=3", "validate_every=3"), seeds=(1, 2))
    monkeypatch.setattr(study, "TASKS", tasks)
    monkeypatch.setattr(study, "TIMED", 2)


def test_the_command_searches_times_and_tells(tiny, tmp_path, monkeypatch, capfd):
    data = write_tokens(tmp_path / "text", train=4000, val=2000)
    page, out, ledger = tmp_path / "page.md", tmp_path / "out", tmp_path / "ledger.jsonl"
    names = [f"study_{task}{part}" for task in ("text", "long") for part in ("", "_seeds", "_search")]
    page.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in names))
    methods = ["gram", "soap", "adamw", "cache"]
    told = ["--text", data, "--long", "--out", out, "--trials", 2, "--workers", 1, "--ledger", ledger]
    told += ["--page", page, "--methods", *methods]
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, told), "--minutes", "0"])
    study.main()
    assert "goes on" in capfd.readouterr().out and not (out / "study.json").exists()
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, told)])
    study.main()
    results = json.loads((out / "study.json").read_text())
    assert [row["name"] for row in results["text"]["methods"]] == methods
    assert all("step" not in row for row in results["text"]["methods"])
    lines = len(ledger.read_text().splitlines())
    assert lines == 4 * (2 + 2) + 4 * (3 + 2)
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, told), "--times"])
    study.main()
    assert len(ledger.read_text().splitlines()) == lines  # nothing was trained again
    results = json.loads((out / "study.json").read_text())
    assert all(0 < row["optimizer"] < row["step"] for row in results["long"]["methods"])
    text = page.read_text()
    assert "| GramMuon | 0.02 |" in text or "| GramMuon | 0.03 |" in text
    assert text.count("| SOAP |") == 4 and "s a step" in text
    assert (out / "study.png").stat().st_size > 10_000
    assert Trainings(out, ledger=ledger).ledger.lines
