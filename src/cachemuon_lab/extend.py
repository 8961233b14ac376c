"""A run that continues a finished one begins with its record, weights, optimizer and generators."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from cachemuon_lab.config import RunConfig, differences
from cachemuon_lab.ranks import Ranks
from cachemuon_lab.record import CHECKPOINT, CONFIG, ENVIRONMENT, RECORD, Run, write_atomically
from cachemuon_lab.train import alone

FREE = ("name", "checkpoint_every", "validate_every", "validation_batches", "data.path")
"""Settings in which a run may differ from the one that it continues."""


def extend(source: Path, config: RunConfig, folder: Path) -> None:
    """Let the run in `folder` begin where the finished run in `source` ended.

    The last of `config.continues` must be the source's last step. A run of that configuration that begins at
    its first step takes the same steps until there, so nothing but time is saved. Where the folder has a run
    already, that one stays.
    """
    if (folder / CONFIG).exists():
        return
    run = Run.open(source)
    end = config.continues[-1] if config.continues else 0
    if not run.complete or run.config.steps != end or not (source / CHECKPOINT).exists():
        state = "a finished" if run.complete else "an unfinished"
        raise ValueError(
            f"{source} must have a finished run of {end} steps and its checkpoint for one that continues it, "
            f"got {state} run of {run.config.steps}"
        )
    found = differences(run.config, shortened(config))
    if told := [f"{key} is {a!r} there, not {b!r}" for key, (a, b) in found.items() if key not in FREE]:
        raise ValueError(f"{source} has another run: {'; '.join(told)}")
    ranks = Ranks.current()
    with alone(folder, ranks):
        if ranks.main and not (folder / CONFIG).exists():
            (folder / CHECKPOINT).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / CHECKPOINT, folder / CHECKPOINT)
            shutil.copyfile(source / ENVIRONMENT, folder / ENVIRONMENT)
            lines = (source / RECORD).read_text(encoding="utf-8").splitlines(keepends=True)
            write_atomically(folder / RECORD, "".join(lines[:-1]))  # the last one says that it ended
            write_atomically(folder / CONFIG, config.to_json())  # last: it makes the folder a run
    ranks.barrier()


def shortened(config: RunConfig) -> RunConfig:
    """The run that this one continues."""
    return replace(config, steps=config.continues[-1], continues=config.continues[:-1])
