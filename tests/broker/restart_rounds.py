"""Kafka killed under many pipelines, each in a chosen phase of its batch, and recovered right after the restart.

One kill of the broker is one round of every pipeline. A pipeline writes through the product's own engine, on its own
topic and ledger, as Spark would drive it. The judge is a read_committed reader of its own: per pipeline, which rows are
missing, which are there twice, and which queries ended with an error.

    python -m tests.broker.restart_rounds --seed 1 --kills 20 --pipelines 24 --abort-interval 500 --out rounds.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.broker.sink_help import Rig
from tests.support.servers import Kafka

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction, end_request
from delivered.connectors.kafka import committer, store
from delivered.engine.context import Committers, Context
from delivered.engine.decide import commit_batch
from delivered.model.errors import DeliveredError
from delivered.model.identity import Work
from delivered.model.patience import in_query
from delivered.model.work import Outcome, Prepared, ShardMessage
from delivered_lab.brokers import kafka as server

INTERVAL = "transaction.abort.timed.out.transaction.cleanup.interval.ms"
"""How often a coordinator looks for transactions that have expired; 10,000 by default."""
STARTS_MAX = 4
"""After a kill, until a pipeline has run two batches: short transactions may expire once more on a busy machine."""
PHASES = ("prepared", "decided", "applying", "applied", "logged", "going on")
"""What a pipeline does when its broker is killed. `going on`: its driver survives; all others are killed, too."""


class Halt(BaseException):
    """The driver is killed here."""


class Halting:
    """A committer whose driver dies before it sends anything."""

    def __init__(self, inner: Committers) -> None:
        self._inner = inner

    def commit_all(self, shards: Sequence[tuple[Work, Prepared]]) -> Sequence[Outcome[None]]:
        raise Halt

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        raise Halt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def send_ends(kafka: Any, handles: Sequence[Transaction], answers: int) -> None:
    """Send EndTxn(commit) for all at once, and return as soon as some of them are answered."""
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    wire.find_coordinators([h.transactional_id for h in handles])
    sent = [wire.post(end_request(h, commit=True), wire.coordinator(h.transactional_id)) for h in handles]
    for pending in sent[:answers]:
        pending.answer(30)


@dataclass
class Pipeline:
    rig: Rig
    number: int
    context: Context | None = None
    batch: int = 0
    phase: str = ""
    committed: bool = False
    expected: Counter[bytes] = field(default_factory=Counter)
    messages: list[ShardMessage] = field(default_factory=list)
    missing: set[bytes] = field(default_factory=set)
    doubled: set[bytes] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def shards(self) -> range:
        return range(1 + self.number % 3 // 2)

    def owner(self) -> str:
        return f"{self.number}-{uuid.uuid4().hex[:8]}"

    def opened(self) -> Context:
        if self.context is None:
            self.context = self.rig.context(self.owner())
        return self.context

    def prepare(self, first: bool) -> None:
        self.messages = self.rig.write(self.rig.plan(self.opened(), self.batch, first), self.shards)

    def prepare_next(self) -> None:
        try:
            self.prepare(self.context is None)
        except DeliveredError as error:
            self.errors.append(str(error)[:400])
            self.stopped = True

    def commit(self, context: Context | None = None) -> None:
        commit_batch(context or self.opened(), self.batch, f"o{self.batch}", list(self.messages))

    def count(self) -> None:
        """The batch has to be visible once from here on."""
        self.expected.update(v for s in self.shards for v in self.rig.values_of(self.batch, s) if v is not None)
        self.batch += 1

    def forget_driver(self) -> None:
        if self.context is not None:
            self.context.ledger.close()
            self.context.committers.close()
        self.context = None

    def until_killed(self, phase: str) -> None:
        """The batch up to its phase."""
        self.phase, self.committed = phase, False
        if phase == "prepared":
            return
        try:
            context = self.opened()
            if phase in ("decided", "applying"):
                self.commit(replace(context, committers=Halting(context.committers)))  # type: ignore[arg-type]
            else:
                self.commit()
                self.committed = True
        except Halt:
            pass
        except DeliveredError as error:
            self.errors.append(str(error)[:400])

    def recover(self, pause_s: float) -> None:
        """A new driver, or the surviving one, finishes the batch and runs one more. The next one reuses the ids."""
        time.sleep(pause_s)
        logged = self.committed and self.phase in ("logged", "going on")
        first = not (logged and self.phase == "going on")
        if first:
            self.forget_driver()
        for _ in range(STARTS_MAX):
            try:
                if not logged:
                    self.prepare(first=True)
                    self.commit()
                    first = False
                self.count()
                logged = False
                self.prepare(first)
                self.commit()
                self.count()
                return
            except DeliveredError as error:
                self.errors.append(str(error)[:400])
                logged, first = False, True
                self.forget_driver()
        self.stopped = True

    def judge(self, visible: Counter[bytes]) -> tuple[int, int]:
        """Rows newly missing, newly doubled or unexpected."""
        missing = {v for v in self.expected if v not in visible}
        # Of a batch that never ended, some shards may be visible: once.
        unfinished = {v for s in self.shards for v in self.rig.values_of(self.batch, s)} if self.stopped else set()
        doubled = {v for v, n in visible.items() if n > self.expected.get(v, 0) + (v in unfinished)}
        new = len(missing - self.missing), len(doubled - self.doubled)
        self.missing, self.doubled = missing, self.doubled | doubled
        return new


class Reader:
    """read_committed, of all topics, continuing where it stopped."""

    def __init__(self, bootstrap: str, topics: Sequence[str], partitions: int) -> None:
        self._bootstrap = bootstrap
        self._at = {(t, p): 0 for t in topics for p in range(partitions)}
        self.seen: dict[str, Counter[bytes]] = {t: Counter() for t in topics}

    def read(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(t, p, o) for (t, p), o in self._at.items()])
        ended: set[tuple[str, int]] = set()
        while len(ended) < len(self._at):
            for m in consumer.consume(10_000, 0.2):
                if m.error():
                    ended.add((m.topic(), m.partition()))
                else:
                    self.seen[m.topic()][m.value()] += 1
                    self._at[m.topic(), m.partition()] = m.offset() + 1
        consumer.close()


def run(
    kafka: Any,
    *,
    seed: int,
    kills: int,
    seconds: float,
    pipelines: int,
    kill: Any,
    restart: Any,
    options: dict[str, str],
    replication: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Rounds against one cluster. `kill` and `restart`: of its broker, or of one of them. `report`: after each kill."""
    chosen = random.Random(seed)
    in_query()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    names = [f"r{seed}-{i}-{uuid.uuid4().hex[:4]}" for i in range(pipelines)]
    for future in admin.create_topics([NewTopic(n, 2, replication) for n in names]).values():
        future.result(120)
    all_of = [
        Pipeline(Rig(kafka, n, pipeline=n, options={**options, **({"transactionTimeout": "6"} if i % 2 else {})}), i)
        for i, n in enumerate(names)
    ]
    reader = Reader(kafka.bootstrap, names, 2)
    rounds: list[dict[str, Any]] = []
    with ThreadPoolExecutor(8) as few, ThreadPoolExecutor(pipelines) as many:
        list(few.map(lambda p: (p.prepare(True), p.commit(), p.count()), all_of))
        deadline = time.monotonic() + seconds
        for number in range(kills):
            if time.monotonic() > deadline:
                break
            phases = [chosen.choice(PHASES) for _ in all_of]
            errors = [len(p.errors) for p in all_of]
            list(few.map(Pipeline.prepare_next, [p for p in all_of if not p.stopped]))
            running = [p for p in all_of if not p.stopped]
            # These phases are complete before the kill; of `applying`, all ends are on their way then.
            early = [p for p in running if phases[p.number] in ("prepared", "decided", "applying")]
            list(few.map(Pipeline.until_killed, early, [phases[p.number] for p in early]))
            handles = [
                Transaction.of(m.prepared)
                for p in early
                for m in p.messages
                if p.phase == "applying" and m.prepared is not None
            ]
            late = [many.submit(p.until_killed, phases[p.number]) for p in running if p not in early]
            after_s, answers = chosen.uniform(0, 0.3), chosen.randrange(0, max(1, len(handles) // 2))
            time.sleep(after_s)
            send_ends(kafka, handles, answers)
            kill()
            if chosen.random() < 0.7:
                time.sleep(6)  # some transactions expire before the broker is back
            at = [time.monotonic()]
            restart()
            at.append(time.monotonic())
            pauses = [chosen.choice((0.0, 0.0, 0.1, 0.5, 1.0, 2.0)) for _ in all_of]
            for f in late:
                f.result()
            list(many.map(Pipeline.recover, running, [pauses[p.number] for p in running]))
            time.sleep(0.3)
            at.append(time.monotonic())
            reader.read()
            at.append(time.monotonic())
            took = ", ".join(
                f"{what} {b - a:.0f} s"
                for what, (a, b) in zip(("start", "recovery", "read"), pairwise(at), strict=True)
            )
            for p in running:
                pause, n = pauses[p.number], errors[p.number]
                missing, doubled = p.judge(reader.seen[p.rig.topic])
                rounds.append(
                    {
                        "kill": number,
                        "pipeline": p.number,
                        "phase": p.phase,
                        "start_s": pause,
                        "missing": missing,
                        "doubled": doubled,
                        **({"errors": p.errors[n:]} if p.errors[n:] else {}),
                    }
                )
            bad = [r for r in rounds if r["kill"] == number and (r["missing"] or r["doubled"] or _unexpected(r))]
            print(
                f"kill {number}: after {after_s * 1000:.0f} ms, {answers} ends answered; {took}; "
                f"{len(bad)} of {len(running)} rounds bad",
                flush=True,
            )
            report(summary(seed, all_of, rounds))
            for r in bad[:6]:
                print("   ", json.dumps(r)[:420], flush=True)
    time.sleep(1)
    reader.read()
    for p in all_of:
        p.judge(reader.seen[p.rig.topic])
        p.forget_driver()
    found = summary(seed, all_of, rounds)
    report(found)
    return found


def summary(seed: int, all_of: Sequence[Pipeline], rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seed": seed,
        "kills": len({r["kill"] for r in rounds}),
        "rounds": len(rounds),
        "rows": sum(sum(p.expected.values()) for p in all_of),
        "lost_rows": sum(len(p.missing) for p in all_of),
        "doubled_rows": sum(len(p.doubled) for p in all_of),
        "rounds_with_missing_rows": sum(1 for r in rounds if r["missing"]),
        "rounds_with_doubled_rows": sum(1 for r in rounds if r["doubled"]),
        "stopped_for_good": sum(p.stopped for p in all_of),
        "rounds_with_unexpected_errors": sum(1 for r in rounds if _unexpected(r)),
        "errors": Counter(e.split("]")[0].lstrip("[") for r in rounds for e in r.get("errors", ())),
        "by_phase": {
            f: {
                "rounds": sum(1 for r in rounds if r["phase"] == f),
                "bad": sum(1 for r in rounds if r["phase"] == f and (r["missing"] or r["doubled"])),
            }
            for f in PHASES
        },
        "bad": [r for r in rounds if r["missing"] or r["doubled"]],
    }


def _unexpected(found: dict[str, Any]) -> bool:
    """A transaction of six seconds may expire while its broker is away; the next start writes it again."""
    return any("PROMISE_EXPIRED" not in e for e in found.get("errors", ()))


@dataclass
class Cluster:
    """Of three brokers, one or all are killed, by turns."""

    kafka: Any
    brokers: Sequence[Any]
    kills: int = 0

    def kill(self) -> None:
        self.kills += 1
        hit = self.brokers if self.kills % 2 else [self.brokers[self.kills // 2 % len(self.brokers)]]
        with ThreadPoolExecutor(len(hit)) as pool:
            list(pool.map(lambda b: b.kill(), hit))

    def restart(self) -> None:
        dead = [b for b in self.brokers if not psutil.pid_exists(b.pid)]
        with ThreadPoolExecutor(len(dead)) as pool:
            list(pool.map(lambda b: b.restart(), dead))

    def stop(self) -> None:
        for b in self.brokers:
            b.kill()


def start(folder: Path, brokers: int, properties: dict[str, str]) -> Cluster:
    if brokers == 1:
        kafka = Kafka.start(folder / "kafka", properties)
        return Cluster(kafka, [kafka.broker])
    from tests.support.three_brokers import ThreeBrokers

    three = ThreeBrokers(folder, **properties)
    return Cluster(three, [three.broker(n) for n in (1, 2, 3)])


def use_version(kafka: str) -> None:
    """The brokers that this process starts."""
    if kafka != server.VERSION:
        server.VERSION = kafka
        server.ARTIFACTS = [("org.apache.kafka", "kafka_2.13", kafka), *server.ARTIFACTS[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no further kill after this time")
    parser.add_argument("--pipelines", type=int, default=24)
    parser.add_argument("--abort-interval", type=int, default=10_000, help="of the coordinator, milliseconds")
    parser.add_argument("--brokers", type=int, default=1, choices=(1, 3))
    parser.add_argument("--kafka", default=server.VERSION, help="its version")
    parser.add_argument("--client", default="arrow", choices=("arrow", "librdkafka"))
    parser.add_argument("--out", type=Path, default=None, help="a JSON file; results are added to its list")
    given = parser.parse_args()
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")  # as all tests
    # A hole in a partition would cost minutes, a transaction of the ledger expires after 25 s.
    for module in (store, committer, committer, store):
        module.RECOVERY_WAIT_S = 60.0
    use_version(given.kafka)
    interval = {INTERVAL: str(given.abort_interval)}
    with tempfile.TemporaryDirectory(prefix="delivered-rounds-") as folder:
        cluster = start(Path(folder), given.brokers, interval)
        kind = {
            "kafka": given.kafka,
            "brokers": given.brokers,
            "abort_interval_ms": given.abort_interval,
            "client": given.client,
        }
        known = json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else []

        def report(found: dict[str, Any]) -> None:
            if given.out is not None:
                given.out.write_text(json.dumps([*known, {**kind, **found}], indent=1) + "\n")

        try:
            found = run(
                cluster.kafka,
                seed=given.seed,
                kills=given.kills,
                seconds=given.seconds,
                pipelines=given.pipelines,
                kill=cluster.kill,
                restart=cluster.restart,
                options={"client": given.client},
                replication=given.brokers,
                report=report,
            )
        finally:
            cluster.stop()
    print(json.dumps({k: v for k, v in found.items() if k != "bad"}, indent=1))


if __name__ == "__main__":
    main()
