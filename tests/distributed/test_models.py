"""Models as people wrap them: DDP, FSDP2, HSDP, tensor parallel and both, mixed precision, experts."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cachemuon import CacheMuon, Muon, param_groups

WORDS, WIDTH, BATCH, LENGTH, STEPS = 31, 24, 12, 6, 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, experts that all are asked, a convolution over the sequence, a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.Parameter(torch.randn(5, WIDTH, WIDTH) / WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + torch.einsum("blw,ewv->blv", x, self.experts)
        x = x + self.mix(x.mT).mT
        return self.head(x)


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return tokens.chunk(parts)[part]


class Phased(CacheMuon):
    """Phases follow from shapes: else they depend on which matrices the same ranks share."""

    def choose(self, group, param, view, count):
        choice = super().choose(group, param, view, count)
        return choice._replace(life=choice.life._replace(phase=view.sides[0] % 5))


def optimizer_of(model, cls=CacheMuon, **settings):
    cached = {"cache_all": True, "max_age": 4, "gamma": 5.0} if issubclass(cls, CacheMuon) else {}
    return cls(param_groups(model, adam={"lr": 3e-3}), lr=0.02, **{**cached, **settings})


def train(model, optimizer, steps=STEPS, part=0, parts=1):
    losses = []
    for step in range(steps):
        tokens = batch(step, part, parts)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1).double(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in named.items()
    }


def outcomes_of(optimizer):
    stats = optimizer.cache_stats()["matrices"]
    return {
        name.removeprefix("module."): (entry["hits"], entry["misses"], entry["age"])
        for name, entry in stats.items()
    }


def wrap(model, strategy, rank, world):
    """The model as a user has it, and which part of how many of a batch this rank gets."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank, world
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    part, parts = rank, world
    if strategy in ("tp", "fsdp+tp"):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"], plan)
        part, parts = rank // (world // 2), 2
        if strategy == "tp":
            return model, 0, 1
        mesh = mesh["outer"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, part, parts


def train_wrapped(rank, world, strategy, cls):
    model, part, parts = wrap(net(), strategy, rank, world)
    optimizer = optimizer_of(model, cls)
    train(model, optimizer, part=part, parts=parts)
    return whole(model), outcomes_of(optimizer)


@pytest.fixture(scope="module")
def alone():
    made = {}

    def of(cls):
        if cls not in made:
            model = net()
            optimizer = optimizer_of(model, cls)
            train(model, optimizer)
            made[cls] = whole(model), outcomes_of(optimizer)
            if issubclass(cls, CacheMuon):
                assert min(hits for hits, _, _ in outcomes_of(optimizer).values()) > 0
                assert any(misses["bounded"] for _, misses, _ in outcomes_of(optimizer).values())
        return made[cls]

    return of


@pytest.mark.parametrize(
    ("strategy", "world", "cls"),
    [
        ("ddp", 2, CacheMuon),
        ("ddp", 4, CacheMuon),
        ("ddp", 2, Muon),
        ("fsdp", 2, CacheMuon),
        ("fsdp", 3, Muon),
        ("fsdp", 4, CacheMuon),
        ("hsdp", 4, CacheMuon),
        ("tp", 4, Phased),
        ("fsdp+tp", 4, Phased),
        ("fsdp+tp", 4, Muon),
    ],
)
def test_a_wrapped_model_trains_as_a_plain_one(ranks, alone, strategy, world, cls):
    params, outcomes = alone(cls)
    for found, decided in ranks(train_wrapped, world, strategy, cls):
        assert found.keys() == params.keys()
        for name, param in found.items():
            assert float((param - params[name]).norm() / params[name].norm()) < 1e-11, name
        assert decided == outcomes


def shard_with_mixed_precision(rank, world):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, part=rank, parts=world)
    momenta = {state["momentum_buffer"].dtype for state in optimizer.state.values() if "counters" in state}
    return losses, momenta


def test_mixed_precision_trains(ranks):
    for losses, momenta in ranks(shard_with_mixed_precision, 2):
        assert losses[-1] < losses[0] - 0.3
        assert momenta == {torch.float32}


def own_experts(rank, world):
    """Experts that live on one rank, beside parameters that DDP keeps equal."""
    model = net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["experts"])
    with torch.no_grad():
        model.experts.add_(rank)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped)
    train(wrapped, optimizer, steps=6, part=rank, parts=world)
    shared = {x.param for x in optimizer._plan().matrices if x.number in optimizer._placements()}
    return model.experts in shared, model.blocks[0].up.weight in shared, model.experts.detach().clone()


def test_experts_of_one_rank_are_its_own(ranks):
    (shared, dense, first), (_, _, second) = ranks(own_experts, 2)
    assert not shared and dense
    assert not torch.equal(first, second)


def flatten_with_fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    texts = []
    for original in (True, False):
        model = FullyShardedDataParallel(
            net(torch.float32), use_orig_params=original, device_id=torch.device("cpu")
        )
        for attempt in (lambda m=model: param_groups(m), lambda m=model: CacheMuon(list(m.parameters()))):
            try:
                attempt()
            except ValueError as refused:
                texts.append(str(refused))
    return texts


def test_the_refusal_of_flat_parameters_names_what_works(ranks):
    for texts in ranks(flatten_with_fsdp1, 2):
        assert len(texts) == 4
        assert all("fully_shard" in text or "at least 2 dimensions" in text for text in texts)


def step_by_zero_redundancy(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    matrices = [
        param for name, param in model.named_parameters() if name.endswith(("up.weight", "down.weight"))
    ]
    optimizer = ZeroRedundancyOptimizer(matrices, Muon, lr=0.02)
    train(wrapped, optimizer, steps=8, part=rank, parts=world)
    return whole(wrapped)


def test_zero_redundancy_optimizer_steps_whole_matrices(ranks):
    model = net()
    matrices = [
        param for name, param in model.named_parameters() if name.endswith(("up.weight", "down.weight"))
    ]
    train(model, Muon(matrices, lr=0.02), steps=8)
    for found in ranks(step_by_zero_redundancy, 2):
        for name, param in whole(model).items():
            assert torch.allclose(found[name], param, rtol=0, atol=1e-10), name
