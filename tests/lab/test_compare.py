import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from cachemuon_lab.compare import compare, configure, plan, toy, variant
from cachemuon_lab.config import OptimizerConfig, with_overrides
from cachemuon_lab.recipes import RECIPES, recipe
from cachemuon_lab.record import CHECKPOINT, RECORD, Run
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


def test_a_toy_keeps_the_optimizers():
    small = toy(recipe("demo"))
    assert small.variants == recipe("demo").variants and small.base.steps < 10


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_trainings_side_by_side_are_those_one_after_another(tiny, tmp_path, one_thread):
    states = []
    runs = compare(tiny, tmp_path / "two", workers=2, on_progress=states.append)
    alone = compare(tiny, tmp_path / "one")
    assert [run.folder.name for run in runs] == [run.folder.name for run in alone]
    assert list(map(losses, runs)) == list(map(losses, alone))
    assert {run.environment["threads"] for run in runs} == {1}
    for number in (1, 2, 3):
        assert [s["step"] for s in states if s["run"] == number] == list(range(1, 7))
    states.clear()
    compare(tiny, tmp_path / "two", workers=2, on_progress=states.append)
    assert [(s["run"], s["step"]) for s in states] == [(1, 6), (2, 6), (3, 6)]  # each told once


def test_trainings_side_by_side_can_be_interrupted(tiny, tmp_path, one_thread):
    longer = replace(tiny, base=replace(tiny.base, steps=80))
    states = []
    with pytest.raises(Interrupted):
        compare(longer, tmp_path / "out", workers=2, on_progress=states.append, stop=lambda: len(states) > 20)
    reached = [Run.open(path).steps[-1]["step"] for path in sorted((tmp_path / "out").iterdir())]
    assert reached and max(reached) < 80
    runs = compare(longer, tmp_path / "out", workers=2)
    assert losses(runs[0]) == losses(compare(longer, tmp_path / "whole", variants=[POLAR])[0])


def test_an_error_in_one_of_them_is_raised(tiny, tmp_path):
    wrong = replace(tiny, base=with_overrides(tiny.base, ["data.path=nowhere"]))
    with pytest.raises((ValueError, OSError), match="nowhere"):
        compare(wrong, tmp_path / "out", workers=2)
    with pytest.raises(ValueError, match="workers must be an integer of at least 1, got 0"):
        compare(tiny, tmp_path / "out", workers=0)


def test_a_training_process_that_dies_is_told(tiny, tmp_path):
    longer = replace(tiny, base=replace(tiny.base, steps=5000))

    def kill_one(state):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
            return

    with pytest.raises(OSError, match="a training process died"):
        compare(longer, tmp_path / "out", workers=2, on_progress=kill_one)


def test_a_run_continues_a_finished_one(tiny, tmp_path):
    longer = replace(tiny, base=replace(tiny.base, steps=10, continues=(6,)))
    variants = [GRAM, PAPER]
    short = compare(tiny, tmp_path / "short", variants=variants)
    states = []
    runs = compare(
        longer, tmp_path / "long", variants=variants, continued=tmp_path / "short", on_progress=states.append
    )
    assert [s["step"] for s in states] == [7, 8, 9, 10] * 2
    assert list(map(losses, runs)) == list(
        map(losses, compare(longer, tmp_path / "whole", variants=variants))
    )
    for before, run in zip(short, runs, strict=True):
        assert run.steps[:6] == before.steps and run.end["step"] == 10
        assert run.steps[6]["lr"] > run.steps[5]["lr"]  # the schedule of all ten steps
    again = compare(longer, tmp_path / "long", variants=variants, continued=tmp_path / "nowhere")
    assert list(map(losses, again)) == list(map(losses, runs))


def test_only_the_same_run_can_be_continued(tiny, tmp_path):
    longer = replace(tiny, base=replace(tiny.base, steps=10, continues=(6,)))
    go_on = partial(compare, variants=[GRAM], continued=tmp_path / "short")
    with pytest.raises(ValueError, match="gram-s0 is no run"):
        go_on(longer, tmp_path / "long")
    compare(tiny, tmp_path / "short", variants=[GRAM])
    with pytest.raises(
        ValueError, match=r"gram-s0 has another run: optimizer\.momentum is 0\.95 there, not 0\.9"
    ):
        go_on(longer, tmp_path / "long", overrides=["optimizer.momentum=0.9"])
    with pytest.raises(ValueError, match=r"must have a finished run of 5 steps .* got a finished run of 6"):
        go_on(longer, tmp_path / "long", overrides=["continues=5"])
    (tmp_path / "short" / "gram-s0" / CHECKPOINT).unlink()
    with pytest.raises(ValueError, match="and its checkpoint"):
        go_on(longer, tmp_path / "long")
    assert not (tmp_path / "long").exists()
