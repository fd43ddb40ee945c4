"""What no row can hold of an outbox or a change stream is a dead letter, with its reason and bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.broker.outbox_help import METHODS, Shop, Stream, Table, changed, ids, read, shop

from delivered.contract.source import Source
from delivered.model.errors import BadRecord
from delivered.model.rows import Rejection, as_json_text, from_json_texts

NOT_UTF8 = b"caf\xe9"


def letter(rejected: Rejection, source: Source) -> pa.RecordBatch:
    """As a retry reads it from the dead letters."""
    return from_json_texts([as_json_text({"offset": rejected.offset, **rejected.record})], source.raw_schema())


UNFIT = {
    "day": "'infinity'", "at": "'294276-12-31'", "zoned": "'-infinity'", "amount": "'NaN'",
}  # fmt: skip


def test_changes_that_spark_cannot_hold_are_rejected_and_the_others_delivered(postgres_log: Any) -> None:
    table = Table(
        postgres_log,
        "id int PRIMARY KEY, day date, at timestamp, zoned timestamptz, amount numeric(12,2), huge numeric, "
        "span interval, key text, value int, topic int",
    )
    stream = table.stream()
    stream.batch()
    for n, (column, value) in enumerate(UNFIT.items()):
        table.execute(f"INSERT INTO {{}} (id, {column}, huge, span) VALUES ({n}, {value}, 10 ^ 200::numeric, '1 year')")
    table.execute("INSERT INTO {} (id, huge, span) VALUES (10, 10 ^ 200::numeric, '1 year')")
    table.execute("UPDATE {} SET day = '2024-01-01' WHERE id = 0", "UPDATE {} SET at = '294276-01-01' WHERE id = 10")
    table.execute("DELETE FROM {} WHERE id = 1")
    end = stream.driver.latest(stream.at, None)
    with pytest.raises(BadRecord, match=r"OUTBOX_VALUE.*column day .*on_bad_row: dead_letter"):
        read(stream.source, stream.at, end)

    source, rejected = stream.source, list[Rejection]()
    rows = read(source, stream.at, end, rejected)
    assert [(r[0], r[-2]) for r in changed(rows)] == [(10, "insert"), (0, "update"), (1, "delete")]
    assert changed(rows)[0][5] == "1" + "0" * 200
    assert [r.reason.split(" of changes")[0].split("column ")[1].split(" ")[0] for r in rejected] == [*UNFIT, "at"]
    kept = [json.loads(r.text) for r in rejected]
    assert [(k["_op"], k["_deleted"]) for k in kept] == [("insert", False)] * 4 + [("update", False)]
    assert dict(kept[1]["_change"]) | {"huge": None} == {
        "id": "1", "day": None, "at": "294276-12-31 00:00:00", "zoned": None, "amount": None, "huge": None,
        "span": "1 year", "key": None, "value": None, "topic": None,
    }  # fmt: skip

    # A retry: still no row; a row once the type holds it.
    bad = rejected[4]
    found = source.decoded(letter(bad, source))
    assert ([r.reason for r in found.rejected], found.good.num_rows) == ([bad.reason], 0)
    stream.driver.acknowledge(end)
    table.execute("ALTER TABLE {} ALTER at TYPE text")
    now = replace(source, layout=None).planned()
    found = now.decoded(letter(bad, now))
    (row,) = found.good.to_pylist()
    assert not found.rejected
    assert (row["id"], row["at"], row["_op"], row["_lsn"]) == (10, "294276-01-01 00:00:00", "update", kept[4]["_lsn"])
    table.execute("ALTER TABLE {} DROP span")
    with pytest.raises(ValueError, match="span"):
        gone = replace(source, layout=None).planned()
        gone.decoded(letter(bad, gone))
    stream.close()


@contextlib.contextmanager
def any_bytes(server: Any) -> Iterator[str]:
    """A database without an encoding; its URL."""
    name = "any_bytes"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
        try:
            yield f"{server.url.rpartition('/')[0]}/{name}"
        finally:
            for (slot,) in connection.execute("SELECT slot_name FROM pg_replication_slots WHERE database = %s", [name]):
                connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("method", ["log", "poll"])
def test_texts_of_a_database_without_an_encoding_are_their_bytes(postgres_log: Any, method: str) -> None:
    with any_bytes(postgres_log) as url:
        box = Shop("postgres", url, url, method)
        box.execute(
            f"ALTER TABLE {box.table} ALTER id TYPE text, ALTER payload TYPE text",
            r"CREATE FUNCTION caf() RETURNS text RETURN convert_from('\x636166e9', 'SQL_ASCII')",
        )
        insert = f"INSERT INTO {box.table} VALUES ('{{}}' || caf(), {{}}, caf(), caf(), caf())"

        def put(first: int) -> None:
            """Two messages, and one between them that has no topic."""
            for n, kind in enumerate(("'order'", "caf()", "'order'")):
                box.execute(insert.format(first + n, kind))

        def check(rows: pa.Table, first: int) -> Rejection:
            assert stream.rejected is not None
            rejected = stream.rejected[-1]
            assert [(r["key"], r["value"], r["topic"]) for r in rows.to_pylist()] == [
                (NOT_UTF8, NOT_UTF8, "outbox.event.order")
            ] * 2
            assert [[h["value"] for h in r["headers"]] for r in rows.to_pylist()] == [
                [b"%d" % n + NOT_UTF8, NOT_UTF8] for n in (first, first + 2)
            ]
            assert (rejected.record["key"], rejected.record["value"]) == (NOT_UTF8, NOT_UTF8)
            assert rejected.reason.startswith("delivered_outbox source: the message 0x")
            assert "no UTF-8 text" in rejected.reason
            return rejected

        put(0)
        source = box.source()
        assert [f for f in source.preflight() if f.refuses] == []
        stream = Stream(source, rejects=True)
        start = stream.at
        end = stream.driver.latest(start, None)
        with pytest.raises(BadRecord, match="OUTBOX_TOPIC"):
            read(source, start, end)
        found = stream.batch()  # from before the slot, or polled
        assert found is not None
        rejected = check(found, 0)
        put(3)
        found = stream.batch()
        assert found is not None
        assert check(found, 3).offset != rejected.offset
        assert len(stream.rejected or []) == 2
        assert stream.batch() is None
        assert box.left() == 0
        stream.close()

        retried = box.source(topic="all")
        read_again = retried.decoded(letter(rejected, retried))
        (row,) = read_again.good.to_pylist()
        assert not read_again.rejected
        assert (row["key"], row["value"], row["topic"]) == (NOT_UTF8, NOT_UTF8, "all")
        assert [h["value"] for h in row["headers"]] == [b"1" + NOT_UTF8, NOT_UTF8]


def test_a_change_with_a_text_that_is_not_utf_8_is_rejected_with_its_bytes(postgres_log: Any) -> None:
    with any_bytes(postgres_log) as url:
        table = Table(type("Server", (), {"url": url}), "id int PRIMARY KEY, name text")
        stream = table.stream()
        stream.batch()
        for n, name in enumerate(("'a'", r"convert_from('\\x636166e9', 'SQL_ASCII')", "'c'")):
            table.execute(f"INSERT INTO {{}} VALUES ({n}, {name.replace(chr(92) * 2, chr(92))})")
        end = stream.driver.latest(stream.at, None)
        with pytest.raises(BadRecord, match=r"OUTBOX_VALUE.*column name"):
            read(stream.source, stream.at, end)
        found = list[Rejection]()
        rows = read(stream.source, stream.at, end, found)
        (rejected,) = found
        assert [r[:2] for r in changed(rows)] == [(0, "a"), (2, "c")]
        assert json.loads(rejected.text)["_change"] == [["id", "1"], ["name", {"base64": "Y2Fm6Q=="}]]
        stream.close()


@pytest.mark.parametrize("how", METHODS)
def test_messages_that_cannot_be_delivered_are_rejected_alone(
    how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    box = shop(request, tmp_path, how)
    text = "text" if box.dialect != "mysql" else "longtext"
    change = {"sqlite": "", "mysql": f"MODIFY payload {text}", "postgres": f"ALTER payload TYPE {text}"}[box.dialect]
    if change:
        box.execute(f"ALTER TABLE {box.table} {change}")
    sent = box.send(1)
    box.execute(
        f"INSERT INTO {box.table} VALUES ('018f0000-0000-7000-8000-000000000001', 'order', 'k', 'created', '[')"
    )
    sent += box.send(3)
    source = box.source(payloadFormat="json")
    stream = Stream(source)
    with pytest.raises(BadRecord, match="OUTBOX_PAYLOAD"):
        read(source, stream.at, stream.driver.latest(stream.at, None))
    stream = Stream(source, stream.at, rejects=True)
    rows, (rejected,) = stream.batch(), stream.rejected or []
    assert rows is not None
    assert sorted(ids(rows)) == sorted(sent)
    assert (rejected.record["key"], rejected.record["value"]) == (b"k", b"[")
    assert "is not JSON" in rejected.reason
    assert stream.batch() is None
    assert box.left() == 0
    stream.close()


def test_texts_that_sqlite_keeps_are_their_bytes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    box = shop(request, tmp_path, "sqlite-poll")
    raw = "CAST(x'636166e9' AS TEXT)"
    for n, kind in enumerate(("'order'", raw, "'order'")):
        box.execute(f"INSERT INTO {box.table} VALUES ('{n}' || {raw}, {kind}, {raw}, {raw}, {raw})")
    stream = Stream(box.source(), rejects=True)
    rows, (rejected,) = stream.batch(), stream.rejected or []
    assert rows is not None
    assert [(r["key"], r["value"], r["headers"][0]["value"]) for r in rows.to_pylist()] == [
        (NOT_UTF8, NOT_UTF8, b"%d" % n + NOT_UTF8) for n in (0, 2)
    ]
    assert rejected.record["key"] == NOT_UTF8
    assert stream.batch() is None
    assert box.left() == 0
    stream.close()


def test_surrogates_that_mariadb_keeps_are_their_bytes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    box = shop(request, tmp_path, "mysql-poll")
    raw = "CONVERT(x'eda080' USING utf8mb4)"
    box.execute(f"ALTER TABLE {box.table} MODIFY payload longtext")
    for n, kind in enumerate(("'order'", raw, "'order'")):
        box.execute(f"INSERT INTO {box.table} VALUES ('{n}', {kind}, {raw}, {raw}, {raw})")
    stream = Stream(box.source(), rejects=True)
    rows, (rejected,) = stream.batch(), stream.rejected or []
    assert rows is not None
    assert [(r["key"], r["value"]) for r in rows.to_pylist()] == [(b"\xed\xa0\x80",) * 2] * 2
    assert rejected.record["key"] == b"\xed\xa0\x80"
    assert stream.batch() is None
    assert box.left() == 0
    stream.close()
