"""benchmarks/longer.py: from the search to its tables and picture."""

import json
import sys

import longer
import pytest
from made_tokens import write_tokens

TINY = ("model.width=32", "model.layers=1", "model.context=16", "batch_size=2", "validate_every=2")


@pytest.fixture
def data(tmp_path):
    return write_tokens(tmp_path, train=400, val=4000)


def test_the_command_searches_trains_and_tells(data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(longer, "SETTINGS", (*TINY, "validation_batches=2"))
    monkeypatch.setattr(longer, "LADDER", (0.01, 0.02))
    monkeypatch.setattr(longer, "FIRST", {kind: (0, 1) for kind in longer.FIRST})
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in ("longer", "longer_search")))
    told = ["--text", data, "--out", out, "--steps", 4, "--search", 2, "--workers", 1, "--page", page]
    monkeypatch.setattr(sys, "argv", ["longer.py", *map(str, told), "--minutes", "0"])
    longer.main()
    assert "goes on" in capfd.readouterr().out and not (out / "longer.json").exists()
    monkeypatch.setattr(sys, "argv", ["longer.py", *map(str, told)])
    longer.main()
    results = json.loads((out / "longer.json").read_text())
    searched = results["searched"]
    assert searched.keys() == {"gram", "jordan", "cache-none"}
    fresh = min(("gram", "jordan"), key=lambda kind: min(searched[kind].values()))
    rows = results["methods"]
    wanted = [(name, rate) for name in (fresh, "cache-none") for rate in (0.02, 0.01)]
    assert [(row["name"], row["lr"]) for row in rows[:4]] == wanted
    best = next(row["lr"] for row in rows[:2] if len(row["losses"]) == 2)
    assert [(row["name"], row["lr"]) for row in rows[4:]] == [("normuon", best), ("cache", best)]
    assert all(len(row["losses"]) == 2 for row in rows[4:])
    for one, half in (rows[:2], rows[2:4]):  # the better of the first seed has the second one too
        better, worse = sorted((one, half), key=lambda row: len(row["losses"]), reverse=True)
        assert len(better["losses"]) == 2 and len(worse["losses"]) == 1
        assert better["losses"][0] <= worse["losses"][0]
        assert better["steps"] == [2, 4]
        assert better["curve"][-1] == pytest.approx(sum(better["losses"]) / 2, abs=1e-4)
    told = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(told) == 1 + 6 + 1 + 3 and "| 0.01 | 0.02 |" in page.read_text()
    if fresh == "gram":
        assert told[1].endswith("| 100% |")
    assert (out / "longer.png").stat().st_size > 10_000
