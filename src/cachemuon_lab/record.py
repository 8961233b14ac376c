"""A run is a folder: its configuration, its environment, a record of JSON lines, checkpoints.

    config.json, environment.json, record.jsonl, checkpoints/latest.pt, lock

Lines of the record have a `kind`. "step": loss, lr, tokens (or images) so far, the seconds of the step, of
its optimizer and of its orthogonalization, hits and misses of this step, and FLOPs so far, as executed and
by the paper's model. "validation", "probe" and "age" (diagnostics), and one "end".
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

import torch

import cachemuon
from cachemuon_lab.config import MOST, RunConfig

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

CONFIG, ENVIRONMENT, RECORD, LOCK = "config.json", "environment.json", "record.jsonl", "lock"
CHECKPOINT = Path("checkpoints", "latest.pt")
KINDS = {
    "step": ("loss", "hits", "misses", "flops", "flops_paper"),
    "validation": ("loss", "accuracy"),
    "probe": ("name", "residual", "cosine", "accepted", "age"),
    "age": ("name", "age", "cosine"),
    "end": ("seconds", "best_loss"),
}
"""The kinds of a record's lines, and what each must hold beside its step."""

TEXTS, COUNTS, FLAGS = ("kind", "name"), ("step", "hits"), ("accepted",)
OPTIONAL = ("accuracy", "best_loss", "best_step", "best_accuracy")
"""Fields that are a text, a count, true or false; a number or null. `misses` are counts, others numbers."""

Line = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it. `complete` says whether it came to its end."""

    folder: Path
    config: RunConfig
    environment: dict[str, Any]
    steps: list[Line] = field(repr=False)
    validations: list[Line] = field(repr=False)
    probes: list[Line] = field(repr=False)
    ages: list[Line] = field(repr=False)
    end: Line | None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Read a run's folder; of the record only the last line may be broken off."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} is no run: it has no {CONFIG}")
        config = _read(folder / CONFIG, RunConfig.from_json)
        environment = {}
        if (folder / ENVIRONMENT).is_file():
            environment = _read(folder / ENVIRONMENT, _object)
        kinds: dict[str, list[Line]] = {kind: [] for kind in KINDS}
        for line in read_lines(folder / RECORD):
            kinds[line["kind"]].append(line)
        steps, validations, probes, ages, end = kinds.values()
        return cls(folder, config, environment, steps, validations, probes, ages, end[-1] if end else None)

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.end is not None

    @property
    def hit_rate(self) -> float | None:
        """Hits per call; None before the first call."""
        hits = sum(line["hits"] for line in self.steps)
        calls = hits + sum(sum(line["misses"].values()) for line in self.steps)
        return hits / calls if calls else None


def read_lines(path: Path) -> list[Line]:
    """The lines of a record; none if there is no file. A last line that was broken off is left out."""
    if not path.is_file():
        return []
    lines: list[Line] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = _object(text)
        except ValueError as error:
            if number == len(texts):
                break
            raise ValueError(f"{path}, line {number}, is no record: {text[:60]!r}") from error
        kind = line.get("kind")
        fields = KINDS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise ValueError(f"{path}, line {number}, is of kind {kind!r}, not of {tuple(KINDS)}")
        if missing := [name for name in ("step", *fields) if name not in line]:
            raise ValueError(f"{path}, line {number}, of kind {line['kind']!r}, lacks {', '.join(missing)}")
        for name, value in line.items():
            if told := _wrong(name, value):
                raise ValueError(f"{path}, line {number}: {name} must be {told}, got {value!r}")
        lines.append(line)
    return lines


def _wrong(name: str, value: Any) -> str | None:
    """What a field of a line should have been, if it is not."""
    if name in TEXTS:
        return None if isinstance(value, str) else "a text"
    if name in FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in COUNTS:
        return None if _count(value) else "a count"
    if name == "misses":
        return None if isinstance(value, dict) and all(map(_count, value.values())) else "counts"
    if value is None and name in OPTIONAL:
        return None
    number = isinstance(value, float) or (type(value) is int and abs(value) < 10**30)
    return None if number else "a number"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


class Record:
    """Writes a run's folder. Every line is handed to the system as soon as it is complete.

    `step` is that of the checkpoint the run goes on from, 0 for a new one: lines of later steps, left by a
    run that was killed, are cut off first.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: RunConfig, environment: dict[str, Any], step: int = 0
    ) -> None:
        self.path = Path(folder) / RECORD
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        if step:
            before = read_lines(self.path)
            kept = [line for line in before if 0 < line["step"] <= step and line["kind"] != "end"]
        else:  # first, so that no lines of before ever stand under a new configuration
            write_atomically(self.path, "")
        write_atomically(self.path.parent / CONFIG, config.to_json())
        write_atomically(self.path.parent / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    @classmethod
    def nowhere(cls) -> Self:
        """A record that keeps nothing: that of a process which only helps another."""
        record = cls.__new__(cls)
        record.path = Path(os.devnull)
        record._file = record.path.open("a", encoding="utf-8")
        record.listeners = []
        return record

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Append one line, and pass it to the listeners."""
        line = {"kind": kind, "step": step, **fields}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"the record {self.path} could not be written at step {step}: {error}") from error
        for listener in self.listeners:
            listener(line)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        if self.path.is_file():
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # what a full disk did not take; the error that ends the run has said so
            if error is None:
                raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within it this process alone writes into the folder; it is an error if another one does.

    The system keeps the lock as long as the file is open, and lets it go with the process, by kill -9 too.
    Where a file system has no locks a warning says so, and nothing keeps a second process out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = file.read(100).strip() or "another process"
            raise ValueError(f"{folder} is in use by {who}: wait for its end, or write elsewhere") from None
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked, let no other process write there: {error}", stacklevel=3
            )
        if not _is_still(file.fileno(), folder / LOCK):
            raise ValueError(f"{folder} was just removed by another process: try again")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _is_still(handle: int, path: Path) -> bool:
    """Whether an open file is the one of that path, and not one that was deleted."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        os.lseek(handle, 2**30, os.SEEK_SET)  # beyond the text, which others may read
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is whole or as it was before, whenever the process ends."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from error


def describe_environment(device: torch.device, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a run ran on: versions, revision, machine, device, and the data with its checksums."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cachemuon": cachemuon.__version__,
        "git": _revision(),
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "data": data,
        **more,
    }


def _revision() -> str | None:
    # HEAD:./ is an error where this folder is not part of the repository around it, as in site-packages.
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "HEAD:./"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.split()[0]


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
