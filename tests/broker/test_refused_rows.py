"""Rows that a server itself refuses: to the dead letters, with the column; the others are written, once."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from tests.support.servers import Mysql, Postgres
from tests.support.sinks import Rig
from tests.support.sweeps import sweep

from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.shard import find_reasons
from delivered.model.rows import OnBadRow

MECHANISMS = ("one_transaction", "two_phase")
MODES: dict[str, dict[str, str]] = {"append": {}, "upsert": {"mode": "upsert", "keyColumns": "id"}}
LONG = random.Random(1).randbytes(2_000).hex()
"""PostgreSQL compresses a text before it measures it."""
POSTGRES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "index": ("text text UNIQUE", "short #", LONG, ("'text'", "4000 bytes", "maximum 2704", "text_key")),
    "primary key": ("text text, PRIMARY KEY (id, text)", "short #", LONG, ("'text'", "4000 bytes", "maximum 2704")),
    "expression": ("text text", "short #", LONG, ("'text'", "4000 bytes", "maximum 2704", "by_expression")),
    "function": ("text text", "1#", "1x", ('invalid input syntax for type integer: "1x"',)),
    "generated": (
        "text text, computed int GENERATED ALWAYS AS (text::int) STORED", "1#", "1x", ('type integer: "1x"',)
    ),
    "json": ("text json", '{"a": 1}', '{"a": ', ("invalid input syntax", "column text")),
    "jsonb": ("text jsonb", '{"a": 1}', '{"a": "\\u0000"}', ("column text",)),
    "enum": ("text refused_mood", "sad", "glad", ('enum refused_mood: "glad"', "column text")),
    "domain": ("text refused_code", "abc", "abcde", ("domain refused_code", "column text")),
    "width": ("text varchar(3)", "abc", "abcd", ("'text'", "4 characters", "3")),
    "spaces": ("text varchar(3)", "abc", "abc ", ("'text'", "4 characters", "3")),
}  # fmt: skip
EXPRESSIONS = {"expression": "lower(text)", "function": "(text::int)"}


def every(cases: Iterable[str]) -> list[Any]:
    def keep(case: str, mechanism: str, mode: str) -> bool:
        return case in ("index", "json", "width") and (mechanism == "two_phase") is (mode == "append")

    return sweep(itertools.product(cases, MECHANISMS, MODES), keep)


def grouped(server: Any, table: str, mechanism: str, other: Any = None, **options: str) -> tuple[Rig, str]:
    """A sink and its dead letters, on the same server or another; the table of the letters."""
    letters = (other or server).table(None)
    rows = server.sink(table, mechanism=mechanism, **options)
    into: Sink = (other or server).sink(letters, mechanism="two_phase", ifNotExists="true")
    return Rig(Sinks.of([("rows", rows, None)], OnBadRow.DEAD_LETTER, ("letters", into))), letters  # type: ignore[arg-type]


def batch(*texts: str | None) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string())})


def check(
    server: Any, table: str, rig: Rig, letters: str, good: str, bad: str, said: tuple[str, ...], other: Any = None
) -> None:
    values = [bad if i in (1, 6, 7) else good.replace("#", str(i)) if i < 9 or "#" in good else None for i in range(12)]
    rig.run_rows(0, [batch(*values)])
    stored = sorted(i for (i,) in server.execute(f"SELECT id FROM {table}"))
    assert stored == [i for i, v in enumerate(values) if v != bad]
    found = (other or server).execute(f"SELECT reason, record, shard, batch FROM {letters}")
    assert {n[2:] for n in found} == {(0, 0)}
    assert sorted(json.loads(n[1])["id"] for n in found) == [1, 6, 7]
    for reason, *_ in found:
        assert all(part in reason for part in said), reason


@pytest.mark.parametrize(("case", "mechanism", "mode"), every(POSTGRES))
def test_postgres(postgres: Postgres, case: str, mechanism: str, mode: str, request: pytest.FixtureRequest) -> None:
    column, good, bad, said = POSTGRES[case]
    request.addfinalizer(postgres.roll_back_prepared)
    postgres.execute("DROP TYPE IF EXISTS refused_mood CASCADE")
    postgres.execute("CREATE TYPE refused_mood AS ENUM ('sad', 'happy')")
    postgres.execute("DROP DOMAIN IF EXISTS refused_code CASCADE")
    postgres.execute("CREATE DOMAIN refused_code AS text CHECK (length(VALUE) <= 3)")
    table = postgres.table(f"id bigint NOT NULL UNIQUE, {column}")
    if case in EXPRESSIONS:
        postgres.execute(f"CREATE INDEX by_expression_{table} ON {table} ({EXPRESSIONS[case]})")
    rig, letters = grouped(postgres, table, mechanism, **MODES[mode])
    check(postgres, table, rig, letters, good, bad, said)


MYSQL: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "width": ("text varchar(3)", "abc", "abcd", ("'text'", "4 characters", "3")),
    "spaces": ("text varchar(3)", "abc", "abc ", ("'text'", "4 characters", "3")),
    "tinytext": ("text tinytext", "ä", "ä" * 128, ("'text'", "256 bytes", "255")),
    "json": ("text json", '{"a": 1}', '{"a": ', ("text",)),
    "utf8mb3": ("text text CHARACTER SET utf8mb3", "ä", "\U0001f600", ("Incorrect string value", "text")),
    "generated": ("text text, computed int AS (CAST(text AS int)) STORED", "1#", "x", ("incorrect INTEGER",)),
}


@pytest.mark.parametrize(("case", "mechanism", "mode"), every(MYSQL))
def test_mysql(mysql: Mysql, case: str, mechanism: str, mode: str) -> None:
    column, good, bad, said = MYSQL[case]
    table = mysql.table(f"id bigint NOT NULL UNIQUE, {column}")
    rig, letters = grouped(mysql, table, mechanism, **MODES[mode])
    check(mysql, table, rig, letters, good, bad, said)


def test_a_key_that_the_new_table_cannot_hold(mysql: Mysql, postgres: Postgres) -> None:
    """The table is created by the batch that has it."""
    for server, reason in ((postgres, "maximum 2704"), (mysql, "holds 255")):
        table = server.table(None)
        rig, letters = grouped(server, table, "two_phase", mode="upsert", keyColumns="text", ifNotExists="true")
        rig.run_rows(0, [batch("a", LONG, "b")])
        assert sorted(server.execute(f"SELECT id FROM {table}")) == [(0,), (2,)]
        [(found,)] = server.execute(f"SELECT reason FROM {letters}")
        assert "'text'" in found
        assert reason in found


@pytest.mark.parametrize(
    ("mechanism", "how"),
    sweep(
        itertools.product(MECHANISMS, ["load", "insert"]),
        lambda mechanism, how: (mechanism == "two_phase") is (how == "load"),
    ),
)
def test_mysql_packets(mysql: Mysql, postgres: Postgres, mechanism: str, how: str) -> None:
    """LOAD DATA has no such limit; a statement has. Rows that fit are sent in statements that fit."""
    (size,) = mysql.execute("SELECT @@max_allowed_packet")[0]
    table = mysql.table("id bigint NOT NULL UNIQUE, text longtext")
    mysql.execute("SET GLOBAL max_allowed_packet = 1048576")
    mysql.execute(f"SET GLOBAL local_infile = {int(how == 'load')}")
    try:
        rig, letters = grouped(mysql, table, mechanism, postgres)
        if how == "insert":
            check(
                mysql,
                table,
                rig,
                letters,
                "'" * 400_000,
                "x" * (1 << 20),
                ("'text'", "1048576 bytes", "_packet is"),
                postgres,
            )
        else:
            rig.run_rows(0, [batch("x" * (1 << 20))])
        rig.run_rows(1, [pa.record_batch({"id": pa.array([90, 91]), "text": ["'" * 400_000] * 2})])
        assert mysql.execute(f"SELECT sum(length(text)) FROM {table} WHERE id >= 90") == [(800_000,)]
    finally:
        mysql.execute(f"SET GLOBAL max_allowed_packet = {size}")
        mysql.execute("SET GLOBAL local_infile = 1")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mysql_timestamps(mysql: Mysql, mechanism: str) -> None:
    table = mysql.table("id bigint NOT NULL UNIQUE, at timestamp(6) NULL")
    rig, letters = grouped(mysql, table, mechanism)
    moments = pa.array([0, 1_000_000, (2**31 - 1) * 1_000_000, 2**32 * 1_000_000], pa.timestamp("us", "UTC"))
    rig.run_rows(0, [pa.record_batch({"id": pa.array(range(4), pa.int64()), "at": moments})])
    assert sorted(mysql.execute(f"SELECT id FROM {table}")) == [(1,), (2,)]
    found = mysql.execute(f"SELECT reason FROM {letters}")
    assert len(found) == 2 and all("'at'" in reason and "Out of range" in reason for (reason,) in found), found


def test_tried_rows_leave_nothing(postgres: Postgres, mysql: Mysql) -> None:
    for server in (postgres, mysql):
        table = server.table("id bigint NOT NULL UNIQUE, text varchar(3)")
        sink = server.sink(table)
        assert sink.refused_rows(batch("abc", None)) is None
        assert sink.refused_rows(batch("abcd", None)).to_pylist()[1:] == [None]
        texts = pa.array([b"abcd", b"a", b"\xff"]).view(pa.string())
        both = pa.record_batch({"id": pa.array([0, 1, 2], pa.int64()), "text": texts})

        found, alone = (pa.array(find_reasons(sink, b)).to_pylist() for b in (both, both.slice(2)))
        assert "4 characters" in found[0] and found[1] is None and "not UTF-8" in found[2]
        assert "not UTF-8" in alone[0]
        assert server.execute(f"SELECT count(*) FROM {table}") == [(0,)]
        tried = "SELECT count(*) FROM information_schema.tables WHERE table_name LIKE 'try\\_%'"
        assert server.execute(tried) == [(0,)]
        assert server.sink(server.table(None)).refused_rows(batch("a")) is None, "no table yet"
