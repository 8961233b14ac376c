"""A model's parameters as groups for the optimizers, each parameter with the reason for its place.

Muon is for hidden weight matrices. Embeddings, biases, norms and, unless asked otherwise, the output
head go to Adam. `routing.py` has the rules; `print(param_groups(model))` shows what they gave.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from .layout import Split
from .names import ADAM_SETTINGS, MUON_SETTINGS, OTHER_KEYS, misspelled
from .rules import Choice, Overrides, Route, routes

Settings = Mapping[str, Any]


class ParamGroups(list[dict[str, Any]]):
    """Optimizer groups, and in `routes` the reason for each parameter's place.

    The optimizers of this package leave the dicts as they are; torch's own fill their defaults into them.

    >>> param_groups(nn.Linear(3, 2)).routes[0].reason
    'matrix'
    """

    routes: tuple[Route, ...] = ()

    def table(self) -> str:
        """The routes as aligned text, then the parameters and elements per route.

        >>> print(param_groups(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))).table())
        name      shape   route  reason
        0.weight  (4, 3)  muon   matrix
        0.bias    (4,)    adam   bias
        1.weight  (2, 4)  adam   output head
        <BLANKLINE>
        muon    1 parameters, 12 elements
        adam    2 parameters, 12 elements
        frozen  0 parameters, 0 elements
        """
        where = {True: "muon", False: "adam", None: "frozen"}
        rows = [("name", "shape", "route", "reason")]
        rows += [(r.name, str(r.shape), where[r.use_muon], r.reason) for r in self.routes]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] + [""]
        for use_muon, route in where.items():
            sizes = [math.prod(r.shape) for r in self.routes if r.use_muon is use_muon]
            lines.append(f"{route:6}  {len(sizes)} parameters, {sum(sizes)} elements")
        return "\n".join(lines)

    __str__ = table


def param_groups(
    model: nn.Module,
    *,
    head: Choice = "adam",
    muon: Settings | None = None,
    adam: Settings | None = None,
    embeddings: Settings | None = None,
    heads: Settings | None = None,
    vectors: Settings | None = None,
    overrides: Overrides | None = None,
    split: Mapping[str, Split] | None = None,
    transposed: Mapping[str, bool] | None = None,
) -> ParamGroups:
    """Groups for the optimizers of this package: Muon's first, then Adam's. Frozen parameters are in none.

    `head`, `overrides`, `split` and `transposed` are those of `routes`. `muon` are settings for all groups of
    Muon, `adam` for all of Adam; `embeddings`, `heads` and `vectors` for these kinds alone, before `adam`.
    Vectors are biases, norms, gains, scalars and whatever is no layer's weight: they are not decayed, also
    where `adam` has a `weight_decay`; only `vectors=dict(weight_decay=...)` decays them. Kinds without
    settings of their own share a group. `Muon` and `CacheMuon` have the settings.

    With `lr_ratio` Adam's learning rate is that times the `lr` of its group, which is then the optimizer's:
    `adam=dict(lr_ratio=0.1)` is right in a training loop that writes one learning rate into every group.

    Each group has `reasons`, in the order of its `params`. Weights that are read differently (a Conv1d's,
    one that is split, one that lies as (in, out)) are in Muon groups of their own. Under
    `DistributedDataParallel` Muon's groups know its `process_group`, and ranks share the work; what it was
    told to ignore is each rank's own.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    >>> groups = param_groups(model, adam=dict(lr=2e-3), heads=dict(lr=1e-4))
    >>> for group in groups:
    ...     names = [name for name, _ in group["params"]]
    ...     print(group["use_muon"], group.get("lr"), group.get("weight_decay"), names)
    True None None ['0.weight']
    False 0.0001 None ['1.weight']
    False 0.002 0.0 ['0.bias', '1.bias']
    """
    given = {"muon": muon, "adam": adam, "embeddings": embeddings, "heads": heads, "vectors": vectors}
    for argument, settings in given.items():
        _check_known(argument, settings or {})
    kinds: dict[str, Settings | None] = {
        "embedding": embeddings,
        "head": heads,
        "vector": {"weight_decay": 0.0, **(vectors or {})},
    }
    replicas = _replicas(model)
    groups = ParamGroups()
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    key: tuple[Any, ...]
    groups.routes = routes(model, head=head, overrides=overrides, split=split, transposed=transposed)
    params = dict(model.named_parameters())
    for route in groups.routes:
        if route.use_muon is None:
            continue
        group: dict[str, Any] = {"params": [], "use_muon": route.use_muon, "reasons": []}
        if route.use_muon:
            shared = replicas.get(route.name)
            group |= (
                _reading(route) | ({} if shared is None else {"process_group": shared}) | dict(muon or {})
            )
            key = (0, route.view, route.split != 1, str(route.split), route.transposed, id(shared))
        else:
            own = kinds.get(route.kind)
            group |= {**(adam or {}), **(own or {})}
            key = (1, route.kind if own else "")
        group = found.setdefault(key, group)
        group["params"].append((route.name, params[route.name]))
        group["reasons"].append(route.reason)
    groups += [found[key] for key in sorted(found, key=lambda key: key[:5])]  # an id differs between ranks
    if groups and not any(group["use_muon"] for group in groups):
        warnings.warn(
            f"Muon gets none of the {len(groups.routes)} parameters of this model, Adam all that are "
            f"trained; print(param_groups(model)) shows why",
            UserWarning,
            stacklevel=2,
        )
    return groups


def _check_known(argument: str, settings: Settings) -> None:
    known = MUON_SETTINGS if argument == "muon" else ADAM_SETTINGS
    for key in settings.keys() - known - OTHER_KEYS:
        nearest = misspelled(key, known, cutoff=0.6)
        hint = f"did you mean {nearest!r}?" if nearest else f"allowed are {', '.join(sorted(known))}"
        raise ValueError(f"{argument} has no setting {key!r}: {hint}")


def _reading(route: Route) -> dict[str, Any]:
    """What a group must say for its weights to be read so."""
    usual = {"view": ("auto", None), "split": (1,), "transposed": (False,)}
    return {key: getattr(route, key) for key, values in usual.items() if getattr(route, key) not in values}


def _replicas(model: nn.Module) -> dict[str, Any]:
    """The process group of every parameter, by name, that DistributedDataParallel keeps equal."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            for name, _ in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    found[f"{path}.module.{name}".lstrip(".")] = module.process_group
    return found
