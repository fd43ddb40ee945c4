"""The catalogue of errors, warnings and problems: the texts of each code, in error-conditions.json.

A code with several texts has a named condition for each, "TABLE_MISSING.SQL"; users see and match the code alone. A
text has {placeholders} in the syntax of `str.format`, for the values that a call passes by name. The file is read with
the first text that is needed: executors import this module at every start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

PREFIX = "DELIVERED_"
FILE = "error-conditions.json"


class Condition(NamedTuple):
    """
    Attributes:
        code: with its condition, without the prefix.
        kind: the class that has it, for example Refused, or Finding.
        message: what happened, with placeholders.
        next_step: what to run or change, with placeholders; None: the class says it.
    """

    code: str
    kind: str
    message: str
    next_step: str | None


def entries() -> dict[str, dict[str, Any]]:
    """The file as it is: code -> class, docs, and message and next, or conditions with these."""
    import json  # here, so that importing errors costs nothing
    import pkgutil

    entries: dict[str, dict[str, Any]] = json.loads(pkgutil.get_data(__package__, FILE) or b"")
    return entries


def conditions_of(code: str, entry: Mapping[str, Any]) -> Iterator[Condition]:
    """The conditions of one code, or the code itself."""
    for name, texts in entry.get("conditions", {"": entry}).items():
        kind = texts.get("class", entry.get("class"))
        yield Condition(f"{code}.{name}" if name else code, kind, texts["message"], texts.get("next"))


@cache
def conditions() -> Mapping[str, Condition]:
    """By code and condition."""
    return {c.code: c for code, entry in entries().items() for c in conditions_of(code, entry)}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """For a next step: "did you mean orders? ", if one of the names is like this one, in any case; else empty."""
    from difflib import get_close_matches

    spelling = {n.lower(): n for n in known}
    near = get_close_matches(name.lower(), spelling, n=1)
    return f"did you mean {spelling[near[0]]}? " if near else ""


def texts(code: str, values: Mapping[str, object]) -> tuple[str, str | None]:
    """Message and next step of a code, with the values in them. Never fails: it runs where an error is raised."""
    try:
        condition = conditions()[code]
        step = (condition.next_step or "").format_map({k: "" if v is None else v for k, v in values.items()})
        return condition.message.format_map(values), step or None
    except (LookupError, TypeError, ValueError) as error:
        return f"{values} ({type(error).__name__}: {error}).", None
