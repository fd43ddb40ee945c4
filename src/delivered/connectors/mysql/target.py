"""The user's table: its creation and checks, and what its definition does to rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa

from delivered.connectors.mysql import TYPES, MysqlOptions, client
from delivered.connectors.mysql.client import Session, alone
from delivered.kits.sql.database import Definition, Server, find_events, quoted, with_values
from delivered.kits.sql.merge import ORDER, ROUND, Merge, check_fits, no_unique_index
from delivered.kits.sql.table import (
    Column,
    check_known,
    check_typed,
    compare,
    extend,
    find_absent,
    id_in_comment,
    missing_at_server,
    new_comment,
    numbered_schema,
    record_schema,
    stored_columns,
    text_of,
)
from delivered.model.errors import UsageError

if TYPE_CHECKING:
    from delivered.kits.sql.batches import NumberedTable
    from delivered.model.identity import Work


CHARSETS = ("utf8mb4", "utf8mb3", "utf8")
"""Charsets that store UTF-8 bytes unchanged or reject them. With ascii the server does not check bytes."""


@dataclass(frozen=True)
class MysqlMerge(Merge):
    """Upserts in MySQL: an UPDATE of existing rows, then an INSERT of new ones.

    Not INSERT ... ON DUPLICATE KEY UPDATE: it matches rows by *any* unique index, so a row with a new key but an
    existing e-mail address would silently overwrite another key's row; it has no WHERE, which a version needs; and it
    fires insert triggers for updated rows.

    Target rows are read only through the key's index, and only for staged keys: a scan would wait for locks of other
    shards' prepared transactions.

    Attributes:
        index: the unique index on exactly the keys.
    """

    index: str = "PRIMARY"

    def reduce(self, staged: str) -> str:
        order = quoted(ORDER)
        by = f"{order} DESC"
        if self.mode.version is not None:
            by = f"{quoted(self.mode.version)} DESC, {order}"
        ranked = (
            f"SELECT {order} AS o, row_number() OVER (PARTITION BY {self._keys()} ORDER BY {by}) AS n FROM {staged}"
        )
        return f"DELETE s FROM {staged} AS s JOIN ({ranked}) AS r ON r.o = s.{order} WHERE r.n > 1"

    def number(self, staged: str) -> str:
        later = self._later(staged)
        return f"UPDATE {staged} AS s JOIN ({later}) AS r ON r.o = s.{quoted(ORDER)} SET s.{quoted(ROUND)} = r.n"

    def update(self, staged: str, only: str) -> str:
        changes = ", ".join(f"t.{quoted(c)} = s.{quoted(c)}" for c in self.columns if c not in self.mode.keys)
        return f"UPDATE {self._found(staged)} SET {changes} WHERE {only}"

    def before_upsert(self, staged: str, only: str = "TRUE") -> str | None:
        others = [quoted(c) for c in self.columns if c not in self.mode.keys]
        if not others:
            return None
        changes = ", ".join(f"t.{c} = s.{c}" for c in others)
        where = " AND ".join(x for x in (only, self._stays(), self._if_newer("", "s").strip()) if x)
        return f"UPDATE {self._found(staged)} SET {changes} WHERE {where}"

    def upsert(self, staged: str, only: str = "TRUE") -> str:
        columns = ", ".join(map(quoted, self.columns))
        rows = ", ".join(f"s.{quoted(c)}" for c in self.columns)
        absent = f"t.{quoted(self.mode.keys[0])} IS NULL"
        where = " AND ".join(x for x in (only, absent, self._stays()) if x)
        return (
            f"INSERT INTO {self.target} ({columns}) SELECT {rows} FROM {staged} AS s "
            f"LEFT JOIN {self._target} ON {self._same} WHERE {where}"
        )

    def delete(self, staged: str) -> str:
        deleted = f"s.{quoted(str(self.mode.delete))} IS TRUE"
        return f"DELETE t FROM {self._found(staged)} WHERE {deleted}{self._if_newer('AND', 's')}"

    def exact(self, key: str) -> str:
        return f"CAST({key} AS BINARY)"

    def _found(self, staged: str) -> str:
        return f"{staged} AS s STRAIGHT_JOIN {self._target} ON {self._same}"

    def _stays(self) -> str:
        return "" if self.mode.delete is None else f"s.{quoted(self.mode.delete)} IS NOT TRUE"

    @property
    def _target(self) -> str:
        return f"{self.target} AS t FORCE INDEX ({quoted(self.index)})"


ENGINE = "InnoDB"
"""The only supported storage engine."""
_CHANGE = "MODIFY {name}"


@dataclass(frozen=True)
class ServerTable:
    """A table in the server's catalog.

    Attributes:
        kind: "BASE TABLE", "VIEW", ...
    """

    base: str
    name: str
    kind: str
    engine: str

    @property
    def full(self) -> str:
        """Qualified name, quoted for SQL."""
        return f"{quoted(self.base)}.{quoted(self.name)}"


@dataclass(frozen=True)
class ServerColumn(Column):
    """
    Attributes:
        declared: the type in CREATE TABLE, with charset and collation.
        collation: of a text.
    """

    declared: str = ""
    collation: str | None = None


@dataclass(frozen=True)
class Target:
    """A table that matches the rows' schema.

    Attributes:
        name: qualified, quoted for SQL.
        columns: names of the rows' columns, quoted, comma-separated.
        shown: column of the table -> its type in CREATE TABLE.
        merge: statements of an upsert, if the mode is not append.
        filled: columns in which the server replaces null.
    """

    name: str
    columns: str
    shown: dict[str, str]
    merge: MysqlMerge
    filled: tuple[str, ...]


def find(session: Session, options: MysqlOptions) -> ServerTable | None:
    """The table; None if it does not exist. Raises MySQLError."""
    row = session.execute(
        "SELECT table_schema, table_name, table_type, engine FROM information_schema.tables "
        "WHERE table_schema = coalesce(%s, database()) AND table_name = %s",
        [options.schema, options.table],
    ).fetchone()
    return None if row is None else ServerTable(row[0], row[1], row[2], row[3] or "")


def identity(session: Session, options: MysqlOptions) -> str | None:
    """The id that the table was created with; None: another client created it. Raises MySQLError.

    Includes the table's name: CREATE TABLE ... LIKE copies the id to an empty table. The server's table id and creation
    time do not help: they change with an ALTER TABLE that rewrites the rows.
    """
    row = session.execute(
        "SELECT table_comment, table_schema, table_name FROM information_schema.tables "
        "WHERE table_schema = coalesce(%s, database()) AND table_name = %s",
        [options.schema, options.table],
    ).fetchone()
    mark = None if row is None else id_in_comment(row[0])
    return None if mark is None else f"{mark}@{quote(f'{row[1]}.{row[2]}')}"


def ready(session: Session, options: MysqlOptions, schema: pa.Schema) -> Target:
    """Check the table against `schema`; create it if allowed. Outside a transaction.

    The Arrow schema is stored next to the ledger: the columns that a pipeline writes, and their exact types.

    Args:
        schema: plain types.

    Raises:
        UsageError: the table is missing or has another engine, a column is missing or of another type, or the rows'
            schema has changed.
        MySQLError: the server rejected it.
    """
    schema = numbered_schema(options, schema)
    kept = stored_columns(options.write, schema)
    table = find(session, options)
    if table is None:
        check_hidden(session, options)
        if not options.create:
            raise missing_at_server(options)
        check_typed(options, schema)
        with alone(session):
            created = find(session, options) is None
            body = f"({_body(options, kept)}) {_end(session)} COMMENT = '{new_comment()}'"
            session.execute(f"CREATE TABLE IF NOT EXISTS {text_of(options)} {body}")
            table = find(session, options)
            if table is not None and created:  # a schema stored for an earlier table of this name is obsolete
                session.execute(
                    f"DELETE FROM {with_values(options.ledger_schema)}.target WHERE base = %s AND name = %s",
                    [table.base, table.name],
                )
        if table is None:
            raise missing_at_server(options)
    check_engine(options, table)
    columns = table_columns(session, table)
    compare(options, TYPES, kept, columns, _CHANGE)
    index = "PRIMARY"
    if options.write.upserts:
        index = unique_index(session, table, options.write.keys) or ""
        if not index:
            raise no_unique_index(options.write, options.table_text, options.where)
    _remember(session, options, table, record_schema(options, kept))
    return Target(
        table.full,
        ", ".join(quoted(n) for n in schema.names),
        {n: columns[n].declared for n in kept.names},
        MysqlMerge(options.write, table.full, tuple(kept.names), index),
        tuple(n for n in kept.names if columns[n].fills_null),
    )


def table_check(session: Session, options: MysqlOptions) -> Callable[[pa.Schema], None] | None:
    """See `delivered.contract.sink.Sink.target_check`. Raises MySQLError."""
    table = find(session, options)
    if table is None:
        return None
    schema = stored_schema(session, options, table)
    known = None if schema is None else (schema, _recovery_action(options, table))
    return partial(check_fits, options, TYPES, table_columns(session, table), _CHANGE, known)


def add_columns(session: Session, options: MysqlOptions, schema: pa.Schema) -> None:
    """Add the columns that the table lacks, then remember them: ALTER TABLE commits. Outside a transaction.

    See `delivered.contract.sink.Sink.add_columns`. Raises MySQLError, too.

    Args:
        schema: plain types.
    """
    kept = numbered_schema(options, stored_columns(options.write, schema))
    with alone(session):
        table = find(session, options)
        if table is None:
            return
        missing = find_absent(options, kept, table_columns(session, table))
        if missing:
            added = ", ".join(f"ADD COLUMN {quoted(f.name)} {_declared(f)} NULL" for f in missing)
            client.alter(session, options, f"ALTER TABLE {table.full} {added}")
        known = stored_schema(session, options, table)
        if known is not None:
            records = TYPES.canonical_schema(record_schema(options, kept))
            now = extend(options, known, records, _recovery_action(options, table))
            session.execute(
                f"UPDATE {with_values(options.ledger_schema)}.target SET arrow_schema = %s "
                "WHERE base = %s AND name = %s",
                [now.serialize().to_pybytes(), table.base, table.name],
            )


def _declared(field: pa.Field) -> str:
    """Type of an added column, independent of the table's default charset."""
    charset = " CHARACTER SET utf8mb4" if pa.types.is_string(field.type) else ""
    return f"{TYPES.declared(field.type)}{charset}"


