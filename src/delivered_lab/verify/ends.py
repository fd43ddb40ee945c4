"""Cases of both ends: which there are, and how one is run and judged.

Service `producer`: an application that writes business rows and messages, and the relay that sends them on. What must
be at the end: a business row for each request, and its message in the sink, both once.
Service `consumer`: a loop over a broker's messages with an inbox; and sagas, whose workers call a shop. What must be at
the end: the effect of each message once; each saga at rest, and the shop's effects as it ended.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from delivered import Guarantee
from delivered.patterns import inbox, outbox, saga
from delivered_lab.verify import sagas
from delivered_lab.verify.applications import connect, execute, server_kind
from delivered_lab.verify.case import Case, Environment, Result, build_result, unknown_on_error
from delivered_lab.verify.evidence import End as Ended
from delivered_lab.verify.evidence import Evidence, History, Seen, Stop, fired
from delivered_lab.verify.faults import Fault
from delivered_lab.verify.fixture import empty
from delivered_lab.verify.judge import Judgement, judge
from delivered_lab.verify.sagas import Shop, disagreements
from delivered_lab.verify.services import CONSUMER, DRIVER, LOOP_MODULE, PRODUCER, Run, VerifierError, last_words, start
from delivered_lab.verify.systems import KAFKA, SOURCE_KINDS
from delivered_lab.verify.systems.base import SourcePlace, digest, wait_for
from delivered_lab.verify.workloads import Record

MESSAGES = 24
SYSTEMS: dict[str, tuple[str, ...]] = {
    PRODUCER: ("outbox-postgres-log", "outbox-postgres-poll", "outbox-mysql-poll", "outbox-sqlite-poll"),
    CONSUMER: (
        "inbox-kafka-sqlite", "inbox-kafka-postgres", "inbox-kafka-mysql", "inbox-rabbitmq-sqlite",
        "inbox-rocketmq-sqlite", "saga-sqlite", "saga-postgres", "saga-mysql",
    ),
}  # fmt: skip
WORKLOAD = "ends"
PROCESS_TIMEOUT_S = 120.0
_CHECKERS = ("lost", "duplicated", "unexpected", "stopped_right")
_APPLICATION = "delivered_lab.verify.applications"


@dataclass
class End:
    """A case under way.

    Attributes:
        name: in the alphabet of every database and broker.
        variant: what is broken on purpose; empty: nothing.
        expected, found: effects, filled at the end.
    """

    system: str
    name: str
    folder: Path
    environment: Environment
    history: History
    stops: list[Stop] = field(default_factory=list)
    stays_down: bool = False
    expected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    _started: list[Run] = field(default_factory=list)

    @property
    def variant(self) -> str:
        return self.environment.variant

    def fire(self, name: str, **facts: Any) -> None:
        self.history.add("fault", name, Ended.OK, facts)

    def start(self, role: str, module: str, spec: Mapping[str, Any], crash: str = "") -> Run:
        """Start a program of this package, with `spec` as JSON, in a process of its own."""
        return self._run(role, [module, json.dumps(spec)], crash, {"point": spec.get("point", "")})

    def pipeline(self, file: Path, crash: str = "") -> Run:
        """Start a pipeline file without Spark."""
        return self._run(DRIVER, [LOOP_MODULE, str(file)], crash, {"crash": crash})

    def _run(self, role: str, arguments: Sequence[str], crash: str, facts: Mapping[str, str]) -> Run:
        command = [sys.executable, "-m", *arguments]
        run = start(role, len(self._started) + 1, self.folder, command, crash, self.environment.env)
        self._started.append(run)
        self.history.add(run.name, "run", Ended.STARTED, facts)
        return run

    def run_out(self, run: Run) -> str | None:
        """Wait for a pipeline to end by itself; its error code, None if it succeeded."""
        run.wait_end(PROCESS_TIMEOUT_S)
        self.history.add(run.name, "run", Ended.OK if run.code is None else Ended.FAILED, {"code": run.code})
        return run.code

    def must_end(self, run: Run, wanted: int | None = 0) -> None:
        """Wait for a program.

        Args:
            wanted: its exit code, negative for a signal; None: any.

        Raises:
            RuntimeError: it ended otherwise; the verifier cannot go on.
        """
        code = run.wait_end(PROCESS_TIMEOUT_S)
        how = Ended.OK if code == 0 else Ended.UNKNOWN if code == -signal.SIGKILL else Ended.FAILED
        self.history.add(run.name, "run", how, {"code": code})
        if wanted is not None and code != wanted:
            raise RuntimeError(f"{run.name} ended with {code}: {last_words(run)}")

    def close(self) -> None:
        """Kill what still runs, or is stopped."""
        for run in self._started:
            if run.lives:
                run.kill()


def database(end: End, dialect: str) -> str:
    """Address of the case's database, for `applications.connect`."""
    if dialect == "sqlite":
        return str(end.folder / "shop.db")
    server = end.environment.server(server_kind(dialect))
    return server.url if dialect == "postgres" else server.bootstrap


