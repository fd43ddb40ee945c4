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
from typing import Any

import pyarrow as pa

from delivered.kits.table import columns
from delivered.model.ranges import RANGES

FIELD_ID = b"PARQUET:field_id"


class IcebergTypes(columns.TableTypes):
    system = "Iceberg"
    table = "an Iceberg table"
    range = RANGES["iceberg"]

    def canonical(self, kind: pa.DataType) -> pa.DataType | None:
        found = columns.canonical(kind)
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
    return found if isinstance(kind, ice.FixedType | ice.UUIDType) else columns.canonical(found) or found
