"""Learning rates of groups, and a watch over programs that write one rate into all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

Group = dict[str, Any]


def learning_rate(group: Group) -> float | Tensor:
    """The learning rate that a group is stepped with: its `lr`, times `lr_ratio` in a group of Adam's.

    >>> learning_rate({"lr": 0.02}), learning_rate({"lr": 0.02, "lr_ratio": 0.5})
    (0.02, 0.01)
    """
    lr = group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"])
    return lr * float(group["lr_ratio"]) if "lr_ratio" in group else lr


class RateWatch:
    """Notices when Muon's and Adam's learning rates, which were different, become one."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._before = [_on_host(group) for group in groups]
        self._begun = bool(self._before)

    def add(self, group: Group) -> None:
        """Remember the learning rate that a group was made with."""
        self._before.append(_on_host(group))

    def check(self, groups: list[Group]) -> str:
        """A warning at the step where the learning rates become one; else an empty text."""
        now, before, first = [_on_host(group) for group in groups], self._before, not self._begun
        self._before, self._begun = now, True
        rate = now[0] if now and len(set(now)) == 1 else None
        if not rate or None in before or len(set(before)) < 2 or len({g["use_muon"] for g in groups}) < 2:
            return ""
        if not first and rate <= min(old for old in before if old is not None):
            return ""  # schedules end at one floor
        made = " and ".join(f"{old:g}" for old in dict.fromkeys(before) if old is not None)
        return (
            f"all parameter groups have one learning rate, {rate:g}: Muon's and Adam's were {made} before. "
            f"If the training loop writes one learning rate into every group, give Adam a ratio of it: "
            f"param_groups(model, adam=dict(lr_ratio=0.1))"
        )


def _on_host(group: Group) -> float | None:
    lr = group["lr"]
    return None if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(learning_rate(group))
