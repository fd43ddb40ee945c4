"""Paths out of databases: rows written by their own clients, read as a change stream or as an outbox."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as Folder
from typing import Any

import pyarrow as pa
import pytest
from docs.value_types import NO_VALUE
from tests.broker.outbox_help import METHODS, Shop, Stream, Table, read, shop
from tests.support.catalogue.run import AT_START, BAD_ROW, EXACT, Cells, shown
from tests.support.catalogue.tables import postgres_value
from tests.support.catalogue.values import BY_NAME, KINDS, NAMES, Kind, canonical

from delivered.connectors.outbox import CONNECTOR
from delivered.connectors.outbox.slot import lsn_text
from delivered.connectors.postgres import TYPES
from delivered.model.errors import BadRecord, UsageError

Statement = tuple[str, Any]
"""A value as SQL, and its parameter."""
Place = tuple[Kind, str]
_numbers = itertools.count()

_OTHERS: dict[str, Mapping[str, str]] = {
    "date": {"infinity": "'infinity'", "-infinity": "'-infinity'", "44 BC": "'0044-03-15 BC'",
             "least of PostgreSQL": "'4713-11-24 BC'", "greatest of PostgreSQL": "'5874897-12-31'"},
    "timestamp": {"infinity": "'infinity'", "-infinity": "'-infinity'", "least of PostgreSQL": "'4713-11-24 BC'",
                  "greatest of PostgreSQL": "'294276-12-31 23:59:59.999999'"},
    "timestamptz": {"infinity": "'infinity'", "offset of seconds": "'1880-01-01 00:00:00+00:53:28'",
                    "greatest of PostgreSQL": "'294276-12-31 23:59:59.999999Z'"},
    "numeric": {"NaN": "'NaN'", "infinity": "'Infinity'", "1,000 digits": "10::numeric ^ 999", "1.10": "1.10",
                "1e-300": "1e-300"},
    "numeric(38,18)": {"NaN": "'NaN'"},
    "numeric(50,2)": {"50 digits": "10::numeric ^ 47"},
    "time": {"24:00": "'24:00'"},
    "timetz": {"offset": "'12:00:00.5+05:45'"},
    "interval": {"mixed signs": "'1 year -3 days 04:05:06.000007'", "least": "'-178000000 years'"},
    "money": {"cents": "'-1234.56'"},
    "uuid": {"upper case": "'018F0000-0000-7000-8000-00000000000A'"},
    "json": {"keys twice": """'{"b":1, "a":2,"a":3}'"""},
    "jsonb": {"numbers": """'{"a": 1.50, "b": 1e400, "c": 9007199254740993}'"""},
    "integer[]": {"null inside": "'{1,NULL}'", "two dimensions": "'[0:1][5:5]={{1},{2}}'", "empty": "'{}'"},
    "text[]": {"odd": """ARRAY['NULL', '', '"', '\\', '{,}', NULL]"""},
    "bytea[]": {"bytes": "ARRAY['\\x00ff'::bytea]"},
    "float8[]": {"0.1 + 0.2": "ARRAY[0.1::float8 + 0.2::float8, 'NaN']"},
    "timestamptz[]": {"gap": "ARRAY['2026-03-08 07:30:00Z'::timestamptz]"},
    "char(5)": {"padded": "'ab'"},
    "varchar(3)": {"blanks": "'a  '"},
    "bit varying": {"bits": "B'0101'"},
    "inet": {"network": "'10.0.0.1/8'"},
    "int4range": {"empty": "'empty'", "open": "'[1,)'"},
    "tstzrange": {"moments": "'[2026-01-01 00:00:00Z,infinity)'"},
    "point": {"0.1 + 0.2": "'(0.30000000000000004,-0)'"},
    "oid": {"greatest": "'4294967295'"},
    "name": {"63 bytes": f"'{'n' * 63}'"},
    '"char"': {"high byte": "'\\200'"},
    "tsvector": {"words": "to_tsvector('simple', 'a ''b'' c')"},
    "xid": {"number": "'7'"},
}  # fmt: skip
"""Type of PostgreSQL -> values that it alone has."""
_FIXED = (
    "SET bytea_output = 'hex'", "SET DateStyle = 'ISO, YMD'", "SET IntervalStyle = 'postgres'", "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 1", "SET lc_monetary = 'C'", "SET client_encoding = 'UTF8'",
)  # fmt: skip


def statement(kind: pa.DataType, value: Any) -> Statement:
    """PostgreSQL computes times from numbers, exactly: Python has fewer."""
    t = pa.types
    if value is None:
        return "%s", None
    if t.is_string(kind):
        return "convert_from(%s, 'UTF8')", value
    if t.is_date32(kind):
        return "date '1970-01-01' + %s::int", value
    if t.is_timestamp(kind):
        days, rest = divmod(value, 86_400_000_000)
        moment = f"timestamp 'epoch' + {days} * interval '1 day' + %s * interval '1 microsecond'"
        return f"({moment})" + ("" if kind.tz is None else " AT TIME ZONE 'UTC'"), rest
    return ("time '00:00' + %s * interval '1 microsecond'" if t.is_time(kind) else "%s"), value


@dataclass(frozen=True)
class _Row:
    kind: str
    label: str
    column: str
    sql: Statement


def _columns() -> dict[str, tuple[str, dict[str, Statement]]]:
    """Type of the catalogue -> PostgreSQL's, and values."""
    found: dict[str, tuple[str, dict[str, Statement]]] = {}
    for kind in KINDS:
        declared = None if pa.types.is_null(kind.arrow) else TYPES.declared(kind.arrow)
        if declared is not None:
            values = {label: statement(kind.arrow, canonical(v)[0]) for label, v in kind.values.items()}
            found[kind.name] = declared, values
    for declared, values in _OTHERS.items():
        found[f"PostgreSQL's {declared}"] = declared, {label: (text, ()) for label, text in values.items()}
    return found


