"""Where text comes from: the running Python's own standard library, text files, OpenWebText."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachemuon_lab.data.tokens import TOKENIZERS, TokenBatches, Tokens

BYTES, END_OF_FILE = TOKENIZERS["bytes"]

VALIDATION_EVERY = 10
"""Files number 9, 19, 29, ... in the order of their paths are held out for validation."""

LEFT_OUT = ("site-packages", "dist-packages", "test", "idle_test", "config-")
"""Folders whose name starts so: installed packages; tests, which some distributions lack; build records."""

LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")
"""Files whose name starts so differ between two builds of one Python."""

PASSAGE = 2**14
"""Characters after which, at the end of the line, a long text file is cut into a next document."""

OPENWEBTEXT = "Skylion007/openwebtext"
"""The name of the data set on its hub."""


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and for validation, and the checksum of all files with their paths."""

    train: Tokens
    validation: Tokens
    sha256: str
    files: int

    def batches(self, context: int, batch_size: int, seed: int, part: str = "all") -> TokenBatches:
        """Windows of this corpus, and of a part of its validation bytes."""
        return TokenBatches(self.train, self.validation.part(part), context, batch_size, seed)


def python_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """The `.py` files of the standard library, or of `folder`, in the order of their paths.

    A zero byte stands after each file, and every tenth file is held out. The result is the same for the
    same Python sources; its `sha256` says which they were.

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


def passages(paths: Iterable[Path]) -> Iterator[str]:
    """The documents of UTF-8 files: each file is one, or several if it is longer than `PASSAGE`."""
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while text := file.read(PASSAGE):
                    yield text + file.readline()
        except UnicodeDecodeError as error:
            found = error.object[error.start : error.end]
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} {found!r}") from error


def openwebtext_rows() -> Iterator[Mapping[str, str]]:
    """The rows of OpenWebText, a `text` in each, streamed from the hub."""
    from datasets import load_dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        yield from load_dataset(OPENWEBTEXT, split="train", streaming=True)
    except Exception as error:  # the hub's client has many, of several libraries
        raise OSError(f"{OPENWEBTEXT} could not be streamed: {error}") from error
