"""The judge's SQL readers, and the lossy networks in front of them, with real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from tests.support.servers import Mysql, Postgres
from tests.support.sweeps import sweep

from delivered_lab import brokers
from delivered_lab.verify.proxy import Fired, MysqlProxy, NetworkFault, PostgresProxy, Rule, SqlProxy
from delivered_lab.verify.systems import SINK_KINDS
from delivered_lab.verify.systems.base import Poll, SinkPlace
from delivered_lab.verify.systems.mysql import MysqlTable
from delivered_lab.verify.systems.postgres import PgTable
from delivered_lab.verify.workloads import WORKLOADS

Drained = PgTable | MysqlTable


@dataclass(frozen=True)
class System:
    """A database's statements: begin a transaction, prepare it, commit it."""

    proxy: Callable[..., SqlProxy]
    drain: type[Drained]
    begin: str
    prepare: tuple[str, ...]
    commit_prepared: str
    rule: str

    def table(self, server: brokers.Broker, name: str) -> Drained:
        return self.drain(SINK_KINDS[self.drain.system], SinkPlace(name, server, Path(), None, WORKLOADS["keyed"]))

    def connect(self, broker: brokers.Broker, drain: Drained, proxy: SqlProxy | None) -> Any:
        address = broker.bootstrap if proxy is None else proxy.bootstrap
        if isinstance(drain, PgTable):
            options = "sslmode=disable&gssencmode=disable"
            url = f"postgresql://delivered@{address}/{drain.database}?{options}"
            return psycopg.connect(url, autocommit=True)
        host, _, port = address.rpartition(":")
        return pymysql.connect(host=host, port=int(port), user="delivered", database=drain.database, autocommit=True)


SYSTEMS = {
    "postgres": System(
        PostgresProxy, PgTable, "BEGIN", ("PREPARE TRANSACTION 'g'",), "COMMIT PREPARED 'g'", "COMMIT PREPARED"
    ),
    "mysql": System(
        MysqlProxy, MysqlTable, "XA START 'g'", ("XA END 'g'", "XA PREPARE 'g'"), "XA COMMIT 'g'", "XA COMMIT"
    ),
}
ERRORS = (psycopg.OperationalError, pymysql.MySQLError)


