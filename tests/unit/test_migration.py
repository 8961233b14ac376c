"""docs/migration.md: what each other Muon's arguments become here, and what its state does.

Each mapping is followed for 20 steps with the same gradients. The original iterates in bf16, which makes its
directions err by some percent; made to iterate in float32, it agrees with ours to rounding, and that
proves the formula. Where the original cannot be installed, its formula stands here in float64.
"""

import copy
import math
import warnings
from types import SimpleNamespace

import muon
import pytest
import pytorch_optimizer
import torch

from cachemuon import CacheMuon, GramNS, Muon, StandardNS, polar_express
from cachemuon.newton_schulz.schedules import QUINTIC

SHAPES = [(12, 30), (30, 12), (16, 16)]
JORDAN = StandardNS(QUINTIC)
FIVE = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # dion's, timm's and NVIDIA's default


def weights(shapes=SHAPES, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def gradient(param, index, step):
    # A constant part, so that momentum points somewhere.
    g = torch.Generator().manual_seed(100 * index)
    constant = torch.randn(param.shape, generator=g)
    g.manual_seed(100 * index + step + 1)
    return (constant + torch.randn(param.shape, generator=g)).to(param.dtype)


def run(optimizer, params, steps=20, start=0):
    for step in range(start, start + steps):
        for index, param in enumerate(params):
            param.grad = gradient(param, index, step)
        optimizer.step()
    return params


@torch.no_grad()
def apart(mine, theirs, start):
    """The largest distance of two results, as a fraction of the way."""
    triples = zip(mine, theirs, start, strict=True)
    return max(float(torch.dist(a, b) / torch.dist(b, c)) for a, b, c in triples)


def follow(original, ours, shapes=SHAPES):
    start, theirs, mine = (weights(shapes) for _ in range(3))
    run(original(theirs), theirs)
    run(ours(mine), mine)
    return apart(mine, theirs, start)


# Twenty steps with directions in bf16 ended 0.1% to 1.0% of the way from those in float32.
BF16 = 0.02
# What the order of its sums leaves of float32: 6e-7 to 6.2e-6, the most where the way is short.
FLOAT32 = 1e-5


@pytest.fixture(params=["as it is", "in float32"])
def tolerance(request, monkeypatch):
    """As the originals are; and with `bfloat16()`, and pytorch_optimizer's default dtype, meaning float32."""
    if request.param == "as it is":
        return BF16
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.to(torch.float32, copy=True))
    monkeypatch.setattr(
        "pytorch_optimizer.optimizer.muon.base.zero_power_via_newton_schulz_5",
        in_float32(pytorch_optimizer.optimizer.muon.base.zero_power_via_newton_schulz_5),
    )
    monkeypatch.setattr(
        "pytorch_optimizer.optimizer.muon.base.zero_power_via_gram_newton_schulz",
        in_float32(pytorch_optimizer.optimizer.muon.base.zero_power_via_gram_newton_schulz),
    )
    return FLOAT32


def in_float32(function):
    return lambda *args, **kwargs: function(*args, **kwargs, dtype=torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
    ],
    ids=["default", "no nesterov", "rms"],
)
def test_torch(tolerance, settings):
    settings = {"lr": 0.02, **settings}
    mapped = lambda p: Muon(p, solver=JORDAN, **settings)  # noqa: E731
    assert follow(lambda p: torch.optim.Muon(p, **settings), mapped) < tolerance


def test_torch_with_another_schedule(tolerance):
    settings = {"lr": 0.02, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8}
    assert follow(lambda p: torch.optim.Muon(p, **settings), lambda p: Muon(p, **settings)) < tolerance


def test_jordan(tolerance):
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    mapped = lambda p: Muon(p, solver=JORDAN, **settings)  # noqa: E731
    assert follow(lambda p: muon.SingleDeviceMuon(p, **settings), mapped) < tolerance


def test_jordans_defaults(tolerance):
    mapped = lambda p: Muon(p, lr=0.02, weight_decay=0, solver=JORDAN)  # noqa: E731
    assert follow(muon.SingleDeviceMuon, mapped) < tolerance


