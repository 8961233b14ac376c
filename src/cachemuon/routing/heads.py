"""Which layers give a model's outputs: by where they stand, then by what they are called."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

HEAD_NAMES = ("head", "heads", "classifier", "score", "logits", "unembed")
"""A module so called, or `*_head`, or of a class `*Head`, ends in an output head, wherever it stands."""

LAST_NAMES = ("fc", "fc_out", "out", "output")
"""A layer so called, or in a module so called, is the output head if it is the model's last one."""

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What DDP, torch.compile and others put between a module and its name."""

_HIDDEN = (nn.ModuleList, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_MODALITY = re.compile(r"(visual|vision|image|text|audio)_proj(ection)?")


def output_heads(model: nn.Module) -> set[nn.Module]:
    """The layers (Linear, convolution) whose outputs are the model's.

    By place: the last layer of the model, if it is a direct child, or at the end of a Sequential that is one
    (a wrapper around a single module counts as that module); and with it other Linears in such a place that
    read the same width, and whose outputs none after them can take: a policy beside a value.
    By name: the last layer of every module called one of `HEAD_NAMES`, or of a class called `*Head`; of
    lists of heads each one; projections of the model's own for each modality (`text_projection`), into an
    embedding they share.
    What lies in a ModuleList, or in torch's attention and transformer layers, is hidden, never a head.

    >>> model = nn.ModuleDict({"body": nn.Linear(8, 8), "policy": nn.Linear(8, 4), "value": nn.Linear(8, 1)})
    >>> [name for name, module in model.named_modules() if module in output_heads(model)]
    ['policy', 'value']
    """
    root = _inner(model)
    modules = dict(root.named_modules())
    found: set[nn.Module] = set()
    for path, module in modules.items():
        if path and _called_head(path, module) and not _hidden(path, modules):
            found.update(_finals(module))
    return found | set(_last_ones(modules))


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a Linear or a convolution with a weight of its own, of torch or another library."""
    kind = type(module).__name__
    known = isinstance(module, (nn.Linear, _ConvNd)) or kind.endswith("Linear") or kind == "Conv1D"
    return known and ("weight" in module._parameters or hasattr(module, "parametrizations"))


def _inner(model: nn.Module) -> nn.Module:
    """What a model is without the wrappers around it."""
    own = next(model.parameters(recurse=False), None)
    inner = [named for named in model.named_children() if next(named[1].parameters(), None) is not None]
    # A container of one is a model with one layer.
    if own is not None or len(inner) != 1 or isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return model
    ((name, child),) = inner
    if is_layer(child) and name not in WRAPPERS:  # Net(fc=Linear) is no wrapper
        return model
    return _inner(child)


def _last_ones(modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """The last layer, if it is a head, and those beside it."""
    layers = [path for path, module in modules.items() if path and is_layer(module)]
    if not layers or _hidden(layers[-1], modules):
        return
    last = modules[layers[-1]]
    if not _at_an_end(layers[-1], modules):
        if _name(layers[-1]) in LAST_NAMES:
            yield last
        return
    yield last
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
            if [child for child in modules[parent].children() if _has_layers(child)][-1] is not modules[path]:
                return False
        elif parent and name not in WRAPPERS:
            return False
        path = parent
    return True


def _finals(module: nn.Module) -> list[nn.Module]:
    """The last layer of a module; of each item, if it is a dict, or a list of layers."""
    if is_layer(module):
        return [module]
    children = [child for child in module.children() if _has_layers(child)]
    if isinstance(module, nn.ModuleDict):
        return [layer for child in children for layer in _finals(child)]
    if isinstance(module, nn.ModuleList):
        plain = [child for child in children if is_layer(child) or isinstance(child, nn.Sequential)]
        return [layer for child in plain for layer in _finals(child)]
    return _finals(children[-1]) if children else []


def _has_layers(module: nn.Module) -> bool:
    return any(map(is_layer, module.modules()))


def _called_head(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2]
    by_name = name in HEAD_NAMES or name.endswith(("_head", "_heads"))
    by_class = re.search(r"Heads?$", type(module).__name__) is not None
    return by_name or by_class or _MODALITY.fullmatch(path) is not None


def _hidden(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module lies in one whose layers are no heads."""
    above = [modules[path[:at]] for at, letter in enumerate(path) if letter == "."]
    return any(isinstance(module, _HIDDEN) for module in (modules[""], *above))


def _name(path: str) -> str:
    """What a layer is called; an item of a list as the list."""
    parts = [part for part in path.split(".") if part not in WRAPPERS and not part.isdigit()]
    return parts[-1] if parts else ""
