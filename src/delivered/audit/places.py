"""Where records lie, as one number each: the slot of the slice that a record was read from, then its row. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.audit.judge import NOBODY
from delivered.contract.source import Slice

ROW_BITS = 33
"""The bits of a position that count rows, as Spark's `monotonically_increasing_id` does; the slot is in those above."""


class Places:
    """The slots of positions: for each slice, the partition of the source or the sink that it was read from.

    Rows of a slot are in order, and so are the slots of a partition.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, names: Sequence[str]) -> int:
        """Slots for slices of these partitions, behind those of earlier calls. Returns the first one."""
        first = len(self._names)
        self._names += names
        return first

    def __len__(self) -> int:
        return len(self._names)

    def name(self, slot: int | None) -> str:
        """The partition of a slot; None: of records that were never sent."""
        return NOBODY if slot is None else self._names[slot] if slot < len(self._names) else "?"

    def shown(self, at: int | None, position: int | None = None) -> str | None:
        if at is None:
            return None
        return f"{self.name(at >> ROW_BITS)} @ {at & ((1 << ROW_BITS) - 1) if position is None else position}"

    def partitions(self) -> list[int]:
        """For each slot the index of its partition: of its first slot."""
        first: dict[str, int] = {}
        return [first.setdefault(name, i) for i, name in enumerate(self._names)]


def source_partitions(slices: Sequence[Slice]) -> list[str]:
    return [s.partition or f"slice {i}" for i, s in enumerate(slices)]


def locating_column(stored: Sequence[str], records: Sequence[str]) -> str | None:
    """The column that a sink's system adds and that locates a record for users; None: the order of reading does.

    Args:
        stored: all columns of the sink.
        records: those of what was sent.
    """
    return next((c for c in ("offset", "rowid") if c in stored and c not in records), None)


def sink_partitions(slices: Sequence[Slice], located_by: str | None) -> list[str]:
    """An offset counts in its partition, everything else through all rows."""
    return [s.partition if located_by == "offset" else "rows" for s in slices]
