"""Durations as Spark writes them: "1 hour 30 minutes". Months and years have no fixed length."""

from __future__ import annotations

import re

from delivered.model.options import OptionType, Unfit

_UNITS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1_000, "millisecond": 1}
_READ = {**_UNITS, "week": 604_800_000}
_PART = re.compile(rf"\s*(\d+)\s*({'|'.join(_READ)})s?\b", re.IGNORECASE)


def read_ms(text: str) -> int:
    """Milliseconds of a duration. Raises Unfit."""
    total, at = 0, 0
    while part := _PART.match(text, at):
        total, at = total + int(part[1]) * _READ[part[2].lower()], part.end()
    if total <= 0 or text[at:].strip():
        raise Unfit(f"is {text!r}; it must be a duration above 0 in {', '.join(f'{u}s' for u in _READ)}")
    return total


def duration(ms: int) -> str:
    """As displayed, and as Spark accepts it."""
    parts = []
    for unit, size in _UNITS.items():
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count} {unit}{'s' if count > 1 else ''}")
    return " ".join(parts)


DURATION_MS: OptionType[int] = OptionType(read_ms, duration, {"examples": ["10 minutes"]}, "10 minutes")
