"""Directions divided by their second moments, and given the length of the last solved one."""

from functools import partial

import numpy as np
import pytest
import torch
from reference.normuon import NorMuon
from torch import nn
from unclipped import PAPERS

from cachemuon import CacheMuon, GramNS, Muon
from cachemuon.engine.orthogonalize import normalize_directions

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.9
SETTINGS = dict(lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="none")


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def follow(W, group, matrices_of, inputs, steps=20):
    """Train W, and each of its matrices, as (outputs, inputs), by the reference; both at the end."""
    param = nn.Parameter(W.clone())
    normalize = "factored" if inputs else "rows"
    optimizer = Muon([{"params": [param], **group}], solver=GramNS(), normalize=normalize, **SETTINGS)
    settings = dict(lr=LR, momentum=MOMENTUM, decay=DECAY, inputs=inputs)
    references = [NorMuon(one.numpy(), **settings) for one in matrices_of(W)]
    for step in range(steps):
        param.grad = numbers(*W.shape, seed=step) * torch.linspace(0.1, 3, W.shape[-1], dtype=torch.float64)
        for reference, G in zip(references, matrices_of(param.grad), strict=True):
            reference.step(G.numpy())
        optimizer.step()
    return matrices_of(param.detach()), [reference.W for reference in references]


@pytest.mark.parametrize("inputs", [False, True], ids=["rows", "factored"])
@pytest.mark.parametrize(
    "shape, group, matrices_of",
    [
        ((12, 20), {}, lambda W: [W]),
        ((20, 12), {}, lambda W: [W]),
        ((12, 12), {}, lambda W: [W]),
        ((12, 20), {"transposed": True}, lambda W: [W.T]),
        ((20, 12), {"transposed": True}, lambda W: [W.T]),
        ((12, 12), {"transposed": True}, lambda W: [W.T]),
        ((24, 10), {"split": (8, 12, 4)}, lambda W: W.split([8, 12, 4])),
        ((10, 24), {"split": 3, "transposed": True}, lambda W: [one.T for one in W.split(8, dim=1)]),
        ((6, 2, 3, 3), {}, lambda W: [W.flatten(1)]),
        ((3, 8, 14), {}, lambda W: W.unbind(0)),
        ((3, 14, 8), {"transposed": True}, lambda W: [one.T for one in W.unbind(0)]),
    ],
    ids=[
        *("wide", "tall", "square", "wide transposed", "tall transposed", "square transposed"),
        *("split", "split transposed", "convolution", "stack", "stack transposed"),
    ],
)
def test_twenty_steps_of_normuon(shape, group, matrices_of, inputs):
    ours, theirs = follow(numbers(*shape, seed=99), group, matrices_of, inputs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-8)  # coefficients as printed


@pytest.mark.parametrize("normalize", ["rows", "factored"])
def test_a_reused_direction_is_divided_and_as_long_as_the_last_solved_one(normalize):
    start, settings = numbers(16, 24, seed=99), dict(momentum=0.9, gamma=1e6, max_age=4, cache_all=True)
    cached, plain = (
        CacheMuon(
            [nn.Parameter(start.clone())], lr=1.0, normalize=way, max_norm=None, **{**PAPERS, **settings}
        )
        for way in (normalize, None)
    )
    reference = NorMuon(start.numpy(), lr=0, momentum=0, decay=0, inputs=normalize == "factored")
    length, hits = 0.0, 0
    for step in range(12):
        steps = []
        for optimizer in (cached, plain):
            (W,) = optimizer.param_groups[0]["params"]
            with torch.no_grad():
                W.zero_()
            W.grad = numbers(16, 24, seed=step)
            optimizer.step()
            steps.append(W.detach().numpy().copy())
        hit = plain.events()["group0.param0"].hit
        hits += hit
        length = length if hit else np.linalg.norm(steps[1])
        np.testing.assert_allclose(steps[0], reference.normalized(steps[1], length), rtol=0, atol=1e-10)
    assert hits > 6


