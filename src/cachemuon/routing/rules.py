"""Which parameter goes to Muon, which to Adam, and why: the rules.

Muon is for the weight matrices of hidden layers. The first rule that applies decides. Rules look at classes
and structure first, at names only where nothing else helps. `docs/notebook/architectures.md` shows the routes
of real models.

| rule | what it is | to |
|---|---|---|
| frozen | `requires_grad=False` | nowhere |
| override | the caller's pattern | as it says |
| bias | called `bias*` or `*bias`, of any shape | Adam, vector |
| embedding | of a class called `*Embed`, `*Embedding`; or bare, and called so | Adam, embedding |
| norm | of a class called `*Norm`, of any shape | Adam, vector |
| vector | of fewer than two dimensions | Adam, vector |
| no layer's weight | bare, and not called a weight: latents, scales, `A_log` | Adam, vector |
| output head | one of `output_heads`, unless `head="muon"` | Adam, head |
| router | in a module called `*router`, or `gate`, `*_gate` beside experts | Adam |
| patch embedding | called `patch_embed*`, or a convolution into patches; of pixels | Adam, embedding |
| depthwise | a convolution with as many groups as inputs or outputs | Adam |
| thin | of fewer than two rows or columns: the polar factor only normalizes | Adam, vector |
| convolution | `(out, in*kh*kw)`, each group by itself; a transposed one `(in, out*kh*kw)` | Muon |
| matrix | the rest; 3-D is a stack of matrices, as of experts | Muon |

A bare parameter is one that a module holds beside its layers. Vectors, embeddings and heads may each have
settings of their own under Adam.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeGuard, TypeVar

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .heads import WRAPPERS, output_heads
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
_EXPERTS = re.compile(r"expert|moe")

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
    """The route of every parameter, in the model's own order; see the rules above, and `output_heads`.

    `overrides` maps patterns (`fnmatch`, on any name of a tied parameter, with or without the prefix of DDP
    or torch.compile) to "muon" or "adam", and is the last word. `split` and `transposed` map such patterns
    to how Muon reads a weight: the number of equal parts its outputs are divided into, or their sizes
    (`{"*.c_attn.weight": 3}`: q, k and v are matrices of their own); whether it lies as (in, out). Of
    several patterns the first that matches decides.

    By themselves lie as (in, out): transposed convolutions, `Conv1D` of transformers, and experts whose
    `gate_up_proj` and `down_proj` fit one another that way. Nothing is split by itself but convolutions in
    groups.

    >>> for r in routes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(32, 10, bias=False)), head="muon"):
    ...     print(r.name, r.use_muon, r.reason)
    0.weight True convolution as (out, in*kh*kw)
    0.bias False bias
    1.weight True output head, by choice
    """
    return tuple(route for _, route in routed(model, head, overrides, split, transposed))


def routed(
    model: nn.Module,
    head: str = "adam",
    overrides: Overrides | None = None,
    split: Mapping[str, Split] | None = None,
    transposed: Mapping[str, bool] | None = None,
) -> Iterator[tuple[nn.Parameter, Route]]:
    """Every parameter with its route; the arguments are those of `routes`."""
    _check(model, head, overrides or {}, split or {}, transposed or {})
    found = _sites(model)
    heads, routers = output_heads(model), _routers(model)
    chosen = _matched("overrides", overrides or {}, found)
    splits = _matched("split", split or {}, found)
    layouts = _matched("transposed", transposed or {}, found)
    made = {}
    for param, sites in found.items():
        rule = _rule(param, sites, head, heads, routers)
        made[param] = _route(param, sites, rule, chosen.get(param), splits.get(param), layouts.get(param))
    on_muon = [param for param, route in made.items() if route.use_muon]
    for argument, patterns, matched in (("split", split, splits), ("transposed", transposed, layouts)):
        used = {matched[param][0] for param in on_muon if param in matched}
        for pattern in patterns or ():
            if pattern not in used:
                raise ValueError(
                    f"{argument} must match weights of Muon, got {pattern!r}, which matches none"
                )
    yield from made.items()


def _check(
    model: nn.Module,
    head: str,
    overrides: Overrides,
    split: Mapping[str, Split],
    transposed: Mapping[str, bool],
) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model must keep the shapes of its matrices, got one of FullyShardedDataParallel, which flattens "
            "them; torch.distributed.fsdp.fully_shard (FSDP2) keeps them"
        )
    if head not in _CHOICES:
        raise ValueError(f"head must be one of {_CHOICES} (its settings are `heads`), got {head!r}")
    for pattern, choice in overrides.items():
        if choice not in _CHOICES:
            raise ValueError(f"overrides[{pattern!r}] must be one of {_CHOICES}, got {choice!r}")
    for pattern, parts in split.items():
        sizes = parts if isinstance(parts, (tuple, list)) else (parts,)
        if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
            raise ValueError(f"split[{pattern!r}] must be an integer >= 1, or a tuple of them, got {parts!r}")
    for pattern, layout in transposed.items():
        if not isinstance(layout, bool):
            raise ValueError(f"transposed[{pattern!r}] must be True or False, got {layout!r}")


class _Site(NamedTuple):
    name: str  # as in model.named_parameters()
    leaf: str  # what the owner calls it
    path: str  # of the owner
    owner: nn.Module


def _sites(model: nn.Module) -> dict[nn.Parameter, list[_Site]]:
    """Where each parameter is; a tied one has several places."""
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
                # "fc.parametrizations.weight.original0" is the weight of fc, "embeds.0" one of embeds:
                # judged by the list that holds them, a head with weight_norm would not be recognized.
                parent, _, leaf = path.rpartition(".")
                place = parent.removesuffix("parametrizations").removesuffix(".")
            found.setdefault(param, []).append(_Site(name, leaf, place, modules[place]))
    return found


def _routers(model: nn.Module) -> set[nn.Module]:
    """The modules that choose among experts, and what is in them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        names = [type(module).__name__, *module._modules, *module._parameters]
        experts = any(_EXPERTS.search(name.lower()) for name in names)
        for name, child in module.named_children():
            gate = experts and (name == "gate" or name.endswith("_gate"))
            if gate or name.endswith("router") or "Router" in type(child).__name__:
                found.update(child.modules())
    return found