def _recovery_action(options: MysqlOptions, table: ServerTable) -> str:
    return (
        "restore the rows' columns and types, or write to another table; or, if the existing rows need no audit, "
        f"DELETE FROM {options.ledger_schema}.target WHERE base = '{table.base}' AND name = '{table.name}'"
    )


def check_hidden(session: Session, options: MysqlOptions) -> None:
    """Check that a table `find` did not find is not just hidden from a user without privileges on it.

    Raises:
        MySQLError: the user lacks privileges.
    """
    try:
        session.execute(f"SELECT 1 FROM {text_of(options)} LIMIT 0")
    except Exception as error:
        if client.error_number(error) not in (client.NO_TABLE, client.NO_DATABASE):
            raise


def check_engine(options: MysqlOptions, table: ServerTable) -> None:
    """Raises UsageError: a view, or an engine without transactions."""
    if table.kind != "BASE TABLE":
        raise UsageError("NOT_A_TABLE.MYSQL", table=options.table_text, where=options.where, kind=table.kind.lower())
    if table.engine.lower() != ENGINE.lower():
        raise UsageError(
            "ENGINE_NOT_TRANSACTIONAL.TABLE", table=options.table_text, where=options.where, engine=table.engine
        )


def unique_index(session: Session, table: ServerTable, keys: Sequence[str]) -> str | None:
    """Name of a unique index on exactly these full columns; None: there is none. Raises MySQLError."""
    rows = session.execute(
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
        "WHERE table_schema = %s AND table_name = %s AND non_unique = 0 ORDER BY index_name <> 'PRIMARY', index_name",
        [table.base, table.name],
    ).fetchall()
    indexes: dict[str, set[str]] = {}
    for index, column, sub_part in rows:
        indexes.setdefault(index, set()).add("" if column is None or sub_part is not None else column.lower())
    wanted = {k.lower() for k in keys}
    return next((index for index, columns in indexes.items() if columns == wanted), None)


