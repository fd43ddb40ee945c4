"""A scan of all rows of the table. The server writes each row as one line of CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from delivered.connectors.mysql import MysqlOptions, target
from delivered.connectors.mysql.client import ledger_version
from delivered.connectors.mysql.store import MysqlDatabase
from delivered.contract.source import Offsets, Slice
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import TableScan, never_written, steps, text_of
from delivered.kits.sql.text import read_csv
from delivered.model.errors import InvariantBroken, UsageError

if TYPE_CHECKING:
    from delivered.connectors.mysql.session import Session

SLICE_KEYS = 250_000
"""Minimum range of primary keys per slice."""
ROWS_AT_ONCE = 1_000
_ALL = {"start": None, "end": None}


@dataclass(frozen=True)
class MysqlScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Rows must not be changed, added or deleted meanwhile."""

    options: MysqlOptions

    @property
    def database(self) -> MysqlDatabase:
        return MysqlDatabase(self.options)

    def _stored_schema(self) -> pa.Schema | None:
        def question(session: Session) -> pa.Schema | None:
            found = target.find(session, self.options)
            if found is None or ledger_version(session, self.options.ledger_schema) == 0:
                return None
            return target.stored_schema(session, self.options, found)

        return self.database.ask(question)

    def _never_written(self) -> UsageError:
        return never_written(self.options.table_text, self.options.where, "url, dbtable and ledgerSchema")

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"at": n}: the first value of the primary key. A table without such a key is one slice."""
        found = self._range()
        if found is None:
            return [Slice(_ALL)]
        key, first, stop = found
        pieces = steps(int((since or {}).get("at", first)), stop, SLICE_KEYS)
        return [Slice({"key": key, "start": at, "end": until}) for at, until in pieces]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        columns = ", ',', ".join(f"coalesce({_selected(f)}, '')" for f in schema)
        statement = rf"SELECT CONVERT(concat({columns}, '\n') USING binary) FROM {text_of(self.options)}"
        if piece.data["start"] is not None:
            key = quoted(piece.data["key"])
            statement += f" WHERE {key} >= {int(piece.data['start'])} AND {key} < {int(piece.data['end'])}"
        session = self.database.connect("read", writes=False)
        try:
            with self.database.explaining():
                rows = session.stream(statement)
                yield from read_csv(lambda: _joined(rows.fetchmany(ROWS_AT_ONCE)), schema, "1", "0")
        finally:
            self.database.discard(session)

    def _range(self) -> tuple[str, int, int] | None:
        """The primary key if it is a single integer column, with its minimum, and its maximum plus one."""

        def question(session: Session) -> tuple[str, int, int] | None:
            found = target.find(session, self.options)
            if found is None:
                return None
            columns = target.table_columns(session, found)
            rows = session.execute(
                "SELECT column_name FROM information_schema.statistics "
                "WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'",
                [found.base, found.name],
            ).fetchall()
            if len(rows) != 1 or "int" not in columns[rows[0][0]].kind:
                return None
            key = rows[0][0]
            low, high = session.execute(f"SELECT min({quoted(key)}), max({quoted(key)}) FROM {found.full}").fetchone()
            return None if low is None else (key, int(low), int(high) + 1)

        return self.database.ask(question)


def _joined(rows: Sequence[tuple[bytes | None]]) -> bytes:
    try:
        return b"".join(row[0] for row in rows)  # type: ignore[misc]
    except TypeError:
        raise InvariantBroken("ROW_TOO_LONG") from None


def _as_text(name: str) -> str:
    """Where the server has no number for a date, as for 0000-00-00: parsing it says so, while null would hide it."""
    return f"CAST({name} AS CHAR)"


def _selected(f: pa.Field) -> str:
    name, t = quoted(f.name), pa.types
    if t.is_timestamp(f.type):
        # Microseconds as an integer: exact, and independent of time zones and formats.
        return f"coalesce(timestampdiff(MICROSECOND, '1970-01-01 00:00:00', {name}), {_as_text(name)})"
    if t.is_time(f.type):
        return f"((hour({name}) * 60 + minute({name})) * 60 + second({name})) * 1000000 + microsecond({name})"
    if t.is_date32(f.type):
        return f"coalesce(to_days({name}) - 719528, {_as_text(name)})"
    if t.is_binary(f.type):
        return f"concat('\"', lower(hex({name})), '\"')"
    if t.is_floating(f.type):
        return f"{name} * 1e0"  # a bare float is printed with six digits
    if t.is_string(f.type):
        return f"concat('\"', replace(CONVERT({name} USING utf8mb4), '\"', '\"\"'), '\"')"
    return name
