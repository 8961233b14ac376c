"""The documentation's site as Chromium shows it, on a desktop and a phone, by day and by night.

Headless Chromium has no window narrower than 500 pixels, so a frame in a page of ours is the phone.
"""

import json
import pathlib
import subprocess
import sys
from html import unescape

import pytest
from browsing import DARK, DESKTOP, PHONE, chromium
from matplotlib.image import imread

ROOT = pathlib.Path(__file__).resolve().parents[2]
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin: 0">
<iframe src="{page}" style="width: {width}px; height: 2000px; border: 0"></iframe>
<script type="text/plain" id="measured"></script>
<script>
const scrolls = (element, view) => /auto|scroll|hidden/.test(view.getComputedStyle(element).overflowX);
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const width = page.documentElement.clientWidth, outside = [];
  for (const element of page.querySelectorAll("article *")) {{
    const box = element.getBoundingClientRect();
    let around = element;
    while (around !== page.body && !scrolls(around, view)) around = around.parentElement;
    if (box.width && box.right > width + 1 && around === page.body) outside.push(element.textContent);
  }}
  document.getElementById("measured").textContent = JSON.stringify({{
    width, outside, content: page.documentElement.scrollWidth,
    images: [...page.querySelectorAll("article img")].map(image => image.naturalWidth),
    loaded: view.performance.getEntriesByType("resource").map(one => one.name.split(":")[0]),
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return out


def seen(site, page, width):
    """What a script around a page sees of it."""
    frame = site / f"frame-{width}.html"
    frame.write_text(FRAME.format(page=page.as_uri(), width=width), encoding="utf-8")
    flags = ("--allow-file-access-from-files", "--window-size=1400,2100", "--dump-dom")
    dom = chromium(site, frame, *flags)
    return json.loads(unescape(dom.partition('id="measured">')[2].partition("</script>")[0]))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_no_page_is_wider_than_the_screen(site, width):
    pages = [
        page for page in sorted(site.rglob("*.html")) if "frame" not in page.name and page.name != "404.html"
    ]
    assert len(pages) > 25
    for page in pages:
        found = seen(site, page, width)
        assert found["width"] == width and found["content"] <= width, page
        assert not found["outside"], page
        assert all(natural > 300 for natural in found["images"]), page
        assert set(found["loaded"]) <= {"file", "data"}, page


@pytest.mark.parametrize(("flags", "bright"), [((), True), ((DARK,), False)])
def test_figures_have_the_ground_of_the_page(site, flags, bright, tmp_path):
    """By day and by night."""
    target = tmp_path / "screen.png"
    chromium(tmp_path, site / "index.html", "--window-size=1280,1000", f"--screenshot={target}", *flags)
    pixels = imread(target)[100:900, 300:1000, :3].mean(axis=2)
    assert (pixels > 0.9).mean() > 0.7 if bright else (pixels < 0.2).mean() > 0.7
