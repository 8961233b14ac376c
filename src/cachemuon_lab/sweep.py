"""A search over a grid of settings, by default the paper's 36, with short runs; the better ones go on.

    <out>/sweep.db, <out>/<settings of a trial>/

Optuna keeps the trials in `sweep.db`. With `prune` a trial ends whose validation loss is worse than the
median of the others at the same step; the paper trained all. Called again with the same folder the sweep goes
on, a trial that was interrupted from its checkpoint. One process, or one group of ranks, at a time.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from cachemuon_lab.compare import configure
from cachemuon_lab.config import OptimizerConfig, RunConfig, differences, with_overrides
from cachemuon_lab.ranks import Ranks
from cachemuon_lab.recipes import SEARCH_GRID, Recipe
from cachemuon_lab.record import CHECKPOINT, Run
from cachemuon_lab.train import Interrupted, Progress, alone, train

DATABASE = "sweep.db"
STARTUP_TRIALS = 4
"""So many trials are finished before any is pruned,"""
WARMUP = 0.2
"""and none before this part of its steps."""
VALIDATIONS = 10
"""A proxy run, shorter than its recipe, has at least so many: there is nothing else to prune by."""

Grid = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Trial:
    """One point of the grid: `value`, to be small, and `steps`; those of a pruned one's last validation."""

    settings: dict[str, float]
    pruned: bool
    value: float | None
    steps: int
    folder: Path


@dataclass(frozen=True)
class Sweep:
    """All trials that are over, the best first. `measure` says what their values are."""

    base: RunConfig
    measure: str
    grid: Grid
    trials: tuple[Trial, ...]

    @property
    def points(self) -> int:
        """How many points the whole grid has."""
        return math.prod(len(values) for values in self.grid.values())

    @property
    def best(self) -> Trial | None:
        """The best of the finished trials."""
        return next((trial for trial in self.trials if not trial.pruned), None)

    @property
    def overrides(self) -> list[str]:
        """The best trial's settings, for `with_overrides`."""
        return _overrides(self.best.settings) if self.best is not None else []

    @property
    def optimizer(self) -> str:
        """The best trial's optimizer as a recipe has it: every setting that is not the default."""
        optimizer = with_overrides(self.base, self.overrides).optimizer
        default = OptimizerConfig(optimizer.kind)
        names = [item.name for item in fields(optimizer)]
        changed = [name for name in names if getattr(optimizer, name) != getattr(default, name)]
        told = "".join(f", {name}={getattr(optimizer, name)!r}" for name in changed)
        return f'OptimizerConfig("{optimizer.kind}"{told})'


def sweep(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    optimizer: OptimizerConfig | None = None,
    steps: int | None = None,
    overrides: Iterable[str] = (),
    grid: Grid = SEARCH_GRID,
    trials: int | None = None,
    prune: bool = False,
    device: str | torch.device | None = None,
    on_progress: Progress | None = None,
) -> Sweep:
    """Train the recipe's first optimizer, or another, at every point of the grid.

    `steps` makes proxy runs of that length; `trials` ends this call after so many points. The value of a
    trial is its best validation loss, of images the best error rate, as the paper selects. Checkpoints of
    trials that are over are removed. `on_progress` is as `compare`'s.
    """
    base = _base(recipe, optimizer or recipe.variants[0], steps, tuple(overrides))
    with_overrides(base, _overrides({key: values[0] for key, values in grid.items()}))  # are all keys known?
    points = math.prod(len(values) for values in grid.values())
    out, ranks = Path(out), Ranks.current()
    with (
        alone(out, ranks),
        _Ledger.open(out, base, grid, prune) if ranks.main else nullcontext() as ledger,
    ):
        for _ in count() if trials is None else range(trials):
            settings = ranks.gather(ledger.take() if ledger is not None else None)[0]
            if settings is None:
                break
            which = {"label": _label(settings), "run": ledger.over + 1 if ledger else 0, "runs": points}

            def tell(state: dict[str, Any], which: dict[str, Any] = which) -> None:
                if ledger is not None:
                    ledger.see(state)
                if on_progress is not None:
                    on_progress({**state, **which})

            folder, config = out / _slug(settings), with_overrides(base, _overrides(settings))
            stop = None if ledger is None else lambda: ledger.pruning
            run: Run | None = None
            try:
                run = train(config, folder, resume=True, device=device, on_progress=tell, stop=stop)
            except Interrupted:
                if not any(ranks.gather(ledger is not None and ledger.pruning)):
                    raise
            if ledger is not None:
                ledger.tell(run)
                shutil.rmtree((folder / CHECKPOINT).parent, ignore_errors=True)
        ended = ranks.gather(ledger.trials() if ledger is not None else ())[0]
    return Sweep(base, "error rate" if _images(base) else "validation loss", grid, ended)


