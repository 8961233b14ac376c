"""Several optimizers on one recipe: the same batches and initial weights, a run folder for each.

    <out>/<optimizer>-s<seed>/

Called again with the same folder, a comparison goes on: finished runs are read, an interrupted one is
resumed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from cachemuon_lab.config import CACHING, OptimizerConfig, RunConfig, with_overrides
from cachemuon_lab.ranks import Ranks
from cachemuon_lab.recipes import NESTEROV_LR, Recipe, recipe
from cachemuon_lab.record import CHECKPOINT, CONFIG, RECORD, Run
from cachemuon_lab.train import Progress, alone, train

KINDS: tuple[str, ...] = get_args(get_type_hints(OptimizerConfig)["kind"])


def variant(
    recipe: Recipe,
    kind: str | None = None,
    *,
    gamma: float | None = None,
    max_age: int | None = None,
) -> OptimizerConfig:
    """The recipe's first optimizer of that kind, or one of that kind with the settings of its relative.

    "stale" is GramMuon's relative, CacheMuon the paper's, any other the first optimizer's. Without a kind:
    the recipe's first optimizer, or CacheMuon where `gamma` or `max_age` asks for one.

    >>> variant(recipe("gpt2-nano"), "paper", gamma=3.0).label
    'CacheMuon.paper gamma=3'
    """
    if kind is None:
        kind = recipe.variants[0].kind if gamma is None and max_age is None else "cache"
    if kind not in KINDS:
        raise ValueError(f"optimizer must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    for name, value, owners in (
        ("gamma", gamma, CACHING),
        ("max_age", max_age, ("cache",)),
    ):
        if value is not None and kind not in owners:
            raise ValueError(f"{name} goes with optimizer {' or '.join(map(repr, owners))}, got {kind!r}")
    relative = {"stale": "gram", "cache": "paper"}.get(kind, kind)
    of_kind = [one for one in recipe.variants if one.kind == kind]
    related = [one for one in recipe.variants if one.kind == relative]
    chosen: dict[str, Any] = {"kind": kind, "gamma": gamma, "max_age": max_age}
    given = {name: value for name, value in chosen.items() if value is not None}
    if kind == "cache" and not of_kind:  # its own threshold, not the paper's
        given.setdefault("gamma", OptimizerConfig.gamma)
    return replace((of_kind or related or list(recipe.variants))[0], **given)


def configure(recipe: Recipe, optimizer: OptimizerConfig, overrides: Iterable[str] = ()) -> RunConfig:
    """The recipe's run with that optimizer and settings changed; named after the optimizer that results."""
    run = with_overrides(recipe.run(optimizer), overrides)
    renamed = run.name != recipe.run(optimizer).name
    return run if renamed else replace(run, name=recipe.run(run.optimizer).name)


def plan(
    recipe: Recipe,
    *,
    variants: Sequence[OptimizerConfig] | None = None,
    seeds: int = 1,
    overrides: Iterable[str] = (),
) -> dict[str, RunConfig]:
    """The runs of a comparison by the name of their folder: all optimizers with one seed, then the next.

    Seeds count up from the recipe's own. Optimizers that are equal are one; those that differ in what
    their folder's name does not tell are an error.

    >>> list(plan(recipe("gpt2-small-owt"), seeds=2))[2:4]
    ['paper-gamma5-s0', 'polar-s1']
    """
    if seeds < 1:
        raise ValueError(f"seeds must be an integer of at least 1, got {seeds!r}")
    overrides = tuple(overrides)
    chosen = recipe.variants if variants is None else variants
    runs: dict[str, RunConfig] = {}
    for number in range(seeds):
        for optimizer in dict.fromkeys(chosen):
            run = configure(recipe, optimizer, overrides)
            run = replace(run, seed=run.seed + number)
            name = f"{run.optimizer.slug}-s{run.seed}"
            if name in runs:
                raise ValueError(
                    f"two of the optimizers are {run.optimizer.label!r}: name fewer, or override less"
                )
            runs[name] = run
    return runs


def compare(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    variants: Sequence[OptimizerConfig] | None = None,
    seeds: int = 1,
    overrides: Iterable[str] = (),
    resume: bool = True,
    device: str | torch.device | None = None,
    on_progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Run]:
    """Train the recipe's optimizers, or `variants`, with each seed, and return the finished runs.

    `resume=False` begins all of them anew, in place of what the folder holds. `on_progress` gets what
    `train` tells, and `label`, `run` and `runs`: which of how many this is. The progress of a run that was
    finished before is told once.
    """
    planned = plan(recipe, variants=variants, seeds=seeds, overrides=overrides)
    if not resume:  # all at once: what is interrupted then goes on without any run of before
        _remove([Path(out, name) for name in planned])
    runs: list[Run] = []
    for number, (name, config) in enumerate(planned.items(), start=1):
        seed = f", seed {config.seed}" if seeds > 1 else ""
        which = {"label": config.optimizer.label + seed, "run": number, "runs": len(planned)}
        told = False

        def tell(state: dict[str, Any], which: dict[str, Any] = which) -> None:
            nonlocal told
            told = True
            if on_progress is not None:
                on_progress({**state, **which})

        runs.append(train(config, Path(out, name), resume=True, device=device, on_progress=tell, stop=stop))
        if not told:
            tell(finished(runs[-1]))
    return runs


def _remove(folders: list[Path]) -> None:
    ranks = Ranks.current()
    for folder in folders:
        if ranks.gather(any((folder / name).exists() for name in (CONFIG, RECORD, CHECKPOINT)))[0]:
            with alone(folder, ranks):
                if ranks.main:
                    shutil.rmtree(folder)
    ranks.barrier()


def finished(run: Run) -> dict[str, Any]:
    """What `on_progress` gets of a run that needed no more steps."""
    if not (run.steps and run.validations):
        raise ValueError(f"{run.folder} is damaged: its record has an end, but no steps or no validations")
    last, validation = run.steps[-1], run.validations[-1]
    state = {"step": last["step"], "steps": run.config.steps, "loss": last["loss"]}
    unknown = dict.fromkeys(("hit_rate", "saved_flops", "seconds_per_step"))
    return {**state, "validation": validation["loss"], **unknown}


def demonstration(*, quick: bool = False) -> Recipe:
    """What `cachemuon demo` compares: a shorter gpt2-nano, fewer optimizers; `quick` is a toy for tests.

    The fresh ones have Nesterov's momentum and the learning rate that is best with it. On two idle cores all
    six runs take a little over three minutes.
    """
    nano = recipe("gpt2-nano")
    polar, gram = (
        replace(variant(nano, kind), nesterov=True, lr=NESTEROV_LR["gram"]) for kind in ("polar", "gram")
    )
    paper = [variant(nano, "paper", gamma=gamma) for gamma in (2.0, 5.0, 15.0)]
    settings: Sequence[str] = ("steps=300",)
    if quick:
        settings = (
            *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16"),
            *("steps=6", "batch_size=2", "validate_every=3", "validation_batches=1"),
        )
    base = with_overrides(nano.base, settings)
    return replace(nano, base=base, variants=(polar, gram, *paper, variant(nano, "cache")))
