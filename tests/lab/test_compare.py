from dataclasses import replace

import pytest

from cachemuon_lab.compare import compare, configure, demonstration, plan, variant
from cachemuon_lab.config import OptimizerConfig, with_overrides
from cachemuon_lab.recipes import RECIPES, recipe
from cachemuon_lab.record import RECORD
from cachemuon_lab.train import Interrupted

NANO, RESNET = recipe("gpt2-nano"), recipe("resnet18-cifar10")
POLAR, GRAM, PAPER, CACHE = (variant(NANO, kind) for kind in ("polar", "gram", "paper", "cache"))


@pytest.fixture
def tiny(tmp_path):
    """gpt2-nano, small enough for seconds, on ten small files."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    shape = ("model.layers=1", "model.heads=2", "model.width=16", "model.context=16")
    length = ("steps=6", "batch_size=2", "validate_every=3", "validation_batches=1", "checkpoint_every=2")
    base = with_overrides(NANO.base, (f"data.path={folder}", *shape, *length))
    return replace(NANO, base=base, variants=(POLAR, GRAM, PAPER))


def losses(run):
    return [line["loss"] for line in run.steps], [line["loss"] for line in run.validations]


def test_a_variant_is_the_recipes_own():
    assert variant(RESNET) == RESNET.variants[0]
    assert variant(RESNET, "paper") == RESNET.variants[2]
    assert variant(RESNET, "paper", gamma=7.0) == replace(RESNET.variants[2], gamma=7.0)
    assert CACHE in NANO.variants
    assert variant(NANO, "cache", gamma=7.0) == replace(CACHE, gamma=7.0)
    assert variant(NANO, gamma=7.0, max_age=3) == replace(CACHE, gamma=7.0, max_age=3)


def test_a_new_kind_has_the_settings_of_its_relative():
    own = OptimizerConfig("cache").gamma
    polar, gram, paper = (replace(one, gamma=own + 1) for one in RESNET.variants)
    some = replace(RESNET, variants=(polar, gram, paper))
    assert variant(some, "stale") == replace(gram, kind="stale")
    assert variant(some, "cache") == replace(paper, kind="cache", gamma=own)
    assert variant(some, max_age=3) == replace(paper, kind="cache", gamma=own, max_age=3)
    assert variant(some, "adamw") == replace(polar, kind="adamw")


@pytest.mark.parametrize(
    "kind, settings, message",
    [
        ("sgd", {}, r"optimizer must be one of 'polar', .*'soap', got 'sgd'"),
        ("gram", {"gamma": 2.0}, "gamma goes with optimizer 'paper' or 'cache', got 'gram'"),
        ("adamw", {"max_age": 2}, "max_age goes with optimizer 'cache', got 'adamw'"),
        ("paper", {"max_age": 2}, "max_age goes with optimizer 'cache', got 'paper'"),
        ("cache", {"max_age": -1}, "optimizer.max_age must be an integer of at least 0, got -1"),
    ],
)
def test_a_wrong_variant_is_named(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        variant(NANO, kind, **settings)


def test_a_run_is_named_after_the_optimizer_that_results():
    assert configure(NANO, PAPER, ["optimizer.gamma=3", "steps=9"]).name == "gpt2-nano-paper-gamma3"
    assert configure(NANO, PAPER, ["name=mine", "optimizer.gamma=3"]).name == "mine"


def test_the_plan_has_every_optimizer_with_every_seed():
    runs = plan(RESNET, seeds=2, overrides=["steps=9"])
    assert list(runs) == [
        f"{slug}-s{seed}" for seed in (42, 43) for slug in ("polar", "gram", "paper-gamma20")
    ]
    assert {run.steps for run in runs.values()} == {9}
    assert runs["gram-s43"] == replace(runs["gram-s42"], seed=43)


def test_the_plan_of_every_recipe_is_possible():
    assert all(plan(one) for one in RECIPES.values())


def test_equal_optimizers_are_one_but_unequal_ones_need_two_folders():
    assert list(plan(NANO, variants=[GRAM, GRAM])) == ["gram-s0"]
    with pytest.raises(ValueError, match="two of the optimizers are 'GramMuon'"):
        plan(NANO, variants=[GRAM, replace(GRAM, lr=0.5)])
    with pytest.raises(ValueError, match=r"two of the optimizers are 'CacheMuon\.paper gamma=3'"):
        plan(NANO, overrides=["optimizer.gamma=3"])
    with pytest.raises(ValueError, match="seeds must be an integer of at least 1, got 0"):
        plan(NANO, seeds=0)


def test_all_optimizers_see_the_same_batches_from_the_same_weights(tiny, tmp_path):
    reusing = variant(tiny, "paper", gamma=1000.0)
    variants = [POLAR, GRAM, reusing, variant(tiny, "adamw"), variant(tiny, "stale")]
    runs = compare(tiny, tmp_path / "out", variants=variants, seeds=2)
    assert [run.folder.name for run in runs] == list(plan(tiny, variants=variants, seeds=2))
    assert all(run.complete and len(run.steps) == 6 for run in runs)
    first = [run.steps[0]["loss"] for run in runs]
    assert len(set(first[:5])) == len(set(first[5:])) == 1 and first[0] != first[5]
    assert len({run.steps[-1]["loss"] for run in runs}) == 10


def test_progress_says_which_run_it_is(tiny, tmp_path):
    states = []
    compare(tiny, tmp_path / "out", on_progress=states.append)
    assert [(s["run"], s["step"]) for s in states] == [(r, s) for r in (1, 2, 3) for s in range(1, 7)]
    assert {s["runs"] for s in states} == {3} and {s["steps"] for s in states} == {6}
    assert list(dict.fromkeys(s["label"] for s in states)) == [
        "PolarExpMuon",
        "GramMuon",
        "CacheMuon.paper gamma=2",
    ]


def test_an_interrupted_comparison_goes_on(tiny, tmp_path):
    whole = compare(tiny, tmp_path / "whole")
    out, states = tmp_path / "out", []

    def in_the_second_run():
        return bool(states) and (states[-1]["run"], states[-1]["step"]) == (2, 3)

    with pytest.raises(Interrupted) as interrupt:
        compare(tiny, out, on_progress=states.append, stop=in_the_second_run)
    assert (interrupt.value.folder.name, interrupt.value.step) == ("gram-s0", 4)
    finished = (out / "polar-s0" / RECORD).stat().st_mtime_ns

    states.clear()
    runs = compare(tiny, out, on_progress=states.append)
    assert [(s["run"], s["step"]) for s in states] == [(1, 6), (2, 5), (2, 6)] + [(3, s) for s in range(1, 7)]
    assert (out / "polar-s0" / RECORD).stat().st_mtime_ns == finished
    assert list(map(losses, runs)) == list(map(losses, whole))


def test_a_comparison_can_begin_anew(tiny, tmp_path):
    out, changed, states = tmp_path / "out", ["optimizer.lr=0.5"], []
    compare(tiny, out)
    with pytest.raises(ValueError, match=rf"holds another run: optimizer\.lr is {POLAR.lr} there, not 0\.5"):
        compare(tiny, out, overrides=changed)
    with pytest.raises(Interrupted):
        compare(tiny, out, overrides=changed, resume=False, stop=lambda: True)
    assert [path.name for path in out.iterdir()] == ["polar-s0"]  # nothing from before is left to go on with
    compare(tiny, out, overrides=changed, on_progress=states.append)
    assert len(states) == 5 + 6 + 6


def test_a_finished_run_without_steps_is_damaged(tiny, tmp_path):
    (run,) = compare(tiny, tmp_path / "out", variants=[GRAM])
    record = run.folder / RECORD
    record.write_text(record.read_text().splitlines()[-1] + "\n")
    with pytest.raises(ValueError, match="gram-s0 is damaged"):
        compare(tiny, tmp_path / "out", variants=[GRAM])


def test_the_demonstration_is_gpt2_nano():
    full, quick = demonstration(), demonstration(quick=True)
    assert full.base == replace(NANO.base, steps=300) and quick.base.steps < 10
    assert full.variants == quick.variants
    assert [one.label for one in full.variants] == [
        *("PolarExpMuon nesterov=True", "GramMuon nesterov=True"),
        *("CacheMuon.paper gamma=2", "CacheMuon.paper gamma=5", "CacheMuon.paper gamma=15"),
        "CacheMuon nesterov=True",
    ]
    assert all(isinstance(one, OptimizerConfig) for one in full.variants)
    assert [one.lr for one in full.variants] == [0.04, 0.04, 0.02, 0.02, 0.02, 0.08]
