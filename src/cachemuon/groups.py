"""Which parameter goes to Muon, which to Adam, and why.

Muon is for hidden weight matrices. Embeddings, biases, norms and, unless asked otherwise, the output
head go to Adam. Every parameter has a `Route` with its reason; `print(param_groups(model))` shows them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .views import matrix_shape

Choice = Literal["adam", "muon"]
Overrides = Mapping[str, Choice]

HEAD_NAMES = ("head", "heads", "classifier", "fc", "fc_out", "out", "output", "logits", "score", "unembed")
"""Names that make the last Linear the output head wherever it lies; so does any that ends in "_head"."""

_CHOICES = ("adam", "muon")
_OWN_KEYS = ("params", "param_names", "use_muon", "view")
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_HIDDEN = (nn.ModuleList, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_EMBEDDING = re.compile(r"embed|posemb|(^|_)(emb|wte|wpe)(_|$)|tokens?$|relative_position|rel_pos")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes: Muon (`use_muon=True`), Adam (`False`) or, frozen, nowhere (`None`).

    `view` is how Muon reads the tensor as matrices (see `matrix_shape`), None outside Muon.

    >>> Route("fc.bias", (10,), False, "bias").use_muon
    False
    """

    name: str
    shape: tuple[int, ...]
    use_muon: bool | None
    reason: str
    view: str | None = None


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
    muon: Mapping[str, Any] | None = None,
    adam: Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
) -> ParamGroups:
    """Optimizer groups for a model: every trainable parameter, with its name, in exactly one of them.

    `muon` and `adam` are settings for the groups of that kind; `head` and `overrides` are those of
    `routes`. Conv1d weights, which are 3-D as expert weights are, get a Muon group with `view="flatten"`.
    Under `DistributedDataParallel` Muon's groups know its `process_group`, and ranks share the work; what it
    was told to ignore is each rank's own.

    >>> groups = param_groups(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), adam=dict(lr=2e-3))
    >>> [(g["use_muon"], g.get("lr"), [name for name, _ in g["params"]]) for g in groups]
    [(True, None, ['0.weight']), (False, 0.002, ['0.bias', '1.weight', '1.bias'])]
    """
    for argument, settings in (("muon", muon), ("adam", adam)):
        if taken := sorted(set(settings or ()).intersection(_OWN_KEYS)):
            raise ValueError(f"{argument} must hold no key of {_OWN_KEYS}, got {taken}")
    routed = list(_routed(model, head, overrides))
    groups = ParamGroups()
    groups.routes = tuple(route for _, route in routed)
    replicas = _replicas(model)
    kinds: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
    for param, route in routed:
        if route.use_muon is not None:
            shared = replicas.get(route.name) if route.use_muon else None
            kinds.setdefault((not route.use_muon, route.view or "", shared), []).append((route.name, param))
    for (adams, view, shared), params in sorted(kinds.items(), key=lambda item: item[0][:2]):
        group = {"params": params, "use_muon": not adams}
        if view == "flatten":
            group["view"] = view
        if shared is not None:
            group["process_group"] = shared
        groups.append({**group, **((adam if adams else muon) or {})})
    if kinds and all(adams for adams, _, _ in kinds):
        warnings.warn(
            f"Muon gets none of the {len(routed)} parameters of this model, Adam all that are trained; "
            f"print(param_groups(model)) shows why",
            UserWarning,
            stacklevel=2,
        )
    return groups


