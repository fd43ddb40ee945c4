"""Outages of a database under a running pipeline: it waits, ends no query, loses and doubles nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.broker.running import SCHEMA, Running, judge, sink_of_pair
from tests.support.scans import scanned
from tests.support.servers import paused
from tests.support.sweeps import sweep

from delivered.model import patience

if TYPE_CHECKING:
    from tests.support.servers import Mysql, Postgres, PostgresPair

MECHANISMS = ["one_transaction", "two_phase"]
OUTAGES = ["kill", "stop", "pause"]


@pytest.fixture(autouse=True)
def _in_query(_outside_of_a_query: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_in_query", True)


def _server_outage(server: Any, mechanism: str, outages: int, seconds: float, how: str) -> None:
    table = server.table("id bigint")
    running = Running(server.sink(table, mechanism=mechanism))
    try:
        running.go_on()
        for _ in range(outages):
            _away(server, how, seconds)
            running.go_on()
    finally:
        with suppress(Exception):
            rows = running.stop()
    rows = running.stop()
    judge(server, table, rows)


def _away(server: Any, how: str, seconds: float) -> None:
    """Not a wait for a fact: the outage itself takes so long."""
    if how == "pause":
        with paused(server):
            time.sleep(seconds)
        return
    server.broker.kill() if how == "kill" else server.broker.stop()
    time.sleep(seconds)
    server.broker.restart()


@pytest.mark.parametrize("mechanism", sweep(MECHANISMS, lambda mechanism: mechanism == "two_phase"))
def test_primary_killed_and_standby_promoted(new_postgres_pair: Callable[..., PostgresPair], mechanism: str) -> None:
    pair = new_postgres_pair(synchronous=True)
    sink, table = sink_of_pair(pair, mechanism)
    running = Running(sink)
    running.go_on()
    pair.primary.broker.kill()
    time.sleep(3)  # the fail-over itself takes so long
    pair.fail_over()
    running.go_on()
    judge(pair.standby, table, running.stop())


@pytest.mark.matrix
@pytest.mark.parametrize(("mechanism", "how", "seconds"), [*itertools.product(MECHANISMS, OUTAGES, (5, 20, 60))])
def test_the_only_postgres_is_away(
    new_postgres: Callable[..., Postgres], mechanism: str, how: str, seconds: float
) -> None:
    _server_outage(new_postgres(), mechanism, 2, seconds, how)


@pytest.mark.matrix  # test_database_kill.py kills it; the wait is that for PostgreSQL, above
@pytest.mark.parametrize(
    ("mechanism", "how", "seconds"),
    [(mechanism, "kill", 2) for mechanism in MECHANISMS] + [*itertools.product(MECHANISMS, OUTAGES, (5, 20, 60))],
)
def test_the_only_mariadb_is_away(new_mysql: Callable[..., Mysql], mechanism: str, how: str, seconds: float) -> None:
    _server_outage(new_mysql(), mechanism, 2, seconds, how)


@pytest.mark.matrix
@pytest.mark.parametrize("seconds", [5, 20, 60])
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_fail_overs_of_some_seconds(
    new_postgres_pair: Callable[..., PostgresPair], mechanism: str, how: str, seconds: float
) -> None:
    pair = new_postgres_pair(synchronous=True)
    sink, table = sink_of_pair(pair, mechanism)
    running = Running(sink)
    running.go_on()
    pair.primary.broker.kill() if how == "kill" else pair.primary.broker.stop()
    time.sleep(seconds)  # the fail-over itself takes so long
    pair.fail_over()
    running.go_on()
    judge(pair.standby, table, running.stop())


@pytest.mark.matrix
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_standby_is_promoted_while_its_primary_stands_still(
    new_postgres_pair: Callable[..., PostgresPair], mechanism: str
) -> None:
    """The client's statement hangs at the old primary: it is given up, and the new one found, by the URL alone."""
    pair = new_postgres_pair(synchronous=True)
    sink, table = sink_of_pair(pair, mechanism)
    running = Running(sink)
    running.go_on()
    with paused(pair.primary):
        assert pair.standby.execute("SELECT pg_promote()") == [(True,)]
        running.go_on()
        rows = running.stop()
        judge(pair.standby, table, rows)
        pair.primary.broker.kill()


@pytest.mark.matrix
def test_the_database_of_an_iceberg_catalog_is_away(new_postgres: Callable[..., Postgres], tmp_path: Path) -> None:
    from delivered.connectors.iceberg import CONNECTOR

    server = new_postgres()
    catalog = {
        "catalog.type": "sql",
        "catalog.uri": server.url.replace("postgresql://", "postgresql+psycopg://"),
        "catalog.warehouse": f"file://{tmp_path}/lake",
    }
    sink = CONNECTOR.sink({"table": "shop.orders", "ifNotExists": "true", **catalog})
    sink.ready_target(SCHEMA)
    running = Running(sink)
    running.go_on()
    for how in ("kill", "stop"):
        _away(server, how, 5)
        running.go_on()
    rows = running.stop()
    found = sorted(i for batch in scanned(sink) for i in batch.column("id").to_pylist())
    assert found == [*range(rows)]
