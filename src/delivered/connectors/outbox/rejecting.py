"""What an outbox or a change stream has and no row can hold, as dead letters of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.contract.source import REJECTED
from delivered.model.bad_row import as_json_text

CHANGE = pa.field("_change", pa.map_(pa.string(), pa.binary()))
"""In a letter of a change stream: the table's columns, as PostgreSQL's log has them as text."""
MESSAGE = pa.field(
    "_message", pa.struct([pa.field(n, pa.binary()) for n in ("id", "aggregatetype", "aggregateid", "type", "payload")])
)
"""In a letter of an outbox: its columns. `value` and `key` are in the letter under their own names, too."""

Rejected = Mapping[str, Any]
"""As REJECTED holds it."""


@dataclass(frozen=True)
class Rejecting:
    """
    Attributes:
        kept: rows have the column REJECTED; else what is rejected is left out.
    """

    kept: bool

    def batch(self, rows: pa.RecordBatch, rejected: Sequence[Rejected]) -> pa.RecordBatch:
        """Rows, followed by what is rejected."""
        if not self.kept:
            return rows
        columns = [pa.concat_arrays([c, pa.nulls(len(rejected), c.type)]) for c in rows.columns]
        records = pa.array([*[None] * rows.num_rows, *rejected], REJECTED.type)
        return pa.RecordBatch.from_arrays([*columns, records], schema=rows.schema.append(REJECTED))


def of_change(reason: str, op: str, position: int, names: Sequence[str], values: Sequence[bytes | None]) -> Rejected:
    change = list(zip(names, values, strict=True))
    more = {"_op": op, "_deleted": op == "delete", "_lsn": position, CHANGE.name: change}
    return {"reason": reason, "more": as_json_text(more)}


def of_message(reason: str, offset: int, time_us: int | None, message: Sequence[bytes | None]) -> Rejected:
    """Args: message: see `events.Message`."""
    named = dict(zip(MESSAGE.type.names, message, strict=True))
    more = {"timestamp": time_us, MESSAGE.name: named}
    return {
        "reason": reason, "offset": offset, "key": named["aggregateid"], "value": named["payload"],
        "more": as_json_text(more),
    }  # fmt: skip
