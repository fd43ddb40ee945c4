"""Rows as one record batch, and back: on the way through Spark, and in files, there are only columns.

    task of the source     RAW        -> Spark -> task of the transform
    task of the transform  REJECTED   -> Spark -> task of the sinks

Nothing else knows these columns. Between a source and its sinks without Spark, there are none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.source import COORDINATES, Source
from delivered.model.bad_row import as_json_text
from delivered.model.rows import Origin, Rejection, Rows

REJECTED = pa.field(
    "__delivered_rejected",
    pa.struct(
        [
            pa.field("reason", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("sink", pa.string()),
            pa.field("more", pa.string()),
        ]
    ),
)
"""A `Rejection`; null for a good row. `sink`: its origin; null: the source. `more`: the record's other columns, as JSON
(`model.bad_row.as_json_text`); null: none."""

RAW = pa.field("__delivered_raw", pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.binary())]))
"""Of a source that decodes its records: their bytes, for dead letters of rows that the transform fails for."""

_FILE = pa.schema([REJECTED])


def decode(batch: pa.RecordBatch) -> Rows:
    """The rows of a batch in the columns of `encode`, or of any batch of rows."""
    at, raw = (batch.schema.get_field_index(f.name) for f in (REJECTED, RAW))
    if at < 0 and raw < 0:
        return Rows(batch)
    good = batch.drop_columns([f.name for f, i in ((REJECTED, at), (RAW, raw)) if i >= 0])
    records = pa.RecordBatch.from_struct_array(batch.column(raw)) if raw >= 0 else None
    if at < 0 or batch.column(at).null_count == batch.num_rows:
        return Rows(good, (), records)
    rejected = batch.column(at)
    rows = pc.is_null(rejected)
    return Rows(good.filter(rows), _parse(rejected), records.filter(rows) if records is not None else None)


def encode(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """As a batch of this schema: rejected rows come last, and are null but for REJECTED, if the schema has it."""
    count = len(rows.rejected) if REJECTED.name in schema.names else 0
    total = rows.good.num_rows + count

    def column(field: pa.Field) -> pa.Array:
        if field.name == REJECTED.name:
            return pa.array([*[None] * rows.good.num_rows, *map(_structure, rows.rejected)], REJECTED.type)
        if field.name == RAW.name:
            parts = [
                rows.records.column(f.name) if rows.records is not None else pa.nulls(total, f.type) for f in RAW.type
            ]
            return pa.StructArray.from_arrays(parts, fields=list(RAW.type))
        good = rows.good.column(field.name)
        return pa.concat_arrays([good, pa.nulls(count, good.type)]) if count else good

    return pa.RecordBatch.from_arrays([column(f) for f in schema], schema=schema)


def source_schema(source: Source, *, raw: bool) -> pa.Schema:
    """Columns of a source's rows.

    Args:
        raw: and RAW, if the source decodes keys or values.
    """
    schema = source.schema()
    if not raw:
        return schema
    undecoded = source.raw_schema()
    both = [f.name for f in RAW.type if f.name in schema.names and f.name in undecoded.names]
    decodes = any(schema.field(n).type != undecoded.field(n).type for n in both)
    return schema.append(RAW) if decodes else schema


def with_rejected(schema: pa.Schema) -> pa.Schema:
    """Columns of rows, which are null for a rejected one, and REJECTED."""
    return pa.schema([*(f.with_nullable(True) for f in schema), REJECTED])


def without_rejected(schema: pa.Schema) -> pa.Schema:
    """Columns of the rows alone."""
    return pa.schema([f for f in schema if f.name != REJECTED.name])


def pack(rejected: Sequence[Rejection]) -> bytes:
    """For a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _FILE) as writer:
        column = pa.array([_structure(r) for r in rejected], REJECTED.type)
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_FILE))
    return bytes(sink.getvalue())


def join(files: Sequence[bytes]) -> bytes:
    """Several files as one."""
    return pack([r for data in files for r in unpack(data)])


def unpack(data: bytes) -> list[Rejection]:
    """The inverse of `pack`."""
    return [r for batch in pa.ipc.open_stream(data) for r in _parse(batch.column(0))]


def _structure(rejected: Rejection) -> dict[str, Any]:
    more = dict(rejected.record)
    source = rejected.origin is Origin.SOURCE
    plain = [n for n in ("key", "value") if isinstance(more.get(n), bytes) or (source and more.get(n) is None)]
    parts = {n: more.pop(n, None) for n in plain}
    return {
        "reason": rejected.reason,
        "topic": rejected.topic,
        "partition": rejected.partition,
        "offset": rejected.offset,
        **parts,
        "sink": None if source else rejected.origin.value,
        "more": as_json_text(more) if more else None,
    }


def _parse(column: pa.Array) -> list[Rejection]:
    return [
        Rejection(
            Origin.parse(each["sink"] or Origin.SOURCE.value),
            each["reason"],
            {n: each[n] for n in ("key", "value") if each[n] is not None} | json.loads(each["more"] or "{}"),
            *(each[n] for n in COORDINATES),
        )
        for each in column.drop_null().to_pylist()
    ]
