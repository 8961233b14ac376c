import math
from dataclasses import replace

import pytest

from cachemuon_lab import sweep as module
from cachemuon_lab.compare import variant
from cachemuon_lab.config import OptimizerConfig, with_overrides
from cachemuon_lab.recipes import SEARCH_GRID, recipe
from cachemuon_lab.record import CHECKPOINT, Run
from cachemuon_lab.sweep import DATABASE, sweep

NANO = recipe("gpt2-nano")
GRID = {"optimizer.lr": (1e-3, 1e-2, 2e-2), "optimizer.momentum": (0.9,), "optimizer.adam_lr": (2e-3,)}


class Killed(BaseException):
    pass


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    shape = ("model.layers=1", "model.heads=2", "model.width=16", "model.context=16")
    length = ("steps=6", "batch_size=2", "validate_every=2", "validation_batches=1", "checkpoint_every=2")
    return replace(NANO, base=with_overrides(NANO.base, (f"data.path={folder}", *shape, *length)))


def values(result):
    return {trial.settings["optimizer.lr"]: (trial.value, trial.pruned) for trial in result.trials}


def killed_at(run, step):
    def on_progress(state):
        if (state["run"], state["step"]) == (run, step):
            raise Killed

    return on_progress


def test_the_default_grid_is_the_papers():
    assert math.prod(map(len, SEARCH_GRID.values())) == 36
    assert SEARCH_GRID == {
        "optimizer.lr": (1e-4, 1e-3, 1e-2, 2e-2),
        "optimizer.momentum": (0.9, 0.95, 0.99),
        "optimizer.adam_lr": (1e-4, 1e-3, 2e-3),
    }


def test_every_point_is_a_run(tiny, tmp_path):
    out, states = tmp_path / "out", []
    result = sweep(tiny, out, grid=GRID, on_progress=states.append)
    assert sorted(values(result)) == [1e-3, 1e-2, 2e-2] and result.points == 3
    assert [s["run"] for s in states] == [1] * 6 + [2] * 6 + [3] * 6 and {s["runs"] for s in states} == {3}
    for trial in result.trials:
        run = Run.open(trial.folder)
        assert run.complete and run.end["best_loss"] == trial.value and trial.steps == 6
        assert run.config.optimizer.kind == "polar" and run.config.optimizer.momentum == 0.9
        assert run.config.optimizer.lr == trial.settings["optimizer.lr"]
        assert trial.folder.name == f"lr{run.config.optimizer.lr:g}-momentum0.9-adam_lr0.002"
        assert not (trial.folder / CHECKPOINT).exists()
    assert [t.value for t in result.trials] == sorted(t.value for t in result.trials)
    assert result.best == result.trials[0] and result.measure == "validation loss"


def test_the_best_is_told_as_overrides_and_as_a_recipe_has_it(tiny, tmp_path):
    result = sweep(tiny, tmp_path / "out", grid=GRID, optimizer=variant(tiny, "paper", gamma=3.0), trials=1)
    lr = result.best.settings["optimizer.lr"]
    assert result.overrides == [f"optimizer.lr={lr}", "optimizer.momentum=0.9", "optimizer.adam_lr=0.002"]
    best = with_overrides(tiny.run(variant(tiny, "paper", gamma=3.0)), result.overrides).optimizer
    assert eval(result.optimizer, {"OptimizerConfig": OptimizerConfig}) == best
    assert result.optimizer.startswith('OptimizerConfig("paper"') and "gamma=3.0" in result.optimizer


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_sweep_goes_on(tiny, tmp_path, step):
    whole = sweep(tiny, tmp_path / "whole", grid=GRID)
    out, states = tmp_path / "out", []
    with pytest.raises(Killed):
        sweep(tiny, out, grid=GRID, on_progress=killed_at(2, step))
    result = sweep(tiny, out, grid=GRID, on_progress=states.append)
    resumed = step - step % 2  # the last checkpoint
    assert [(s["run"], s["step"]) for s in states] == [
        *((2, s) for s in range(resumed + 1, 7)),
        *((3, s) for s in range(1, 7)),
    ]
    assert values(result) == values(whole)


def test_it_may_be_killed_twice_and_its_last_point_too(tiny, tmp_path):
    out = tmp_path / "out"
    for run, step in ((1, 3), (1, 5), (3, 3)):
        with pytest.raises(Killed):
            sweep(tiny, out, grid=GRID, on_progress=killed_at(run, step))
    result = sweep(tiny, out, grid=GRID)
    assert values(result) == values(sweep(tiny, tmp_path / "whole", grid=GRID))
    assert sweep(tiny, out, grid=GRID, on_progress=killed_at(1, 1)) == result  # nothing is done again


def test_trials_are_done_in_portions(tiny, tmp_path):
    done = [len(sweep(tiny, tmp_path / "out", grid=GRID, trials=n).trials) for n in (1, 1, 5)]
    assert done == [1, 2, 3]


def test_a_bad_point_is_pruned(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STARTUP_TRIALS", 2)
    grid = {"optimizer.adam_lr": (50.0, 1e-3, 2e-3)}  # the sampler's order, which is fixed, begins at the end
    result = sweep(tiny, tmp_path / "out", grid=grid, prune=True)
    assert [t.pruned for t in result.trials] == [False, False, True]
    bad = result.trials[-1]
    assert bad.settings == {"optimizer.adam_lr": 50.0} and bad.steps < 6 and not Run.open(bad.folder).complete
    unpruned = sweep(tiny, tmp_path / "unpruned", grid=grid)
    assert [t.pruned for t in unpruned.trials] == [False] * 3 and unpruned.best.value == result.best.value


def test_a_proxy_is_validated_often_enough(tiny, tmp_path):
    result = sweep(tiny, tmp_path / "out", grid=GRID, steps=4, trials=1)
    assert (result.base.steps, result.base.validate_every) == (4, 1)
    large = recipe("gpt2-large-owt")
    assert module._base(large, large.variants[0], 382, ()).validate_every == 38
    assert module._base(large, large.variants[0], 382, ("validate_every=25",)).validate_every == 25
    assert module._base(large, large.variants[0], None, ()).validate_every == 100


@pytest.mark.filterwarnings("ignore:a gradient has a NaN:RuntimeWarning")
def test_a_point_that_never_was_finite_is_the_worst(tiny, tmp_path):
    result = sweep(tiny, tmp_path / "out", grid={"optimizer.adam_lr": (2e-3, 1e30)})
    assert result.trials[-1].value == math.inf and result.best.settings == {"optimizer.adam_lr": 2e-3}


def test_another_sweep_in_the_folder_is_refused(tiny, tmp_path):
    out = tmp_path / "out"
    sweep(tiny, out, grid=GRID, trials=1)
    with pytest.raises(ValueError, match=r"holds another sweep: batch_size is 2 there, not 4"):
        sweep(tiny, out, grid=GRID, overrides=["batch_size=4"])
    with pytest.raises(ValueError, match=r"holds another sweep: grid is .* there, not .*"):
        sweep(tiny, out, grid={"optimizer.lr": (1.0,)})
    with pytest.raises(ValueError, match=r"unknown key 'optimizer.beta'"):
        sweep(tiny, tmp_path / "new", grid={"optimizer.beta": (1.0,)})
    assert not (tmp_path / "new").exists()


def test_a_damaged_database_is_named(tiny, tmp_path):
    (tmp_path / DATABASE).write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match=f"{DATABASE} could not be used: .*not a database"):
        sweep(tiny, tmp_path, grid=GRID)
