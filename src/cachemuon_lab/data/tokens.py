"""Token sequences, from nanoGPT's flat uint16 files or from memory, and random windows of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachemuon_lab.data import keyed_generator, slot_of

FILE_DTYPE = np.dtype("<u2")
"""Two bytes for each token, the low one first: `train.bin` and `val.bin` of nanoGPT."""

MAX_VOCABULARY = 2**16
CHUNK = 2**24  # tokens looked at together in a scan of the whole sequence


class Tokens:
    """A named flat sequence of token ids below `vocabulary`.

    >>> Tokens("count", np.arange(5, dtype=np.uint8), vocabulary=256).windows(torch.tensor([0, 2]), 3)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """

    def __init__(self, name: str, ids: NDArray[np.integer[Any]], vocabulary: int) -> None:
        if not 1 <= vocabulary <= MAX_VOCABULARY:
            raise ValueError(f"vocabulary must be in [1, {MAX_VOCABULARY}], got {vocabulary}")
        if len(ids) == 0:
            raise ValueError(f"{name} is empty: no tokens")
        self.name, self.vocabulary = name, vocabulary
        self._unchecked = ids

    def __len__(self) -> int:
        return len(self._unchecked)

    @cached_property
    def ids(self) -> NDArray[np.integer[Any]]:
        """The ids. The first use reads all of them once: an id outside the vocabulary is a ValueError."""
        for first, chunk in self._chunks():
            wrong = np.flatnonzero((chunk < 0) | (chunk >= self.vocabulary))
            if len(wrong):
                raise ValueError(
                    f"{self.name} has id {chunk[wrong[0]]} at position {first + wrong[0]}, "
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

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """`length` ids from each start, as int64 `(starts, length)`."""
        positions = starts.numpy()[:, None] + np.arange(length)
        return torch.from_numpy(self.ids[positions].astype(np.int64))

    def describe(self) -> dict[str, Any]:
        """Name, size and checksum, for a run's record."""
        return {
            "name": self.name,
            "tokens": len(self),
            "vocabulary": self.vocabulary,
            "sha256": self.sha256,
        }

    def _chunks(self) -> Iterator[tuple[int, NDArray[np.integer[Any]]]]:
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
        return {
            "train": self._train.describe(),
            "validation": self._validation.describe(),
            "context": self.context,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def _pair(self, tokens: Tokens, starts: Tensor) -> tuple[Tensor, Tensor]:
        block = tokens.windows(starts, self.context + 1)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()
