"""The examples run, with the real libraries, and show what they say."""

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call `main` of an example, in a folder of its own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def call(name, *libraries, **arguments):
        for library in libraries:
            pytest.importorskip(library, reason=f"{library} is not installed", exc_type=ModuleNotFoundError)
        return importlib.import_module(name).main(**arguments)

    return call


def equal(one, other):
    found = one.state_dict(), other.state_dict()
    return found[0].keys() == found[1].keys() and all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def learned(losses):
    return losses[0] > 1.5 > 0.75 > losses[-1]


def test_every_example_is_in_the_table_and_tested():
    names = {path.name for path in EXAMPLES.glob("*.py")} - {"toy.py"}
    rows = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \| \S", (EXAMPLES / "README.md").read_text(), re.M)
    assert {link for _, link in rows} == names and all(name == link for name, link in rows)
    called = re.findall(r'(?:run|ranks)\("(\w+)"', Path(__file__).read_text())
    assert {f"{name}.py" for name in called} == names


def test_plain(run):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = run("plain")
    assert learned(told["losses"])
    assert told["again"] == told["losses"][10:]
    assert equal(told["parts"]["model"], told["resumed"]["model"])
    stats = told["parts"]["optimizer"].cache_stats()
    assert stats["hit_rate"] > 0.5 and stats == told["resumed"]["optimizer"].cache_stats()
    events = EventAccumulator("runs/plain").Reload()
    assert [event.step for event in events.Scalars("muon/hit_rate")] == [4, 9, 14, 19, 14, 19]
    assert events.Scalars("muon/hit_rate")[-1].value > 0.5


@pytest.mark.parametrize("way", ["optimizers", "params", "factory"])
def test_huggingface_trainer(run, way):
    told = run("huggingface_trainer", "transformers", "accelerate", way=way, steps=20)
    assert learned(told["losses"]) and len(told["losses"]) == len(told["hits"]) == 4
    assert told["hits"][-1] > 0.5
    assert equal(*told["models"])


def test_trainers_own_groups_are_refused(run):
    pytest.importorskip("transformers", reason="transformers is not installed")
    example = importlib.import_module("huggingface_trainer")
    trainer = example.make("factory", "runs", 2)
    trainer.optimizer_cls_and_kwargs = example.CacheMuon, {"lr": 0.02}
    with pytest.raises(ValueError, match=r"\(256,\)"):  # a norm's weight
        trainer.create_optimizer()


def test_accelerate(run):
    told = run("accelerate_loop", "accelerate")
    assert told["again"] == told["losses"] and told["losses"][-1] < 0.75
    assert told["stats"] == told["stats_again"] and told["stats"]["hit_rate"] > 0.5


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_lightning(run):
    told = run("lightning_module", "lightning")
    assert told["losses"][0] == told["losses"][1] < 0.75
    assert equal(*told["modules"])
    with open(f"{told['logs']}/metrics.csv") as file:
        rates = [row["muon/hit_rate"] for row in csv.DictReader(file) if row["muon/hit_rate"]]
    assert len(rates) == 4 and float(rates[-1]) > 0.5


def test_peft(run):
    told = run("peft_lora", "peft")
    optimizer = told["optimizer"]
    assert told["losses"][-1] < 0.75 * told["losses"][0]
    rows = optimizer.explain().rows
    assert len(rows) == 16 and all("lora_" in row.name for row in rows)
    assert {row.cache for row in rows} == {"not cached: a fresh solve is faster"}
    assert max(row.solve for row in rows) < 0.01 * 503_316_480  # the solve of 256 x 256
    metrics = optimizer.metrics()
    assert metrics["muon/uncached"] == 1 and metrics["muon/flops_saved"] == 0


@pytest.mark.parametrize("scaled", [False, True])
def test_nanogpt(run, scaled):
    told = run("nanogpt_loop", scaled=scaled)
    assert learned(told["losses"]) and told["stats"]["hit_rate"] > 0.5
    assert told["again"] == told["losses"][10:]
    metrics = told["optimizer"].metrics()
    assert metrics["muon/lr"] / metrics["muon/lr_adam"] == pytest.approx(15)
    assert metrics["muon/lr"] < 0.2 * 0.03
    assert [("initial_lr" in group) for group in told["optimizer"].param_groups] == 3 * [scaled]


def test_mixture_of_experts(run):
    told = run("mixture_of_experts")
    assert learned(told["losses"])
    assert {name.split("[")[0] for name in told["stats"]["matrices"]} == {"2.up", "2.down"}
    assert len(told["stats"]["matrices"]) == 8
    assert all(entry["hits"] > 10 for entry in told["stats"]["matrices"].values())
    assert {route.name: route.use_muon for route in told["routes"]}["2.router.weight"] is False


def test_convnet(run):
    told = run("convnet")
    assert learned(told["losses"])
    hits = {name: entry["hits"] for name, entry in told["stats"]["matrices"].items()}
    assert hits["0.weight"] == 0 and hits["3.weight"] > 10 and hits["6.weight"] > 10


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled(run):
    """Traced and differentiated as ever, without the time that generating C++ takes."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        told = run("compiled", backend="aot_eager")
    assert learned(told["losses"]) and told["stats"]["hit_rate"] > 0.5


def test_wandb(run, monkeypatch):
    for name, folder in {
        "WANDB_CACHE_DIR": "cache",
        "WANDB_CONFIG_DIR": "config",
        "WANDB_DATA_DIR": "data",
    }.items():
        monkeypatch.setenv(name, folder)
    told = run("wandb_offline", "wandb")
    assert told["summary"]["loss"] < 0.75 and told["summary"]["muon/last/hit_rate"] > 0.5
    sys.modules["wandb"].teardown()  # ends its service, which writes what it still has
    (written,) = Path("runs/wandb").glob("offline-run-*/run-*.wandb")
    assert b"muon/flops_saved" in written.read_bytes()


@pytest.fixture
def ranks(tmp_path):
    """What an example prints under torchrun with two processes."""

    def call(name):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, EXAMPLES / f"{name}.py"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def falls(text):
    first, last = map(float, re.search(r"loss (\S+) -> ([\d.]+)", text).groups())
    return first > 4 and last < 0.75


def test_ddp(ranks):
    told = sorted(ranks("ddp").splitlines())
    assert [line[:7] for line in told] == ["rank 0:", "rank 1:"]
    for line in told:
        assert falls(line) and line.endswith("weights as on rank 0: True")
        hits, share, sent = map(int, re.search(r"(\d+)% hits, (\d+)% .* (\d+) bytes", line).groups())
        assert hits > 50 and 40 <= share <= 60 and sent > 0


def test_fsdp2(ranks):
    told = ranks("fsdp2")
    assert falls(told) and int(re.search(r"(\d+)% hits", told)[1]) > 50
    assert "the same losses: True" in told
