"""An outbox's values are the same bytes by every method, whatever their types; its order without a number."""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.broker.outbox_help import METHODS, Shop, Stream, read, shop
from tests.support.sweeps import sweep

from delivered.connectors.outbox import CONNECTOR
from delivered.contract.source import Source
from delivered.model.errors import BadRecord

VALUES = {
    "bytea": "'\\xcafe'", "octets": "'\\x00ff'", "uuid": "'018f0000-0000-7000-8000-000000000001'", "bigint": "-7",
    "boolean": "true", "char(5)": "'ab'", "numeric": "1e30", "float8": "0.30000000000000004",
    "timestamptz": "'2024-03-01 12:00:00.5+02'", "timestamp": "'infinity'", "date": "'0044-03-15 BC'",
    "interval": "'1 year -03:04:05'", "int[]": "'{1,NULL}'", "bytea[]": "ARRAY['\\xca'::bytea]", "inet": "'10.0.0.1'",
    "jsonb": """'{"a": "x", "b": [1.50]}'""", "json": """'{"b":1, "a":2}'""", "money": "'12.50'", "time": "'24:00'",
    "text": "'été'", "varchar(9)": "'é '", "name": "'n'", "mood": "'so so'", "moods": "'glad'", "positive": "7",
    "text[]": """'{"a b",NULL,""}'""", "mood[]": "ARRAY['glad'::mood]", "uuid[]": "'{}'", "int4range": "'[1,5)'",
    "bit(3)": "B'101'", "pair": "ROW(1, 'a b')", "timetz": "'24:00+01'", "point": "'(0.1,2)'",
    "citext": "'Ab'", "xml": "'<a>é</a>'",
}  # fmt: skip
"""Type of PostgreSQL -> a value. octets: a domain over bytea; mood: an enum; moods, positive: domains."""
MAKE = {
    "octets": "CREATE DOMAIN octets AS bytea", "mood": "CREATE TYPE mood AS ENUM ('glad', 'so so')",
    "moods": "CREATE DOMAIN moods AS mood", "positive": "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "pair": "CREATE TYPE pair AS (a int, b text)", "citext": "CREATE EXTENSION citext",
}  # fmt: skip
IDS = [k for k in VALUES if k not in ("json", "money", "point", "xml", "moods", "pair")]
"""Types with a unique index that are no question of a locale. PostgreSQL compares no domains over enums, and reads no
composite value whose type it is not given."""
QUICK_IDS = ("numeric", "timestamp")


def messages(table: pa.Table) -> list[tuple[Any, ...]]:
    return [(r["key"], r["value"], r["topic"], [tuple(h.values()) for h in r["headers"]]) for r in table.to_pylist()]


def test_values_of_every_type_are_the_same_bytes_by_every_method(request: pytest.FixtureRequest) -> None:
    """By the log, by queries, from before the slot, and read again once they were delivered."""
    box = shop(request, Path(), "postgres-log")
    kinds = there(box)
    names = [f"c{n}" for n in range(len(kinds))]
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    box.execute(
        f"DROP TABLE {box.table}",
        f"CREATE TABLE {box.table} (id bytea PRIMARY KEY, aggregatetype text, {columns})",
        f"INSERT INTO {box.table} VALUES ('\\x00ff00aa', 'order', {', '.join(VALUES[k] for k in kinds)})",
    )
    places = [(n, min(n + 1, len(names) - 1)) for n in range(0, len(names), 2)]
    mappings = [f"aggregateid={names[n]}, payload={names[m]}, type={names[n - 1]}" for n, m in places]

    def sources(**more: Any) -> list[Source]:
        return [box.source(columns=mapping, keep="true", **more) for mapping in mappings]

    def all_read(found: list[Source], start: Any, end: Any) -> list[Any]:
        return [messages(read(source, start, end)) for source in found]

    logged = Stream(sources()[0])
    end = logged.driver.latest(logged.at, None)
    backlog = all_read(sources(), logged.at, end)
    logged.driver.acknowledge(end)
    box.execute(
        f"INSERT INTO {box.table} SELECT '\\x00ff00ab', {', '.join(['aggregatetype', *names])} FROM {box.table}"
    )
    while "number" in end:
        start, end = end, logged.driver.latest(end, None)
    by_log = all_read(sources(), start, end)
    logged.driver.acknowledge(end)
    again = all_read(sources(), start, end)
    polled = Stream(sources(method="poll", positionsTable=f"{box.table}_p")[0])
    end = polled.driver.latest(polled.at, None)
    by_poll = all_read(sources(method="poll", positionsTable=f"{box.table}_p"), {"number": 0}, end)
    for stream in (logged, polled):
        stream.close()
    box.execute(f"DROP TABLE {box.table}")

    assert by_log == again
    assert [m[0][:3] for m in backlog] == [m[0][:3] for m in by_log]
    assert by_poll == [[a, b] for (a,), (b,) in zip(backlog, by_log, strict=True)]
    assert by_log[0] == [
        (b"\xca\xfe", b"\x00\xff", "outbox.event.order", [("id", b"\x00\xff\x00\xab"), ("type", by_log[-1][0][1])])
    ]
    texts = {names[n]: m[0][0] for (n, _), m in zip(places, by_log, strict=True)}
    texts |= {names[n]: m[0][1] for (_, n), m in zip(places, by_log, strict=True)}
    known = {
        "boolean": "t", "char(5)": "ab   ", "int[]": "{1,NULL}", "time": "24:00:00", "text": "été", "varchar(9)": "é ",
        "mood": "so so", "moods": "glad", "text[]": '{"a b",NULL,""}', "pair": '(1,"a b")', "timetz": "24:00:00+01",
    }  # fmt: skip
    for kind, value in known.items():
        assert texts[names[kinds.index(kind)]] == value.encode()


