"""Emulated half precision beside real half products, and in a training."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from made_tokens import write_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from cachemuon import GramNS
from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.half import HALF, HalfProducts
from cachemuon_lab.models import GPT2Config, build
from cachemuon_lab.optimizers import Meter, make_optimizer
from cachemuon_lab.train import train


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", HALF)
def test_products_are_real_half_products_to_one_rounding(dtype):
    """Real ones may sum in another order, which moves at most the last bit."""
    A, B, C = (randn(2, n, m, seed=n).to(dtype) for n, m in ((16, 24), (24, 20), (16, 20)))
    eps = torch.finfo(dtype).eps

    def all_products():
        out = torch.empty_like(C)
        return [
            torch.bmm(A, B),
            torch.bmm(A, B, out=out).clone(),
            torch.baddbmm(C, A, B, beta=0.5, alpha=2.0),
            torch.baddbmm(C, A, B, beta=0.5, alpha=2.0, out=out).clone(),
            torch.mm(A[0], B[0]),
            torch.addmm(C[0], A[0], B[0], beta=-1.0),
            A @ B,
        ]

    real = all_products()
    with HalfProducts():
        emulated = all_products()
    for one, other in zip(emulated, real, strict=True):
        assert one.dtype == dtype and torch.allclose(one.float(), other.float(), rtol=2 * eps, atol=4 * eps)
    exact = (A.double() @ B.double()).to(dtype)  # rounded once
    assert torch.equal(emulated[0], exact) or dtype == torch.float16
    assert torch.allclose(emulated[0].float(), exact.float(), rtol=eps, atol=0)


def test_sums_are_float32_and_results_are_rounded():
    """4,097 ones: a sum in float16 would stay at 2,048, and 4,097 is no float16. 70,000 is none either."""
    ones = torch.ones(1, 4097, dtype=torch.float16)
    with HalfProducts():
        assert (ones @ ones.mT).item() == 4096
        assert (ones @ ones.mT * 1).dtype == torch.float16
        assert torch.mm(torch.full((1, 2), 200.0).half(), torch.full((2, 1), 175.0).half()).isinf()
        full = torch.ones(1, 4097)
        assert (full @ full.mT).item() == 4097


@pytest.mark.parametrize("dtype", HALF)
def test_a_solve_is_the_real_one_within_roundings(dtype):
    """Both directions are 0.0044 and 0.0045 from float64's in float16, 0.038 in bfloat16."""
    M = randn(32, 96)
    exact, solver = GramNS()(M.double()), GramNS(dtype=dtype)
    real = solver(M)
    with HalfProducts():
        emulated = solver(M)
    off = [torch.dist(one.double(), exact) / torch.linalg.norm(exact) for one in (real, emulated)]
    assert 0.8 < off[0] / off[1] < 1.25
    assert off[1] == pytest.approx(0.0045 if dtype == torch.float16 else 0.038, rel=0.2)


class Dtypes(TorchDispatchMode):
    """The dtypes of all products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["gram", "jordan", "cache"])
def test_the_meter_emulates_what_iterates_in_half_precision(kind):
    moved = {}
    for precision in (None, "float16", "bfloat16"):
        torch.manual_seed(0)
        model = build(GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256))
        made = OptimizerConfig(kind, lr=0.02, cache_all=True, max_age=1, precision=precision)
        optimizer = make_optimizer(made, model)
        meter = Meter(optimizer, torch.device("cpu"))
        with Dtypes() as dtypes:
            for step in range(2):
                for param in model.parameters():
                    param.grad = randn(*param.shape, seed=step)
                meter.step()
        assert dtypes.seen == {torch.float32}  # none in half precision
        moved[precision] = model.blocks[0].attention.qkv.weight.detach()
    off = [torch.dist(moved[precision], moved[None]) for precision in ("float16", "bfloat16")]
    assert 1e-6 < off[0] < off[1] < 0.1


def test_a_training_in_half_precision(tmp_path):
    run = RunConfig(
        name="half",
        model=GPT2Config(layers=1, heads=2, width=32, context=16, vocabulary=256),
        data=DataConfig("tokens", str(write_tokens(tmp_path / "data", train=4000, val=2000))),
        optimizer=OptimizerConfig("gram", lr=0.02, precision="float16"),
        schedule=ScheduleConfig("constant"),
        steps=3,
        batch_size=2,
        validate_every=3,
    )
    assert run.optimizer.label == "GramMuon precision=float16"
    losses = [train(run, tmp_path / "half").validations[-1]["loss"]]
    full = replace(run, optimizer=OptimizerConfig("gram", lr=0.02))
    losses.append(train(full, tmp_path / "full").validations[-1]["loss"])
    assert 0 < abs(losses[0] - losses[1]) < 0.05
    with pytest.raises(ValueError, match=r"optimizer.precision must be none for kind 'dion2', got 'float16'"):
        OptimizerConfig("dion2", precision="float16")


def test_the_benchmark_trains_both_in_every_precision(tmp_path, monkeypatch, capfd):
    import half

    tiny = ("model.width=32", "model.layers=1", "model.context=16", "steps=3", "validate_every=3")
    monkeypatch.setattr(half, "SETTINGS", (*half.SETTINGS, *tiny, "batch_size=2", "validation_batches=2"))
    monkeypatch.setattr(half, "SEEDS", (0, 1))
    data, ledger = write_tokens(tmp_path / "text", train=4000, val=2000), tmp_path / "ledger.jsonl"
    page = tmp_path / "page.md"
    page.write_text("<!-- table half -->\n<!-- end -->\n")
    told = ["--text", data, "--out", tmp_path / "out", "--workers", 1, "--ledger", ledger, "--page", page]
    monkeypatch.setattr(sys, "argv", ["half.py", *map(str, told)])
    half.main()
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[2:4]] == [["GramMuon", "float16"], ["GramMuon", "bfloat16"]]
    assert len(rows) == 1 + 6 and len(ledger.read_text().splitlines()) == 12
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    losses = {
        (line["config"]["optimizer"]["kind"], line["config"]["optimizer"]["precision"]): line["validations"]
        for line in lines
        if line["config"]["seed"] == 0
    }
    assert losses["gram", "float16"] != losses["gram", None] != losses["gram", "bfloat16"]