def _matched(
    argument: str, patterns: Mapping[str, Value], found: dict[nn.Parameter, list[_Site]]
) -> dict[nn.Parameter, tuple[str, Value]]:
    """For each parameter the first pattern that matches one of its names, and what it says."""
    matched: dict[nn.Parameter, tuple[str, Value]] = {}
    for pattern, value in patterns.items():
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
    """The rule's route, unless the caller has said something else."""
    name, shape, tied = sites[0].name, tuple(param.shape), _tied(sites)
    if not param.requires_grad:
        return Route(name, shape, None, f"frozen{tied}")
    use_muon, reason, kind = rule
    if chosen is not None:
        use_muon, reason = chosen[1] == "muon", f"override {chosen[0]!r}"
        if use_muon and len(shape) < 2:
            where = f"overrides[{chosen[0]!r}]"
            raise ValueError(f"{where} must be 'adam' for {name!r} of shape {shape}, got 'muon'")
    if not use_muon:
        return Route(name, shape, False, reason + tied, kind=kind)
    view, parts, transposed = _view(param, sites[0])
    if split is not None:
        parts = split[1] if isinstance(split[1], int) else tuple(split[1])
    transposed = layout[1] if layout else transposed
    try:
        pieces = matrix_layout(shape, view, parts, transposed).views
    except ValueError as error:
        raise ValueError(f"{name} of shape {shape}: {error}") from None
    if split is not None:
        if min(min(piece.sides) for piece in pieces) < 2:
            where = f"split[{split[0]!r}]"
            raise ValueError(
                f"{where} must leave {name!r} of shape {shape} two rows and columns, got {parts!r}"
            )
        reason += f", split {parts}"
    if transposed and not _is_convolution(sites[0].owner, param):
        reason += ", as (in, out)"
    return Route(name, shape, True, reason + tied, view, parts, transposed, kind)


def _tied(sites: list[_Site]) -> str:
    more = f" and {len(sites) - 2} more" if len(sites) > 2 else ""
    return f", tied to {sites[1].name}{more}" if len(sites) > 1 else ""


def _rule(
    param: nn.Parameter, sites: list[_Site], head: str, heads: set[nn.Module], routers: set[nn.Module]
) -> _Rule:
    """The first rule of the table that applies."""
    _, leaf, path, owner = sites[0]
    if leaf.startswith("bias") or leaf.endswith("bias"):
        return _Rule(False, "bias", "vector")
    if any(map(_is_embedding, sites)):
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
    view, parts, _ = _view(param, sites[0])
    count, rows, cols = matrix_shape(param.shape, view)
    if count == 0 or min(rows, cols) < 2:
        reason = ("output head with " if output else "") + "fewer than two rows or columns"
        return _Rule(False, reason, "vector")
    if output:
        return _Rule(True, "output head, by choice")
    if _is_convolution(owner, param):
        kernel = {3: "k", 4: "kh*kw"}.get(param.ndim, "kd*kh*kw")
        sides = f"(in, out*{kernel})" if owner.transposed else f"(out, in*{kernel})"
        return _Rule(True, f"convolution as {sides}" + (f", in {parts} groups" if parts != 1 else ""))
    kinds = {2: "matrix", 3: "stack of matrices"}
    return _Rule(True, kinds.get(param.ndim, f"tensor as ({rows}, {cols})"))


def _is_embedding(site: _Site) -> bool:
    by_class = isinstance(site.owner, (nn.Embedding, nn.EmbeddingBag))
    # Model-parallel libraries have embeddings of their own.
    foreign = _EMBEDDING_CLASS.search(type(site.owner).__name__) is not None
    return by_class or foreign or _CALLED_EMBEDDING.search(site.leaf.lower()) is not None


def _is_weight(param: nn.Parameter, site: _Site, routers: set[nn.Module]) -> bool:
    """Whether it is called a weight; or is a stack of experts, which have all kinds of names, in a module
    that is called so or has a router.
    """
    if _CALLED_WEIGHT.search(site.leaf.lower()) is not None:
        return True
    called = _EXPERTS.search(f"{site.path}.{type(site.owner).__name__}".lower()) is not None
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


def _view(param: nn.Parameter, site: _Site) -> tuple[str, Split, bool]:
    """How Muon reads a weight, if nobody says otherwise: `view`, `split` and `transposed`."""
    owner = site.owner
    if _is_convolution(owner, param):
        # Groups lie along the first dimension. That of a transposed convolution is its inputs, and cut into
        # groups it cannot be read as (in, out) too.
        return "flatten" if param.ndim == 3 else "auto", owner.groups, owner.transposed and owner.groups == 1
    if type(owner).__name__ == "Conv1D" and param.ndim == 2:
        return "auto", 1, True
    up, down = (getattr(owner, name, None) for name in ("gate_up_proj", "down_proj"))
    if param is up or param is down:
        return "auto", 1, _experts_lie_as_in_out(up, down)
    return "auto", 1, False


def _experts_lie_as_in_out(up: object, down: object) -> bool:
    """Whether they are (E, hidden, 2 width) and (E, width, hidden), not each the other way round."""
    if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.ndim == down.ndim == 3):
        return False
    _, width, hidden = down.shape
    return tuple(up.shape[1:]) == (hidden, 2 * width)
