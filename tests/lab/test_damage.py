"""A damaged run folder is told in one line that names the file, and nothing is lost."""

import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

from cachemuon_lab.cli import main
from cachemuon_lab.compare import configure, variant
from cachemuon_lab.recipes import recipe
from cachemuon_lab.record import CHECKPOINT, LOCK, Run
from cachemuon_lab.train import Interrupted, train

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "steps=4", "batch_size=2"]
TINY += ["validation_batches=1", "checkpoint_every=1"]
CONFIG = configure(recipe("gpt2-nano"), variant(recipe("gpt2-nano")), TINY)


STEP = '{"kind": "step", "step": 1, "loss": %s, "hits": 0, "misses": %s, "flops": 0, "flops_paper": 0}\n'


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
            "step must be a count, got 1.5",
        ),
        ("record.jsonl", '{"kind": "news", "step": 1}\n', "is of kind 'news'"),
        ("record.jsonl", '{"kind": ["step"], "step": 1}\n', r"is of kind \['step'\]"),
        ("record.jsonl", STEP % ('"x"', "{}"), "line 1: loss must be a number, got 'x'"),
        ("record.jsonl", STEP % ("null", "{}"), "line 1: loss must be a number, got None"),
        ("record.jsonl", STEP % ("1", "[]"), r"line 1: misses must be counts, got \[\]"),
        ("record.jsonl", STEP % ("1", '{"first": -1}'), "line 1: misses must be counts"),
        ("record.jsonl", "[" * 100_000 + "\n{}\n", "line 1, is no record"),
        ("config.json", "[" * 100_000, "config.json is damaged: a run's configuration must be JSON"),
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


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def damaged(change):
    def damage(folder):
        state = torch.load(folder / CHECKPOINT, weights_only=True)
        change(state)
        torch.save(state, folder / CHECKPOINT)

    return damage


def cut(file, share):
    def damage(folder):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: int(share * len(whole))])

    return damage


def flipped(folder):
    whole = bytearray((folder / CHECKPOINT).read_bytes())
    for place in range(0, len(whole), 997):
        whole[place] ^= 0xFF
    (folder / CHECKPOINT).write_bytes(whole)


DAMAGES = {
    "no longer begun": (cut(CHECKPOINT, 0), "is no readable checkpoint"),
    "half of it": (cut(CHECKPOINT, 0.5), "is no readable checkpoint"),
    "all but its end": (cut(CHECKPOINT, 0.999), "is no readable checkpoint"),
    "bits": (flipped, "is no readable checkpoint"),
    "a bomb": (
        lambda folder: torch.save({"format": 1, "model": Bomb(folder / "boom")}, folder / CHECKPOINT),
        "is no readable checkpoint",
    ),
    "a plain bomb": (
        lambda folder: (folder / CHECKPOINT).write_bytes(pickle.dumps(Bomb(folder / "boom"))),
        "is no readable checkpoint",
    ),
    "format": (damaged(lambda s: s.update(format=torch.ones(2))), "must be a checkpoint of format 1"),
    "standing": (damaged(lambda s: s.update(standing=[])), "standing must be a dict, got list"),
    "no standing": (damaged(lambda s: s.update(standing={})), r"is damaged: standing.seconds is missing"),
    "step 0": (damaged(lambda s: s["standing"].update(step=0)), "is damaged: it must be of a step"),
    "step -1": (damaged(lambda s: s["standing"].update(step=-1)), "is damaged: step must be at least 0"),
    "step x": (
        damaged(lambda s: s["standing"].update(step="x")),
        "standing.step must be an integer, got 'x'",
    ),
    "step later": (damaged(lambda s: s["standing"].update(step=9)), "the checkpoint is of step 9"),
    "of later": (damaged(lambda s: s["standing"].update(mood=1)), "unknown key 'standing.mood'"),
    "generator": (damaged(lambda s: s["generators"][0].update(cpu=torch.zeros(3))), "is damaged: RNG state"),
    "generators": (damaged(lambda s: s.update(generators=[])), "is damaged: it must be of a step, with"),
    "optimizer": (damaged(lambda s: s.update(optimizer={})), "is damaged: state_dict must have a list"),
    "weights": (damaged(lambda s: s["model"].popitem()), "is of another model"),
    "dtype": (
        damaged(lambda s: s.update(model={name: t.int() for name, t in s["model"].items()})),
        "is of another model: .* must be torch.float32, got torch.int32",
    ),
    "config": (cut("config.json", 0.5), "config.json is damaged"),
    "name": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace('"name": "', '"name": "../../')
        ),
        "holds another run: name is '../../gpt2-nano",
    ),
    "record": (cut("record.jsonl", 0.5), r"record.jsonl is damaged: the checkpoint is of step 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_told_in_one_line_and_nothing_is_overwritten(stopped, damage, capsys):
    spoil, words = DAMAGES[damage]
    spoil(stopped)
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != LOCK}
    settings = [word for one in TINY for word in ("--set", one)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "gpt2-nano", "--out", str(stopped), "--resume", *settings])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and re.search(words, said), said
    after = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != LOCK}
    assert before == after
    assert not (stopped / "boom").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps=" + "9" * 400, "steps must be at most 9007199254740992"),
        ("seed=" + "9" * 40, "seed must be from -9007199254740992 to 9007199254740992"),
        ("optimizer.max_age=" + "9" * 30, "optimizer.max_age must be at most"),
        ("batch_size=99999999999999", "there is not enough memory"),
    ],
)
def test_a_setting_beyond_all_measure_is_told_in_one_line(tmp_path, setting, words, capsys):
    settings = [word for one in (*TINY, setting) for word in ("--set", one)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "gpt2-nano", "--out", str(tmp_path / "run"), *settings])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and re.search(words, said), said


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "..", "a\\b"])
def test_a_name_that_is_a_path_makes_no_folder(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "gpt2-nano", "--set", f"name={name}"])
    assert ended.value.code == 2 and "must be that of a folder under runs, no path" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_the_laboratorys_packages_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import cachemuon_lab; cachemuon_lab.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    told = "cachemuon: typer is not installed: in a clone, pip install -c constraints.txt '.[lab]'\n"
    assert result.stderr == told


