"""The rooms of the library stand in layers: each imports only from those below it."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "cachemuon"
LAYERS = (  # lowest first; a file that has a layer to itself is not in its folder's
    "newton_schulz",
    "theory",
    "routing",
    "report.counters",
    "cache",
    "flops",
    "engine",
    "distributed",
    "report.summary",
    "optim",
    "__init__",
)
OUTSIDE = sys.stdlib_module_names | {"torch"}


def module_of(path):
    """A file's name within the package: "engine.step"; "engine" for that folder's __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module):
    """The layer that a module stands in; None if it has none."""
    return next((name for name in (module, module.partition(".")[0]) if name in LAYERS), None)


def imported(module, source):
    """Absolute names of what the source of a module imports, wherever in it the import stands."""
    folder = ["cachemuon", *module.split(".")]
    if module in MODULES and MODULES[module].name == "__init__.py":
        folder = [*folder, "__init__"] if module != "__init__" else folder
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*(folder[: -node.level] or ["<parent>"]), base]))
            for alias in node.names:  # a name may be a module
                inner = f"{base}.{alias.name}"
                yield inner if inner.removeprefix("cachemuon.") in MODULES else base


def wrong_imports(module, source):
    """What a module imports that is not below its layer, or not torch or the standard library."""
    place, wrong = LAYERS.index(layer_of(module)), []
    for name in imported(module, source):
        top, _, inner = name.partition(".")
        if top != "cachemuon":
            if top not in OUTSIDE:
                wrong.append(f"{module} imports {name}: neither torch nor the standard library")
        elif (layer := layer_of(inner or "__init__")) is None:
            wrong.append(f"{module} imports {name}, which no layer has")
        elif LAYERS.index(layer) > place or (layer == layer_of(module) == "__init__"):
            wrong.append(f"{module} imports {name}, which stands above it")
    return wrong


def run_time_imports(module):
    """The modules of the package that a module imports when it is run, so not those for types alone."""
    body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    for_types = [node for node in body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    body = [node for node in body if node not in for_types]
    names = imported(module, ast.unparse(ast.Module(body, [])))
    found = (name.removeprefix("cachemuon.") for name in names if name.startswith("cachemuon."))
    return {name for name in found if name != module}


def test_every_file_has_a_layer():
    assert len(MODULES) > 40, f"too few files in {PACKAGE}"
    folders = {"report"}  # has files in two layers, and nothing of its own
    assert [name for name in MODULES if layer_of(name) is None and name not in folders] == []
    assert "import" not in MODULES["report"].read_text(encoding="utf-8")


@pytest.mark.parametrize("module", [name for name in MODULES if name != "report"])
def test_imports_only_from_below(module):
    assert wrong_imports(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_no_files_import_each_other_in_a_circle():
    order = TopologicalSorter({module: run_time_imports(module) for module in MODULES}).static_order()
    assert set(order) == set(MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "import cachemuon.optim.muon",
        "import cachemuon.optim.muon as o",
        "import math, cachemuon.optim.muon",
        "from cachemuon.optim.muon import Muon",
        "from cachemuon import optim",
        "from .. import newton_schulz, optim",
        "from ..optim.muon import Muon",
        "from ..optim import muon",
        "from ..engine.step import take_step",
        "from ..flops import price",
        "from ..report.summary import explain",
        "def late():\n    from ..optim.muon import Muon",
        "if TYPE_CHECKING:\n    from ..optim.muon import Muon",
        "import cachemuon",  # the package offers everything
        "from cachemuon import Muon",
        "from .. import *",
        "from ... import anything",
        "from ...cachemuon import flops",
        "from ..missing import anything",
        "import cachemuon_lab",
        "from cachemuon_lab.train import train",
        "import numpy as np",
        "from numpy import linalg",
    ],
)
def test_a_wrong_import_is_found(source):
    assert len(wrong_imports("cache.gns", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import os.path, math",
        "from collections.abc import Iterable",
        "import torch.nn.functional as F",
        "from torch import Tensor",
        "import cachemuon.newton_schulz.solvers",
        "from cachemuon.newton_schulz.solvers import GramNS",
        "from cachemuon.newton_schulz import solvers, workspace",
        "from cachemuon.report import counters",
        "from . import reuse",
        "from .reuse import exact_residual",
        "from ..report.counters import Event",
        "'''from ..optim.muon import Muon'''",
    ],
)
def test_a_right_import_passes(source):
    assert wrong_imports("cache.gns", source) == []


def test_only_the_package_imports_the_highest_layer():
    assert wrong_imports("__init__", "from .optim.cachemuon import CacheMuon") == []
