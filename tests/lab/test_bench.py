import json
from functools import partial

import pytest
import torch
from pages import DOCS, check_tables
from typer.testing import CliRunner
from unclipped import unclipped

from cachemuon import GramNS, exact_residual, normalize
from cachemuon.newton_schulz.products import Workspace
from cachemuon_lab import peers
from cachemuon_lab.bench import PARTS, run
from cachemuon_lab.cli import app
from cachemuon_lab.performance import draw, renewed, tables, to_markdown, to_page
from cachemuon_lab.timing import Drive, race, ratios
from cachemuon_lab.workloads import full_gram_loop, gamma_for, new_basis, plain_gram_loop, smooth_gradients


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:  # a peer that is installed may compile for a minute
        patch.setattr(
            "cachemuon_lab.stepping.installed",
            lambda: {"torch.optim.Muon": peers.installed()["torch.optim.Muon"]},
        )
        return run(out, PARTS, rounds=2, quick=True, tell=lambda text: None), out


def test_every_part_becomes_a_table_and_a_picture(results):
    found, out = results
    made = tables(found)
    parts = {"solvers", "steps1", "steps2", "even", "host", "ceilings", "worst", "share", "size", "number"}
    assert set(made) == parts
    for title, cells in made.values():
        assert title and len(cells) >= 2 and len({len(row) for row in cells}) == 1
    assert to_page(found).count("\n|---|") == len(made)
    pictures = draw(found, out)
    assert [path.name for path in pictures] == ["steps.png", "growth.png"]
    assert all(path.stat().st_size > 5000 for path in pictures)


def test_it_goes_on_where_it_was_interrupted(results, monkeypatch):
    found, out = results
    assert json.loads((out / "bench.json").read_text()) == json.loads(json.dumps(found))
    monkeypatch.setitem(PARTS, "solvers", lambda *arguments: pytest.fail("measured again"))
    assert run(out, ["solvers"], rounds=2, quick=True, tell=print)["solvers"] == found["solvers"]


def test_results_of_another_machine_are_not_mixed_in(results, tmp_path):
    found, _ = results
    (tmp_path / "bench.json").write_text(json.dumps(found | {"machine": {"device": "abacus"}}))
    with pytest.raises(ValueError, match=r"measured elsewhere .*abacus.*--overwrite"):
        run(tmp_path, ["worst"], rounds=2, quick=True, tell=print)


def test_the_command_makes_tables_from_earlier_results(results, tmp_path):
    _, out = results
    done = CliRunner().invoke(app, ["bench", "--from", str(out / "bench.json"), "--out", str(tmp_path)])
    assert done.exit_code == 0 and "CacheMuon" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.md", "growth.png", "steps.png"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--only", "tea"], "--only must be one of solvers"), (["--rounds", "1"], "at least 2")],
)
def test_bad_arguments_are_named(arguments, told):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ValueError) and told in str(done.exception)


def test_a_page_gets_its_tables_renewed(results):
    made = tables(results[0])
    old = "# Page\n<!-- table worst -->\nold\n<!-- end -->\nwords\n<!-- table size --><!-- end -->\n"
    new = renewed(old, made)
    assert to_markdown(made["worst"][1]) in new and to_markdown(made["size"][1]) in new
    assert "old" not in new and "\nwords\n" in new and renewed(new, made) == new
    tea = "<!-- table tea -->green<!-- end -->"
    assert renewed(old + tea, made) == new + tea  # another command's
    with pytest.raises(ValueError, match=r"asks for the tables \['tea'\]"):
        renewed(tea, made)


def test_the_contenders_take_turns():
    turns = []
    seconds = race({name: lambda name=name: turns.append(name) for name in "abc"}, 3, "cpu", warm=0)
    assert "".join(turns) == "abcbcacab"
    assert all(len(times) == 3 for times in seconds.values())
    assert ratios({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 2.0]}, "b")["a"] == [1.0, 0.75, 1.5]


def test_the_plain_loop_is_gram_newton_schulz():
    M = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
    assert torch.dist(plain_gram_loop(M), GramNS()(M)) < 1e-3
    assert torch.dist(full_gram_loop(normalize(M).unsqueeze(0), Workspace())[0], GramNS()(M)) < 1e-3


def test_the_gradients_hit_as_often_as_asked():
    gradients = smooth_gradients((40, 24), 40, "cpu")
    assert gradients[0].shape == (40, 24) and gradients[0].is_contiguous()
    drive = Drive(partial(unclipped, gamma=gamma_for(gradients, 0.59), momentum=0.0), [gradients])
    for _ in gradients:
        drive.load()
        drive.step()
    assert 0.4 < drive.optimizer.cache_stats()["hits"] / (len(gradients) - 1) < 0.75


def test_a_new_basis_is_never_hit():
    one, two = new_basis(16, 20, 2, "cpu")
    _, transform = GramNS().with_transform(one)
    assert exact_residual(transform @ normalize(two)) > 25


def test_peak_memory_is_what_a_step_allocates():
    class Allocating(torch.optim.SGD):
        def step(self, closure=None):
            torch.empty(2**20)  # 4 MiB, freed at once
            torch.empty(2**18)

    drive = Drive(lambda params: Allocating(params, lr=0.1), [[torch.zeros(2, 2)]])
    assert 4 <= drive.peak_bytes() / 2**20 < 4.2


def test_the_pages_have_the_tables_of_the_recorded_results():
    recorded = json.loads((DOCS / "notebook" / "performance.json").read_text())
    check_tables(tables(recorded))
