"""docs/results.md: what benchmarks/memory.py counts is what optimizers keep."""

import memory
import pytest
import torch
from contract.variants import TASKS, every_task, train
from pages import check_tables

from cachemuon import CacheMuon, param_groups

MIB = 2**20


def kept(optimizer):
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_task
def test_what_is_counted_is_what_is_kept(task, dtype):
    for name in memory.optimizers(task.model()):
        model = task.model(dtype=dtype)
        optimizer = memory.optimizers(model)[name]
        train(task, model, optimizer, range(1))
        counted = memory.optimizers(memory._meta(task.build, dtype))[name]
        assert kept(optimizer) == memory.state_bytes(counted) == memory.state_bytes(optimizer) > 0


def test_a_matrix_that_is_not_cached_has_no_transform():
    task = TASKS["mlp"]  # too small for a cache
    model = task.model()
    optimizer = CacheMuon(param_groups(model))
    train(task, model, optimizer, range(1))
    assert kept(optimizer) == memory.state_bytes(optimizer)
    moments = 4 * sum(1 + sum(p.shape) for p in model.parameters() if "moments" in optimizer.state[p])
    assert kept(optimizer) == memory.state_bytes(memory.optimizers(model)["Muon"]) + moments


def test_gpt2_small_has_the_figures_that_were_computed_by_hand():
    model = memory._meta(memory.MODELS["GPT-2 Small"], torch.float32)
    adamw, muon, cached, halved = (
        memory.state_bytes(optimizer) / MIB for optimizer in memory.optimizers(model).values()
    )
    assert (round(adamw), round(muon), round(cached)) == (949, 625, 733)
    transforms, moments = 48 * 768**2 * 4 / MIB, 12 * (4 + (3 + 1 + 4 + 4 + 4 * 1) * 768) * 4 / MIB
    assert cached - muon == transforms + moments and halved - muon == transforms / 2 + moments


def test_the_table_of_the_pages_is_the_one_that_is_made():
    check_tables({"states": ("State, MiB", memory.states())})
