"""Tables of the documentation that a command makes, each between `<!-- table NAME -->` and `<!-- end -->`."""

import re
from pathlib import Path

from cachemuon_lab.performance import renewed

DOCS = Path(__file__).parents[1] / "docs"


def check_tables(made):
    """Every table of `made` is in a page, and every page has it as it is made."""
    asked = set()
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        names = made.keys() & set(re.findall(r"<!-- table (\w+) -->", text))
        if names:
            assert renewed(text, made) == text, f"{page} has other tables {sorted(names)}"
            asked |= names
    assert asked == made.keys()
