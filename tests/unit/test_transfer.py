"""What crosses between host and device, counted on tensors that lie on a CUDA device which is not there."""

import math
from functools import partial

import pytest
import torch
from fake_cuda import CPU, CUDA, Event, OnCuda, fake_cuda, on
from unclipped import unclipped

from cachemuon import CacheMuon, GramNS, Muon
from cachemuon.cache.reuse import random_block
from cachemuon.engine.schedule import Block, DeviceValues, read_back


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
    "Muon-plain": (partial(Muon, nesterov=False, weight_decay=0.0), False),
    "uncached": (CacheMuon, False),
    "schedule": (cached, True),
    "schedule-bounded": (partial(cached, gamma=0.5), True),
    "schedule-exact": (partial(unclipped, gate="schedule", max_age=4, probe="exact"), True),
    "schedule-unclipped": (partial(unclipped, gate="schedule", max_age=4), True),
    "float32": (partial(cached, solver=GramNS(dtype=torch.float32)), True),
    "float16-transforms": (partial(cached, cache_dtype=torch.float16), True),
}


@pytest.mark.parametrize("make, draws", MAKES.values(), ids=MAKES)
def test_no_step_waits_for_the_device_and_what_has_not_changed_is_not_uploaded(make, draws):
    with fake_cuda() as seen:
        params = on(CUDA[1], SHAPES)
        optimizer = make(params, lr=0.02)
        for step in range(1, 8):
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
    "residual": partial(cached, gate="residual", max_age=None),
    "residual-refuses": partial(cached, gate="residual", max_age=None, gamma=0.0),
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
        assert (seen.uploads, seen.readbacks, seen.waits) == ([CUDA[0]], [CUDA[0]], [])
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
                changes = step == 5 or (step == 4 and not there)
                assert step == 1 or (seen.waits == [] and len(seen.uploads) <= changes)
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
        read_back(OnCuda(torch.ones(3), CUDA[1]))
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
