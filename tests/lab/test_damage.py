"""A damaged run folder is told in one line that names the file, and nothing is lost."""

import subprocess
import sys

import pytest
import torch

from cachemuon_lab.config import with_overrides
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import CHECKPOINT, Run
from cachemuon_lab.train import Interrupted, train

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "steps=4", "batch_size=2"]
CONFIG = with_overrides(recipe("gpt2-nano").base, [*TINY, "validation_batches=1", "checkpoint_every=1"])


@pytest.fixture
def stopped(tmp_path):
    """A run that was interrupted after its second step."""
    stops = iter([False, True])
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path, stop=lambda: next(stops))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("environment.json", "[]", "environment.json is damaged: expected an object, got list"),
        ("record.jsonl", '{"kind": "step"}\n{}\n', "line 1, of kind 'step', lacks step, loss, hits"),
        (
            "record.jsonl",
            '{"kind": "age", "step": 1.5, "name": "w", "age": 1, "cosine": 0}\n\n',
            "must be an integer, got 1.5",
        ),
        ("record.jsonl", '{"kind": "news", "step": 1}\n', "is of kind 'news'"),
    ],
)
def test_a_damaged_file_is_named(stopped, file, text, words):
    (stopped / file).write_text(text)
    with pytest.raises(ValueError, match=words):
        Run.open(stopped)


def test_a_record_shorter_than_its_checkpoint_is_not_gone_on_with(stopped):
    (stopped / "record.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"record.jsonl is damaged: the checkpoint is of step 2"):
        train(CONFIG, stopped, resume=True)


def test_a_checkpoint_without_its_parts_is_refused(stopped):
    whole = torch.load(stopped / CHECKPOINT, weights_only=True)
    torch.save({key: whole[key] for key in ("format", "generators", "optimizer")}, stopped / CHECKPOINT)
    with pytest.raises(ValueError, match=r"latest.pt is damaged: it lacks model, standing"):
        train(CONFIG, stopped, resume=True)


def test_a_checkpoint_of_another_model_is_refused(stopped):
    whole = torch.load(stopped / CHECKPOINT, weights_only=True)
    whole["model"].popitem()
    torch.save(whole, stopped / CHECKPOINT)
    with pytest.raises(ValueError, match=r"latest.pt is of another model"):
        train(CONFIG, stopped, resume=True)


def test_without_the_laboratorys_packages_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import cachemuon_lab; cachemuon_lab.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert result.stderr == "cachemuon: typer is not installed: pip install 'cachemuon[lab]'\n"