def test_where_the_residual_is_above_gamma_a_step_stays_as_short_as_it_was_cut():
    W = nn.Parameter(torch.zeros(16, 24))
    optimizer = CacheMuon([W], lr=1.0, gamma=1e-3, momentum=0.0, cache_all=True, **PAPERS)
    lengths = {}
    for step in range(3):
        before, W.grad = W.detach().clone(), numbers(16, 24, seed=step).float()
        optimizer.step()
        outcome = optimizer.events()["group0.param0"].outcome
        lengths[outcome] = float(torch.dist(W.detach(), before))
    assert lengths["first"] > 3.5 and lengths["bounded"] < 1.5


@pytest.mark.parametrize("make", [partial(Muon, normalize="rows"), partial(CacheMuon, cache_all=True)])
def test_a_gradient_that_is_not_finite_leaves_the_moments_and_zeros_too(make):
    W = nn.Parameter(torch.zeros(8, 12))
    optimizer = make([W], lr=0.1)
    for seed in range(3):
        W.grad = numbers(8, 12, seed=seed).float()
        optimizer.step()
    before = optimizer.state[W]["moments"].clone(), W.detach().clone()
    W.grad[2, 3] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        optimizer.step()
        optimizer.cache_stats()
        optimizer.step()
    assert torch.equal(optimizer.state[W]["moments"], before[0]) and torch.equal(W.detach(), before[1])

    V = nn.Parameter(torch.ones(8, 12))
    optimizer = make([V], lr=0.1, weight_decay=0.0)
    V.grad = torch.zeros(8, 12)
    optimizer.step()
    assert torch.equal(V.detach(), torch.ones(8, 12)) and not optimizer.state[V]["moments"].any()


def test_rows_and_columns_that_are_zero_stay_zero():
    W = nn.Parameter(torch.zeros(8, 12))
    optimizer = CacheMuon([W], lr=0.1, cache_all=True)
    for step in range(4):
        W.grad = numbers(8, 12, seed=step).float()
        W.grad[3] = W.grad[:, 5] = 0
        optimizer.step()
    assert W.isfinite().all() and not W[3].any() and not W[:, 5].any() and W[4].all() < 1


def test_another_setting_begins_with_other_moments():
    W = nn.Parameter(torch.zeros(8, 12))
    optimizer = CacheMuon([W], lr=0.1, cache_all=True, normalize=None)
    for step, normalize in enumerate([None, None, "factored", "factored", "rows", "rows"]):
        optimizer.param_groups[0]["normalize"] = normalize
        before, W.grad = W.detach().clone(), numbers(8, 12, seed=step).float()
        optimizer.step()
        assert (
            0.1 < torch.dist(W.detach(), before) < 1
        )  # a hit whose last solved norm nobody knows has its own
    assert optimizer.state[W]["moments"].shape == (1 + 8,)


def test_a_setting_of_normalize_is_refused():
    for make in (Muon, CacheMuon):
        with pytest.raises(
            ValueError, match="normalize must be one of 'rows', 'factored', None, got 'columns'"
        ):
            make([nn.Parameter(torch.zeros(2, 3))], normalize="columns")
    with pytest.raises(ValueError, match="paper takes no normalize"):
        CacheMuon.paper([nn.Parameter(torch.zeros(2, 3))], normalize="rows")


def test_saved_moments_of_another_shape_are_refused():
    W = nn.Parameter(torch.zeros(8, 12))
    optimizer = CacheMuon([W], lr=0.1, cache_all=True)
    W.grad = numbers(8, 12).float()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["moments"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"moments must have shape \(21,\), got \(3,\)"):
        CacheMuon([W], lr=0.1).load_state_dict(saved)


def test_a_compiled_normalization_is_the_same():
    D, moments = numbers(2, 6, 9), numbers(2, 1 + 6 + 9).abs()
    factor, good = torch.full((2, 1), -0.1, dtype=torch.float64), torch.tensor([[True], [False]])
    compiled = torch.compile(normalize_directions, fullgraph=True, backend="aot_eager")
    for lengthen in (None, torch.tensor([[True], [False]])):
        results = []
        for run in (normalize_directions, compiled):
            own = D.clone(), moments.clone()
            run(*own, factor, good, lengthen, torch.empty_like(D))
            results.append(own)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
