"""What crosses between host and device, counted on CUDA tensors that are fake: none of it needs a GPU."""

import math
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unclipped import unclipped

from cachemuon import CacheMuon, GramNS, Muon, engine, host
from cachemuon.cache.residual import random_block
from cachemuon.engine.host import Readback
from cachemuon.flops import gpt2_shapes

CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Crossings(TorchDispatchMode):
    """Every copy between two devices, `(from, to)`, and how much pinned memory was asked for."""

    def __init__(self):
        super().__init__()
        self.copies, self.pinned = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.pinned += bool((kwargs or {}).get("pin_memory"))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.overloadpacket is torch.ops.aten._to_copy and tensors[0].device != result.device:
            self.copies.append((str(tensors[0].device), str(result.device)))
        elif func.overloadpacket is torch.ops.aten.copy_ and args[0].device != args[1].device:
            self.copies.append((str(args[1].device), str(args[0].device)))
        else:
            devices = {x.device.type for x in tensors if x.ndim}
            assert len(devices) < 2 or func.name().startswith("aten::_foreach"), func.name()
        return result


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


def indexed(self, key):
    """Integers and slices by operators. Python's own indexing, and `copy_`, want a torch built for CUDA."""
    result, dim = self, 0
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, int):
            result = result.select(dim, part)
        else:
            start, stop, _ = part.indices(result.shape[dim])
            result, dim = result.narrow(dim, start, max(stop - start, 0)), dim + 1
    return result


def copied(self, source, non_blocking=False):
    return torch.ops.aten.copy_(self, source, non_blocking)


