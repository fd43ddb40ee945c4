"""Numbers for the rows of an outbox, in a table of its own: a sequence given *after* a row's commit.

An id or a sequence of the application is given before the commit: a transaction that commits late leaves a row behind a
reader that has passed its id. Here a row gets its number when the source has seen it, whenever that is; numbers have no
gaps, and a range of them is the same rows whenever it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.connectors.outbox import OutboxOptions
from delivered.model.errors import BadRecord, InvariantBroken, UsageError
from delivered.patterns.caller import Caller, quoted
from delivered.source import id_bytes

DELETED_MAX = 1_000
"""Rows that one transaction deletes."""
NUMBERED_MAX = 100_000
"""Rows that one transaction numbers."""
_FETCHED = 2_000
_UUID = re.compile(
    r"(?:0x)?[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?([0-9a-fA-F])[0-9a-fA-F]{3}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}"
)
_DELETED = -1
"""`lsn` of the last row that was delivered and deleted; of other rows that are read by number, it is 0."""

NumberedRow = tuple[int, Any, Any, Any, Any, Any]
"""Number, id, aggregate type, aggregate id, type, payload; as the client returns them."""

_TYPE = {
    "postgres": "SELECT format_type(atttypid, atttypmod), attnotnull FROM pg_attribute WHERE attrelid = to_regclass(?) "
    "AND attname = ? AND NOT attisdropped",
    "mysql": "SELECT CONCAT(column_type, IFNULL(CONCAT(' CHARACTER SET ', character_set_name, ' COLLATE ', "
    "collation_name), '')), is_nullable = 'NO' FROM information_schema.columns WHERE table_schema = "
    "COALESCE(NULLIF(?, ''), DATABASE()) AND table_name = ? AND column_name = ?",
    "sqlite": 'SELECT type, "notnull" FROM pragma_table_info(?) WHERE name = ?',
}
_UNIQUE = {
    "postgres": "SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
    "WHERE i.indrelid = to_regclass(?) AND a.attname = ? AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL "
    "AND i.indisvalid",
    "mysql": "SELECT 1 FROM information_schema.statistics WHERE table_schema = COALESCE(NULLIF(?, ''), DATABASE()) "
    "AND table_name = ? GROUP BY index_name HAVING MAX(non_unique) = 0 AND COUNT(*) = 1 AND MAX(column_name) = ?",
    "sqlite": 'SELECT 1 FROM pragma_index_list(?1) l, pragma_index_info(l.name) i WHERE l."unique" AND NOT l.partial '
    "GROUP BY l.name HAVING count(*) = 1 AND max(i.name) = ?2 UNION ALL "
    "SELECT 1 FROM pragma_table_info(?1) WHERE pk GROUP BY NULL HAVING count(*) = 1 AND max(name) = ?2",
}
_AS_BYTES = {
    "postgres": "WITH RECURSIVE t(name, type) AS (SELECT attname, atttypid FROM pg_attribute WHERE attrelid = "
    "to_regclass(?) AND attname = ? UNION SELECT t.name, p.typbasetype FROM t JOIN pg_type p ON p.oid = t.type) "
    "SELECT 1 FROM t WHERE type = 'bytea'::regtype",
    "mysql": "SELECT character_set_name IS NOT NULL FROM information_schema.columns "
    "WHERE table_schema = COALESCE(NULLIF(?, ''), DATABASE()) "
    "AND table_name = ? AND column_name = ? AND data_type NOT IN ('date', 'time', 'datetime', 'timestamp', 'year', "
    "'decimal', 'float', 'double')",
}
"""Columns whose values the client returns unchanged; the database converts others to text. MySQL: whether it is
text, which the client would decode: MariaDB stores surrogates."""
_MYSQL_TEXT = "CAST(CONVERT({0} USING utf8mb4) AS BINARY)"
_SAMPLED = 100


@dataclass(frozen=True)
class Positions:
    """All methods work in the transaction of the caller that they are given."""

    options: OutboxOptions

    @property
    def _rows(self) -> str:
        return quoted(self.options.dialect, self.options.outbox)

    @property
    def _table(self) -> str:
        return quoted(self.options.dialect, self.options.positions)

    @property
    def _columns(self) -> tuple[str, ...]:
        return tuple(quoted(self.options.dialect, name) for name in self.options.columns)

    def check(self, caller: Caller) -> None:
        """Raises UsageError: there is no such table or column, or ids are not unique."""
        options = self.options
        rowid = options.dialect == "sqlite" and options.order == "rowid"
        for name in (*options.columns, *([options.order] if options.order is not None and not rowid else [])):
            if not self._described(caller, _TYPE, name):
                where = f"{options.system} has no column {name} in a table {options.outbox}"
                raise UsageError("OUTBOX_TABLE.LAYOUT", where=where, dialect=options.dialect)
        name = options.columns[0]
        if not self._described(caller, _UNIQUE, name):
            raise UsageError(
                "OUTBOX_ID_NOT_UNIQUE",
                name=name,
                outbox=options.outbox,
                index=quoted(options.dialect, f"{name}_is_unique"),
                rows=self._rows,
                quoted_name=quoted(options.dialect, name),
            )

    def unordered(self, caller: Caller) -> str | None:
        """Kind of ids whose order is not that of the rows; None: they are ordered, as far as can be seen, or another
        column orders the rows.
        """
        if self.options.order is not None:
            return None
        rows = caller.execute(f"SELECT {self._columns[0]} FROM {self._rows} LIMIT {_SAMPLED}").rows
        ids = [text(row[0]) for row in rows if not isinstance(row[0], int)]
        versions = {match[1] for id_ in ids if (match := _UUID.fullmatch(id_))}
        if unordered := versions - {"6", "7"}:
            return f"UUIDs of version {', '.join(sorted(unordered))}"
        lengths = {len(id_) for id_ in ids if id_.isdecimal()}
        return "numbers as text" if len(lengths) > 1 else None

    def exists(self, caller: Caller) -> bool:
        schema, _, table = self.options.positions.rpartition(".")
        match caller.dialect:
            case "postgres":
                rows = caller.execute("SELECT 1 WHERE to_regclass(?) IS NOT NULL", [self._table])
            case "mysql":
                rows = caller.execute(
                    "SELECT 1 FROM information_schema.tables WHERE table_schema = COALESCE(NULLIF(?, ''), DATABASE()) "
                    "AND table_name = ?",
                    [schema, table],
                )
            case _:
                rows = caller.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table])
        return bool(rows.rows)

    def prepare(self, caller: Caller) -> None:
        """Create the table if it is missing."""
        if self.exists(caller):
            return
        kind = self._described(caller, _TYPE, self.options.columns[0])[0][0]
        kind = kind.decode() if isinstance(kind, bytes) else kind
        caller.execute(
            f"CREATE TABLE IF NOT EXISTS {self._table} (lsn BIGINT NOT NULL, number BIGINT NOT NULL, "
            f"id {kind} NOT NULL, PRIMARY KEY (lsn, number), UNIQUE (id))"
            + (" ENGINE=InnoDB" if caller.dialect == "mysql" else "")
        )

    def restart(self, caller: Caller) -> None:
        """Forget all numbers, and number the rows that this transaction sees."""
        caller.execute(f"DELETE FROM {self._table}")
        self.number(caller, None)

    def number(self, caller: Caller, limit: int | None) -> int:
        """Number rows that have no number yet, by `orderColumn` and id; returns how many. Only one process at once may.

        Raises:
            InvariantBroken: a new row has the id of the last one that was deleted, by which the table is recognised.
        """
        self._check_ids(caller)
        id_, last = self._columns[0], self.last(caller)[0]
        place = id_ if self.options.order is None else quoted(self.options.dialect, self.options.order)
        fresh = (
            f"SELECT o.{id_} AS id, o.{place} AS place FROM {self._rows} o LEFT JOIN {self._table} p ON p.id = o.{id_} "
            f"WHERE p.id IS NULL ORDER BY o.{place}, o.{id_}" + ("" if limit is None else f" LIMIT {int(limit)}")
        )
        try:
            return caller.execute(
                f"INSERT INTO {self._table} (lsn, number, id) "
                f"SELECT 0, {last} + ROW_NUMBER() OVER (ORDER BY place, id), id FROM ({fresh}) AS fresh"
            ).count
        except Exception as error:
            if not any(word in str(error).lower() for word in ("null", "unique", "duplicate")):
                raise
            raise BadRecord(
                "OUTBOX_ID.TABLE", outbox=self.options.outbox, error=error, id=id_, rows=self._rows
            ) from error

    def last(self, caller: Caller) -> tuple[int, str | None]:
        """The highest number, and the id that has it."""
        rows = caller.execute(f"SELECT number, id FROM {self._table} WHERE lsn <= 0 ORDER BY number DESC LIMIT 1").rows
        return (int(rows[0][0]), text(rows[0][1])) if rows else (0, None)

    def id_of(self, caller: Caller, number: int) -> str | None:
        rows = caller.execute(f"SELECT id FROM {self._table} WHERE lsn <= 0 AND number = ?", [number]).rows
        return text(rows[0][0]) if rows else None

    def first(self, caller: Caller) -> int:
        """The lowest number of a row that is there; one above the highest: there is none."""
        rows = caller.execute(
            f"SELECT min(p.number) FROM {self._table} p JOIN {self._rows} o ON o.{self._columns[0]} = p.id "
            "WHERE p.lsn = 0"
        ).rows
        return self.last(caller)[0] + 1 if rows[0][0] is None else int(rows[0][0])

    def missing(self, caller: Caller, lsn: int, number: int) -> int:
        """How many rows behind a position are not in the table any more.

        Args:
            lsn: from here on, of rows that were delivered from the log; number: behind it, of the others.
        """
        if not self.exists(caller):
            return 0
        deleted = max(0, self.first(caller) - 1 - number)
        rows = caller.execute(
            f"SELECT count(*) FROM {self._table} p LEFT JOIN {self._rows} o ON o.{self._columns[0]} = p.id "
            f"WHERE o.{self._columns[0]} IS NULL AND (p.lsn > 0 AND p.lsn >= ? OR p.lsn = 0 AND p.number > ?)",
            [lsn, number + deleted],
        ).rows
        return deleted + int(rows[0][0])

    def forget(self, caller: Caller) -> None:
        """Drop the numbers of rows that were not delivered from the log."""
        caller.execute(f"DELETE FROM {self._table} WHERE lsn <= 0")

    def unnumbered(self, caller: Caller) -> int:
        id_ = self._columns[0]
        rows = caller.execute(
            f"SELECT count(*) FROM {self._rows} o LEFT JOIN {self._table} p ON p.id = o.{id_} WHERE p.id IS NULL"
        ).rows
        return int(rows[0][0])

    def rows(self, caller: Caller, start: int, end: int) -> Iterator[Sequence[NumberedRow]]:
        """Rows with the numbers in (start, end], in order, some at a time.

        Raises:
            InvariantBroken: one of them is missing.
        """
        columns = self._read(caller)
        while start < end:
            rows = caller.execute(
                f"SELECT p.number, {columns} FROM {self._table} p LEFT JOIN {self._rows} o "
                f"ON o.{self._columns[0]} = p.id WHERE p.lsn = 0 AND p.number > ? AND p.number <= ? "
                f"ORDER BY p.number LIMIT {_FETCHED}",
                [start, end],
            ).rows
            for at, row in enumerate(rows, start + 1):
                if row[0] != at or row[1] is None:
                    raise self._missing(at, end)
            if not rows:
                raise self._missing(start + 1, end)
            start += len(rows)
            yield rows

    def history(self, caller: Caller, start: int, end: int) -> Iterator[Sequence[NumberedRow]]:
        """As `rows`, of those delivered from the log whose commit records begin in [start, end)."""
        columns, number = self._read(caller), -1
        while True:
            rows = caller.execute(
                f"SELECT p.lsn, {columns}, p.number FROM {self._table} p LEFT JOIN {self._rows} o "
                f"ON o.{self._columns[0]} = p.id WHERE p.lsn > 0 AND (p.lsn > ? OR (p.lsn = ? AND p.number > ?)) "
                f"AND p.lsn < ? ORDER BY p.lsn, p.number LIMIT {_FETCHED}",
                [start, start, number, end],
            ).rows
            if not rows:
                return
            if any(row[1] is None for row in rows):
                raise self._missing(start, end)
            start, number = int(rows[-1][0]), int(rows[-1][6])
            yield [row[:6] for row in rows]

    def _read(self, caller: Caller) -> str:
        """The columns as an expression: clients change dates, times and numbers, and write them differently."""
        columns = [f"o.{c}" for c in self._columns]
        if caller.dialect in _AS_BYTES:
            described = [self._described(caller, _AS_BYTES, name) for name in self.options.columns]
            columns = [self._form(caller.dialect, rows).format(c) for c, rows in zip(columns, described, strict=True)]
        return ", ".join(columns)

    @staticmethod
    def _form(dialect: str, described: Sequence[tuple[Any, ...]]) -> str:
        """Args: described: rows of `_AS_BYTES`."""
        if not described:
            form = {"postgres": "CASE WHEN {0} IS NOT NULL THEN concat({0}) END", "mysql": "CAST({0} AS CHAR)"}
            return form[dialect]
        return _MYSQL_TEXT if dialect == "mysql" and described[0][0] else "{0}"

    def record(self, caller: Caller, rows: Sequence[tuple[int, int, Any]]) -> None:
        """Record what was delivered from the log: start of its commit record, number within the transaction, id."""
        marks = ", ".join(["(?, ?, ?)"] * len(rows))
        caller.execute(
            f"INSERT INTO {self._table} (lsn, number, id) VALUES {marks} ON CONFLICT DO NOTHING",
            [value for row in rows for value in row],
        )

    def delete(self, caller: Caller, ids: Sequence[Any]) -> None:
        """Delete rows of the outbox."""
        if caller.dialect == "mysql":
            # Of a small table InnoDB reads every row for a list of ids, and waits for those of open transactions.
            for id_ in ids:
                caller.execute(f"DELETE FROM {self._rows} WHERE {self._columns[0]} = ?", [id_])
        elif ids:
            marks = ", ".join("?" * len(ids))
            caller.execute(f"DELETE FROM {self._rows} WHERE {self._columns[0]} IN ({marks})", ids)

    def delete_until(self, caller: Caller, number: int) -> bool:
        """Delete the first rows up to this number from the outbox, and their numbers, but the last one, by which the
        table is known again.

        Returns: whether there may be more.
        """
        rows = caller.execute(
            f"SELECT number, id FROM {self._table} WHERE lsn = 0 AND number <= ? ORDER BY number LIMIT {DELETED_MAX}",
            [number],
        ).rows
        if caller.dialect == "mysql":
            self.delete(caller, [row[1] for row in rows])
        elif rows:  # not by their values: the client may read a type that it cannot write
            caller.execute(
                f"DELETE FROM {self._rows} WHERE {self._columns[0]} IN "
                f"(SELECT id FROM {self._table} WHERE lsn = 0 AND number <= ?)",
                [rows[-1][0]],
            )
        if rows:
            caller.execute(f"DELETE FROM {self._table} WHERE lsn <= 0 AND number < ?", [rows[-1][0]])
            caller.execute(f"UPDATE {self._table} SET lsn = {_DELETED} WHERE lsn = 0 AND number = ?", [rows[-1][0]])
        return len(rows) == DELETED_MAX

    def _check_ids(self, caller: Caller) -> None:
        id_ = self._columns[0]
        rows = caller.execute(
            f"SELECT o.{id_} FROM {self._table} p JOIN {self._rows} o ON o.{id_} = p.id WHERE p.lsn = {_DELETED}"
        ).rows
        if rows:
            table = self.options.outbox
            raise InvariantBroken("OUTBOX_ID_REUSED.ROW", table=table, id=text(rows[0][0]))

    def _described(self, caller: Caller, queries: dict[str, str], column: str) -> Sequence[tuple[Any, ...]]:
        schema, _, table = self.options.outbox.rpartition(".")
        named = {"postgres": [self._rows], "mysql": [schema, table], "sqlite": [table]}[caller.dialect]
        return caller.execute(queries[caller.dialect], [*named, column]).rows

    def _missing(self, number: int, end: int) -> InvariantBroken:
        return InvariantBroken(
            "OUTBOX_ROWS_GONE",
            number=number,
            outbox=self.options.outbox,
            end=end,
            positions_table=self.options.positions,
        )


def text(value: Any) -> str:
    """An id, a type or a key, for messages and comparisons."""
    data = value if isinstance(value, bytes) else id_bytes(str(value))
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
