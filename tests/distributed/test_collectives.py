"""Which collectives a step issues: the same at every step, on every rank, whatever gradients there are."""

import pytest
import torch
from distributed.test_parity import PLACEMENTS
from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cachemuon import CacheMuon, Muon
from cachemuon.distributed.placement import EXCHANGES

SHAPES = [(24, 32), (20, 12), (3, 16, 16), (24, 32), (1, 40)]
STEPS = 14
SETTINGS = {
    "muon": lambda params, **more: Muon(params, lr=0.1, **more),
    "cache": lambda params, **more: CacheMuon(params, lr=0.1, cache_all=True, max_age=3, **more),
    "residual": lambda params, **more: CacheMuon(params, lr=0.1, cache_all=True, gate="residual", **more),
    "paper": lambda params, **more: CacheMuon.paper(params, lr=0.1, **more),
}


class Collectives(TorchDispatchMode):
    """The collectives that are issued, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def parameters(layout, world):
    """Parameters as a layout has them, how a gradient is put there, and settings that go with that."""
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    if layout in ("ddp", *EXCHANGES):
        more = {"process_group": dist.group.WORLD} | ({} if layout == "ddp" else {"exchange": layout})
        return [nn.Parameter(value) for value in values], torch.clone, more
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape, names = PLACEMENTS[layout]
    kinds = {"shard0": Shard(0), "shard1": Shard(1), "replicate": Replicate()}
    mesh, placed = init_device_mesh("cpu", shape(world)), [kinds[name] for name in names]

    def put(value):
        return distribute_tensor(value, mesh, placed)

    return [nn.Parameter(put(value)) for value in values], put, {}


def collect(rank, world, layout, kind):
    """The collectives of each step. In turns a rank lacks one gradient or all, or has a NaN in one."""
    params, put, more = parameters(layout, world)
    optimizer = SETTINGS[kind](params, **more)
    found = []
    for step in range(STEPS):
        for i, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + i)
            param.grad = put(torch.randn(param.shape, generator=generator))
        param, bad = params[step % len(params)], ("one", "all", "NaN", "none")[step % 4]
        if rank == step % world and bad == "NaN":
            (param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad).fill_(torch.nan)
        elif rank == step % world and bad != "none":
            for one in params if bad == "all" else [param]:
                one.grad = None
        with Collectives() as collectives:
            optimizer.step()
        found.append(collectives.names)
    stats = optimizer.cache_stats()
    outcomes = [(entry["hits"], entry["misses"], entry["age"]) for entry in stats["matrices"].values()]
    return found, sorted(stats["bytes_sent"]), outcomes


ALL_REDUCE, ALL_TO_ALL = "allreduce_", "alltoall_base_"
OWNERS = [ALL_REDUCE, ALL_TO_ALL, ALL_REDUCE]  # flags, directions, residuals
SHARDS = [ALL_REDUCE, ALL_TO_ALL, ALL_TO_ALL, ALL_REDUCE]  # flags, updates, directions, residuals
COPIES = [ALL_REDUCE, ALL_TO_ALL, ALL_REDUCE]  # flags, transforms, residuals


@pytest.mark.filterwarnings("ignore:a gradient has a NaN", "ignore:a parameter has a gradient on some")
@pytest.mark.parametrize(
    ("layout", "world", "kind", "wanted"),
    [
        ("ddp", 2, "cache", COPIES),
        ("ddp", 3, "cache", COPIES),
        ("ddp", 4, "cache", OWNERS),
        ("directions", 2, "cache", OWNERS),
        ("ddp", 2, "paper", OWNERS),
        ("ddp", 2, "muon", OWNERS[:-1]),
        ("fsdp", 3, "cache", SHARDS),
        ("fsdp", 2, "residual", SHARDS),
        ("fsdp", 2, "muon", SHARDS[:-1]),
        ("hsdp", 4, "cache", SHARDS),
        ("grid", 4, "cache", SHARDS),
    ],
)
def test_every_step_issues_the_same_collectives(ranks, layout, world, kind, wanted):
    answers = ranks(collect, world, layout, kind)
    for found, _, outcomes in answers:
        setup = [] if kind == "muon" else [ALL_REDUCE]  # which rank has which transform
        assert found == [setup + wanted, *[wanted] * (STEPS - 1)]
        assert outcomes == answers[0][2]


@pytest.mark.filterwarnings("ignore:a gradient has a NaN", "ignore:a parameter has a gradient on some")
@pytest.mark.parametrize(
    ("world", "wanted"),
    [
        (2, ["flags", "residuals", "setup", "transforms"]),
        (3, ["flags", "residuals", "setup", "transforms"]),
        (4, ["directions", "flags", "residuals", "setup"]),
    ],
)
def test_from_four_ranks_on_copies_get_directions(ranks, world, wanted):
    for _, sent, _ in ranks(collect, world, "ddp", "cache"):
        assert sent == wanted
