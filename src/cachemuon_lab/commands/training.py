"""The commands that train: `demo`, `train`, `compare`, `sweep`, `diagnose`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachemuon_lab.commands.options import (
    RUNS,
    Gamma,
    Kind,
    MaxAge,
    Out,
    Overwrite,
    RecipeName,
    Seeds,
    Set,
    Workers,
)
from cachemuon_lab.commands.results import draw, show_table, write_pages
from cachemuon_lab.terminal import display, new_table, processes, progress, say

if TYPE_CHECKING:
    from cachemuon_lab.recipes import Recipe


def demo(
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="A toy of seconds, to see that all works.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Compare CacheMuon with fresh Muon on this machine, in minutes and without a download.

    Ctrl-C stops it; the same command goes on.
    """
    import torch

    from cachemuon_lab.compare import compare, toy
    from cachemuon_lab.recipes import recipe
    from cachemuon_lab.summary import next_steps, summary_tables, verdicts
    from cachemuon_lab.tables import compare as compared

    command = "cachemuon demo" + " --quick" * quick
    chosen, began = recipe("demo"), time.perf_counter()
    if quick:
        chosen = toy(chosen)
    workers = 1 if torch.cuda.is_available() else min(len(chosen.variants), usable_cores())
    out = out or RUNS / ("demo-quick" if quick else "demo")
    say(
        f"{len(chosen.variants)} runs of {chosen.base.steps} steps, {workers} at a time, into {out}",
        sys.stderr,
    )
    with progress() as show:
        runs = compare(chosen, out, resume=not overwrite, workers=workers, on_progress=show)
    comparison = compared(runs)
    page = write_pages(runs, out, command)
    for table in summary_tables(comparison):
        display(table)
    trained = sum(run.end["seconds"] for run in runs if run.end)
    say(f"{trained:.0f} s of training, {time.perf_counter() - began:.0f} s in all.")
    for line in (*verdicts(comparison), "", *next_steps(page, out)):
        say(line)


def train(
    recipe_name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="One of those that --list shows.")
    ] = None,
    optimizer: Kind = None,
    gamma: Gamma = None,
    max_age: MaxAge = None,
    settings: Set = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    overwrite: Overwrite = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write for TensorBoard.")] = False,
    strategy: Annotated[
        str,
        typer.Option(help="How torchrun's processes share a model: ddp (a copy each), fsdp (shards)."),
    ] = "ddp",
    continued: Annotated[
        Path | None,
        typer.Option("--continue", metavar="RUN", help="Begin where this finished, shorter run ended."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show all recipes, or one's settings, and train nothing.")
    ] = False,
) -> None:
    """Train one optimizer on a recipe. Under torchrun: on all of its processes.

    With torchrun's --max-restarts a run continues from its last checkpoint after a process has died.
    """
    from cachemuon_lab.compare import configure, variant
    from cachemuon_lab.extend import extend
    from cachemuon_lab.recipes import recipe
    from cachemuon_lab.train import train

    if listing:
        return list_recipes() if recipe_name is None else show_settings(recipe(recipe_name))
    if recipe_name is None:
        raise ValueError("a recipe is needed: `cachemuon train --list` shows them")
    chosen = recipe(recipe_name)
    which = variant(chosen, optimizer, gamma=gamma, max_age=max_age)
    config = configure(chosen, which, settings or ())
    if out is None:
        if config.name in (".", "..") or set(config.name) & set("/\\"):
            raise ValueError(f"name must be that of a folder under {RUNS}, no path, got {config.name!r}")
        out = RUNS / config.name
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with processes() as first, progress(first) as show:
        if continued is not None:
            extend(continued, config, out)
        label = {"label": config.optimizer.label, "run": 1, "runs": 1}
        run = train(
            config,
            out,
            resume=resume or restarted or continued is not None,
            overwrite=overwrite and not restarted,
            strategy=strategy,
            on_progress=lambda state: show({**state, **label}),
            tensorboard=tensorboard,
        )
    if first:
        show_table([run])
        say(f"The run is in {out}.")


