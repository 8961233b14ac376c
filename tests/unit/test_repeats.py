"""Steps launch the same operations on the same memory in every life, as a CUDA graph wants it."""

from functools import partial

import pytest
import torch
from fake_cuda import CUDA, OnCuda, fake_cuda, on
from unclipped import unclipped

from cachemuon import CacheMuon, GramNS, Muon

SHAPES = [(48, 48), (48, 48), (48, 96), (96, 48), (2, 24, 40), (16, 4, 3, 3)]
cached = partial(CacheMuon, cache_all=True, max_age=2, gamma=1e9)
MAKES = {
    "Muon": Muon,
    "uncached": CacheMuon,
    "schedule": cached,
    "schedule-unclipped": partial(unclipped, gate="schedule", max_age=2, gamma=1e9),
    "schedule-exact": partial(unclipped, gate="schedule", max_age=2, gamma=1e9, probe="exact"),
    "schedule-float32": partial(cached, solver=GramNS(dtype=torch.float32)),
    "schedule-float16-transforms": partial(cached, cache_dtype=torch.float16),
    "schedule-one-by-one": partial(cached, max_workspace_bytes=1),
}


def launched(optimizer, params, seen, step):
    """The operations of a step, with gradients at the places of before."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad.data_on_host.copy_(torch.randn(param.shape, generator=generator))
    seen.clear()
    optimizer.step()
    return seen.operations


def started(make, shapes=SHAPES):
    params = on(CUDA[0], shapes)
    for param in params:
        param.grad = OnCuda(torch.zeros(param.shape), CUDA[0])
    return make(params, lr=0.02), params


def persistent(optimizer, params):
    """The addresses of what outlives a step."""
    tensors = [*params, *(param.grad for param in params)]
    tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, OnCuda)]
    return {x.data_on_host.untyped_storage().data_ptr() for x in tensors}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_operations_and_addresses_repeat_with_every_life(make):
    with fake_cuda() as seen:
        optimizer, params = started(make)
        # After the first step, and a life in which the workspace has grown.
        steps = [launched(optimizer, params, seen, step) for step in range(1, 13)][6:]
        for first, second in zip(steps[:3], steps[3:], strict=True):
            assert first == second
        used = {
            argument[0][1]
            for _, arguments in steps[-1]
            for argument in arguments
            if isinstance(argument, tuple) and isinstance(argument[0], tuple)
        }
        assert len(steps[-1]) > 50 and persistent(optimizer, params) <= used
        last = {entry["last"] for entry in optimizer.cache_stats()["matrices"].values()}
        if make not in (Muon, CacheMuon):
            assert steps[-1] != steps[-2] and last == {"hit", "expired"}


def test_another_learning_rate_changes_no_operation_but_its_upload():
    with fake_cuda() as seen:
        optimizer, params = started(Muon)
        before = [launched(optimizer, params, seen, step) for step in range(1, 4)][-1]
        optimizer.param_groups[0]["lr"] = 0.01
        after = launched(optimizer, params, seen, 4)
        assert len(seen.uploads) == 1
        names = [name for name, _ in after]
        upload = names.index("aten.copy_.default")  # what is before it cuts the plan's memory out
        assert names[upload + 1 :] == [name for name, _ in before]