class _Ledger:
    """The trials in Optuna's database, one of them at a time the current one."""

    def __init__(self, study: optuna.Study, out: Path, config: RunConfig, grid: Grid, prune: bool) -> None:
        self.study, self.out, self.config, self.grid, self.prune = study, out, config, grid, prune
        self.pruning = False

    @classmethod
    @contextmanager
    def open(cls, out: Path, config: RunConfig, grid: Grid, prune: bool) -> Iterator[_Ledger]:
        """The ledger of a folder, new or as the last call left it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        out.mkdir(parents=True, exist_ok=True)
        pruner = optuna.pruners.MedianPruner(STARTUP_TRIALS, n_warmup_steps=round(WARMUP * config.steps))
        try:
            storage = optuna.storages.RDBStorage(f"sqlite:///{out / DATABASE}")
            try:
                study = optuna.create_study(
                    storage=storage,
                    sampler=_Grid(grid),
                    pruner=pruner,
                    study_name="sweep",
                    load_if_exists=True,
                )
                ledger = cls(study, out, config, grid, prune)
                ledger.go_on()
                yield ledger
            finally:
                storage.remove_session()
                storage.engine.dispose()
        except (optuna.exceptions.OptunaError, SQLAlchemyError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise OSError(f"{out / DATABASE} could not be used: {reason}") from error

    def go_on(self) -> None:
        """Check that the sweep is the same one, and put trials that were interrupted back into the queue."""
        before, grid = self.study.user_attrs, {key: list(values) for key, values in self.grid.items()}
        if "config" in before:
            there = RunConfig.from_json(before["config"])
            if found := differences(there, self.config):
                told = "; ".join(f"{key} is {old!r} there, not {new!r}" for key, (old, new) in found.items())
                raise ValueError(f"{self.out} holds another sweep: {told}")
            if before["grid"] != grid:
                raise ValueError(
                    f"{self.out} holds another sweep: grid is {before['grid']} there, not {grid}"
                )
        else:
            self.study.set_user_attr("grid", grid)
            self.study.set_user_attr("config", self.config.to_json())
        for left in self.study.get_trials(states=(TrialState.RUNNING,)):
            if "grid_id" in left.system_attrs:  # else it was killed before it got a point
                self.study.add_trial(
                    optuna.create_trial(
                        state=TrialState.WAITING,
                        params=left.params,
                        distributions=left.distributions,
                        system_attrs=left.system_attrs,  # its point: the sampler's record of it
                        intermediate_values=left.intermediate_values,
                    )
                )
            self.study.tell(left.number, state=TrialState.FAIL)

    @property
    def over(self) -> int:
        """How many trials are finished or pruned."""
        return len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))

    def take(self) -> dict[str, float] | None:
        """The settings of the next trial, which becomes the current one; None if there is none left."""
        sampler = self.study.sampler
        assert isinstance(sampler, _Grid)
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if not waiting and sampler.is_exhausted(self.study):
            return None
        self.pruning, self.current = False, self.study.ask()
        return {key: self.current.suggest_categorical(key, values) for key, values in self.grid.items()}

    def see(self, state: dict[str, Any]) -> None:
        """Note the current trial's progress, and whether it should go on."""
        step = state["step"]
        if step % self.config.validate_every or step == state["steps"]:
            return  # not validated, or done
        known = self.study.get_trials(deepcopy=False)[self.current.number].intermediate_values
        if step not in known:
            self.current.report(state["validation"], step)
        finite = math.isfinite(state["validation"])
        self.pruning = self.prune and (not finite or self.current.should_prune())

    def tell(self, run: Run | None) -> None:
        """Close the current trial: with its finished run, or None if it was pruned."""
        if run is None:
            self.study.tell(self.current, state=TrialState.PRUNED)
            return
        assert run.end is not None
        loss, accuracy = run.end["best_loss"], run.end["best_accuracy"]
        value = 1 - (accuracy or 0.0) if _images(self.config) else loss
        self.study.tell(self.current, math.inf if value is None else value)  # None: it never was finite

    def trials(self) -> tuple[Trial, ...]:
        """All trials that are over, the best first, the pruned ones last."""
        over = self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
        return tuple(
            Trial(
                settings=trial.params,
                pruned=trial.state == TrialState.PRUNED,
                value=trial.value,
                steps=(trial.last_step or 0) if trial.state == TrialState.PRUNED else self.config.steps,
                folder=self.out / _slug(trial.params),
            )
            for trial in sorted(over, key=_rank)
        )


class _Grid(optuna.samplers.GridSampler):
    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing: at the last point the parent would stop `study.optimize`, which is not used here."""


def _base(
    recipe: Recipe, optimizer: OptimizerConfig, steps: int | None, overrides: tuple[str, ...]
) -> RunConfig:
    if steps is not None:
        every = min(recipe.base.validate_every, max(1, steps // VALIDATIONS))
        overrides = (f"steps={steps}", f"validate_every={every}", *overrides)
    return configure(recipe, optimizer, overrides)


def _images(config: RunConfig) -> bool:
    return config.data.kind == "cifar10"


def _rank(trial: FrozenTrial) -> tuple[bool, float]:
    return trial.state == TrialState.PRUNED, math.inf if trial.value is None else trial.value


def _overrides(settings: Mapping[str, float]) -> list[str]:
    return [f"{key}={value!r}" for key, value in settings.items()]


def _label(settings: Mapping[str, float]) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value:g}" for key, value in settings.items())


def _slug(settings: Mapping[str, float]) -> str:
    return _label(settings).replace("=", "").replace(" ", "-")
