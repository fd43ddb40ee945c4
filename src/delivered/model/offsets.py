"""A batch's offsets by source, as Spark's offset log spells them: a line per source.

Format 1 of the log tells sources by their position. Format 2 writes `name:offsets`; a source that has no name gets its
number.
"""

from __future__ import annotations

import re

SOURCE = "source"
"""The name of a pipeline's source that has none, and the view that it is in the transform's SQL."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Of a source: a view's name in SQL without quotes, a keyword of a Python function, and a name to Spark."""

_NAMED = re.compile(r"([A-Za-z0-9_]+):(.*)", re.DOTALL)
_NONE = "-"
"""Spark writes it for a source that has no offsets yet."""


def by_source(text: str) -> dict[str, str]:
    """The offsets of each source, as JSON or what else the source writes. Sources without names: "0", "1"; one: SOURCE.

    Args:
        text: without the log's header lines.
    """
    lines = text.splitlines()
    pairs = [(m[1], m[2]) if (m := _NAMED.fullmatch(line)) else (str(n), line) for n, line in enumerate(lines)]
    found = {name: offsets for name, offsets in pairs if offsets != _NONE}
    return {SOURCE: found["0"]} if list(found) == ["0"] and len(lines) == 1 else found
