"""Service `producer`: an application that writes business rows and messages, and the relay that sends them on.

What must be at the end: a business row for each request, and its message in the sink, both once.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from delivered.patterns import outbox
from delivered_lab.verify.ends.applications import connect, execute, server_kind
from delivered_lab.verify.ends.end import End
from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.faults import Fault
from delivered_lab.verify.services import Run, VerifierError
from delivered_lab.verify.systems.base import wait_for

MESSAGES = 24
ROWS_PER_BATCH = 3
SYSTEMS = ("outbox-postgres-log", "outbox-postgres-poll", "outbox-mysql-poll", "outbox-sqlite-poll")
_APPLICATION = "delivered_lab.verify.ends.applications"
_KILLS = (("before", 5), ("in", 10), ("in_late", 15), ("after", 20))
_BETWEEN = (
    "commit.decide:before@batch=0", "commit.decide:after@batch=1", "write.prepare:after@batch=3",
    "commit.apply:after@batch=5",
)  # fmt: skip
_AFTER = ("log:before@batch=0", "log:after@batch=2", "write.stage:before@batch=4")
"""The slot moves, or rows are deleted, after log:after, before the next batch is claimed."""


class Shop:
    """
    Attributes:
        address: for `applications.connect`; url: for the source.
        ids: of the messages, given out before the first request.
        lost: requests whose business rows the database lost in a fail-over, after their messages were sent on.
    """

    def __init__(self, end: End) -> None:
        self.end = end
        _, self.dialect, self.method = end.system.split("-")
        if self.dialect == "sqlite":
            self.address = str(end.folder / "shop.db")
            self.url = f"sqlite://{self.address}"
        else:
            self.server = end.environment.server(server_kind(self.dialect))
            self.url = self.server.url
            self.address = self.url if self.dialect == "postgres" else self.server.bootstrap
        self.box, self.orders = f"box_{end.name}", f"orders_{end.name}"
        self.ids = [str(outbox.new_id()) for _ in range(MESSAGES)]
        self.sink = end.folder / "sink.db"
        self.lost: Sequence[int] = ()
        self._polled = ""
        self.execute(outbox.ddl(self.dialect, outbox.Layout(table=self.box)))
        self.execute(f"CREATE TABLE {self.orders} (n INTEGER, message VARCHAR(64))")

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(connect(self.dialect, self.address)) as connection:
            rows = execute(connection, statement)
            connection.commit()
            return rows

    def application(
        self, point: str = "", n: int = -1, numbers: Sequence[int] | None = None, stops: bool = False
    ) -> Run:
        """Start one; it serves the requests with these numbers.

        Args:
            point, n: SIGKILL, or with `stops` SIGSTOP, at this point of request n.
        """
        spec = {
            "role": "application", "dialect": self.dialect, "url": self.address, "outbox": self.box,
            "orders": self.orders, "ids": self.ids, "numbers": list(numbers or range(MESSAGES)),
            "asks": self.end.variant != "id_per_try", "variant": self.end.variant, "point": point, "n": n,
            "stops": stops,
        }  # fmt: skip
        return self.end.start("application", _APPLICATION, spec)

    def serve(self, numbers: Sequence[int] | None = None) -> None:
        """Without faults, to the end."""
        process = self.application(numbers=numbers)
        self.end.must_end(process)

    def relay(self, crash: str = "", timeline: int | None = None) -> Run:
        """Start it. Its pipeline reads what is there, and ends."""
        file = self.end.folder / "relay.yaml"
        source = {"format": "outbox", "url": self.url, "dbtable": self.box, "method": self.method}
        line = {} if timeline is None else {"timeline": timeline}
        pipeline = {
            "pipeline": f"relay-{self.end.name}", "guarantee": "exactly_once",
            "checkpoint": str(self.end.folder / "checkpoint"),
            "source": {**source, **line, "maxOffsetsPerTrigger": ROWS_PER_BATCH},
            "transform": {"arrow": "delivered_lab.verify.workloads:values"},
            "sinks": [{"format": "sqlite", "path": str(self.sink), "table": "messages"}],
        }  # fmt: skip
        file.write_text(json.dumps(pipeline), encoding="utf-8")
        return self.end.pipeline(file, crash)

    def deliver(self, most: int = 4) -> None:
        """Run the relay until it succeeds."""
        if self.end.variant == "polling_by_sequence":
            self._poll_by_sequence()
            return
        code: str | None = "?"
        for _ in range(most):
            code = self.end.run_out(self.relay())
            if code is None:
                break
        self.end.stops.append(Stop((), code, "at the end"))

    def killed(self, *points: str) -> None:
        """Run the relay, and kill it at each point in turn."""
        left = [f"{p}!wait" for p in points]
        while left:
            run = self.relay(",".join(left))
            hit = run.wait_hit(60.0)
            if hit is None:
                raise VerifierError("POINT_MISSED.BEFORE", remaining=left[0], output=run.output.read_text()[-500:])
            run.kill()
            self.end.fire(f"kill@{hit[1].point.partition('!')[0]}")
            left = [p for p in left if p != hit[1].point]

    def _poll_by_sequence(self) -> None:
        """Broken on purpose: what an increasing id finds. A transaction that commits late is skipped."""
        with contextlib.closing(sqlite3.connect(self.sink)) as sink:
            sink.execute("CREATE TABLE IF NOT EXISTS messages (value BLOB)")
            after = self._polled
            for id_, n in self.execute(f"SELECT id, aggregateid FROM {self.box} ORDER BY id"):  # noqa: S608
                if str(id_) > after:
                    sink.execute("INSERT INTO messages VALUES (?)", (json.dumps({"n": int(n)}),))
                    self._polled = str(id_)
            sink.commit()

    def gather(self) -> None:
        """What must be, and what is."""
        end = self.end
        numbers = [n for (n,) in self.execute(f"SELECT n FROM {self.orders}")]  # noqa: S608
        end.expected = Counter(f"message {n}" for n in range(MESSAGES))
        end.expected.update(f"order {n}" for n in range(MESSAGES) if n not in self.lost)
        end.found = Counter(f"order {n}" for n in numbers)
        with contextlib.closing(sqlite3.connect(self.sink)) as sink:
            there = sink.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone()
            values = [v for (v,) in sink.execute("SELECT value FROM messages")] if there else []
        end.found.update(f"message {json.loads(v)['n']}" for v in values)

    def close(self) -> None:
        """A slot that nobody reads holds WAL back."""
        if self.method == "log":
            self.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "  # noqa: S608
                f"WHERE database = current_database() AND slot_name LIKE '%{self.end.name}%' AND NOT active"
            )


def _nothing(shop: Shop) -> None:
    shop.serve()
    shop.deliver()


def _application_killed(shop: Shop) -> None:
    for point, n in _KILLS:
        process = shop.application(point, n)
        shop.end.must_end(process, -signal.SIGKILL)
        shop.end.fire("application killed", point=point, n=n)
        # What it asks for again is in the outbox in one case, and deleted in the other.
        if point in ("before", "in_late"):
            shop.deliver()
    shop.serve()
    shop.deliver()


def _killed(*points: str) -> tuple[Any, tuple[str, ...]]:
    def script(shop: Shop) -> None:
        shop.serve()
        shop.killed(*points)
        shop.deliver()

    return script, tuple(f"kill@{p}" for p in points)


def _late(shop: Shop) -> None:
    """Its ids are lower than those of transactions that commit before it."""
    shop.serve([MESSAGES - 1])
    shop.deliver()  # a slot cannot be made while a transaction is open
    late = shop.application("in_late", 0, numbers=[0], stops=True)
    try:
        late.wait_stopped()
        shop.end.fire("application paused")
        shop.serve(range(1, MESSAGES // 2))
        shop.deliver()
    finally:
        late.resume()
    shop.end.must_end(late)
    shop.serve(range(MESSAGES // 2, MESSAGES))
    shop.deliver()


def _server_killed(shop: Shop) -> None:
    """In a transaction of the application, and while the relay holds a batch that is not decided."""
    half = range(MESSAGES // 2)
    process = shop.application("in_late", 5, numbers=half, stops=True)
    process.wait_stopped()
    shop.server.kill()
    shop.server.restart()
    shop.end.fire("server killed", during="application")
    process.resume()
    shop.end.must_end(process, None)  # its connection is lost; the client asks again
    shop.serve(half)
    run = shop.relay("commit.decide:before@batch=1!wait")
    hit = run.wait_hit(60.0)
    if hit is None:
        raise VerifierError("POINT_MISSED.ENDED", output=run.output.read_text()[-500:])
    shop.server.kill()
    shop.server.restart()
    shop.end.fire("server killed", during="relay")
    run.go_on(hit[0])
    shop.end.run_out(run)
    shop.serve()
    shop.deliver()


def _failed_over(slot_survives: bool) -> Any:
    """A standby without the last transactions is promoted: their positions in the log are given out again."""

    def script(shop: Shop) -> None:
        end, server = shop.end, shop.server
        third = MESSAGES // 3
        shop.serve(range(third))
        shop.deliver()
        data, standby = server.folder / "data", end.folder / "standby"
        server.stop()
        shutil.copytree(data, standby)
        server.restart()
        shop.serve(range(third, 2 * third))
        shop.deliver()
        server.kill()
        promote(data, standby, slot_survives)
        server.restart()
        wait_for(lambda: shop.execute("SELECT pg_is_in_recovery()") == [(False,)], 60.0, "the standby is promoted")
        end.fire("failed over", slot=slot_survives)
        shop.lost = range(third, 2 * third)
        # The new primary's log passes the old positions.
        shop.execute(f"CREATE TABLE noise_{end.name} AS SELECT repeat('x', 1000) FROM generate_series(1, 2000)")  # noqa: S608
        _must_stop(shop, "OUTBOX_TIMELINE", "after the fail-over", None)
        shop.serve(range(2 * third, MESSAGES))
        timeline = int(str(shop.execute("SELECT pg_walfile_name(pg_current_wal_lsn())")[0][0])[:8], 16)
        if slot_survives:
            code = end.run_out(shop.relay(timeline=timeline))
            end.stops.append(Stop((), code, "once a person has accepted the timeline"))
        else:
            _must_stop(shop, "OUTBOX_SLOT_MISSING", "once a person has accepted the timeline", timeline)
            end.stays_down = True

    return script


def _must_stop(shop: Shop, code: str, when: str, timeline: int | None) -> None:
    shop.end.stops.append(Stop((code,), shop.end.run_out(shop.relay(timeline=timeline)), when))


def promote(data: Path, standby: Path, slot_survives: bool) -> None:
    """Put the stopped copy of a PostgreSQL server in place of its folder, so that it starts on a new timeline."""
    owner = data.stat()
    shutil.rmtree(data)
    shutil.copytree(standby, data)
    if not slot_survives:
        shutil.rmtree(data / "pg_replslot")
        (data / "pg_replslot").mkdir()
    (data / "recovery.signal").touch()
    with (data / "postgresql.conf").open("a") as file:
        file.write("restore_command = '/bin/false'\n")
    for path in (data, *data.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    data.chmod(0o700)


def faults(system: str) -> Iterator[Fault]:
    _, dialect, method = system.split("-")
    yield Fault("none", "none", "an undisturbed run", _nothing)
    text = "the application is killed before, twice in, and after its business transaction; it is asked again"
    yield Fault("application-killed", "F1", text, _application_killed, ("application killed",) * 4)
    if dialect != "sqlite":
        text = "the database is killed in a transaction of the application, and under a batch of the relay"
        yield Fault("server-killed", "F3", text, _server_killed, ("server killed",) * 2)
    script, fires = _killed(*_BETWEEN)
    yield Fault("relay-killed", "F6b", "the relay is killed at every step between reading and recording", script, fires)
    script, fires = _killed(*_AFTER)
    text = "the relay is killed before and after its slot moved, or its rows were deleted"
    yield Fault("relay-killed-after", "F6c", text, script, fires)
    if dialect != "sqlite":  # SQLite has one writer: no transaction commits after a later one
        text = "a transaction stays open while later ones commit and are sent on; then it commits"
        yield Fault("late-commit", "F7", text, _late, ("application paused",))
    if method == "log":
        for name, survives in (("failed-over", True), ("failed-over-without-slot", False)):
            text = f"a standby without the last transactions is promoted, {'with' if survives else 'without'} the slot"
            yield Fault(name, "F8", text, _failed_over(survives), ("failed over",))
