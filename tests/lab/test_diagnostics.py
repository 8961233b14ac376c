from dataclasses import replace

import pytest
import torch
from unclipped import unclipped

from cachemuon import CacheGNS, CacheMuon, GramNS, Muon, exact_residual, normalize
from cachemuon_lab.checkpoint import load
from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.diagnostics import AgeObserver, GateObserver, make_observer
from cachemuon_lab.models import GPT2Config
from cachemuon_lab.train import train

CACHE = OptimizerConfig("cache", gamma=1.5, lr=0.01, max_age=3, cache_all=True)


@pytest.fixture
def config(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return RunConfig(
        name="tiny",
        model=GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256, dropout=0.1),
        data=DataConfig("python", path=str(corpus)),
        optimizer=OptimizerConfig("paper", gamma=1.5, lr=0.01),
        schedule=ScheduleConfig("plateau_linear"),
        steps=12,
        batch_size=4,
        validate_every=12,
        validation_batches=1,
        ages=(1, 2, 5),
    )


def weights(folder):
    return load(folder / "checkpoints" / "latest.pt")["model"]


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("diagnostics", "optimizer"),
    [
        ("gate", OptimizerConfig("paper", gamma=1.5, lr=0.01)),
        ("gate", replace(CACHE, clip=0.0)),
        ("gate", replace(CACHE, clip=0.25)),
        ("gate", replace(CACHE, clip=0.25, gate="residual")),
        ("age", OptimizerConfig("gram", lr=0.01)),
    ],
)
def test_measuring_does_not_change_the_run(config, tmp_path, diagnostics, optimizer):
    config = replace(config, optimizer=optimizer)
    off = train(config, tmp_path / "off")
    on = train(replace(config, diagnostics=diagnostics), tmp_path / "on")
    assert same_bits(weights(tmp_path / "off"), weights(tmp_path / "on"))
    assert [line["hits"] for line in on.steps] == [line["hits"] for line in off.steps]
    assert (off.probes, off.ages) == ([], [])
    assert on.probes or on.ages


