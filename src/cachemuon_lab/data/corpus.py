"""The corpus that every machine already has: the running Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachemuon_lab.data.tokens import TokenBatches, Tokens

BYTES = 256
"""The vocabulary of a byte corpus."""

END_OF_FILE = 0
"""Stands after each file: text has no such byte."""

VALIDATION_EVERY = 10
"""Files number 9, 19, 29, ... in the order of their paths are held out for validation."""

LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "config-")
"""Folders whose name starts so: installed packages; tests, which some distributions leave out; build records."""

LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")
"""Files whose name starts so differ between two builds of one Python."""


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and for validation, and the checksum of all files with their paths."""

    train: Tokens
    validation: Tokens
    sha256: str
    files: int

    def batches(self, context: int, batch_size: int, seed: int) -> TokenBatches:
        """Windows of this corpus."""
        return TokenBatches(self.train, self.validation, context, batch_size, seed)


def python_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """The `.py` files of the standard library (or of `folder`), in the order of their paths, a zero byte after each.

    Every tenth file is held out. The result is the same for the same Python sources; its `sha256` says
    which they were.

    >>> corpus = python_corpus()
    >>> corpus.train.vocabulary, len(corpus.train) > 5_000_000
    (256, True)
    """
    root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
    checksum = hashlib.sha256()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    paths = sorted(_sources(root))
    if len(paths) < VALIDATION_EVERY:
        raise ValueError(
            f"{root} has {len(paths)} Python source files, at least {VALIDATION_EVERY} are needed"
        )
    for number, path in enumerate(paths):
        content = (root / path).read_bytes()
        checksum.update(f"{path}\0{len(content)}\0".encode())
        checksum.update(content)
        held_out = number % VALIDATION_EVERY == VALIDATION_EVERY - 1
        parts[held_out].append(content + bytes([END_OF_FILE]))
    label = f"python {platform.python_version()} standard library" if folder is None else root.name
    train, validation = (
        Tokens(f"{label}, {name}", np.frombuffer(b"".join(part), dtype=np.uint8), BYTES)
        for name, part in zip(("train", "validation"), parts, strict=True)
    )
    return Corpus(train, validation, checksum.hexdigest(), len(paths))


def _sources(root: Path) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(LEFT_OUT)]
        for name in files:
            if name.endswith(".py") and not name.startswith(LEFT_OUT_FILES):
                yield Path(folder, name).relative_to(root).as_posix()