def test_overwriting_a_damaged_run_begins_anew(stopped):
    (stopped / "record.jsonl").write_text("garbage{\n{}\n")
    run = train(CONFIG, stopped, overwrite=True)
    assert run.complete and [line["step"] for line in run.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("resume", [False, True])
def test_what_has_lost_its_configuration_is_not_written_over(stopped, resume):
    (stopped / "config.json").unlink()
    before = {path: path.read_bytes() for path in (stopped / "record.jsonl", stopped / CHECKPOINT)}
    with pytest.raises(ValueError, match=r"has record.jsonl and .*latest.pt, but no config.json"):
        train(CONFIG, stopped, resume=resume)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert train(CONFIG, stopped, overwrite=True).complete


def test_a_kill_while_a_run_is_overwritten_leaves_no_old_losses_under_new_settings(stopped, monkeypatch):
    other = configure(recipe("gpt2-nano"), variant(recipe("gpt2-nano")), [*TINY, "optimizer.lr=0.5"])
    monkeypatch.setattr("cachemuon_lab.record.ENVIRONMENT", "no folder/environment.json")  # it ends there
    with pytest.raises(OSError):
        train(other, stopped, overwrite=True)
    monkeypatch.undo()
    run = Run.open(stopped)
    assert run.config.optimizer.lr == 0.5 and not run.steps and not run.complete
    assert train(other, stopped, resume=True).complete


def test_a_comparison_overwrites_what_has_lost_its_configuration(tmp_path):
    from cachemuon_lab.compare import compare

    nano = recipe("gpt2-nano")
    few = {"variants": nano.variants[:1], "overrides": TINY, "resume": False}
    (run,) = compare(nano, tmp_path, **few)
    (run.folder / "config.json").unlink()
    (again,) = compare(nano, tmp_path, **few)
    assert again.complete


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "gpt2-nano", "--set", "model.vocabulary=100"], "model.vocabulary must be at least 256"),
        (["flops", f"{'9' * 400}x4"], "a shape as 768x3072"),
        (["sweep", "gpt2-nano", "--trials", "0"], "trials"),
        (["bench", "--from", "FILE"], "must be an object of objects"),
    ],
)
def test_more_that_is_told_in_one_line(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "bench.json") if word == "FILE" else word for word in words])
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_the_help_alone_is_no_error_message(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "cachemuon:" not in capsys.readouterr().err