def changes(request: pytest.FixtureRequest, settings: str = "", server: Any = None) -> Cells:
    """Each value in a transaction of its own, through the change stream."""
    server = server or request.getfixturevalue("postgres_log")
    columns = _columns()
    names = {kind: f"c{n}" for n, kind in enumerate(columns)}
    table = Table(server, "id int PRIMARY KEY, " + ", ".join(f"{names[k]} {columns[k][0]}" for k in columns))
    stream = table.stream(settings=settings)
    stream.batch()  # makes the slot
    rows = [_Row(k, label, names[k], sql) for k, (_, values) in columns.items() for label, sql in values.items()]
    spans: dict[int, tuple[int, int]] = {}
    with server.connect() as connection:
        for fixed in _FIXED:
            connection.execute(fixed)
        for n, row in enumerate(rows):
            before = _position(connection)
            with contextlib.suppress(connection.DataError):
                text, value = row.sql
                insert = f"INSERT INTO {table.name} (id, {row.column}) VALUES ({n}, {text})"
                connection.execute(insert, None if value == () else [value])
                spans[n] = before, _position(connection)
        layout, written = stream.source.schema(), [(n, rows[n].column) for n in spans]
        sent = {n: postgres_value(connection, table.name, c, layout.field(c).type, n) for n, c in written}
    end = stream.driver.latest(stream.at, None)
    accepting = table.source(settings, schemaChange=lsn_text(int(end["lsn"])))
    found = read(accepting, stream.at, end)
    there = dict(zip(found.column("id").to_pylist(), range(found.num_rows), strict=True))
    cells: Cells = {k: {} for k in columns}
    for n, row in enumerate(rows):
        if n not in spans:
            outcome = NO_VALUE
        elif n in there:
            value = canonical(found.column(row.column).slice(there[n], 1).combine_chunks())[0]
            same = type(value) is type(sent[n]) and value == sent[n]
            outcome = EXACT if same else f"{value!r:.100} instead of {sent[n]!r:.100}"
        else:
            outcome = _refused(stream, end, spans[n], row.column)
        cells[row.kind][row.label] = outcome
    stream.close()
    _drop(table)
    return cells


def _position(connection: Any) -> int:
    return int(connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()[0])


def _refused(stream: Stream, last: Any, span: tuple[int, int], column: str) -> str:
    start, end = ({**last, "lsn": lsn} for lsn in span)
    try:
        read(stream.source, start, end)
    except BadRecord as error:
        return BAD_ROW if f"column {column} " in error.message else shown(error)
    return "lost"


def _drop(table: Table) -> None:
    """Slots are few."""
    options = table.source().options  # type: ignore[attr-defined]
    table.server.execute("SELECT pg_drop_replication_slot(%s)", options.slot)
    table.server.execute(f"DROP PUBLICATION {options.publication}")


# Outboxes


_PARTS = ("value", "key", "id", "type", "topic")
_TYPES = {
    "postgres": {"string": "text", "binary": "bytea"},
    "mysql": {"string": "longtext", "binary": "longblob"},
    "sqlite": {"string": "TEXT", "binary": "BLOB"},
}
_ODD = ("lone surrogate", "not UTF-8", "cut UTF-8")
"""Probably refused: each alone."""
_ID_OF_MYSQL = {"string": "varchar(255) COLLATE utf8mb4_nopad_bin", "binary": "varbinary(255)"}


def outbox(request: pytest.FixtureRequest, how: str) -> Cells:
    """Each value in each column of an outbox."""
    folder: Folder = request.getfixturevalue("tmp_path")
    found: dict[tuple[str, Place], str] = {}
    for kind in (BY_NAME["string"], BY_NAME["binary"]):
        every = [(p, (kind, label)) for p in _PARTS for label in kind.values]
        odd = [one for one in every if one[1][1] in _ODD or (one[0] == "topic" and kind.name == "binary")]
        parts = [[one for one in every if one not in odd], *([one] for one in odd)]
        while parts:
            part = parts.pop()
            box = shop(request, folder, how)
            try:
                found |= zip(part, _through(box, kind.name, part), strict=True)
            except (BadRecord, UsageError) as error:
                if len(part) == 1:
                    found[part[0]] = BAD_ROW if isinstance(error, BadRecord) else AT_START
                else:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            finally:
                _forget(box)
    kinds = {k.name: k for _, (k, _) in found}
    return {
        f"{name} as {part}": {label: found[part, (kind, label)] for label in kind.values}
        for part in _PARTS
        for name, kind in kinds.items()
    }


