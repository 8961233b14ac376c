"""torch.compile around a step: it runs as it is, and nothing is compiled anew from step to step."""

import os
import shutil

import pytest
import torch
from torch import nn

from cachemuon import GRAM, CacheGNS, CacheMuon, GramNS, Muon, Schedule, normalize, param_groups
from cachemuon.cache.reuse import random_block
from cachemuon.newton_schulz.products import Workspace

STEPS = 5

# Torch's own, when it first imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def no_recompiling():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def made(kind, scheduled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    optimizer = kind(param_groups(model), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) if scheduled else None
    return model, optimizer, scheduler


def train(kind, scheduled, wrap_step=lambda f: f, wrap_all=lambda f: f):
    """STEPS steps; the parameters, the hits, and how often hooks were called."""
    model, optimizer, scheduler = made(kind, scheduled)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    step = wrap_step(optimizer.step)

    def one():
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()

    one = wrap_all(one)
    for _ in range(STEPS):
        one()
        if scheduler is not None:
            scheduler.step()
    assert len(called) == STEPS
    return list(model.parameters()), optimizer.cache_stats()["hits"]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("kind", [CacheMuon, Muon])
def test_a_compiled_step_is_the_step(kind, scheduled):
    expected, hits = train(kind, scheduled)
    found, found_hits = train(kind, scheduled, wrap_step=torch.compile)
    assert found_hits == hits and (hits > 0) is (kind is CacheMuon)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_compiled_function_may_call_backward_and_step(scheduled):
    """With the backend that runs what was traced as it is, so that forward and backward are equal too."""
    expected, hits = train(CacheMuon, scheduled)
    found, found_hits = train(CacheMuon, scheduled, wrap_all=lambda f: torch.compile(f, backend="eager"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1  # the forward
    assert found_hits == hits > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


COMPILER = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))

INDUCTOR = pytest.param(
    None, "inductor", marks=pytest.mark.skipif(not COMPILER, reason="inductor needs a C++ compiler")
)


@pytest.mark.filterwarnings(
    "ignore:`torch._prims_common.check` is deprecated:FutureWarning"
)  # inductor's own
@pytest.mark.parametrize(("clip", "backend"), [(0.0, "eager"), (None, "eager"), INDUCTOR])
def test_reuse_and_refresh_compile_as_one_graph_each(clip, backend):
    """Tensors in, tensors out, nothing read on the host: so a compiler takes them whole."""
    solver = GramNS(Schedule(GRAM.triples[:2]), restarts=(1,))  # the steps of a solve are alike
    cache, workspace = CacheGNS(solver, clip=clip), Workspace()
    generator = torch.Generator().manual_seed(0)
    X, near = (normalize(torch.randn(2, 24, 40, generator=generator)) for _ in range(2))
    block = random_block(24, cache.columns(24), seed=0, step=0)
    scale = torch.full((2, 1, 1), 0.5)

    def refresh(X):
        return cache.fresh.solve_with_transform(X, workspace)

    def reuse(U, scale, Q, block):
        (D,), residual = cache.reuse([U], scale, -scale, Q, block, 5.0, workspace)
        return D, residual

    D, Q = (one.clone() for one in refresh(X))
    compiled = torch.compile(refresh, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(X), (D, Q))
    U = 2 * (X + 0.1 * near)
    expected = tuple(one.clone() for one in reuse(U, scale, Q, block))
    compiled = torch.compile(reuse, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(U, scale, Q, block), expected)
