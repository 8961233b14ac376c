"""What changes in the middle of a run, on ranks: groups, settings; and whose a matrix is."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cachemuon import CacheMuon
from cachemuon.distributed import whole_state_dict

SHAPE = (24, 32)


def drawn(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def put_on(world):
    """How a tensor is sharded along its first dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    return lambda value: distribute_tensor(value, mesh, [Shard(0)])


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step_all(optimizer, params, step, put):
    """Gradients that change slowly; how far each parameter moved, in its own part."""
    before = [local(param).clone() for param in params]
    for i, param in enumerate(params):
        param.grad = put(drawn(1000 + i, param.shape) + 0.05 * drawn(100 * step + i, param.shape))
    optimizer.step()
    return [float((local(param) - old).norm()) for param, old in zip(params, before, strict=True)]


def owners_of(optimizer):
    return [placement.owner for _, placement in sorted(optimizer._placements().items())]


def grow(rank, world, paper, shapes, number):
    """After three steps there are more parameters, so that some of the old ones get other owners."""
    put = put_on(world)
    params = [nn.Parameter(put(drawn(i, shape))) for i, shape in enumerate(shapes)]
    if paper:
        optimizer = CacheMuon.paper(params, lr=0.1, gamma=1e9)
    else:
        optimizer = CacheMuon(params, lr=0.1, cache_all=True)
    moved = [step_all(optimizer, params, step, put) for step in range(3)]
    owners = owners_of(optimizer)
    params += [nn.Parameter(put(drawn(10 + i, (96, 96)))) for i in range(number)]
    optimizer.add_param_group({"params": params[len(shapes) :]})
    moved += [step_all(optimizer, params, step, put) for step in range(3, 8)]
    changed = owners != owners_of(optimizer)[: len(shapes)]
    return moved, changed, optimizer.cache_stats()["matrices"]


@pytest.mark.parametrize(
    "case",
    [
        (False, [(64, 64), (96, 96), (64, 128), (32, 96), (48, 48)], 6),
        (True, [(64, 64), (48, 48), (32, 32)], 1),
    ],
    ids=["cache", "paper"],
)
def test_matrices_whose_owner_changes_go_on_moving(ranks, case):
    answers = ranks(grow, 2, *case)
    assert answers[0][1]
    for moved, _, stats in answers:
        assert min(map(min, moved)) > 0.1
        assert [entry["misses"] for entry in stats.values()] == [
            entry["misses"] for entry in answers[0][2].values()
        ]


def exchange(rank, world, first, second):
    params = [nn.Parameter(drawn(i)) for i in range(4)]
    optimizer = CacheMuon(params, lr=0.1, cache_all=True, process_group=dist.group.WORLD, exchange=first)
    moved = [step_all(optimizer, params, step, torch.clone) for step in range(3)]
    optimizer.param_groups[0]["exchange"] = second
    moved += [step_all(optimizer, params, step, torch.clone) for step in range(3, 8)]
    return moved, [param.detach() for param in params]


@pytest.mark.parametrize("ways", [("directions", "transforms"), ("transforms", "directions")])
def test_copies_stay_equal_when_what_they_exchange_changes(ranks, ways):
    answers = ranks(exchange, 2, *ways)
    for moved, params in answers:
        assert min(map(min, moved)) > 0.1
        for param, first in zip(params, answers[0][1], strict=True):
            assert torch.equal(param, first)


def scheduled(rank, world, gate):
    put = put_on(world)
    params = [nn.Parameter(put(drawn(i))) for i in range(4)]
    optimizer = CacheMuon(params, lr=0.1, cache_all=True, gate=gate)
    for step in range(8):
        step_all(optimizer, params, step, put)
        optimizer.param_groups[0]["gamma"] = 0.01 if step == 3 else 20.0  # after the step, as schedulers do
    stats = optimizer.cache_stats()["matrices"].values()
    return [(entry["hits"], entry["misses"], entry["age"]) for entry in stats]


@pytest.mark.parametrize(("gate", "outcome"), [("schedule", "bounded"), ("residual", "rejected")])
def test_ranks_count_by_the_gamma_that_a_step_was_taken_with(ranks, gate, outcome):
    first, second = ranks(scheduled, 2, gate)
    assert first == second
    assert any(misses[outcome] for _, misses, _ in first) and any(hits for hits, _, _ in first)


