"""What goes wrong on one rank: a gradient that is not finite, or missing; a rank that dies."""

import copy
import os
import pickle
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cachemuon import CacheMuon, Muon
from cachemuon.distributed.placement import EXCHANGES
from cachemuon.distributed.rank_group import name_dead_ranks

LAYOUTS = (*EXCHANGES, "fsdp")


def params_of(layout, world):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((24, 32), (20, 12), (24, 32))]
    if layout in EXCHANGES:
        more = {"process_group": dist.group.WORLD, "exchange": layout}
        return [nn.Parameter(value) for value in values], torch.clone, more
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))

    def put(value):
        return distribute_tensor(value, mesh, [Shard(0)])

    return [nn.Parameter(put(value)) for value in values], put, {}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def spoil(rank, world, layout, gate):
    """At step 3 one rank's gradient of one matrix has a NaN."""
    params, put, more = params_of(layout, world)
    if gate is None:
        optimizer = Muon(params, lr=0.1, process_group=more.get("process_group"))
    else:
        optimizer = CacheMuon(params, lr=0.1, cache_all=True, max_age=3, gate=gate, **more)
    kept, finite, messages = [], [], []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = put(torch.randn(param.shape, generator=generator))
        if step == 3 and rank == world - 1:
            local(params[1].grad)[0, 0] = torch.nan
        before = [local(param).clone() for param in params]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [(step, str(one.message)) for one in caught]
        kept.append([torch.equal(old, local(new)) for old, new in zip(before, params, strict=True)])
        finite.append(all(torch.isfinite(local(param)).all() for param in params))
    whole = [(param.full_tensor() if layout == "fsdp" else param).detach() for param in params]
    stats = optimizer.cache_stats()["matrices"].values()
    outcomes = [(entry["hits"], entry["misses"], entry["age"]) for entry in stats]
    return kept, all(finite), whole, outcomes, messages


@pytest.mark.parametrize("gate", ["schedule", "residual", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_steps_a_matrix_whose_gradient_is_bad_on_one(ranks, layout, gate):
    answers = ranks(spoil, 3, layout, gate)
    for kept, finite, whole, outcomes, messages in answers:
        assert finite
        assert kept[3] == [False, True, False] and not any(map(any, kept[:3] + kept[4:]))
        assert outcomes == answers[0][3]
        assert [misses["non-finite"] for _, misses, _ in outcomes] == [0, 1, 0]
        assert [step for step, text in messages if "has a NaN or Inf" in text] == [4]  # known a step later
        assert len(messages) == 1
        for param, first in zip(whole, answers[0][2], strict=True):
            assert torch.equal(param, first)


def lack(rank, world, layout):
    """At step 2 one rank has no gradient of one matrix; at step 3 none has."""
    params, put, more = params_of(layout, world)
    optimizer = CacheMuon(params, lr=0.1, cache_all=True, max_age=3, **more)
    messages, kept = [], []
    for step in range(6):
        for param in params:
            param.grad = put(torch.full(param.shape, 1.0 + step))
        if (step == 2 and rank == 0) or step == 3:
            params[0].grad = None
        before = [local(param).clone() for param in params]
        momentum = [local(optimizer.state[param]["momentum_buffer"]).clone() for param in params if step]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [(step, str(one.message)) for one in caught]
        kept.append([torch.equal(old, local(new)) for old, new in zip(before, params, strict=True)])
        if step in (2, 3):
            assert torch.equal(momentum[0], local(optimizer.state[params[0]]["momentum_buffer"]))
    whole = [(param.full_tensor() if layout == "fsdp" else param).detach() for param in params]
    calls = [entry["calls"] for entry in optimizer.cache_stats()["matrices"].values()]
    return messages, kept, whole, calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_steps_a_matrix_whose_gradient_one_lacks(ranks, layout):
    answers = ranks(lack, 2, layout)
    for rank, (messages, kept, whole, calls) in enumerate(answers):
        # A step later, and where there is a gradient: the rank that lacks one may be meant to lack it.
        assert [step for step, text in messages if "on some ranks" in text] == ([3] if rank else [])
        assert len(messages) == rank
        assert calls == [4, 6, 6]
        assert [one[0] for one in kept] == [False, False, True, True, False, False]
        assert not any(any(others) for _, *others in kept)
        for param, first in zip(whole, answers[0][2], strict=True):
            assert torch.equal(param, first)


def copied_and_pickled(rank, world):
    params, _, more = params_of("ddp", world)
    optimizer = CacheMuon(params, **more)
    other = copy.deepcopy(optimizer)
    third = pickle.loads(pickle.dumps(optimizer))
    groups = [one.param_groups[0]["process_group"].group for one in (optimizer, other, third)]
    return (
        groups[0] is groups[1],
        groups[2] is None,
        optimizer.state_dict()["param_groups"][0]["process_group"],
    )


def test_copies_share_a_process_group_and_no_file_has_it(ranks):
    assert ranks(copied_and_pickled, 2) == [(True, True, None)] * 2


@pytest.mark.parametrize("wrong", ["WORLD", 3])
def test_only_process_groups_are_accepted_as_such(wrong):
    with pytest.raises(ValueError, match=f"process_group must be .* got {wrong!r}"):
        CacheMuon([nn.Parameter(torch.zeros(3, 4))], process_group=wrong)


DYING = """
import os, signal, sys
from datetime import timedelta
import torch
from torch import distributed as dist, nn
from cachemuon import CacheMuon

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
params = [nn.Parameter(torch.randn(24, 32)) for _ in range(3)]
optimizer = CacheMuon(params, cache_all=True, process_group=dist.group.WORLD)
for step in range(100):
    for param in params:
        param.grad = torch.ones_like(param)
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
"""


def test_the_death_of_a_rank_ends_the_others_with_its_name(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    port = str(20_000 + os.getpid() % 20_000)
    began = time.monotonic()
    processes = []
    for rank in range(3):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3", "RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)], env={**os.environ, **where}, stderr=subprocess.PIPE, text=True
            )
        )
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert time.monotonic() - began < 60
    for rank in (0, 2):
        assert processes[rank].returncode not in (0, None)
        assert "no answer from rank 1 of 3" in errors[rank], errors[rank][-2000:]


def starve(rank, world):
    if rank == 0:
        return ""
    with pytest.raises(torch.OutOfMemoryError) as caught, name_dead_ranks(dist.group.WORLD):
        raise torch.OutOfMemoryError("of this rank")
    return str(caught.value)


def test_a_rank_without_memory_does_not_blame_the_others(ranks):
    assert ranks(starve, 2) == ["", "of this rank"]
