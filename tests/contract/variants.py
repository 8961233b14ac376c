"""What the contract runs over: the optimizers in their variants, and small models on real tasks."""

import copy
import functools
import heapq
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unclipped import unclipped

from cachemuon import POLAR_EXPRESS, CacheMuon, GramNS, Muon, StandardNS, param_groups

VARIANTS = {
    "muon": Muon,
    "muon-gram": partial(Muon, solver=GramNS()),
    "muon-polar-express": partial(Muon, solver=StandardNS(POLAR_EXPRESS)),
    "muon-nesterov": partial(Muon, nesterov=True),
    "muon-original": partial(Muon, adjust_lr_fn="original"),
    "muon-rows": partial(Muon, normalize="rows"),
    "cache-defaults": CacheMuon,
    "cache": partial(CacheMuon, cache_all=True),
    # Not normalized, a cached step of a matrix this small is shortened to half its length by `max_norm=2`.
    "cache-plain": partial(CacheMuon, normalize=None, max_norm=4.0, cache_all=True),
    # Without a clip some transforms fail: of the steps of a training a quarter hits, some are bounded.
    "cache-exact": partial(unclipped, gate="schedule", probe="exact", gamma=50.0, max_age=6, momentum=0.9),
    "cache-clip": partial(CacheMuon, gamma=5.0, max_age=6, clip=0.2, max_norm=4.0, cache_all=True),
    "cache-float16": partial(CacheMuon, cache_dtype=torch.float16, max_norm=4.0, max_age=3, cache_all=True),
    "cache-paper": partial(CacheMuon.paper, gamma=2.0),
    "cache-residual": unclipped,
    "cache-residual-max-age": partial(unclipped, max_age=2, momentum=0.9),
    "cache-residual-nesterov": partial(unclipped, nesterov=True),
    "cache-residual-original": partial(unclipped, adjust_lr_fn="original", gamma=2.0),
    "cache-residual-clip": partial(
        CacheMuon, gamma=5.0, gate="residual", max_age=6, clip=0.2, max_norm=4.0, cache_all=True
    ),
    "cache-residual-float16": partial(unclipped, cache_dtype=torch.float16),
}


def _over(names):
    return pytest.mark.parametrize("make", [pytest.param(VARIANTS[name], id=name) for name in names])


every_variant = _over(VARIANTS)
fresh_variants = _over(name for name in VARIANTS if name.startswith("muon"))
# By default small matrices are not cached; all others hit.
cache_variants = _over(name for name in VARIANTS if name.startswith("cache") and name != "cache-defaults")
scheduled_variants = _over(["cache", "cache-plain", "cache-exact", "cache-clip", "cache-float16"])
gated_variants = _over(name for name in VARIANTS if name.startswith(("cache-residual", "cache-paper")))
both_optimizers = _over(["muon", "cache"])


def gates(optimizer):
    return isinstance(optimizer, CacheMuon)


def caches(optimizer):
    """Whether it caches matrices as small as here, which do not pay."""
    return gates(optimizer) and optimizer.param_groups[0]["cache_all"]


def normalizes(make):
    """Whether the directions of a variant are divided by their second moments."""
    return make([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]["normalize"] is not None


def scheduled(optimizer):
    """Whether the step's number decides what is solved, and a residual above gamma is known a step later."""
    return caches(optimizer) and optimizer.param_groups[0]["gate"] == "schedule"


def ageless(optimizer):
    """Without an age limit: when a transform expires depends on a matrix's place among the others."""
    for group in optimizer.param_groups:
        if "max_age" in group:
            group["max_age"] = 1000 if group["gate"] == "schedule" else None
    return optimizer


# Models. Sizes differ between layers so that a step meets several shapes, some of them more than once.


class ByteMLP(nn.Module):
    """The next byte from the eight before it."""

    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.up = nn.Linear(64, width)
        self.mid1, self.mid2 = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = F.relu(self.up(self.embedding(tokens).flatten(1)))
        x = x + F.relu(self.mid1(x))
        return self.head(x + F.relu(self.mid2(x)))


class ByteTransformer(nn.Module):
    """A block around nn.MultiheadAttention; the head is tied to the embedding."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 12, 3, stride=2)
        self.along = nn.Conv1d(12, 16, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.head(F.relu(self.along(x.flatten(2))).mean(2))


class Experts(nn.Module):
    """Four experts in 3-D weights, mixed by a gate."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.inner = nn.Parameter(torch.randn(4, 16, 24) / 4)
        self.outer = nn.Parameter(torch.randn(4, 24, 16) / 5)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        hidden = F.relu(torch.einsum("bi,eij->bej", x, self.inner))
        mixed = torch.einsum("bej,ejo,be->bo", hidden, self.outer, self.gate(x).softmax(-1))
        return self.head(x + mixed)


BATCHES = 4
"""How many different batches a task has: few enough to be learned in seconds."""


@functools.cache
def _text():
    return torch.frombuffer(bytearray(Path(heapq.__file__).read_bytes()), dtype=torch.uint8).long()


def _windows(step, batch, length):
    generator = torch.Generator().manual_seed(step % BATCHES)
    starts = torch.randint(len(_text()) - length, (batch, 1), generator=generator)
    return _text()[starts + torch.arange(length)]


def _next_byte(model, step):
    windows = _windows(step, 64, 9)
    return F.cross_entropy(model(windows[:, :-1]).float(), windows[:, -1])


def _every_next_byte(model, step):
    windows = _windows(step, 8, 17)
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


def _regression(shape, model, step):
    x = torch.randn(64, *shape, generator=torch.Generator().manual_seed(step % BATCHES))
    size = x[0].numel()
    teacher = torch.randn(size, 4, generator=torch.Generator().manual_seed(99)) / size**0.5
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(x.to(dtype)).float(), (x.flatten(1) @ teacher).sin())


