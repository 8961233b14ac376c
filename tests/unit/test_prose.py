"""Words, phrases and sentences that readers stumbled over stay out of pages, help and public docstrings.

The notebook in docs/notebook keeps the words of its time.
"""

import inspect
import pathlib
import re
from collections.abc import Iterator

import pytest
import typer

import cachemuon
from cachemuon.report.summary import Explanation, ParameterRow
from cachemuon.routing.groups import ParamGroups
from cachemuon.routing.rules import Route
from cachemuon_lab.cli import app

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
WORDS = 35
"""The most words of a sentence."""

PLAIN = {
    # home-made words: what to say instead
    r"anew": "again",
    r"dear(er|est)?|dearly": "costly",
    r"part(y|ies)": "rank group",
    r"(is|are|was|were|be) told": "says, gets, receives",
    r"tells? of": "say what it tells",
    r"by heart": "a copy on the host",
    r"gone on from|go(es)? on from|going on from": "continue from",
    r"cannot be meant": "is not allowed",
    r"(for|many) those who|who (has|have|wants?|doubles|keeps)": "if you",
    r"rest(s|ing)|set(s)? aside": "is not cached, is suspended",
    r"travels?|travell?ing": "is sent",
    r"come(s)? to terms": "synchronize",
    r"names that stay": "fixed names",
    r"at (the|its) begin": "at the start",
    r"(is|are) (held|proved) by": "is tested by",
    # history belongs in the notebook
    r"(earlier|former) state of the code|(was|were) not kept|no longer|used to be|an hour": "notebook",
    # a learning rate is not "the rate"; losses are lower or higher
    r"at (the|that|this|its|twice the) rate|(?<!learning )rate that you": "learning rate",
    r"(is|are|was|ends?|ended) (behind|below|above) (GramMuon|Muon|the best)": "lower, higher",
    # American spelling
    r"\w*(colour|behaviour|favour|neighbour|honour)\w*|judgement|centre|grey|whilst|learnt": "American",
    r"(normal|orthogonal|optim|recogn|initial|organ|util|quant)is(e|es|ed|ing|ations?)": "American",
}
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.M | re.S)


def prose(text: str) -> str:
    """Markdown without code, the targets of links and comments."""
    text = FENCE.sub("", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"(?m)(?<=\n\n) {4}\S.*(\n {4,}.*|\n(?=\n {4}))*", "", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]+`", "`code`", text)


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and cells of tables, each on one line."""
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |#)|(?<=\|)\n", prose(text)):
        cells = block.split("|") if block.lstrip().startswith("|") else [block]
        yield from (" ".join(cell.split()) for cell in cells if cell.strip(" -:"))


def sentences(block: str) -> list[str]:
    return re.split(r"(?<=[.!?])[*_)]* +(?=[A-Z*(`])", block)


def faults(text: str) -> list[str]:
    found = []
    for block in blocks(text):
        for pattern, instead in PLAIN.items():
            for match in re.finditer(rf"\b({pattern})\b", block, re.I):
                found.append(f"{match[0]!r} (say: {instead}) in {block!r:.120}")
        if block.startswith("#"):
            continue
        for sentence in sentences(block):
            if len(sentence.split()) > WORDS:
                found.append(f"{len(sentence.split())} words: {sentence}")
            if re.match(r"(Who|What|Whoever|Whatever) \w+", sentence) and not sentence.rstrip("*").endswith(
                "?"
            ):
                found.append(f"a clause as subject: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain(page):
    assert not faults(page.read_text(encoding="utf-8"))


def docstrings() -> Iterator[tuple[str, str]]:
    """Of every public name and its public methods."""
    things = [getattr(cachemuon, name) for name in cachemuon.__all__]
    for thing in [*things, Explanation, ParameterRow, ParamGroups, Route]:
        if not (inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)):
            continue
        members = inspect.getmembers(thing, inspect.isfunction) if not inspect.isroutine(thing) else []
        own = [(name, one) for name, one in members if (one.__module__ or "").startswith("cachemuon")]
        for name, one in [("", thing), *own]:
            if not name.startswith("_") and one.__doc__:
                yield f"{thing.__name__}.{name}".rstrip("."), inspect.cleandoc(one.__doc__)


DOCSTRINGS = dict(docstrings())


@pytest.mark.parametrize("name", sorted(DOCSTRINGS))
def test_public_docstrings_are_plain(name):
    assert not faults(re.sub(r"(?m)^>>> .*(\n(?!\n).*)*", "", DOCSTRINGS[name]))


@pytest.mark.parametrize("command", [None, *typer.main.get_command(app).commands])
def test_the_help_of_the_command_is_plain(command):
    told = typer.main.get_command(app)
    told = told if command is None else told.commands[command]
    texts = [told.help or "", *(getattr(param, "help", None) or "" for param in told.params)]
    assert any(texts) and not [fault for text in texts for fault in faults(text)]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 900


def test_pages_outside_the_notebook_are_short():
    for page in PAGES:
        lines = len(page.read_text(encoding="utf-8").splitlines())
        assert lines <= 215, f"{page} has {lines} lines: one page answers one question"


def test_the_faults_are_found():
    assert faults("The tables are made anew.") and faults("What ten steps change fills a matrix.")
    assert faults("It is " + "very " * WORDS + "long.") and faults("The behaviour of a step.")
    assert not faults("## What happens\n\nThe step reuses a transform. What does it cost?\n\n    made anew\n")
    assert not faults("Each of the " + "many " * 20 + "steps. " + "A second " + "one " * 20 + "follows.")
