"""A table of files: the types of its columns, and checks of the user's table against rows and options.

One Arrow type represents all types with the same values:

Arrow                           stored as
boolean, int8..int64            the same
float, double                   the same
decimal up to 38 digits         the same
string, binary, any layout      string, binary
date                            date
timestamp with time zone        timestamp in UTC, microseconds
timestamp without               timestamp, microseconds
list, struct, map of these      list, struct, map
dictionary                      its values
others                          refused
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.kits.sql.table import Types
from delivered.kits.table import FileTableOptions
from delivered.kits.table.store import Store
from delivered.model.capability import APPEND
from delivered.model.errors import DeliveredError, Refused, Unreachable, UsageError
from delivered.model.guarantee import Guarantee


def canonical(kind: pa.DataType) -> pa.DataType | None:
    """The representative of all Arrow types with the same values; None: unsupported."""
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


def kept(field: pa.Field, kind: pa.DataType | None, system: str) -> pa.DataType:
    """
    Args:
        system: for the error: "a Delta table".

    Raises:
        UsageError: `kind` is None: the column's type is not supported.
    """
    if kind is None:
        raise UsageError("COLUMN_TYPE.UNSUPPORTED", column=field.name, type=field.type, system=system)
    return kind


def named_once(schema: pa.Schema) -> bool:
    """Whether there is a column, and names are unique ignoring case, as readers require, within structs too."""
    return bool(schema.names) and _unique(schema)


def _unique(fields: Iterable[pa.Field]) -> bool:
    lower = [f.name.lower() for f in fields]
    return len(set(lower)) == len(lower) and all(_unique(_children(f.type)) for f in fields)


def _children(kind: pa.DataType) -> list[pa.Field]:
    """Fields of a struct, or within a list or map."""
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


class TableTypes(Types):
    """Columns of a table of files, in the order of the rows."""

    columns_max = 1_000_000
    table: ClassVar[str]
    """For errors: "a Delta table"."""

    def canonical(self, kind: pa.DataType) -> pa.DataType | None:
        return canonical(kind)

    def declared(self, kind: pa.DataType) -> str | None:
        found = self.canonical(kind)
        return None if found is None else str(found)

    def canonical_schema(self, schema: pa.Schema) -> pa.Schema:
        """Raises UsageError: a column's type is not supported."""
        return pa.schema([pa.field(f.name, kept(f, self.canonical(f.type), self.table)) for f in schema])

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError: no columns, duplicate names, or an unsupported type."""
        if not named_once(schema):
            raise UsageError("COLUMNS.TABLE", columns=schema.names, table=self.table)
        self.canonical_schema(schema)


def preflight(options: FileTableOptions, guarantee: Guarantee, look: Callable[[], None]) -> list[Finding]:
    """Args: look: checks the table; raises if it cannot be used."""
    mode = options.write
    if mode != APPEND and guarantee is not Guarantee.EXACTLY_ONCE:
        name = "upsert" if mode.upserts else "complete" if mode.complete else "overwrite"
        return [Finding.build("MODE_GUARANTEE.TABLE", refuses=True, name=name, guarantee=guarantee.value)]
    try:
        look()
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []


def probe(store: Store, folder: str) -> None:
    """Write and delete a small file. Raises the store's errors."""
    name = f"{folder}/probe-{uuid.uuid4().hex}"
    store.put(name, b"may this user write here?")
    store.remove([name])


def compare(
    options: FileTableOptions, there: pa.Schema, schema: pa.Schema, partitions: Collection[str], *, adds: bool = False
) -> list[pa.Field]:
    """Columns to add to the table.

    Args:
        there: the table's columns, with their nullability.
        schema: of the rows, canonical.
        partitions: the table's partition columns.
        adds: whether columns can be added now, if the options request it.

    Raises:
        UsageError: names or types do not match, or a column is missing on one side.
    """
    lower = {name.lower(): name for name in there.names}
    missing = [field for field in schema if field.name not in there.names]
    for field in schema:
        known = lower.get(field.name.lower(), field.name)
        if known != field.name and field in missing:
            raise UsageError("COLUMN_CASE.TABLE", column=field.name, known=known, where=options.where)
        if field not in missing and not there.field(field.name).type.equals(field.type):
            raise UsageError(
                "COLUMN_TYPE.TABLE",
                column=field.name,
                table_type=there.field(field.name).type,
                where=options.where,
                type=field.type,
            )
    if missing and not (adds and options.merge_schema):
        way = 'add it with .option("mergeSchema", "true"), or drop it from the rows'
        raise UsageError(
            "COLUMN_MISSING.TABLE_MERGE" if options.merge_schema else "COLUMN_MISSING.TABLE",
            where=options.where,
            missing=", ".join(repr(f.name) for f in missing),
            columns=there.names,
            way=way,
        )
    needed = dict.fromkeys([*(f.name for f in there if not f.nullable), *partitions])
    absent = [name for name in needed if name not in schema.names]
    if absent:
        nested = "" if set(absent) <= set(there.names) else "; partitioning by a field of a struct is not supported"
        raise UsageError("COLUMN_REQUIRED.TABLE", where=options.where, missing=absent, nested=nested)
    return missing


def check_supported(options: FileTableOptions, unsupported: Sequence[str]) -> None:
    """
    Args:
        unsupported: writer features that the table requires and this sink does not support.

    Raises:
        Refused: there are such features.
    """
    if unsupported:
        raise Refused("TABLE_FEATURES.WRITER", where=options.where, unsupported=", ".join(unsupported))


def missing_table(options: FileTableOptions, system: str, check: str) -> UsageError:
    """Args: check: what the user should check."""
    return UsageError("TABLE_MISSING.TABLE", system=system, where=options.where, check=check)


def unreachable(options: FileTableOptions, error: Exception, check: str) -> DeliveredError:
    """Translate an error of the client or the file system."""
    if isinstance(error, OSError) and options.local:
        return DeliveredError("TABLE_STORAGE", where=options.where, error=str(error)[:500])
    return Unreachable(
        "TABLE_UNREACHABLE", where=options.where, error_type=type(error).__name__, error=str(error)[:500], check=check
    )


@contextlib.contextmanager
def but_missing(explained: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """`explained`, except for missing files, which are not a failure of the store."""
    missing_file = None
    with explained:
        try:
            yield
        except FileNotFoundError as error:
            missing_file = error
    if missing_file is not None:
        raise missing_file