def jordans_convolutions(params):
    """SingleDeviceMuon with the last line it lacks in 0.1.0: its update stays `(out, in kh kw)`."""
    buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step():
        for p, buffer in zip(params, buffers, strict=True):
            p.sub_(0.02 * muon.muon_update(p.grad, buffer).reshape(p.shape))

    return SimpleNamespace(step=step)


def test_jordan_scales_convolutions_by_their_kernel(tolerance):
    # By sqrt(max(1, kh / kw)), where ours is sqrt(max(1, out / (in kh kw))).
    square, long = (40, 2, 3, 3), (40, 2, 4, 1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        run(muon.SingleDeviceMuon(p := weights([square])), p, 1)

    def mapped(lr, ratio):
        return lambda p: Muon(p, lr=lr, weight_decay=0, adjust_lr_fn=ratio, solver=JORDAN)

    assert follow(jordans_convolutions, mapped(0.02, "none"), [square]) < tolerance
    assert follow(jordans_convolutions, mapped(0.02 * math.sqrt(4 / 1), "none"), [long]) < tolerance
    distance = follow(jordans_convolutions, mapped(0.02, "original"), [square])
    assert distance == pytest.approx(math.sqrt(40 / 18) - 1, abs=BF16)


def test_jordan_with_adam(tolerance):
    def original(params):
        *matrices, bias = params
        return muon.SingleDeviceMuonWithAuxAdam(
            [{"params": matrices, "use_muon": True, "lr": 0.03}, {"params": [bias], "use_muon": False}]
        )

    def ours(params):
        *matrices, bias = params
        adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
        return Muon(
            [
                {"params": matrices, "lr": 0.03, "weight_decay": 0},
                {"params": [bias], "use_muon": False, **adam},
            ],
            solver=JORDAN,
        )

    assert follow(original, ours, [*SHAPES, (7,)]) < tolerance


@pytest.mark.parametrize("adjusted", [False, True])
def test_pytorch_optimizer(tolerance, adjusted):
    def original(params):
        groups = [{"params": params, "use_muon": True}]
        return pytorch_optimizer.Muon(groups, lr=0.02, weight_decay=0.2, use_adjusted_lr=adjusted)

    ratio = "match_rms_adamw" if adjusted else "original"
    mapped = lambda p: Muon(p, 0.02, weight_decay=0.2, adjust_lr_fn=ratio, solver=JORDAN)  # noqa: E731
    assert follow(original, mapped, [*SHAPES, (10, 3, 3, 3)]) < tolerance


def test_pytorch_optimizer_gram(tolerance):
    # Its default dtype there is fp16, which errs less than bf16.
    def original(params):
        groups = [{"params": params, "use_muon": True}]
        return pytorch_optimizer.Muon(groups, lr=0.02, ns_method="gram_newton_schulz", ns_coeffs="quintic")

    solver = GramNS(Muon(weights(), ns_coefficients=FIVE).defaults["solver"].schedule, restarts=(2,))
    mapped = lambda p: Muon(p, lr=0.02, weight_decay=0, solver=solver)  # noqa: E731
    assert follow(original, mapped) < tolerance


def reference(params, *, lr, momentum, nesterov, average, decay, ratio, triples, add=0.0, floor=0.0):
    """One Muon in float64 by its formulas; `step()` reads `param.grad`. Sums or averages its momentum."""
    buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step():
        for W, B in zip(params, buffers, strict=True):
            G = W.grad * (1 - momentum) if average else W.grad
            B.mul_(momentum).add_(G)
            U = momentum * B + G if nesterov else B
            X = U.flatten(1)
            X = X / max(float(X.norm()) + add, floor)
            tall = X.shape[0] > X.shape[1]
            X = X.mT if tall else X
            for a, b, c in triples:
                A = X @ X.mT
                X = a * X + b * A @ X + c * A @ A @ X
            D = (X.mT if tall else X).reshape(W.shape)
            W.mul_(1 - lr * decay).sub_(lr * ratio(W.shape[0], W[0].numel()) * D)

    return SimpleNamespace(step=step, buffers=buffers)


# What 20 steps leave of float64: 2e-15 to 1.1e-13.
FLOAT64 = 1e-12


def follow_formula(ours, shapes=SHAPES, **formula):
    start, theirs, mine = (weights(shapes, torch.float64) for _ in range(3))
    run(reference(theirs, **formula), theirs)
    run(ours(mine), mine)
    assert apart(mine, theirs, start) < FLOAT64


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_sum_and_average_have_the_same_direction(average, nesterov):
    # B = M / (1 - momentum) at every step, Nesterov's update too, and a polar factor does not see scales.
    follow_formula(
        lambda p: Muon(p, 0.02, 0.1, 0.9, nesterov, eps=0, adjust_lr_fn="none", solver=JORDAN),
        **{"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "average": average},
        **{"decay": 0.1, "ratio": lambda rows, cols: 1.0, "triples": QUINTIC.triples},
    )


def test_moonlight():
    follow_formula(
        lambda p: Muon(p, 1e-3, 0.1, adjust_lr_fn="match_rms_adamw", eps=1e-7 * 0.05, solver=JORDAN),
        **{"lr": 1e-3, "momentum": 0.95, "nesterov": True, "average": False, "add": 1e-7},
        **{"decay": 0.1, "ratio": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols))},
        triples=QUINTIC.triples,
    )


