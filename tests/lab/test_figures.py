"""Each figure draws what the runs recorded, and says so when they did not."""

import math
from collections import defaultdict
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from made_runs import CONFIG, IMAGES, MATRICES, study, two_families, write_run
from matplotlib.container import BarContainer

from cachemuon_lab import drawing
from cachemuon_lab.config import OptimizerConfig
from cachemuon_lab.diagnostic_figures import ages, ages_by_layer, gate, gate_by_layer
from cachemuon_lab.drawing import Lacking
from cachemuon_lab.figures import figures, frontier, quality, work
from cachemuon_lab.recipes import PAPERS, nano_optimizers
from cachemuon_lab.tables import compare, shown

GRAM, POLAR = OptimizerConfig("gram"), OptimizerConfig("polar")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return study(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def comparison(runs):
    return compare(runs)


def line(axes, label):
    """The data of the one line whose label begins so."""
    (found,) = [one for one in axes.lines if str(one.get_label()).startswith(label)]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def test_quality_draws_the_mean_of_the_validations_and_names_the_best(comparison, runs):
    figure, caption = quality(comparison)
    left, right = figure.axes
    x, y = line(left, shown("CacheMuon.paper gamma=15 (3.105)"))
    seeds = [run.validations for run in runs if run.folder.name in ("paper-15-0", "paper-15-1")]
    assert list(x) == [validation["step"] for validation in seeds[0]]
    assert np.allclose(y, [(a["loss"] + b["loss"]) / 2 for a, b in zip(*seeds, strict=True)])
    assert comparison.title in caption and "standard deviation" in caption
    labels = [text.get_text() for text in right.get_yticklabels()]
    assert labels[:2] == [shown("CacheMuon.paper gamma=2"), shown("CacheMuon.paper gamma=5")]
    assert labels[-2:] == [shown("CacheMuon gamma=9"), "StaleMuon"]


def test_quality_draws_the_savings_against_both_baselines_as_bars(comparison):
    right = quality(comparison)[0].axes[1]
    bars = [container for container in right.containers if isinstance(container, BarContainer)]
    against_gram, against_polar = ([bar.get_width() for bar in container] for container in bars)
    spent = 8 * 102 + 99 * (5 * 25 + 3 * 128)  # gamma=5: first solves, then five hits and three misses
    assert against_gram[1] == pytest.approx(1 - spent / 80_000)
    assert against_polar[1] == pytest.approx(1 - spent / 100_000)
    assert against_gram[-1] == pytest.approx(0.5)  # StaleMuon solves every other step


def test_quality_without_a_baseline_has_no_bars(tmp_path):
    cached = write_run(tmp_path / "a", OptimizerConfig("paper", gamma=5.0), hits=5)
    assert len(quality(compare([cached]))[0].axes) == 1


def test_quality_of_images_names_the_best_accuracy(tmp_path):
    run = write_run(tmp_path / "a", GRAM, config=IMAGES)
    assert line(quality(compare([run]))[0].axes[0], "GramMuon (3.000, 90.0 %)")


def test_quality_shows_the_end_of_the_curves_and_survives_a_loss_that_is_not_finite(tmp_path):
    run = write_run(tmp_path / "a", GRAM)
    run.validations[1]["loss"] = math.nan
    low, high = quality(compare([run]))[0].axes[0].get_ylim()
    at_a_fifth = 3 + 4 * (math.exp(-1) - math.exp(-5))
    assert low < 3 and at_a_fifth < high < at_a_fifth + 0.1


def test_gate_draws_medians_over_matrices(runs):
    measured = [run for run in runs if run.probes]
    (a, b, c, d), caption = gate(measured)[0].axes, gate(measured)[1]
    by_step = defaultdict(list)
    for probe in measured[0].probes:
        by_step[probe["step"]].append(probe)
    for key, axes in (("residual", a), ("cosine", b)):
        x, y = line(axes, "all probes")
        assert list(x) == sorted(by_step)
        assert np.allclose(y, [np.median([probe[key] for probe in by_step[step]]) for step in x])
    x, y = line(b, "accepted")
    taken = {s: [p["cosine"] for p in probes if p["accepted"]] for s, probes in by_step.items()}
    assert np.allclose(y, [np.median(taken[step]) for step in x])
    assert list(line(a, "threshold")[1]) == [5, 5] and list(line(c, "threshold")[0]) == [5, 5]
    assert "792 probes" in caption and shown("CacheMuon.paper gamma=5") in caption

    rates = [np.mean([probe["accepted"] for probe in by_step[step]]) for step in sorted(by_step)]
    smooth = [np.mean(rates[max(0, i - 7) : i + 8]) for i in range(len(rates))]
    assert np.allclose(line(d, "accepted")[1], smooth)
    assert np.allclose(line(d, "rejected")[1], 1 - np.array(smooth))


def test_gate_bins_residuals_up_to_fifty(tmp_path):
    run = write_run(tmp_path / "a", OptimizerConfig("paper", gamma=5.0), diagnostics="gate", steps=2)
    made = [(0.5, 0.9), (0.6, 0.8), (49.9, 0.3), (50.1, -1.0), (math.inf, math.nan)]
    run.probes[:] = [
        {"step": 2, "residual": residual, "cosine": cosine, "accepted": residual < 5}
        for residual, cosine in made
    ]
    figure, caption = gate([run])
    x, y = line(figure.axes[2], "all probes")
    width = 49.9 / 25
    assert np.allclose(x, [width / 2, 24.5 * width]) and np.allclose(y, [0.85, 0.3])
    assert list(line(figure.axes[3], "accepted")[1]) == [0.4]
    assert "1 probes that are not finite" in caption


def test_ages_draws_the_median_for_each_age(runs):
    measured = [run for run in runs if run.ages]
    figure, caption = ages(measured)
    x, y = line(figure.axes[0], "median")
    assert list(x) == [1, 2, 3, 5, 8, 13, 21]
    assert y[2] == np.median([one["cosine"] for one in measured[0].ages if one["age"] == 3])
    low, high = figure.axes[0].collections[1].get_datalim(figure.axes[0].transData).intervaly
    cosines = [one["cosine"] for one in measured[0].ages if one["age"] in (1, 21)]
    assert min(cosines) <= low and high <= max(cosines)
    assert "8 matrices" in caption


def test_ages_by_layer_has_a_panel_per_matrix(runs):
    measured = [run for run in runs if run.ages]
    panels = ages_by_layer(measured)[0].axes
    assert [axes.get_title() for axes in panels] == [name.removesuffix(".weight") for name in MATRICES]
    (drawn,) = panels[3].lines
    own = [one["cosine"] for one in measured[0].ages if one["name"] == MATRICES[3] and one["age"] == 21]
    assert drawn.get_ydata()[-1] == np.median(own)


def test_gate_by_layer_has_a_panel_per_matrix(runs):
    measured = [run for run in runs if run.probes]
    figure, caption = gate_by_layer(measured)
    assert [axes.get_title() for axes in figure.axes] == [name.removesuffix(".weight") for name in MATRICES]
    own = [one["accepted"] for one in measured[0].probes if one["name"] == MATRICES[3]]
    x, y = line(figure.axes[3], "accepted")
    assert list(x) == list(range(2, 101)) and y[50] == pytest.approx(np.mean(own[43:58]))
    assert np.allclose(line(figure.axes[3], "rejected")[1], 1 - y)
    assert "a panel for each matrix" in caption and shown("CacheMuon.paper gamma=5") in caption


def test_ages_by_layer_of_many_matrices_has_a_panel_per_kind(tmp_path):
    run = write_run(tmp_path / "a", GRAM)
    names = [f"blocks.{i}.{part}.weight" for i in range(20) for part in ("qkv", "up")]
    run.ages[:] = [
        {"name": name, "age": age, "cosine": 1 / age, "step": 30} for name in names for age in (1, 2)
    ]
    figure, caption = ages_by_layer([run])
    assert [axes.get_title() for axes in figure.axes] == ["blocks.*.qkv", "blocks.*.up"]
    assert "kind of matrix" in caption


def test_frontier_places_each_optimizer_by_its_flops_and_loss(comparison):
    left, right = frontier(comparison)[0].axes
    for axes, model in ((left, "paper"), (right, "executed")):
        points = {bars.get_label(): bars for bars in axes.containers}
        assert len(points) == len(comparison.rows)
        for row in comparison.rows:
            data, caps, _ = points[row.title]
            saved, loss = row.cells[f"saved_{model}_gram"], row.cells["loss"]
            assert (data.get_xdata()[0], data.get_ydata()[0]) == (1 - saved.mean, loss.mean)
            if loss.spread is not None:
                assert sorted(cap.get_ydata()[0] for cap in caps)[0] == pytest.approx(loss.mean - loss.spread)
    for name, gammas in (("CacheMuon.paper", (15, 10, 5, 2)), ("CacheMuon", (9, 2))):  # fewer FLOPs first
        joined = [points[shown(f"{name} gamma={gamma}")][0].get_xydata()[0] for gamma in gammas]
        assert any(np.array_equal(one.get_xydata(), joined) for one in right.lines)


def test_families_have_panels_of_their_own(tmp_path):
    comparison = compare(two_families(tmp_path))
    papers, todays, bars = quality(comparison)[0].axes
    assert (papers.get_title(), todays.get_title()) == ("The paper's settings", "Today's settings")
    titles = [{str(one.get_label()).split(" (")[0] for one in axes.lines} for axes in (papers, todays)]
    assert titles[0] == {"GramMuon", shown("CacheMuon.paper gamma=5")}
    assert titles[1] == {"GramMuon Nesterov", "CacheMuon"}
    assert len(bars.get_yticklabels()) == 2
    figure, caption = frontier(comparison)
    assert len(figure.axes) == 4 and "compared within it" in caption
    for axes, label in zip(figure.axes[::2], ("The paper's settings", "Today's settings"), strict=True):
        assert axes.get_ylabel() == f"{label}\nbest validation loss" and len(axes.containers) == 2


def test_work_adds_up(comparison):
    left, right = work(comparison)[0].axes
    assert line(left, "GramMuon")[1][-1] == 80 and line(right, "GramMuon")[1][-1] == 72
    assert line(left, "PolarExpMuon")[1][49] == 50
    assert left.get_ylabel() == "cumulative TFLOPs"


def test_what_the_runs_lack_is_told(tmp_path):
    run = write_run(tmp_path / "run", POLAR)
    drawn = {one.name: one for one in figures([run], tmp_path / "figures", formats=("png",))}
    assert list(drawn) == ["quality", "frontier", "work", "gate", "gate-by-layer", "ages", "ages-by-layer"]
    assert drawn["quality"].paths == (tmp_path / "figures" / "quality.png",)
    for name, need in (("frontier", "CacheMuon"), ("gate", "diagnostics=gate"), ("ages", "diagnostics=age")):
        assert drawn[name].paths == ()
        assert drawn[name].caption.startswith("Not drawn: ") and need in drawn[name].caption
    with pytest.raises(Lacking, match="validated"):
        quality(compare([write_run(tmp_path / "new", POLAR, done=1)]))
    with pytest.raises(Lacking, match="orthogonalized"):
        work(compare([write_run(tmp_path / "adam", OptimizerConfig("adamw"))]))


def test_all_formats_are_written_and_repeat_byte_for_byte(tmp_path, comparison):
    before = dict(matplotlib.rcParams)
    drawn = figures([write_run(tmp_path / "run", POLAR)], tmp_path)
    assert dict(matplotlib.rcParams) == before
    suffixes = [path.suffix for one in drawn for path in one.paths]
    assert suffixes == [".pdf", ".png", ".svg"] * 2  # quality and work
    for suffix in suffixes[:3]:
        one, two = (tmp_path / f"{name}{suffix}" for name in ("one", "two"))
        for path in (one, two):
            drawing.save(frontier(comparison)[0], path)
        assert one.read_bytes() == two.read_bytes() and one.stat().st_size > 5000


def test_several_tasks_and_several_diagnosed_optimizers_are_numbered(tmp_path):
    made = [
        write_run(tmp_path / "short", GRAM, steps=10),
        *(
            write_run(tmp_path / str(gamma), OptimizerConfig("paper", gamma=gamma), diagnostics="gate")
            for gamma in (2.0, 5.0)
        ),
    ]
    names = [drawn.name for drawn in figures(made, tmp_path / "figures", formats=("png",)) if drawn.paths]
    assert names[:4] == ["task1-quality", "task1-work", "task2-quality", "task2-work"]
    assert names[4:] == [f"task2-{name}-{number}" for name in ("gate", "gate-by-layer") for number in (1, 2)]


def test_colours_are_fixed_and_lines_can_be_told_apart(comparison):
    ours = {drawing.colour(optimizer) for optimizer in nano_optimizers() if optimizer.family == PAPERS}
    assert len(ours) == 7
    paper, cache = OptimizerConfig("paper", gamma=5.0), OptimizerConfig("cache", gamma=5.0)
    assert drawing.colour(replace(paper, lr=0.5)) == drawing.colour(paper) == "#e69f00"
    assert drawing.colour(replace(cache, gamma=2.0)) == drawing.colour(cache) == drawing.COLOURS["cache"]
    styles = [tuple(style.values()) for style in drawing.styles(comparison.rows)]
    assert len(set(styles)) == len(styles)


def test_namesakes_differ_in_their_dashes(tmp_path):
    made = [write_run(tmp_path / str(lr), replace(GRAM, lr=lr)) for lr in (0.1, 0.2)]
    one, two = drawing.styles(compare(made).rows)
    assert one["color"] == two["color"] and one["ls"] != two["ls"]


def test_a_summary_of_many_places_pools_neighbours():
    x = np.arange(1000.0)
    places, mean, count = drawing.summary(x, 2 * x, np.mean, len, points=100)
    assert len(places) == 100 and set(count) == {10} and np.allclose(mean[0], 9)
    assert CONFIG.steps < drawing.POINTS  # else the tests above would compare with pooled lines
