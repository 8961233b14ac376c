"""The tables of the paper's appendix: settings from the recipes, FLOPs from the paper's model.

`python -m cachemuon_lab.appendix docs/reproduce.md` writes them into that page.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cachemuon import GramNS, StandardNS
from cachemuon_lab.config import CACHING, LABELS, OptimizerConfig
from cachemuon_lab.models import GPT2Config
from cachemuon_lab.optimizers import SOLVERS
from cachemuon_lab.performance import Cells, renew
from cachemuon_lab.recipes import RECIPES, SEARCH_GRID, Recipe, recipe
from cachemuon_lab.reported import REPORTED
from cachemuon_lab.totals import GPT2_LARGE, GPT2_SMALL, RESNET18, total

Titled = tuple[str, Cells]

SHAPES = {"gpt2-large-owt": GPT2_LARGE, "gpt2-small-owt": GPT2_SMALL, "resnet18-cifar10": RESNET18}
ADAM = ("adam_lr", "adam_betas", "adam_weight_decay")
NAMES = {
    "lr": "Muon lr",
    "momentum": "Muon momentum",
    "nesterov": "Nesterov",
    "weight_decay": "Muon weight decay",
    "adam_lr": "Adam lr",
    "adam_betas": "Adam betas",
    "adam_weight_decay": "Adam weight decay",
}


def hyperparameters(chosen: Recipe) -> Titled:
    """The optimizers of a recipe: a column for each, those that differ in gamma alone in one."""
    columns: dict[OptimizerConfig, list[OptimizerConfig]] = {}
    for one in chosen.variants:
        columns.setdefault(replace(one, gamma=0.0) if one.kind == "paper" else one, []).append(one)
    firsts = [group[0] for group in columns.values()]
    gammas = [", ".join(f"{one.gamma:g}" for one in group) for group in columns.values()]
    cells = [["", *(LABELS[one.kind] if one.kind == "paper" else one.label for one in firsts)]]
    for name in ("lr", "momentum", "nesterov", "weight_decay"):
        cells.append([NAMES[name], *(_muon(one, name) for one in firsts)])
    cells.append(["Newton-Schulz steps", *(_steps(one) for one in firsts)])
    cells.append(
        [
            "gamma",
            *(g if one.kind in CACHING else "" for g, one in zip(gammas, firsts, strict=True)),
        ]
    )
    for name in ADAM:
        cells.append([NAMES[name], *(_short(getattr(one, name)) for one in firsts)])
    return f"{chosen.name}: each optimizer's settings", cells


def shared_settings(chosen: Recipe) -> Titled:
    """What all optimizers of a recipe share, its data and its length."""
    base, model = chosen.base, chosen.base.model
    examples = base.batch_size * base.accumulation * base.replicas
    rows: dict[str, Any] = {}
    if isinstance(model, GPT2Config):
        rows["model"] = f"GPT-2: {model.layers} blocks, {model.heads} heads, width {model.width}"
        rows["context"], rows["vocabulary"] = base.data.context or model.context, model.vocabulary
        rows["dropout"], rows["biases"] = model.dropout, "yes" if model.bias else "no"
        examples *= rows["context"]
    else:
        rows["model"] = f"ResNet-18 of width {model.width}"
    rows["steps"] = f"{base.steps:,}"
    rows["batch size x accumulation x devices"] = f"{base.batch_size} x {base.accumulation} x {base.replicas}"
    rows["tokens or images in a step"] = f"{examples:,}"
    rows["tokens or images in all"] = f"{examples * base.steps:,}"
    batches = "all" if base.validation_batches is None else base.validation_batches
    rows["validation"] = f"every {base.validate_every} steps, {batches} batches"
    schedule = base.schedule
    ratios = f", {schedule.constant_lr_ratio:g} constant, to {schedule.min_lr_ratio:g}"
    rows["learning rate"] = schedule.kind + (ratios if schedule.kind == "plateau_linear" else "")
    if base.continues:
        rows["continues a run of"] = f"{', '.join(f'{end:,}' for end in base.continues)} steps"
    rows["seed"] = base.seed
    rows["precision of the model"] = base.autocast or "float32"
    return f"{chosen.name}: what all share", [["", ""], *([key, str(value)] for key, value in rows.items())]


def search_grid() -> Titled:
    """The grid that `cachemuon sweep` searches, and what it leaves at its default."""
    default = OptimizerConfig("polar")
    cells = [["", "values"]]
    for name in ("lr", "momentum", "weight_decay", "steps", *ADAM):
        values = SEARCH_GRID.get(f"optimizer.{name}")
        if name == "steps":
            cells.append(["Newton-Schulz steps", _steps(default)])
        else:
            told = ", ".join(map(_short, values)) if values else _short(getattr(default, name))
            cells.append([NAMES[name], told])
    return "The search grid", cells


def flops_table() -> Titled:
    """The paper's table of orthogonalization FLOPs, and what its model gives at the paper's hit rates.

    The fresh columns are the model's, which are the paper's own numbers. For CacheMuon the model is given one
    hit rate for all matrices, as the paper prints no other; where matrices hit unequally it is wrong.
    """
    heads = ["run", "gamma", "hits", "GramMuon", "PolarExpMuon", "CacheMuon", "saved", "saved, PolarExpMuon"]
    cells = [[*heads, "CacheMuon, model", "saved, model"]]
    for (name, label), told in REPORTED.items():
        if (
            told.pflops is None
            or told.hit_rate is None
            or told.saved_gram is None
            or told.saved_polar is None
        ):
            continue
        base = RECIPES[name].base
        price = partial(total, SHAPES[name], base.steps, replicas=base.replicas)
        gram, polar = price(solver="gram") / 1e15, price(solver="standard") / 1e15
        cached = price(solver="cache", hits=told.hit_rate) / 1e15
        flops = f"{gram:.2f}", f"{polar:.2f}", f"{told.pflops:.2f}"
        saved = f"{told.saved_gram:.1%}", f"{told.saved_polar:.1%}"
        run = name, label.rpartition("=")[2], f"{told.hit_rate:.0%}"
        cells.append([*run, *flops, *saved, f"{cached:.2f}", f"{1 - cached / gram:.1%}"])
    return "PFLOPs of orthogonalization in the paper", cells


def setups() -> Titled:
    """What the optimizers share, of the paper's three experiments side by side."""
    columns = {name: dict(shared_settings(recipe(name))[1][1:]) for name in SHAPES}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [[key, *(column.get(key, "") for column in columns.values())] for key in keys]
    return "The paper's three experiments", [["", *columns], *rows]


def tables() -> dict[str, Titled]:
    """Every table by the name that a page asks for it."""
    short = {"large": "gpt2-large-owt", "small": "gpt2-small-owt", "resnet": "resnet18-cifar10"}
    made = {"grid": search_grid(), "flops": flops_table(), "setups": setups()}
    return made | {f"paper_{key}": hyperparameters(recipe(name)) for key, name in short.items()}


def _muon(one: OptimizerConfig, name: str) -> str:
    return "" if one.kind == "adamw" else _short(getattr(one, name))


def _steps(one: OptimizerConfig) -> str:
    solver = SOLVERS.get("gram" if one.kind in CACHING else one.kind)
    return str(solver.schedule.steps) if isinstance(solver, GramNS | StandardNS) else ""


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_short, value))
    return f"{value:g}"


if __name__ == "__main__":
    renew(map(Path, sys.argv[1:]), tables())
