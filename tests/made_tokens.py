"""Token files with random numbers."""

import numpy as np


def write_tokens(folder, train, val, vocabulary=256):
    """`train.bin` and `val.bin` of so many tokens in a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", train), ("val", val)):
        tokens = np.random.default_rng(0).integers(0, vocabulary, size)
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    return folder
