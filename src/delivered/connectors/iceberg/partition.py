"""Partition values that the client cannot commit: it also writes them as text, with Python's dates."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.iceberg.options import Part
from delivered.model.ranges import RANGES, because, first_of, unstorable

_AS_DATES = frozenset({"identity", "day", "hour"})
_TRUNCATE = "truncate["


def parts_of(table: Any) -> tuple[Part, ...]:
    """The table's partition spec. Nested columns have their path, which is no column of the rows."""
    schema = table.schema()
    found = ((schema.find_column_name(f.source_id), str(f.transform)) for f in table.spec().fields)
    return tuple(Part(column, transform) for column, transform in found)


def unstorable_parts(parts: Sequence[Part], batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row whose partition the client cannot commit; None: there are none."""
    reasons: pa.Array | None = None
    for part in parts:
        if part.column not in batch.schema.names:
            continue
        at = batch.schema.get_field_index(part.column)
        kind = batch.schema.field(at).type
        found = None
        if part.transform in _AS_DATES and (pa.types.is_timestamp(kind) or pa.types.is_date32(kind)):
            found = unstorable(RANGES["iceberg partition"], batch.select([at]))
        elif part.transform.startswith(_TRUNCATE) and pa.types.is_decimal128(kind):
            found = _truncated(batch.column(at), part)
        reasons = first_of(reasons, found)
    return reasons


def _truncated(column: pa.Array, part: Part) -> pa.Array | None:
    """Negative numbers are truncated downwards, possibly to one digit more than the type has."""
    width, kind = int(part.transform.removeprefix(_TRUNCATE).rstrip("]")), column.type
    least = -((10**kind.precision - 1) // width * width)
    bound = pa.scalar(Decimal(f"{least}E{-kind.scale}"), kind)
    why = f"column {part.column!r}: its {part.transform} has more digits than {kind}"
    return because(None, pc.less(column, bound), why)
