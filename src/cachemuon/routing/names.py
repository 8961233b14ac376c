"""What the parameters of a group are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def number_name(group: int, place: int) -> str:
    """The name of a parameter that has none.

    >>> number_name(0, 3)
    'group0.param3'
    """
    return f"group{group}.param{place}"


def named_params(group: dict[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the group with that index, with their names or numbers."""
    names = group.get("param_names") or [number_name(index, i) for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)
