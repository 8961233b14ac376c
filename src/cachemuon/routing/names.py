"""Names: of the settings of parameter groups, and what a parameter's name says of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

_SHARED = ("lr", "weight_decay", "eps")

MUON_SETTINGS = frozenset(
    (
        *(*_SHARED, "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "solver"),
        "normalize",
        *("gamma", "probe", "vectors", "max_age", "clip", "max_norm", "seed", "gate", "cache_all"),
        *("min_rows", "cache_dtype", "max_workspace_bytes", "process_group", "exchange"),
    )
)
"""The settings of a group of matrices: the arguments of `CacheMuon`, and so those of `Muon`."""

ADAM_SETTINGS = frozenset((*_SHARED, "lr_ratio", "betas", "decoupled_weight_decay", "fused"))
"""The settings of a group with `use_muon=False`."""

OTHER_KEYS = frozenset({"name", "initial_lr"})
"""Keys of a group that loggers and schedulers read."""

_EMBEDDING_OR_HEAD = re.compile(
    r"embed|(^|[._])(wte|wpe|emb|heads?|classifier|score|logits)([.]|$)", re.IGNORECASE
)


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The lines of a table, each column to the side that `sides` says.

    >>> aligned([("name", "n"), ("W", "12")], "<>")
    ['name   n', 'W     12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def misspelled(key: str, known: Collection[str], cutoff: float = 0.85) -> str | None:
    """The known setting that a key misspells; None for a known key, and for one of the program's own.

    >>> misspelled("weight_decy", MUON_SETTINGS), misspelled("learning_rate", MUON_SETTINGS)
    ('weight_decay', 'lr')
    >>> misspelled("weight_decay_scale", MUON_SETTINGS), misspelled("max_momentum", MUON_SETTINGS)
    (None, None)
    """
    if key in known or any(key.startswith(f"{name}_") or key.endswith(f"_{name}") for name in known):
        return None
    if key == "learning_rate":
        return "lr"
    return next(iter(get_close_matches(key, known, n=1, cutoff=cutoff)), None)


def looks_like_embedding_or_head(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix is called an embedding or an output head, or has the rows of a vocabulary.

    >>> looks_like_embedding_or_head("lm_head.weight", (64, 64))
    True
    >>> looks_like_embedding_or_head("group0.param0", (5000, 128))
    True
    >>> looks_like_embedding_or_head("blocks.0.mlp.up.weight", (3072, 768))
    False
    """
    tall = len(shape) == 2 and shape[0] >= 16 * shape[1] and shape[1] > 64  # LoRA's factors are thinner
    return tall or _EMBEDDING_OR_HEAD.search(name) is not None
