"""Which rank does what: FLOPs as executed, bytes as sent, and balance, by formulas of these tests alone."""

from itertools import product
from math import prod

import pytest
import torch
from distributed.test_parity import SHAPES, SMALL, VARIANTS, gradients, start
from live import Live
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import CacheMuon
from cachemuon.distributed.placement import EXCHANGES, placements
from cachemuon.engine.plan import Plan
from cachemuon_lab.totals import GPT2_LARGE, GPT2_SMALL

STEPS = 12
WHOLE = SHAPES + SMALL


def layout_of(name, world):
    """How a tensor is put on ranks, and the settings that go with that."""
    if name != "fsdp":
        exchange = {} if name == "ddp" else {"exchange": name}
        return torch.clone, {"process_group": dist.group.WORLD, **exchange}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    return lambda value: distribute_tensor(value, mesh, [Shard(0)]), {}


def count(rank, world, layout, variant):
    """Train, and count what this rank multiplies, what it reports of that, and what it has sent."""
    put, more = layout_of(layout, world)
    params = [nn.Parameter(put(value)) for value in start(torch.float32, WHOLE)]
    groups = [{"params": params}]
    if variant in ("cache", "float16", "residual"):
        groups = [
            {"params": params[: len(SHAPES)], "cache_all": True},
            {"params": params[len(SHAPES) :], "cache_all": False},
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
    owners = [placement.owner for _, placement in sorted(optimizer._placements().items())]
    entries = [(entry["hits"], entry["misses"]) for entry in stats["matrices"].values()]
    return flops, stats["flops_here"], stats["flops"], stats["bytes_sent"], owners, entries


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
    for shape in SHAPES + SMALL:
        if len(shape) == 3:
            yield from ((shape[1:], index, shape[0]) for index in range(shape[0]))
        else:
            yield shape, None, shape[0]


@pytest.mark.parametrize("variant", ["muon", "cache", "residual", "paper"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_ranks_execute_together_what_one_does(counted, world, variant):
    (alone,) = counted(1, "fsdp", variant)
    answers = counted(world, "fsdp", variant)
    for executed, here, together, *_ in answers:
        assert executed == here
        assert together == alone[0]
    assert sum(executed for executed, *_ in answers) == alone[0]


@pytest.mark.parametrize("variant", ["muon", "cache", "residual", "paper"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_with_copies_share_the_solves(counted, world, variant):
    answers = counted(world, "ddp", variant)
    for executed, here, together, *_ in answers:
        assert executed == here
        assert together == sum(one for one, *_ in answers)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_go_to_owners_and_directions_come_back(counted, world):
    """Of each matrix every rank sends its rows once, and its owner sends the others theirs, at every step."""
    for variant in ("muon", "cache"):
        answers = counted(world, "fsdp", variant)
        owners = answers[0][4]
        for rank, (*_, sent, _, _) in enumerate(answers):
            updates = directions = 0
            for (shape, index, length), owner in zip(matrices(), owners, strict=True):
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
    ("world", "variant", "layout", "size"),
    [
        (2, "cache", "ddp", 4),
        (3, "cache", "ddp", 4),
        (4, "cache", "transforms", 4),
        (2, "float16", "ddp", 2),
    ],
)
def test_owners_send_transforms_of_copies_when_they_solve(counted, world, variant, layout, size):
    """An owner sends n^2 numbers to each other rank for a solve; nothing for a hit."""
    answers = counted(world, layout, variant)
    for rank, (*_, sent, owners, entries) in enumerate(answers):
        transforms = directions = 0
        for (shape, _, _), owner, (hits, misses) in zip(matrices(), owners, entries, strict=True):
            if rank == owner:
                cached = hits > 0
                n = min(shape[0], prod(shape[1:]))
                solves = misses["first"] + misses["expired"] + misses["uncached"]
                transforms += (world - 1) * n * n * solves * cached
                directions += (world - 1) * prod(shape) * STEPS * (not cached)
        assert sent.get("transforms", 0) == size * transforms
        assert sent.get("directions", 0) == 4 * directions
        assert "updates" not in sent


@pytest.mark.parametrize(
    ("world", "variant", "layout"),
    [(4, "cache", "ddp"), (2, "cache", "directions"), (2, "residual", "ddp"), (3, "muon", "ddp")],
)
def test_owners_send_directions_of_copies(counted, world, variant, layout):
    """An owner sends a matrix to each other rank, at every step. So do all from 4 ranks on."""
    for rank, (*_, sent, owners, _) in enumerate(counted(world, layout, variant)):
        own = [prod(shape) for (shape, _, _), owner in zip(matrices(), owners, strict=True) if owner == rank]
        assert sent["directions"] == 4 * STEPS * (world - 1) * sum(own)
        assert not {"updates", "transforms"} & sent.keys()


CEILING = 24 * 128 * 128 * 4  # twice what solving for one of the matrices takes


def fill(rank, world, layout, gate):
    """The most bytes that a step took beside parameters, gradients and state."""
    put, more = layout_of(layout, world)
    params = [nn.Parameter(put(torch.randn(128, 128))) for _ in range(16)]
    settings = {"cache_all": True, "max_age": 2, "gate": gate, "max_workspace_bytes": CEILING}
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


@pytest.mark.parametrize("gate", ["schedule", "residual"])
@pytest.mark.parametrize("layout", [*EXCHANGES, "fsdp"])
def test_an_exchange_stays_within_the_ceiling(ranks, layout, gate):
    for peak in ranks(fill, 2, layout, gate):
        assert CEILING / 4 < peak <= CEILING


def spent(shapes, world, **settings):
    """FLOPs of each rank in each step of one life of all transforms, from placements and prices alone."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    optimizer = CacheMuon(params, **settings)
    plan = Plan(optimizer.param_groups, {}, optimizer, lambda group, param: tuple(range(world)))
    placed = [placements(plan.kinds, rank) for rank in range(world)]
    life = settings.get("max_age", 10) + 1
    flops = [[0] * world for _ in range(life)]
    for kind in plan.kinds:
        for x, phase in zip(kind.matrices, kind.phases, strict=True):
            for step, rank in product(range(life), range(world)):
                place, prices = placed[rank][x.number], kind.choice.prices
                outcome = "expired" if (step + phase) % life == 0 else "hit"
                if place.owned:
                    flops[step][rank] += prices.executed[outcome]
                elif place.replicated:
                    flops[step][rank] += prices.copy[outcome]
    return flops


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_owners_of_gpt2_small_have_equal_work(world):
    steps = spent(GPT2_SMALL, world, exchange="directions")
    totals = [sum(step[rank] for step in steps) for rank in range(world)]
    assert max(totals) <= 1.25 * sum(totals) / world
    for step in steps:
        assert max(step) <= 1.5 * sum(step) / world


@pytest.mark.parametrize(("exchange", "least", "most"), [(None, 0.38, 0.42), ("transforms", 2.5, 2.9)])
def test_a_rank_of_eight_on_gpt2_large(exchange, least, most):
    """TFLOP in the mean step: a fresh Muon whose owners share the solves takes 1.17."""
    steps = spent(GPT2_LARGE, 8, exchange=exchange)
    means = [sum(step[rank] for step in steps) / len(steps) / 1e12 for rank in range(8)]
    assert least <= min(means) and max(means) <= most


def freed(rank, world, gate):
    """How many of the gradients of a step outlive `zero_grad`."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 32, bias=False))
    fully_shard(model)
    optimizer = CacheMuon(model.parameters(), lr=0.02, cache_all=True, gate=gate)
    for step in range(3):
        model(torch.randn(16, 48, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        storages = [StorageWeakRef(p.grad.to_local().untyped_storage()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [not storage.expired() for storage in storages]


@pytest.mark.parametrize("gate", ["schedule", "residual"])
def test_no_gradient_lives_on_until_the_next_step(ranks, gate):
    assert ranks(freed, 2, gate) == [[False, False]] * 2


def explained(rank, world, exchange):
    """What the notes say, and what is saved, with a process group or none."""
    more = {} if exchange is None else {"process_group": dist.group.WORLD, "exchange": exchange}
    params = [nn.Parameter(torch.zeros(256, 384)) for _ in range(2)]
    optimizer = CacheMuon(params, lr=0.01, max_age=3, **more)
    before = optimizer.explain().notes
    for step in range(9):
        for param in params:
            param.grad = torch.randn(256, 384, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    told = optimizer.explain()
    assert told.notes == before and str(told).splitlines()[-len(before) :] == list(before)
    return before, told.rows[0].saved, optimizer.metrics()["muon/flops_saved"]


@pytest.mark.parametrize("exchange", [None, *EXCHANGES])
def test_an_explanation_says_how_ranks_share_and_counts_savings_against_the_same_sharing(exchange, ranks):
    words = "2 ranks, each solves all: " if exchange is None else "2 ranks share the solves"
    for (note,), saved, by_metrics in ranks(explained, 2, exchange):
        assert note.startswith(words)
        assert saved == pytest.approx(by_metrics, rel=0.1) and 0.3 < saved < 0.8
