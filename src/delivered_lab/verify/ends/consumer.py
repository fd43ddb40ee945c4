"""Service `consumer`: a loop over a broker's messages with an inbox; and sagas, whose workers call a shop.

What must be at the end: the effect of each message once; each saga at rest, and the shop's effects as it ended.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from delivered.patterns import inbox, saga
from delivered_lab.verify.ends import sagas
from delivered_lab.verify.ends.applications import connect, execute, server_kind
from delivered_lab.verify.ends.end import End
from delivered_lab.verify.ends.sagas import Shop, disagreements
from delivered_lab.verify.faults import Fault
from delivered_lab.verify.services import Run
from delivered_lab.verify.systems import KAFKA, SOURCE_KINDS
from delivered_lab.verify.systems.base import SourcePlace
from delivered_lab.verify.workloads import Record

MESSAGES = 24
SYSTEMS = (
    "inbox-kafka-sqlite", "inbox-kafka-postgres", "inbox-kafka-mysql", "inbox-rabbitmq-sqlite", "inbox-rocketmq-sqlite",
    "saga-sqlite", "saga-postgres", "saga-mysql",
)  # fmt: skip
MOMENTS = {"before": "F6a", "lost": "F6a", "in": "F6b", "after": "F6c"}
"""Before the call; the shop got it, but it had no effect; it had its effect; the caller has the answer."""
FORWARD = [f"{s}.do" for s in sagas.STEPS]
BACKWARD = [f"{s}.undo" for s in ("mail", "ship", "pay", "reserve")]
Point = tuple[str, str, str]
"""Id of a saga, its call, the moment."""


def database(end: End, dialect: str) -> str:
    """Address of the case's database, for `applications.connect`."""
    if dialect == "sqlite":
        return str(end.folder / "shop.db")
    server = end.environment.server(server_kind(dialect))
    return server.url if dialect == "postgres" else server.bootstrap


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
        return self.end.start("consumer", "delivered_lab.verify.ends.applications", values)

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


def _nothing(world: Inbox) -> None:
    world.rest()


def _killed(kills: Sequence[tuple[str, int]], world: Inbox) -> None:
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
        return self.end.start("worker", "delivered_lab.verify.ends.sagas", values, crash)

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


def _undisturbed(world: Sagas) -> None:
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


def faults(system: str) -> Iterator[Fault]:
    if system.startswith("saga"):
        yield Fault("none", "none", "an undisturbed run", _undisturbed)
        for place, moments in (("F6a", ("before", "lost")), ("F6b", ("in",)), ("F6c", ("after",))):
            name = {"F6a": "before-each-call", "F6b": "in-each-call", "F6c": "after-each-call"}[place]
            fires = ("worker killed",) * len(killed_everywhere(moments)[1])
            text = f"workers are killed {name.partition('-')[0]} every call of every step, compensation and question"
            yield Fault(f"killed-{name}", place, text, partial(_sagas_killed, moments), fires)
        text = "a worker is paused after an effect, until another one has finished; then it goes on"
        yield Fault("worker-paused", "F7", text, _paused, ("worker paused",))
        yield Fault("three-workers", "F7", "three workers at once", _three, ("three workers",))
        return
    yield Fault("none", "none", "an undisturbed run: every second message comes twice", _nothing)
    for name, place, kills in (
        ("before", "F6a", (("before", 4), ("before", 12))),
        ("between", "F6b", (("in", 4), ("in_late", 10), ("in", 16), ("in_late", 20))),
        ("after", "F6c", (("after", 6), ("after", 18))),
    ):
        fires = tuple(f"consumer killed {point}" for point, _ in kills)
        text = f"the consumer is killed {name} its transaction" + " and acknowledgement" * (name == "after")
        yield Fault(f"consumer-killed-{name}", place, text, partial(_killed, kills), fires)
    text = "two consumers at once get the same messages"
    yield Fault("two-consumers", "F7", text, _two, ("two consumers",))
