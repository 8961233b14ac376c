"""The laboratory's rivals beside their formulas in float64, and in a training."""

import math

import pytest
import torch
from made_tokens import write_tokens

from cachemuon import GramNS
from cachemuon.flops import ExecutedCost, PaperCost
from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.models import GPT2Config, ResNetConfig, build
from cachemuon_lab.optimizers import Meter, make_optimizer
from cachemuon_lab.rivals import AdaMuon, Dion2, Dion3, Rival, soap
from cachemuon_lab.train import train

LR, MU, DECAY, BETA2 = 0.1, 0.9, 0.02, 0.8
SHAPES = [(6, 10), (10, 6), (8, 8), (5, 3, 2, 2), (6, 10)]  # two of one shape, which are one batch
KINDS = ("dion2", "dion3", "adamuon", "soap")


class Reference:
    """One matrix, element by element and row by row, in float64."""

    def __init__(self, W, kind, fraction=0.5, ratio=1.0):
        rows = W.shape[0]
        self.W, self.kind, self.fraction, self.ratio = W.double().reshape(rows, -1), kind, fraction, ratio
        self.M = torch.zeros_like(self.W)
        self.V = torch.zeros_like(self.W)  # Dion3 needs one number in each row

    def step(self, G):
        G = G.double().reshape(self.W.shape)
        rows, cols = self.W.shape
        D = torch.zeros_like(self.W)
        if self.kind == "adamuon":
            self.M = MU * self.M + G
            signs = [[(value > 0) - (value < 0) for value in row] for row in self.M.tolist()]
            U = GramNS()(torch.tensor(signs, dtype=torch.float64))
            for i in range(rows):
                for j in range(cols):
                    self.V[i, j] = BETA2 * self.V[i, j] + (1 - BETA2) * U[i, j] ** 2
                    D[i, j] = U[i, j] / (math.sqrt(self.V[i, j]) + 1e-8)
            D *= math.sqrt(min(rows, cols) / (D * D).sum())
        else:
            self.M += G
            by_columns = self.kind == "dion2" and rows > cols
            lines = self.M.T if by_columns else self.M  # a view, as is what it is indexed with
            lengths = [sum(abs(value) for value in line) for line in lines.tolist()]
            number = math.ceil(self.fraction * len(lengths))
            chosen = sorted(sorted(range(len(lengths)), key=lambda i: -lengths[i])[:number])
            U = GramNS()(torch.stack([lines[i] for i in chosen]))
            if self.kind == "dion3":
                before = math.sqrt((U * U).sum())
                for place, i in enumerate(chosen):
                    mean = sum(value**2 for value in U[place].tolist()) / cols
                    self.V[i, 0] = BETA2 * self.V[i, 0] + (1 - BETA2) * mean
                    U[place] /= math.sqrt(self.V[i, 0]) + 1e-8
                U *= before / math.sqrt((U * U).sum())
            for place, i in enumerate(chosen):
                lines[i] *= MU
                (D.T if by_columns else D)[i] = U[place]
        self.W = (1 - LR * DECAY) * self.W - LR * self.ratio * D


def rival(kind, params, **settings):
    settings = {"lr": LR, "momentum": MU, "weight_decay": DECAY, **settings}
    groups = [{"params": params, "use_muon": True}]
    if kind == "adamuon":
        return AdaMuon(groups, beta2=BETA2, **settings)
    if kind == "dion3":
        return Dion3(groups, beta2=BETA2, **settings)
    return Dion2(groups, **settings)