def ones(shape):
    return [ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0


@contextmanager
def fake_cuda():
    """Inside it CUDA tensors have no data. Yields the devices that are read; every reading is of ones."""
    reads = []

    def read(values):
        reads.append(values.device.type)
        return ones(tuple(values.shape))

    with ExitStack() as stack:
        for owner in (host, engine):
            stack.enter_context(mock.patch.object(owner, "read", read))
        stack.enter_context(mock.patch.object(FakeTensor, "__getitem__", indexed, create=True))
        stack.enter_context(mock.patch.object(FakeTensor, "copy_", copied, create=True))
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", lambda device: device))
        stack.enter_context(mock.patch.object(Event, "made", ()))
        stack.enter_context(FakeTensorMode())
        yield reads


def on(device, shapes):
    return [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]


def stepped(optimizer, params):
    for param in params:
        param.grad = torch.empty_like(param)
    with Crossings() as crossings:
        optimizer.step()
    return crossings


MAKES = {
    "Muon": (Muon, 0),
    "Muon-nesterov": (partial(Muon, nesterov=True, weight_decay=0.1), 0),
    "resting": (partial(CacheMuon, clip=1.0), 0),  # five microseconds for a launch: it cannot pay
    "sync": (partial(CacheMuon, guard=False), 1),
    "sync-misses": (partial(CacheMuon, guard=False, gamma=0.0), 1),
    "sync-nesterov": (partial(CacheMuon, guard=False, nesterov=True, weight_decay=0.1), 1),
    "unclipped": (unclipped, 1),
    "paper": (CacheMuon.paper, 1),
    "float32": (partial(CacheMuon, guard=False, solver=GramNS(dtype=torch.float32)), 1),
    "lagged": (partial(CacheMuon, guard=False, gate="lagged"), 0),
    "lagged-misses": (partial(CacheMuon, guard=False, gate="lagged", gamma=0.5), 0),
    "lagged-exact": (partial(unclipped, gate="lagged", probe="exact"), 0),
}


@pytest.mark.parametrize("make, waits", MAKES.values(), ids=MAKES)
def test_a_step_has_one_pinned_upload_and_waits_for_the_device_once_or_never(make, waits):
    with fake_cuda() as reads:
        params = on(CUDA[1], [*gpt2_shapes(2, 768), (4, 256, 512), (64, 16, 3, 3)])
        optimizer = make(params, lr=0.02)
        for _ in range(9):
            reads.clear()
            crossings = stepped(optimizer, params)
            to_device = [pair for pair in crossings.copies if pair[1] == "cuda:1"]
            to_host = [pair for pair in crossings.copies if pair[1] == "cpu"]
            assert to_device == [("cpu", "cuda:1")]
            assert len(to_host) <= 1  # into pinned memory, beside other work
            assert crossings.pinned == 1 + len(to_host)
            assert reads.count("cuda") == waits
        assert all(p.device == CUDA[1] for p in params)


def test_every_device_gets_one_upload_and_all_are_read_together():
    with fake_cuda() as reads:
        params = on(CUDA[0], [(512, 1024), (256, 256)]) + on(CUDA[1], [(512, 1024), (128, 640)])
        optimizer = CacheMuon(params, guard=False)
        for _ in range(3):
            reads.clear()
            crossings = stepped(optimizer, params)
            uploads = [pair for pair in crossings.copies if pair[0] == "cpu"]
            assert sorted(uploads) == [("cpu", "cuda:0"), ("cpu", "cuda:1")]
            assert reads.count("cuda") == 1
        for param in params:
            assert optimizer.state[param]["transform"].device == param.device


@pytest.mark.parametrize("make, waits", [MAKES[name] for name in ("Muon", "sync", "lagged")])
def test_beside_matrices_on_the_host_nothing_is_read_before_it_has_arrived(make, waits):
    with fake_cuda() as reads:
        params = on(torch.device("cpu"), [(64, 128)] * 2) + on(CUDA[0], [(64, 128)] * 2)
        optimizer = make(params)
        for _ in range(4):
            reads.clear()
            crossings = stepped(optimizer, params)
            to_host = crossings.copies.count(("cuda:0", "cpu"))
            assert crossings.pinned == 1 + to_host  # every copy to the host is one that is waited for
            assert reads.count("cuda") == waits


@pytest.mark.parametrize("make", [MAKES[name][0] for name in ("Muon", "sync", "lagged")])
def test_counters_that_were_moved_to_the_device_come_back_once(make):
    # As Lightning moves them, with all of a state that was loaded.
    with fake_cuda():
        params = on(CUDA[0], [(64, 128)] * 3)
        optimizer = make(params)
        usual = [len(stepped(optimizer, params).copies) for _ in range(2)][-1]
        for state in optimizer.state.values():
            state["counters"], state["residuals"] = (
                state[key].to(CUDA[0]) for key in ("counters", "residuals")
            )
        stepped(optimizer, params)
        assert {state["counters"].device.type for state in optimizer.state.values()} == {"cpu"}
        assert len(stepped(optimizer, params).copies) <= usual


def test_a_learning_rate_on_the_device_stays_there():
    with fake_cuda() as reads:
        params = on(CUDA[0], [(64, 128)] * 3)
        optimizer = CacheMuon(params, lr=torch.empty((), device=CUDA[0]), guard=False, gate="lagged")
        assert stepped(optimizer, params).copies.count(("cpu", "cuda:0")) == 1
        assert "cuda" not in reads


def test_what_is_read_back_is_awaited_on_the_stream_of_its_device():
    # Whichever device is the current one: the copy runs where the tensor lies.
    with fake_cuda():
        Readback(torch.empty(3, device=CUDA[1]))
        (event,) = Event.made
        assert event.stream == event.device == CUDA[1]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_no_matter(device):
    W = torch.nn.Parameter(torch.zeros(96, 128))
    W.grad = torch.eye(96, 128)
    torch.set_default_device(device)
    try:
        for make in (Muon, partial(CacheMuon, guard=False), partial(CacheMuon, guard=False, gate="lagged")):
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


class Slow(Readback):
    """A reading that has not arrived before `steps` others were asked for."""

    asked, steps = 0, 3

    @property
    def arrived(self):
        Slow.asked += 1
        return Slow.asked > self.steps


def test_a_nan_that_is_known_late_is_counted_and_told_all_the_same(monkeypatch):
    monkeypatch.setattr(host, "Readback", Slow)
    monkeypatch.setattr(Slow, "asked", 0)
    W = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = Muon([W])
    W.grad = torch.full((4, 6), math.nan)
    optimizer.step()
    W.grad = torch.eye(4, 6)
    for _ in range(3):
        optimizer.step()  # a warning would be an error here
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        optimizer.step()
    entry = optimizer.cache_stats()["matrices"]["group0.param0"]
    assert (entry["misses"]["non-finite"], entry["misses"]["fresh"], entry["last"]) == (1, 4, "fresh")


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_where_gradients_are_missing_at_some_steps_nothing_is_read_again(gate, monkeypatch):
    params = [torch.nn.Parameter(torch.zeros(8, 12)) for _ in range(3)]
    optimizer, read = unclipped(params, gate=gate), []
    monkeypatch.setattr(host, "read", lambda values: read.append(values.dtype) or values.tolist())
    monkeypatch.setattr(Readback, "wait", lambda self: self._host.tolist())
    for step in range(9):
        for i, param in enumerate(params):
            param.grad = torch.eye(8, 12) if step % (i + 1) == 0 else None
        optimizer.step()
    assert read == []  # counters and residuals; the gate reads by itself
    assert [entry["calls"] for entry in optimizer.cache_stats()["matrices"].values()] == [9, 5, 3]
