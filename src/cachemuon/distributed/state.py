"""State on several ranks: shards and whole tensors, and the state dict that one process alone would have."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import Optimizer, StateDict

from ..engine.bucket import is_dtensor, local
from .layout import ShardSlice
from .placement import exchange_of, index_ranges, ranks_of


def sharded_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor as the shard that this rank has of its parameter, if that is sharded."""
    if not is_dtensor(param) or is_dtensor(tensor) or tensor.shape != param.shape:
        return tensor
    mesh = param.device_mesh
    where = mesh.get_coordinate()
    if where is None:
        return tensor
    part = ShardSlice.whole(index_ranges(param, where))
    own = tensor.new_empty(local(param).shape)
    for of_whole, of_part in () if part is None else part.views(tensor, own):
        of_part.copy_(of_whole)
    placed = mesh, param.placements
    return type(param).from_local(own, *placed, run_check=False, shape=param.shape, stride=param.stride())


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor as one process alone has it. Every rank must call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def whole_state_dict(optimizer: Optimizer) -> StateDict:
    """The state of an optimizer as one process alone has it: shards put together, and all transforms.

    Every rank of the optimizer's parameters must call it, and all get it. `load_state_dict` continues from it
    on any number of ranks.

    >>> import torch
    >>> W = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([W], momentum=0.9)
    >>> whole_state_dict(optimizer)["param_groups"][0]["momentum"]
    0.9
    """
    packed = optimizer.state_dict()
    pairs = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    entries = packed["state"]
    for number, (group, param) in enumerate(pairs):
        if number not in entries or not (among := _process_groups(group, param)):
            continue
        kept = {
            key: full_tensor(value) if isinstance(value, Tensor) else value
            for key, value in entries[number].items()
        }
        own = {key: value.cpu() for key, value in kept.items() if key.startswith("transform")}
        for ranks in among:
            found: list[Any] = [None] * dist.get_world_size(ranks)
            dist.all_gather_object(found, own, group=ranks)
            own = {key: value for part in found for key, value in part.items()}
        entries[number] = {**kept, **{key: value.to(local(param).device) for key, value in own.items()}}
    return packed


def _process_groups(group: dict[str, Any], param: Tensor) -> list[Any]:
    """The process groups whose ranks each have only some of a parameter's state."""
    if is_dtensor(param):
        return [param.device_mesh.get_group(dim) for dim in range(param.device_mesh.ndim)]
    if group.get("use_muon") and "gate" in group and (ranks := ranks_of(group, param)):
        by_owner = exchange_of(group, len(ranks)) == "directions" or group["gate"] == "residual"
        return [group["process_group"].group] if by_owner else []
    return []


def group_by_mesh(params: list[Tensor]) -> list[list[Tensor]]:
    """Plain parameters, and those of each mesh: torch's operations on lists take no mixture."""
    found: dict[Hashable, list[Tensor]] = {}
    for param in params:
        mesh = param.device_mesh if is_dtensor(param) else None
        found.setdefault(mesh, []).append(param)
    return list(found.values())
