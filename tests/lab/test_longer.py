"""benchmarks/longer.py: from the search to its tables and picture."""

import json
import sys

import longer
import numpy as np
import pytest

TINY = ("model.width=32", "model.layers=1", "model.context=16", "batch_size=2", "validate_every=2")


@pytest.fixture
def data(tmp_path):
    for split, size in (("train", 400), ("val", 4000)):
        np.random.default_rng(0).integers(0, 256, size).astype("<u2").tofile(tmp_path / f"{split}.bin")
    return tmp_path


def test_the_command_searches_trains_and_tells(data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(longer, "SETTINGS", (*TINY, "validation_batches=2"))
    monkeypatch.setattr(longer, "LADDER", (0.01, 0.02))
    monkeypatch.setattr(longer, "FIRST", {kind: (0, 1) for kind in longer.FIRST})
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in ("longer", "longer_search")))
    told = [
        "--text",
        data,
        "--out",
        out,
        "--steps",
        4,
        "--workers",
        1,
        "--methods",
        "gram",
        "cache",
        "--page",
        page,
    ]
    monkeypatch.setattr(sys, "argv", ["longer.py", *map(str, told), "--minutes", "0"])
    longer.main()
    assert "goes on" in capfd.readouterr().out and not (out / "longer.json").exists()
    monkeypatch.setattr(sys, "argv", ["longer.py", *map(str, told)])
    longer.main()
    results = json.loads((out / "longer.json").read_text())
    gram, cache = results["methods"]
    best = min(results["searched"]["cache"].items(), key=lambda found: found[1])
    assert gram["kind"] == "gram" and cache["lr"] == float(best[0])
    assert len(cache["losses"]) == 2 and cache["steps"] == [2, 4]
    assert cache["curve"][-1] == pytest.approx(sum(cache["losses"]) / 2, abs=1e-4)
    assert (out / "cache-0.01-s0").exists() and (out / f"cache-{cache['lr']:g}-s2").exists()
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| GramMuon |") and rows[1].endswith("| 100% |")
    assert rows[3].startswith("| CacheMuon |") or rows[2].startswith("| CacheMuon |")
    assert "| 0.01 | 0.02 |" in page.read_text()
    assert (out / "longer.png").stat().st_size > 10_000