def starts_index(session: Session, table: ServerTable, column: str) -> bool:
    """Whether an index starts with this column. Raises MySQLError."""
    row = session.execute(
        "SELECT 1 FROM information_schema.statistics "
        "WHERE table_schema = %s AND table_name = %s AND column_name = %s AND seq_in_index = 1 LIMIT 1",
        [table.base, table.name, column],
    ).fetchone()
    return row is not None


def batch_number(session: Session, server: Server[Session], options: MysqlOptions, work: Work) -> int:
    """What the rows of a batch have in the column of the batch; 0 if the options name none. Raises MySQLError."""
    table = numbered_table(session, server, options) if options.batch_column is not None else None
    return 0 if table is None else table.number(session, work)


def numbered_table(
    session: Session, server: Server[Session], options: MysqlOptions, column: str | None = None
) -> NumberedTable[Session] | None:
    """None: the table does not exist, or nobody names a column. Raises MySQLError.

    Args:
        column: of the batch; None: that of the options.
    """
    from delivered.kits.sql.batches import NumberedTable

    table, column = find(session, options), column or options.batch_column
    if table is None or column is None:
        return None
    name = f"{table.base}.{table.name}"
    known = identity(session, options)
    return NumberedTable(server, table.full, name, options.table_text, known, column, _row_hashes, alone)


