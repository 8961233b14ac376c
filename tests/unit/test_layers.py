"""The files of the library stand in layers, and each imports only from those below it."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "cachemuon"
LAYERS = (  # lowest first
    "schedules",
    "workspace",
    "products",
    "polar",
    "flops",
    "probe",
    "stats",
    "cache",
    "guard",
    "theory",
    "views",
    "heads",
    "routing",
    "groups",
    "matrices",
    "ownership",
    "parties",
    "distributed",
    "travel",
    "settings",
    "foreign",
    "host",
    "plan",
    "fresh",
    "engine",
    "accounts",
    "base",
    "muon",
    "cachemuon",
    "__init__",
)
OUTSIDE = sys.stdlib_module_names | {"torch"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(source: str) -> set[str]:
    """Absolute names of what `source`, a file of the package, imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package itself; more dots leave it
                base = ".".join(filter(None, ["cachemuon" if node.level == 1 else "<parent>", base]))
            if base == "cachemuon":
                names |= {f"cachemuon.{alias.name}" for alias in node.names}
            else:
                names.add(base)
    return names


def violations(layer: str, source: str) -> list[str]:
    below = LAYERS[: LAYERS.index(layer)]
    wrong = []
    for name in sorted(imported_modules(source)):
        top, _, rest = name.partition(".")
        if top == "cachemuon":
            # A name that is no layer is one that only the package's __init__ offers.
            if rest.split(".")[0] not in below:
                wrong.append(f"{layer} imports {name}, which is not below it")
        elif top not in OUTSIDE:
            wrong.append(f"{layer} imports {name}, which is neither torch nor the standard library")
    return wrong


def test_every_file_has_a_layer():
    assert FILES, f"no files in {PACKAGE}"
    names = {str(path.relative_to(PACKAGE).with_suffix("")) for path in FILES}
    assert names <= set(LAYERS), f"give these a place in LAYERS: {sorted(names - set(LAYERS))}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_only_from_below(path):
    assert violations(path.stem, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import cachemuon.muon",
        "import cachemuon.muon as o",
        "import math, cachemuon.muon",
        "from cachemuon.muon import Muon",
        "from cachemuon import optim",
        "from . import polar, optim",
        "from .muon import Muon",
        "def late():\n    from .muon import Muon",
        "if TYPE_CHECKING:\n    from .muon import Muon",
        "from .cache import CacheGNS",  # itself
        "import cachemuon",  # the package offers everything
        "from cachemuon import Muon",
        "from . import *",
        "from .. import anything",
        "from ..cachemuon import polar",
        "import cachemuon_lab",
        "from cachemuon_lab.train import train",
        "import numpy as np",
        "from numpy import linalg",
    ],
)
def test_a_wrong_import_is_found(source):
    assert len(violations("cache", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import os.path, math",
        "from collections.abc import Iterable",
        "import torch.nn.functional as F",
        "from torch import Tensor",
        "import cachemuon.polar",
        "from cachemuon.polar import GramNS",
        "from cachemuon import polar, stats",
        "from . import probe",
        "from .flops import price",
        "'''from .muon import Muon'''",
    ],
)
def test_a_right_import_passes(source):
    assert violations("cache", source) == []


def test_only_the_package_imports_the_highest_layer():
    assert violations("__init__", "from .muon import CacheMuon, Muon") == []
