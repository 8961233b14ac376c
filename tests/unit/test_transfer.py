"""What crosses between host and device, counted on tensors that lie on a CUDA device which is not there.

`OnCuda` has its values in host memory, and does with them what is asked. Whatever a real device would make the
host wait for, or copy, is noted.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from unclipped import unclipped

from cachemuon import CacheMuon, GramNS, Muon
from cachemuon.cache.residual import random_block
from cachemuon.engine.transfer import Block, DeviceValues, Readback

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
class Crossings:
    """What was copied to the device, and from it to memory where it is awaited later; and what the host waited
    for, by the name of the operation.
    """

    uploads: list = field(default_factory=list)
    readbacks: list = field(default_factory=list)
    waits: list = field(default_factory=list)

    def clear(self):
        self.uploads, self.readbacks, self.waits = [], [], []


class FakeCuda(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch then starts no CUDA for a factory
        self.seen, self.pinned = Crossings(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {x.device for x in tensors if isinstance(x, OnCuda)}
        own = next(iter(there), CPU)
        asked = kwargs.get("device")
        target = own if asked is None else torch.device(asked)
        pinned = kwargs.pop("pin_memory", False)
        if asked is not None:
            kwargs["device"] = CPU
        self._note(name, args, kwargs, own, target)
        if len(there) > 1:
            assert name in ("_to_copy", "copy_"), f"{func} has tensors of {there}"
        elif there and name != "copy_" and not name.startswith("_foreach"):
            assert all(isinstance(x, OnCuda) or x.ndim == 0 for x in tensors), (
                f"{func} has tensors of the host"
            )
        wrapped = {id(x.data_on_host): x for x in tensors if isinstance(x, OnCuda)}
        args, kwargs = tree_map(_data, (args, kwargs))
        result = func(*args, **kwargs)
        if pinned:
            self.pinned.append(result.untyped_storage())
        if target.type == "cpu":
            return result
        if name == "_to_copy" and own == target:
            wrapped = {}

        def wrap(x):
            if not isinstance(x, torch.Tensor) or (name == "copy_" and x is args[0] and id(x) not in wrapped):
                return x
            return wrapped.get(id(x)) if id(x) in wrapped else OnCuda(x, target)

        return tree_map(wrap, result)

    def _note(self, name, args, kwargs, own, target):
        if name in READS and own != CPU:
            self.seen.waits.append(name)
        elif name == "index" and own != CPU and any(_is_mask(x) for x in args[1]):
            self.seen.waits.append("index by a mask")
        if name == "_to_copy":
            source, destination = args[0].device, target
            beside = bool(kwargs.get("non_blocking"))
        elif name == "copy_":
            source, destination = args[1].device, args[0].device
            beside = len(args) > 2 and bool(args[2])
        else:
            return
        if source == destination or (source != CPU and destination != CPU):
            return
        host = args[1] if source == CPU and name == "copy_" else args[0]
        pinned = {storage._cdata for storage in self.pinned}
        if not (beside and host.device == CPU and host.untyped_storage()._cdata in pinned):
            self.seen.waits.append(f"{name} from {source} to {destination}")
        if source == CPU:
            self.seen.uploads.append(destination)
        else:
            self.seen.readbacks.append(source)


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


def stepped(optimizer, params, seen, seed=0):
    """What crossed in one step, and which gradients it had."""
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        base = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 + i))
        gradient = base + 0.3 * torch.randn(param.shape, generator=generator)
        param.grad = gradient if param.device == CPU else OnCuda(gradient, param.device)
    seen.clear()
    optimizer.step()


SHAPES = [(48, 48), (48, 48), (48, 192), (192, 48), (48, 192), (4, 24, 40), (16, 4, 3, 3)]
cached = partial(CacheMuon, cache_all=True, max_age=4)
MAKES = {  # and whether random vectors are drawn, every 5 steps
    "Muon": (Muon, False),
    "uncached": (CacheMuon, False),
    "schedule": (cached, True),
    "schedule-bounded": (partial(cached, gamma=0.5), True),
    "schedule-exact": (partial(unclipped, gate="schedule", max_age=4, probe="exact"), True),
    "schedule-unclipped": (partial(unclipped, gate="schedule", max_age=4), True),
    "float32": (partial(cached, solver=GramNS(dtype=torch.float32)), True),
    "float16-transforms": (partial(cached, cache_dtype=torch.float16), True),
}


@pytest.mark.parametrize("make, draws", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_no_step_waits_for_the_device_and_what_has_not_changed_is_not_uploaded(make, draws, nesterov):
    with fake_cuda() as seen:
        params = on(CUDA[1], SHAPES)
        optimizer = make(params, lr=0.02, nesterov=nesterov)
        for step in range(1, 13):
            stepped(optimizer, params, seen, step)
            assert seen.readbacks == [CUDA[1]]  # into pinned memory, beside the work that follows
            if step == 1:  # the plan is made, and what it has on the device
                continue
            assert seen.waits == []
            assert seen.uploads == ([CUDA[1]] if draws and step % 5 == 0 else [])
        optimizer.param_groups[0]["lr"] = 0.01
        stepped(optimizer, params, seen)
        assert (seen.uploads, seen.waits) == ([CUDA[1]], [])
        assert all(param.device == CUDA[1] for param in params)


GATED = {
    "residual": partial(cached, gate="residual"),
    "residual-refuses": partial(cached, gate="residual", gamma=0.0),
    "unclipped": unclipped,
    "paper": CacheMuon.paper,
}


@pytest.mark.parametrize("make", GATED.values(), ids=GATED)
def test_the_papers_gate_reads_the_residuals_of_each_bucket_once(make):
    with fake_cuda() as seen:
        params = on(CUDA[0], SHAPES)
        optimizer = make(params, lr=0.02)
        buckets = 5
        for step in range(1, 5):
            stepped(optimizer, params, seen, step)
            probed = 0 if step == 1 else buckets
            events = optimizer.events().values()
            assert sum(not math.isnan(event.residual) for event in events) == (10 if probed else 0)
            assert sum("to cpu" in wait for wait in seen.waits) == probed


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),  # it would be read before it has arrived
        lambda x: torch.empty(3, pin_memory=True).copy_(x),
        lambda x: torch.empty(3).copy_(x, non_blocking=True),
        lambda x: torch.nonzero(x),
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.ones(3).to(x.device, non_blocking=True),  # from memory that is not pinned
        lambda x: x[[0, 2]],
    ],
)
def test_what_the_host_would_wait_for_is_noted(read):
    with fake_cuda() as seen, torch.no_grad():
        (x,) = on(CUDA[0], [(3,)])
        read(x)
        assert len(seen.waits) == 1


def test_what_the_host_would_not_wait_for_is_not_noted():
    with fake_cuda() as seen, torch.no_grad():
        (x,) = on(CUDA[0], [(3,)])
        host = torch.empty(3, pin_memory=True)
        host.copy_(x * 2 + x[0:1], non_blocking=True)
        x.copy_(host, non_blocking=True)
        assert seen == Crossings([CUDA[0]], [CUDA[0]], [])
        with pytest.raises(AssertionError, match="has tensors of the host"):
            x + torch.ones(3)


def test_every_device_gets_an_upload_of_its_own_and_all_are_read_together():
    with fake_cuda() as seen:
        params = on(CUDA[0], [(48, 64), (24, 24)]) + on(CUDA[1], [(48, 64), (12, 64)])
        optimizer = cached(params)
        for step in range(1, 7):
            stepped(optimizer, params, seen, step)
            if step == 5:
                assert sorted(seen.uploads, key=str) == CUDA
            elif step > 1:
                assert seen.uploads == []
            assert len(seen.readbacks) == 1 and not (step > 1 and seen.waits)
        for param in params:
            assert optimizer.state[param]["transform"].device == param.device


@pytest.mark.parametrize("make", [Muon, cached], ids=["Muon", "schedule"])
def test_beside_matrices_on_the_host_nothing_is_read_before_it_has_arrived(make):
    with fake_cuda() as seen:
        params = on(CPU, [(24, 48)] * 2) + on(CUDA[0], [(24, 48)] * 2)
        optimizer = make(params)
        for step in range(1, 8):
            stepped(optimizer, params, seen, step)
            # What was measured on the host goes to the device, and comes back with the rest.
            assert seen.readbacks == [CUDA[0]]
            assert not [wait for wait in seen.waits if "to cpu" in wait]
        calls = [entry["calls"] for entry in optimizer.cache_stats()["matrices"].values()]
        assert calls == [7] * 4


@pytest.mark.parametrize("make", [Muon, cached], ids=["Muon", "schedule"])
def test_counters_that_were_moved_to_the_device_come_back_once(make):
    # As Lightning moves them, with all of a state that was loaded.
    with fake_cuda() as seen:
        params = on(CUDA[0], [(24, 48)] * 3)
        optimizer = make(params)
        for step in range(2):
            stepped(optimizer, params, seen, step)
        for state in optimizer.state.values():
            for key in ("counters", "residuals"):
                state[key] = state[key].to(CUDA[0])
        stepped(optimizer, params, seen, 2)
        assert {state["counters"].device.type for state in optimizer.state.values()} == {"cpu"}
        stepped(optimizer, params, seen, 3)
        assert (seen.uploads, seen.waits) == ([], [])
        calls = [entry["calls"] for entry in optimizer.cache_stats()["matrices"].values()]
        assert calls == [4] * 3


@pytest.mark.parametrize("make", [Muon, cached], ids=["Muon", "schedule"])
def test_a_learning_rate_on_the_device_stays_there_and_counts(make):
    with fake_cuda() as seen:
        ends = []
        for there in (True, False):
            params = on(CUDA[0], SHAPES)
            lr = OnCuda(torch.tensor(0.25), CUDA[0]) if there else 0.25
            optimizer = make(params, lr=lr, weight_decay=0.5)
            for step in range(1, 7):
                stepped(optimizer, params, seen, step)
                assert step == 1 or (seen.waits == [] and len(seen.uploads) <= (step == 5))
                if there and step == 3:
                    lr.fill_(0.125)  # as a scheduler does
                elif step == 3:
                    optimizer.param_groups[0]["lr"] = 0.125
            ends.append([param.data_on_host.clone() for param in params])
        for there, here in zip(*ends, strict=True):
            torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


def test_what_is_read_back_is_awaited_on_the_stream_of_its_device():
    # Whichever device is the current one: the copy runs where the tensor lies.
    with fake_cuda():
        Readback(OnCuda(torch.ones(3), CUDA[1]))
        (event,) = Event.made
        assert event.stream == event.device == CUDA[1]


def test_one_copy_has_all_that_changed():
    blocks = [Block(4, 3, seed=0, period=3), Block(6, 2, seed=0, period=2)]
    with fake_cuda() as seen:
        values = DeviceValues(CUDA[0], torch.float32, 2, blocks)
        for step, factors in ((0, 1.0), (1, None), (2, None), (3, 2.0), (4, 2.0), (5, None)):
            seen.clear()
            values.fill(None if factors is None else [(factors,) * 4] * 2, step)
            assert len(seen.uploads) == (step not in (1, 5)) and not seen.waits
            for block, found in values.blocks.items():
                assert torch.equal(found.data_on_host, block.draw(step, torch.float32))
        assert (values.factors.data_on_host == 2).all()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_no_matter(device):
    W = torch.nn.Parameter(torch.zeros(96, 128))
    W.grad = torch.eye(96, 128)
    torch.set_default_device(device)
    try:
        for make in (Muon, cached, partial(cached, gate="residual")):
            optimizer = make([W])
            for _ in range(3):
                optimizer.step()
            assert optimizer.cache_stats()["calls"] == 3
            optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device(None)
    assert W.isfinite().all()


def test_a_random_block_is_the_same_whatever_the_default_device():
    before = random_block(5, 3, seed=1, step=2)
    torch.set_default_device("meta")
    try:
        assert torch.equal(random_block(5, 3, seed=1, step=2), before)
    finally:
        torch.set_default_device(None)


def test_a_nan_is_counted_and_told_of_when_the_next_step_begins():
    W = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = Muon([W])
    W.grad = torch.full((4, 6), math.nan)
    optimizer.step()  # a warning would be an error here
    W.grad = torch.eye(4, 6)
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        optimizer.step()
    optimizer.step()
    entry = optimizer.cache_stats()["matrices"]["group0.param0"]
    assert (entry["misses"]["non-finite"], entry["misses"]["fresh"], entry["last"]) == (1, 2, "fresh")


@pytest.mark.parametrize("make", [Muon, cached], ids=["Muon", "schedule"])
def test_where_gradients_are_missing_at_some_steps_nothing_waits_either(make):
    with fake_cuda() as seen:
        params = on(CUDA[0], [(24, 36)] * 3)
        optimizer = make(params)
        for step in range(9):
            for i, param in enumerate(params):
                there = step % (i + 1) == 0
                param.grad = OnCuda(torch.randn(24, 36), CUDA[0]) if there else None
            seen.clear()
            optimizer.step()
            assert step == 0 or seen.waits == []
        calls = [entry["calls"] for entry in optimizer.cache_stats()["matrices"].values()]
        assert calls == [9, 5, 3]
