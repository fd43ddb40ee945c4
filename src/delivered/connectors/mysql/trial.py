"""Rows that MySQL or MariaDB itself refuses: values longer than their column, JSON texts, times, generated columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.mysql import errors, target
from delivered.connectors.mysql.migrate import migrate
from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.types import TYPES
from delivered.connectors.mysql.wire import ERRORS
from delivered.connectors.mysql.writer import Loading, packet_of
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import stored
from delivered.kits.sql.transactions import new_nonce
from delivered.kits.sql.trial import bytes_of, refused, too_long
from delivered.model.columns import fitted
from delivered.model.errors import BadRecord
from delivered.model.ranges import first_of

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session

_TIMESTAMPS_US = (1_000_000, (2**31 - 1) * 1_000_000)
"""Of the type timestamp in every version. Later ones of MariaDB end in 2106."""


def refused_rows(session: Session, options: MysqlOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.trial.TriesRows`. Outside a transaction.

    Creates the table first if the options request it. Loads suspicious rows into an empty temporary table like the
    target, with its generated columns but without its constraints, except MariaDB's on JSON columns.

    Raises:
        UsageError, MySQLError: the table cannot take rows of this schema at all.
    """
    schema = TYPES.plain_schema(batch.schema)
    batch, found = fitted(batch, schema), target.find(session, options)
    if found is None and not options.create:
        return None
    migrate(session, options.ledger_schema)
    target.ready(session, options, schema)
    found = found or target.find(session, options)
    if found is None:
        return None
    columns = _columns(session, found)
    names = stored(options.write, schema).names
    widths: dict[str, dict[str, int]] = {"characters": {}, "bytes": {}}
    for name in names:
        column = columns[name.lower()]
        if column.width is not None:
            widths["characters" if column.kind == "varchar" else "bytes"][name] = column.width
    reasons = None
    for unit, of in widths.items():
        reasons = first_of(reasons, too_long(batch, of, unit))
    valid = _valid_json(session, found)
    suspects = _suspects(batch, names, columns, bool(valid), packet_of(session))
    if reasons is not None:
        suspects = pc.and_(suspects, pc.is_null(reasons))
    if not pc.any(suspects).as_py():
        return reasons
    own = f"try_{new_nonce()}"
    table = f"{quoted(options.ledger_schema)}.{quoted(own)}"
    body = [f"{quoted(c.name)} {c.declared}" for c in columns.values()]
    body += [f"CHECK ({clause})" for clause in valid]
    session.execute(f"CREATE TEMPORARY TABLE {table} ({', '.join(body)}) ENGINE = InnoDB")
    into = ", ".join(map(quoted, names))

    def load(rows: pa.RecordBatch) -> str | None:
        try:
            loading = Loading(session, options, table, into)
            loading.add(rows)
            loading.end()
        except BadRecord as error:
            return errors.reason_of(error).replace(own, options.table_text)
        except ERRORS as error:
            if not errors.about_a_row(error):
                raise
            return errors.message_of(error).replace(own, options.table_text)
        finally:
            session.execute(f"DELETE FROM {table}")
        return None

    try:
        return first_of(reasons, refused(batch.select(names), suspects, load))
    finally:
        session.execute(f"DROP TEMPORARY TABLE {table}")


@dataclass(frozen=True)
class _Column:
    """
    Attributes:
        width: of texts and bytes, unless more than an Arrow value has.
        computed: an expression.
        declared: its declaration, without constraints.
    """

    name: str
    kind: str
    charset: str | None
    width: int | None
    computed: str | None
    declared: str


def _columns(session: Session, found: target.Found) -> dict[str, _Column]:
    """By name in lower case."""
    rows = session.execute(
        "SELECT column_name, data_type, column_type, character_set_name, collation_name, character_maximum_length, "
        "generation_expression FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
        "ORDER BY ordinal_position",
        [found.base, found.name],
    ).fetchall()
    columns = {}
    for name, kind, shown, charset, collation, width, computed in rows:
        declared = f"{shown} CHARACTER SET {charset} COLLATE {collation}" if charset else shown
        declared += f" AS ({computed}) STORED" if computed else " NULL"
        known = None if width is None or kind in ("longtext", "longblob") else int(width)
        columns[name.lower()] = _Column(name, kind, charset, known, computed, declared)
    return columns


def _valid_json(session: Session, found: target.Found) -> list[str]:
    """MariaDB's form of the type JSON is a check of its own."""
    if not session.mariadb:
        return []
    rows = session.execute(
        "SELECT check_clause FROM information_schema.check_constraints WHERE constraint_schema = %s AND "
        "table_name = %s AND check_clause LIKE 'json_valid(%%'",
        [found.base, found.name],
    ).fetchall()
    return [clause for (clause,) in rows]


def _suspects(
    batch: pa.RecordBatch, names: list[str], columns: dict[str, _Column], checked: bool, packet: int | None
) -> pa.Array:
    if checked or any(c.computed for c in columns.values()):
        return pa.repeat(True, batch.num_rows)
    suspects = pa.repeat(False, batch.num_rows)
    if packet is not None:  # escaped, values may be twice as long
        suspects = pc.greater(bytes_of(batch, names), (packet - 256 * len(names)) // 2)
    for name in names:
        column, values = columns[name.lower()], batch.column(name)
        if pa.types.is_null(values.type):
            continue
        found = None
        if column.kind == "timestamp":
            micros = values.view(pa.int64())
            found = pc.or_(pc.less(micros, _TIMESTAMPS_US[0]), pc.greater(micros, _TIMESTAMPS_US[1]))
        elif column.charset not in (None, "utf8mb4"):
            found = pc.match_substring_regex(values, r"[\x{10000}-\x{10FFFF}]")
        if found is not None:
            suspects = pc.or_(suspects, pc.fill_null(found, False))
    return suspects
