"""Helpers of tests of the Kafka sink and ledger."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer
from tests.kafka_tools import read_committed

from delivered.connectors.kafka import CONNECTOR
from delivered.connectors.kafka.committer import KafkaCommitter
from delivered.connectors.kafka.sink import KafkaSink
from delivered.connectors.kafka.store import KafkaStore
from delivered.connectors.kafka.topics import ledger_topic
from delivered.engine import Sinks
from delivered.engine.context import Context, open_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.rows import Rows
from delivered.model.work import Account, Action, BatchPlan, CheckpointView, Decision, Owner, Prepared, ShardMessage

EXACT = Guarantee.EXACTLY_ONCE
SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
FIRST, SECOND = Owner("first", "host-a", 1, 10), Owner("second", "host-b", 2, 20)
_names = itertools.count()


def rows(values: Iterable[bytes | None], key: bytes | None = None) -> pa.RecordBatch:
    listed = list(values)
    return pa.record_batch([pa.array([key] * len(listed), pa.binary()), pa.array(listed, pa.binary())], schema=SCHEMA)


@dataclass
class Rig:
    """A pipeline's Kafka sink, driven as by Spark: each `context` acts as a separate process."""

    kafka: Any
    topic: str
    pipeline: str = field(default_factory=lambda: f"p{next(_names)}-{time.time_ns() % 10**9}")
    incarnation: str = "i0"
    options: dict[str, str] = field(default_factory=dict)

    @property
    def sink(self) -> KafkaSink:
        made = CONNECTOR.sink({"kafka.bootstrap.servers": self.kafka.bootstrap, "topic": self.topic, **self.options})
        assert isinstance(made, KafkaSink)
        return made

    @property
    def sinks(self) -> Sinks:
        return Sinks.one(self.sink)

    @property
    def scope(self) -> Scope:
        return Scope(self.pipeline, self.sink.name, self.incarnation)

    def work(self, batch: int, shard: int = 0, attempt: int = 0, claim: int = 1) -> Work:
        return Work(self.scope, batch, shard, attempt, claim)

    def ledger(self) -> Ledger:
        return open_ledger(self.sink, self.scope)

    def committer(self) -> KafkaCommitter:
        return KafkaCommitter(self.sink.options, self.scope)

    def context(self, owner: str = "first", guarantee: Guarantee = EXACT) -> Context:
        return Context.open(self.sinks, self.scope, guarantee, Owner(owner))

    def plan(self, context: Context, batch: int, first: bool = True) -> BatchPlan:
        view = CheckpointView(self.incarnation, batch, f"o{batch}", batch - 1 if batch else None)
        return plan_batch(context, view, first=first)

    def bare_plan(self, batch: int) -> BatchPlan:
        """A plan without recovery, for tests of one transaction; the internal topic must exist."""
        return BatchPlan(self.scope, "first", EXACT, batch, f"o{batch}", Action.WRITE)

    def write(self, plan: BatchPlan, shards: Iterable[int] = (0, 1), attempt: int = 0) -> list[ShardMessage]:
        return [
            write_shard(self.sinks, plan, s, attempt, iter([Rows(rows(self.values_of(plan.batch, s)))]), SCHEMA)
            for s in shards
        ]

    @staticmethod
    def values_of(batch: int, shard: int) -> list[bytes | None]:
        return [b"%d/%d/%d" % (batch, shard, i) for i in range(20)]

    def commit(self, context: Context, batch: int, messages: list[ShardMessage]) -> Decision | None:
        return commit_batch(context, batch, f"o{batch}", list(messages))

    def run(self, context: Context, batch: int, first: bool = False) -> Decision | None:
        return self.commit(context, batch, self.write(self.plan(context, batch, first)))

    def visible(self, isolation: str = "read_committed") -> list[bytes | None]:
        return sorted((m.value() or b"") for m in read_committed(self.kafka.bootstrap, self.topic, isolation))

    def expected(self, batches: Iterable[int], shards: Iterable[int] = (0, 1)) -> list[bytes | None]:
        listed = list(shards)
        return sorted((v for b in batches for s in listed for v in self.values_of(b, s)), key=lambda v: v or b"")


def decision(scope: Scope, batch: int, owner: str = "first", participants: int = 1) -> Decision:
    handle = {"transactional_id": "x" * 40, "producer_id": 1, "epoch": 2}
    return Decision(
        scope=scope,
        owner=owner,
        guarantee=EXACT,
        batch=batch,
        offsets=json.dumps({"t": {"0": batch}}),
        participants=tuple(
            Prepared(s, 0, Fingerprint(1, s, batch), handle, sink=scope.sink) for s in range(participants)
        ),
        accounts={scope.sink: Account(Fingerprint(batch + 1, 5, 6))},
        decided_at_ms=time.time_ns() // 1_000_000,
    )


def prepared(message: ShardMessage) -> Prepared:
    assert message.prepared is not None
    return message.prepared


def store_of(ledger: Ledger) -> KafkaStore:
    store = ledger._store
    assert isinstance(store, KafkaStore)
    return store


class Forger:
    """Another application on the brokers, which may write to every topic but not under the ledger's ids."""

    def __init__(self, rig: Rig, transactional: bool) -> None:
        config = {"bootstrap.servers": rig.kafka.bootstrap, "log_level": 0, "compression.type": "none"}
        self._transactional = transactional
        if transactional:
            config["transactional.id"] = f"forger-{rig.scope.pipeline}"
        self._producer = Producer(config)
        if transactional:
            self._producer.init_transactions(60)
        self._topic = ledger_topic(rig.scope, None)

    def write(self, partition: int, *records: tuple[bytes, bytes | None]) -> None:
        if self._transactional:
            self._producer.begin_transaction()
        for key, value in records:
            self._producer.produce(self._topic, key=key, value=value, partition=partition)
        assert self._producer.flush(60) == 0
        if self._transactional:
            self._producer.commit_transaction(60)

    def hold(self, partition: int, *records: tuple[bytes, bytes | None]) -> None:
        """Write records, and leave the transaction open."""
        self._producer.begin_transaction()
        for key, value in records:
            self._producer.produce(self._topic, key=key, value=value, partition=partition)
        assert self._producer.flush(60) == 0


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


class Child:
    """A function of tests/broker/sink_process.py in its own process. It prints lines, and can be killed."""

    def __init__(self, function: str, *arguments: Any) -> None:
        coded = base64.b64encode(pickle.dumps(arguments)).decode()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sink_process.py")), function, coded],
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self) -> Any:
        """The next line it prints; blocks."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return pickle.loads(base64.b64decode(line))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
