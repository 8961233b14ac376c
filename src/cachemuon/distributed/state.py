"""State on several ranks: shards and whole tensors, and the state dict that one process alone would have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import Optimizer, StateDict

from ..engine.bucket import is_dtensor, local
from .placement import ranks_of

EVERYWHERE = ("momentum_buffer", "counters", "residuals")
"""The state entries of matrices that every rank has: all of them, or its shard."""


def orthogonalizer_entries(names: Iterable[str]) -> list[str]:
    """The state entries of matrices that belong to an orthogonalizer, as transforms do: only ranks that make
    the directions of a matrix keep them.

    >>> orthogonalizer_entries(["momentum_buffer", "transform.0", "counters"])
    ['transform.0']
    """
    return [name for name in names if name not in EVERYWHERE]


def sharded_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor as the shard that this rank stores, if its parameter is sharded. It may share memory."""
    if not is_dtensor(param) or is_dtensor(tensor) or tensor.shape != param.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # loaded already, as the parameter is one

    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor as one process alone has it. Every rank must call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def whole_state_dict(optimizer: Optimizer) -> StateDict:
    """The state of an optimizer as one process alone has it: shards put together, and all transforms.

    Every rank of the optimizer's parameters must call it. `load_state_dict` continues from the result on any
    number of ranks.

    >>> import torch
    >>> W = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([W], momentum=0.9)
    >>> whole_state_dict(optimizer)["param_groups"][0]["momentum"]
    0.9
    """
    packed = optimizer.state_dict()
    pairs = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    for number, (group, param) in enumerate(pairs):
        groups = _process_groups(group, param)
        if number not in packed["state"] or not groups:
            continue
        state = packed["state"][number].items()
        whole = {key: full_tensor(value) if isinstance(value, Tensor) else value for key, value in state}
        own = (
            {key: whole[key].cpu() for key in orthogonalizer_entries(whole)} if group.get("use_muon") else {}
        )
        for process_group in groups:
            found: list[Any] = [None] * dist.get_world_size(process_group)
            dist.all_gather_object(found, own, group=process_group)
            own = {key: value for part in found for key, value in part.items()}
        packed["state"][number] = whole | {key: value.to(local(param).device) for key, value in own.items()}
    return packed


def _process_groups(group: dict[str, Any], param: Tensor) -> list[Any]:
    """The process groups whose ranks each have only some of a parameter's state."""
    if is_dtensor(param):
        return [param.device_mesh.get_group(dim) for dim in range(param.device_mesh.ndim)]
    return [group["process_group"].group] if "process_group" in group and ranks_of(group, param) else []


def group_by_mesh(params: list[Tensor]) -> list[list[Tensor]]:
    """Plain parameters, and those of each mesh: torch's operations on lists take no mixture."""
    found: dict[Hashable, list[Tensor]] = {}
    for param in params:
        found.setdefault(param.device_mesh if is_dtensor(param) else None, []).append(param)
    return list(found.values())
