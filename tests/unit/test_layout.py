"""How a tensor is read as matrices, and that its parts are worked on as matrices of their own."""

import pytest
import torch
from torch import nn

from cachemuon import CacheMuon, Muon
from cachemuon.routing.layout import matrix_layout, matrix_shape, parts

MAKES = {
    "muon": lambda groups: Muon(groups, lr=0.05),
    "schedule": lambda groups: CacheMuon(groups, lr=0.05, max_age=3, cache_all=True),
    "residual": lambda groups: CacheMuon(groups, lr=0.05, max_age=3, cache_all=True, gate="residual"),
}


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(make, values, steps=8, **settings):
    """Parameters after some steps; their gradients turn slowly."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = MAKES[make]([{"params": params, **settings}])
    for step in range(steps):
        for param, gradient in zip(params, yield_gradients(values, step), strict=True):
            param.grad = gradient
        optimizer.step()
    return params, optimizer


def yield_gradients(values, step):
    for number, value in enumerate(values):
        yield random(value.shape, number) + 0.2 * random(value.shape, 100 * step + number)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("split", [3, (12, 12, 12), (8, 16, 12)])
def test_the_parts_of_a_matrix_are_matrices_of_their_own(make, split):
    whole = random((36, 20), 7)
    sizes = parts(36, split)
    (param,), optimizer = trained(make, [whole], split=split, adjust_lr_fn="original")
    alone = [nn.Parameter(part.clone()) for part in whole.split(sizes)]
    other = MAKES[make]([{"params": alone, "adjust_lr_fn": "original"}])
    for step in range(8):
        (gradient,) = yield_gradients([whole], step)
        for one, part in zip(alone, gradient.split(sizes), strict=True):
            one.grad = part.clone()
        other.step()
    assert torch.equal(param, torch.cat(list(alone)))
    stats, apart = optimizer.cache_stats(), other.cache_stats()
    assert list(stats["matrices"]) == [f"group0.param0[{i}]" for i in range(3)]
    assert [stats[key] for key in ("calls", "hits", "flops")] == [
        apart[key] for key in ("calls", "hits", "flops")
    ]


@pytest.mark.parametrize("make", MAKES)
def test_a_matrix_that_lies_transposed_takes_the_steps_of_one_that_does_not(make):
    value = random((24, 36), 7)  # (in, out)
    lying, _ = trained(make, [value], transposed=True, split=3)
    standing = nn.Parameter(value.T.contiguous().clone())
    optimizer = MAKES[make]([{"params": [standing], "split": 3}])
    for step in range(8):
        (gradient,) = yield_gradients([value], step)
        standing.grad = gradient.T.contiguous()
        optimizer.step()
    torch.testing.assert_close(lying[0].T, standing, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("ratio", ["none", "match_rms_adamw"])
def test_a_matrix_declared_transposed_is_split_along_its_inputs(make, ratio):
    """As the heads of `o_proj` lie."""
    whole = random((36, 20), 7)
    settings = {"adjust_lr_fn": ratio, "normalize": None}  # which knows outputs from inputs
    (param,), _ = trained(make, [whole], split=4, transposed=True, **settings)
    alone = [nn.Parameter(part.clone()) for part in whole.split(5, dim=1)]
    other = MAKES[make]([{"params": alone, **settings}])
    for step in range(8):
        (gradient,) = yield_gradients([whole], step)
        for one, part in zip(alone, gradient.split(5, dim=1), strict=True):
            one.grad = part.clone()
        other.step()
    assert torch.equal(param, torch.cat(list(alone), dim=1))


def test_transposed_changes_the_ratio_and_nothing_else():
    value, rows = random((10, 40), 3), {}
    for transposed in (False, True):
        (param,), _ = trained("muon", [value], steps=1, transposed=transposed, weight_decay=0.0)
        rows[transposed] = value - param.detach()
    torch.testing.assert_close(rows[True], 2 * rows[False])  # sqrt(40 / 10), where outputs are the columns


@pytest.mark.parametrize("make", MAKES)
def test_a_split_state_is_saved_and_loaded(make):
    value = random((36, 20), 7)
    (param,), optimizer = trained(make, [value], steps=5, split=(8, 16, 12))
    copy = nn.Parameter(param.detach().clone())
    other = MAKES[make]([{"params": [copy], "split": (8, 16, 12)}])
    other.load_state_dict(optimizer.state_dict())
    for one, engine in ((param, optimizer), (copy, other)):
        (one.grad,) = yield_gradients([value], 5)
        engine.step()
    assert torch.equal(param, copy)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"split": 5}, "split must divide the 36 outputs"),
        ({"split": (30, 5)}, "split must be sizes that add up to the 36 outputs"),
        ({"split": 0}, "split must be an integer >= 1"),
        ({"split": True}, "split must be an integer >= 1"),
        ({"split": "qkv"}, "split must be an integer >= 1"),
        ({"transposed": 1}, "transposed must be True or False"),
        ({"split": 3, "transposed": True}, "split must divide the 20 outputs"),
        ({"view": "rows"}, "view must be one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        CacheMuon([{"params": [nn.Parameter(torch.zeros(36, 20))], **settings}])


def test_a_list_of_sizes_becomes_a_tuple():
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(36, 20))], "split": [18, 18]}])
    assert optimizer.param_groups[0]["split"] == (18, 18)


def test_a_convolution_is_split_by_its_outputs():
    read = matrix_layout((12, 3, 2, 2), split=2)
    assert [piece.sides for piece in read.views] == [(6, 12), (6, 12)]
    assert matrix_shape((12, 3, 2, 2)) == (1, 12, 12)
    tensor = torch.arange(144.0).view(12, 3, 2, 2)
    assert torch.equal(read.split(tensor)[1], tensor[6:])
