"""A batch's offsets by source, as in Spark's offset log: a line per source.

Format 1 of the log identifies sources by position. Format 2 writes `name:offsets`; a source without a name gets its
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SOURCE = "source"
"""Default name of a pipeline's source, and of its view in the transform's SQL."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""A source's name: valid as an unquoted view name in SQL, a keyword argument in Python, and a source name in Spark."""

_NAMED = re.compile(r"([A-Za-z0-9_]+):(.*)", re.DOTALL)
_NONE = "-"
"""Written by Spark for a source without offsets."""


def by_source(text: str) -> dict[str, str]:
    """Each source's offsets, as JSON or in its own format. Sources without names: "0", "1"; a single one: SOURCE.

    Args:
        text: without the log's header lines.
    """
    lines = text.splitlines()
    pairs = [(m[1], m[2]) if (m := _NAMED.fullmatch(line)) else (str(n), line) for n, line in enumerate(lines)]
    found = {name: offsets for name, offsets in pairs if offsets != _NONE}
    return {SOURCE: found["0"]} if list(found) == ["0"] and len(lines) == 1 else found


def is_ahead(one: Any, other: Any) -> bool:
    """Whether `one` is further than `other` anywhere."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(is_ahead(v, other[k]) for k, v in one.items() if k in other)
    return isinstance(one, int) and isinstance(other, int) and one > other
