"""SQL tables over the delivered formats: `CREATE TABLE t USING delivered_kafka OPTIONS (...)`.

Spark passes the options of `CREATE TABLE` to a Python source only once, when it asks for the columns, and never to
later statements on the table (measured with PySpark 4.3). But it keeps the schema. So the options are stored in the
metadata of the first column, which every SELECT, INSERT INTO and readStream.table gets. Every statement resolves the
table again, and reads its current content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

from delivered.model.errors import Refused, UsageError
from delivered.model.secrets import redacted

_METADATA = "delivered.table"
_OF_CATALOG = "provider"
_PREFIX = "option."
_PER_STATEMENT = frozenset({"runid", "pipeline"})
"""Options that a statement may add: INSERT INTO t WITH ('runId' = '...')."""


def created(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of the calling `CREATE TABLE`; None: another statement calls.

    Raises:
        UsageError: one holds a secret: the schema goes wherever the rows go, even into files of other formats.
    """
    lowered = {k.lower(): v for k, v in options.items()}
    if _OF_CATALOG not in lowered:
        return None
    found = {k.removeprefix(_PREFIX): v for k, v in lowered.items() if k.startswith(_PREFIX)}
    if "path" in lowered:  # Spark removes it from OPTIONS, as the table's location
        found.setdefault("path", lowered["path"])
    hidden = redacted(found)
    secret = next((k for k in found if hidden[k] != found[k]), None)
    if secret is not None:
        raise UsageError(
            "TABLE_SECRET",
            f"The table option {secret!r} holds a secret, which the catalog would expose.",
            next_step=f"use a reference: '{secret}' 'env:NAME' or 'file:PATH'",
        )
    return found


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The table's columns, with its options stored for `of_table`."""
    first, *rest = schema.fields
    metadata = {**first.metadata, _METADATA: json.dumps(dict(options))}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *rest])


def is_sink(options: Mapping[str, str]) -> bool:
    """A table with a guarantee is a sink; any other is a source."""
    return "guarantee" in options


def for_read(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a read: the statement's own override the table's.

    Raises:
        Refused: the table is a sink.
        UsageError: a table whose options Spark did not pass.
    """
    table = _of_table(schema)
    if is_sink(table):
        raise Refused(
            "TABLE_WRITE_ONLY",
            "The table has a guarantee in its OPTIONS, so it is a sink for INSERT INTO and cannot be read.",
            next_step="create a second table for reading, without the option guarantee",
        )
    if not table and not options:
        raise _not_passed(system, "SELECT ... FROM t WITH (...)")
    return {**table, **options}


def for_write(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a write: the table's, if the statement writes to a table.

    A frame that was read from a table has that table's options in its schema. They count only for a statement without
    options of its own, such as INSERT INTO.

    Raises:
        UsageError: a table whose options Spark did not pass.
    """
    if any(k.lower() not in _PER_STATEMENT for k in options):
        return dict(options)
    table = _of_table(schema)
    if not is_sink(table):  # none, or those of the table that the rows were read from
        raise _not_passed(system, "INSERT INTO t WITH (...)", "with the option guarantee, ")
    return {**table, **options}


def _not_passed(system: str, statement: str, as_sink: str = "") -> UsageError:
    return UsageError(
        "TABLE_OPTIONS",
        f"delivered_{system} got no {'sink' if as_sink else 'source'} options. Spark passes table options only if the "
        "table was created without a column list, and never in CREATE TABLE ... AS SELECT.",
        next_step=f"create the table {as_sink}without columns: CREATE TABLE t USING delivered_{system} OPTIONS (...); "
        f"or pass all options in the statement: {statement}",
    )


def _of_table(schema: StructType) -> dict[str, str]:
    kept = schema.fields[0].metadata.get(_METADATA) if schema.fields else None
    found: dict[str, str] = json.loads(kept) if kept is not None else {}
    return found
