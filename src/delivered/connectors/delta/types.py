"""Arrow types as a Delta table keeps them, without loss.

Arrow                           Delta
boolean, int8..int64            boolean, byte, short, integer, long
float, double                   float, double
decimal up to 38 digits         decimal
string, binary                  string, binary
date                            date
timestamp with time zone        timestamp (UTC, microseconds)
timestamp without               timestamp_ntz (microseconds)
list, struct, map of these      array, struct, map
others                          refused
"""

from __future__ import annotations

import pyarrow as pa

from delivered.model.errors import BadRecord, UsageError


def canonical(kind: pa.DataType) -> pa.DataType | None:
    """The one Arrow type that stands for all with the same values; None if a table cannot keep it."""
    t = pa.types
    if t.is_dictionary(kind):
        return canonical(kind.value_type)
    if t.is_boolean(kind) or t.is_signed_integer(kind) or t.is_float32(kind) or t.is_float64(kind):
        return kind
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return pa.binary()
    if t.is_decimal128(kind) or t.is_date32(kind):
        return kind
    if t.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if t.is_map(kind):
        key, value = canonical(kind.key_type), canonical(kind.item_type)
        return pa.map_(key, value) if key is not None and value is not None else None
    if t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind):
        value = canonical(kind.value_type)
        return pa.list_(pa.field("element", value)) if value is not None else None
    if t.is_struct(kind):
        fields = [(f.name, canonical(f.type)) for f in kind]
        return None if not fields or any(k is None for _, k in fields) else pa.struct(fields)
    return None


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """
    Raises:
        UsageError: a column's type cannot be kept.
    """
    fields = []
    for field in schema:
        kind = canonical(field.type)
        if kind is None:
            raise UsageError(
                "COLUMN_TYPE",
                f"Column {field.name!r} has the type {field.type}, which a Delta table cannot keep.",
                next_step=f"cast it, for instance to string: {field.name}.cast('string')",
            )
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def check(schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: no column, two of one name (Delta does not tell capital letters), or a type that cannot be kept.
    """
    lower = [name.lower() for name in schema.names]
    double = sorted({name for name in lower if lower.count(name) > 1})
    if double or not lower:
        raise UsageError(
            "COLUMNS",
            f"Rows have the columns {schema.names}; a Delta table needs at least one, each of its own name, capital "
            f"letters apart{': ' + str(double) if double else ''}.",
            next_step="rename columns",
        )
    canonical_schema(schema)


def with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows in the types of `schema`, whose columns are those of the batch, in its order."""
    if batch.schema.equals(schema):
        return batch
    try:
        arrays = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRecord("VALUE", f"A value does not fit its column: {str(error)[:300]}") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
