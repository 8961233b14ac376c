import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from cachemuon import param_groups
from cachemuon.routing.layout import matrix_shape
from cachemuon_lab import totals
from cachemuon_lab import train as train_module
from cachemuon_lab.config import OptimizerConfig, RunConfig, with_overrides
from cachemuon_lab.data.images import ImageBatches
from cachemuon_lab.models import GPT2Config, build
from cachemuon_lab.recipes import NANO_LR, PAPERS, RECIPES, SEARCH_GRID, TODAYS, recipe
from cachemuon_lab.reported import REPORTED, Reported, reported
from cachemuon_lab.train import train

PAPER = ["gpt2-large-owt", "gpt2-small-owt", "resnet18-cifar10"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tiny folder of each kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("python", "tokens", "cifar10")}
    generator = np.random.default_rng(0)
    for number in range(20):
        (folders["python"] / f"m{number}.py").write_text(f"x = {number}\n" * 50)
    for name in ("train", "val"):
        ids = generator.integers(0, 300, 2000, dtype=np.uint16)
        (folders["tokens"] / f"{name}.bin").write_bytes(ids.astype("<u2").tobytes())
    for name in ("data_batch_1.bin", "test_batch.bin"):
        rows = generator.integers(0, 256, (40, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folders["cifar10"] / name).write_bytes(rows.tobytes())
    return folders


class UncheckedImages(ImageBatches):
    def __init__(self, *arguments):
        super().__init__(*arguments, checksums={})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs(name, data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "ImageBatches", UncheckedImages)
    tiny = ["steps=2", "batch_size=2", "accumulation=1", "replicas=1", "validation_batches=1"]
    made = recipe(name)
    if isinstance(made.base.model, GPT2Config):
        tiny += [
            "model.layers=1",
            "model.heads=2",
            "model.width=32",
            "model.context=16",
            "model.vocabulary=300",
        ]
    else:
        tiny += ["model.width=4"]
    if made.base.continues:
        tiny += ["continues=1"]
    if made.base.diagnostics == "age":
        tiny += ["diagnose_every=1"]
    for config in (made.base, *made.runs()):
        small = with_overrides(config, [*tiny, f"data.path={data[config.data.kind]}"])
        run = train(small, tmp_path / f"{config.name}")
        assert run.complete
        assert len(run.steps) == 2
        assert all(math.isfinite(line["loss"]) for line in run.steps)
        assert bool(run.probes) == (config.diagnostics == "gate")
        assert bool(run.ages) == (config.diagnostics == "age")
        if config is made.base:
            assert run.config.optimizer == made.variants[0]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_named_and_readable(name):
    made = recipe(name)
    assert (made.name, made.base.name) == (name, name)
    assert len({config.name for config in made.runs()}) == len(made.variants)
    for config in made.runs():
        assert RunConfig.from_json(config.to_json()) == config


def test_an_unknown_recipe_lists_the_known():
    with pytest.raises(ValueError, match=r"recipe must be one of gpt2-large-owt, .*gpt2-nano.*, got 'gpt3'"):
        recipe("gpt3")


# The paper's numbers


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt2-large-owt", 1e9),
        ("gpt2-large-owt-4.8b", 4.8e9),
        ("gpt2-large-owt-proxy", 1e8),
        ("gpt2-large-owt-diagnostics", 1e8),
        ("gpt2-small-owt", 1e9),
        ("gpt2-small-owt-proxy", 1e8),
    ],
)
def test_recipes_see_the_tokens_they_say(name, tokens):
    base = recipe(name).base
    seen = base.steps * base.batch_size * base.accumulation * base.replicas * base.model.context
    assert seen == pytest.approx(tokens, rel=2e-3)


@pytest.mark.parametrize("name", PAPER)
def test_recipes_cost_what_the_paper_reports(name):
    """From the models' own matrices: the routing, the steps and the replicas are the paper's."""
    made = recipe(name)
    with torch.device("meta"):
        model = build(made.base.model)
    groups = param_groups(model, head=made.base.optimizer.head)
    shapes = [matrix_shape(param.shape)[1:] for _, param in groups[0]["params"]]
    total = partial(totals.total, shapes, made.base.steps, replicas=made.base.replicas)
    assert total(solver="gram") / 1e15 == pytest.approx(REPORTED[name, "GramMuon"].pflops, abs=0.005)
    assert total(solver="standard") / 1e15 == pytest.approx(REPORTED[name, "PolarExpMuon"].pflops, abs=0.005)


