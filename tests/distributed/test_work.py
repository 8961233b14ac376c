"""Who does what: FLOPs as executed, bytes as sent, and balance, by formulas written here anew."""

from math import prod

import pytest
import torch
from distributed.test_parity import RESTING, SHAPES, VARIANTS, gradients, start
from live import Live
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import CacheMuon
from cachemuon.distributed.layout import owners
from cachemuon.engine.plan import Plan, cost_of
from cachemuon.flops import GPT2_SMALL
from cachemuon.routing.layout import layout_of

STEPS = 12
WHOLE = SHAPES + RESTING


def count(rank, world, layout, variant):
    """Train, and count what this rank multiplies, what it says of that, and what it has sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    more, put = {"process_group": dist.group.WORLD}, torch.clone
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        more, put = {}, lambda value: distribute_tensor(value, mesh, [Shard(0)])
    params = [nn.Parameter(put(value)) for value in start(torch.float32, WHOLE)]
    groups = [{"params": params}]
    if variant in ("cache", "float16"):
        groups = [
            {"params": params[: len(SHAPES)], "guard": False},
            {"params": params[len(SHAPES) :], "guard": True},
        ]
    optimizer = VARIANTS[variant](groups, **more)
    flops = 0
    for step in range(STEPS):
        for param, gradient in zip(params, gradients(step, torch.float32, WHOLE), strict=True):
            param.grad = put(gradient)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        flops += counter.get_total_flops()
    stats = optimizer.cache_stats()
    homes = [] if world == 1 else [optimizer._homes().of[id(param)].owners for param in params]
    entries = [(entry["hits"], entry["misses"]) for entry in stats["matrices"].values()]
    return flops, stats["flops_here"], stats["flops"], stats["bytes_sent"], homes, entries


@pytest.fixture(scope="module")
def counted(ranks):
    """What each rank answered, each training made once."""
    made = {}

    def of(*case):
        if case not in made:
            made[case] = ranks(count, *case)
        return made[case]

    return of


def matrices():
    """The natural shape of every matrix, and where it lies in its parameter."""
    for shape in SHAPES + RESTING:
        if len(shape) == 3:
            yield from ((shape[1:], index, shape[0]) for index in range(shape[0]))
        else:
            yield shape, None, shape[0]


@pytest.mark.parametrize("variant", ["muon", "cache", "paper"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_ranks_execute_together_what_one_does(counted, world, variant):
    (alone,) = counted(1, "fsdp", variant)
    answers = counted(world, "fsdp", variant)
    for executed, here, together, *_ in answers:
        assert executed == here
        assert together == alone[0]
    assert sum(executed for executed, *_ in answers) == alone[0]


@pytest.mark.parametrize("variant", ["muon", "cache", "paper"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_with_copies_share_the_solves(counted, world, variant):
    answers = counted(world, "ddp", variant)
    for executed, here, together, *_ in answers:
        assert executed == here
        assert together == sum(one for one, *_ in answers)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_travel_to_owners_and_steps_back(counted, world):
    """Of each matrix every rank sends its rows once, and its owner sends the others theirs, at every step."""
    for variant in ("muon", "cache"):
        answers = counted(world, "fsdp", variant)
        owner_of = [owner for one in answers[0][4] for owner in one]
        for rank, (*_, sent, _, _) in enumerate(answers):
            updates = directions = 0
            for (shape, index, length), owner in zip(matrices(), owner_of, strict=True):
                size = -(-length // world)
                rows = [len(range(length)[r * size : (r + 1) * size]) for r in range(world)]
                if index is not None:  # a stack is sharded between its matrices
                    assert owner == index // size
                    continue
                width = prod(shape) // length
                updates += rows[rank] * width if rank != owner else 0
                directions += (length - rows[rank]) * width if rank == owner else 0
            assert sent["updates"] == STEPS * 4 * updates
            assert sent["directions"] == STEPS * 4 * directions
            assert "transforms" not in sent


@pytest.mark.parametrize(
    ("world", "variant", "size"), [(2, "cache", 4), (3, "cache", 4), (4, "cache", 4), (2, "float16", 2)]
)
def test_between_copies_only_transforms_travel(counted, world, variant, size):
    """An owner sends n^2 numbers to each other rank for a refresh; nothing for a hit."""
    answers = counted(world, "ddp", variant)
    owner_of = [owner for one in answers[0][4] for owner in one]
    for rank, (*_, sent, _, entries) in enumerate(answers):
        transforms = directions = 0
        for (shape, _, _), owner, (_, misses) in zip(matrices(), owner_of, entries, strict=True):
            if rank == owner:
                n = min(shape[0], prod(shape[1:]))
                refreshes = misses["cold"] + misses["residual"] + misses["stale"]
                transforms += (world - 1) * n * n * refreshes
                directions += (world - 1) * prod(shape) * misses["resting"]
        assert sent.get("transforms", 0) == size * transforms
        assert sent.get("directions", 0) == 4 * directions
        assert "updates" not in sent


CEILING = 24 * 128 * 128 * 4  # twice what solving for one of the matrices takes


def fill(rank, world, layout, gate):
    """The most bytes that a step took beside parameters, gradients and state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    more, put = {"process_group": dist.group.WORLD}, torch.clone
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        more, put = {}, lambda value: distribute_tensor(value, mesh, [Shard(0)])
    params = [nn.Parameter(put(torch.randn(128, 128))) for _ in range(16)]
    settings = {"guard": False, "max_age": 2, "gate": gate, "max_workspace_bytes": CEILING}
    optimizer = CacheMuon(params, **settings, **more)
    peaks = []
    for step in range(4):
        for param in params:
            param.grad = put(torch.randn(128, 128, generator=torch.Generator().manual_seed(step)))
        if step == 0:
            optimizer.step()
            continue
        with Live(optimizer) as live:
            optimizer.step()
        peaks.append(live.peak)
    return max(peaks)


