"""benchmarks/rates.py: the same settings for all but the learning rate, and what the command writes."""

import json
import sys

import pytest
import rates
from made_tokens import write_tokens

from cachemuon_lab.recipes import recipe

TINY = ("model.width=32", "model.layers=1", "model.context=16", "batch_size=2", "steps=2", "validate_every=2")


def test_methods_differ_in_nothing_but_their_own(tmp_path):
    for task, own in rates.TASKS.items():
        assert max(own.rates) == 16 * min(own.rates) and list(own.rates) == sorted(own.rates)
        made = {method: rates.config(task, method, 0.02, 1, tmp_path) for method in rates.METHODS}
        for method, config in made.items():
            assert config.data.part == "report" and config.seed == 1
            one, shared = config.optimizer, own.shared
            names = ("momentum", "nesterov", "weight_decay", "adjust_lr_fn", "adam_lr", "head")
            assert all(getattr(one, name) == getattr(shared, name) for name in names)
            assert one.label.startswith(rates.METHODS[method][0].split(",")[0])
        assert len({config.optimizer for config in made.values()}) == len(made)


def test_the_command(tmp_path, monkeypatch, capsys):
    write_tokens(tmp_path / "text", 4000, 2000)
    task = rates.TASKS["text"]
    monkeypatch.setitem(
        rates.TASKS,
        "text",
        rates.Task(task.recipe, task.shared, (0.01, 0.16), (*TINY, "validation_batches=2")),
    )
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("<!-- table rates_text -->\n<!-- end -->\n")
    command = [
        "rates.py",
        "--text",
        str(tmp_path / "text"),
        "--seeds",
        "0",
        "1",
        "--methods",
        "gram",
        "cache",
    ]
    command += ["--out", str(out), "--page", str(page), "--ledger", str(tmp_path / "ledger.jsonl")]
    monkeypatch.setattr(sys, "argv", command)
    rates.main()
    rows = json.loads((out / "rates.json").read_text())
    assert [(row["method"], row["lr"]) for row in rows] == [
        (method, lr) for method in ("gram", "cache") for lr in (0.01, 0.16)
    ]
    assert all(len(row["losses"]) == 2 and 3 < row["losses"][0] < 7 for row in rows)
    assert rows[0]["flops"] == 1
    assert (out / "rates.png").stat().st_size > 10_000
    table = page.read_text()
    assert "|  | 0.01 | 0.16 | FLOPs |" in table and "| CacheMuon | " in table
    assert "GramMuon" in capsys.readouterr().out
    assert recipe(task.recipe).base.steps == 300  # the real one is untouched


def test_gram_muon_is_the_unit(monkeypatch, tmp_path, capsys):
    command = ["rates.py", "--text", str(tmp_path), "--methods", "cache"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        rates.main()
    assert "GramMuon" in capsys.readouterr().err
