"""Outages of a database under a running pipeline: it waits, ends no query, loses and doubles nothing."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.support.servers import paused
from tests.support.sinks import Rig
from tests.support.sweeps import sweep

from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model import patience
from delivered.model.work import CheckpointView

if TYPE_CHECKING:
    from tests.support.servers import Mysql, Postgres, PostgresPair

SHARDS, ROWS = 2, 40
SCHEMA = pa.schema([("id", pa.int64())])
MECHANISMS = ["one_transaction", "two_phase"]
OUTAGES = ["kill", "stop", "pause"]


@pytest.fixture(autouse=True)
def _in_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_in_query", True)


class Running(threading.Thread):
    """A pipeline, batch after batch, as by Spark, until it is stopped or raises.

    Attributes:
        batch: number of finished batches.
    """

    def __init__(self, sink: Any) -> None:
        super().__init__(daemon=True)
        self.rig = Rig(sink, schema=SCHEMA)
        self.batch = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            context, since = self.rig.context(), None
            for batch in itertools.count():
                if self._stopping.is_set():
                    return
                offsets = json.dumps({"0": (batch + 1) * SHARDS * ROWS})
                view = CheckpointView("i0", batch, offsets, batch - 1 if batch else None)
                plan = plan_batch(context, view, first=batch == 0, since=since)
                since = plan.epoch
                shards = [
                    write_shard(self.rig.sink, plan, shard, 0, _pieces(batch, shard), SCHEMA) for shard in range(SHARDS)
                ]
                commit_batch(context, batch, offsets, shards)
                self.batch = batch + 1
        except BaseException as error:
            self.error = error

    def go_on(self, batches: int = 3, timeout_s: float = 150) -> None:
        """Wait until so many more batches are finished."""
        until, deadline = self.batch + batches, time.monotonic() + timeout_s
        while self.batch < until:
            if self.error is not None:
                raise self.error
            assert time.monotonic() < deadline, f"batch {self.batch} does not end"
            time.sleep(0.02)

    def stop(self) -> int:
        """Number of rows that must be visible."""
        self._stopping.set()
        self.join(150)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.batch * SHARDS * ROWS


def _pieces(batch: int, shard: int) -> Iterator[pa.RecordBatch]:
    """A shard's rows, slowly enough that some outages hit the middle."""
    first = (batch * SHARDS + shard) * ROWS
    for at in range(first, first + ROWS, ROWS // 4):
        yield pa.record_batch([pa.array(range(at, at + ROWS // 4))], schema=SCHEMA)
        time.sleep(0.01)


def judge(server: Any, table: str, rows: int) -> None:
    """By a client that is not ours."""
    assert server.execute(f"SELECT count(*), count(DISTINCT id), min(id), max(id) FROM {table}") == [
        (rows, rows, 0, rows - 1)
    ]


def _pair_sink(pair: PostgresPair, mechanism: str) -> tuple[Any, str]:
    from delivered.connectors.postgres import CONNECTOR

    table = pair.primary.table("id bigint")
    return CONNECTOR.sink({"url": pair.url, "dbtable": table, "mechanism": mechanism}), table


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
    sink, table = _pair_sink(pair, mechanism)
    running = Running(sink)
    running.go_on()
    pair.primary.broker.kill()
    time.sleep(3)  # the fail-over itself takes so long
    pair.fail_over()
    running.go_on()
    judge(pair.standby, table, running.stop())


@pytest.mark.matrix
@pytest.mark.parametrize(("mechanism", "how", "seconds"), itertools.product(MECHANISMS, OUTAGES, (5, 20, 60)))
def test_the_only_postgres_is_away(
    new_postgres: Callable[..., Postgres], mechanism: str, how: str, seconds: float
) -> None:
    _server_outage(new_postgres(), mechanism, 2, seconds, how)


@pytest.mark.parametrize(
    ("mechanism", "how", "seconds"),
    sweep(
        [(mechanism, "kill", 2) for mechanism in MECHANISMS] + [*itertools.product(MECHANISMS, OUTAGES, (5, 20, 60))],
        lambda mechanism, how, seconds: mechanism == "two_phase" and seconds == 2,
    ),
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
    sink, table = _pair_sink(pair, mechanism)
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
    sink, table = _pair_sink(pair, mechanism)
    running = Running(sink)
    running.go_on()
    with paused(pair.primary):
        assert pair.standby.execute("SELECT pg_promote()") == [(True,)]
        running.go_on()
        rows = running.stop()
        judge(pair.standby, table, rows)
        pair.primary.broker.kill()
