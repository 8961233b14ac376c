"""Which parameter goes to Muon, which to Adam, and why: the rules.

Muon is for the weight matrices of hidden layers. The first rule that applies decides: docs/routing.md has the
rules as a table, docs/notebook/architectures.md the routes of real models. Rules look at classes and
structure first, at names only where nothing else helps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .heads import EXPERTS, WRAPPERS, output_heads, routers_of
from .layout import Split, matrix_layout, matrix_shape

Choice = Literal["adam", "muon"]
Kind = Literal["matrix", "embedding", "head", "vector"]
Overrides = Mapping[str, Choice]

_CHOICES = ("adam", "muon")
_CALLED_EMBEDDING = re.compile(r"embed|posemb|(^|_)(emb|pos|wte|wpe)(_|$)|tokens?$|relative_position|rel_pos")
_CALLED_WEIGHT = re.compile(r"weight|kernel|expert|(^|_)(w|proj|lora)(_|\d|$)")
_EMBEDDING_CLASS = re.compile(r"(?<!Un)Embed(ding)?s?$")
_NORM_CLASS = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_LISTS = (ParametrizationList, nn.ParameterList, nn.ParameterDict)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes: Muon (`use_muon=True`), Adam (`False`) or, frozen, nowhere (`None`).

    `view`, `split` and `transposed` are how Muon reads the tensor as matrices (`layout.matrix_layout`);
    `view` is None outside Muon. `kind` chooses among Adam's settings.

    >>> Route("fc.bias", (10,), False, "bias", kind="vector").use_muon
    False
    """

    name: str
    shape: tuple[int, ...]
    use_muon: bool | None
    reason: str
    view: str | None = None
    split: Split = 1
    transposed: bool = False
    kind: Kind = "matrix"


def routes(
    model: nn.Module,
    *,
    head: Choice = "adam",
    overrides: Overrides | None = None,
    split: Mapping[str, Split] | None = None,
    transposed: Mapping[str, bool] | None = None,
) -> tuple[Route, ...]:
    """The route of every parameter, in the order of `model.named_parameters()`.

    `overrides` maps patterns to "muon" or "adam". A pattern (`fnmatch`) may match any name of a tied
    parameter, with or without the prefix of DDP or torch.compile; the first pattern that matches decides.
    `split` maps patterns to the number of equal parts that a weight's outputs are cut into, or to their
    sizes: with `{"*.c_attn.weight": 3}` q, k and v are separate matrices. `transposed` maps patterns to
    whether a weight is stored as (in, out).

    Detected as (in, out): transposed convolutions, `Conv1D` of transformers, and experts whose `gate_up_proj`
    and `down_proj` have matching shapes. Only grouped convolutions are split by default.

    >>> for r in routes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(32, 10, bias=False)), head="muon"):
    ...     print(r.name, r.use_muon, r.reason)
    0.weight True convolution as (out, in*kh*kw)
    0.bias False bias
    1.weight True output head, by choice
    """
    _check(model, head)
    found, heads, routers = _sites(model), output_heads(model), routers_of(model)
    chosen = _matched("overrides", overrides, found)
    splits = _matched("split", split, found)
    layouts = _matched("transposed", transposed, found)
    made = {}
    for param, sites in found.items():
        rule = _rule(param, sites, head, heads, routers)
        made[param] = _route(param, sites, rule, chosen.get(param), splits.get(param), layouts.get(param))
    for argument, patterns, matched in (("split", split, splits), ("transposed", transposed, layouts)):
        used = {pattern for param, (pattern, _) in matched.items() if made[param].use_muon}
        if idle := [pattern for pattern in patterns or () if pattern not in used]:
            raise ValueError(f"{argument} must match weights of Muon, got {idle[0]!r}, which matches none")
    return tuple(made.values())


def _check(model: nn.Module, head: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model must keep the shapes of its matrices, got one of FullyShardedDataParallel, which flattens "
            "them; torch.distributed.fsdp.fully_shard (FSDP2) keeps them"
        )
    if head not in _CHOICES:
        raise ValueError(f"head must be one of {_CHOICES} (its settings are `heads`), got {head!r}")


def _is_split(parts: object) -> bool:
    sizes = parts if isinstance(parts, (tuple, list)) else (parts,)
    return bool(sizes) and all(type(size) is int and size >= 1 for size in sizes)


