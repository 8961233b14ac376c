"""Examples of docstrings as code of the site: without a fence Markdown takes `>>>` for a quotation."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Examples(Extension):
    """Fences every example, from its first `>>>` to the next empty line."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub("```pycon\n\\g<0>\n```", obj.docstring.value)
