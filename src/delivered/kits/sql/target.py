"""Errors and findings about the user's table, for any database."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.kits.sql.database import quoted
from delivered.kits.sql.options import ServerOptions
from delivered.kits.sql.types import shown
from delivered.model.errors import UsageError

_MARK = re.compile(r"delivered ([0-9a-f]{32})")


def new_mark() -> str:
    """A comment that identifies a table created here, for databases without table ids."""
    return f"delivered {uuid.uuid4().hex}"


def marked(text: str | None) -> str | None:
    """The id in a table's comment; None: it was not created here."""
    found = _MARK.search(text or "")
    return None if found is None else found[1]


def missing(table: str, where: str, next_step: str) -> UsageError:
    return UsageError(
        "TABLE_MISSING", f"Table {table!r} {where} does not exist, and ifNotExists is false.", next_step=next_step
    )


def missing_at_server(options: ServerOptions) -> UsageError:
    way_out = 'create the table, correct the option dbtable, or add .option("ifNotExists", "true")'
    return missing(options.table_text, options.where, way_out)


def text_of(options: ServerOptions) -> str:
    """The table as the user wrote it, quoted for SQL."""
    return quoted(options.table) if options.schema is None else f"{quoted(options.schema)}.{quoted(options.table)}"


def permission(options: ServerOptions, user: str, rights: Sequence[str], table: str) -> Finding:
    lacks = " and ".join(rights)
    return Finding(
        "PERMISSION",
        f"User {user!r} lacks the privilege {lacks} on {options.table_text!r} at {options.place}.",
        True,
        f"GRANT {', '.join(rights)} ON {table} TO {user}",
    )


def never_written(table: str, where: str, options: str) -> UsageError:
    return UsageError(
        "TABLE_UNKNOWN",
        f"Table {table!r} {where} was never written by a pipeline.",
        next_step=f"run the pipeline first, or check {options}",
    )


def column_missing(table: str, where: str, field: str, has: str, next_step: str) -> UsageError:
    return UsageError(
        "COLUMN_MISSING",
        f"Table {table!r} {where} has no column {field!r}; it has {has}.",
        next_step=f"{next_step}; or drop the column from the rows",
    )


def check_unchanged(table: str, where: str, known: pa.Schema, now: pa.Schema, next_step: str) -> None:
    """
    Raises:
        UsageError: the rows have other columns or types than those written before.
    """
    if not known.equals(now):
        raise UsageError(
            "SCHEMA_CHANGED",
            f"Table {table!r} {where} was written with the columns {shown(known)}, but the rows now have {shown(now)}. "
            "Fingerprints of the two cannot be combined.",
            next_step=next_step,
        )
