"""Tokenizers, token sequences in nanoGPT's flat uint16 files or in memory, and random windows of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachemuon_lab.data import keyed_generator, part_of, slot_of

FILE_DTYPE = np.dtype("<u2")
"""Two bytes for each token, the low one first: `train.bin` and `val.bin` of nanoGPT."""

TOKENIZERS = {"gpt2": (50257, 50256), "bytes": (256, 0)}
"""Size of the vocabulary, and the id that stands after each document."""

CHUNK = 2**24  # tokens looked at together in a scan of the whole sequence


def load_encode(
    tokenizer: str, vocabulary_files: str | os.PathLike[str] | None = None
) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """The function that turns texts into ids, GPT-2's from tiktoken.

    `vocabulary_files` is a folder with GPT-2's `encoder.json` and `vocab.bpe`, for machines that can't
    download them.

    >>> list(load_encode("bytes")(["hi"])[0])
    [104, 105]
    """
    if tokenizer == "bytes":
        return lambda texts: [text.encode("utf-8", "replace") for text in texts]
    encoding = gpt2_encoding(vocabulary_files)
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)


def gpt2_encoding(vocabulary_files: str | os.PathLike[str] | None = None) -> Any:
    """GPT-2's `tiktoken.Encoding`; for `vocabulary_files` see `load_encode`."""
    import tiktoken  # type: ignore[import-not-found, unused-ignore]

    if vocabulary_files is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            hint = "pass vocabulary_files, a folder with its encoder.json and vocab.bpe"
            raise OSError(f"GPT-2's vocabulary could not be downloaded: {hint} ({error})") from error
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks as ranks  # type: ignore[import-not-found, unused-ignore]

    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks=ranks(
            os.path.join(vocabulary_files, "vocab.bpe"),
            os.path.join(vocabulary_files, "encoder.json"),
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        ),
        special_tokens={"<|endoftext|>": TOKENIZERS["gpt2"][1]},
    )


class Tokens:
    """A named flat sequence of token ids below `vocabulary`.

    >>> Tokens("count", np.arange(5, dtype=np.uint8), vocabulary=256).windows(torch.tensor([0, 2]), 3)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """

    def __init__(self, name: str, ids: NDArray[np.unsignedinteger[Any]], vocabulary: int) -> None:
        if not 1 <= vocabulary <= 2**16:
            raise ValueError(f"vocabulary must be 1 to {2**16}, got {vocabulary}")
        if ids.dtype.kind != "u" or ids.dtype.itemsize > FILE_DTYPE.itemsize:
            raise ValueError(f"{name} must be uint8 or uint16, got {ids.dtype}")
        if len(ids) == 0:
            raise ValueError(f"{name} is empty: no tokens")
        self.name, self.vocabulary = name, vocabulary
        self._unchecked = ids

    def __len__(self) -> int:
        return len(self._unchecked)

    @cached_property
    def ids(self) -> NDArray[np.unsignedinteger[Any]]:
        """The ids. The first use reads all of them once: an id outside the vocabulary is a ValueError."""
        for first, chunk in self._chunks():
            if chunk.max() >= self.vocabulary:
                wrong = int(np.argmax(chunk >= self.vocabulary))
                raise ValueError(
                    f"{self.name} has id {chunk[wrong]} at position {first + wrong}, "
                    f"but the vocabulary has {self.vocabulary} ids"
                )
        return self._unchecked

    @cached_property
    def sha256(self) -> str:
        """Checksum of the ids as a uint16 file, wherever they really are."""
        checksum = hashlib.sha256()
        for _, chunk in self._chunks():
            checksum.update(chunk.astype(FILE_DTYPE).tobytes())
        return checksum.hexdigest()

    def part(self, part: str) -> Tokens:
        """The tokens of a part of the validation: see `part_of`."""
        if part == "all":
            return self
        return Tokens(f"{self.name}, {part}", self._unchecked[part_of(len(self), part)], self.vocabulary)

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """`length` ids from each start, as int64 `(starts, length)`."""
        positions = starts.numpy()[:, None] + np.arange(length)
        return torch.from_numpy(self.ids[positions].astype(np.int64))

    def describe(self) -> dict[str, Any]:
        """Name, size and checksum, for a run's record."""
        return dict(name=self.name, tokens=len(self), vocabulary=self.vocabulary, sha256=self.sha256)

    def _chunks(self) -> Iterator[tuple[int, NDArray[np.unsignedinteger[Any]]]]:
        for first in range(0, len(self), CHUNK):
            yield first, np.asarray(self._unchecked[first : first + CHUNK])


