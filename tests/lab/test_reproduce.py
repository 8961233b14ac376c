"""The pages about the paper: their tables are the recipes', and their commands exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from cachemuon_lab.appendix import hyperparameters, shared_settings, tables
from cachemuon_lab.cli import app
from cachemuon_lab.compare import configure
from cachemuon_lab.performance import renewed
from cachemuon_lab.recipes import RECIPES, recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / name for name in ("reproduce.md", "paper-settings.md", "laboratory.md")]
COMMAND = re.compile(r"^    (?:torchrun .*? -m cachemuon_lab\.cli|cachemuon) (.*)$", re.M)
COMMANDS = [found for page in PAGES for found in COMMAND.findall(page.read_text())]
GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda path: path.name)
def test_the_tables_are_made_from_the_recipes(page):
    """`python -m cachemuon_lab.appendix docs/reproduce.md docs/paper-settings.md` writes them."""
    text = page.read_text()
    assert renewed(text, tables()) == text


def parsed(command):
    """The parameters of a command, read as the shell would hand them over; an unknown option is an error."""
    name, *words = shlex.split(command)
    found = GROUP.commands[name]
    if hasattr(found, "commands"):
        found, words = found.commands[words[0]], words[1:]
    return found.make_context(name, words).params


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_pasted(command):
    params = parsed(command)
    if (name := params.get("recipe_name")) is not None:
        overrides = [*(params["settings"] or ()), *([f"steps={n}"] if (n := params.get("steps")) else ())]
        assert configure(recipe(name), recipe(name).variants[0], overrides)


def test_a_command_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="No such option"):
        parsed("compare gpt2-nano --strategy fsdp")


def test_every_recipe_of_the_paper_has_its_command():
    paper = {name for name in RECIPES if "-owt" in name or "cifar10" in name}
    used = {word for command in COMMANDS for word in shlex.split(command)}
    assert paper <= used and len(COMMANDS) > 20


def test_the_files_that_are_named_are_those_of_the_commands():
    text = PAGES[0].read_text()
    folders = set(re.findall(r"`runs/([\w.-]+)/figures", text))
    made = {
        shlex.split(command)[1] + "-diagnosed" * command.startswith("diagnose")
        for command in COMMANDS
        if command.startswith(("compare", "diagnose"))
    }
    assert folders <= made and len(folders) >= 8


def test_the_tables_of_a_recipe():
    title, (heads, *rows) = hyperparameters(recipe("gpt2-large-owt"))
    assert heads[1:] == ["PolarExpMuon", "GramMuon", "CacheMuon.paper"] and title.startswith("gpt2-large-owt")
    values = {row[0]: row[1:] for row in rows}
    assert values["gamma"] == ["", "", "2, 5, 10, 15"] and values["Newton-Schulz steps"] == ["5"] * 3
    shared = dict(shared_settings(recipe("gpt2-large-owt-4.8b"))[1][1:])
    assert shared["continues a run of"] == "3,814 steps" and shared["tokens or images in a step"] == "262,144"
    for made in RECIPES.values():
        for _, cells in (hyperparameters(made), shared_settings(made)):
            assert len({len(row) for row in cells}) == 1
