"""Arrow types as an Iceberg table stores them, without loss.

Arrow                           Iceberg
boolean                         boolean
int8, int16, int32              int
int64                           long
float, double                   float, double
decimal up to 38 digits         decimal
string, binary, any layout      string, binary
date                            date
timestamp with time zone        timestamptz (UTC, microseconds)
timestamp without               timestamp (microseconds)
list, struct, map of these      list, struct, map
dictionary                      its values
others                          refused
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.iceberg import Part
from delivered.kits.table import target
from delivered.model.ranges import RANGES, because, first_of, unstorable

FIELD_ID = b"PARQUET:field_id"


class IcebergTypes(target.TableTypes):
    system = "Iceberg"
    table = "an Iceberg table"
    range = RANGES["iceberg"]

    def canonical(self, kind: pa.DataType) -> pa.DataType | None:
        found = target.canonical(kind)
        return None if found is None else _wide(found)


TYPES = IcebergTypes()


def _wide(kind: pa.DataType) -> pa.DataType:
    """Iceberg has no integers of 8 and 16 bits."""
    t = pa.types
    if t.is_int8(kind) or t.is_int16(kind):
        return pa.int32()
    if t.is_map(kind):
        return pa.map_(_wide(kind.key_type), _wide(kind.item_type))
    if t.is_list(kind):
        return pa.list_(pa.field("element", _wide(kind.value_type)))
    if t.is_struct(kind):
        return pa.struct([(f.name, _wide(f.type)) for f in kind])
    return kind


def to_iceberg(schema: pa.Schema) -> Any:
    """Schema of a new table, every column optional, with field ids from 1."""
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

    ids = itertools.count(1)
    top = [next(ids) for _ in schema]
    fields = [
        NestedField(field_id=i, name=f.name, field_type=_to_iceberg(f.type, ids), required=False)
        for i, f in zip(top, schema, strict=True)
    ]
    return Schema(*fields)


def _to_iceberg(kind: pa.DataType, ids: Any) -> Any:
    from pyiceberg import types as ice

    t = pa.types
    if t.is_decimal(kind):
        return ice.DecimalType(kind.precision, kind.scale)
    if t.is_timestamp(kind):
        return ice.TimestampType() if kind.tz is None else ice.TimestamptzType()
    if t.is_list(kind):
        own = next(ids)
        return ice.ListType(element_id=own, element=_to_iceberg(kind.value_type, ids), element_required=False)
    if t.is_map(kind):
        key, value = next(ids), next(ids)
        key_type, value_type = _to_iceberg(kind.key_type, ids), _to_iceberg(kind.item_type, ids)
        return ice.MapType(key_id=key, key_type=key_type, value_id=value, value_type=value_type, value_required=False)
    if t.is_struct(kind):
        own = [next(ids) for _ in kind]
        fields = [
            ice.NestedField(field_id=i, name=f.name, field_type=_to_iceberg(f.type, ids), required=False)
            for i, f in zip(own, kind, strict=True)
        ]
        return ice.StructType(*fields)
    plain = {
        pa.bool_(): ice.BooleanType(), pa.int32(): ice.IntegerType(), pa.int64(): ice.LongType(),
        pa.float32(): ice.FloatType(), pa.float64(): ice.DoubleType(), pa.string(): ice.StringType(),
        pa.binary(): ice.BinaryType(), pa.date32(): ice.DateType(),
    }  # fmt: skip
    return plain[kind]


def plain(schema: Any) -> pa.Schema:
    """A table's columns in canonical Arrow types, without field ids."""
    return pa.schema([(f.name, TYPES.canonical(f.type) or f.type) for f in to_arrow(schema)])


def to_arrow(schema: Any) -> pa.Schema:
    """A table's columns in canonical Arrow types, with field ids as in Parquet; an unsupported type stays the
    client's."""
    return pa.schema([_field(f.name, f.field_type, f.field_id, not f.required) for f in schema.fields])


def _field(name: str, kind: Any, field_id: int, nullable: bool = True) -> pa.Field:
    return pa.field(name, _to_arrow(kind), nullable, {FIELD_ID: str(field_id).encode()})


def _to_arrow(kind: Any) -> pa.DataType:
    from pyiceberg import types as ice
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    # Nested nullability is ignored: the rows' schema does not reveal nulls there.
    if isinstance(kind, ice.ListType):
        return pa.list_(_field("element", kind.element_type, kind.element_id))
    if isinstance(kind, ice.MapType):
        key = pa.field("key", _to_arrow(kind.key_type), False, {FIELD_ID: str(kind.key_id).encode()})
        return pa.map_(key, _field("value", kind.value_type, kind.value_id))
    if isinstance(kind, ice.StructType):
        return pa.struct([_field(f.name, f.field_type, f.field_id) for f in kind.fields])
    found: pa.DataType = schema_to_pyarrow(kind)
    return found if isinstance(kind, ice.FixedType | ice.UUIDType) else target.canonical(found) or found


# Partition values that the client cannot commit: it also writes them as text, with Python's dates.

_AS_DATES = frozenset({"identity", "day", "hour"})
_TRUNCATE = "truncate["


def partition_parts(table: Any) -> tuple[Part, ...]:
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
