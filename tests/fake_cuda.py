"""Tensors that lie on a CUDA device which is not there.

`OnCuda` has its values in host memory, and does with them what is asked. What would be copied between host
and device, what the host would wait for, and every operation on the device is noted.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]
CPU = torch.device("cpu")
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique2", "_unique2"}


class OnCuda(torch.Tensor):
    """A tensor of a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data, device):
        options = dict(strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(cls, data.shape, device=device, **options)
        tensor.data_on_host = data
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of fake_cuda()")

    # Python's indexing, `copy_` and `tolist` want a torch built for CUDA.

    def __getitem__(self, key):
        result, dim = self, 0
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, int):
                result = result.select(dim, part)
            elif isinstance(part, list):  # goes to the device, and the host waits
                result, dim = result.index_select(dim, torch.tensor(part).to(self.device)), dim + 1
            else:
                start, stop, _ = part.indices(result.shape[dim])
                result, dim = result.narrow(dim, start, max(stop - start, 0)), dim + 1
        return result

    def __setitem__(self, key, value):
        self[key].copy_(value)

    def copy_(self, source, non_blocking=False):
        return torch.ops.aten.copy_(self, source, non_blocking)

    def tolist(self):
        return torch.ops.aten._to_copy(self, device=CPU).tolist()


@dataclass
class Seen:
    """What was copied to a device, and from one; what the host had to wait for; and what was launched.

    An operation is its name and its arguments. A tensor is the operation that made its memory, by its place,
    or, if that is older than the last `clear`, its address; with offset and form.
    """

    uploads: list = field(default_factory=list)
    readbacks: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    operations: list = field(default_factory=list)
    made: dict = field(default_factory=dict, compare=False)

    def clear(self):
        self.uploads, self.readbacks, self.waits, self.operations, self.made = [], [], [], [], {}

    def launched(self, func, args, kwargs, result):
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnCuda)]
        arguments = [self._told(x) for x in tree_leaves((args, kwargs))]
        known = {_storage(x) for x in taken}
        for x in tree_leaves(result):
            if isinstance(x, OnCuda) and _storage(x) not in known:
                self.made[_storage(x)] = len(self.operations)
        self.operations.append((str(func), arguments))

    def _told(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        form = x.shape, x.stride(), x.dtype, x.device
        if isinstance(x, OnCuda):
            start = x.data_on_host.untyped_storage().data_ptr()
            return self.made.get(_storage(x), ("address", start)), x.storage_offset(), form
        return (x.item() if x.ndim == 0 else "host"), form


class FakeCuda(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch then starts no CUDA for a factory
        self.seen, self.pinned = Seen(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {x.device for x in tensors if isinstance(x, OnCuda)}
        target = args[0].device if name == "copy_" else next(iter(there), CPU)
        if kwargs.get("device") is not None:
            target, kwargs["device"] = torch.device(kwargs["device"]), CPU
        pinned = kwargs.pop("pin_memory", False)
        self._note(name, args, kwargs, target)
        if len(there) > 1:
            assert name in ("_to_copy", "copy_"), f"{func} has tensors of {there}"
        elif there and name != "copy_" and not name.startswith("_foreach"):
            mixed = [x for x in tensors if x.ndim and not isinstance(x, OnCuda)]
            assert not mixed, f"{func} has tensors of the host"
        wrapped = {id(x.data_on_host): x for x in tensors if isinstance(x, OnCuda)}
        plain = func(*tree_map(_data, args), **tree_map(_data, kwargs))
        if pinned:
            self.pinned.append(plain.untyped_storage())

        def wrap(x):
            if not isinstance(x, torch.Tensor):
                return x
            return wrapped[id(x)] if id(x) in wrapped else OnCuda(x, target)

        result = plain if target == CPU else tree_map(wrap, plain)
        if there or target != CPU:
            self.seen.launched(func, args, kwargs, result)
        return result

    def _note(self, name, args, kwargs, target):
        there = any(isinstance(x, OnCuda) for x in tree_leaves((args, kwargs)))
        if there and name in READS:
            self.seen.waits.append(name)
        elif there and name == "index" and any(_is_mask(x) for x in args[1]):
            self.seen.waits.append("index by a mask")
        if name not in ("_to_copy", "copy_"):
            return
        source = args[0].device if name == "_to_copy" else args[1].device
        if source == target or CPU not in (source, target):
            return
        if source == CPU:
            self.seen.uploads.append(target)
        else:
            self.seen.readbacks.append(source)
        host = args[1] if name == "copy_" and source == CPU else args[0]
        beside = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if not (beside and host.device == CPU and _storage(host) in map(_id, self.pinned)):
            self.seen.waits.append(f"{name} from {source} to {target}")


def _id(storage):
    return storage._cdata


def _storage(x):
    return _id(_data(x).untyped_storage())


def _data(x):
    return x.data_on_host if isinstance(x, OnCuda) else x


def _is_mask(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool


class Event:
    """Stands for torch.Event: what it was recorded on, and that it has come to pass."""

    made = ()

    def __init__(self, device):
        self.device, Event.made = device, (*Event.made, self)

    def record(self, stream):
        self.stream = stream

    def query(self):
        return True

    def synchronize(self):
        pass


@contextmanager
def fake_cuda():
    """Inside it there are CUDA devices. Yields what crosses."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", lambda device: device))
        stack.enter_context(mock.patch.object(Event, "made", ()))
        mode = stack.enter_context(FakeCuda())
        yield mode.seen


def on(device, shapes):
    """Parameters on a device, of random values."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    there = [x if device == CPU else OnCuda(x, device) for x in values]
    return [torch.nn.Parameter(x, requires_grad=False) for x in there]  # autograd wants a real device