def test_what_the_paper_reports_is_found_by_the_run():
    large = recipe("gpt2-large-owt")
    told = [reported(replace(run, seed=3, checkpoint_every=7)) for run in large.runs()]
    assert [one.pflops for one in told] == [644.99, 516.16, 445.97, 296.90, 226.88, 180.76]
    assert [one.best_loss for one in told] == [3.039, 3.037, 3.041, None, None, 3.096]
    cached = large.runs()[2]
    assert reported(replace(cached, replicas=4, accumulation=16)) == told[2]  # the same batch
    other = [replace(cached, steps=100), replace(cached, optimizer=replace(cached.optimizer, lr=0.5))]
    other += [replace(cached, batch_size=2), *recipe("gpt2-nano").runs()]
    assert [reported(run) for run in other] == [None] * len(other)
    assert reported(recipe("gpt2-large-owt-4.8b").runs()[2]) == Reported(saved_gram=0.22, saved_polar=0.38)


def test_savings_that_the_paper_reports_are_those_of_its_flops():
    for (name, _), told in REPORTED.items():
        if told.pflops is not None and told.saved_gram is not None:
            for kind, saved in (("GramMuon", told.saved_gram), ("PolarExpMuon", told.saved_polar)):
                assert 1 - told.pflops / REPORTED[name, kind].pflops == pytest.approx(saved, abs=0.0055)


def test_the_longer_run_continues_the_shorter():
    base, short = recipe("gpt2-large-owt-4.8b").base, recipe("gpt2-large-owt").base
    assert base.continues == (short.steps,)
    for step in (1, 2000, short.steps):
        assert base.lr_factor(step) == short.lr_factor(step)
    assert base.lr_factor(short.steps) == 0.05 and base.lr_factor(short.steps + 1) == 1
    assert base.lr_factor(base.steps) == pytest.approx(0.05)


def test_what_is_reported_is_what_is_compared():
    for name in PAPER:
        labels = {variant.label for variant in recipe(name).variants}
        assert labels == {label for name_, label in REPORTED if name_ == name}


def test_the_settings_of_resnet_differ_by_optimizer():
    settings = {v.kind: (v.lr, v.momentum, v.gamma, v.head) for v in recipe("resnet18-cifar10").variants}
    assert settings["polar"][:2] == (0.01, 0.9)
    assert settings["gram"][:2] == (0.02, 0.95)
    assert settings["paper"] == (0.01, 0.9, 20.0, "muon")
    base = recipe("resnet18-cifar10").base
    assert (base.steps, base.batch_size, base.seed, base.schedule.kind) == (39_100, 128, 42, "cosine")


def test_families_are_compared_within_themselves():
    for name in ("demo", "gpt2-nano"):
        families = {}
        for one in recipe(name).variants:
            families.setdefault(one.family, []).append(one)
        papers, todays = families[PAPERS], families[TODAYS]
        shared = {(one.lr, one.momentum, one.nesterov, one.adjust_lr_fn, one.adam_lr) for one in papers}
        assert shared == {(NANO_LR, 0.95, False, "none", 2e-3)}
        assert "gram" in {one.kind for one in papers} and "cache" not in {one.kind for one in papers}
        assert [one.kind for one in todays] == ["gram"] * (len(todays) - 1) + ["cache"]
        assert {(one.momentum, one.nesterov, one.adam_lr) for one in todays} == {(0.95, True, 2e-3)}
    assert {one.family for name in PAPER for one in recipe(name).variants} == {""}


def test_the_demonstration_has_the_papers_gammas():
    demo = recipe("demo")
    labels = ["GramMuon", *(f"CacheMuon.paper gamma={gamma}" for gamma in (2, 5, 15))]
    assert [one.label for one in demo.variants][:4] == labels
    assert demo.base == replace(
        recipe("gpt2-nano").base,
        **{key: getattr(demo.base, key) for key in ("name", "steps", "validate_every", "optimizer")},
    )


def test_the_settings_of_gpt2_are_shared():
    for name in ("gpt2-large-owt", "gpt2-large-owt-4.8b", "gpt2-small-owt"):
        for variant in recipe(name).variants:
            assert variant == OptimizerConfig(variant.kind, gamma=variant.gamma)
            assert (variant.lr, variant.momentum, variant.weight_decay) == (0.001, 0.95, 1e-4)
            assert (variant.adam_lr, variant.adam_betas) == (0.002, (0.9, 0.999))
    assert recipe("gpt2-large-owt").base.model.dropout == 0.1
    small = recipe("gpt2-small-owt").base.model
    assert (small.dropout, small.bias) == (0.0, False)


def test_the_search_grid_has_36_points():
    assert math.prod(map(len, SEARCH_GRID.values())) == 36
    for name in ("gpt2-small-owt", "resnet18-cifar10"):
        for variant in recipe(name).variants:
            for key, values in SEARCH_GRID.items():
                assert getattr(variant, key.removeprefix("optimizer.")) in values
