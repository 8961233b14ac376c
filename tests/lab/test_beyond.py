"""The study of docs/results.md: its runs are told apart, and the page has what was measured."""

import math
from dataclasses import replace
from pathlib import Path

import beyond
from made_tokens import write_tokens
from trainings import Trainings

from cachemuon_lab.config import OptimizerConfig
from cachemuon_lab.performance import renewed

MOMENTA = (0.9, 0.95)


def test_every_run_has_a_folder_of_its_own():
    found = [
        (task, one)
        for task in beyond.RECIPES
        for method in beyond.METHODS
        for one in beyond.grid(task, method, MOMENTA)
    ]
    near = [(task, other) for task, one in found for other in beyond.neighbours(one)]
    jobs = {beyond.Job(task, one, seed) for task, one in found + near for seed in (0, 1)}
    study = beyond.Study(Trainings(Path("runs")), {task: Path("data") for task in beyond.RECIPES})
    runs = {job.slug: study.config(job) for job in jobs}
    assert len(runs) == len(set(runs.values())) == len({study.config(job) for job in jobs}) > 300
    assert "text-cache-lr0.02-m0.9-nesterov-clip0.125-s0" in runs
    assert "images-cache-lr0.02-m0.9-ema-cache_all1-min_rows64-clip0.125-vectors4-s1" in runs


def test_the_search_climbs_to_the_best_it_can_find(tmp_path, monkeypatch):
    """A loss that is a function of the settings, with its minimum off the grid."""
    study, asked = beyond.Study(Trainings(tmp_path), {"text": tmp_path}), []

    def run(jobs):
        jobs = list(jobs)
        asked.extend(jobs)
        study.runs |= dict.fromkeys(jobs)

    def loss(job):
        one = job.optimizer
        clipped = one.kind == "cache" and one.clip != 1 / 6
        return abs(math.log(one.lr / 0.11)) + 10 * abs(one.momentum - 0.95) + one.nesterov + clipped

    monkeypatch.setattr(study, "run", run)
    monkeypatch.setattr(study, "loss", loss)
    searched = {("text", kind): beyond.grid("text", kind, MOMENTA) for kind in beyond.RIVALS}
    best = study.tune(searched)
    assert {(one.lr, one.momentum, one.nesterov) for one in best.values()} == {(0.12, 0.95, False)}
    assert best["text", "cache"].clip == 1 / 6
    assert len(asked) == len(set(asked)) == sum(map(len, searched.values()))


def test_a_study_trains_resumes_and_sums_up(tmp_path, monkeypatch):
    data = write_tokens(tmp_path / "text", train=4000, val=2000)
    tiny = ("model.width=32", "model.layers=1", "model.context=16", "steps=3", "validate_every=3")
    configure = beyond.configure
    monkeypatch.setattr(
        beyond,
        "configure",
        lambda recipe, optimizer, settings: configure(recipe, optimizer, (*settings, *tiny)),
    )
    gram = OptimizerConfig("gram", lr=0.01)
    jobs = [beyond.Job("text", method, 0) for method in (gram, replace(gram, kind="stale"))]
    study = beyond.Study(Trainings(tmp_path / "out", workers=1), {"text": data})
    study.run(jobs)
    runs = study.runs
    before = (tmp_path / "out" / jobs[0].slug / "record.jsonl").stat().st_mtime_ns
    study = beyond.Study(Trainings(tmp_path / "out", workers=1), {"text": data})
    study.run(jobs)
    assert study.runs == runs
    assert (tmp_path / "out" / jobs[0].slug / "record.jsonl").stat().st_mtime_ns == before
    row = study.summary("text", jobs[1].optimizer, [0])
    assert row["outcomes"] == {"first": 4, "hit": 4, "expired": 4} and row["kind"] == "stale"
    assert row["losses"] == [round(runs[jobs[1]].loss, 4)]


def rows():
    """A task's methods, as a study sums them up."""
    gram = {"kind": "gram", "lr": 0.04, "momentum": 0.9, "nesterov": True, "losses": [2.0, 2.1, 2.2, 2.3]}
    gram |= {"accuracies": [None] * 4, "outcomes": {"fresh": 100}, "flops": 1000}
    ours = gram | {"kind": "cache", "clip": None, "lr": 0.08, "losses": [1.9, 2.0, 2.0, 2.2], "flops": 320}
    ours |= {"outcomes": {"hit": 90, "expired": 10}}
    quintic = gram | {"kind": "jordan", "losses": [2.0, 2.1, 2.1, 2.2], "flops": 1350}
    adam = {"kind": "adamw", "lr": 2e-3, "losses": [3.0, 3.1, 3.2], "accuracies": [None] * 3}
    return [gram, quintic, ours, adam | {"outcomes": {}, "flops": 0}]


def test_tables_and_picture_of_a_study(tmp_path):
    methods = rows()
    search = [
        {key: row.get(key) for key in ("kind", "lr", "momentum", "nesterov")} | {"loss": 2.0}
        for row in methods
    ]
    results = {"text": {"methods": methods, "search": search}}
    page = "".join(f"<!-- table text_{name} -->\n<!-- end -->\n" for name in ("methods", "search"))
    made = renewed(page, beyond.tables(results))
    assert (
        "| CacheMuon | 0.08 | 0.9, Nesterov | 2.0250 | 1.9000, 2.0000, 2.0000, 2.2000 | -0.0750 ± 0.0250 |"
        in made
    )  # the quintic is the best fresh Muon here
    assert "| +0.0000 | 90% | 32% | 36% |" in made  # the worst seed, hits, FLOPs, those at width 768
    assert "| CacheMuon, 0.9, Nesterov |  | 2.0000 |" in made
    assert "| AdamW, its own rates | 2.0000 (0.002) |  |" in made
    beyond.draw(results, tmp_path / "beyond.png")
    assert (tmp_path / "beyond.png").stat().st_size > 10_000
