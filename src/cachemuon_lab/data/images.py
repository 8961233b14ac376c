"""CIFAR-10 from its official files, and its batches with random crops and flips."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachemuon_lab.data import keyed_generator, part_of, slot_of

OFFICIAL_MD5 = {  # binary version, then python version
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
SIDE, CHANNELS, CLASSES, PADDING = 32, 3, 10, 4
PIXELS = CHANNELS * SIDE * SIDE
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
VALIDATION_BATCH_SIZE = 100


class Split(NamedTuple):
    """Images uint8 `(n, 3, 32, 32)`, labels int64 `(n,)`, and the md5 of each file they came from."""

    images: Tensor
    labels: Tensor
    md5: dict[str, str]


def read_cifar10(folder: Path, checksums: Mapping[str, str] = OFFICIAL_MD5) -> tuple[Split, Split]:
    """Training and test split from the files of `cifar-10-batches-bin` or `cifar-10-batches-py`.

    Training batches that are not there are left out; `Split.md5` says which were. Every file named in
    `checksums` must have that md5; of any other only the format is checked: whole records, labels below 10.
    """
    for suffix in (".bin", ""):
        train = [path for i in range(1, 6) if (path := folder / f"data_batch_{i}{suffix}").is_file()]
        test = folder / f"test_batch{suffix}"
        if train and test.is_file():
            return _read(train, checksums), _read([test], checksums)
    expected = "test_batch and some of data_batch_1 to data_batch_5, all with the ending .bin or all without"
    raise ValueError(f"{folder} has no CIFAR-10: it must hold {expected}")


def _read(paths: list[Path], checksums: Mapping[str, str]) -> Split:
    records, md5 = [], {}
    for path in paths:
        content = path.read_bytes()
        found = md5[path.name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != (expected := checksums.get(path.name, found)):
            raise ValueError(f"{path} is not the official file: md5 {found}, not {expected}; damaged?")
        part = _binary_records(path, content) if path.suffix == ".bin" else _python_records(path, content)
        if part[:, 0].max() >= CLASSES:
            raise ValueError(f"{path} has label {part[:, 0].max()}, labels are 0 to {CLASSES - 1}")
        records.append(part)
    table = torch.from_numpy(np.concatenate(records))
    return Split(table[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), table[:, 0].long(), md5)


def _binary_records(path: Path, content: bytes) -> NDArray[np.uint8]:
    """Rows of one label and 3072 pixels: the red plane, the green, the blue."""
    if not content or len(content) % (1 + PIXELS):
        raise ValueError(f"{path} has {len(content)} bytes: no whole number of {1 + PIXELS}-byte records")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + PIXELS)


def _python_records(path: Path, content: bytes) -> NDArray[np.uint8]:
    """The same rows from a Python 2 pickle of `data` and `labels`."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.array(batch[b"labels"], dtype=np.uint8)
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or not len(labels):
            raise ValueError(f"data is {pixels.dtype} {pixels.shape} for {len(labels)} labels")
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path} is no batch of CIFAR-10's python version: {error}") from error
    return np.column_stack((labels, pixels))


class _ArrayUnpickler(pickle.Unpickler):
    """Builds plain numpy arrays and nothing else, so that a forged file can't run code."""

    ALLOWED: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],  # numpy 2 moved it elsewhere
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[f"{module}.{name}"]


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """From each image with 4 black pixels around it, the 32 x 32 at (top, left), mirrored where `flip`.

    >>> image = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32)
    >>> middle = torch.tensor([4])
    >>> torch.equal(crop_and_flip(image, middle, middle, torch.tensor([True])), image.flip(-1))
    True
    """
    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    windows = padded.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # a view (b, 3, 9, 9, 32, 32): every crop there is
    crops = windows[torch.arange(len(images)), :, top, left]
    return torch.where(flip[:, None, None, None], crops.flip(-1), crops)


def normalize(images: Tensor) -> Tensor:
    """`(x / 255 - MEAN) / STD` for each channel, float32."""
    mean, std = (torch.tensor(values).reshape(CHANNELS, 1, 1) for values in (MEAN, STD))
    return (images / 255 - mean) / std


class ImageBatches:
    """CIFAR-10 in a new order every epoch, cropped and flipped at random; the test images in theirs.

    Each call of `train` returns `batch_size` images, and `calls_per_step` calls (micro-batches times ranks)
    share a step. The order is a pure function of (seed, epoch), crops and flips of (seed, step). `part` of
    the test images validates: see `part_of`.
    The last step of an epoch takes the images that remain, dealt to its calls in turn.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        batch_size: int,
        seed: int,
        calls_per_step: int = 1,
        part: str = "all",
        checksums: Mapping[str, str] = OFFICIAL_MD5,
    ) -> None:
        if batch_size < 1 or calls_per_step < 1:
            raise ValueError(f"must be at least 1: {batch_size=}, {calls_per_step=}")
        self.folder, self.seed = Path(folder), seed
        self.batch_size, self.calls_per_step = batch_size, calls_per_step
        self._train, test = read_cifar10(self.folder, checksums)
        chosen = part_of(len(test.labels), part)
        self._test = Split(test.images[chosen], test.labels[chosen], test.md5)
        if 0 < (rest := len(self._train.labels) % (batch_size * calls_per_step)) < calls_per_step:
            raise ValueError(f"the last step of an epoch has {rest} images for {calls_per_step} calls")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that show every image once, the last of them shorter: 391 for 50,000 images by 128."""
        return math.ceil(len(self._train.labels) / (self.batch_size * self.calls_per_step))

    @property
    def validation_batches(self) -> int:
        """Batches of 100 test images."""
        return math.ceil(len(self._test.labels) / VALIDATION_BATCH_SIZE)

    def train(self, step: int, micro: int = 0, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Normalized images float32 `(b, 3, 32, 32)` and labels int64 `(b,)`."""
        slot = slot_of(micro, rank, world)
        if slot >= self.calls_per_step:
            raise ValueError(f"{micro=}, {rank=}, {world=} is beyond calls_per_step={self.calls_per_step}")
        epoch, position = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self._train.labels), generator=keyed_generator("epoch", self.seed, epoch))
        together = self.batch_size * self.calls_per_step
        chosen = order[position * together :][:together]
        generator = keyed_generator("augment", self.seed, step)
        top, left = torch.randint(2 * PADDING + 1, (2, len(chosen)), generator=generator)
        flip = torch.randint(2, (len(chosen),), generator=generator).bool()
        chosen, top, left, flip = (drawn[slot :: self.calls_per_step] for drawn in (chosen, top, left, flip))
        images = crop_and_flip(self._train.images[chosen], top, left, flip)
        return normalize(images), self._train.labels[chosen]

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Test images number `100 * index` and following, normalized, in the order of the file."""
        if not 0 <= index < self.validation_batches:
            raise IndexError(f"validation batch {index} of {self.validation_batches}")
        part = slice(index * VALIDATION_BATCH_SIZE, (index + 1) * VALIDATION_BATCH_SIZE)
        return normalize(self._test.images[part]), self._test.labels[part]

    def describe(self) -> dict[str, Any]:
        """The files that were there with their md5, and how batches are drawn from them."""
        return {
            "name": self.folder.name,
            "md5": {**self._train.md5, **self._test.md5},
            "train_images": len(self._train.labels),
            "validation_images": len(self._test.labels),
            **dict(batch_size=self.batch_size, calls_per_step=self.calls_per_step, seed=self.seed),
        }
