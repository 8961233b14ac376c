import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cachemuon
from cachemuon_lab import checkpoint
from cachemuon_lab.cli import app, main
from cachemuon_lab.commands import training
from cachemuon_lab.data import prepare
from cachemuon_lab.recipes import RECIPES
from cachemuon_lab.record import CHECKPOINT, CONFIG, ENVIRONMENT, RECORD, Run
from cachemuon_lab.tables import shown

COMMAND = [sys.executable, "-m", "cachemuon_lab.cli"]
COMMANDS = ("demo", "prepare", "train", "compare", "sweep", "diagnose", "figures", "report", "flops")
TINY = (
    *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "steps=6", "batch_size=2"),
    *("validate_every=3", "validation_batches=1"),
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The arguments that make gpt2-nano tiny, on ten small files; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sources").mkdir()
    for i in range(10):
        (tmp_path / "sources" / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    return [word for one in ("data.path=sources", *TINY) for word in ("--set", one)]


def invoke(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def called(capsys, *arguments):
    """Exit code, stdout and stderr of the command itself."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    return end.value.code, *capsys.readouterr()


def refused(capsys, *arguments):
    """The one line that a wrong call writes."""
    code, _, told = called(capsys, *arguments)
    lines = [line for line in told.splitlines() if "  step " not in line]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("cachemuon: "), told
    return lines[0]


def text(output):
    """Without a table's borders and line breaks."""
    return " ".join(re.sub(r"[┃│━┏┓┡┩└┘├┤╇┳┴┼─]", " ", output).split())


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def interrupted(arguments, when):
    """Ctrl-C once stderr matches; returns the exit code and the lines of stderr that follow."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if re.search(when, line):
            break
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    return process.returncode, [line for line in told.splitlines() if "  step " not in line]


def test_help_names_every_command():
    told = text(invoke("--help").stdout)
    assert all(f" {command} " in told for command in COMMANDS)
    assert "openwebtext" in invoke("prepare", "--help").stdout


def test_the_version_is_the_library_s():
    assert invoke("--version").stdout == f"cachemuon {cachemuon.__version__}\n"


def test_help_loads_nothing_that_takes_long():
    script = "import sys, cachemuon_lab.cli; print({'torch', 'optuna', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_list_has_every_recipe_with_its_optimizers():
    told = text(invoke("train", "--list").stdout)
    for recipe in RECIPES.values():
        assert recipe.name in told and all(one.label in told for one in recipe.variants)


@pytest.mark.parametrize(
    "arguments, gram, standard",
    [
        (["gpt2-small", "--steps", "30520"], "37.18", "46.45"),
        (["gpt2-large", "--steps", "3814", "--replicas", "8"], "516.16", "644.99"),
        (["resnet18", "--steps", "39100"], "2.32", "4.06"),
    ],
)
def test_flops_of_the_papers_runs(arguments, gram, standard):
    told = text(invoke("flops", *arguments).stdout)
    assert f"GramMuon {gram} " in told and f"PolarExpMuon {standard} " in told and "PFLOPs" in told


def test_flops_of_the_papers_table():
    told = text(invoke("flops", "paper").stdout)
    assert "gpt2-large-owt 2 33% 516.16 644.99 445.97 13.6% 30.9% 468.77 9.2%" in told
    assert "gpt2-small-owt 5 45% 37.18 46.45 26.67 28.0% 43.0% 29.14 21.6%" in told
    assert "resnet18-cifar10 20 80% 2.32 4.06 1.98 15.0% 51.0% 1.24 46.7%" in told


def test_the_settings_of_one_recipe_can_be_shown():
    told = text(invoke("train", "resnet18-cifar10", "--list").stdout)
    assert "PolarExpMuon GramMuon CacheMuon.paper" in told and "Muon lr 0.01 0.02 0.01" in told
    assert "gamma 20 " in told and "steps 39,100" in told and "128 x 1 x 1" in told


def test_flops_of_any_shapes():
    told = text(invoke("flops", "768x3072", "768x3072", "10x512", "--hit-rate", "0.5").stdout)
    assert "768x3072 2 7.253 37.16 29 40.77 27.3%" in told  # the paper's
    assert "768x3072 2 7.248 22.84 15.51 32.28 47.0%" in told  # executed, exact probe
    assert "768x3072 2 3.719 15.68 15.51 32.28 1.4%" in told  # sketched
    assert "768x3072 2 5.086 16.94 15.51 32.28 12.0%" in told  # clipped, 96 directions
    assert "10x512 1 " in told and "GFLOPs of 3 matrices in 1 step " in told and "CacheMuon, 50% hits" in told


def test_train_writes_a_run(tiny):
    result = invoke("train", "gpt2-nano", "--optimizer", "paper", "--gamma", "1000", *tiny)
    run = Run.open("runs/gpt2-nano-paper-gamma1000")
    assert run.complete and run.config.steps == 6
    assert run.config.optimizer.label == "CacheMuon.paper gamma=1000"
    assert "The run is in runs/gpt2-nano-paper-gamma1000." in result.stdout
    assert "best validation" in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 6 and re.fullmatch(
        r"CacheMuon\.paper gamma=1000  step 6/6  "
        r"loss \d\.\d{3}  validation \d\.\d{3}  hits \d\d%  saved \d\d%",
        lines[-1],
    )


def test_a_terminal_sees_bars(tiny, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    told = re.sub(
        r"\x1b\[[^a-zA-Z]*[a-zA-Z]",
        "",
        invoke("train", "gpt2-nano", "--optimizer", "stale", *tiny, "--set", "steps=200").stderr,
    )
    assert re.search(r"StaleMuon .*200/200 .*hits 50%", told) and "step 200/200" not in told
    assert re.search(r"about \d+ s left", told) and "all runs" not in told
    two = ("compare", "gpt2-nano-ages", "--seeds", 2, "--set", "diagnostics=off", *tiny)
    told = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", invoke(*two).stderr)
    assert re.search(r"all runs .*2/2", told) and re.search(r"GramMuon, seed 1 \(2/2\) .*6/6", told)


def test_train_needs_to_be_told_what_to_do_with_a_run(tiny, capsys):
    arguments = ("train", "gpt2-nano", "--optimizer", "gram", "--out", "here", *tiny)
    assert called(capsys, *arguments)[0] == 0
    assert "here holds a finished run" in refused(capsys, *arguments)
    code, _, told = called(capsys, *arguments, "--resume")
    assert code == 0 and told == ""  # no step was needed
    code, _, told = called(capsys, *arguments, "--overwrite")
    assert code == 0 and "step 6/6" in told
    assert "exclude each other" in refused(capsys, *arguments, "--overwrite", "--resume")


def test_compare_draws_and_reports_and_goes_on(tiny):
    arguments = (
        "compare",
        "gpt2-small-owt",
        "--with",
        "adamw",
        "--with",
        "stale",
        "--seeds",
        2,
        "--out",
        "out",
    )
    settings = ("data.kind=python", "model.vocabulary=256", "autocast=none", "accumulation=1", "steps=3")
    arguments += (*tiny, *(word for one in settings for word in ("--set", one)))
    result = invoke(*arguments)
    told = text(result.stdout)
    for label in ("PolarExpMuon", "GramMuon", "AdamW", "StaleMuon"):
        assert label in told
    assert "CacheMuon.paper gamma=5, seed 1 (8/10)  step 3/3" in result.stderr
    names = ("polar", "gram", "paper-gamma5", "adamw", "stale")
    assert set(os.listdir("out")) == {f"{name}-s{seed}" for name in names for seed in (0, 1)} | {
        "figures",
        "report.html",
    }
    assert "The report is out/report.html" in result.stdout
    with open("out/report.html", encoding="utf-8") as page:
        assert "cachemuon compare gpt2-small-owt --seeds 2" in page.read()

    again = invoke(*arguments)
    assert text(again.stdout) == told and len(again.stderr.splitlines()) == 10  # each run told once

    drawn = invoke("figures", "out", "--out", "pictures", "--format", "svg").stdout
    assert set(os.listdir("pictures")) <= set(os.listdir("out/figures")) and "pictures/" in drawn
    assert "Not drawn" in drawn  # there are no diagnostics
    invoke("report", "out/gram-s0", "out/polar-s0", "--out", "page.html")
    assert os.path.getsize("page.html") > 1000


def test_diagnose_runs_the_twins_and_draws_them(tiny):
    told = invoke("diagnose", "gpt2-nano", "--out", "out", "--set", "ages=1,2", *tiny).stdout
    gate, ages = Run.open("out/gpt2-nano-diagnostics/paper-gamma5-s0"), Run.open("out/gpt2-nano-ages/gram-s0")
    assert gate.probes and ages.ages
    drawn = set(os.listdir("out/figures"))
    assert any("gate" in name for name in drawn) and any("ages" in name for name in drawn)
    assert "out/figures/" in told


def test_sweep_tells_the_best_as_overrides(tiny):
    arguments = ("sweep", "gpt2-nano", "--steps", 2, "--trials", 2, *tiny, "--set", "steps=2", "--out", "out")
    told = invoke(*arguments).stdout
    assert "34 of 36 points are left" in told
    best = re.search(
        r"--set (optimizer.lr=\S+) --set (optimizer.momentum=\S+) --set (optimizer.adam_lr=\S+)", told
    )
    assert best and re.search(r'^  OptimizerConfig\("polar".*\)$', told, re.MULTILINE)
    assert "34 of 36 points are left" not in invoke(*arguments).stdout


def test_the_folder_of_a_sweep_has_the_optimizer_in_its_name(tiny):
    for optimizer in ("gram", "paper"):
        invoke("sweep", "gpt2-nano", "--trials", 1, "--optimizer", optimizer, *tiny, "--set", "steps=2")
    assert set(os.listdir("runs")) == {"gpt2-nano-sweep-gram", "gpt2-nano-sweep-paper-gamma2"}


def test_train_and_compare_continue_a_shorter_run(tiny):
    train = ("train", "gpt2-nano", "--optimizer", "gram", *tiny)
    invoke(*train, "--out", "short")
    longer = ("--set", "steps=8", "--set", "continues=6")
    told = invoke(*train, *longer, "--continue", "short", "--out", "long").stderr
    assert "step 7/8" in told and "step 6/8" not in told and len(Run.open("long").steps) == 8
    invoke("compare", "gpt2-nano-ages", *tiny, "--set", "diagnostics=off", "--out", "all")
    settings = ("--set", "diagnostics=off", *longer, "--continue", "all", "--out", "more")
    told = invoke("compare", "gpt2-nano-ages", *tiny, *settings).stderr
    assert "step 7/8" in told and "step 6/8" not in told


def test_demo_ends_with_what_to_do_next(tmp_path):
    out = tmp_path / "out"
    result = invoke("demo", "--quick", "--out", out)
    lines = result.stdout.splitlines()
    (timing,) = [line for line in lines if line.endswith("s in all.")]
    assert re.fullmatch(r"\d+ s of training, \d+ s in all\.", timing)
    told, paper = text(result.stdout), shown("CacheMuon.paper gamma=")
    part = r"loss (0\.\d{3} (lower|higher)|the same), -?\d+% of the FLOPs"
    papers = " ".join(f"{paper}{gamma}: {part}" for gamma in (2, 5, 15))
    assert re.search(rf"The paper's settings, beside GramMuon: {papers} Today's", told)
    *_, cached = (re.escape(shown(one.label)) for one in RECIPES["demo"].variants)
    assert re.search(rf"Today's settings, beside (Gram|Nor)Muon Nesterov: {cached}: {part} A lower", told)
    assert "One seed" in told and f"The report is {out / 'report.html'}" in told
    next_steps = lines[lines.index("Next:") + 1 :]
    assert len(next_steps) == 3 and str(out / "report.html") in next_steps[0]
    assert "cachemuon compare demo --seeds 3" in next_steps[1] and "docs/quickstart.md" in next_steps[2]
    assert any("frontier" in name for name in os.listdir(out / "figures"))
    again = invoke("demo", "--quick", "--out", out)  # all runs are there: each is told once
    assert len(again.stderr.splitlines()) == 1 + len(RECIPES["demo"].variants)
    assert [line for line in again.stdout.splitlines() if "s in all" not in line] == [
        line for line in lines if "s in all" not in line
    ]


def test_ctrl_c_leaves_a_demonstration_that_goes_on(tiny):
    code, lines = interrupted(["demo", "--quick", "--out", "out"], when="step 1/6")
    assert code == 130 and lines[-1].startswith("cachemuon: stopped after step ")
    assert lines[-1].endswith("to go on: cachemuon demo --quick --out out")
    assert "Next:" in invoke("demo", "--quick", "--out", "out").stdout


def test_prepare_text_for_training(tiny, capsys):
    arguments = ("prepare", "text", *(f"sources/{i}.py" for i in range(10)), "--tokenizer", "bytes")
    told = invoke(*arguments, "--validation", 0.5, "--out", "tokens").stdout
    assert "10 documents" in told and "--set data.path=tokens" in told
    settings = [*tiny, "--set", "data.kind=tokens", "--set", "data.path=tokens"]
    assert called(capsys, "train", "gpt2-nano", *settings)[0] == 0
    assert "validation must be between 0 and 1" in refused(capsys, *arguments, "--validation", 2)
    assert "there is no text file nowhere.txt" in refused(capsys, "prepare", "text", "nowhere.txt")


def test_prepare_openwebtext(tmp_path, monkeypatch, capsys):
    def rows():
        raise OSError("Skylion007/openwebtext could not be streamed: no network")
        yield

    monkeypatch.setattr(prepare, "openwebtext_rows", rows)
    monkeypatch.setattr(prepare, "load_encode", lambda *_: lambda texts: [t.encode() for t in texts])
    assert "no network" in refused(capsys, "prepare", "openwebtext", "--out", tmp_path / "failed")
    monkeypatch.setattr(prepare, "openwebtext_rows", lambda: ({"text": f"Text {i}."} for i in range(40)))
    told = invoke("prepare", "openwebtext", "--out", tmp_path / "out", "--validation", 0.5).stdout
    assert "40 documents" in told
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["train"]["tokens"] + meta["val"]["tokens"] == 40 + sum(len(f"Text {i}.") for i in range(40))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("train nope", "recipe must be one of .*, got 'nope'"),
        ("train", "a recipe is needed"),
        ("train gpt2-nano --set foo=1", "unknown key 'foo'"),
        ("train gpt2-nano --set steps=many", "steps must be an integer, got 'many'"),
        ("train gpt2-nano --set steps", "an override must be key=value, got 'steps'"),
        ("train gpt2-nano --optimizer sgd", "optimizer must be one of"),
        ("train gpt2-nano --set data.path=nowhere", "nowhere"),
        ("train gpt2-small-owt", "data.path must be a folder with train.bin"),
        ("train gpt2-small-owt --set data.path=nowhere", "there is no token file nowhere/train.bin"),
        ("train resnet-nano --set data.path=nowhere", "nowhere"),
        ("train gpt2-nano --gamma five", "Invalid value for '--gamma'"),
        ("train --nope", "No such option"),
        ("compare gpt2-nano --with sgd", "optimizer must be one of"),
        ("compare gpt2-nano --seeds 0", "seeds must be"),
        ("compare nope", "recipe must be one of"),
        ("sweep nope", "recipe must be one of"),
        ("diagnose gpt2-small-owt", "gpt2-small-owt has no diagnostics; these have: .*gpt2-nano-ages"),
        ("figures nowhere", "there is no folder nowhere"),
        ("report .", "is no run, and holds none"),
        ("flops 768", "a shape as 768x3072, got '768'"),
        ("flops 0x3", "must be an integer of at least 1"),
        ("flops gpt2-small --steps 0", "steps must be"),
        ("nope", "No such command"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(capsys, *arguments.split()))
    assert os.listdir(tmp_path) == []


def test_a_damaged_run_is_named(tiny, capsys):
    arguments = ("train", "gpt2-nano", "--out", "out", *tiny)
    assert called(capsys, *arguments)[0] == 0
    whole = {name: Path("out", name).read_bytes() for name in (CONFIG, ENVIRONMENT, RECORD, CHECKPOINT)}
    for name, content in (
        (CONFIG, b"{"),
        (CONFIG, b"{}"),
        (CONFIG, b"\xff\xfe"),
        (ENVIRONMENT, b"{"),
        (RECORD, b"{broken\n" + whole[RECORD]),
    ):
        Path("out", name).write_bytes(content)
        for command in (("report", "out"), (*arguments, "--resume")):
            assert refused(capsys, *command)
        Path("out", name).write_bytes(whole[name])
    without_end = whole[RECORD].rstrip().rpartition(b"\n")[0] + b"\n"
    Path("out", RECORD).write_bytes(without_end)
    Path("out", CHECKPOINT).write_bytes(whole[CHECKPOINT][:100])
    assert "latest.pt is no readable checkpoint" in refused(capsys, *arguments, "--resume")


def test_a_full_disk_keeps_the_run(tiny, capsys, monkeypatch):
    arguments = ("train", "gpt2-nano", "--out", "out", *tiny, "--set", "checkpoint_every=2")
    replace = os.replace
    written = []

    def full(source, target):
        written.append(target)
        if len([path for path in written if path.name == "latest.pt"]) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        line = refused(capsys, *arguments)
    assert "No space left on device" in line and "the one before it is intact" in line
    assert checkpoint.load("out" / CHECKPOINT)["standing"]["step"] == 2


def test_a_limit_on_files_is_told_in_one_line(tiny, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        line = refused(capsys, "train", "gpt2-nano", *tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "latest.pt could not be written" in line


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def broken():
        raise RuntimeError("a bug")

    monkeypatch.setattr(training, "list_recipes", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "--list"])


def test_an_early_interrupt_tells_how_to_go_on(monkeypatch, capsys):
    def early():
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "list_recipes", early)
    code, _, told = called(capsys, "train", "--list", "--overwrite")
    assert (code, told) == (130, "cachemuon: interrupted; to go on: cachemuon train --list --resume\n")


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tiny):
    arguments = ["train", "gpt2-nano", *tiny, "--set", "steps=300", "--set", "name=a b", "--out", "out"]
    code, lines = interrupted(arguments, when="step 30/300")
    assert code == 130 and len(lines) == 1
    told = re.fullmatch(r"cachemuon: stopped after step (\d+) of out; to go on: cachemuon (.*)", lines[0])
    assert told and 30 <= int(told[1]) < 300
    again = shlex.split(told[2])
    assert again == [*arguments, "--resume"]
    before = Run.open("out")
    assert not before.complete and len(before.steps) == int(told[1])
    with open(f"out/{RECORD}", "ab") as file:
        file.write(b'{"kind": "st')  # and then the power failed
    assert torch.load("out" / CHECKPOINT, weights_only=True)["standing"]["step"] == int(told[1])
    done = subprocess.run([*COMMAND, *again], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in Run.open("out").steps] == list(range(1, 301))


def test_ctrl_c_leaves_a_sweep_that_goes_on(tiny):
    length = ["--set", "steps=200", "--set", "validate_every=50"]
    arguments = ["sweep", "gpt2-nano", *tiny, *length, "--trials", "2", "--out", "out"]
    code, lines = interrupted(arguments, when=r"\(2/36\)  step 20/200")
    assert code == 130 and len(lines) == 1 and "adam_lr" in lines[0]
    assert lines[0].endswith(f"to go on: cachemuon {shlex.join(arguments)}")
    result = invoke(*arguments[:-3], "1", *arguments[-2:])
    first = int(re.search(r"\(2/36\)  step (\d+)/200", result.stderr)[1])
    assert first >= 20 and "34 of 36 points are left" in result.stdout


def test_torchrun_trains_on_all_of_its_processes(tiny):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["train", "gpt2-nano", *tiny, "--set", "accumulation=2", "--out", "out"]
    done = subprocess.run(
        [*run, "-m", "cachemuon_lab.cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The run is in out.") == 1 and done.stderr.count("step 6/6") == 1
    assert Run.open("out").complete and Run.open("out").environment["processes"] == 2
