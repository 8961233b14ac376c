"""What the documentation shows runs, its tables say what the code does, and the site of it can be built.

What stands in a ```python block is run, in the order of the page and in one namespace; an ```output block
after it is what it printed, and one with >>> a doctest. ```py is shown and not run: what needs several
processes or a GPU.
"""

import ast
import doctest
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import cachemuon
from cachemuon import CacheMuon, Muon
from cachemuon.optim.adam import ADAM_DEFAULTS
from cachemuon.report.counters import OUTCOMES

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
}
FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.M | re.S)
BLOCKS = {page: [(kind, text) for _, kind, text in FENCE.findall(PAGES[page])] for page in PAGES}
RUN = [page for page, blocks in BLOCKS.items() if any(k == "python" and ">>>" not in t for k, t in blocks)]
EXAMPLES = [page for page, text in PAGES.items() if re.search("^>>> ", text, re.M)]


@pytest.mark.parametrize("page", RUN)
def test_snippets_run_one_after_the_other(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, printed = {}, ""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for kind, text in BLOCKS[page]:
            if kind == "output":
                assert text.rstrip() == printed.rstrip()
            elif kind == "python" and ">>>" not in text:
                exec(compile(text, page, "exec"), names)
                printed = capsys.readouterr().out
                if page == "README.md" and "explain()" in text:
                    assert printed.count("transform of age") == 2  # both matrices are cached


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_print_what_they_show(page):
    results = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert results.failed == 0 and results.attempted > 5


def test_snippets_that_are_not_run_are_few_and_could_be():
    kinds = [kind for blocks in BLOCKS.values() for kind, _ in blocks]
    shown = [text for blocks in BLOCKS.values() for kind, text in blocks if kind == "py"]
    assert {kind for kind in kinds if kind.lower().startswith("py")} <= {"python", "py"}
    assert len(shown) * 10 <= kinds.count("python")
    for text in shown:
        ast.parse(text)


def build_site(config: pathlib.Path, out: pathlib.Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: what is not said is not counted as a warning either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "--site-dir", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_site_builds_without_a_warning(tmp_path):
    built = build_site(ROOT / "mkdocs.yml", tmp_path)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in cachemuon.__all__:
        assert re.search(rf'id="cachemuon\.{name}"', reference), name
    assert not re.search(r"<blockquote>\s*<blockquote>\s*<blockquote>", reference)  # an example without fence
    outside = [
        found
        for page in tmp_path.glob("*.html")
        for found in re.findall(r'<(?:script|link|img)[^>]+"https?:[^"]+', page.read_text(encoding="utf-8"))
    ]
    assert not outside  # nothing is loaded from elsewhere


def test_a_page_that_is_not_in_the_navigation_or_links_to_nowhere_is_refused(tmp_path):
    checks = re.search(r"^validation:.*?\n(?=\n)", (ROOT / "mkdocs.yml").read_text(), re.M | re.S)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[there](nowhere.md) [here](index.md#nowhere)")
    (tmp_path / "docs" / "lost.md").write_text("# Lost")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\n{checks[0]}\nnav: [index.md]\n")
    refused = build_site(config, tmp_path / "site")
    assert refused.returncode == 1 and refused.stderr.count("WARNING") == 3


def test_links_between_pages_exist():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_numbers_of_the_readme_are_those_of_the_results():
    table = PAGES["README.md"].split("## Results")[1].split("\n\n")[1]
    told = re.findall(r"\d+\.\d{2,}|\d+%", table)
    pages = PAGES["docs/results.md"] + PAGES["docs/learning-rate.md"]
    assert len(told) > 10 and not [number for number in told if number not in pages]
    ranks = re.findall(
        r"\d\.\d\d(?=[ .]|$)", PAGES["README.md"].split("**Several GPUs.**")[1].split("\n\n")[0]
    )
    assert len(ranks) == 2 and not [number for number in ranks if number not in PAGES["docs/multi-gpu.md"]]


def test_pages_that_the_code_names_exist():
    for path in sorted(ROOT.glob("src/**/*.py")) + sorted(ROOT.glob("benchmarks/*.py")):
        for name in re.findall(r"docs/[\w./-]+\.(?:md|json|png)", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


def test_files_that_pages_name_exist():
    """Paths of Python files, from the root, from src/ or from src/cachemuon/."""
    for page, text in PAGES.items():
        if page.startswith("docs/notebook/") or page == "CHANGELOG.md":
            continue
        for name in re.findall(r"(?<![\w/.])[\w/]+/\w+\.py\b", text):
            assert any(
                (folder / name).exists() for folder in (ROOT, ROOT / "src", ROOT / "src" / "cachemuon")
            ), (page, name)


def test_the_house_in_contributing_is_the_one_that_stands():
    """Every file of the library is in the table of rooms, and no other."""
    library, told, room = ROOT / "src" / "cachemuon", set(), ""
    for line in PAGES["CONTRIBUTING.md"].split("| room | file |")[1].split("\n\n")[0].splitlines()[2:]:
        first, files = (cell.strip() for cell in line.split("|")[1:3])
        room = {"": room, "no room": "."}.get(first, first.strip("`"))
        told |= {library / room / f"{name}.py" for name in re.findall(r"`(\w+)`", files)}
    assert told == {path for path in library.rglob("*.py") if path.name != "__init__.py"}


def test_the_tables_of_settings():
    """Every setting of the constructors is there, with its default."""
    page = PAGES["docs/settings.md"].split("## Which to change")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*) \|", page, re.M)
    table = {name.strip("`"): default for names, default in rows for name in names.split(", ")}
    parameters = {**inspect.signature(Muon).parameters, **inspect.signature(CacheMuon).parameters}
    del parameters["params"]
    assert table.keys() == parameters.keys() | {"view", "split", "transposed"}
    for name in table.keys() & parameters.keys() - {"solver", "eps"}:  # these two say whose default it is
        assert ast.literal_eval(table[name]) == parameters[name].default, name
    adam = PAGES["docs/learning-rate.md"].split("## What Adam")[1]
    for name in ("lr", "betas", "eps"):
        (told,) = re.findall(rf"^\| `{name}` \| (.*) \|$", adam, re.M)
        assert ast.literal_eval(told) == ADAM_DEFAULTS[name]


def test_the_table_of_outcomes():
    text = PAGES["docs/monitoring.md"].split("## Outcomes")[1].split("## Metrics")[0]
    assert tuple(re.findall(r"^\| ([a-z-]+) \| \w.* \|$", text, re.M)[1:]) == OUTCOMES


def test_the_table_of_metrics():
    text = PAGES["docs/monitoring.md"].split("## Metrics")[1]
    table = text.split("## ")[0]
    assert re.findall(r"^\| `(muon/[a-z_/]+)` \|", table, re.M) == list(Muon([torch.zeros(2, 2)]).metrics())