# Service `producer`.

ROWS_PER_BATCH = 3
_KILLS = (("before", 5), ("in", 10), ("in_late", 15), ("after", 20))
_BETWEEN = (
    "commit.decide:before@batch=0", "commit.decide:after@batch=1", "write.prepare:after@batch=3",
    "commit.apply:after@batch=5",
)  # fmt: skip
_AFTER = ("log:before@batch=0", "log:after@batch=2", "write.stage:before@batch=4")
"""The slot moves, or rows are deleted, after log:after, before the next batch is claimed."""


class Outbox:
    """An application with an outbox, and the relay.

    Attributes:
        address: for `applications.connect`; url: for the source.
        ids: of the messages, given out before the first request.
        lost: requests whose business rows the database lost in a fail-over, after their messages were sent on.
    """

    def __init__(self, end: End) -> None:
        self.end = end
        _, self.dialect, self.method = end.system.split("-")
        self.address = database(end, self.dialect)
        self.url = f"sqlite://{self.address}"
        if self.dialect != "sqlite":
            self.server = end.environment.server(server_kind(self.dialect))
            self.url = self.server.url
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


def _undisturbed_outbox(shop: Outbox) -> None:
    shop.serve()
    shop.deliver()


def _application_killed(shop: Outbox) -> None:
    for point, n in _KILLS:
        process = shop.application(point, n)
        shop.end.must_end(process, -signal.SIGKILL)
        shop.end.fire("application killed", point=point, n=n)
        # What it asks for again is in the outbox in one case, and deleted in the other.
        if point in ("before", "in_late"):
            shop.deliver()
    shop.serve()
    shop.deliver()


def _relay_killed(*points: str) -> tuple[Any, tuple[str, ...]]:
    def script(shop: Outbox) -> None:
        shop.serve()
        shop.killed(*points)
        shop.deliver()

    return script, tuple(f"kill@{p}" for p in points)


def _late(shop: Outbox) -> None:
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


def _server_killed(shop: Outbox) -> None:
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

    def script(shop: Outbox) -> None:
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


def _must_stop(shop: Outbox, code: str, when: str, timeline: int | None) -> None:
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


def _outbox_faults(system: str) -> Iterator[Fault]:
    _, dialect, method = system.split("-")
    yield Fault("none", "none", "an undisturbed run", _undisturbed_outbox)
    text = "the application is killed before, twice in, and after its business transaction; it is asked again"
    yield Fault("application-killed", "F1", text, _application_killed, ("application killed",) * 4)
    if dialect != "sqlite":
        text = "the database is killed in a transaction of the application, and under a batch of the relay"
        yield Fault("server-killed", "F3", text, _server_killed, ("server killed",) * 2)
    script, fires = _relay_killed(*_BETWEEN)
    yield Fault("relay-killed", "F6b", "the relay is killed at every step between reading and recording", script, fires)
    script, fires = _relay_killed(*_AFTER)
    text = "the relay is killed before and after its slot moved, or its rows were deleted"
    yield Fault("relay-killed-after", "F6c", text, script, fires)
    if dialect != "sqlite":  # SQLite has one writer: no transaction commits after a later one
        text = "a transaction stays open while later ones commit and are sent on; then it commits"
        yield Fault("late-commit", "F7", text, _late, ("application paused",))
    if method == "log":
        for name, survives in (("failed-over", True), ("failed-over-without-slot", False)):
            text = f"a standby without the last transactions is promoted, {'with' if survives else 'without'} the slot"
            yield Fault(name, "F8", text, _failed_over(survives), ("failed over",))