def _row_hashes(columns: Sequence[str]) -> str:
    """SQL of the sum of all rows' hashes, modulo 2^64."""
    row = f"concat_ws(',', {', '.join(f'quote({quoted(n)})' for n in columns)})"
    return f"CAST(mod(sum(CAST(conv(left(sha2({row}, 256), 16), 16, 10) AS UNSIGNED)), 18446744073709551616) AS CHAR)"


def table_columns(session: Session, table: ServerTable) -> dict[str, ServerColumn]:
    """Columns of a table by name. Raises MySQLError."""
    rows = session.execute(
        "SELECT column_name, data_type, column_type, character_set_name, collation_name, numeric_precision, "
        "numeric_scale, datetime_precision, is_nullable = 'NO', column_default IS NULL, extra, "
        "character_maximum_length "
        "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
        [table.base, table.name],
    ).fetchall()
    columns = {}
    for name, kind, shown, charset, collation, precision, scale, digits, not_null, no_default, extra, width in rows:
        decimal = kind == "decimal"
        text = f"{shown} CHARACTER SET {charset} COLLATE {collation}" if charset else shown
        columns[name] = ServerColumn(
            kind=_kind(kind, shown, charset, scale, digits),
            shown=text,
            precision=int(precision) if decimal else None,
            scale=int(scale) if decimal else None,
            required=bool(not_null and no_default) and "auto_increment" not in extra.lower(),
            computed=re.search(r"(VIRTUAL|STORED|PERSISTENT) GENERATED", extra, re.IGNORECASE) is not None,
            width=int(width) if kind == "varchar" else None,
            # Without explicit_defaults_for_timestamp, null becomes the current time.
            fills_null=bool(not_null) and ("auto_increment" in extra.lower() or kind == "timestamp"),
            declared=text,
            collation=collation,
        )
    return columns


