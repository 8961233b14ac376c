"""Run folders as training writes them, with made-up numbers that a test can compute by hand."""

import math
from dataclasses import replace

import numpy as np

from cachemuon_lab.config import CACHING, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.models import GPT2Config, ResNetConfig
from cachemuon_lab.optimizers import MISSES
from cachemuon_lab.recipes import PAPERS, TODAYS
from cachemuon_lab.record import Record, Run

MATRICES = [f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("qkv", "output", "up", "down")]
COSTS = {  # of one call in GFLOPs: by the paper's model, as executed
    ("gram", "fresh"): (100, 90),
    ("stale", "first"): (100, 90),
    ("stale", "expired"): (100, 90),
    ("polar", "fresh"): (125, 120),
    **{(kind, "hit"): (25, 20) for kind in CACHING},
    **{(kind, "first"): (102, 95) for kind in CACHING},
    **{(kind, "rejected"): (128, 110) for kind in CACHING},
}
CONFIG = RunConfig(
    name="made",
    model=GPT2Config(layers=2, heads=2, width=16, context=8, vocabulary=256),
    data=DataConfig("python"),
    optimizer=OptimizerConfig("gram"),
    schedule=ScheduleConfig("plateau_linear"),
    steps=100,
    batch_size=4,
    validate_every=5,
)
IMAGES = replace(CONFIG, model=ResNetConfig(width=4), data=DataConfig("cifar10"))
ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.9.0",
    "cachemuon": "0.1.0",
    "git": "0123456789abcdef",
    "machine": {"system": "Linux", "processor": "A processor", "cores": 2},
    "device": "cpu",
    "data": {"train": {"sha256": "abc"}},
}


def write_run(
    folder, optimizer, *, config=CONFIG, hits=0, loss=3.0, done=None, environment=ENVIRONMENT, **changes
):
    """A run in `folder`; `hits` matrices of the eight hit at every step but the first.

    Its best validation loss is `loss`, at its last step. `done`: the steps that it came to before it broke
    off. `changes` are further fields of its configuration.
    """
    config = replace(config, optimizer=optimizer, name=changes.pop("name", folder.name), **changes)
    random = np.random.default_rng(config.seed)
    spent = np.zeros(2, dtype=int)
    with Record(folder, config, environment) as record:
        for step in range(1, (done or config.steps) + 1):
            outcomes = _outcomes(optimizer, step, hits)
            for outcome, count in outcomes.items():
                spent += count * np.array(COSTS.get((optimizer.kind, outcome), (0, 0))) * 10**9
            record.write(
                "step",
                step,
                loss=_loss(step / config.steps, loss) + 0.05 * random.normal(),
                lr=optimizer.lr,
                tokens=32 * step,
                step_seconds=0.2 + 0.001 * (step % 3),
                optimizer_seconds=0.06 + 0.001 * (step % 3),
                orthogonalization_seconds=0.05 + 0.001 * (step % 3),
                hits=outcomes.pop("hit", 0),
                misses=dict.fromkeys(MISSES, 0) | outcomes,
                flops=int(spent[1]),
                flops_paper=int(spent[0]),
            )
            for line in _diagnosed(config, step, random):
                record.write(step=step, **line)
            if step % config.validate_every == 0:
                accuracy = 0.1 + 0.8 * step / config.steps if config.data.kind == "cifar10" else None
                record.write("validation", step, loss=_loss(step / config.steps, loss), accuracy=accuracy)
        if done is None:
            best = {"best_loss": loss, "best_step": config.steps, "best_accuracy": None}
            record.write("end", config.steps, seconds=20.0, **best)
    return Run.open(folder)


def study(folder):
    """The paper's comparison in small: both baselines, frontiers of gammas, diagnostics of both kinds."""
    cached = {2.0: (3, 3.01), 5.0: (5, 3.03), 10.0: (6, 3.06), 15.0: (7, 3.10)}
    for seed in (0, 1):
        extra = 0.01 * seed
        write_run(folder / f"polar-{seed}", OptimizerConfig("polar"), seed=seed, loss=3.002 + extra)
        write_run(folder / f"gram-{seed}", OptimizerConfig("gram"), seed=seed, loss=3.0 + extra)
        for gamma, (hits, loss) in cached.items():
            optimizer = OptimizerConfig("paper", gamma=gamma)
            write_run(folder / f"paper-{gamma:g}-{seed}", optimizer, seed=seed, hits=hits, loss=loss + extra)
    for gamma, (hits, loss) in {2.0: (2, 3.01), 9.0: (5, 3.06)}.items():  # not the default, which is not told
        write_run(folder / f"cache-{gamma:g}", OptimizerConfig("cache", gamma=gamma), hits=hits, loss=loss)
    write_run(folder / "stale", OptimizerConfig("stale"), hits=4, loss=3.2)
    write_run(folder / "gate", OptimizerConfig("paper", gamma=5.0), hits=5, loss=3.03, diagnostics="gate")
    write_run(folder / "age", OptimizerConfig("gram"), diagnostics="age", diagnose_every=5)
    return [Run.open(path) for path in sorted(folder.iterdir())]


def two_families(folder):
    """The paper's settings and today's, with a fresh and a cached optimizer each."""
    papers = OptimizerConfig("gram", family=PAPERS)
    todays = OptimizerConfig("gram", nesterov=True, family=TODAYS)
    return [
        write_run(folder / "papers-cached", replace(papers, kind="paper", gamma=5.0), hits=5, loss=3.15),
        write_run(folder / "papers-fresh", papers, loss=3.2),
        write_run(folder / "todays-cached", replace(todays, kind="cache", nesterov=False), hits=7, loss=2.95),
        write_run(folder / "todays-fresh", todays, loss=2.9),
    ]


def _outcomes(optimizer, step, hits):
    if optimizer.kind in CACHING:
        return {"first": 8} if step == 1 else {"hit": hits, "rejected": 8 - hits}
    if optimizer.kind == "stale":
        return {"hit": 8} if step % 2 == 0 else {"first" if step == 1 else "expired": 8}
    return {"fresh": 0 if optimizer.kind == "adamw" else 8}


def _loss(progress, best):
    return best + 4 * (math.exp(-5 * progress) - math.exp(-5))


def _diagnosed(config, step, random):
    if config.diagnostics == "gate" and step > 1:
        for name in MATRICES:
            residual = 40 * math.exp(-4 * step / config.steps) * math.exp(0.7 * random.normal())
            yield {
                "kind": "probe",
                "name": name,
                "residual": residual,
                "cosine": 1 / (1 + residual / 20) + 0.02 * random.normal(),
                "accepted": bool(residual <= config.optimizer.gamma),
                "age": 1,
            }
    if config.diagnostics == "age" and step % config.diagnose_every == 0:
        for number, name in enumerate(MATRICES):
            for age in (age for age in config.ages if age < step):
                cosine = math.exp(-0.01 * (number + 1) * age) + 0.01 * random.normal()
                yield {"kind": "age", "name": name, "age": age, "cosine": cosine}
