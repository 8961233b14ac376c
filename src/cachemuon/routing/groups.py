"""A model's parameters as groups for the optimizers, each with its reason: `print(param_groups(model))`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from .layout import Split
from .names import ADAM_SETTINGS, MUON_SETTINGS, OTHER_KEYS, aligned, misspelled
from .rules import Choice, Overrides, Route, routes

Settings = Mapping[str, Any]


class ParamGroups(list[dict[str, Any]]):
    """Optimizer groups, and in `routes` the place of each parameter with its reason.

    The optimizers of this package do not write into the dicts; torch's own add their defaults.

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
        lines = [*aligned(rows, "<<<<"), ""]
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

    `head`, `overrides`, `split` and `transposed` are those of `routes`. `muon` has settings for Muon's
    groups, `adam` for Adam's; `embeddings`, `heads` and `vectors` override `adam` for these kinds. Vectors
    (biases, norms, gains, scalars, everything that is no layer's weight) are decayed only by
    `vectors=dict(weight_decay=...)`. Kinds without their own settings share a group.

    `adam=dict(lr_ratio=0.1)` makes Adam's learning rate 0.1 times its group's `lr`, which then defaults to
    the optimizer's: use it where a training loop writes one learning rate into every group.

    Each group has `reasons`, in the order of its `params`. Weights with another layout (of a Conv1d, split,
    or stored as (in, out)) get separate Muon groups. Under `DistributedDataParallel` Muon's groups get its
    `process_group`, so that ranks share the work, except for parameters that it ignores.

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
    groups = ParamGroups()
    groups.routes = routes(model, head=head, overrides=overrides, split=split, transposed=transposed)
    params, replicas = dict(model.named_parameters()), _replicas(model)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    key: tuple[Any, ...]
    for route in groups.routes:
        if route.use_muon is None:
            continue
        if route.use_muon:
            shared = replicas.get(route.name)
            own = {} if shared is None else {"process_group": shared}
            settings = _layout_settings(route) | own | dict(muon or {})
            key = (0, route.view, route.split != 1, str(route.split), route.transposed, id(shared))
        else:
            kind = kinds.get(route.kind)
            settings = {**(adam or {}), **(kind or {})}
            key = (1, route.kind if kind else "")
        group = found.setdefault(key, {"params": [], "use_muon": route.use_muon, "reasons": [], **settings})
        group["params"].append((route.name, params[route.name]))
        group["reasons"].append(route.reason)
    groups += [found[key] for key in sorted(found, key=lambda key: key[:5])]  # an id differs between ranks
    if groups and not any(group["use_muon"] for group in groups):
        warnings.warn(
            f"Muon gets none of the {len(groups.routes)} parameters of this model, Adam gets all that are "
            "trained; print(param_groups(model)) shows why",
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


def _layout_settings(route: Route) -> dict[str, Any]:
    """The settings of a route's layout that are not the default."""
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