@pytest.mark.parametrize("gate", ["sync", "lagged"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_travels_stays_within_the_ceiling(ranks, layout, gate):
    for peak in ranks(fill, 2, layout, gate):
        assert CEILING / 4 < peak <= CEILING


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_owners_of_gpt2_small_have_equal_work(world):
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in GPT2_SMALL]
    optimizer = CacheMuon(params)
    plan, (group,) = Plan(optimizer.param_groups), optimizer.param_groups
    works = [work for param in params for work in optimizer._works(group, param)]
    found = owners(works, [range(world)] * len(works), world)
    life = group["max_age"] + 1
    loads = [[0] * world for _ in range(life)]
    for param, owner in zip(params, found, strict=True):
        (piece,), (_, (early,)) = layout_of(group, param).views, plan.of(param)
        cost = cost_of(group, param, piece)
        for step in range(life):
            loads[step][owner] += cost.cold if step == early else cost.hit
    totals = [sum(load[rank] for load in loads) for rank in range(world)]
    assert max(totals) <= 1.25 * sum(totals) / world
    solves = [0] * world
    for param, owner in zip(params, found, strict=True):
        solves[owner] += cost_of(group, param, *layout_of(group, param).views).cold
    assert max(solves) <= 1.25 * sum(solves) / world
    for load in loads:
        assert max(load) <= 1.5 * sum(load) / world


def freed(rank, world, gate):
    """How many of the gradients of a step outlive `zero_grad`."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 32, bias=False))
    fully_shard(model)
    optimizer = CacheMuon(model.parameters(), lr=0.02, guard=False, gate=gate)
    for step in range(3):
        model(torch.randn(16, 48, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        storages = [StorageWeakRef(p.grad.to_local().untyped_storage()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [not storage.expired() for storage in storages]


@pytest.mark.parametrize("gate", ["sync", "lagged"])
def test_no_gradient_lives_on_until_the_next_step(ranks, gate):
    assert ranks(freed, 2, gate) == [[False, False]] * 2