# Service `consumer`.

MOMENTS = {"before": "F6a", "lost": "F6a", "in": "F6b", "after": "F6c"}
"""Before the call; the shop got it, but it had no effect; it had its effect; the caller has the answer."""
FORWARD = [f"{s}.do" for s in sagas.STEPS]
BACKWARD = [f"{s}.undo" for s in ("mail", "ship", "pay", "reserve")]
Point = tuple[str, str, str]
"""Id of a saga, its call, the moment."""


class Inbox:
    """A consumer with an inbox. Every second message is in its queue twice."""

    def __init__(self, end: End) -> None:
        self.end = end
        _, self.broker, self.dialect = end.system.split("-")
        self.address = database(end, self.dialect)
        self.table, self.effects = f"inbox_{end.name}", f"effects_{end.name}"
        with contextlib.closing(connect(self.dialect, self.address)) as connection:
            execute(connection, inbox.ddl(self.dialect, self.table))
            execute(connection, f"CREATE TABLE {self.effects} (n INTEGER, message VARCHAR(64))")
            connection.commit()
        server = end.environment.server(self.broker)
        place = SourcePlace(end.name, server, end.folder / "log")
        records = [
            Record(f"m{n}", None, n, 0, raw=json.dumps({"n": n})) for n in [*range(MESSAGES), *range(1, MESSAGES, 2)]
        ]
        self.spec = {
            "role": "consumer", "dialect": self.dialect, "url": self.address, "inbox": self.table,
            "effects": self.effects, "broker": self.broker, "variant": end.variant,
        }  # fmt: skip
        if self.broker == KAFKA:
            self.spec |= {"address": server.bootstrap, "queue": f"messages-{end.name}"}
            _to_kafka(server.bootstrap, self.spec["queue"], records)
            return
        source: Any = SOURCE_KINDS[self.broker].at(place)
        source.create()
        source.send(records)
        self.spec |= {"address": server.url, "queue": place.queue, "group": f"{place.queue}-group"}

    def consumer(self, point: str = "", n: int = -1, **spec: str) -> Run:
        """Start one; it ends when nothing is left. Args: point, n: SIGKILL at this point of message n."""
        values = {**self.spec, **spec, "point": point, "n": n}
        return self.end.start("consumer", _APPLICATION, values)

    def rest(self) -> None:
        process = self.consumer()
        self.end.must_end(process)

    def gather(self) -> None:
        self.end.expected = Counter(f"effect {n}" for n in range(MESSAGES))
        with contextlib.closing(connect(self.dialect, self.address)) as connection:
            rows = execute(connection, f"SELECT n FROM {self.effects}")  # noqa: S608
        self.end.found = Counter(f"effect {n}" for (n,) in rows)

    def close(self) -> None:
        """Nothing to close."""


def _to_kafka(bootstrap: str, topic: str, records: Sequence[Record]) -> None:
    """One partition; the id is a header, as an outbox sends it."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})  # kept: without it, the request ends
    creations = admin.create_topics([NewTopic(topic, 1, 1)])
    creations[topic].result(30)
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for r in records:
        producer.produce(topic, r.value.encode(), headers={"id": r.id})
    left = producer.flush(60)
    if left:
        raise ConnectionError(f"Kafka did not confirm {left} of {len(records)} messages")


def _undisturbed_inbox(world: Inbox) -> None:
    world.rest()


def _consumer_killed(kills: Sequence[tuple[str, int]], world: Inbox) -> None:
    for point, n in kills:
        process = world.consumer(point, n)
        world.end.must_end(process, -signal.SIGKILL)
        world.end.fire(f"consumer killed {point}", n=n)
    world.rest()


def _two(world: Inbox) -> None:
    """Of Kafka both get all messages, of a queue each gets its share, with the other's repeats in it."""
    group = f"{world.spec['queue']}-second" if world.broker == KAFKA else world.spec.get("group", "")
    both = [world.consumer(), world.consumer(group=group)]
    for process in both:
        world.end.must_end(process)
    repeats = [int(p.output.read_text().split()[-1]) for p in both]
    world.end.fire("two consumers", repeats=repeats)
    world.rest()


