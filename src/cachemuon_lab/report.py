"""One HTML page about runs: what came out, the table, the figures, how it was made.

The page is a single file without scripts or anything to load; it opens from the disk, on a phone, in the
dark, and in print.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cachemuon_lab.config import CACHING, LABELS
from cachemuon_lab.figures import Drawn, figures
from cachemuon_lab.record import Run, write_atomically
from cachemuon_lab.table_forms import to_html
from cachemuon_lab.tables import COLUMNS, Comparison, Row, compare, tasks

SVG_SCALE = 1.75
"""Pixels of the page for a point of a figure: its 8 point letters become 14 pixels high."""

LEGEND = """± is one standard deviation over runs. "Paper" counts FLOPs by the paper's model, "executed" the
matrix products that were done. The time of "matrices" is that of the optimizer's matrix part, momentum and
update included."""

REPEAT = """from pathlib import Path
from cachemuon_lab.config import RunConfig
from cachemuon_lab.train import train

config = RunConfig.from_json(Path("config.json").read_text(encoding="utf-8"))
train(config, "again")"""

CSS = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1b1b; --soft: #5c5c5c; --line: #d4d4d4;
  --shade: #f4f4f2; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --text: #e6e6e3; --soft: #a5a8ac;
  --line: #3b3f45; --shade: #202328; --card: #f6f6f3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 80rem; background: var(--page);
  color: var(--text); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p, ul { margin: .5rem 0; max-width: 46rem; }
ul { padding-left: 1.2rem; }
.soft, figcaption { color: var(--soft); }
.scroll { margin: 1rem 0 .5rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid #0072B2; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .45rem; text-align: right; white-space: nowrap; overflow-wrap: normal; }
thead { background: var(--shade); }
thead th[colspan] { border-bottom: 1px solid var(--line); text-align: center; white-space: normal; }
tbody tr { border-top: 1px solid var(--line); }
tbody th, thead tr:last-child th:first-child, .words td, .words th { text-align: left; }
tbody th { font-weight: 600; }
figure { margin: 1.5rem 0; }
figure .scroll { background: var(--card); padding: .75rem; width: fit-content; max-width: 100%; }
img { display: block; height: auto; max-width: 100%; min-width: min(var(--width), 34rem); }
figcaption { font-size: .9rem; margin-top: .4rem; max-width: 46rem; }
pre { background: var(--shade); border-radius: 6px; font-size: .85rem; overflow-x: auto; padding: .75rem; }
summary { cursor: pointer; margin: .75rem 0 .25rem; }
@media print { body { max-width: none; } .scroll { overflow: visible; border: 0; } }
"""


def write_report(
    runs: Sequence[Run],
    out: str | os.PathLike[str],
    commands: Iterable[str] = (),
    title: str = "CacheMuon report",
) -> Path:
    """Write the page about the runs to `out`, a file, or `report.html` in the folder of that name.

    `commands` made the runs; those that a run's environment names as "command" are added.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = [_task(group) for group in tasks(runs)]
    told = [run.environment["command"] for run in runs if "command" in run.environment]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Runs: {escape(", ".join(run.folder.name for run in runs))}</p>',
        *sections,
        "<h2>Configuration</h2>",
        _settings([(run.folder.name, json.loads(run.config.to_json())) for run in runs], "Configuration"),
        "<h2>Environment</h2>",
        _settings([(run.folder.name, run.environment) for run in runs], "Environment"),
        "<h2>Commands</h2>",
        _commands(dict.fromkeys([*commands, *map(str, told)])),
    ]
    write_atomically(path, _page(title, "\n".join(body)))
    return path


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _task(runs: list[Run]) -> str:
    comparison = compare(runs)
    with tempfile.TemporaryDirectory() as folder:
        drawn = figures(runs, folder, formats=("svg",))
        pictures = [_figure(picture) for picture in drawn if picture.paths]
    missing = [f"{picture.name}: {picture.caption}" for picture in drawn if not picture.paths]
    return "\n".join(
        [
            f"<h2>{escape(comparison.title)}</h2>",
            _bullets(headlines(comparison)),
            _scroll(to_html(comparison), "Results"),
            f'<p class="soft">{LEGEND}</p>',
            *(f'<p class="soft">{escape(note)}</p>' for note in comparison.notes),
            *pictures,
            _bullets(missing),
        ]
    )


def headlines(comparison: Comparison) -> list[str]:
    """What came out: the baseline's loss, and a sentence for each row that caches."""
    columns = {column.key: column for column in COLUMNS}
    valid = [row for row in comparison.rows if row.cells["loss"]]
    if not valid:
        return ["No run has been validated yet."]

    def said(row: Row, key: str) -> str:
        return comparison.text(row, columns[key])

    fresh = [row for row in valid if row.kind == "gram"] or [row for row in valid if row.kind not in CACHING]
    sentences = [f"{row.title}: best validation loss {said(row, 'loss')}." for row in fresh]
    for row in (row for row in valid if row.kind in CACHING):
        sentences.append(
            f"{row.title}: best validation loss {said(row, 'loss')}, hit rate {said(row, 'hit_rate')}. Saves "
            f"{said(row, 'saved_paper_gram')} of {LABELS['gram']}'s orthogonalization FLOPs by the paper's "
            f"model, {said(row, 'saved_executed_gram')} as executed."
        )
    return sentences


def _figure(drawn: Drawn) -> str:
    svg = drawn.paths[0].read_text(encoding="utf-8")
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    width = f"{float(size[1]) * SVG_SCALE if size else 700:.0f}"
    data = base64.b64encode(svg.encode()).decode()
    short = drawn.caption.split(". ")[0].split(": ")[0].rstrip(".")
    image = (
        f'<img src="data:image/svg+xml;base64,{data}" alt="Figure: {escape(short)}" width="{width}" '
        f'style="--width: {width}px">'
    )
    return f"<figure>{_scroll(image, short)}<figcaption>{escape(drawn.caption)}</figcaption></figure>"


def _settings(runs: Sequence[tuple[str, dict[str, Any]]], what: str) -> str:
    """A table of what differs between the runs, and below it what all share."""
    flat = [(name, _flat(values)) for name, values in runs]
    keys = list(dict.fromkeys(key for _, values in flat for key in values))
    found = {key: [_shown(values.get(key)) for _, values in flat] for key in keys}
    shared = [[key, texts[0]] for key, texts in found.items() if len(set(texts)) == 1]
    differing = {key: texts for key, texts in found.items() if len(set(texts)) > 1}
    parts = []
    if differing:
        rows = [[name, *texts] for (name, _), *texts in zip(flat, *differing.values(), strict=True)]
        table = _table(["run", *differing], rows)
        parts.append(f"<h3>What differs</h3>\n{_scroll(table, f'{what}: what differs')}")
    if shared:
        table = _scroll(_table(["setting", "value"], shared), f"{what}: what all share")
        opened = " open" if len(shared) <= 20 else ""
        parts.append(f"<details{opened}><summary>What all runs share</summary>\n{table}</details>")
    return "\n".join(parts)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<table class="words"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _scroll(content: str, label: str) -> str:
    """Wide content in a box that scrolls by itself, also from the keyboard."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n{content}\n</div>'


def _bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" if texts else ""


def _commands(commands: Iterable[str]) -> str:
    listed = "\n".join(commands)
    if listed:
        return f"<pre><code>{escape(listed)}</code></pre>"
    return (
        "<p>The runs do not name the commands that made them. Each is repeated from its folder's "
        f"config.json:</p>\n<pre><code>{escape(REPEAT)}</code></pre>"
    )