@pytest.fixture(params=list(SYSTEMS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def system(name: str) -> System:
    return SYSTEMS[name]


@pytest.fixture
def server(name: str, request: pytest.FixtureRequest) -> brokers.Broker:
    found: Postgres | Mysql = request.getfixturevalue(name)
    return found.broker


@pytest.fixture
def fired() -> list[Fired]:
    return []


@pytest.fixture
def proxy(server: brokers.Broker, system: System, fired: list[Fired]) -> Iterator[SqlProxy]:
    found = system.proxy(server.bootstrap, fired.append)
    yield found
    found.close()


@pytest.fixture
def drain(server: brokers.Broker, system: System, request: pytest.FixtureRequest) -> Iterator[Drained]:
    found = system.table(server, request.node.name)
    found.create()
    yield found
    found.remove()


Client = Callable[[], Any]


@pytest.fixture
def client(server: brokers.Broker, system: System, drain: Drained, proxy: SqlProxy) -> Client:
    return lambda: closing(system.connect(server, drain, proxy))


def run(connection: Any, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def insert(connection: Any, *values: str) -> None:
    with connection.cursor() as cursor:
        for value in values:
            cursor.execute("INSERT INTO effects (value) VALUES (%s)", [value.encode()])


def values(drain: Drained) -> list[str]:
    return [r.value for r in sorted(drain.read(), key=lambda r: r.position)]


def test_a_session_that_stays_idle_in_a_transaction_hangs(drain: Drained, client: Client) -> None:
    with client() as connection:
        run(connection, "BEGIN")
        insert(connection, "1")
        assert [text.partition(" ")[0] for text in drain.open_transactions("p")] == ["session"]
        run(connection, "COMMIT")
        assert drain.open_transactions("p") == []


def test_rows_are_seen_when_they_are_committed_and_prepared_ones_hang(
    system: System, drain: Drained, client: Client
) -> None:
    looks: list[Poll] = []
    stop = threading.Event()
    with client() as connection:
        run(connection, "BEGIN")
        insert(connection, "b", "a")
        assert values(drain) == []
        run(connection, "COMMIT", system.begin)
        insert(connection, "c")
        if isinstance(drain, PgTable):
            assert any("session" in text for text in drain.open_transactions("p"))
        run(connection, *system.prepare)
    assert values(drain) == ["b", "a"]
    assert drain.open_transactions("p") == ["g"]
    assert drain.roll_back_prepared() == ["g"]
    assert drain.open_transactions("p") == []
    stop.set()
    drain.follow(looks.append, stop)
    assert [[r.value for r in look.rows] for look in looks] == [["b", "a"]]


def test_a_session_that_sleeps_in_a_transaction_hangs(drain: Drained, client: Client) -> None:
    with client() as connection:
        run(connection, "BEGIN")
        insert(connection, "a")
        assert any("session" in text for text in drain.open_transactions("p"))
        run(connection, "COMMIT")
    assert drain.open_transactions("p") == []


def test_a_lost_reply_means_that_the_server_did_the_work(
    drain: Drained, client: Client, proxy: SqlProxy, fired: list[Fired]
) -> None:
    proxy.add(Rule("COMMIT", NetworkFault.LOSE_REPLY, "INSERT"), Rule("COMMIT", NetworkFault.LOSE_REQUEST, "INSERT"))
    for value in ("in", "out"):
        with pytest.raises(ERRORS), client() as connection:
            run(connection, "BEGIN", "SELECT 1")
            insert(connection, value)
            run(connection, "COMMIT")
    assert values(drain) == ["in"]
    assert [f.rule for f in fired] == ["lose_reply:commit of INSERT", "lose_request:commit of INSERT"]
    assert proxy.waiting == []


def test_a_late_commit_gets_in_when_its_sender_has_moved_on(drain: Drained, client: Client, proxy: SqlProxy) -> None:
    proxy.add(Rule("COMMIT", NetworkFault.LATE_REQUEST, "INSERT", seconds=3))
    with pytest.raises(ERRORS), client() as connection:
        run(connection, "BEGIN")
        insert(connection, "late")
        run(connection, "COMMIT")
    assert values(drain) == []
    looks: list[Poll] = []
    seen, stop = threading.Event(), threading.Event()

    def look(found: Poll) -> None:
        looks.append(found)
        seen.set()

    reader = threading.Thread(target=drain.follow, args=(look, stop))
    reader.start()
    assert seen.wait(120)
    stop.set()
    reader.join(120)
    assert [r.value for r in looks[0].rows] == ["late"]


def test_a_rule_for_commit_leaves_that_of_prepared_ones_alone(
    system: System, drain: Drained, client: Client, proxy: SqlProxy, fired: list[Fired]
) -> None:
    proxy.add(Rule("COMMIT", NetworkFault.LOSE_REQUEST), Rule(system.rule, NetworkFault.LOSE_REPLY))
    with pytest.raises(ERRORS), client() as connection:
        run(connection, system.begin)
        insert(connection, "a")
        run(connection, *system.prepare, system.commit_prepared)
    assert values(drain) == ["a"]
    assert [f.rule for f in fired] == [f"lose_reply:{system.rule.lower()}"]


# The reader connects again in one place, whichever database fails.
@pytest.mark.parametrize("name", sweep(SYSTEMS, lambda name: name == "mysql"), indirect=True)
def test_a_reader_lives_through_a_kill_of_the_server(name: str, system: System, request: pytest.FixtureRequest) -> None:
    own = request.getfixturevalue(f"new_{name}")()
    drain = system.table(own.broker, "killed")
    drain.create()
    looks: list[Poll] = []
    first, second, stop = threading.Event(), threading.Event(), threading.Event()

    def look(found: Poll) -> None:
        looks.append(found)
        (second if first.is_set() else first).set()

    reader = threading.Thread(target=drain.follow, args=(look, stop))
    reader.start()
    with closing(system.connect(own.broker, drain, None)) as connection:
        insert(connection, "a")
    assert first.wait(120)
    own.broker.kill()
    own.broker.restart()
    with closing(system.connect(own.broker, drain, None)) as connection:
        insert(connection, "b")
    assert second.wait(60)
    stop.set()
    reader.join(60)
    assert [r.value for found in looks for r in found.rows] == ["a", "b"]
