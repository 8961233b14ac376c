"""Finished trainings as lines of JSON: studies go on from them on any machine; tables can be checked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from cachemuon_lab.config import RunConfig
from cachemuon_lab.record import Run

DIGITS = 5

EARLIER_OUTCOMES = {"cold": "first", "stale": "expired", "residual": "rejected", "resting": "uncached"}
"""The outcomes that have other names in ledgers of before the schedule, and their names now."""


@dataclass(frozen=True)
class Finished:
    """What a study needs of a training.

    `validations` have `step`, `loss` and `accuracy`. Of searches before there was a ledger only the last
    loss is known: then `outcomes` is empty and `flops` None.
    """

    validations: list[dict[str, Any]]
    outcomes: dict[str, int]
    flops: int | None
    revision: str | None

    @classmethod
    def of(cls, run: Run) -> Finished:
        """What is kept of a run's record."""
        outcomes: Counter[str] = Counter()
        for line in run.steps:
            outcomes.update({"hit": line["hits"], **line["misses"]})
        validations = [
            {"step": line["step"], "loss": round(line["loss"], DIGITS), "accuracy": line["accuracy"]}
            for line in run.validations
        ]
        revision = run.environment.get("git")
        return cls(validations, dict(+outcomes), run.steps[-1]["flops"], revision)

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return float(self.validations[-1]["loss"])


class Ledger:
    """A file of finished trainings, each known by its name, its settings and its data.

    A line of other settings or other data is never taken for the one that is asked for. Without a file
    nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = _read(path) if path is not None and path.exists() else []

    def find(self, name: str, config: RunConfig) -> Finished | None:
        """The newest line of that training, if there is one."""
        for line in reversed([line for line in self.lines if line["name"] == name]):
            # keys that a line lacks are settings that came later, and have their defaults
            settings = RunConfig.from_json(json.dumps(line["config"]))
            if settings == nameless(config) and line["data"] == data_of(config):
                return Finished(**{item.name: line[item.name] for item in fields(Finished)})
        return None

    def add(self, name: str, config: RunConfig, finished: Finished) -> None:
        """Append a line, at once on the disk."""
        if self.path is None:
            return
        told = {"name": name, "data": data_of(config), **asdict(finished)}
        line = {**told, "config": json.loads(nameless(config).to_json())}
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    return [_renamed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _renamed(line: dict[str, Any]) -> dict[str, Any]:
    """A line in today's names.

    The default then was a gate that read every residual ("sync"); the default now is a schedule. Their
    trainings are taken for each other: over all recorded runs the gate refused 1 of 1,700 directions. The
    `revision` of a line says by which code it was trained.
    """
    optimizer = line["config"]["optimizer"]
    if "guard" in optimizer:
        optimizer["cache_all"] = not optimizer.pop("guard")
        line["name"] = line["name"].replace("-guard0-", "-cache_all1-")
    if optimizer.get("gate") == "sync":
        optimizer["gate"] = "schedule"
    if optimizer["kind"] == "cache":
        optimizer.setdefault("normalize", None)  # there was none
    line["outcomes"] = {EARLIER_OUTCOMES.get(one, one): count for one, count in line["outcomes"].items()}
    return line


def nameless(config: RunConfig) -> RunConfig:
    """A run without what does not change it: its name, and where its data lies."""
    return replace(config, name="run", data=replace(config.data, path=None))


def data_of(config: RunConfig) -> str:
    """A fingerprint of the files that a run is trained on."""
    return _fingerprint(Path(config.data.path or ""))


@cache
def _fingerprint(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.bin")):
        found.update(path.name.encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]