def elsewhere(rank, world):
    """A plan is made again at a step at which only one rank has a gradient, of a parameter of its own."""
    shared = nn.Parameter(put_on(world)(drawn(0)))
    own = nn.Parameter(drawn(1 + rank))
    optimizer = CacheMuon([shared, own], lr=0.1, cache_all=True)
    for step in range(4):
        shared.grad = put_on(world)(drawn(2)) if step != 2 else None
        own.grad = drawn(3) if step != 2 or rank == 0 else None
        optimizer.param_groups[0]["max_age"] = 10 if step < 2 else 5
        optimizer.step()
    return optimizer.cache_stats()["calls"]


def test_a_setting_changes_at_a_step_that_one_rank_takes_alone(ranks):
    assert ranks(elsewhere, 2) == [7, 6]


def experts(rank, world, gate):
    """Experts that one rank has each, and a plain matrix of their shape; one has a NaN for a while."""
    put = put_on(world)
    stack, plain = nn.Parameter(put(drawn(0, (2 * world, *SHAPE)))), nn.Parameter(drawn(1))
    optimizer = CacheMuon([stack, plain], lr=0.1, cache_all=True, gate=gate)
    moved = []
    for step in range(14):
        values = drawn(2, (2 * world, *SHAPE)) + 0.05 * drawn(100 + step, (2 * world, *SHAPE))
        if 4 <= step < 8:
            values[0] = torch.nan
        before = plain.detach().clone()
        stack.grad, plain.grad = put(values), drawn(3) + 0.05 * drawn(200 + step)
        optimizer.step()
        moved.append(float((plain - before).norm()))
    stats = optimizer.cache_stats()["matrices"]
    return moved, [entry["misses"]["non-finite"] for entry in stats.values()]


@pytest.mark.filterwarnings("ignore:a gradient has a NaN")
@pytest.mark.parametrize("gate", ["schedule", "residual"])
def test_a_bad_gradient_of_an_expert_stops_no_other_matrix(ranks, gate):
    for moved, bad in ranks(experts, 2, gate):
        assert min(moved) > 0.1
        assert bad == [4, 0, 0, 0, 0]


def whole(rank, world):
    params = [nn.Parameter(drawn(i)) for i in range(4)]
    optimizer = CacheMuon(
        params, lr=0.1, cache_all=True, process_group=dist.group.WORLD, exchange="directions"
    )
    for step in range(3):
        step_all(optimizer, params, step, torch.clone)
    here = sum("transform" in optimizer.state[param] for param in params)
    return here, whole_state_dict(optimizer)["state"]


def test_a_whole_state_has_the_transforms_of_all_owners(ranks):
    (some, first), (others, second) = ranks(whole, 2)
    assert some + others == 4 and some and others
    for number in range(4):
        assert torch.equal(first[number]["transform"], second[number]["transform"])


def half(rank, world):
    torch.set_default_dtype(torch.float16)
    try:
        param = nn.Parameter(put_on(world)(torch.zeros(SHAPE, dtype=torch.float32)))
        optimizer = CacheMuon([param], lr=0.1)
        param.grad = put_on(world)(torch.full(SHAPE, 1e6, dtype=torch.float32))
        optimizer.step()
        return float(param.to_local().norm())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_large_gradient_is_finite_whatever_the_default_dtype(ranks):
    assert min(ranks(half, 2)) > 0


def alone(rank, world, change):
    """One rank adds a group of its own, or changes a setting of one, that the others know nothing of."""
    shared = [nn.Parameter(put_on(world)(drawn(i))) for i in range(3)]
    copied, own = nn.Parameter(drawn(5)), nn.Parameter(drawn(6 + rank))
    groups = [
        {"params": shared},
        {"params": [copied], "process_group": dist.group.WORLD},
        {"params": [own]},
    ]
    optimizer = CacheMuon(groups, lr=0.1, cache_all=True)
    params, setup = [*shared, copied, own], []
    for step in range(6):
        if step == 3 and rank == 0:
            if change == "group":
                params.append(nn.Parameter(drawn(9)))
                optimizer.add_param_group({"params": params[-1:]})
            else:
                optimizer.param_groups[2]["max_age"] = 4
        for i, param in enumerate(params):
            put = put_on(world) if i < 3 else torch.clone
            param.grad = put(drawn(100 + i) + 0.05 * drawn(200 + 10 * step + i))
        optimizer.step()
        setup.append(optimizer.cache_stats()["bytes_sent"]["setup"])
    stats = list(optimizer.cache_stats()["matrices"].values())[:4]
    return copied.detach(), [(entry["hits"], entry["misses"], entry["age"]) for entry in stats], setup


