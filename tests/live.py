"""How much memory a step takes."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cachemuon.engine.bucket import local


class Live(TorchDispatchMode):
    """The most that was alive at once of a workspace and of what was allocated since.

    It agrees with the allocations that torch.profiler records, to the byte.
    """

    def __init__(self, optimizer):
        super().__init__()
        states = [value for state in optimizer.state.values() for value in state.values()]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owned = (local(tensor) for tensor in (*states, *params, *(param.grad for param in params)))
        self._owned = {tensor.untyped_storage()._cdata for tensor in owned}
        self._alive, self.peak = {}, 0
        self._see(list(optimizer._plan().workspace._memory.values()))

    def _see(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._owned:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._see([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result