def _replicas(model: nn.Module) -> dict[str, Any]:
    """The process group of every parameter, by name, that DistributedDataParallel keeps equal."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            for name, _ in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    found[f"{path}.module.{name}".lstrip(".")] = module.process_group
    return found


def routes(
    model: nn.Module, *, head: Choice = "adam", overrides: Overrides | None = None
) -> tuple[Route, ...]:
    """The route of every parameter, in the model's own order; the first rule that applies decides.

    Frozen; `overrides`; embedding; bias; norm or vector; output head, if `head="adam"`; fewer than
    two rows or columns, where the polar factor only normalizes; all others go to Muon. `overrides` maps
    patterns (`fnmatch`, on any name of a tied parameter, with or without the prefix of DDP or
    torch.compile) to "muon" or "adam"; the first that matches decides.

    The output head is the last `nn.Linear` in module order, if it is a direct child of the model (a wrapper
    around a single module with parameters counts as that module), or is called one of `HEAD_NAMES`, or is
    an item of a module so called ("classifier.6"). What lies in a ModuleList or in torch's attention and
    transformer layers is hidden work, never a head.

    >>> for r in routes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(32, 10, bias=False)), head="muon"):
    ...     print(r.name, r.use_muon, r.reason)
    0.weight True convolution as (out, in*kh*kw)
    0.bias False bias
    1.weight True output head, by choice
    """
    return tuple(route for _, route in _routed(model, head, overrides))


class _Site(NamedTuple):
    name: str  # as in model.named_parameters()
    leaf: str  # what the owner calls it
    owner: nn.Module


def _sites(model: nn.Module) -> dict[nn.Parameter, list[_Site]]:
    found: dict[nn.Parameter, list[_Site]] = {}  # a tied parameter has several sites
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name, owner = f"{path}.{leaf}" if path else leaf, module
            if is_lazy(param):
                raise ValueError(f"model has the uninitialized parameter {name!r}: run one forward first")
            if isinstance(module, (ParametrizationList, nn.ParameterList)):
                # "fc.parametrizations.weight.original0" is the weight of fc, "embeds.0" one of embeds:
                # judged by the list that holds them, a head with weight_norm would not be recognized.
                parent, _, leaf = path.rpartition(".")
                owner = modules[parent.removesuffix("parametrizations").removesuffix(".")]
            found.setdefault(param, []).append(_Site(name, leaf, owner))
    return found


def _routed(model: nn.Module, head: str, overrides: Overrides | None) -> Iterator[tuple[nn.Parameter, Route]]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model must keep the shapes of its matrices, got one of FullyShardedDataParallel, which flattens "
            "them; torch.distributed.fsdp.fully_shard (FSDP2) keeps them"
        )
    if head not in _CHOICES:
        raise ValueError(f"head must be one of {_CHOICES}, got {head!r}")
    found, output_head = _sites(model), _output_head(model)
    chosen: dict[nn.Parameter, tuple[str, Choice]] = {}  # the first pattern that matches
    for pattern, choice in (overrides or {}).items():
        if choice not in _CHOICES:
            raise ValueError(f"overrides[{pattern!r}] must be one of {_CHOICES}, got {choice!r}")
        matched = [param for param, sites in found.items() if _matches(pattern, sites)]
        if not matched:
            raise ValueError(f"overrides must match parameter names, got {pattern!r}, which matches none")
        chosen = dict.fromkeys(matched, (pattern, choice)) | chosen
    for param, sites in found.items():
        name, shape = sites[0].name, tuple(param.shape)
        view = "flatten" if len(shape) == 3 and _convolution(param, sites[0].owner) else "auto"
        use_muon: bool | None
        if param.is_complex():
            raise ValueError(f"{name}: parameters must be real floating point, got {param.dtype}")
        if not param.requires_grad:
            use_muon, reason = None, "frozen"
        elif param in chosen:
            pattern, choice = chosen[param]
            use_muon, reason = choice == "muon", f"override {pattern!r}"
            if use_muon and len(shape) < 2:
                where = f"overrides[{pattern!r}]"
                raise ValueError(f"{where} must be 'adam' for {name!r} of shape {shape}, got 'muon'")
        else:
            output = any(site.owner is output_head for site in sites)
            use_muon, reason = _rule(param, sites, view, output, head)
        if len(sites) > 1:
            more = f" and {len(sites) - 2} more" if len(sites) > 2 else ""
            reason += f", tied to {sites[1].name}{more}"
        yield param, Route(name, shape, use_muon, reason, view if use_muon else None)


def _rule(param: nn.Parameter, sites: list[_Site], view: str, output: bool, head: str) -> tuple[bool, str]:
    _, leaf, owner = sites[0]
    if any(map(_is_embedding, sites)):
        return False, "embedding"
    if leaf.startswith("bias") or leaf.endswith("bias"):
        return False, "bias"
    # An elementwise scale is no matrix, even where LayerNorm((C, H, W)) gives it three dimensions.
    if isinstance(owner, (nn.LayerNorm, nn.RMSNorm)):
        return False, "norm"
    if param.ndim < 2:
        return False, "norm" if "norm" in type(owner).__name__.lower() else "vector"
    if output and head == "adam":
        return False, "output head"
    count, rows, cols = matrix_shape(param.shape, view)
    if count == 0 or min(rows, cols) < 2:
        return False, ("output head with " if output else "") + "fewer than two rows or columns"
    if output:
        return True, "output head, by choice"
    if convolution := _convolution(param, owner):
        return True, f"convolution as {convolution}"
    kinds = {2: "matrix", 3: "batch of matrices"}
    return True, kinds.get(param.ndim, f"tensor as ({rows}, {cols})")


def _convolution(param: nn.Parameter, owner: nn.Module) -> str | None:
    if not isinstance(owner, _ConvNd) or param.ndim != 2 + len(owner.kernel_size):
        return None
    kernel = {3: "k", 4: "kh*kw"}.get(param.ndim, "kd*kh*kw")
    return f"(in, out*{kernel})" if owner.transposed else f"(out, in*{kernel})"


def _is_embedding(site: _Site) -> bool:
    # Model-parallel libraries have embeddings of their own, with a `weight` but not torch's class.
    foreign = site.leaf == "weight" and type(site.owner).__name__.endswith("Embedding")
    named = _EMBEDDING.search(site.leaf.lower()) is not None
    return foreign or named or isinstance(site.owner, (nn.Embedding, nn.EmbeddingBag))


def _matches(pattern: str, sites: list[_Site]) -> bool:
    names = [site.name for site in sites]
    names += [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    return any(fnmatchcase(name, pattern) for name in names)


def _output_head(model: nn.Module) -> nn.Module | None:
    root = model
    while True:
        inner = [child for child in root.children() if next(child.parameters(), None) is not None]
        # A container of one is a model with one layer, and Net(fc=Linear) is no wrapper.
        container = isinstance(root, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        own = next(root.parameters(recurse=False), None)
        if container or own is not None or len(inner) != 1 or isinstance(inner[0], nn.Linear):
            break
        root = inner[0]
    modules = dict(root.named_modules())
    path = next((path for path, module in reversed(modules.items()) if isinstance(module, nn.Linear)), "")
    parts = [part for part in path.split(".") if part not in ("", *_WRAPPERS)]
    around = [module for prefix, module in modules.items() if not prefix or path.startswith(prefix + ".")]
    if not parts or any(isinstance(module, _HIDDEN) for module in around):
        return None
    name = next((part for part in reversed(parts) if not part.isdigit()), "")
    return modules[path] if len(parts) == 1 or name in HEAD_NAMES or name.endswith("_head") else None
