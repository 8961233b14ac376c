"""Other people's Muons, to be timed beside ours: those of them that are installed.

`pip install 'cachemuon[peers]'` brings what can be installed beside any torch; GramNewtonSchulz of the Gram
Newton-Schulz authors wants CUDA packages, and is installed with `pip install --no-deps gram-newton-schulz`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

Maker = Callable[[list[Parameter]], Optimizer]


def _jordan(params: list[Parameter]) -> Any:
    return import_module("muon").SingleDeviceMuon(params, lr=1e-3)


def _pytorch_optimizer(**settings: Any) -> Callable[[list[Parameter]], Any]:
    def make(params: list[Parameter]) -> Any:
        groups = [{"params": params, "use_muon": True}]
        return import_module("pytorch_optimizer").Muon(groups, lr=1e-3, **settings)

    return make


def _heavyball(params: list[Parameter]) -> Any:
    return import_module("heavyball").Muon(params, lr=1e-3)


class _GramNewtonSchulz(torch.optim.SGD):
    """The authors' solver alone, on the gradient: their optimizer needs their CUDA kernels."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__(params, lr=1e-3)
        solver = import_module("gram_newton_schulz").GramNewtonSchulz
        self.solve = solver(ns_use_kernels=False, compile_kwargs=None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(self.solve(param.grad), alpha=1e-3)


_KNOWN: dict[str, tuple[str, str, str, Maker]] = {  # name: module, distribution, precision, maker
    "torch.optim.Muon": ("torch", "torch", "bf16", lambda params: torch.optim.Muon(params, lr=1e-3)),
    "muon-optimizer": ("muon", "muon-optimizer", "bf16", _jordan),
    "pytorch_optimizer": ("pytorch_optimizer", "pytorch_optimizer", "bf16", _pytorch_optimizer()),
    "pytorch_optimizer, Gram": (
        "pytorch_optimizer",
        "pytorch_optimizer",
        "fp16",
        _pytorch_optimizer(ns_method="gram_newton_schulz", ns_coeffs="polar_express"),
    ),
    "heavyball": ("heavyball", "heavyball", "bf16", _heavyball),
    "gram-newton-schulz": ("gram_newton_schulz", "gram-newton-schulz", "fp16", _GramNewtonSchulz),
}


def installed() -> dict[str, tuple[str, str, Maker]]:
    """Precision, version and maker of every peer that is installed, by name.

    >>> installed()["torch.optim.Muon"][0]
    'bf16'
    """
    return {
        name: (precision, version(distribution), make)
        for name, (module, distribution, precision, make) in _KNOWN.items()
        if find_spec(module) is not None
    }
