"""Text from outside (records, names, messages of servers) as it may be shown: nothing in it steers a terminal."""

from __future__ import annotations

import re

# Controls of C0 and C1, separators of lines, marks that change the direction of writing, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile(r"[\t\n]")


def plain(text: str) -> str:
    """The text with its control characters written as escapes; tabs and line feeds stay."""
    return _HIDDEN.sub(_escaped, text)


def one_line(text: str) -> str:
    """As `plain`, and tabs and line feeds are escapes, too: nothing in it begins a line of its own."""
    return _BREAKS.sub(_escaped, plain(text))


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape", "surrogatepass").decode("ascii")