def there(box: Shop) -> list[str]:
    """Types that this server has, or that could be made."""
    found = []
    for kind in VALUES:
        if kind in MAKE and not box.execute(f"SELECT 1 WHERE to_regtype('{kind}') IS NOT NULL"):
            with contextlib.suppress(psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile):
                box.execute(MAKE[kind])
        with contextlib.suppress(psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedObject):
            box.execute(f"SELECT CAST({VALUES[kind]} AS {kind}) IS NULL")
            found.append(kind)
    return found


@pytest.mark.parametrize("kind", sweep(IDS, lambda kind: kind in QUICK_IDS))
def test_ids_of_every_type_are_the_same_bytes_by_every_method(kind: str, request: pytest.FixtureRequest) -> None:
    """And their rows are deleted."""
    box = shop(request, Path(), "postgres-log")
    if kind not in there(box):
        pytest.skip(f"this server has no type {kind}")
    box.execute(f"DROP TABLE {box.table}", f"CREATE TABLE {box.table} (id {kind} PRIMARY KEY, {NULLABLE})")
    insert = f"INSERT INTO {box.table} (id, aggregatetype) VALUES ({VALUES[kind]}, 'order')"

    def delivered(stream: Stream) -> bytes:
        found = stream.batch()
        while found is None or found.num_rows == 0:
            found = stream.batch()
        assert found.num_rows == 1
        while stream.batch() is not None:
            pass
        assert box.left() == 0
        return bytes(messages(found)[0][3][0][1])

    box.execute(insert)
    stream = Stream(box.source())
    backlog = delivered(stream)
    box.execute(insert)
    by_log = delivered(stream)
    stream.close()
    box.execute(insert)
    polled = Stream(box.source(method="poll"))
    by_poll = delivered(polled)
    polled.close()
    assert backlog == by_log == by_poll


TYPES = {
    "mysql": {"BINARY(4)": "x'00ff00aa'", "DATETIME(6)": "'2024-03-01 12:00:00'", "TIME": "'-01:00:00'",
              "DOUBLE": "1e20", "BLOB": "x'ff'", "DECIMAL(10,2)": "12.50"},
    "sqlite": {"BLOB": "x'00ff00aa'", "REAL": "0.5", "INTEGER": "-7"},
}  # fmt: skip
TEXTS = {
    "mysql": [b"\x00\xff\x00\xaa", b"2024-03-01 12:00:00.000000", b"-01:00:00", b"1e20", b"\xff", b"12.50"],
    "sqlite": [b"\x00\xff\x00\xaa", b"0.5", b"-7"],
}


@pytest.mark.parametrize("how", METHODS[2:])
def test_polled_values_are_bytes_or_the_databases_text(
    how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    box = shop(request, tmp_path, how)
    kinds, values = TYPES[box.dialect], list(TYPES[box.dialect].values())
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds))
    box.execute(
        f"DROP TABLE {box.table}",
        f"CREATE TABLE {box.table} (id {next(iter(kinds))} PRIMARY KEY, aggregatetype CHAR(10), type CHAR(1), "
        f"{columns})",
        f"INSERT INTO {box.table} VALUES ({values[0]}, 'order', 'x', {', '.join(values)})",
    )
    for n in range(len(kinds)):
        mapping = f"aggregateid=c{n}, payload=c{n}"
        stream = Stream(box.source(columns=mapping, keep="true", positionsTable=f"{box.table}_{n}"))
        found = stream.batch()
        assert found is not None
        (row,) = messages(found)
        assert row == (TEXTS[box.dialect][n],) * 2 + ("outbox.event.order", [("id", values_id), ("type", b"x")])
        assert stream.batch() is None
        stream.close()


values_id = b"\x00\xff\x00\xaa"


