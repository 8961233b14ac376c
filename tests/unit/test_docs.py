"""What the documentation shows runs, and its tables say what the code does."""

import inspect
import pathlib
import re

import pytest

from cachemuon import CacheMuon, Muon
from cachemuon.settings import ADAM_DEFAULTS
from cachemuon.stats import OUTCOMES

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/optimizers.md", "docs/distributed.md", "docs/memory.md"])
def test_snippets_run_one_after_the_other(page, capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert snippets
    names = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    if page == "README.md":
        assert "of 40 directions came from the cache" in capsys.readouterr().out


def test_links_between_pages_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_defaults():
    settings = (ROOT / "docs/optimizers.md").read_text().split("## The ratio")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*) \|", settings, re.M)
    table = {name.strip("`"): default.strip() for name, default in rows}
    parameters = {**inspect.signature(Muon).parameters, **inspect.signature(CacheMuon).parameters}
    muon, cached = (
        ("lr", "momentum", "weight_decay", "nesterov", "adjust_lr_fn"),
        ("gamma", "probe", "vectors", "max_age", "clip", "max_norm"),
    )
    for name in (*muon, *cached, "gate", "guard", "cache_dtype", "max_cache_bytes", "max_workspace_bytes"):
        assert eval(table[name]) == parameters[name].default
    for name in ("seed", "view"):
        assert name in table
    assert ADAM_DEFAULTS["betas"] == (0.9, 0.999)


def test_the_table_of_outcomes():
    text = (ROOT / "docs/optimizers.md").read_text().split("## What it did")[1]
    assert tuple(re.findall(r"^\| ([a-z-]+) \| \w.* \|$", text, re.M)[1:]) == OUTCOMES