@pytest.mark.parametrize("gate", ["schedule", "residual"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_measured_is_the_clipped_direction(nesterov, gate):
    """The step itself shows it: W before and after, without weight decay, differ by the direction."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(32, 48))
    settings = {"gamma": 1e9, "clip": 0.25, "momentum": 0.5, "weight_decay": 0.0, "nesterov": nesterov}
    optimizer = unclipped([weight], lr=1.0, gate=gate, max_age=20, **settings)
    observer = GateObserver(optimizer)
    for step in range(1, 5):
        before, weight.grad = weight.detach().clone(), torch.randn(32, 48)
        observer.before(step)
        optimizer.step()
        for line in observer.after(step):
            taken = before - weight.detach()
            assert line["residual"] == pytest.approx(exact_residual(taken).item(), rel=1e-3)
            assert line["norm"] == pytest.approx(torch.linalg.matrix_norm(taken, 2).item(), rel=1e-3)
    assert step == 4 and line["age"] == 3


def test_every_probe_of_the_gate_is_recorded(config, tmp_path):
    run = train(replace(config, diagnostics="gate"), tmp_path / "run")
    assert run.steps[0]["misses"]["first"] == 4
    for line in run.steps:
        probes = [probe for probe in run.probes if probe["step"] == line["step"]]
        assert len(probes) == (0 if line["step"] == 1 else 4)
        assert sum(probe["accepted"] for probe in probes) == line["hits"]
    outcomes = {probe["accepted"] for probe in run.probes}
    assert outcomes == {True, False}
    for probe in run.probes:
        assert probe["accepted"] == (probe["residual"] <= 1.5)
        assert -1 <= probe["cosine"] <= 1
    names = {probe["name"] for probe in run.probes}
    assert names == {
        f"blocks.0.{part}.weight" for part in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    }
    for name in names:
        previous = None
        for probe in (probe for probe in run.probes if probe["name"] == name):
            assert probe["age"] == (
                1 if previous is None or not previous["accepted"] else previous["age"] + 1
            )
            previous = probe


def test_a_bounded_step_is_a_probe_that_was_not_accepted():
    """Its residual is that of the direction before the step was shortened; then the matrix is not cached."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(32, 48))
    optimizer = CacheMuon([weight], gamma=0.1, momentum=0.0, clip=0.0, max_norm=None, cache_all=True)
    observer, probes = GateObserver(optimizer), []
    for step in range(1, 5):
        weight.grad = torch.randn(32, 48)
        observer.before(step)
        optimizer.step()
        probes.append(observer.after(step))
    assert [len(lines) for lines in probes] == [0, 1, 0, 0]
    (line,) = probes[1]
    assert (line["accepted"], line["age"]) == (False, 1) and line["residual"] > 1
    counted = optimizer.cache_stats()["matrices"]["group0.param0"]["misses"]
    assert (counted["first"], counted["bounded"], counted["uncached"]) == (1, 1, 2)
    residual = optimizer.cache_stats()["matrices"]["group0.param0"]["residual"]
    assert line["residual"] == pytest.approx(residual, rel=0.5)  # estimated from 8 vectors


def test_only_every_so_many_steps(config, tmp_path):
    run = train(replace(config, diagnostics="gate", diagnose_every=5), tmp_path / "run")
    assert {probe["step"] for probe in run.probes} == {5, 10}


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (2, 4, 7)], ids=["wide", "tall", "stack"])
def test_the_gates_numbers_are_those_of_the_paper(shape):
    """Against the solvers themselves, on the momentum accumulated by hand."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = CacheMuon.paper([parameter], gamma=1.0)
    observer = GateObserver(optimizer)
    momentum, seen = torch.zeros(shape), []
    kept = [None] * (shape[0] if len(shape) == 3 else 1)
    for step in range(1, 8):
        parameter.grad = torch.randn(shape, generator=generator)
        momentum = torch.lerp(momentum, parameter.grad, 1 - 0.95)
        observer.before(step)
        optimizer.step()
        lines = {line["name"]: line for line in observer.after(step)}
        for index, M in enumerate(momentum if len(shape) == 3 else [momentum]):
            X = normalize(M.mT if shape == (7, 4) else M)
            transform = kept[index]
            _, kept[index], event = CacheGNS(probe="exact")(X, transform, gamma=1.0)
            if transform is None:
                assert not lines
                continue
            line = lines["group0.param0" + (f"[{index}]" if len(shape) == 3 else "")]
            fresh, candidate = GramNS()(X), transform @ X
            cosine = torch.dot(fresh.flatten(), candidate.flatten()) / fresh.norm() / candidate.norm()
            assert line["residual"] == pytest.approx(exact_residual(candidate).item(), rel=1e-4)
            assert line["cosine"] == pytest.approx(cosine.item(), abs=1e-5)
            assert line["accepted"] == event.hit
            seen.append(event.hit)
    assert set(seen) == {True, False}


def test_ages_are_those_asked_for(config, tmp_path):
    config = replace(config, optimizer=OptimizerConfig("gram"), diagnostics="age")
    every = train(config, tmp_path / "every")
    assert {(line["step"], line["age"]) for line in every.ages} == {
        (step, age) for step in range(1, 13) for age in (1, 2, 5) if age < step
    }
    assert len({line["name"] for line in every.ages}) == 4
    fourth = train(replace(config, diagnose_every=4), tmp_path / "fourth")
    assert fourth.ages == [line for line in every.ages if line["step"] % 4 == 0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_cosine_of_an_old_transform(nesterov):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(7, 4))
    optimizer = Muon([parameter], solver=GramNS(), nesterov=nesterov)
    observer = AgeObserver(optimizer, ages=(1, 3))
    momentum, transforms = torch.zeros(7, 4), []
    for step in range(1, 7):
        parameter.grad = torch.randn(7, 4, generator=generator)
        momentum = torch.lerp(momentum, parameter.grad, 1 - 0.95)
        observer.before(step)
        optimizer.step()
        lines = {line["age"]: line["cosine"] for line in observer.after(step)}
        X = normalize(torch.lerp(parameter.grad, momentum, 0.95) if nesterov else momentum).mT
        fresh, Q = GramNS().with_transform(X)
        assert lines.keys() == {age for age in (1, 3) if age <= len(transforms)}
        for age, cosine in lines.items():
            old = transforms[-age] @ X
            expected = torch.dot(fresh.flatten(), old.flatten()) / fresh.norm() / old.norm()
            assert cosine == pytest.approx(expected.item(), abs=1e-5)
        transforms.append(Q)


def test_off_is_no_observer(config):
    optimizer = CacheMuon([torch.nn.Parameter(torch.eye(3))])
    assert make_observer(config, optimizer) is None


def test_a_wrong_optimizer_is_refused():
    parameter = torch.nn.Parameter(torch.eye(3))
    with pytest.raises(ValueError, match="optimizer must be a CacheMuon, got Muon"):
        GateObserver(Muon([parameter]))
    with pytest.raises(ValueError, match="optimizer must be a Muon, got CacheMuon"):
        AgeObserver(CacheMuon([parameter]), ages=(1,))
    with pytest.raises(ValueError, match="solver must be a GramNS"):
        AgeObserver(Muon([parameter]), ages=(1,))
