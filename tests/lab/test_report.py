"""The table's numbers by hand, its three forms, and the page that holds it."""

import io
import math
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_runs import CONFIG, ENVIRONMENT, IMAGES, study, two_families, write_run
from rich.console import Console

from cachemuon_lab.config import DataConfig, OptimizerConfig
from cachemuon_lab.recipes import recipe
from cachemuon_lab.report import write_report
from cachemuon_lab.summary import summary_tables, verdicts
from cachemuon_lab.table_forms import to_html, to_markdown, to_rich
from cachemuon_lab.tables import COLUMNS, DASH, compare, shown, tasks

GRAM, POLAR, CACHE = OptimizerConfig("gram"), OptimizerConfig("polar"), OptimizerConfig("paper", gamma=5.0)
COLUMN = {column.key: column for column in COLUMNS}
EVIL = '<script>alert("x")</script>&|'
VOID = {"meta", "img", "br", "link", "input", "hr"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return study(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_report(runs, tmp_path_factory.mktemp("page") / "report.html").read_text(encoding="utf-8")


def cell(comparison, label, key):
    (row,) = [row for row in comparison.rows if row.label == label]
    return row.cells[key]


def text(comparison, label, key):
    (row,) = [row for row in comparison.rows if row.label == label]
    return comparison.text(row, COLUMN[key])


def test_the_numbers_of_a_row(runs):
    comparison, label = compare(runs), "CacheMuon.paper gamma=5"
    paper = 8 * 102 + 99 * (5 * 25 + 3 * 128)  # GFLOPs: first solves, then five hits and three misses
    executed = 8 * 95 + 99 * (5 * 20 + 3 * 110)
    assert cell(comparison, label, "paper").mean == paper * 1e9
    assert cell(comparison, label, "executed").mean == executed * 1e9
    assert cell(comparison, label, "saved_paper_gram").mean == pytest.approx(1 - paper / 80_000)
    assert cell(comparison, label, "saved_paper_polar").mean == pytest.approx(1 - paper / 100_000)
    assert cell(comparison, label, "saved_executed_gram").mean == pytest.approx(1 - executed / 72_000)
    assert cell(comparison, label, "saved_executed_polar").mean == pytest.approx(1 - executed / 96_000)
    assert cell(comparison, label, "hit_rate").mean == 5 * 99 / 800
    for key, seconds in (("orthogonalization", 0.051), ("optimizer", 0.061), ("step", 0.201)):
        assert cell(comparison, label, f"{key}_seconds").mean == pytest.approx(seconds)
    assert text(comparison, label, "paper") == "51.21" and text(comparison, label, "hit_rate") == "61.9 %"
    assert text(comparison, "PolarExpMuon", "saved_paper_gram") == "\N{MINUS SIGN}25.0 %"
    assert text(comparison, "GramMuon", "hit_rate") == DASH


def test_seeds_are_merged(runs):
    comparison = compare(runs)
    loss = cell(comparison, "CacheMuon.paper gamma=10", "loss")
    assert loss.mean == pytest.approx(3.065) and loss.spread == pytest.approx(statistics.stdev([3.06, 3.07]))
    assert text(comparison, "CacheMuon.paper gamma=10", "loss") == "3.065 ± 0.007"
    assert text(comparison, "CacheMuon.paper gamma=10", "n") == "2"
    assert text(comparison, "CacheMuon gamma=2", "loss") == "3.010"  # one run has no spread


def test_rows_have_one_order_whatever_that_of_the_runs(runs):
    labels = [row.label for row in compare(runs[::-1]).rows]
    assert labels[:4] == ["PolarExpMuon", "GramMuon", "CacheMuon.paper gamma=2", "CacheMuon.paper gamma=5"]
    assert labels[-3:] == ["CacheMuon gamma=2", "CacheMuon gamma=9", "StaleMuon"]


def test_a_diagnosed_run_is_no_further_seed(runs):
    comparison = compare(runs)
    (row,) = [row for row in comparison.rows if row.label == "GramMuon"]
    assert [run.folder.name for run in row.runs] == ["gram-0", "gram-1"]
    assert any("GramMuon: 1 of 3 runs left out" in note for note in comparison.notes)


def test_without_a_baseline_there_is_a_dash(tmp_path):
    comparison = compare([write_run(tmp_path / "a", CACHE, hits=5), write_run(tmp_path / "b", POLAR)])
    assert text(comparison, "CacheMuon.paper gamma=5", "saved_paper_gram") == DASH
    assert text(comparison, "CacheMuon.paper gamma=5", "saved_paper_polar") == "48.8 %"


def test_a_baseline_with_more_matrices_is_none(tmp_path):
    gram = write_run(tmp_path / "a", replace(GRAM, head="muon"))
    comparison = compare([gram, write_run(tmp_path / "b", CACHE, hits=5)])
    assert text(comparison, "CacheMuon.paper gamma=5", "saved_paper_gram") == DASH


def test_an_optimizer_without_matrices_has_no_flops(tmp_path):
    comparison = compare(
        [write_run(tmp_path / "a", OptimizerConfig("adamw")), write_run(tmp_path / "b", GRAM)]
    )
    for key in ("paper", "executed", "saved_paper_gram", "hit_rate"):
        assert text(comparison, "AdamW", key) == DASH


def test_an_unfinished_run_is_marked_and_compared_over_the_steps_it_has(tmp_path):
    cached, gram = write_run(tmp_path / "a", CACHE, hits=5, done=40), write_run(tmp_path / "b", GRAM)
    comparison = compare([cached, gram])
    expected = 1 - (8 * 102 + 39 * (5 * 25 + 3 * 128)) / 32_000
    assert cell(comparison, "CacheMuon.paper gamma=5", "saved_paper_gram").mean == pytest.approx(expected)
    assert comparison.rows[1].title == shown("CacheMuon.paper gamma=5 (unfinished: step 40 of 100)")
    for form in (to_markdown(comparison), to_html(comparison)):
        assert "unfinished: step 40 of 100" in form


def test_an_unfinished_seed_does_not_enter_the_mean_of_finished_ones(tmp_path):
    made = [write_run(tmp_path / "a", GRAM), write_run(tmp_path / "b", GRAM, seed=1, done=40)]
    comparison = compare(made)
    assert text(comparison, "GramMuon", "n") == "1" and comparison.rows[0].unfinished == ""
    assert "1 of 2 runs left out" in comparison.notes[0]


def test_a_run_that_diverged_is_told(tmp_path):
    run = write_run(tmp_path / "a", GRAM)
    for line in run.validations:
        line["loss"] = math.nan
    comparison = compare([run])
    assert text(comparison, "GramMuon", "loss") == DASH and "finite" in comparison.notes[0]


def test_a_run_that_has_just_begun_is_all_dashes(tmp_path):
    run = write_run(tmp_path / "a", GRAM, done=1)
    run.steps.clear()
    comparison = compare([run])
    assert {text(comparison, "GramMuon", key) for key in COLUMN if key not in ("n", "lr")} == {DASH}
    assert "No run has been validated yet" in write_report([run], tmp_path).read_text(encoding="utf-8")


def test_accuracy_stands_only_where_there_is_one(tmp_path, runs):
    comparison = compare([write_run(tmp_path / "a", GRAM, config=IMAGES)])
    assert text(comparison, "GramMuon", "accuracy") == "90.0 %"
    assert "accuracy" in to_markdown(comparison) and "accuracy" not in to_markdown(compare(runs))


def test_namesakes_say_in_what_they_differ(tmp_path):
    made = [
        write_run(tmp_path / "a", GRAM),
        write_run(tmp_path / "b", replace(GRAM, lr=0.02)),
        write_run(tmp_path / "c", POLAR),
    ]
    labels = [row.label for row in compare(made).rows]
    assert labels == ["PolarExpMuon", "GramMuon (lr=0.001)", "GramMuon (lr=0.02)"]


def test_runs_of_several_tasks_are_sorted_not_compared(tmp_path):
    data = replace(CONFIG, data=DataConfig("tokens", path="here/english"))
    made = [
        write_run(tmp_path / "a", GRAM),
        write_run(tmp_path / "b", GRAM, steps=50),
        write_run(tmp_path / "c", POLAR),
        write_run(tmp_path / "d", GRAM, config=data),
        write_run(
            tmp_path / "e", POLAR, config=replace(data, data=DataConfig("tokens", path="there/english"))
        ),
    ]
    assert [[run.folder.name for run in group] for group in tasks(made)] == [["a", "c"], ["b"], ["d", "e"]]
    with pytest.raises(ValueError, match="one task, got 3"):
        compare(made)
    with pytest.raises(ValueError, match="one task, got 0"):
        compare([])
    content = write_report(made, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "100 steps" in content and "50 steps" in content and "on english" in content


def test_markdown_has_as_many_cells_in_every_line(tmp_path, runs):
    lines = [line for line in to_markdown(compare(runs)).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 9 and len({line.count("|") for line in lines}) == 1
    assert "| 3.065 ± 0.007 | 41.01 | 34.42 |" in lines[6]
    odd = write_run(tmp_path / "a", GRAM)
    odd = replace(compare([odd]).rows[0], label=EVIL)
    assert "&\\| |" in to_markdown(replace(compare(runs), rows=(odd,)))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_table_fits_its_width(runs, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(compare(runs), width))
    shown_lines = console.file.getvalue().splitlines()
    assert max(map(len, shown_lines)) <= width
    assert not any("…" in line for line in shown_lines)
    assert sum(line.count("3.065 ± 0.007") for line in shown_lines) == 1


def test_families_are_told_apart(tmp_path):
    comparison = compare(two_families(tmp_path / "runs"))
    titles = ["GramMuon", shown("CacheMuon.paper gamma=5"), "GramMuon Nesterov", "CacheMuon"]
    assert [row.title for row in comparison.rows] == titles
    for form in (to_markdown(comparison), to_html(comparison)):
        places = [form.rindex(text) for text in ("The paper", titles[1], "Today", titles[3])]
        assert places == sorted(places)
    console = Console(file=io.StringIO(), width=100)
    console.print(to_rich(comparison, 100))
    assert "The paper's settings" in console.file.getvalue() and "Today's settings" in console.file.getvalue()
    papers, todays = comparison.families
    assert (comparison.fresh(papers).title, comparison.fresh(todays).title) == (titles[0], titles[2])
    page = " ".join(Checked(write_report(comparison.rows[0].runs, tmp_path).read_text()).words)
    assert "The paper's settings" not in page  # one family needs no name


def test_a_summary_compares_within_a_family(tmp_path):
    *lines, chance = verdicts(compare(two_families(tmp_path)))
    assert lines == [
        "The paper's settings, beside GramMuon:",
        shown("  CacheMuon.paper gamma=5: loss 0.050 lower, 60% of the FLOPs"),
        "Today's settings, beside GramMuon Nesterov:",
        "  CacheMuon: loss 0.050 higher, 35% of the FLOPs",
    ]
    assert "One seed" in chance
    papers, todays = summary_tables(compare(two_families(tmp_path / "again")))
    assert [list(column.cells) for column in papers.columns[2:]] == [
        *(["3.200", "3.150"], ["", "-0.050"], ["", "62%"], ["100%", "60%"], ["100%", "64%"])
    ]
    assert str(papers.title) == "The paper's settings, beside GramMuon" and todays.row_count == 2
    alone = compare([write_run(tmp_path / "alone", CACHE, hits=5)])
    assert len(verdicts(alone)) == 1 and [table.row_count for table in summary_tables(alone)] == [1]


def test_the_papers_numbers_stand_beside_a_run_of_its_recipe(tmp_path):
    base = recipe("resnet18-cifar10").base
    runs = [
        write_run(tmp_path / one.kind, one, config=base, done=400) for one in recipe(base.name).variants[1:]
    ]
    comparison = compare(runs)
    label = "CacheMuon.paper gamma=20"
    assert text(comparison, label, "reported_pflops") == "1.98"
    assert text(comparison, label, "reported_hit_rate") == "80.0 %"
    assert text(comparison, label, "reported_saved_polar") == "51.0 %"
    assert text(comparison, "GramMuon", "reported_pflops") == "2.32"
    assert "the paper reports" in write_report(runs, tmp_path).read_text(encoding="utf-8")
    assert "reported_best_loss" not in {column.key for column in comparison.columns}  # it gives none


class Checked(HTMLParser):
    """Follows the page's elements; an end tag that does not match its start is an error."""

    def __init__(self, content):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_is_whole_and_loads_nothing(page):
    parsed = Checked(page)
    assert not parsed.all("script") and not parsed.all("link")
    for _, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"base64,[^\"]*", "", page))


def test_the_page_can_be_read_by_all(page):
    parsed = Checked(page)
    assert parsed.all("html")[0]["lang"] == "en" and len(parsed.all("h1")) == 1
    assert "width=device-width" in parsed.all("meta")[1]["content"]
    images = parsed.all("img")
    assert len(images) == 7 and all(len(image["alt"]) > 20 for image in images)
    assert all(heading.get("scope") for heading in parsed.all("th"))
    assert len(parsed.all("table")) <= sum(box.get("class") == "scroll" for box in parsed.all("div"))
    assert "prefers-color-scheme: dark" in page


def test_the_page_tells_results_differences_environment_and_repetition(page):
    words = " ".join(Checked(page).words)
    best = shown("CacheMuon.paper gamma=5: best validation loss 3.035 ± 0.007, hit rate 61.9 %.")
    assert f"{best} Saves 36.0 %" in words
    assert shown("CacheMuon gamma=2: best validation loss 3.010, hit rate 24.8 %. Saves") in words
    assert "optimizer.gamma" in words and "A processor" in words and ENVIRONMENT["git"] in words
    assert "RunConfig.from_json" in words


def test_the_page_names_the_commands_and_what_could_not_be_drawn(tmp_path):
    environment = {**ENVIRONMENT, "command": "cachemuon train <gram>"}
    run = write_run(tmp_path / "run", GRAM, environment=environment)
    page = write_report([run], tmp_path / "page", ["cachemuon compare"])
    assert page == tmp_path / "page" / "report.html"
    content = page.read_text(encoding="utf-8")
    assert "<pre><code>cachemuon compare\ncachemuon train &lt;gram&gt;</code></pre>" in content
    assert "gate: Not drawn: no run has measured its probes" in content


def test_nothing_of_a_run_can_become_markup(tmp_path):
    evil = {**ENVIRONMENT, EVIL: EVIL, "command": EVIL}
    config = replace(CONFIG, data=DataConfig("tokens", path='<i>&"'))
    made = [
        write_run(tmp_path / 'a"><b', GRAM, config=config, name=EVIL, environment=evil),
        write_run(tmp_path / "c", CACHE, config=config, hits=3, name="c"),
    ]
    content = write_report(made, tmp_path / "r.html", [EVIL], title=EVIL).read_text(encoding="utf-8")
    parsed = Checked(content)
    assert not (parsed.all("script") or parsed.all("b") or parsed.all("i")) and EVIL not in content
    assert EVIL in "".join(parsed.words)


def test_a_report_about_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path)
