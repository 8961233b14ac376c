"""How many bytes optimizers keep for a model, counted from shapes. docs/results.md has the table.

    python benchmarks/memory.py [--page docs/results.md]

Models are on the "meta" device: nothing is allocated. tests/lab/test_memory.py compares the count with what
optimizers have kept after a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from cachemuon import CacheMuon, Muon, param_groups
from cachemuon.engine.plan import Plan, kept_dtype
from cachemuon.newton_schulz.normalize import computed_in
from cachemuon.newton_schulz.workspace import solve_bytes
from cachemuon.optim.base import MatrixOptimizer
from cachemuon.report.counters import COLUMNS, RESIDUALS
from cachemuon.routing.layout import layout_of
from cachemuon_lab.models.gpt2 import GPT2, GPT2_LARGE, GPT2_SMALL
from cachemuon_lab.models.resnet import RESNET18, ResNet18
from cachemuon_lab.performance import Cells, renew, to_markdown


class Decoder(nn.Module):
    """The parameters of a Llama: grouped keys and values, three matrices in an MLP, or `experts` of these."""

    def __init__(
        self,
        layers: int,
        width: int,
        keys: int,
        hidden: int,
        vocabulary: int,
        *,
        tied: bool,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(self._layer(width, keys, hidden, experts) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    @staticmethod
    def _layer(width: int, keys: int, hidden: int, experts: int) -> nn.Module:
        sides = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
        mlp = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        layer = nn.Module()
        layer.attention_norm, layer.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        for name, (outputs, inputs) in (sides if experts else sides | mlp).items():
            layer.add_module(name, nn.Linear(inputs, outputs, bias=False))
        if experts:
            layer.router = nn.Linear(width, experts, bias=False)
            for name, shape in mlp.items():
                layer.register_parameter(name, nn.Parameter(torch.empty(experts, *shape)))
        return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2 Small": lambda: GPT2(GPT2_SMALL),
    "GPT-2 Large": lambda: GPT2(GPT2_LARGE),
    "ResNet-18": lambda: ResNet18(RESNET18),
    "Llama 3.2 1B": lambda: Decoder(16, 2048, 512, 8192, 128_256, tied=True),
    "Llama 3.1 8B": lambda: Decoder(32, 4096, 1024, 14_336, 128_256, tied=False),
    "OLMoE 1B-7B": lambda: Decoder(16, 2048, 2048, 1024, 50_304, tied=False, experts=64),
}
"""The sizes of the last three are those of their published configurations."""


def state_bytes(optimizer: Optimizer) -> int:
    """What an optimizer keeps after its first step."""
    adam = [
        param
        for group in optimizer.param_groups
        if not group.get("use_muon", False)
        for param in group["params"]
    ]
    total = sum(2 * param.nbytes + 4 for param in adam)  # two moments, and the number of the step
    if not isinstance(optimizer, MatrixOptimizer):
        return total
    plan = Plan(optimizer.param_groups, {}, optimizer)
    total += sum(param.nbytes for param in {x.param: None for x in plan.matrices})  # momentum
    for x in plan.matrices:
        total += 8 * (len(COLUMNS) + len(RESIDUALS))
        entries = plan.choices[x.number].entries(*x.layout.views[x.index].sides)
        for shape, compact in entries.values():
            total += prod(shape) * (kept_dtype(x) if compact else computed_in(x.param.dtype)).itemsize
    return total


def largest_solve(optimizer: MatrixOptimizer) -> int:
    """What the largest of its matrices needs beside the state while it is solved for."""
    return max(
        solve_bytes(*view.wide)
        for group in optimizer.param_groups
        if group["use_muon"]
        for param in group["params"]
        for view in layout_of(group, param).views
    )


def optimizers(model: nn.Module) -> dict[str, Optimizer]:
    """Those that are compared, by the heads of their columns."""
    cached = {"None": None, "float16": torch.float16}
    return {
        "AdamW": torch.optim.AdamW(model.parameters()),
        "Muon": Muon(param_groups(model)),
        **{
            f"CacheMuon, cache_dtype {name}": CacheMuon(
                param_groups(model), cache_all=True, cache_dtype=dtype
            )
            for name, dtype in cached.items()
        },
    }


def _meta(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return make().to(dtype)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def states() -> Cells:
    """A row for each model and each dtype of its parameters, in MiB."""
    cells: Cells = []
    for title, make in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = _meta(make, dtype)
            made = optimizers(model)
            heads = ["model", "parameters", "number", *made, "beside the state"]
            cells = cells or [heads]
            number = sum(param.numel() for param in model.parameters()) / 1e6
            kept = [_mib(state_bytes(optimizer)) for optimizer in made.values()]
            beside = largest_solve(made["Muon"])
            cells.append([title, str(dtype).removeprefix("torch."), f"{number:,.0f}M", *kept, _mib(beside)])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", type=Path, metavar="FILE", action="append", default=[], help="renew this page's table"
    )
    args = parser.parse_args()
    cells = states()
    print(to_markdown(cells))
    renew(args.page, {"states": ("State, MiB", cells)})


if __name__ == "__main__":
    main()
