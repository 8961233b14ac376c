import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cachemuon_lab.config import with_overrides
from cachemuon_lab.recipes import recipe
from cachemuon_lab.train import train

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "steps=4", "batch_size=2"]


def test_a_run_and_its_resumption_are_one_curve(tmp_path):
    base = recipe("gpt2-nano").run(recipe("gpt2-nano").variants[2])
    config = with_overrides(base, [*TINY, "validate_every=2", "validation_batches=1", "checkpoint_every=1"])
    stops = iter([False, True])
    with pytest.raises(Exception, match="stopped after step 2"):
        train(config, tmp_path, stop=lambda: next(stops), tensorboard=True)
    run = train(config, tmp_path, resume=True, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in run.steps]
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4]
    assert sum(event.value for event in events.Scalars("step/misses/first")) == 4


def test_without_the_package_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = with_overrides(recipe("gpt2-nano").base, TINY)
    with pytest.raises(ValueError, match="needs the package tensorboard: pip install tensorboard"):
        train(config, tmp_path, tensorboard=True)
