"""The user's table: types without loss, its creation, and its comparison with the rows. Changes no rows.

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

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.iceberg import IcebergOptions, Part
from delivered.connectors.iceberg.client import (
    catalog,
    data_path,
    explained,
    local_store_folders,
    open_table,
    require_table,
    store,
)
from delivered.kits.table import target
from delivered.model.errors import Refused, UsageError
from delivered.model.rows import RANGES, because, first_of, unstorable

FIELD_ID = b"PARQUET:field_id"


class IcebergTypes(target.TableTypes):
    system = "Iceberg"
    table = "an Iceberg table"
    range = RANGES["iceberg"]

    def canonical(self, kind: pa.DataType) -> pa.DataType | None:
        type_ = target.canonical(kind)
        return None if type_ is None else _wide(type_)


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
    type_: pa.DataType = schema_to_pyarrow(kind)
    return type_ if isinstance(kind, ice.FixedType | ice.UUIDType) else target.canonical(type_) or type_


# Partition values that the client cannot commit: it also writes them as text, with Python's dates.

VOID = "void"
"""What is left of a field that was removed from the spec of a table that had format version 1."""
_AS_DATES = frozenset({"identity", "day", "hour"})
_TRUNCATE = "truncate["


def partition_parts(table: Any) -> tuple[Part, ...]:
    """The table's partition spec. Nested columns have their path, which is no column of the rows."""
    schema = table.schema()
    fields = [f for f in table.spec().fields if str(f.transform) != VOID]
    return tuple(Part(schema.find_column_name(f.source_id), str(f.transform)) for f in fields)


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
        elif pa.types.is_floating(kind):
            why = f"column {part.column!r}: NaN as a partition, which the client cannot replace or delete"
            found = because(None, pc.is_nan(batch.column(at)), why)
        reasons = first_of(reasons, found)
    return reasons


