"""The judge's reader of PostgreSQL, and the network in front of it, with a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.conftest import Postgres

from delivered.verify.clients.base import Look
from delivered.verify.clients.postgres import PgTable
from delivered.verify.proxy_sql import SqlProxy, SqlRule
from delivered.verify.wire import Fired, Mischief


@pytest.fixture
def fired() -> list[Fired]:
    return []


@pytest.fixture
def proxy(postgres: Postgres, fired: list[Fired]) -> Iterator[SqlProxy]:
    found = SqlProxy(postgres.broker.bootstrap, fired.append)
    yield found
    found.close()


@pytest.fixture
def drain(postgres: Postgres, proxy: SqlProxy, request: pytest.FixtureRequest) -> Iterator[PgTable]:
    found = PgTable(postgres.broker, request.node.name, proxy.bootstrap)
    found.create()
    yield found
    found.remove()


def client(drain: PgTable) -> psycopg.Connection[Any]:
    return psycopg.connect(drain.options()["url"], autocommit=True)


def insert(connection: psycopg.Connection[Any], *values: str) -> None:
    for value in values:
        connection.execute("INSERT INTO effects (key, value) VALUES (%s, %s)", [b"k", value.encode()])


def values(drain: PgTable) -> list[str]:
    return [r.value for r in sorted(drain.read(), key=lambda r: r.position)]


def test_rows_are_seen_when_they_are_committed_and_prepared_ones_hang(drain: PgTable) -> None:
    looks: list[Look] = []
    stop = threading.Event()
    with client(drain) as connection:
        connection.execute("BEGIN")
        insert(connection, "b", "a")
        assert values(drain) == []
        connection.execute("COMMIT")
        connection.execute("BEGIN")
        insert(connection, "c")
        assert any("session" in text for text in drain.open_transactions("p"))
        connection.execute("PREPARE TRANSACTION 'delivered.p.x'")
    assert values(drain) == ["b", "a"]
    assert drain.open_transactions("p") == ["delivered.p.x"]
    assert drain.roll_back_prepared() == ["delivered.p.x"]
    assert drain.open_transactions("p") == []
    stop.set()
    drain.follow(looks.append, stop)
    assert [[r.value for r in look.rows] for look in looks] == [["b", "a"]]


def test_a_lost_reply_means_that_the_server_did_the_work(drain: PgTable, proxy: SqlProxy, fired: list[Fired]) -> None:
    proxy.add(SqlRule("COMMIT", Mischief.LOSE_REPLY, "INSERT"), SqlRule("COMMIT", Mischief.LOSE_REQUEST, "INSERT"))
    for value in ("in", "out"):
        with pytest.raises(psycopg.OperationalError), client(drain) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT 1")
            insert(connection, value)
            connection.execute("COMMIT")
    assert values(drain) == ["in"]
    assert [f.rule for f in fired] == ["lose_reply:commit of INSERT", "lose_request:commit of INSERT"]
    assert proxy.waiting == []


def test_a_late_commit_gets_in_when_its_sender_has_moved_on(drain: PgTable, proxy: SqlProxy) -> None:
    proxy.add(SqlRule("COMMIT", Mischief.LATE_REQUEST, "INSERT", seconds=0.3))
    with pytest.raises(psycopg.OperationalError), client(drain) as connection:
        connection.execute("BEGIN")
        insert(connection, "late")
        connection.execute("COMMIT")
    assert values(drain) == []
    looks: list[Look] = []
    seen, stop = threading.Event(), threading.Event()

    def look(found: Look) -> None:
        looks.append(found)
        seen.set()

    reader = threading.Thread(target=drain.follow, args=(look, stop))
    reader.start()
    assert seen.wait(20)
    stop.set()
    reader.join(20)
    assert [r.value for r in looks[0].rows] == ["late"]


def test_a_rule_for_commit_leaves_commit_prepared_alone(drain: PgTable, proxy: SqlProxy, fired: list[Fired]) -> None:
    proxy.add(SqlRule("COMMIT", Mischief.LOSE_REQUEST), SqlRule("COMMIT PREPARED", Mischief.LOSE_REPLY))
    with client(drain) as connection:
        connection.execute("BEGIN")
        insert(connection, "a")
        connection.execute("PREPARE TRANSACTION 'g'")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("COMMIT PREPARED 'g'")
    assert values(drain) == ["a"]
    assert [f.rule for f in fired] == ["lose_reply:commit prepared"]


def test_a_reader_lives_through_the_death_of_the_server(new_postgres: Any) -> None:
    own: Postgres = new_postgres()
    drain = PgTable(own.broker, "killed")
    drain.create()
    looks: list[Look] = []
    first, second, stop = threading.Event(), threading.Event(), threading.Event()

    def look(found: Look) -> None:
        looks.append(found)
        (second if first.is_set() else first).set()

    reader = threading.Thread(target=drain.follow, args=(look, stop))
    reader.start()
    with client(drain) as connection:
        insert(connection, "a")
    assert first.wait(20)
    own.broker.kill()
    own.broker.restart()
    with client(drain) as connection:
        insert(connection, "b")
    assert second.wait(60)
    stop.set()
    reader.join(60)
    assert [r.value for found in looks for r in found.rows] == ["a", "b"]
