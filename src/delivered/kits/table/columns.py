"""Arrow types as tables and folders of files store them: one representative for all types with the same values.

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

from collections.abc import Iterable
from typing import ClassVar

import pyarrow as pa

from delivered.kits.sql.types import Types
from delivered.model.errors import UsageError


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
        raise UsageError(
            "COLUMN_TYPE",
            f"Column {field.name!r} has the type {field.type}, which {system} does not support.",
            next_step=f"cast it, for example to string: {field.name}.cast('string')",
        )
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
        """
        Raises:
            UsageError: a column's type is not supported.
        """
        return pa.schema([pa.field(f.name, kept(f, self.canonical(f.type), self.table)) for f in schema])

    def check(self, schema: pa.Schema) -> None:
        """
        Raises:
            UsageError: no columns, duplicate names, or an unsupported type.
        """
        if not named_once(schema):
            raise UsageError(
                "COLUMNS",
                f"The rows have the columns {schema.names}; {self.table} needs at least one, and names that are unique "
                "ignoring case, within structs too.",
                next_step="rename columns",
            )
        self.canonical_schema(schema)