class Sagas:
    """A saga log, and a shop."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.dialect = end.system.removeprefix("saga-")
        self.url = database(end, self.dialect)
        self.shop = Shop()
        self.log = sagas.connect(self.dialect, self.url)
        self.saga = sagas.checkout(self.shop.url)
        self.log.create()
        if self.dialect != "sqlite":  # of an earlier case
            with contextlib.closing(connect(self.dialect, self.url)) as connection:
                for table in ("delivered_saga", "delivered_saga_entry"):
                    execute(connection, f"DELETE FROM {table}")  # noqa: S608
                connection.commit()
        self.started: list[str] = []

    def begin(self, sagas: Mapping[str, Any]) -> None:
        with contextlib.closing(connect(self.dialect, self.url)) as connection:
            for id_, data in sagas.items():
                saga.begin(connection, self.saga, id=id_, data=data)
            connection.commit()
        self.started += sagas

    def worker(self, crash: str = "", **spec: Any) -> Run:
        values = {
            "dialect": self.dialect, "log": self.url, "shop": self.shop.url, "variant": self.end.variant, **spec,
        }  # fmt: skip
        return self.end.start("worker", "delivered_lab.verify.sagas", values, crash)

    def run_killed(self, points: Sequence[Point]) -> None:
        """Workers, one after the other, until one ends by itself; each of the others is killed at a point."""
        self.shop.kills |= {p for p in points if p[2] in ("lost", "in")}
        crash = ",".join(f"saga.call:{m}@id={i}@call={c}!kill" for i, c, m in points if m in ("before", "after"))
        process = self.worker(crash, kills=len(points) + 1)
        self.end.must_end(process)
        for _ in range(int(json.loads(process.output.read_text().splitlines()[-1])["killed"])):
            self.end.fire("worker killed")

    def statuses(self) -> dict[str, str]:
        with contextlib.closing(self.log.open()) as log:
            return {r.id: r.status.value for r in log.rows(list(saga.Status), 10_000)}

    def gather(self) -> None:
        """What a disagreement says is an effect that was not to be; a saga that is not at rest is lost."""
        statuses = self.statuses()
        self.end.expected = Counter(self.started)
        at_rest = [i for i, status in statuses.items() if status in ("complete", "compensated")]
        self.end.found = Counter([*at_rest, *disagreements(self.shop, statuses)])

    def close(self) -> None:
        self.shop.close()


def killed_everywhere(moments: Sequence[str]) -> tuple[dict[str, Any], list[Point]]:
    """A saga for each point: of those that end well at every do, of those that turn back at every undo, too; the ask,
    and a second kill in the same call."""
    sagas_started: dict[str, Any] = {}
    points: list[Point] = []

    def add(name: str, data: dict[str, Any], *kills: tuple[str, str]) -> None:
        id_ = f"{name}-{len(sagas_started)}"
        sagas_started[id_] = data
        points.extend((id_, call, moment) for call, moment in kills)

    for moment in moments:
        for call in FORWARD:
            add("good", {"flaky": ["pay"]}, (call, moment))
        for call in (*FORWARD[:-1], *BACKWARD):
            add("bad", {"fail": "confirm", "flaky": ["pay"], "silent": True}, (call, moment))
        add("asked", {}, ("ship.do", "in"), ("ship.ask", moment))
        add("asked", {}, ("ship.do", "lost"), ("ship.ask", moment))
        add("again", {"fail": "confirm"}, ("pay.undo", "in"), ("mail.do", moment))
    add("quiet", {})
    add("quiet", {"fail": "confirm"})
    add("doubt", {"flaky": ["pay"], "denies": "pay"}, ("reserve.do", "in"))
    return sagas_started, points


def _sagas_killed(moments: Sequence[str], world: Sagas) -> None:
    started, points = killed_everywhere(moments)
    world.begin(started)
    world.run_killed(points)


def _undisturbed_sagas(world: Sagas) -> None:
    world.begin({"good": {}, "bad": {"fail": "confirm"}})
    world.run_killed([])


def _paused(world: Sagas) -> None:
    """After the effect of pay, until another worker turned back and finished."""
    world.shop.pauses.add(("a", "pay.do"))
    world.begin({"a": {"fail": "ship"}, "b": {}})
    first = world.worker()
    try:
        first.wait_stopped()
        world.end.fire("worker paused")
        second = world.worker()
        world.end.must_end(second)
    finally:
        first.resume()
    world.end.must_end(first)


def _three(world: Sagas) -> None:
    world.begin({f"s{i}": {"fail": "confirm"} if i % 3 == 0 else {} for i in range(30)})
    workers = [world.worker(margin_s=60) for _ in range(3)]
    for worker in workers:
        world.end.must_end(worker)
    world.end.fire("three workers")
    ran = {i: {p for j, _, p in world.shop.calls if j == i} for i in world.started}
    world.shop.effects += [(i, "two workers") for i, pids in ran.items() if len(pids) != 1]


def _saga_faults() -> Iterator[Fault]:
    yield Fault("none", "none", "an undisturbed run", _undisturbed_sagas)
    for place, moments in (("F6a", ("before", "lost")), ("F6b", ("in",)), ("F6c", ("after",))):
        name = {"F6a": "before-each-call", "F6b": "in-each-call", "F6c": "after-each-call"}[place]
        fires = ("worker killed",) * len(killed_everywhere(moments)[1])
        text = f"workers are killed {name.partition('-')[0]} every call of every step, compensation and question"
        yield Fault(f"killed-{name}", place, text, partial(_sagas_killed, moments), fires)
    text = "a worker is paused after an effect, until another one has finished; then it goes on"
    yield Fault("worker-paused", "F7", text, _paused, ("worker paused",))
    yield Fault("three-workers", "F7", "three workers at once", _three, ("three workers",))


def _inbox_faults() -> Iterator[Fault]:
    yield Fault("none", "none", "an undisturbed run: every second message comes twice", _undisturbed_inbox)
    for name, place, kills in (
        ("before", "F6a", (("before", 4), ("before", 12))),
        ("between", "F6b", (("in", 4), ("in_late", 10), ("in", 16), ("in_late", 20))),
        ("after", "F6c", (("after", 6), ("after", 18))),
    ):
        fires = tuple(f"consumer killed {point}" for point, _ in kills)
        text = f"the consumer is killed {name} its transaction" + " and acknowledgement" * (name == "after")
        yield Fault(f"consumer-killed-{name}", place, text, partial(_consumer_killed, kills), fires)
    text = "two consumers at once get the same messages"
    yield Fault("two-consumers", "F7", text, _two, ("two consumers",))


# Of both.


def _faults(system: str) -> Iterator[Fault]:
    if system.startswith("outbox"):
        return _outbox_faults(system)
    return _saga_faults() if system.startswith("saga") else _inbox_faults()


def cases(service: str, seed: int) -> list[Case]:
    return [
        Case(system, Guarantee.EXACTLY_ONCE, WORKLOAD, fault, seed, service)
        for system in SYSTEMS[service]
        for fault in _faults(system)
    ]


def run_case(case: Case, environment: Environment) -> Result:
    """Run and judge a case of an end. An error in judging gives unknown, never a pass."""
    started_s = time.monotonic()
    environment.next_case()
    folder = environment.folder / case.name
    empty(folder)
    with History(folder / "history.jsonl") as history, contextlib.ExitStack() as stack:
        end = End(case.sink, digest(f"{case.name}{time.time_ns()}"), folder, environment, history)
        stack.callback(end.close)

        def judged() -> Judgement:
            world = _world(case, end)
            stack.callback(world.close)
            case.fault.script(world)
            world.gather()
            return judge(_evidence(end, case.fault.requires), _CHECKERS)

        judgement = unknown_on_error(folder, judged)
    result = build_result(case, folder, started_s, judgement)
    result.faults = fired(history)
    result.fired, result.final_read = len(result.faults), bool(end.expected)
    result.sent, result.delivered = end.expected.total(), end.found.total()
    if end.stays_down:
        result.lost, result.undelivered = 0, result.lost
    result.save()
    return result


def _world(case: Case, end: End) -> Outbox | Inbox | Sagas:
    if case.service == PRODUCER:
        return Outbox(end)
    return Sagas(end) if case.sink.startswith("saga") else Inbox(end)


def _evidence(end: End, required: Sequence[str]) -> Evidence:
    return Evidence(
        Guarantee.EXACTLY_ONCE,
        expected=end.expected,
        final=[Seen(effect) for effect in end.found.elements()],
        required=required,
        fired=fired(end.history),
        stops=end.stops,
        stays_down=end.stays_down,
    )
