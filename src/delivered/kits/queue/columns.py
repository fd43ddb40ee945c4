"""Columns of rows that are written as messages: their types, their ids, and the size that a server accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord, UsageError
from delivered.model.ranges import EVERYTHING, too_long, unstorable

TEXT = (pa.types.is_string, pa.types.is_large_string)
TEXT_OR_BYTES = (pa.types.is_binary, pa.types.is_large_binary, *TEXT)

_TYPES = {"value": TEXT_OR_BYTES, "key": TEXT_OR_BYTES, "message_id": TEXT}
COLUMNS = tuple(_TYPES)
"""In a reader's order. message_id: set by the user, replacing the generated one."""

ID = "delivered.id"
"""Header or property with a message's id, in systems whose messages have none of their own."""


def identified_schema(system: str, schema: pa.Schema, id_columns: Sequence[str]) -> pa.Schema:
    """The schema of `identified`. Raises UsageError if a column is missing, or is no text, bytes or integer."""
    if not id_columns:
        return schema
    for name in id_columns:
        found = schema.field(name).type if name in schema.names else None
        if found is None or not (pa.types.is_integer(found) or any(fits(found) for fits in TEXT_OR_BYTES)):
            raise UsageError(
                "COLUMNS.MESSAGE_ID",
                system=system,
                name=name,
                type=found or "no column",
                columns=", ".join(schema.names),
            )
    kept = [f for f in schema if f.name in ("key", "value") or f.name not in (*id_columns, "message_id")]
    return pa.schema([*kept, pa.field("message_id", pa.string())])


def identified(batch: pa.RecordBatch, id_columns: Sequence[str], *, nulls: bool = False) -> pa.RecordBatch:
    """The batch with a column message_id made of these columns. Those that are part of the id alone are dropped.

    Args:
        nulls: a row without an id gets null, instead of raising BadRecord.
    """
    if not id_columns:
        return batch
    parts = [_id_text(batch, name, nulls) for name in id_columns]
    ids = (
        parts[0] if len(parts) == 1 else _joined(parts, [pa.types.is_integer(batch.column(n).type) for n in id_columns])
    )
    ids = pc.if_else(pc.equal(ids, ""), pa.scalar(None, pa.string()), ids)
    if ids.null_count and not nulls:
        row = batch.slice(pc.index(pc.is_null(ids), True).as_py(), 1).select(id_columns).to_pylist()[0]
        raise BadRecord("MESSAGE_ID.NONE", row=row)
    kept = [n for n in batch.schema.names if n in ("key", "value") or n not in (*id_columns, "message_id")]
    return pa.RecordBatch.from_arrays([*(batch.column(n) for n in kept), ids], names=[*kept, "message_id"])


def _id_text(batch: pa.RecordBatch, name: str, nulls: bool) -> pa.Array:
    """A column as text; where it is not UTF-8, null if `nulls`, else BadRecord."""
    column = batch.column(name)
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    raw = column.cast(pa.binary())
    text = raw.view(pa.string())
    bad = unstorable(EVERYTHING, pa.record_batch([text], names=[name]))
    if bad is None:
        return text
    if not nulls:
        row = pc.index(pc.is_valid(bad), True).as_py()
        raise BadRecord("MESSAGE_ID.NOT_TEXT", row=row, value=raw[row].as_py(), name=name)
    return pc.if_else(bad.is_null(), text, pa.scalar(None, pa.string()))


def _joined(parts: Sequence[pa.Array], numbers: Sequence[bool]) -> pa.Array:
    """The values joined by "-"; where that is ambiguous, followed by "#" and the lengths of all but the last.

    Otherwise two rows could get the same id, and a reader would drop one (P33). One text among integers, such as
    topic, partition and offset, is ambiguous only with negative ones; several texts, if one of them holds a "-".

    Args:
        numbers: whether each column holds integers.
    """
    ids = pc.binary_join_element_wise(*parts, "-")
    if sum(numbers) >= len(parts) - 1:
        negative = [pc.starts_with(part, "-") for part, number in zip(parts, numbers, strict=True) if number]
        ambiguous = reduce(pc.or_, negative)
    else:
        ambiguous = pc.greater(pc.count_substring(ids, "-"), len(parts) - 1)
    lengths = [pc.utf8_length(part).cast(pa.string()) for part in parts[:-1]]
    suffix = lengths[0] if len(lengths) == 1 else pc.binary_join_element_wise(*lengths, ",")
    return pc.if_else(ambiguous, pc.binary_join_element_wise(ids, suffix, "#"), ids)


def check_types(schema: pa.Schema) -> None:
    """Raise UsageError for a column of `COLUMNS` that is neither text nor bytes."""
    for field in schema:
        if not any(fits(field.type) for fits in _TYPES[field.name]):
            raise UsageError("COLUMNS.NOT_BYTES", column=field.name, type=field.type)


def check_names(
    system: str, schema: pa.Schema, needed: Collection[str], known: Collection[str], next_step: str
) -> None:
    """Raise UsageError if a needed column is missing, or a column is unknown."""
    names = set(schema.names)
    if not set(needed) <= names <= set(known):
        raise UsageError(
            "COLUMNS.QUEUE",
            system=system,
            required=", ".join(sorted(needed)),
            optional=", ".join(sorted(set(known) - set(needed))),
            columns=", ".join(schema.names) or "no columns",
            action=next_step,
        )


def as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch's columns that are in `COLUMNS`, as bytes, as a reader sees them."""
    names = [n for n in COLUMNS if n in batch.schema.names]
    return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.binary()) for n in names], names=names)


def column(rows: pa.RecordBatch, name: str, kind: pa.DataType | None = None) -> list[Any]:
    """A column's values, of this type if one is given; nulls if the column is missing."""
    if name not in rows.schema.names:
        return [None] * rows.num_rows
    values = rows.column(name)
    if kind is not None:
        values = values.cast(kind)
    try:
        return values.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        raise not_text(f"column {name!r}", error.object) from None


def text(value: str | bytes, what: str) -> str:
    """Args: what: for the error: "column 'key'". Raises BadRecord: it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise not_text(what, value) from None


def not_text(what: str, value: bytes) -> BadRecord:
    return BadRecord("NOT_TEXT", value=value, what=what)


@dataclass
class _Found:
    accepted: int = -1
    limit: int | None = None


class ServerLimits:
    """What this process found out, by server: nothing is asked twice.

    A limit that is changed later is found by the next process; until then, the server itself refuses the message.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self._found: dict[Hashable, _Found] = {}

    def refused(self, batch: pa.RecordBatch, server: Hashable, ask: Callable[[int], int | None]) -> pa.Array | None:
        """See `delivered.contract.sink.Sink.refused_rows`: rows whose value is longer than the server accepts.

        Args:
            ask: the server's limit, if a value of so many bytes is above it; None: it is accepted.
        """
        lengths = pc.fill_null(pc.binary_length(batch.column("value").cast(pa.large_binary())), 0).cast(pa.int64())
        longest, known = pc.max(lengths).as_py() or 0, self._found.setdefault(server, _Found())
        if longest > known.accepted and known.limit is None:
            known.limit = ask(longest)
            if known.limit is None:
                known.accepted = longest
        if known.limit is None or longest <= known.limit:
            return None
        reasons = [
            too_long(self._system, "value", n, known.limit).message if n > known.limit else None
            for n in lengths.to_pylist()
        ]
        return pa.array(reasons, pa.string())
