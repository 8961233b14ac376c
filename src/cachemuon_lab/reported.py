"""The numbers that the paper reports, and which run they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from cachemuon_lab.config import RunConfig
from cachemuon_lab.recipes import RECIPES


@dataclass(frozen=True)
class Reported:
    """What the paper reports of a run; None where it gives no number.

    PFLOPs are of orthogonalization, the savings those against GramMuon and against PolarExpMuon.
    """

    pflops: float | None = None
    best_loss: float | None = None
    hit_rate: float | None = None
    saved_gram: float | None = None
    saved_polar: float | None = None


REPORTED: dict[tuple[str, str], Reported] = {
    ("gpt2-large-owt", "GramMuon"): Reported(516.16, 3.037),
    ("gpt2-large-owt", "PolarExpMuon"): Reported(644.99, 3.039),
    ("gpt2-large-owt", "CacheMuon.paper gamma=2"): Reported(445.97, 3.041, 0.33, 0.136, 0.309),
    ("gpt2-large-owt", "CacheMuon.paper gamma=5"): Reported(296.90, None, 0.59, 0.425, 0.540),
    ("gpt2-large-owt", "CacheMuon.paper gamma=10"): Reported(226.88, None, 0.73, 0.560, 0.648),
    ("gpt2-large-owt", "CacheMuon.paper gamma=15"): Reported(180.76, 3.096, 0.84, 0.650, 0.720),
    ("gpt2-large-owt-4.8b", "CacheMuon.paper gamma=2"): Reported(saved_gram=0.22, saved_polar=0.38),
    ("gpt2-small-owt", "GramMuon"): Reported(37.18),
    ("gpt2-small-owt", "PolarExpMuon"): Reported(46.45),
    ("gpt2-small-owt", "CacheMuon.paper gamma=5"): Reported(26.67, None, 0.45, 0.28, 0.43),
    ("resnet18-cifar10", "GramMuon"): Reported(2.32),
    ("resnet18-cifar10", "PolarExpMuon"): Reported(4.06),
    ("resnet18-cifar10", "CacheMuon.paper gamma=20"): Reported(1.98, None, 0.80, 0.15, 0.51),
}
"""By recipe and the optimizer's label."""


def reported(config: RunConfig) -> Reported | None:
    """What the paper reports of this run: of the same model, data, steps and optimizer, with any seed."""
    for (name, label), told in REPORTED.items():
        theirs = RECIPES[name].base
        if label == config.optimizer.label and _setup(theirs) == _setup(config):
            same = [one for one in RECIPES[name].variants if one.label == label]
            return told if same == [config.optimizer] else None
    return None


def _setup(config: RunConfig) -> tuple[object, ...]:
    """What must be the paper's for its numbers to stand beside a run's."""
    batch = config.batch_size, config.accumulation * config.replicas
    return config.model, config.data.kind, config.schedule, config.steps, config.continues, batch