def _truncated(column: pa.Array, part: Part) -> pa.Array | None:
    """Negative numbers are truncated downwards, possibly to one digit more than the type has."""
    width, kind = int(part.transform.removeprefix(_TRUNCATE).rstrip("]")), column.type
    least = -((10**kind.precision - 1) // width * width)
    bound = pa.scalar(Decimal(f"{least}E{-kind.scale}"), kind)
    why = f"column {part.column!r}: its {part.transform} has more digits than {kind}"
    return because(None, pc.less(column, bound), why)


FORMAT_VERSION = 2
_CREATED_WITH = {
    "format-version": str(FORMAT_VERSION),
    # Each batch adds a metadata version and a manifest; both are cleaned up continuously.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.manifest-merge.enabled": "true",
}
ADD_ATTEMPTS_MAX = 10
"""Retries against concurrent commits when columns are added."""
_DAYS, _HOURS = ("year", "month", "day"), ("hour",)


def ready(options: IcebergOptions, schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: the table does not exist and must not be created; or rows of this schema do not match it.
        Refused: the table requires writer features that this sink does not support.
    """
    TYPES.check(schema)
    schema = TYPES.canonical_schema(schema)
    table = open_table(options)
    if table is None:
        table = _create(options, schema)
    check_features(options, table)
    if compare(options, table, schema, adds=True):
        _add_columns(options, table, schema)
        compare(options, require_table(options), schema)


def check(options: IcebergOptions) -> None:
    """Raise if this table cannot be written. Writes and deletes a small file next to its data."""
    catalog(options)
    table = open_table(options)
    if table is None and not options.create:
        require_table(options)
    if table is not None:
        check_features(options, table)
        with explained(options):
            target.probe(store(table, data_path(table)), "delivered")


def _add_columns(options: IcebergOptions, table: Any, schema: pa.Schema) -> None:
    """Add missing columns as optional ones, in a separate commit that changes no rows. Retried on conflicts with
    concurrent commits, perhaps of another driver doing the same."""
    from pyiceberg.exceptions import CommitFailedException

    for attempt in range(ADD_ATTEMPTS_MAX):
        lower = {f.name.lower() for f in table.schema().fields}
        missing = [f for f in to_iceberg(schema).fields if f.name.lower() not in lower]
        if not missing:
            return
        with explained(options):
            try:
                with table.update_schema() as update:
                    for field in missing:
                        update.add_column(field.name, field.field_type)
                return
            except CommitFailedException:
                if attempt == ADD_ATTEMPTS_MAX - 1:
                    raise
        table = require_table(options)


def check_features(options: IcebergOptions, table: Any) -> None:
    """Raises Refused: the table requires a writer feature that this sink does not support."""
    unsupported = []
    if table.metadata.format_version != FORMAT_VERSION:
        unsupported.append(f"format version {table.metadata.format_version} (this sink writes {FORMAT_VERSION})")
    if table.properties.get("write.wap.enabled", "false").lower() == "true":
        unsupported.append("write.wap.enabled: snapshots are published separately")
    unsupported += sorted(key for key in table.properties if key.startswith("encryption."))
    dropped = (f.name for f in table.spec().fields if table.schema().find_column_name(f.source_id) is None)
    unsupported += [f"the partition field {name}, whose column was dropped" for name in dropped]
    target.check_supported(options, unsupported)
    snapshot, write = table.current_snapshot(), options.write
    reads = write.upserts or write.replaces or write.complete
    if reads and snapshot is not None and int(snapshot.summary["total-equality-deletes"] or 0):
        raise Refused("TABLE_FEATURES.EQUALITY_DELETES", where=options.where)


def compare(options: IcebergOptions, table: Any, schema: pa.Schema, *, adds: bool = False) -> list[pa.Field]:
    """See `delivered.kits.table.target.compare`. Also raises UsageError if the options have other partitions."""
    spec = [(part.column, part.transform) for part in partition_parts(table)]
    wanted = None if options.partition_by is None else [(p.column, p.transform) for p in options.partition_by]
    if wanted not in (None, spec):
        raise UsageError(
            "PARTITIONS.ICEBERG", where=options.where, current=_spec_text(spec), wanted=_spec_text(wanted or [])
        )
    return target.compare(options, to_arrow(table.schema()), schema, [name for name, _ in spec], adds=adds)


def same_columns(options: IcebergOptions, table: Any, schema_id: int, spec_id: int, columns: Iterable[int]) -> None:
    """Check the table again at commit: others may have altered it since the files were written.

    Args:
        schema_id, spec_id: that the files were written with.
        columns: their field ids.

    Raises:
        UsageError: the files no longer match the table.
    """
    check_features(options, table)
    if table.metadata.default_spec_id != spec_id:
        raise _altered(options, "its partition spec was changed")
    if table.metadata.current_schema_id == schema_id:
        return
    old, new = table.schemas()[schema_id], table.schema()
    for column in columns:
        name, there = old.find_column_name(column), new.find_column_name(column)
        if name != there or old.find_field(column).field_type != new.find_field(column).field_type:
            raise _altered(options, f"column {name!r} was changed or dropped")
    needed = [f.name for f in new.fields if f.required and f.field_id not in set(columns)]
    if needed:
        raise _altered(options, f"columns {needed} became required")


def _altered(options: IcebergOptions, what: str) -> UsageError:
    return UsageError("TABLE_ALTERED", where=options.where, what=what)


def _create(options: IcebergOptions, schema: pa.Schema) -> Any:
    if not options.create:
        return require_table(options)
    from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError

    columns = to_iceberg(schema)
    spec = _spec(options, schema, columns)
    known = catalog(options)
    with explained(options):
        try:
            known.create_namespace(options.namespace)
        except NamespaceAlreadyExistsError:
            pass
        except Exception:
            # Another driver may have created it; if not, raise the reason.
            if not known.namespace_exists(options.namespace):
                raise
        with contextlib.suppress(TableAlreadyExistsError):
            known.create_table(options.identifier, columns, partition_spec=spec, properties=_CREATED_WITH)
    table = require_table(options)
    local_store_folders(table)
    return table


def _spec(options: IcebergOptions, schema: pa.Schema, columns: Any) -> Any:
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.transforms import parse_transform

    check_created(options, schema)
    fields = []
    for number, part in enumerate(options.partition_by or ()):
        fields.append(
            PartitionField(
                source_id=columns.find_field(part.column).field_id,
                field_id=PARTITION_FIELD_ID_START + number,
                transform=parse_transform(part.transform),
                name=part.name,
            )
        )
    return PartitionSpec(*fields)


def check_created(options: IcebergOptions, schema: pa.Schema) -> None:
    """Raises UsageError: no table can be partitioned so for rows of this schema; unknown types are not judged."""
    for part in options.partition_by or ():
        kind = schema.field(part.column).type if part.column in schema.names else None
        if kind is None or not (pa.types.is_null(kind) or _fits(part, kind)):
            raise UsageError(
                "PARTITION_TYPE.TRANSFORM",
                column=part.column,
                transform=part.transform,
                kind=kind or "not a column of the rows",
            )


def _fits(part: Part, kind: pa.DataType) -> bool:
    t = pa.types
    word = part.transform.partition("[")[0]
    exact = t.is_integer(kind) or t.is_string(kind) or t.is_binary(kind) or t.is_decimal(kind)
    if word in _HOURS:
        return bool(t.is_timestamp(kind))
    if word in _DAYS:
        return bool(t.is_timestamp(kind) or t.is_date(kind))
    if word == "truncate":
        return bool(exact)
    return bool(exact or t.is_timestamp(kind) or t.is_date(kind) or (word == "identity" and t.is_boolean(kind)))


def _spec_text(spec: list[tuple[str, str]]) -> str:
    return ", ".join(c if t == "identity" else f"{t}({c})" for c, t in spec) or "nothing"
