"""Applications, the relay and the server killed between an outbox and a sink; the judge uses plain SQL."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outbox_help import METHODS, Shop, Stream, shop
from tests.support.sweeps import sweep
from tests.support.zygote import Zygote

from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.patterns import outbox
from delivered_lab.verify.applications import run_process
from delivered_lab.verify.ends import promote

MESSAGES = 24
KILLS = [("before", 5), ("in", 10), ("in_late", 15), ("after", 20)]
"""Of the application, at a message."""
POINTS = [
    "commit.decide:before@batch=0", "commit.decide:after@batch=1", "log:before@batch=2", "log:after@batch=3",
    "write.prepare:after@batch=4", "recover.claim:before@batch=5", "recover.apply:before", "commit.apply:after@batch=6",
]  # fmt: skip
"""Of the relay. The slot moves, or rows are deleted, after log:after, before the next batch is claimed."""


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def delivered_ids(database: Path) -> Counter[str]:
    if not database.exists():
        return Counter()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone()
        return Counter(i for (i,) in connection.execute("SELECT id FROM events")) if there else Counter()


@pytest.mark.parametrize("how", sweep(METHODS, lambda how: how == "postgres-log"))
def test_an_order_reaches_the_sink_once_though_application_and_relay_are_killed(
    how: str, request: pytest.FixtureRequest, tmp_path: Path, zygote: Zygote
) -> None:
    box = shop(request, tmp_path, how)
    orders = f"orders_{box.table}"
    box.execute(f"CREATE TABLE {orders} (n INTEGER, message VARCHAR(64))")
    sent = [str(outbox.new_id()) for _ in range(MESSAGES)]
    application = {
        "role": "application", "dialect": box.dialect, "url": box.address, "outbox": box.table, "orders": orders,
        "ids": sent, "variant": "", "asks": True,
    }  # fmt: skip
    zygote.load("outbox", "sqlite", *([box.dialect] if box.dialect != "sqlite" else []))
    options = {"url": box.url, "dbtable": box.table, "method": box.method}
    relay: dict[str, Any] = {
        "outbox": options, "database": str(tmp_path / "sink.db"), "checkpoint": str(tmp_path / "checkpoint"),
        "guarantee": "exactly_once", "rows_per_batch": 3,
    }  # fmt: skip
    crash, kills, owners = ",".join(f"{p}!kill" for p in POINTS), 0, 0

    def run() -> None:
        nonlocal kills, owners
        while True:
            owners += 1
            code, error = zygote.run({**relay, "owner": f"owner-{owners}"}, tmp_path, crash)
            seen = delivered_ids(tmp_path / "sink.db")
            assert seen.total() == len(seen), f"a message twice after {kills} kills"
            if code == 0:
                return
            assert code == -signal.SIGKILL, error
            kills += 1

    for point, n in KILLS:
        assert run_process({**application, "point": point, "n": n})[0] == -9
        run()
    assert run_process({**application, "point": "", "n": -1})[0] == 0
    run()
    assert kills >= len(POINTS) - 1, f"{kills} of {len(POINTS)}"
    assert [m for (m,) in box.execute(f"SELECT message FROM {orders} ORDER BY n")] == sent
    assert delivered_ids(tmp_path / "sink.db") == Counter(sent)
    # What the last batch delivered is deleted before the next one, or at the next start.
    stream = Stream(box.source(), None if not box.left() else _last_offsets(tmp_path / "checkpoint"))
    assert stream.rest() == []
    stream.close()
    assert box.left() == 0


def _last_offsets(checkpoint: Path) -> Any:
    from tests.support.embedded_pipeline import Checkpoint

    found = Checkpoint(checkpoint)
    newest = found.newest("offsets")
    assert newest is not None
    return found.offsets(newest)["end"]


@pytest.mark.parametrize("how", ["postgres-log", "mysql-poll"])
def test_rows_that_were_deleted_before_the_slot_moved_do_no_harm(
    how: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delivered.connectors.outbox import slot as peek

    box = shop(request, tmp_path, how)
    stream = Stream(box.source())
    stream.rest()
    sent = box.send(1, 2)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peek, "advance", dies)
    end = stream.driver.latest(stream.at, None)
    if how == "postgres-log":
        with pytest.raises(KeyboardInterrupt):
            stream.driver.acknowledge(end)
    else:
        stream.driver.acknowledge(end)
    assert box.left() == 0
    stream.close()
    monkeypatch.undo()
    again = Stream(box.source(), stream.at)
    if how == "postgres-log":  # Spark had not logged the batch after all: the log still has its rows
        assert again.rest() == sent
    later = box.send(3)
    again.at = end if how != "postgres-log" else again.at
    assert again.rest() == later
    again.close()


def test_a_server_that_is_killed_is_waited_for_and_loses_nothing(new_postgres: Any) -> None:
    server = new_postgres()
    box = Shop("postgres", server.url, server.url, "log")
    stream = Stream(box.source())
    sent = box.send(*range(5))
    found = stream.rest(2)
    sent += box.send(*range(5, 10))
    server.broker.kill()
    server.broker.restart()
    found += stream.rest(2)
    assert found == sent
    assert box.left() == 0
    stream.close()


# Without its slot, a source is refused in test_outbox_source.py.
@pytest.mark.parametrize("slot_survives", sweep([True, False], bool))
def test_a_failover_is_never_passed_over(new_postgres: Any, tmp_path: Path, slot_survives: bool) -> None:
    """A standby without the last transactions is promoted: their positions in the WAL are given out again."""
    server = new_postgres()
    box = Shop("postgres", server.url, server.url, "log")
    stream = Stream(box.source())
    first = box.send(1)
    assert stream.rest() == first
    stream.close()
    data = (Path(server.broker.folder) / "data").resolve()
    standby = tmp_path / "standby"
    server.broker.stop()
    shutil.copytree(data, standby)
    server.broker.restart()
    again = Stream(box.source(), stream.at)
    assert len(again.rest()) == 0
    lost = box.send(2)
    assert again.rest() == lost
    again.close()

    server.broker.kill()
    promote(data, standby, slot_survives)
    server.broker.restart()
    until(lambda: box.execute("SELECT pg_is_in_recovery()") == [(False,)])
    box.execute("CREATE TABLE noise AS SELECT repeat('x', 1000) FROM generate_series(1, 2000)")

    code = "OUTBOX_TIMELINE"
    promoted = Stream(box.source(), again.at)
    with pytest.raises(InvariantBroken, match=rf"{code}.*timeline 2.*timeline 1.*00000002\.history"):
        promoted.batch()
    promoted.close()
    accepted = Stream(box.source(timeline=2), again.at)
    sent = box.send(3)
    if slot_survives:
        # What the person was asked to look at was not so; the slot's own position cannot tell.
        assert accepted.rest() == sent
    else:
        with pytest.raises(DeliveredError, match="OUTBOX_SLOT_MISSING"):
            accepted.batch()
    accepted.close()
