"""Text into nanoGPT's `train.bin` and `val.bin`, with an end token after each document.

Until all is done the folder holds `train.bin.partial`, `val.bin.partial` and `progress.json`, and the
same call continues where the last one stopped. `meta.json`, written last, says that both files are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cachemuon_lab.data.corpus import OPENWEBTEXT, openwebtext_rows, passages
from cachemuon_lab.data.tokens import FILE_DTYPE, TOKENIZERS, TokenFile, load_encode

SPLITS = ("train", "val")
BATCH, SAVE_EVERY = 256, 4096  # documents tokenized together; between two writings of progress.json

Progress = Callable[[int, int], None]  # called with the number of documents and of tokens written so far


def prepare_text(
    files: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    tokenizer: str = "gpt2",
    *,
    vocabulary_files: str | os.PathLike[str] | None = None,
    validation: float = 0.0005,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenize UTF-8 files, each one document or, if it is long, several; returns what `meta.json` says.

    A document is held out when its hash, as a fraction, is below `validation`: equal documents stay
    together, and neither order nor tokenizer matters. For `vocabulary_files` see `load_encode`.
    """
    paths = [Path(file) for file in files]
    if not paths:
        raise ValueError("files is empty: name at least one text file")
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"there is no text file {missing[0]}")
    sources = [{"name": path.name, "bytes": path.stat().st_size} for path in paths]
    settings = _settings(tokenizer, validation, sources)
    return _prepare(passages(paths), Path(out), settings, vocabulary_files, progress)


def prepare_openwebtext(
    out: str | os.PathLike[str],
    rows: Iterable[Mapping[str, str]] | None = None,
    *,
    vocabulary_files: str | os.PathLike[str] | None = None,
    validation: float = 0.0005,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The same for OpenWebText, streamed from its hub, or for `rows` with a `text` in each.

    To continue, the rows already done are streamed again, but not tokenized.
    """
    texts = (row["text"] for row in (openwebtext_rows() if rows is None else rows))
    settings = _settings("gpt2", validation, [{"name": OPENWEBTEXT if rows is None else "rows"}])
    return _prepare(texts, Path(out), settings, vocabulary_files, progress)


@contextmanager
def progress_bar(total: int | None = None) -> Iterator[Progress]:
    """A bar on the terminal, to be passed as `progress`; `total` documents, where that is known."""
    from rich import progress as rich  # type: ignore[import-not-found, unused-ignore]

    tokens = rich.TextColumn("{task.fields[tokens]:,} tokens")
    with rich.Progress(rich.BarColumn(), rich.MofNCompleteColumn(), tokens, rich.TimeElapsedColumn()) as bar:
        task = bar.add_task("documents", total=total, tokens=0)
        yield lambda documents, count: bar.update(task, completed=documents, tokens=count)


def _settings(tokenizer: str, validation: float, sources: list[dict[str, Any]]) -> dict[str, Any]:
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    if not 0 < validation < 1:
        raise ValueError(f"validation must be between 0 and 1, got {validation}")
    vocabulary, end = TOKENIZERS[tokenizer]
    return dict(tokenizer=tokenizer, vocabulary=vocabulary, end=end, validation=validation, sources=sources)


def _prepare(
    documents: Iterable[str],
    out: Path,
    settings: dict[str, Any],
    vocabulary_files: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    if (out / "meta.json").exists():
        return _read_json(out / "meta.json", settings)
    writer = _Writer(out, settings)
    try:
        if not writer.state["complete"]:
            encode = load_encode(settings["tokenizer"], vocabulary_files)
            remaining = islice(documents, writer.state["documents"], None)
            while texts := list(islice(remaining, BATCH)):
                for text, ids in zip(texts, encode(texts), strict=True):
                    writer.add(text, ids)
                if progress is not None:
                    progress(writer.state["documents"], writer.state["train"] + writer.state["val"])
                if writer.state["documents"] - writer.saved["documents"] >= SAVE_EVERY:
                    writer.save()
        return writer.finish()
    except BaseException as error:
        with suppress(OSError):
            writer.save()
        if isinstance(error, OSError):
            kept = f"{writer.saved['documents']} documents are kept, the same call continues"
            raise OSError(f"{out}: {error}; {kept}") from error
        raise
    finally:
        writer.close()


class _Writer:
    """Both growing files, and `progress.json`, which says how much of them is certain."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out, self.settings = out, settings
        self.state: dict[str, Any] = {**settings, "documents": 0, "train": 0, "val": 0, "complete": False}
        if (out / "progress.json").exists():
            self.state = _read_json(out / "progress.json", settings)
        elif any((out / f"{split}.bin").exists() for split in SPLITS):
            raise ValueError(f"{out} already holds a train.bin or val.bin that was not made here")
        self.saved = self.state
        self.files = {} if self.state["complete"] else {split: self._open(split) for split in SPLITS}

    def _open(self, split: str) -> BinaryIO:
        path, size = self.out / f"{split}.bin.partial", self.state[split] * FILE_DTYPE.itemsize
        path.touch()
        if path.stat().st_size < size:
            raise ValueError(f"{path} is shorter than progress.json says: delete both to start again")
        os.truncate(path, size)  # what an interrupt left behind the last certain document
        return path.open("ab")

    def add(self, text: str, ids: Sequence[int]) -> None:
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        split = SPLITS[int.from_bytes(digest, "little") < self.settings["validation"] * 2**64]
        self.files[split].write(np.array([*ids, self.settings["end"]], dtype=FILE_DTYPE).tobytes())
        counts = {"documents": self.state["documents"] + 1, split: self.state[split] + len(ids) + 1}
        self.state = self.state | counts  # all at once: an interrupt finds counts that agree

    def save(self) -> None:
        state = self.state
        if not state["documents"]:  # nothing to continue, nothing that binds the next call
            return
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        _write_json(self.out / "progress.json", state)
        self.saved = state

    def finish(self) -> dict[str, Any]:
        if empty := [split for split in SPLITS if not self.state[split]]:
            again = f"delete {self.out / 'progress.json'}, start again with more text or another validation"
            raise ValueError(f"none of {self.state['documents']} documents is for {empty[0]}.bin: {again}")
        self.state = self.state | {"complete": True}
        self.save()
        self.close()
        meta = {**self.settings, "documents": self.state["documents"]}
        for split in SPLITS:
            with suppress(FileNotFoundError):  # renamed before an interrupt
                os.replace(self.out / f"{split}.bin.partial", self.out / f"{split}.bin")
            meta[split] = TokenFile(self.out / f"{split}.bin", meta["vocabulary"]).describe()
        _write_json(self.out / "meta.json", meta)
        (self.out / "progress.json").unlink()
        return meta

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # what can't be written now is not counted in progress.json
                file.close()
        self.files = {}


def _read_json(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete it to start again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object; delete it to start again")
    for key, value in settings.items():
        if found.get(key) != value:
            raise ValueError(f"{path} was made with {key}={found.get(key)}, not {value}; use another folder")
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