class Task(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    goal: float
    """What part of the first loss may be left after `TRAINING_STEPS`: less than Adam alone leaves."""

    def model(self, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        return self.build().to(dtype)


TRAINING_STEPS = 60

TASKS = {
    "mlp": Task(ByteMLP, _next_byte, goal=0.1),  # 0.45 is left if the matrices stand still,
    "transformer": Task(ByteTransformer, _every_next_byte, goal=0.3),  # 0.44,
    "conv": Task(ConvNet, partial(_regression, (3, 8, 8)), goal=0.6),  # 0.89,
    "experts": Task(Experts, partial(_regression, (16,)), goal=0.14),  # 0.21
}

every_task = pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in TASKS.items()])


def train_step(task, model, optimizer, step):
    optimizer.zero_grad()
    loss = task.loss(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(task, model, optimizer, steps):
    return [train_step(task, model, optimizer, step) for step in steps]


def optimizer_for(make, model, **settings):
    return make(param_groups(model, adam={"lr": 5e-3}), **{"lr": 0.02, **settings})


# Single matrices, with gradients that stay alike from step to step, as a cache needs it, but not equal.


def gradient(shape, index=0, step=0, noise=0.3, dtype=torch.float32):
    base = torch.randn(shape, generator=torch.Generator().manual_seed(index))
    change = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + 100 * index + step))
    return (base + noise * change).to(dtype)


def parameter(shape, index=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5000 + index)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def run(optimizer, params, steps, scale=1.0):
    """Feed each parameter the gradients of its index."""
    for step in steps:
        for index, param in enumerate(params):
            value = scale * gradient(param.shape, index, step, dtype=param.dtype)
            param.grad = torch.empty_like(param).copy_(value)
        optimizer.step()


def decisions(optimizer):
    """The counters of every matrix: what was done how often, and when."""
    optimizer.state_dict()  # after it nothing is on its way to the host
    states = [optimizer.state[p] for g in optimizer.param_groups if g["use_muon"] for p in g["params"]]
    return [row for state in states for row in state["counters"].tolist()]


# Comparing bit for bit.

exactly = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def snapshot(optimizer):
    """Everything that an optimizer holds, copied: parameters, state, settings."""
    optimizer.state_dict()  # after it nothing is on its way to the host
    groups = []
    for group in optimizer.param_groups:
        settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
        groups.append((settings, [(p.detach().clone(), _copied(optimizer, p)) for p in group["params"]]))
    return groups


def _copied(optimizer, param):
    return {key: value.clone() for key, value in optimizer.state.get(param, {}).items()}


def assert_same(left, right):
    """Two optimizers, or snapshots of them, are equal in every bit, dtype and key."""
    left, right = (x if isinstance(x, list) else snapshot(x) for x in (left, right))
    assert len(left) == len(right)
    for (settings, members), (other_settings, other_members) in zip(left, right, strict=True):
        assert settings == other_settings
        for (param, state), (other_param, other_state) in zip(members, other_members, strict=True):
            exactly(param, other_param)
            assert state.keys() == other_state.keys()
            for key in state:
                exactly(state[key], other_state[key])