def _kind(kind: str, shown: str, charset: str | None, scale: Any, digits: Any) -> str:
    """The type's name as in `fitting`, if it stores values without loss."""
    if kind in ("float", "double") and scale is not None:
        return shown  # rounds
    if kind in ("datetime", "timestamp", "time") and digits != 6:
        return f"{kind}({digits})"
    if charset is not None and charset not in CHARSETS:
        return f"{kind} in {charset}"
    return f"{kind} unsigned" if "unsigned" in shown else kind


def _body(options: MysqlOptions, schema: pa.Schema) -> str:
    keys = options.write.keys
    columns = [
        f"{quoted(f.name)} "
        + (f"{TYPES.declared_key(f.type, len(keys))} NOT NULL" if f.name in keys else f"{TYPES.declared(f.type)} NULL")
        for f in schema
    ]
    if keys:
        columns.append(f"PRIMARY KEY ({', '.join(map(quoted, keys))})")
    if options.batch_column is not None:
        columns.append(f"KEY ({quoted(options.batch_column)})")
    return ", ".join(columns)


def _end(session: Session) -> str:
    """Table options with a binary collation in which trailing spaces count: only identical keys are equal."""
    collation = "utf8mb4_nopad_bin" if session.mariadb else "utf8mb4_0900_bin"
    return f"ENGINE = {ENGINE} CHARACTER SET utf8mb4 COLLATE {collation}"


def exact(collation: str | None) -> bool:
    """Whether texts of this collation are equal only if their bytes are."""
    return collation is None or collation.endswith(("nopad_bin", "0900_bin"))


def _remember(session: Session, options: MysqlOptions, table: ServerTable, schema: pa.Schema) -> None:
    known = stored_schema(session, options, table)
    canonical = TYPES.canonical_schema(schema)
    if known is None:
        session.execute(
            f"INSERT IGNORE INTO {with_values(options.ledger_schema)}.target (base, name, arrow_schema) "
            "VALUES (%s, %s, %s)",
            [table.base, table.name, canonical.serialize().to_pybytes()],
        )
        known = stored_schema(session, options, table)
    if known is not None:
        check_known(options, known, canonical, _recovery_action(options, table))


def stored_schema(session: Session, options: MysqlOptions, table: ServerTable) -> pa.Schema | None:
    """The canonical Arrow schema that the table was written with; None: never written. Raises MySQLError."""
    row = session.execute(
        f"SELECT arrow_schema FROM {with_values(options.ledger_schema)}.target WHERE base = %s AND name = %s",
        [table.base, table.name],
    ).fetchone()
    return None if row is None else pa.ipc.read_schema(pa.py_buffer(row[0]))


def read_definition(session: Session, options: MysqlOptions) -> Definition:
    """Raises MySQLError. The server shows triggers only to users with the privilege TRIGGER."""
    table = find(session, options)
    if table is None:
        return Definition(exists=False)
    runs = find_events(options.write)
    rows = session.execute(
        "SELECT trigger_name, action_timing, event_manipulation FROM information_schema.triggers "
        "WHERE event_object_schema = %s AND event_object_table = %s ORDER BY event_manipulation, action_order",
        [table.base, table.name],
    ).fetchall()
    columns = table_columns(session, table)
    lower = {name.lower(): column for name, column in columns.items()}
    keys = {k: lower[k.lower()] for k in options.write.keys if k.lower() in lower}
    return Definition(
        tuple(f"{name} ({timing} {event})" for name, timing, event in rows if event in runs),
        loose={k: f"collation {c.collation}" for k, c in keys.items() if not exact(c.collation)},
        widths=tuple(f"{n} {c.shown}" for n, c in columns.items() if c.width is not None or c.precision is not None),
        filled=tuple(
            f"{n} ({'generated' if c.computed else 'from null'})"
            for n, c in columns.items()
            if c.computed or c.fills_null
        ),
        computed=tuple(n for n, c in columns.items() if c.computed),
    )
