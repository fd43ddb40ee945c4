"""Arrow types as each format keeps them, without loss.

Parquet  booleans, numbers, texts, bytes, dates, times, lists, structs, maps
JSON     the same; bytes in base64, decimals and times as text, keys of maps are texts
CSV      booleans, numbers, texts, dates, times
"""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.files.options import FilesOptions
from delivered.model.errors import BadRecord, UsageError


def canonical(kind: pa.DataType) -> pa.DataType | None:
    """The one Arrow type that stands for all with the same values; None if no file keeps it."""
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
    return pa.schema([pa.field(f.name, _kept(f.name, f.type, canonical(f.type), "A file")) for f in schema])


def check(options: FilesOptions, schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: no column, two of one name, one named `batch`, or a type that the format cannot keep.
    """
    lower = [name.lower() for name in schema.names]
    if not lower or len(set(lower)) != len(lower) or "batch" in lower:
        raise UsageError(
            "COLUMNS",
            f"Rows have the columns {schema.names}; there must be one at least, each of its own name, capital letters "
            "apart, and none named 'batch', which readers find in the folders' names.",
            next_step="rename columns",
        )
    if options.format == "csv" and len(schema) == 1:
        raise UsageError(
            "COLUMNS",
            f"Rows have one column, {schema.names[0]!r}: a NULL in it would be an empty line of CSV, which "
            "readers skip.",
            next_step='add a column, or write .option("fileFormat", "json")',
        )
    for field in canonical_schema(schema):
        fits = options.format == "parquet" or (_json(field.type) if options.format == "json" else _csv(field.type))
        _kept(field.name, field.type, field.type if fits else None, f"A {options.format} file")


def with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows in the types of `schema`, whose columns are those of the batch, in its order."""
    if batch.schema.equals(schema):
        return batch
    try:
        arrays = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRecord("VALUE", f"A value does not fit its column: {str(error)[:300]}") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _kept(name: str, given: pa.DataType, kind: pa.DataType | None, where: str) -> pa.DataType:
    if kind is None:
        raise UsageError(
            "COLUMN_TYPE",
            f"Column {name!r} has the type {given}, which {where.lower()} does not keep.",
            next_step=f"cast it, for instance to string: {name}.cast('string')",
        )
    return kind


def _json(kind: pa.DataType) -> bool:
    t = pa.types
    if t.is_map(kind):
        return bool(t.is_string(kind.key_type)) and _json(kind.item_type)
    if t.is_list(kind):
        return _json(kind.value_type)
    return all(_json(f.type) for f in kind) if t.is_struct(kind) else True


def _csv(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind))
