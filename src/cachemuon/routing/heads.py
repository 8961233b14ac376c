"""Which layers give a model's outputs, and which choose among experts: by place, then by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

HEAD_NAMES = ("head", "heads", "classifier", "score", "logits", "unembed")
"""A module of such a name, or `*_head`, or of a class `*Head`, ends in an output head, wherever it is."""

LAST_NAMES = ("fc", "fc_out", "out", "output")
"""A layer of such a name, or in such a module, is the output head if it is the model's last one."""

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The names that DDP, torch.compile and others put between a module and its children."""

EXPERTS = re.compile(r"expert|moe")
_HIDDEN = (nn.ModuleList, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_MODALITY = re.compile(r"(visual|vision|image|text|audio)_proj(ection)?")


def output_heads(model: nn.Module) -> set[nn.Module]:
    """The layers (Linear, convolution) whose outputs are the model's.

    By place: the last layer of the model, if it is a direct child or ends a Sequential that is one (a wrapper
    around a single module counts as that module). With it, other Linears in such a place that read the same
    width and whose outputs no later layer can take: a policy beside a value.
    By name: the last layer of each module called one of `HEAD_NAMES`, or of a class `*Head`; each item of a
    list of heads; a model's own projections of modalities into a shared embedding (`text_projection`).
    Layers in a ModuleList, or in torch's attention and transformer layers, are hidden, never heads.

    >>> model = nn.ModuleDict({"body": nn.Linear(8, 8), "policy": nn.Linear(8, 4), "value": nn.Linear(8, 1)})
    >>> [name for name, module in model.named_modules() if module in output_heads(model)]
    ['policy', 'value']
    """
    modules = dict(_inner(model).named_modules())
    found = set(_last_ones(modules))
    for path, module in modules.items():
        if path and _called_head(path, module) and not _hidden(path, modules):
            found.update(_finals(module))
    return found


def routers_of(model: nn.Module) -> set[nn.Module]:
    """The modules that choose among experts, and all modules in them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        names = [type(module).__name__, *module._modules, *module._parameters]
        experts = any(EXPERTS.search(name.lower()) for name in names)
        for name, child in module.named_children():
            gate = experts and (name == "gate" or name.endswith("_gate"))
            if gate or name.endswith("router") or "Router" in type(child).__name__:
                found.update(child.modules())
    return found


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a Linear or convolution with its own weight, of torch or another library."""
    kind = type(module).__name__
    known = isinstance(module, (nn.Linear, _ConvNd)) or kind.endswith("Linear") or kind == "Conv1D"
    return known and ("weight" in module._parameters or hasattr(module, "parametrizations"))


def _with_layers(module: nn.Module) -> list[nn.Module]:
    """The children that have layers."""
    return [child for child in module.children() if any(map(_is_layer, child.modules()))]


def _inner(model: nn.Module) -> nn.Module:
    """A model without the wrappers around it."""
    own = next(model.parameters(recurse=False), None)
    inner = [named for named in model.named_children() if next(named[1].parameters(), None) is not None]
    # A container of one is a model with one layer.
    if own is not None or len(inner) != 1 or isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return model
    ((name, child),) = inner
    if _is_layer(child) and name not in WRAPPERS:  # Net(fc=Linear) is no wrapper
        return model
    return _inner(child)


def _last_ones(modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """The last layer, if it is a head, and the heads beside it."""
    layers = [path for path, module in modules.items() if path and _is_layer(module)]
    if not layers or _hidden(layers[-1], modules):
        return
    last = modules[layers[-1]]
    at_end = _at_an_end(layers[-1], modules)
    parts = [part for part in layers[-1].split(".") if part not in WRAPPERS and not part.isdigit()]
    if at_end or (parts and parts[-1] in LAST_NAMES):
        yield last
    if not at_end:
        return
    taken: set[int] = set()
    for path in reversed(layers):
        module = modules[path]
        if isinstance(module, nn.Linear) and isinstance(last, nn.Linear):
            alike = module.in_features == last.in_features and module.out_features not in taken
            if alike and _at_an_end(path, modules):
                yield module
            taken.add(module.in_features)


def _at_an_end(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a layer is the model's direct child, or the last of a Sequential that is."""
    while path:
        parent, _, name = path.rpartition(".")
        if isinstance(modules[parent], nn.Sequential):
            if _with_layers(modules[parent])[-1] is not modules[path]:
                return False
        elif parent and name not in WRAPPERS:
            return False
        path = parent
    return True


def _finals(module: nn.Module) -> list[nn.Module]:
    """The last layer of a module; of each item, if it is a dict, or a list of layers."""
    if _is_layer(module):
        return [module]
    children = _with_layers(module)
    if isinstance(module, nn.ModuleList):
        children = [child for child in children if _is_layer(child) or isinstance(child, nn.Sequential)]
    elif not isinstance(module, nn.ModuleDict):
        children = children[-1:]
    return [layer for child in children for layer in _finals(child)]


def _called_head(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2]
    by_name = name in HEAD_NAMES or name.endswith(("_head", "_heads"))
    by_class = re.search(r"Heads?$", type(module).__name__) is not None
    return by_name or by_class or _MODALITY.fullmatch(path) is not None


def _hidden(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module lies in one whose layers are never heads."""
    above = [modules[path[:at]] for at, letter in enumerate(path) if letter == "."]
    return any(isinstance(module, _HIDDEN) for module in (modules[""], *above))
