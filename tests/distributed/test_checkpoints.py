"""Checkpoints: torch.distributed.checkpoint on as many ranks, on others, and plain files of one device."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from distributed.test_models import net, optimizer_of, outcomes_of, train, whole, wrap
from torch import distributed as dist

from cachemuon.distributed import sharded_as
from cachemuon.engine.bucket import local

BEFORE, AFTER = 7, 6


def states(model, optimizer, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(**options))


def save(rank, world, strategy, folder, options):
    """Train, save, go on; what one had at the end."""
    from torch.distributed import checkpoint

    model, part, parts = wrap(net(), strategy, rank, world)
    optimizer = optimizer_of(model)
    train(model, optimizer, BEFORE, part, parts)
    saved, optim = states(model, optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": saved, "optim": optim}, checkpoint_id=folder)
    at_save = momenta(optimizer), outcomes_of(optimizer)
    train(model, optimizer, AFTER, part, parts)
    return at_save, whole(model), outcomes_of(optimizer)


def load(rank, world, strategy, folder, options):
    """Load what was saved, and go on."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    torch.manual_seed(1)  # another start than that of the saved model
    model = net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    model, part, parts = wrap(model, strategy, rank, world)
    optimizer = optimizer_of(model)
    saved, optim = states(model, optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load({"model": saved, "optim": optim}, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved,
        optim_state_dict=optim,
        options=StateDictOptions(**options),
    )
    at_load = momenta(optimizer), outcomes_of(optimizer)
    train(model, optimizer, AFTER, part, parts)
    return at_load, whole(model), outcomes_of(optimizer)


def momenta(optimizer):
    found = {}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            for key in ("momentum_buffer", "exp_avg"):
                if key in optimizer.state[param]:
                    value = optimizer.state[param][key]
                    value = value.full_tensor() if hasattr(value, "full_tensor") else value
                    found[name.removeprefix("module."), key] = value.clone()
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


OPTIONS = {"plain": {}, "flat": {"flatten_optimizer_state_dict": True}, "offloaded": {"cpu_offload": True}}


@pytest.mark.parametrize(
    ("strategy", "world", "options"),
    [
        ("ddp", 2, "plain"),
        ("ddp", 2, "flat"),
        ("fsdp", 3, "plain"),
        ("fsdp", 3, "flat"),
        ("fsdp", 3, "offloaded"),
        ("hsdp", 4, "plain"),
    ],
)
def test_as_many_ranks_go_on_bit_for_bit(ranks, strategy, world, options, tmp_path):
    told = OPTIONS[options]
    before = ranks(save, world, strategy, str(tmp_path), told)
    after = ranks(load, world, strategy, str(tmp_path), told)
    for (at_save, params, outcomes), (at_load, found, decisions) in zip(before, after, strict=True):
        assert same(at_save[0], at_load[0]) and at_save[1] == at_load[1]
        assert same(params, found)
        assert decisions == outcomes


@pytest.mark.parametrize("options", ["plain", "flat"])
def test_other_numbers_of_ranks_go_on(ranks, options, tmp_path):
    """Two, then four, then one: momentum and counters as they were, and transforms with their matrices."""
    told = OPTIONS[options]
    before = ranks(save, 2, "fsdp", str(tmp_path), told)
    for world in (4, 1):
        for at_load, params, outcomes in ranks(load, world, "fsdp", str(tmp_path), told):
            assert same(before[0][0][0], at_load[0]) and before[0][0][1] == at_load[1]
            assert outcomes == before[0][2]
            for name, param in before[0][1].items():
                assert torch.allclose(params[name], param, rtol=0, atol=1e-12), name


def from_one_device(rank, world, file):
    model, part, parts = wrap(net(), "fsdp", rank, world)
    optimizer = optimizer_of(model)
    saved = torch.load(file, weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            local(param).copy_(local(sharded_as(param, saved["model"][name])))
    train(model, optimizer, AFTER, part, parts)
    return whole(model), outcomes_of(optimizer), sum(transforms(optimizer).values())


def shards(rank, world, strategy):
    """Parameters whose shards differ from what `sharded_as` makes of the whole ones."""
    values = {name: param.detach().clone() for name, param in net().named_parameters()}
    model, *_ = wrap(net(), strategy, rank, world)
    own = {name: (param, sharded_as(param, values[name])) for name, param in model.named_parameters()}
    strided = [name for name, (param, _) in own.items() if "Strided" in str(param.placements)]
    return strided, [
        name
        for name, (param, made) in own.items()
        if made.placements != param.placements or not torch.equal(made.to_local(), param.to_local())
    ]


@pytest.mark.parametrize(("strategy", "strided"), [("fsdp", 0), ("hsdp", 0), ("fsdp+tp", 6)])
def test_a_whole_tensor_is_sharded_as_its_parameter(ranks, strategy, strided):
    for found, wrong in ranks(shards, 4, strategy):
        assert len(found) == strided and wrong == []


def transforms(optimizer):
    return {
        (index, key): value.numel()
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if key.startswith("transform")
    }


def to_one_device(rank, world, file):
    model, part, parts = wrap(net(), "fsdp", rank, world)
    optimizer = optimizer_of(model)
    train(model, optimizer, BEFORE, part, parts)
    saved, optim = states(model, optimizer, full_state_dict=True, cpu_offload=True)
    if rank == 0:
        torch.save({"model": saved, "optim": optim}, file)
    dist.barrier()
    train(model, optimizer, AFTER, part, parts)
    return whole(model), outcomes_of(optimizer)


def test_a_file_of_one_device_goes_on_sharded(ranks, tmp_path):
    model = net()
    optimizer = optimizer_of(model)
    train(model, optimizer, BEFORE)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    train(model, optimizer, AFTER)
    answers = ranks(from_one_device, 3, str(tmp_path / "one.pt"))
    for params, outcomes, _ in answers:
        assert outcomes == outcomes_of(optimizer)
        for name, param in whole(model).items():
            assert torch.allclose(params[name], param, rtol=0, atol=1e-12), name
    assert sum(numbers for _, _, numbers in answers) == sum(transforms(optimizer).values())


def test_a_sharded_training_goes_on_on_one_device(ranks, tmp_path):
    """Transforms of other ranks are not in rank 0's file: their matrices are solved again."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    file = tmp_path / "whole.pt"
    ranks(to_one_device, 2, str(file))
    saved = torch.load(file, weights_only=True)
    model = net()
    optimizer = optimizer_of(model)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    before = outcomes_of(optimizer)
    train(model, optimizer, 1)
    first = [
        name
        for name, (_, misses, _) in outcomes_of(optimizer).items()
        if misses["first"] > before[name][1]["first"]
    ]
    assert 0 < len(first) < len(before)


@pytest.fixture
def tmp_path():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
