"""The report as Chromium shows it: on a desktop and a phone, by day and by night. `make browser` runs this.

Headless Chromium has no window narrower than 500 pixels, so a frame in a page of ours is the phone.
"""

import json
from html import escape, unescape

import pytest
from browsing import DARK, DESKTOP, PHONE, chromium
from made_runs import study
from matplotlib.image import imread

from cachemuon_lab.report import write_report

FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin: 0">
<iframe style="width: {width}px; height: {height}px; border: 0" srcdoc="{page}"></iframe>
<script type="text/plain" id="measured"></script>
<script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  for (const closed of page.querySelectorAll("details")) closed.open = true;
  const box = element => element.getBoundingClientRect().toJSON();
  document.getElementById("measured").textContent = JSON.stringify({{
    page: page.documentElement.scrollWidth,
    view: page.documentElement.clientWidth,
    loaded: view.performance.getEntriesByType("resource").map(one => one.name.slice(0, 5)),
    images: [...page.images].map(image => ({{...box(image), complete: image.complete,
      natural: image.naturalWidth, card: view.getComputedStyle(image.parentElement).backgroundColor}})),
    boxes: [...page.querySelectorAll(".scroll")].map(one => ({{...box(one), content: one.scrollWidth}})),
    letters: parseFloat(view.getComputedStyle(page.querySelector("td:not(:empty)")).fontSize),
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return write_report(study(folder / "runs"), folder / "report.html")


@pytest.fixture(scope="module")
def measured(report):
    """What scripts in a page around the report see of it, at both widths."""

    def measure(width):
        path = framed(report, width, 3000)
        dom = chromium(report.parent, path, "--window-size=1400,3000", "--dump-dom")
        text = dom.partition('id="measured">')[2].partition("</script>")[0]
        return json.loads(unescape(text))

    return {width: measure(width) for width in (DESKTOP, PHONE)}


def framed(report, width, height):
    path = report.with_name(f"frame-{width}.html")
    page = escape(report.read_text(encoding="utf-8"))
    path.write_text(FRAME.format(width=width, height=height, page=page), encoding="utf-8")
    return path


def screenshot(report, path, *flags, size=(DESKTOP, 2400)):
    """The pixels, from 0 to 1, without transparency."""
    target = report.with_name("screen.png")
    target.unlink(missing_ok=True)
    chromium(report.parent, path, f"--window-size={size[0]},{size[1]}", f"--screenshot={target}", *flags)
    return imread(target)[..., :3]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_page_is_as_wide_as_the_screen(measured, width):
    assert measured[width]["view"] == width
    assert measured[width]["page"] <= width
    for box in measured[width]["boxes"]:
        assert box["left"] >= 0 and box["right"] <= width


def test_wide_content_scrolls_inside_its_own_box(measured):
    assert all(box["content"] > box["width"] for box in measured[PHONE]["boxes"][:2])
    assert measured[PHONE]["letters"] >= 12


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_every_figure_is_there_and_large_enough_to_read(measured, width):
    images = measured[width]["images"]
    assert len(images) == 7
    for image in images:
        assert image["complete"] and image["natural"] > 300
        assert image["width"] >= 500 and image["height"] >= 200


def test_nothing_is_loaded(measured, report):
    assert set(measured[DESKTOP]["loaded"]) <= {"data:"}
    dom = chromium(report.parent, report, "--dump-dom")
    assert not any(
        f'{name}="{scheme}' in dom for name in ("src", "href") for scheme in ("http", "//", "file")
    )


def test_by_day_the_page_is_light_and_not_blank(report):
    pixels = screenshot(report, report)
    assert pixels[:20].mean() > 0.95
    assert 0.02 < (pixels.mean(axis=2) < 0.5).mean() < 0.3  # letters and lines


def test_by_night_the_page_is_dark_and_its_figures_stand_on_light_cards(report):
    pixels = screenshot(report, report, DARK)
    assert pixels[:20].mean() < 0.15
    bright = (pixels.mean(axis=2) > 0.9).mean(axis=1)  # of each row of pixels
    assert bright[:800].max() < 0.4 < 0.5 < bright[1200:].max()


def test_a_phone_shows_it_too(report):
    pixels = screenshot(report, framed(report, PHONE, 1600), size=(500, 1600))[:, :PHONE]
    assert pixels[:10].mean() > 0.95
    assert 0.02 < (pixels.mean(axis=2) < 0.5).mean() < 0.3