def by_shape(params, lr, decay, ratio, **settings):
    """A ratio that is none of ours: as a group for each, with `lr ratio` and `decay / ratio`."""
    groups = []
    for p in params:
        r = ratio(p.shape[0], p[0].numel())
        groups.append({"params": [p], "lr": lr * r, "weight_decay": decay / r})
    return Muon(groups, adjust_lr_fn="none", **settings)


def test_dion_spectral_norm():
    ratio = lambda rows, cols: math.sqrt(rows / cols)  # noqa: E731
    follow_formula(
        lambda p: by_shape(p, 0.01, 0.01, ratio, nesterov=False, ns_coefficients=FIVE, eps=1e-8 * 0.05),
        [*SHAPES, (10, 3, 3, 3)],
        **{"lr": 0.01, "momentum": 0.95, "nesterov": False, "average": False, "add": 1e-8},
        **{"decay": 0.01, "ratio": ratio, "triples": FIVE},
    )


def test_dion_rms_norm():
    follow_formula(
        lambda p: Muon(
            p,
            lr=0.01,
            weight_decay=0.01,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
            ns_coefficients=FIVE,
            eps=1e-8 * 0.05,
        ),
        **{"lr": 0.01, "momentum": 0.95, "nesterov": False, "average": False, "add": 1e-8},
        **{"decay": 0.01, "ratio": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)), "triples": FIVE},
    )


def test_timm():
    follow_formula(
        lambda p: Muon(
            p,
            lr=0.02,
            weight_decay=0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
            ns_coefficients=FIVE,
            eps=0,
        ),
        [*SHAPES, (10, 3, 3, 3)],
        **{"lr": 0.02, "momentum": 0.95, "nesterov": False, "average": True, "floor": 1e-7},
        **{"decay": 0.0, "ratio": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)), "triples": FIVE},
    )


def test_nvidia():
    # "spectral": sqrt(max(rows, cols)), five times match_rms_adamw. Decay is of the unadjusted rate.
    follow_formula(
        lambda p: Muon(
            p,
            lr=5 * 3e-4,
            weight_decay=0.01 / 5,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
            ns_coefficients=FIVE,
            eps=0,
        ),
        **{"lr": 3e-4, "momentum": 0.95, "nesterov": False, "average": True, "floor": 1e-7},
        **{"decay": 0.01, "ratio": lambda rows, cols: math.sqrt(max(rows, cols)), "triples": FIVE},
    )


# States


def groups_of(params, **adam):
    *matrices, bias = params
    return [{"params": matrices}, {"params": [bias], "use_muon": False, **adam}]


def mixed():
    return weights([*SHAPES, (7,)])


def jordans_with_adam(params):
    *matrices, bias = params
    return muon.SingleDeviceMuonWithAuxAdam(
        [{"params": matrices, "use_muon": True, "lr": 0.03}, {"params": [bias], "use_muon": False}]
    )


def pytorch_optimizers(params):
    *matrices, bias = params
    return pytorch_optimizer.Muon(
        [{"params": matrices, "use_muon": True, "lr": 0.03}, {"params": [bias], "use_muon": False}]
    )