@pytest.mark.parametrize("how", sweep(METHODS, lambda how: how in ("postgres-log", "mysql-poll")))
def test_null_stays_null(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    box = shop(request, tmp_path, how)
    box.execute(f"DROP TABLE {box.table}", f"CREATE TABLE {box.table} (id varchar(10) PRIMARY KEY, {NULLABLE})")
    stream = Stream(box.source())
    stream.batch()
    box.execute(
        f"INSERT INTO {box.table} (id) VALUES ('a')", f"INSERT INTO {box.table} (id, aggregateid) VALUES ('b', '')"
    )
    found = stream.batch()
    assert found is not None
    assert messages(found) == [(None, None, None, [("id", b"a")]), (b"", None, None, [("id", b"b")])]
    stream.close()


NULLABLE = "aggregatetype varchar(10), aggregateid varchar(10), type varchar(10), payload varchar(10)"


def test_a_column_that_was_renamed_is_read_by_both_names(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    box = shop(request, tmp_path, "postgres-log")
    stream = Stream(box.source(columns="payload=body"))
    box.execute(f"ALTER TABLE {box.table} RENAME payload TO body")
    stream.batch()
    insert = "INSERT INTO {} VALUES (gen_random_uuid(), 'order', '1', 'created', '{}')"
    box.execute(insert.format(box.table, 1))
    box.execute(f"ALTER TABLE {box.table} RENAME body TO content", insert.format(box.table, 2))
    with pytest.raises(BadRecord, match=r"OUTBOX_COLUMN.*no column payload"):
        read(box.source(), stream.at, stream.driver.latest(stream.at, None))
    stream.close()
    again = Stream(box.source(columns="payload=content, payload=body"), stream.at)
    found = again.batch()
    assert found is not None
    assert found.column("value").to_pylist() == [b"1", b"2"]
    assert again.batch() is None
    assert box.left() == 0
    again.close()


@pytest.mark.parametrize("how", sweep(METHODS, lambda how: how in ("postgres-log", "mysql-poll")))
def test_order_without_a_number_is_said_and_can_be_given(
    how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    box = shop(request, tmp_path, how)
    box.execute(f"ALTER TABLE {box.table} ADD place int")
    source = box.source()
    said = [f for f in source.preflight() if f.code == "OUTBOX_ORDER"]
    assert said == []
    assert any("order of their ids" in text for text in source.capability().assumes)
    sent = [str(uuid.UUID(int=9 - n, version=4)) for n in range(3)]
    for n, id_ in enumerate(sent):
        box.execute(f"INSERT INTO {box.table} VALUES ('{id_}', 'order', '1', 'created', NULL, {n})")
    (finding,) = [f for f in source.preflight() if f.code == "OUTBOX_ORDER"]
    assert not finding.refuses
    assert "UUIDs of version 4" in finding.message
    assert "orderColumn" in (finding.next_step or "")
    ordered = box.source(orderColumn="place")
    assert [f for f in ordered.preflight() if f.code == "OUTBOX_ORDER"] == []
    assert any("order of place" in text for text in ordered.capability().assumes)
    stream = Stream(ordered)
    assert stream.rest() == sent, "as they were written, not by id"
    stream.close()
    assert [f.code for f in box.source(orderColumn="nothing").preflight()] == ["OUTBOX_TABLE"]


def test_numbers_as_text_are_no_order(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    box = shop(request, tmp_path, "sqlite-poll")
    for n in (9, 10):
        box.execute(f"INSERT INTO {box.table} VALUES ('{n}', 'order', '1', 'created', NULL)")
    (finding,) = [f for f in box.source().preflight() if f.code == "OUTBOX_ORDER"]
    assert "numbers as text" in finding.message
    stream = Stream(box.source(orderColumn="rowid"))
    assert stream.rest() == ["9", "10"]
    stream.close()


def test_integer_primary_keys_are_ids_and_the_advice_is_a_statement(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        for table, key in (("box", "PRIMARY KEY"), ("loose", "")):
            database.execute(f"CREATE TABLE {table} (id INTEGER {key}, aggregatetype, aggregateid, type, payload)")
            database.execute(f"INSERT INTO {table} VALUES (7, 'order', '1', 'created', NULL)")
        database.commit()
        options = {"url": f"sqlite://{tmp_path}/a.db", "method": "poll"}
        stream = Stream(CONNECTOR.source({**options, "dbtable": "box"}))
        assert stream.rest() == ["7"]
        stream.close()
        (finding,) = CONNECTOR.source({**options, "dbtable": "loose"}).preflight()
        assert finding.code == "OUTBOX_ID_NOT_UNIQUE"
        database.execute(str(finding.next_step))
    assert CONNECTOR.source({**options, "dbtable": "loose"}).preflight() == []