def _through(box: Shop, kind: str, places: Sequence[tuple[str, Place]]) -> list[str]:
    column = _TYPES[box.dialect][kind]
    id_column = _ID_OF_MYSQL[kind] if box.dialect == "mysql" else column
    box.execute(
        f"DROP TABLE {box.table}",
        f"CREATE TABLE {box.table} (id {id_column} PRIMARY KEY NOT NULL, aggregatetype {column}, aggregateid {column}, "
        f"type {column}, payload {column})",
    )
    stream = Stream(box.source(payloadFormat="any"))
    written = [_insert(box, kind, n, part, of) for n, (part, of) in enumerate(places)]
    rows: dict[int, dict[str, Any]] = {}
    while (batch := stream.batch()) is not None:
        for row in batch.to_pylist():
            headers = {h["key"]: h["value"] for h in row["headers"]}
            row |= {"id": headers["id"], "type": headers.get("type")}
            numbers = [row[p] for p in ("type", "value") if (row[p] or b"").startswith(b"#")]
            rows[int(numbers[0][1:])] = row
    stream.close()
    outcomes = []
    for n, (part, (of, label)) in enumerate(places):
        sent = canonical(of.values[label])[0]
        if not written[n]:
            outcomes.append(NO_VALUE)
        elif n not in rows:
            outcomes.append("lost")
        else:
            seen = rows[n][part]
            if part == "topic":
                seen = None if seen is None else seen.removeprefix("outbox.event.").encode()
            outcomes.append(EXACT if seen == sent else f"{seen!r:.100} instead of {sent!r:.100}")
    return outcomes


def _insert(box: Shop, kind: str, n: int, part: str, of: Place) -> bool:
    """Whether the database took the row."""
    given = {"id": f"n{n}", "topic": "x", "key": "x", "type": "x", "value": "x"}
    given["type" if part == "value" else "value"] = f"#{n}"
    row: dict[str, Any] = {p: text.encode() for p, text in given.items()}
    row[part] = canonical(of[0].values[of[1]])[0]
    text = {"postgres": "convert_from(%s, 'UTF8')", "mysql": "%s", "sqlite": "CAST(? AS TEXT)"}[box.dialect]
    place = text if kind == "string" else "?" if box.dialect == "sqlite" else "%s"
    with contextlib.closing(box.connect()) as connection:
        cursor = connection.cursor()
        try:
            cursor.execute(f"INSERT INTO {box.table} VALUES ({', '.join([place] * 5)})", [
                row[p] for p in ("id", "topic", "key", "type", "value")
            ])  # fmt: skip
        except _refusals():
            return False
        connection.commit()
    return True


def _refusals() -> tuple[type[Exception], ...]:
    import psycopg
    import pymysql

    return psycopg.DatabaseError, pymysql.MySQLError, sqlite3.DatabaseError


def _forget(box: Shop) -> None:
    if box.method == "log":
        options: Any = box.source().options  # type: ignore[attr-defined]
        box.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{options.slot}'"
        )


# Names


def names(request: pytest.FixtureRequest) -> Cells:
    """Of columns and tables, of a change stream: one number in a column of this name."""
    server = request.getfixturevalue("postgres_log")
    cells: Cells = {}
    for label, name in NAMES.items():
        quoted = '"' + name.replace('"', '""') + '"'
        fresh = f"named{next(_numbers)}"
        tried = {"as column": (fresh, fresh, quoted, name), "as target": (quoted, name, '"value"', "value")}
        cells[label] = {place: _one_name(server, *given) for place, given in tried.items()}
    return cells


def _one_name(server: Any, table: str, option: str, column: str, name: str) -> str:
    import psycopg

    try:
        server.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, {column} bigint)")
    except (psycopg.DatabaseError, ValueError):
        return NO_VALUE
    try:
        kept = (
            "SELECT 1 FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid "
            "WHERE relname::text = %s::text AND attname::text = %s::text"
        )
        if not server.execute(kept, option, name):  # cut at 63 bytes
            return NO_VALUE
        given = CONNECTOR.source({"url": server.url, "table": option, "slot": "named", "publication": "named"})
        source = given.planned()
        if any(f.refuses for f in source.preflight()):
            return AT_START
        stream = Stream(source)
        stream.batch()  # makes the slot
        server.execute(f"INSERT INTO {table} VALUES (1, 7)")
        batch = stream.batch()
        stream.close()
        assert batch is not None
        found = batch.column(name).to_pylist() if name in batch.schema.names else batch.schema.names
        return EXACT if found == [7] else f"{found}"
    except UsageError:
        return AT_START
    finally:
        server.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = 'named'")
        server.execute("DROP PUBLICATION IF EXISTS named")
        server.execute(f"DROP TABLE {table}")


CHANGES = {"postgres changes": changes, "postgres changes by name": names}
OUTBOXES = {f"outbox {how}": partial(outbox, how=how) for how in METHODS}
