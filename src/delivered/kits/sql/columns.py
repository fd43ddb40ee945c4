"""Columns of a table in a database server, and whether rows fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from delivered.kits.sql.database import quoted
from delivered.kits.sql.options import ServerOptions
from delivered.kits.sql.target import column_missing
from delivered.kits.sql.types import ServerTypes
from delivered.model.errors import UsageError


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        kind: name of the type as `ServerTypes.fitting` uses it.
        shown: the type as SQL writes it.
        precision, scale: of a decimal number with bounds; else None.
        required: no null, and no default.
        computed: the server makes its values.
    """

    kind: str
    shown: str
    precision: int | None
    scale: int | None
    required: bool
    computed: bool


def compare(
    options: ServerOptions, types: ServerTypes, schema: pa.Schema, columns: Mapping[str, Column], change: str
) -> tuple[str, ...]:
    """Check rows of `schema` against a table's columns; return the type of each.

    Args:
        change: how SQL gives a column another type: "ALTER COLUMN {name} TYPE".

    Raises:
        UsageError: a column is missing or of another type.
    """
    table, kinds = options.table_text, []
    for f in schema:
        column = columns.get(f.name)
        if column is None:
            wanted = "..." if untyped(f) else types.declared(f.type)
            way_out = f"ALTER TABLE {table} ADD COLUMN {quoted(f.name)} {wanted}"
            raise column_missing(table, options.where, f.name, ", ".join(columns), way_out)
        if column.computed:
            raise UsageError(
                "COLUMN_COMPUTED",
                f"The server makes the values of column {f.name!r} of {table!r} itself.",
                next_step=f'df.drop("{f.name}")',
            )
        if not _fits(types, f.type, column):
            raise UsageError(
                "COLUMN_TYPE",
                f"Column {f.name!r} of table {table!r} is {column.shown}, which cannot take every value of {f.type} as "
                f"it is; it takes {'nothing else' if untyped(f) else types.declared(f.type)}.",
                next_step="cast the column of the rows, or "
                f"ALTER TABLE {table} {change.format(name=quoted(f.name))} ...",
            )
        kinds.append(column.kind)
    absent = [n for n, c in columns.items() if c.required and n not in schema.names]
    if absent:
        raise UsageError(
            "COLUMN_REQUIRED",
            f"Columns {', '.join(map(repr, absent))} of table {table!r} allow no null and have no default, and the "
            "rows do not have them.",
            next_step="add them to the rows, or give them a default",
        )
    return tuple(kinds)


def check_typed(options: ServerOptions, schema: pa.Schema) -> None:
    """Before a table is created.

    Raises:
        UsageError: a column holds nothing but nulls.
    """
    if any(untyped(f) for f in schema):
        raise UsageError(
            "TYPE_UNKNOWN",
            f"Columns {[f.name for f in schema if untyped(f)]} hold nothing but nulls, and {options.table_text} "
            "is to be created: their type is not known.",
            next_step="cast them, or create the table",
        )


def untyped(f: pa.Field) -> bool:
    """Whether it holds nothing but nulls."""
    return bool(pa.types.is_null(f.type))


def _fits(types: ServerTypes, kind: pa.DataType, column: Column) -> bool:
    if pa.types.is_null(kind):
        return True
    if column.kind not in types.fitting(kind):
        return False
    if column.precision is None or column.scale is None or not pa.types.is_decimal(kind):
        return True
    # Another scale would come back as other digits, and perhaps rounded.
    return bool(kind.scale == column.scale and kind.precision <= column.precision)