@pytest.mark.parametrize("kind", ["dion2", "dion3", "adamuon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_twenty_steps_by_formula(kind, dtype):
    """In float32 the weights, of size 1, were within 5e-7 of these."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]
    settings = {} if kind == "adamuon" else {"fraction": 0.4}
    optimizer = rival(kind, params, **settings)
    expected = [Reference(param.detach(), kind, 0.4) for param in params]
    for _ in range(20):
        for param, reference in zip(params, expected, strict=True):
            param.grad = torch.randn(param.shape, generator=generator, dtype=dtype)
            before = param.grad.clone()
            reference.step(param.grad)
        optimizer.step()
    assert torch.equal(params[-1].grad, before)
    for param, reference in zip(params, expected, strict=True):
        found, wanted = param.detach().double().reshape(reference.W.shape), reference.W
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_learning_rate_ratios_are_those_of_the_others():
    for name, ratio in (("none", 1.0), ("original", 2.0), ("match_rms_adamw", 0.2 * math.sqrt(16))):
        W = torch.nn.Parameter(torch.zeros(16, 4))
        optimizer, reference = (
            rival("dion2", [W], adjust_lr_fn=name),
            Reference(W.detach(), "dion2", 0.25, ratio),
        )
        W.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        reference.step(W.grad)
        optimizer.step()
        assert torch.allclose(W.detach().double(), reference.W, atol=1e-6)


def test_with_every_row_dion2_is_muon_without_dampening():
    """`M + G` orthogonalized, then decayed: torch's SGD momentum, one factor later."""
    W = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = rival("dion2", [W], fraction=1.0, weight_decay=0.0)
    M, expected = torch.zeros(4, 6), torch.zeros(4, 6)
    for seed in range(3):
        W.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        M = MU * M + W.grad
        expected -= LR * GramNS()(M)
        optimizer.step()
    assert torch.allclose(W.detach(), expected, atol=1e-6)


@pytest.mark.parametrize(("kind", "solved"), [("dion2", (4, 16)), ("dion3", (4, 8)), ("adamuon", (8, 16))])
def test_flops_are_those_of_what_is_solved(kind, solved):
    """For a tall matrix Dion2 selects columns, Dion3 a quarter of the rows."""
    settings = {} if kind == "adamuon" else {"fraction": 0.25 if kind == "dion3" else 0.5}
    W = torch.nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    optimizer = rival(kind, [W], **settings)
    meter = Meter(optimizer, torch.device("cpu"))
    for _ in range(3):
        W.grad = torch.ones_like(W)
        meter.step()
    line = meter.read()
    assert line["flops_paper"] == 3 * PaperCost(*solved).gram
    assert line["flops"] == 3 * ExecutedCost(*solved, restarts=1).gram
    assert line["misses"]["fresh"] == 3 and line["hits"] == 0 and line["orthogonalization_seconds"] > 0


def test_shards_and_fractions_are_refused():
    with pytest.raises(ValueError, match="fraction must be greater than 0 and at most 1, got 0"):
        Dion2([], fraction=0)
    with pytest.raises(ValueError, match=r"optimizer.fraction must be .* got 1.5"):
        OptimizerConfig("dion2", fraction=1.5)
    with pytest.raises(ValueError, match=r"optimizer.normalize must be default for kind 'soap', got 'rows'"):
        OptimizerConfig("soap", normalize="rows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [GPT2Config(1, 2, 32, 16, 256), ResNetConfig(width=4)])
def test_adam_takes_what_is_no_matrix(kind, model):
    """As in GramMuon: equal after two steps bit for bit; SOAP's a step later, within 4e-6 of steps of 4e-3.

    SOAP adds eps before the bias correction.
    """
    moved = {}
    for name in (kind, "gram"):
        torch.manual_seed(0)
        net = build(model)
        optimizer = make_optimizer(OptimizerConfig(name, lr=0.1), net)
        for _ in range(3 if name == "soap" else 2):
            for number, param in enumerate(net.parameters()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()
        moved[name] = [p.detach() for group in optimizer.param_groups[1:] for p in group["params"]]
        matrices = optimizer.param_groups[0]["params"]
        assert matrices and all(param.isfinite().all() for param in matrices)
    for one, other in zip(moved[kind], moved["gram"], strict=True):
        assert torch.allclose(one, other, atol=1e-5) if kind == "soap" else torch.equal(one, other)


def test_soap_prices_its_products():
    W = torch.nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))
    optimizer = soap([{"params": [W], "use_muon": True}], lr=0.1, betas=(0.9, 0.9), weight_decay=0.0)
    meter, before = Meter(optimizer, torch.device("cpu")), W.detach().clone()
    W.grad = torch.ones_like(W)
    meter.step()
    assert torch.equal(W.detach(), before)  # the first step only begins the statistics
    meter.step()
    assert not torch.equal(W.detach(), before)
    assert meter.read()["flops"] == round(8 * 18 * 9 + 14 / 30 * (27 + 216))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_same_bit_for_bit(kind, tmp_path):
    data = DataConfig("tokens", str(write_tokens(tmp_path / "data", train=4000, val=2000)))
    run = RunConfig(
        name="rival",
        model=GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256),
        data=data,
        optimizer=OptimizerConfig(kind, lr=0.02, beta2=0.9),
        schedule=ScheduleConfig("constant"),
        steps=4,
        batch_size=2,
        validate_every=4,
        checkpoint_every=2,
    )
    whole = train(run, tmp_path / "whole")
    asked = iter([False, True])
    with pytest.raises(Exception, match="stopped after step 2"):
        train(run, tmp_path / "parts", stop=lambda: next(asked))
    parts = train(run, tmp_path / "parts", resume=True)
    assert parts.validations[-1]["loss"] == whole.validations[-1]["loss"]
    assert parts.steps[-1]["flops"] == whole.steps[-1]["flops"] > 0
    assert whole.steps[-1]["loss"] < whole.steps[0]["loss"] + 1


def test_names():
    told = {
        OptimizerConfig("gram", normalize="rows"): ("NorMuon", "gram-normalizerows"),
        OptimizerConfig("jordan", normalize="rows"): ("NorMuon (Jordan)", "jordan-normalizerows"),
        OptimizerConfig("gram", normalize="factored"): (
            "GramMuon normalize=factored",
            "gram-normalizefactored",
        ),
        OptimizerConfig("cache", normalize="rows"): ("CacheMuon normalize=rows", "cache-normalizerows"),
        OptimizerConfig("dion2"): ("Dion2 fraction=0.25", "dion2-fraction0.25"),
        OptimizerConfig("dion3", fraction=0.5): ("Dion3 fraction=0.5", "dion3-fraction0.5"),
        OptimizerConfig("adamuon", nesterov=True): ("AdaMuon nesterov=True", "adamuon-nesterovTrue"),
        OptimizerConfig("soap", beta2=0.9): ("SOAP beta2=0.9", "soap-beta20.9"),
    }
    assert {one: (one.label, one.slug) for one in told} == told
    assert all(issubclass(kind, Rival) for kind in (Dion2, Dion3, AdaMuon))
