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
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from cachemuon_lab.config import CACHING, OptimizerConfig, RunConfig, with_overrides
from cachemuon_lab.extend import extend
from cachemuon_lab.ranks import Ranks
from cachemuon_lab.recipes import Recipe
from cachemuon_lab.record import CHECKPOINT, CONFIG, RECORD, Run
from cachemuon_lab.side_by_side import train_side_by_side
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

    >>> from cachemuon_lab.recipes import recipe
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

    >>> from cachemuon_lab.recipes import recipe
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
    continued: str | os.PathLike[str] | None = None,
    workers: int = 1,
    device: str | torch.device | None = None,
    on_progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Run]:
    """Train the recipe's optimizers, or `variants`, with each seed, and return the finished runs.

    `resume=False` begins all of them anew, in place of what the folder holds. `continued` is the folder of a
    comparison whose finished runs those of the same names go on from (`extend`). With several `workers` so
    many runs are trained at a time, each in a process with one thread on the CPU. `on_progress` gets what
    `train` tells, and `label`, `run` and `runs`: which of how many this is. The progress of a run that was
    finished before is told once.
    """
    if workers < 1:
        raise ValueError(f"workers must be an integer of at least 1, got {workers!r}")
    if workers > 1 and Ranks.current().world > 1:
        raise ValueError(f"workers must be 1 under torchrun, got {workers!r}")
    planned = plan(recipe, variants=variants, seeds=seeds, overrides=overrides)
    if not resume:  # all at once: what is interrupted then goes on without any run of before
        _remove([Path(out, name) for name in planned])
    if continued is not None:
        for name, config in planned.items():
            extend(Path(continued, name), config, Path(out, name))
    labels = {
        name: config.optimizer.label + (f", seed {config.seed}" if seeds > 1 else "")
        for name, config in planned.items()
    }
    numbers = {name: number for number, name in enumerate(planned, start=1)}

    def tell(name: str, state: dict[str, Any]) -> None:
        if on_progress is not None:
            which = {"label": labels[name], "run": numbers[name], "runs": len(planned)}
            on_progress({**state, **which})

    folders = {name: Path(out, name) for name in planned}
    for name, folder in folders.items():
        if (folder / CONFIG).exists() and (run := Run.open(folder)).complete:
            tell(name, finished(run))
    if workers > 1:
        return list(train_side_by_side(planned, Path(out), workers, tell, stop).values())
    return [
        train(config, folders[name], resume=True, device=device, on_progress=partial(tell, name), stop=stop)
        for name, config in planned.items()
    ]


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


def toy(recipe: Recipe) -> Recipe:
    """A recipe of a GPT-2 made a toy of seconds, to see that all works."""
    shape = ("model.layers=1", "model.heads=2", "model.width=16", "model.context=16")
    length = ("steps=6", "batch_size=2", "validate_every=3", "validation_batches=1")
    return replace(recipe, base=with_overrides(recipe.base, (*shape, *length)))