ADAMS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}


@pytest.mark.parametrize("make", [jordans_with_adam, pytorch_optimizers])
def test_a_state_with_adam_goes_on_as_there(make, monkeypatch, tolerance):
    theirs, start = mixed(), mixed()
    original = make(theirs)
    run(original, theirs, 5)
    mine = copy.deepcopy(theirs)
    optimizer = Muon(groups_of(mine, **ADAMS), lr=0.03, weight_decay=0, solver=JORDAN)
    keys = [set(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(original.state_dict())  # without a warning: nothing differs
    assert [set(group) for group in optimizer.param_groups] == keys
    step = optimizer.state[mine[-1]]["step"]
    assert isinstance(step, torch.Tensor) and step == 5
    run(original, theirs, 15, start=5)
    run(optimizer, mine, 15, start=5)
    assert apart(mine, theirs, start) < tolerance


def test_a_state_of_single_device_muon_goes_on_as_there(tolerance):
    theirs, start = weights(), weights()
    original = muon.SingleDeviceMuon(theirs)
    run(original, theirs, 5)
    mine = copy.deepcopy(theirs)
    optimizer = Muon(mine, lr=0.02, weight_decay=0, solver=JORDAN)
    optimizer.load_state_dict(original.state_dict())
    run(original, theirs, 15, start=5)
    run(optimizer, mine, 15, start=5)
    assert apart(mine, theirs, start) < tolerance


MOONLIGHT = {"lr": 1e-3, "wd": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
MOONLIGHT |= {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
DION = {"lr": 1e-3, "mu": 0.9, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "step": 4, "epsilon": 1e-8}
DION |= {"nesterov": True, "flatten": False, "adjust_lr": "rms_norm"}


def moonlights(matrix, vector):
    return {
        "state": {
            0: {"use_muon": True, "momentum_buffer": matrix},
            1: {"use_muon": False, "step": 4, "moment1": vector, "moment2": vector.square()},
        },
        "param_groups": [{**MOONLIGHT, "params": [0, 1]}],
    }


def dions(matrix, vector):
    return {
        "state": {0: {"momentum": matrix}, 1: {"momentum": vector, "variance": vector.square()}},
        "param_groups": [
            {**DION, "algorithm": "muon", "params": [0]},
            {**DION, "algorithm": "adamw", "params": [1]},
        ],
    }


@pytest.mark.parametrize("make", [moonlights, dions])
def test_a_sum_becomes_an_average(make):
    # Their momentum buffers are sums: a buffer of ten times our scale would outweigh the next gradients.
    W, b = weights([(6, 10), (7,)])
    theirs, theirs_b = torch.ones(6, 10), torch.ones(7)
    adam = {"params": [b], "use_muon": False, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = Muon([{"params": [W]}, adam], 1e-3, 0.1, 0.9, adjust_lr_fn="match_rms_adamw", eps=1e-8)
    optimizer.load_state_dict(make(theirs, theirs_b))
    torch.testing.assert_close(optimizer.state[W]["momentum_buffer"], torch.full((6, 10), 0.1))
    assert set(optimizer.state[b]) == {"exp_avg", "exp_avg_sq", "step"} and optimizer.state[b]["step"] == 4
    assert bool((theirs == 1).all())
    run(optimizer, [W, b], 2)


@pytest.mark.parametrize("make", [Muon, CacheMuon])
def test_live_settings_stay_and_one_warning_names_those_that_differ(make):
    theirs = weights()
    original = torch.optim.Muon(theirs, lr=0.03, weight_decay=0.2, nesterov=False)
    run(original, theirs, 3)
    mine = copy.deepcopy(theirs)
    optimizer = make(mine, lr=0.01, adjust_lr_fn="match_rms_adamw")
    before = dict(optimizer.param_groups[0])
    with pytest.warns(UserWarning, match="a state of torch.optim.Muon was loaded") as caught:
        optimizer.load_state_dict(original.state_dict())
    assert len(caught) == 1
    text = str(caught[0].message)
    for words in (
        "kept lr=0.01, saved 0.03",
        "kept weight_decay=0.1, saved 0.2",
        "kept nesterov=True, saved False",
        "kept adjust_lr_fn='match_rms_adamw', saved None",
        "kept the schedule 'gram', saved (3.4445, -4.775, 2.0315) for 5 steps",
    ):
        assert words in text
    assert "momentum=" not in text and "eps=" not in text  # equal
    group = optimizer.param_groups[0]
    assert {**group, "params": 0} == {
        **before,
        "params": 0,
    }  # nor are ns_steps and ns_coefficients left in it
    for a, b in zip(theirs, mine, strict=True):
        assert torch.equal(original.state[a]["momentum_buffer"], optimizer.state[b]["momentum_buffer"])
    run(optimizer, mine, 2)


def test_settings_of_adam_are_compared_by_their_own_names():
    theirs = mixed()
    original = pytorch_optimizers(theirs)
    run(original, theirs, 2)
    optimizer = Muon(groups_of(mixed()), lr=0.03, weight_decay=0, solver=StandardNS(polar_express()))
    with pytest.warns(UserWarning) as caught:
        optimizer.load_state_dict(original.state_dict())
    (text,) = [str(warning.message) for warning in caught]
    assert "group 0: kept the schedule 'polar-express', saved [(3.4445, -4.775, 2.0315)] for 5 steps" in text
    assert "group 1: kept lr=0.001, saved 0.0003" in text
    assert "kept betas=(0.9, 0.999), saved (0.9, 0.95)" in text


def refused(optimizer, params, state, words):
    run(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entries in before["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(after["state"][key][name], value, rtol=0, atol=0, equal_nan=True)
    run(optimizer, params, 1)


def test_a_parameter_of_adams_is_not_given_to_muon():
    theirs = mixed()
    original = jordans_with_adam(theirs)
    run(original, theirs, 2)
    *matrices, last = mine = weights([*SHAPES, (7, 9)])
    optimizer = Muon([{"params": matrices}, {"params": [last]}])
    words = (
        r"group1.param0: with use_muon=True its state must be \['momentum_buffer'\], got \['exp_avg'.*order"
    )
    refused(optimizer, mine, original.state_dict(), words)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_state_of_adam_alone_says_that_a_new_optimizer_must_start(kind, grouped):
    theirs, mine = mixed(), mixed()
    original = kind([{"params": theirs[:-1]}, {"params": theirs[-1:]}] if grouped else theirs)
    run(original, theirs, 1)
    words = r"Adam or AdamW: Adam trained the matrices .* new optimizer must start for them. Load the model's"
    refused(Muon(groups_of(mine, **ADAMS)), mine, original.state_dict(), words)


def test_groups_of_other_sizes_are_refused():
    theirs = mixed()
    original = jordans_with_adam(theirs)
    run(original, theirs, 1)
    mine = mixed()
    optimizer = Muon([{"params": mine[:2]}, {"params": mine[2:3]}, groups_of(mine)[1]])
    words = r"Keller Jordan's Muon must have groups of as many .* \[2, 1, 1\], or all .* got \[3, 1\]"
    refused(optimizer, mine, original.state_dict(), words)


def test_moments_of_another_shape_are_refused():
    theirs = mixed()
    original = jordans_with_adam(theirs)
    run(original, theirs, 1)
    mine = weights([*SHAPES, (8,)])
    optimizer = Muon(groups_of(mine, **ADAMS), lr=0.03, weight_decay=0)
    refused(
        optimizer, mine, original.state_dict(), r"group1.param0: exp_avg must have shape \(8,\), got \(7,\)"
    )


def test_an_unknown_optimizer_is_refused():
    theirs = weights()
    original = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)  # a sum, and no Muon
    run(original, theirs, 1)
    mine = weights()
    words = (
        r"state_dict must be of this optimizer, or of one of timm's Muon, .* got groups with \['dampening'"
    )
    refused(Muon(mine), mine, original.state_dict(), words)


def test_a_warning_that_is_an_error_changes_nothing():
    theirs, mine = weights(), weights()
    original = torch.optim.Muon(theirs, lr=0.03)
    run(original, theirs, 1)
    optimizer = Muon(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"kept lr=0.001, saved 0.03"):
            optimizer.load_state_dict(original.state_dict())
    assert not optimizer.state