@pytest.mark.parametrize("change", ["group", "setting"])
def test_a_rank_may_change_what_is_its_own(ranks, change):
    first, *others = ranks(alone, 3, change)
    for copied, outcomes, _ in others:
        assert torch.equal(copied, first[0]) and outcomes == first[1]
    assert any(hits for hits, _, _ in first[1])
    for *_, setup in (first, *others):
        assert len(set(setup)) == 1  # nothing was agreed on again


def refused(rank, world):
    """At step 3 one rank loads a state that is refused, and the training goes on."""
    put = put_on(world)
    params = [nn.Parameter(put(drawn(i))) for i in range(3)]
    optimizer = CacheMuon(params, lr=0.1, cache_all=True)
    for step in range(6):
        if step == 3 and rank == 0:
            damaged = copy.deepcopy(optimizer.state_dict())
            damaged["state"][0]["counters"] = torch.zeros(1, 2, dtype=torch.int64)
            with pytest.raises(ValueError, match="counters"):
                optimizer.load_state_dict(damaged)
        step_all(optimizer, params, step, put)
    stats = optimizer.cache_stats()["matrices"].values()
    return [(entry["hits"], entry["misses"], entry["age"]) for entry in stats]


def test_a_load_that_one_rank_refuses_stops_no_other(ranks):
    first, second = ranks(refused, 2)
    assert first == second and all(hits for hits, _, _ in first)


def resumed(rank, world):
    """After `max_age` was changed, a state is saved and loaded."""
    runs = []
    for load in (False, True):
        shapes = [(64, 64), (96, 96), (64, 128), (32, 96), (48, 48)]
        params = [nn.Parameter(put_on(world)(drawn(i, shape))) for i, shape in enumerate(shapes)]
        optimizer = CacheMuon(params, lr=0.1, cache_all=True)
        for step in range(8):
            optimizer.param_groups[0]["max_age"] = 10 if step < 2 else 3
            if step == 4 and load:
                state = optimizer.state_dict()
                optimizer = CacheMuon(params, lr=0.1, cache_all=True)
                optimizer.load_state_dict(state)
            step_all(optimizer, params, step, put_on(world))
        runs.append([local(param).clone() for param in params])
    return all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_run_goes_on_bit_for_bit_after_max_age_was_changed(ranks):
    assert ranks(resumed, 2) == [True, True]


def unlike(rank, world, load):
    """Rank 1 has so many matrices of its own that a cache would pay for them and the shared ones together."""
    put = put_on(world)
    shared = [nn.Parameter(put(drawn(i, UNLIKE))) for i in range(2)]
    own = [nn.Parameter(drawn(10 + i, UNLIKE)) for i in range(30 * rank)]

    def made():
        return CacheMuon([*shared, *own], lr=0.1)

    optimizer = made()
    for step in range(4):
        if load and step == 2:
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), made()
            optimizer.load_state_dict(saved)
        for param in own:
            param.grad = drawn(step, param.shape)
        step_all(optimizer, shared, step, put)
    stats = [(entry["hits"], entry["misses"]) for entry in optimizer.cache_stats()["matrices"].values()]
    return stats[:2], stats[2:], [param.full_tensor().detach() for param in shared]


UNLIKE = (96, 192)


def test_what_is_done_with_shared_matrices_follows_from_them_alone(ranks):
    through, loaded = ranks(unlike, 2, False), ranks(unlike, 2, True)
    outcomes = [shared for shared, _, _ in (*through, *loaded)]
    assert outcomes == [outcomes[0]] * 4
    assert all(misses["uncached"] == 4 for _, misses in outcomes[0])
    assert all(hits for hits, _ in through[1][1])  # 30 of that shape are worth it
    for one, other in zip(through[0][2], loaded[0][2], strict=True):
        assert torch.equal(one, other)
