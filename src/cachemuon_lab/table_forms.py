"""A comparison as a table for a terminal, in Markdown or HTML. Each family stands by itself."""

from __future__ import annotations

from html import escape
from itertools import groupby

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cachemuon_lab.tables import Comparison


def to_rich(comparison: Comparison, width: int = 100) -> Group:
    """Tables for a terminal of that width: quantities down, rows across, as many side by side as fit."""
    tables: list[Table | Text] = []
    across = max(1, (width - 28) // 16)
    for family, members in comparison.families.items():
        if len(comparison.families) > 1:
            tables.append(Text(_heading(family), style="bold"))
        for first in range(0, len(members), across):
            table, rows = Table(""), members[first : first + across]
            for row in rows:
                table.add_column(Text(row.title.replace(" ", "\n", 1)), justify="right")
            for heading, group in groupby(comparison.columns, key=comparison.heading):
                table.add_section()
                if heading:
                    table.add_row(Text(heading, style="bold"))
                for column in group:
                    name = Text(f"  {column.name}" if heading else column.name)
                    table.add_row(name, *(comparison.text(row, column) for row in rows))
            tables.append(table)
    return Group(Text(comparison.title), *tables, *(Text(note) for note in comparison.notes))


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table for each family, a row for each optimizer; the notes below."""
    columns = comparison.columns
    names = (", ".join(filter(None, (comparison.heading(c), c.name))) for c in columns)
    heads = [["", *names], ["---", *("---:" for _ in columns)]]
    parts: list[str] = []
    for family, rows in comparison.families.items():
        if len(comparison.families) > 1:
            parts.append(f"{_heading(family)}:")
        lines = [*heads, *([row.title, *(comparison.text(row, c) for c in columns)] for row in rows)]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in escaped))
    return "\n\n".join([*parts, *comparison.notes]) + "\n"


def _heading(family: str) -> str:
    return family[:1].upper() + family[1:] or "Other settings"


def to_html(comparison: Comparison) -> str:
    """An HTML table with both rows of headings; the notes are left to the page."""
    columns, above = comparison.columns, ["<td></td>"]
    for heading, group in groupby(columns, key=comparison.heading):
        span, text = len(list(group)), escape(heading)
        above.append(f'<th scope="colgroup" colspan="{span}">{text}</th>' if heading else "<td></td>")
    names = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in columns)
    head = [f"<tr>{''.join(above)}</tr>", f'<tr><th scope="col">optimizer</th>{names}</tr>']
    body: list[str] = []
    for family, rows in comparison.families.items():
        if len(comparison.families) > 1:
            body.append(
                f'<tr><th scope="rowgroup" colspan="{len(columns) + 1}">{escape(_heading(family))}</th></tr>'
            )
        for row in rows:
            cells = "".join(f"<td>{escape(comparison.text(row, column))}</td>" for column in columns)
            body.append(f'<tr><th scope="row">{escape(row.title)}</th>{cells}</tr>')
    return "\n".join(["<table><thead>", *head, "</thead><tbody>", *body, "</tbody></table>", ""])
