"""Columns of a server's table, compared with the rows' schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from delivered.kits.sql.database import quoted
from delivered.kits.sql.options import ServerOptions
from delivered.kits.sql.target import column_computed, column_missing
from delivered.kits.sql.types import ServerTypes
from delivered.model.errors import UsageError


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        kind: name of the type, as in `ServerTypes.fitting`.
        shown: the type in SQL.
        precision, scale: of a bounded decimal; else None.
        required: NOT NULL without a default.
        computed: a generated column, or an identity column GENERATED ALWAYS.
        width: characters of a bounded text; else None.
        fills_null: the server replaces null by a value of its own.
    """

    kind: str
    shown: str
    precision: int | None
    scale: int | None
    required: bool
    computed: bool
    width: int | None = None
    fills_null: bool = False


def compare(
    options: ServerOptions, types: ServerTypes, schema: pa.Schema, columns: Mapping[str, Column], change: str
) -> tuple[str, ...]:
    """Check a schema against a table's columns; return the type of each.

    Args:
        change: SQL that changes a column's type: "ALTER COLUMN {name} TYPE".

    Raises:
        UsageError: a column is missing or of another type.
    """
    table, kinds = options.table_text, []
    for f in schema:
        column = columns.get(f.name)
        if column is None:
            wanted = "..." if untyped(f) else types.declared(f.type)
            way_out = f"ALTER TABLE {table} ADD COLUMN {quoted(f.name)} {wanted}"
            raise column_missing(options, f.name, columns, way_out)
        if column.computed:
            raise column_computed(table, f.name)
        if not _fits(types, f.type, column):
            raise UsageError(
                "COLUMN_TYPE",
                f"Column {f.name!r} of table {table!r} is {column.shown}, which cannot store every value of {f.type} "
                f"without loss; it must be {'another type' if untyped(f) else types.declared(f.type)}.",
                next_step="cast the column of the rows, or "
                f"ALTER TABLE {table} {change.format(name=quoted(f.name))} ...",
            )
        kinds.append(column.kind)
    absent = [n for n, c in columns.items() if c.required and n not in schema.names]
    if absent:
        raise UsageError(
            "COLUMN_REQUIRED",
            f"Columns {', '.join(map(repr, absent))} of table {table!r} are NOT NULL without a default, but missing "
            "from the rows.",
            next_step="add them to the rows, or give them a default",
        )
    return tuple(kinds)


def check_typed(options: ServerOptions, schema: pa.Schema) -> None:
    """Check that a table can be created from a schema.

    Raises:
        UsageError: a column has the type null.
    """
    if any(untyped(f) for f in schema):
        raise UsageError(
            "TYPE_UNKNOWN",
            f"Table {options.table_text} cannot be created: columns {[f.name for f in schema if untyped(f)]} hold only "
            "nulls, so their types are unknown.",
            next_step="cast them, or create the table",
        )


def untyped(f: pa.Field) -> bool:
    """Whether its type is null."""
    return bool(pa.types.is_null(f.type))


def _fits(types: ServerTypes, kind: pa.DataType, column: Column) -> bool:
    if pa.types.is_null(kind):
        return True
    if column.kind not in types.fitting(kind):
        return False
    if column.precision is None or column.scale is None or not pa.types.is_decimal(kind):
        return True
    # Another scale would change the digits, or round.
    return bool(kind.scale == column.scale and kind.precision <= column.precision)
