"""Which records of a source are duplicates, how long their keys are kept, and durations as Spark writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from delivered.model.options import OptionType, Unfit

# Durations as Spark writes them: "1 hour 30 minutes". Months and years have no fixed length.

_UNITS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1_000, "millisecond": 1}
_READ = {**_UNITS, "week": 604_800_000}
_SHORT = {"d": "day", "h": "hour", "min": "minute", "s": "second", "ms": "millisecond"}
_PART = re.compile(rf"\s*(\d+)\s*((?:{'|'.join(_READ)})s?|{'|'.join(_SHORT)})\b", re.IGNORECASE)


def read_ms(text: str) -> int:
    """Milliseconds of a duration: "1 hour 30 minutes", "15 min". Raises Unfit."""
    total, at = 0, 0
    while part := _PART.match(text, at):
        unit = part[2].lower()
        total, at = total + int(part[1]) * _READ[_SHORT.get(unit) or unit.removesuffix("s")], part.end()
    if total <= 0 or text[at:].strip():
        raise Unfit.build("OPTION_VALUE.DURATION", text=text, units=", ".join(f"{u}s" for u in _READ))
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


# Which records of a source are duplicates, and how long their keys are kept.

KIND = "watermark"
"""Keys are kept in Spark's state, bounded by a watermark."""

TABLE = "table"
"""Keys are kept in a table in the deciding sink's database, updated in the deciding transaction."""


@dataclass(frozen=True)
class Dedup:
    """
    Attributes:
        by: SQL over the source's columns; records with equal values are duplicates. A record with a null among them
            duplicates nothing.
        within_ms: a duplicate is recognised if it is at most this much later than its key's first record.
        time: SQL over the source's columns, a timestamp.
        drops_late: the user accepts that records older than the newest one by more than `within_ms` are dropped,
            duplicate or not.
        kind: where keys are kept: `KIND` or `TABLE`.
    """

    by: tuple[str, ...]
    within_ms: int
    time: str = "timestamp"
    drops_late: bool = False
    kind: str = KIND

    @property
    def in_table(self) -> bool:
        """Keys are kept in a table, not in Spark's state."""
        return self.kind == TABLE

    @property
    def by_text(self) -> str:
        return ", ".join(self.by)

    @property
    def within(self) -> str:
        """As displayed, and as Spark accepts it: "1 hour 30 minutes"."""
        return duration(self.within_ms)

    @property
    def says(self) -> str:
        """One line for display."""
        return f"by {self.by_text} within {self.within} of {self.time}" + ", in a table" * self.in_table

    def to_json(self) -> dict[str, Any]:
        """Only what determines the state: `drops_late` does not."""
        return {"kind": self.kind, "by": list(self.by), "within_ms": self.within_ms, "time": self.time}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Dedup:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        if data["kind"] not in (KIND, TABLE):
            raise ValueError(f"kind {data['kind']!r}")
        return cls(tuple(str(b) for b in data["by"]), int(data["within_ms"]), str(data["time"]), kind=data["kind"])

    def remembers_as(self, other: Dedup | None) -> bool:
        """Whether the other one's state can be reused."""
        return other is not None and self.to_json() == other.to_json()