class TokenFile(Tokens):
    """A flat file of uint16 little-endian ids, mapped into memory and never read as a whole at once."""

    def __init__(self, path: str | os.PathLike[str], vocabulary: int) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"there is no token file {self.path}")
        size = self.path.stat().st_size
        if size == 0:
            raise ValueError(f"{self.path} is empty: no tokens")
        if size % FILE_DTYPE.itemsize:
            raise ValueError(
                f"{self.path} has an odd number of bytes ({size}): it is truncated, or not uint16"
            )
        super().__init__(self.path.name, np.memmap(self.path, dtype=FILE_DTYPE, mode="r"), vocabulary)


class TokenBatches:
    """Random contiguous training windows, and a fixed walk over the validation tokens.

    A training window starts anywhere, drawn from a hash of (seed, step, `micro * world + rank`);
    `batch_size` windows make one call. Validation cuts its tokens into windows side by side and takes them
    in one shuffled order that never changes, so that a few batches already sample all of the text;
    windows too few to fill a last batch are left out, unless there is no other.

    >>> count = Tokens("count", np.arange(100, dtype=np.uint8), vocabulary=256)
    >>> inputs, targets = TokenBatches(count, count, context=8, batch_size=2, seed=0).train(step=7)
    >>> inputs.shape, torch.equal(targets, inputs + 1)
    (torch.Size([2, 8]), True)
    """

    def __init__(self, train: Tokens, validation: Tokens, context: int, batch_size: int, seed: int) -> None:
        if context < 1 or batch_size < 1:
            raise ValueError(f"context and batch_size must be at least 1, got {context} and {batch_size}")
        for tokens in (train, validation):
            if len(tokens) < context + 1:
                raise ValueError(
                    f"{tokens.name} has {len(tokens)} tokens, but a context of {context} needs {context + 1}"
                )
        self.context, self.batch_size, self.seed = context, batch_size, seed
        self._train, self._validation = train, validation
        windows = (len(validation) - 1) // context
        self._order = torch.randperm(windows, generator=keyed_generator("validation", windows)) * context

    @property
    def tokens_per_batch(self) -> int:
        """Targets in one call of `train`."""
        return self.batch_size * self.context

    @property
    def validation_batches(self) -> int:
        """Number of validation batches: the whole of the validation tokens, but for a remainder."""
        return max(1, len(self._order) // self.batch_size)

    def train(self, step: int, micro: int = 0, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 `(batch_size, context)` each, targets one token later."""
        generator = keyed_generator("train", self.seed, step, slot_of(micro, rank, world))
        starts = torch.randint(len(self._train) - self.context, (self.batch_size,), generator=generator)
        return self._pair(self._train, starts)

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets number `index` of the fixed order, independent of the seed."""
        if not 0 <= index < self.validation_batches:
            raise IndexError(f"validation batch {index} of {self.validation_batches}")
        first = index * self.batch_size
        return self._pair(self._validation, self._order[first : first + self.batch_size])

    def describe(self) -> dict[str, Any]:
        """Both sequences with their checksums, and how batches are drawn from them."""
        drawn = dict(context=self.context, batch_size=self.batch_size, seed=self.seed)
        return dict(train=self._train.describe(), validation=self._validation.describe(), **drawn)

    def _pair(self, tokens: Tokens, starts: Tensor) -> tuple[Tensor, Tensor]:
        block = tokens.windows(starts, self.context + 1)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()
