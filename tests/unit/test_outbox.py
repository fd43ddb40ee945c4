"""Ids of an outbox; the examples at the top of the pages; what the imports load."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from delivered.connectors.outbox import CONNECTOR as SOURCE
from delivered.model.errors import BadRecord, UsageError
from delivered.patterns import outbox
from delivered.patterns.inbox import inbox

ROOT = Path(__file__).parents[2]


def test_ids_are_of_version_7_and_increase(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time_ns() // 1_000_000
    ids = [outbox.new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert {(i.version, i.variant) for i in ids} == {(7, uuid.RFC_4122)}
    assert before <= ids[0].int >> 80
    monkeypatch.setattr(time, "time_ns", lambda: 0)  # the clock is set back
    assert outbox.new_id() > ids[-1]


def test_ids_of_threads_and_forked_processes_differ() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = [i for part in pool.map(lambda _: [outbox.new_id() for _ in range(500)], range(8)) for i in part]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"".join(outbox.new_id().bytes for _ in range(100)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        raw = told.read()
    os.waitpid(child, 0)
    theirs = [uuid.UUID(bytes=raw[at : at + 16]) for at in range(0, len(raw), 16)]
    ours = [outbox.new_id() for _ in range(100)]
    assert len(theirs) == 100
    assert len({*ids, *theirs, *ours}) == 4_000 + 200


@pytest.mark.parametrize(
    "given",
    [
        {"id": None}, {"id": "7"}, {"payload": "no json"}, {"payload": float("nan")}, {"payload": {"a": "\0"}},
        {"payload": {"a": [{1: 2, "1": 3}]}}, {"payload": '"\\ud800"'}, {"payload": object()}, {"type": ""},
        {"aggregate_id": 7}, {"aggregate_type": "x" * 256},
    ],
)  # fmt: skip
def test_a_bad_message_is_refused_before_the_database_is_asked(given: dict[str, object]) -> None:
    message = {"id": outbox.new_id(), "aggregate_type": "a", "aggregate_id": "1", "type": "t", "payload": 1}
    with pytest.raises(BadRecord, match="DELIVERED_OUTBOX_"):
        outbox.put(None, **message | given)


@pytest.mark.parametrize("message_id", [None, "", "a\0", "x" * 513, b"\xff", 7])
def test_a_bad_message_id_is_refused_before_the_database_is_asked(message_id: object) -> None:
    with pytest.raises(BadRecord, match="INBOX_VALUE"), inbox(None, message_id, consumer="a"):
        pass


def test_other_connections_and_dialects_are_refused() -> None:
    with pytest.raises(UsageError, match=r"CONNECTION_TYPE.*builtins\.object"), inbox(object(), "1", consumer="a"):
        pass
    with pytest.raises(UsageError, match="DIALECT"):
        outbox.ddl("oracle")


@pytest.mark.parametrize("key", ["INTEGER PRIMARY KEY", "TEXT PRIMARY KEY", "TEXT UNIQUE"])
def test_a_unique_id_of_sqlite_is_accepted(tmp_path: Path, key: str) -> None:
    assert _ids_are_unique(tmp_path / "o.db", f'"order" {key}') is None


def test_the_advice_for_an_id_that_may_repeat_can_be_run(tmp_path: Path) -> None:
    advice = _ids_are_unique(tmp_path / "o.db", '"order" TEXT')
    assert advice is not None
    with closing(sqlite3.connect(tmp_path / "o.db")) as connection:
        connection.execute(advice)
    assert _ids_are_unique(tmp_path / "o.db", '"order" TEXT') is None


def _ids_are_unique(file: Path, column: str) -> str | None:
    """What to run next; None: nothing."""
    with closing(sqlite3.connect(file)) as connection:
        rest = "aggregatetype TEXT, aggregateid TEXT, type TEXT, payload TEXT"
        connection.execute(f"CREATE TABLE IF NOT EXISTS outbox ({column}, {rest})")
    options = {"url": f"sqlite:///{file}", "columns": "id=order", "method": "poll"}
    found = [f for f in SOURCE.source(options).preflight() if f.refuses]
    assert {f.code for f in found} <= {"OUTBOX_ID_NOT_UNIQUE"}
    return found[0].next_step if found else None


@pytest.mark.parametrize(
    ("url", "given", "said"),
    [
        ("postgresql://h/d", {"dbtable": "é" * 32}, "'é+' has 64 bytes; postgres allows 63.*'dbtable'"),
        ("postgresql://h/d", {"table": "s" * 64 + ".orders"}, "64 bytes.*'table'"),
        ("postgresql://h/d", {"publication": "p" * 64}, "64 bytes.*'publication'"),
        ("postgresql://h/d", {"columns": "payload=" + "c" * 64}, "64 bytes.*'columns'"),
        ("postgresql://h/d", {"orderColumn": "c" * 64}, "64 bytes.*'orderColumn'"),
        ("postgresql://h/d", {"dbtable": "o" * 54, "method": "poll"}, "'o+_positions' has 64 bytes.*'positionsTable'"),
        ("mysql://h/d", {"dbtable": "é" * 65}, "65 characters; mysql allows 64.*'dbtable'"),
        ("mysql://h/d", {"dbtable": "é" * 55}, "65 characters.*'positionsTable'"),
    ],
)
def test_names_that_a_database_would_cut_are_refused_at_the_start(url: str, given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=f"NAME_TOO_LONG.*{said}"):
        SOURCE.source({"url": url, **given})


def test_the_longest_names_are_accepted() -> None:
    for url, given in (
        ("postgresql://h/d", {"dbtable": f"{'s' * 63}.{'o' * 63}", "publication": "p" * 63}),
        ("postgresql://h/d", {"dbtable": "o" * 53, "method": "poll"}),
        ("mysql://h/d", {"dbtable": "é" * 54}),
        ("sqlite:///x.db", {"dbtable": "o" * 300}),
    ):
        SOURCE.source({"url": url, **given})


class Traced:
    """A connection as OpenTelemetry's instrumentation hands it out: a proxy that says that it is one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._connection)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


def test_a_traced_connection_is_the_one_that_it_stands_for(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.execute(outbox.ddl("sqlite"))
        message = {"id": outbox.new_id(), "aggregate_type": "a", "aggregate_id": "1", "type": "t", "payload": 1}
        assert outbox.put(Traced(connection), **message).stored  # type: ignore[arg-type]