def compare(
    recipe_name: RecipeName,
    seeds: Seeds = 1,
    settings: Set = None,
    extra: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KIND", help="Add an optimizer of another kind, as adamw."),
    ] = None,
    continued: Annotated[
        Path | None,
        typer.Option("--continue", metavar="DIR", help="Begin where this shorter comparison's runs ended."),
    ] = None,
    workers: Workers = 1,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Train all optimizers of a recipe on the same batches; print the table, write figures and report."""
    from cachemuon_lab.compare import compare, variant
    from cachemuon_lab.recipes import recipe

    chosen = recipe(recipe_name)
    variants = [*chosen.variants, *(variant(chosen, kind) for kind in extra or ())]
    out = out or RUNS / chosen.name
    with processes() as first, progress(first) as show:
        runs = compare(
            chosen,
            out,
            variants=variants,
            seeds=seeds,
            overrides=settings or (),
            resume=not overwrite,
            continued=continued,
            workers=workers,
            on_progress=show,
        )
    if first:
        show_table(runs)
        given = [
            f"--seeds {seeds}",
            *(f"--set {one}" for one in settings or ()),
            *(f"--with {k}" for k in extra or ()),
        ]
        say(write_pages(runs, out, " ".join(["cachemuon compare", recipe_name, *given])))


def sweep(
    recipe_name: RecipeName,
    optimizer: Kind = None,
    gamma: Gamma = None,
    max_age: MaxAge = None,
    steps: Annotated[
        int | None, typer.Option(help="Length of the proxy runs; the recipe's if not given.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="At most so many points now.")] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="End runs that are worse than the median of the others; the paper did not."
        ),
    ] = False,
    settings: Set = None,
    out: Out = None,
) -> None:
    """Train one optimizer at all 36 points of the paper's grid. Called again, it goes on."""
    from cachemuon_lab.compare import variant
    from cachemuon_lab.recipes import recipe
    from cachemuon_lab.sweep import sweep

    chosen = recipe(recipe_name)
    which = variant(chosen, optimizer, gamma=gamma, max_age=max_age)
    out = out or RUNS / f"{chosen.name}-sweep-{which.slug}"
    with processes() as first, progress(first) as show:
        result = sweep(
            chosen,
            out,
            optimizer=which,
            steps=steps,
            overrides=settings or (),
            trials=trials,
            prune=prune,
            on_progress=show,
        )
    if not first:
        return
    names = [key.rpartition(".")[2] for key in result.grid]
    table = new_table(
        *names, result.measure, "steps", "", title=f"{chosen.name}, {result.base.optimizer.label}"
    )
    for trial in result.trials:
        value = "-" if trial.value is None else f"{trial.value:.4f}"
        numbers = (f"{trial.settings[key]:g}" for key in result.grid)
        table.add_row(*numbers, value, f"{trial.steps:,}", "pruned" if trial.pruned else "")
    display(table)
    if left := result.points - len(result.trials):
        say(f"{left} of {result.points} points are left; the same command goes on with them.")
    if result.best is None:
        return say("No trial has been finished yet.")
    say("The best so far:" if left else "The best:")
    say("  " + " ".join(f"--set {override}" for override in result.overrides))
    say("  " + result.optimizer)


def diagnose(
    recipe_name: RecipeName,
    seeds: Seeds = 1,
    settings: Set = None,
    workers: Workers = 1,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Run a recipe's diagnostics, residual gate or ages of the transform, and draw them."""
    from cachemuon_lab.compare import compare

    twins = diagnostics_of(recipe_name)
    out = out or RUNS / f"{recipe_name}-diagnosed"
    runs = []
    with processes() as first, progress(first) as show:
        for twin in twins:
            runs += compare(
                twin,
                out / twin.name,
                seeds=seeds,
                overrides=settings or (),
                resume=not overwrite,
                workers=workers,
                on_progress=show,
            )
    if first:
        draw(runs, out / "figures")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def list_recipes() -> None:
    """All recipes with their optimizers."""
    from cachemuon_lab.recipes import RECIPES

    table = new_table("recipe", "steps", "what", "optimizers", title="cachemuon train RECIPE", justify="left")
    for recipe in RECIPES.values():
        labels = "\n".join(one.label for one in recipe.variants)
        table.add_row(recipe.name, f"{recipe.base.steps:,}", recipe.description, labels)
        table.add_section()
    display(table)


def show_settings(chosen: Recipe) -> None:
    """The settings of a recipe: a column for each optimizer, then what all of them share."""
    from cachemuon_lab.appendix import hyperparameters, shared_settings

    for title, (heads, *rows) in (hyperparameters(chosen), shared_settings(chosen)):
        table = new_table(*heads, title=title)
        for row in rows:
            table.add_row(*row)
        display(table)


def diagnostics_of(name: str) -> list[Recipe]:
    """The recipe itself if it measures something, else its twins that do."""
    from cachemuon_lab.recipes import RECIPES, recipe

    chosen = recipe(name)
    if chosen.base.diagnostics != "off":
        return [chosen]
    found = [RECIPES[twin] for twin in (f"{name}-diagnostics", f"{name}-ages") if twin in RECIPES]
    if not found:
        known = ", ".join(one.name for one in RECIPES.values() if one.base.diagnostics != "off")
        raise ValueError(f"{name} has no diagnostics; these have: {known}")
    return found