_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "overrides": (f"one of {_CHOICES}", lambda choice: choice in _CHOICES),
    "split": ("an integer >= 1, or a tuple of them", _is_split),
    "transposed": ("True or False", lambda layout: isinstance(layout, bool)),
}
"""The values that each kind of pattern may have, in words and as a test."""


class _Site(NamedTuple):
    name: str  # as in model.named_parameters()
    leaf: str  # the owner's attribute
    path: str  # of the owner
    owner: nn.Module


def _sites(model: nn.Module) -> dict[nn.Parameter, list[_Site]]:
    """The places of each parameter; a tied one has several."""
    found: dict[nn.Parameter, list[_Site]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name, place = f"{path}.{leaf}" if path else leaf, path
            if is_lazy(param):
                raise ValueError(f"model has the uninitialized parameter {name!r}: run one forward first")
            if param.is_complex():
                raise ValueError(f"{name}: parameters must be real floating point, got {param.dtype}")
            if isinstance(module, _LISTS):
                # "fc.parametrizations.weight.original0" is the weight of fc, "embeds.0" one of embeds: with
                # the list as its owner, a head with weight_norm would not be recognized.
                parent, _, leaf = path.rpartition(".")
                place = parent.removesuffix("parametrizations").removesuffix(".")
            found.setdefault(param, []).append(_Site(name, leaf, place, modules[place]))
    return found


def _matched(
    argument: str, patterns: Mapping[str, Value] | None, found: dict[nn.Parameter, list[_Site]]
) -> dict[nn.Parameter, tuple[str, Value]]:
    """For each parameter the first pattern that matches one of its names, and the pattern's value."""
    matched: dict[nn.Parameter, tuple[str, Value]] = {}
    allowed, is_allowed = _ALLOWED[argument]
    for pattern, value in (patterns or {}).items():
        if not is_allowed(value):
            raise ValueError(f"{argument}[{pattern!r}] must be {allowed}, got {value!r}")
        own = [param for param, sites in found.items() if _matches(pattern, sites)]
        if not own:
            raise ValueError(f"{argument} must match parameter names, got {pattern!r}, which matches none")
        matched = dict.fromkeys(own, (pattern, value)) | matched
    return matched


def _matches(pattern: str, sites: list[_Site]) -> bool:
    names = [site.name for site in sites]
    names += [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names]
    return any(fnmatchcase(name, pattern) for name in names)


class _Rule(NamedTuple):
    use_muon: bool
    reason: str
    kind: Kind = "matrix"


def _route(
    param: nn.Parameter,
    sites: list[_Site],
    rule: _Rule,
    chosen: tuple[str, Choice] | None,
    split: tuple[str, Split] | None,
    layout: tuple[str, bool] | None,
) -> Route:
    """The rule's route, unless the caller has chosen another."""
    name, shape, owner, tied = sites[0].name, tuple(param.shape), sites[0].owner, _tied(sites)
    told = f"{name!r} of shape {shape}"
    if not param.requires_grad:
        return Route(name, shape, None, f"frozen{tied}")
    use_muon, reason, kind = rule
    if chosen is not None:
        use_muon, reason = chosen[1] == "muon", f"override {chosen[0]!r}"
        if use_muon and len(shape) < 2:
            raise ValueError(f"overrides[{chosen[0]!r}] must be 'adam' for {told}, got 'muon'")
    if not use_muon:
        return Route(name, shape, False, reason + tied, kind=kind)
    view, parts, transposed = _view(param, owner)
    if split is not None:
        parts = split[1] if isinstance(split[1], int) else tuple(split[1])
    transposed = layout[1] if layout else transposed
    try:
        pieces = matrix_layout(shape, view, parts, transposed).views
    except ValueError as error:
        raise ValueError(f"{told}: {error}") from None
    if split is not None:
        if min(min(piece.sides) for piece in pieces) < 2:
            raise ValueError(f"split[{split[0]!r}] must leave {told} two rows and columns, got {parts!r}")
        reason += f", split {parts}"
    if transposed and not _is_convolution(owner, param):
        reason += ", as (in, out)"
    return Route(name, shape, True, reason + tied, view, parts, transposed, kind)


def _tied(sites: list[_Site]) -> str:
    """Which other modules have the parameter too. A module that is reached on two paths is still one."""
    places: dict[tuple[int, str], str] = {}
    for site in sites:
        places.setdefault((id(site.owner), site.leaf), site.name)
    _, *others = places.values()
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f", tied to {others[0]}{more}" if others else ""


def _rule(
    param: nn.Parameter, sites: list[_Site], head: str, heads: set[nn.Module], routers: set[nn.Module]
) -> _Rule:
    """The first rule that applies."""
    _, leaf, path, owner = sites[0]
    if leaf.startswith("bias") or leaf.endswith("bias"):
        return _Rule(False, "bias", "vector")
    if any(_is_embedding(site.leaf, site.owner) for site in sites):
        return _Rule(False, "embedding", "embedding")
    if isinstance(owner, (nn.LayerNorm, nn.RMSNorm)) or _NORM_CLASS.search(type(owner).__name__):
        return _Rule(False, "norm", "vector")
    if param.ndim < 2:
        return _Rule(False, "norm" if "norm" in type(owner).__name__.lower() else "vector", "vector")
    if not _is_weight(param, sites[0], routers):
        return _Rule(False, "no layer's weight", "vector")
    output = any(site.owner in heads for site in sites)
    if output and head == "adam":
        return _Rule(False, "output head", "head")
    if owner in routers or "router" in leaf:
        return _Rule(False, "router")
    if _embeds_patches(path, owner):
        return _Rule(False, "patch embedding", "embedding")
    if isinstance(owner, _ConvNd) and 1 < owner.groups in (owner.in_channels, owner.out_channels):
        return _Rule(False, "depthwise convolution")
    view, parts, _ = _view(param, owner)
    count, rows, cols = matrix_shape(param.shape, view)
    if count == 0 or min(rows, cols) < 2:  # the polar factor would only normalize
        return _Rule(False, f"{'output head with ' * output}fewer than two rows or columns", "vector")
    if output:
        return _Rule(True, "output head, by choice")
    if _is_convolution(owner, param):
        kernel = {3: "k", 4: "kh*kw"}.get(param.ndim, "kd*kh*kw")
        sides = f"(in, out*{kernel})" if owner.transposed else f"(out, in*{kernel})"
        return _Rule(True, f"convolution as {sides}" + (f", in {parts} groups" if parts != 1 else ""))
    kinds = {2: "matrix", 3: "stack of matrices"}
    return _Rule(True, kinds.get(param.ndim, f"tensor as ({rows}, {cols})"))


def _is_embedding(leaf: str, owner: nn.Module) -> bool:
    by_class = _EMBEDDING_CLASS.search(type(owner).__name__)  # model-parallel libraries have their own
    called = _CALLED_EMBEDDING.search(leaf.lower())
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or bool(by_class or called)


def _is_weight(param: nn.Parameter, site: _Site, routers: set[nn.Module]) -> bool:
    """Whether it is called a weight; or is a stack of experts, whatever its name, in a module that is called
    one or has a router.
    """
    if _CALLED_WEIGHT.search(site.leaf.lower()):
        return True
    called = EXPERTS.search(f"{site.path}.{type(site.owner).__name__}".lower()) is not None
    return param.ndim == 3 and (called or any(child in routers for child in site.owner.children()))


def _is_convolution(owner: nn.Module, param: nn.Parameter) -> TypeGuard[_ConvNd]:
    return isinstance(owner, _ConvNd) and param.ndim == 2 + len(owner.kernel_size)


def _embeds_patches(path: str, owner: nn.Module) -> bool:
    """Whether a layer reads pixels in patches; later stages, and stems that overlap, are hidden layers."""
    called = "patch_embed" in path
    if not isinstance(owner, _ConvNd):
        return called
    patches = owner.stride == owner.kernel_size and max(owner.kernel_size) > 1
    return owner.in_channels <= 4 and not owner.transposed and (called or patches)


def _view(param: nn.Parameter, owner: nn.Module) -> tuple[str, Split, bool]:
    """How Muon reads a weight by default: `view`, `split` and `transposed`."""
    if _is_convolution(owner, param):
        # Groups lie along the first dimension, in a transposed convolution its inputs. Cut into groups, it
        # can't be read as (in, out) as well.
        return "flatten" if param.ndim == 3 else "auto", owner.groups, owner.transposed and owner.groups == 1
    if type(owner).__name__ == "Conv1D" and param.ndim == 2:
        return "auto", 1, True
    up, down = (getattr(owner, name, None) for name in ("gate_up_proj", "down_proj"))
    stored_as_in_out = (
        (param is up or param is down)
        and isinstance(up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and down.ndim == 3  # (E, hidden, 2 width) and (E, width, hidden)
        and tuple(up.shape[1:]) == (down.shape[2], 2 * down.shape[1])
    )
    return "auto", 1, stored_as_in_out
