"""Which records of a source are repeats of another, and how long that is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIND = "watermark"
"""What remembers: Spark's state, bounded by a watermark. A memory of another kind is told from it by this word."""

TABLE = "table"
"""What remembers: a table in the database of the sink that decides, changed in the transaction of the decision."""

_UNITS = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))


@dataclass(frozen=True)
class Dedup:
    """
    Attributes:
        by: SQL over the source's columns; records for which all of it is equal are one record. If one of them is null,
            the record is no repeat.
        within_ms: a repeat is recognised if its time is at most so long after the first one's.
        time: SQL over the source's columns, a timestamp.
        drops_late: the user knows that a record whose time is older than the newest one's by more than `within_ms` is
            dropped, a repeat or not.
        kind: what remembers: `KIND` or `TABLE`.
    """

    by: tuple[str, ...]
    within_ms: int
    time: str = "timestamp"
    drops_late: bool = False
    kind: str = KIND

    @property
    def in_table(self) -> bool:
        """A table remembers, and not Spark's state."""
        return self.kind == TABLE

    @property
    def by_text(self) -> str:
        return ", ".join(self.by)

    @property
    def within(self) -> str:
        """For people and for Spark: "1 hour 30 minutes"."""
        left, parts = self.within_ms, []
        for unit, size in _UNITS:
            count, left = divmod(left, size)
            if count:
                parts.append(f"{count} {unit}{'s' if count > 1 else ''}")
        if left:
            parts.append(f"{left} millisecond{'s' if left > 1 else ''}")
        return " ".join(parts)

    @property
    def says(self) -> str:
        """For people, on one line."""
        return f"by {self.by_text} within {self.within} of {self.time}" + ", in a table" * self.in_table

    def to_json(self) -> dict[str, Any]:
        """What decides over the state; `drops_late` changes nothing in it."""
        return {"kind": self.kind, "by": list(self.by), "within_ms": self.within_ms, "time": self.time}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Dedup:
        """Raises KeyError, TypeError or ValueError if it is not what `to_json` made."""
        if data["kind"] not in (KIND, TABLE):
            raise ValueError(f"kind {data['kind']!r}")
        return cls(tuple(str(b) for b in data["by"]), int(data["within_ms"]), str(data["time"]), kind=data["kind"])

    def remembers_as(self, other: Dedup | None) -> bool:
        """Whether the state of the other one can be gone on with."""
        return other is not None and self.to_json() == other.to_json()
