"""SQL tables over our formats: `CREATE TABLE t USING delivered_kafka OPTIONS (...)`.

Spark passes the options of `CREATE TABLE` to a Python source once, when it asks for the columns, and to none of the
statements that use the table later (measured with PySpark 4.3). What it does keep is the schema. So the options travel
in the metadata of the first column: every SELECT, INSERT INTO and readStream.table gets that schema back. A table is
resolved anew by every statement, and so reads what is there at that moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

from delivered.model.errors import Refused, UsageError
from delivered.model.options import redacted

_METADATA = "delivered.table"
_OF_CATALOG = "provider"
_PREFIX = "option."
_PER_STATEMENT = frozenset({"runid", "pipeline"})
"""Options that a statement on a table may add: INSERT INTO t WITH ('runId' = '...')."""


def created(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of the `CREATE TABLE` that asks; None: somebody else asks.

    Raises:
        UsageError: one holds a secret: the schema goes wherever the rows go, into files of other formats too.
    """
    given = {k.lower(): v for k, v in options.items()}
    if _OF_CATALOG not in given:
        return None
    found = {k.removeprefix(_PREFIX): v for k, v in given.items() if k.startswith(_PREFIX)}
    if "path" in given:  # Spark takes it out of OPTIONS, as the table's location
        found.setdefault("path", given["path"])
    hidden = redacted(found)
    secret = next((k for k in found if hidden[k] != found[k]), None)
    if secret is not None:
        raise UsageError(
            "TABLE_SECRET",
            f"The option {secret!r} of the table holds a secret, which the catalog would show.",
            next_step=f"refer to it: '{secret}' 'env:NAME' or 'file:PATH'",
        )
    return found


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The table's columns, with its options where `of_table` finds them."""
    first, *rest = schema.fields
    metadata = {**first.metadata, _METADATA: json.dumps(dict(options))}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *rest])


def is_sink(options: Mapping[str, str]) -> bool:
    """A table that names a guarantee is written to; any other is read."""
    return "guarantee" in options


def for_read(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a read: the statement's own, before the table's.

    Raises:
        Refused: the table is a sink's.
        UsageError: a table whose options Spark did not pass.
    """
    table = _of_table(schema)
    if is_sink(table):
        raise Refused(
            "TABLE_WRITE_ONLY",
            "The table names a guarantee in its OPTIONS: it is a sink, for INSERT INTO.",
            next_step="create a second table over the source to read from, without the option guarantee",
        )
    if not table and not options:
        raise _not_passed(system, "SELECT ... FROM t WITH (...)")
    return {**table, **options}


def for_write(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a write: those of the table, if the statement names a table.

    A frame that was read from a table carries that table's options in its schema. They count only for a statement
    that brings none of its own, as INSERT INTO does.

    Raises:
        UsageError: a table whose options Spark did not pass.
    """
    if any(k.lower() not in _PER_STATEMENT for k in options):
        return dict(options)
    table = _of_table(schema)
    if not is_sink(table):  # none, or that of the table which the rows were read from
        raise _not_passed(system, "INSERT INTO t WITH (...)", "with the option guarantee, ")
    return {**table, **options}


def _not_passed(system: str, statement: str, as_sink: str = "") -> UsageError:
    return UsageError(
        "TABLE_OPTIONS",
        f"delivered_{system} got no options of a {'sink' if as_sink else 'source'}. Spark passes those of a table only "
        "if it was created without a list of columns, and never in CREATE TABLE ... AS SELECT.",
        next_step=f"create the table {as_sink}without columns: CREATE TABLE t USING delivered_{system} OPTIONS (...); "
        f"or give all options to the statement: {statement}",
    )


def _of_table(schema: StructType) -> dict[str, str]:
    kept = schema.fields[0].metadata.get(_METADATA) if schema.fields else None
    found: dict[str, str] = json.loads(kept) if kept is not None else {}
    return found
