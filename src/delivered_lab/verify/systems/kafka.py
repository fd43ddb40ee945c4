"""Topics, written and read with confluent-kafka, with the judge's own settings."""

from __future__ import annotations

import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from delivered_lab.verify.proxy import KafkaProxy
from delivered_lab.verify.systems.base import (
    Poll,
    Row,
    SinkKind,
    SinkPlace,
    SourceClient,
    SourceKind,
    SourcePlace,
    System,
    as_text,
    wait_for,
)
from delivered_lab.verify.workloads import PARTITIONS, Record

ANSWER_TIMEOUT_S = 60.0
MESSAGE_BYTES_MAX = 2 << 20
"""The judge may send more than a pipeline with default settings."""
_QUIET: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 500}
"""Brokers are killed on purpose: do not log it."""
_END_TIMEOUT_S = 30.0
_RETRY_S = 0.2
_BATCH_HEAD = 12
"""Bytes of a record batch's first offset and size."""


@dataclass
class Topic:
    """One or several topics, as the sink.

    Attributes:
        bootstrap: of the broker itself, for the judge.
        pipeline_address: the broker's address for the pipeline: its own, or a proxy's.
        extra: more options in the pipeline file.
        topics: how many; the second one's name ends in "-1".
    """

    system = "kafka"
    batch_atomic = False
    bootstrap: str
    name: str
    pipeline_address: str | None = None
    partitions: int = PARTITIONS
    extra: dict[str, Any] = field(default_factory=dict)
    topics: int = 1
    _client: Any = field(default=None, init=False, repr=False)

    @property
    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}-{n}" for n in range(1, self.topics))]

    def create(self) -> None:
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        for creation in self._admin().create_topics([NewTopic(n, self.partitions, 1) for n in self.names]).values():
            creation.result(ANSWER_TIMEOUT_S)

    def remove(self) -> None:
        for deletion in self._admin().delete_topics(self.names).values():
            deletion.result(ANSWER_TIMEOUT_S)

    def options(self) -> dict[str, Any]:
        # With several topics, every row names its own.
        return self._place() | ({"topic": self.name} if self.topics == 1 else {})

    def _place(self) -> dict[str, Any]:
        return {"format": "kafka", "kafka.bootstrap.servers": self.pipeline_address or self.bootstrap, **self.extra}

    def send(self, records: Sequence[Record]) -> None:
        from confluent_kafka import Producer

        settings = {"acks": "all", "enable.idempotence": True, "linger.ms": 5, "message.max.bytes": MESSAGE_BYTES_MAX}
        producer = Producer({"bootstrap.servers": self.bootstrap, **settings, **_QUIET})
        failed: list[str] = []
        for r in records:
            while True:
                try:
                    producer.produce(
                        self.names[r.partition // self.partitions % len(self.names)],
                        key=r.key,
                        value=r.value,
                        partition=r.partition % self.partitions,
                        on_delivery=lambda e, _: failed.append(str(e)) if e else None,
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
        left = producer.flush(ANSWER_TIMEOUT_S)
        if left or failed:
            raise RuntimeError(
                f"{left} records of {self.name} were not acknowledged, {len(failed)} failed: {failed[:2]}"
            )

    def read(self) -> list[Row]:
        """Up to the current last stable offset of every partition. Raises TimeoutError: the end was not reached within
        60 s."""
        ends = self.ends()
        consumer = self._consumer(ends)
        found: list[Row] = []
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            while not self._reached(consumer, ends):
                found.extend(self._rows(consumer.consume(1_000, 0.2)))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the end of {self.name} was not reached within {ANSWER_TIMEOUT_S:.0f} s")
        finally:
            consumer.close()
        return found

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        consumer = self._consumer(self._all())
        try:
            ends: dict[tuple[str, int], int] | None = None
            deadline = 0.0
            while ends is None or (not self._reached(consumer, ends) and time.monotonic() < deadline):
                if ends is None and stop.is_set():
                    ends, deadline = self.ends(), time.monotonic() + _END_TIMEOUT_S
                if rows := self._rows(consumer.consume(1_000, 0.05)):
                    seen(Poll(rows, snapshot=False))
        finally:
            consumer.close()

    def offsets(self, logged: Any) -> dict[str, int]:
        return {f"{name}-{p}": int(at) for name in self.names for p, at in logged.get(name, {}).items()}

    def ends(self, committed: bool = True) -> dict[tuple[str, int], int]:
        """(topic, partition) -> last stable offset, or the end of the log. Raises KafkaException: no answer within 60
        s."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                return self._ends(committed)
            except KafkaException:
                # A client that knew the broker before its restart sends a stale epoch.
                if time.monotonic() > deadline:
                    raise
                self._client = None
                time.sleep(_RETRY_S)

    def _ends(self, committed: bool) -> dict[tuple[str, int], int]:
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        newest: Any = OffsetSpec.latest
        partitions = {TopicPartition(name, p): newest() for name, p in self._all()}
        answers = self._admin().list_offsets(partitions, isolation_level=level, request_timeout=ANSWER_TIMEOUT_S)
        return {(tp.topic, tp.partition): f.result().offset for tp, f in answers.items()}

    def open_transactions(self, pipeline: str) -> list[str]:
        """Partitions where committed readers cannot reach the end, and the pipeline's open transactions."""
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError

        stable, high = self.ends(), self.ends(committed=False)
        blocked = [
            f"{name}-{p}: readers stop at {stable[name, p]} of {high[name, p]}"
            for name, p in stable
            if stable[name, p] < high[name, p]
        ]
        listed: list[Any] = []

        def answered() -> bool:
            try:
                listed.append(admin.list_transactions(state_filters=["Ongoing"]))
            except KafkaError as error:  # a coordinator reads its log for a while after a restart
                if not error.retriable:
                    raise
            return bool(listed)

        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
        try:
            wait_for(answered, ANSWER_TIMEOUT_S, f"transactions of {self.bootstrap}")
        finally:
            admin.close()
        return blocked + [str(t) for t in _flat(listed) if f".{pipeline}." in str(t)]

    def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        if self._client is None:  # kept alive: its requests end with it
            self._client = AdminClient({"bootstrap.servers": self.bootstrap, **_QUIET})
        return self._client

    def _consumer(self, partitions: Any) -> Any:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": f"judge-{uuid.uuid4().hex}",
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
                **_QUIET,
            }
        )
        consumer.assign([TopicPartition(name, p, 0) for name, p in partitions])
        return consumer

    def _all(self) -> list[tuple[str, int]]:
        return [(name, p) for name in self.names for p in range(self.partitions)]

    def _reached(self, consumer: Any, ends: dict[tuple[str, int], int]) -> bool:
        """By position: it moves past markers and aborted records too, so it reaches the end; a count would not."""
        from confluent_kafka import TopicPartition

        at = consumer.position([TopicPartition(name, p) for name, p in ends])
        return all(max(tp.offset, 0) >= ends[tp.topic, tp.partition] for tp in at)

    def _rows(self, messages: list[Any]) -> list[Row]:
        # The client reports a broker that is down as errors, and reconnects by itself.
        return [
            Row(f"{m.topic()}-{m.partition()}", m.offset(), as_text(m.key()), as_text(m.value()) or "")
            for m in messages
            if m.error() is None
        ]


class TopicSource(Topic, SourceClient):
    """The same, as the source."""

    def options(self) -> dict[str, Any]:
        return {**self._place(), "subscribe": ",".join(self.names), "startingOffsets": "earliest"}

    def lose_end(self, folder: Path) -> tuple[str, int]:
        """Of partition 0, as after an unclean election or from a restored disk."""
        log = folder / "data" / f"{self.name}-0"
        for file in log.iterdir():
            if file.suffix in (".index", ".timeindex", ".snapshot"):
                file.unlink()
        (segment,) = log.glob("*.log")
        data, at, starts = segment.read_bytes(), 0, list[tuple[int, int]]()
        while at < len(data):
            first, size = struct.unpack_from(">qi", data, at)
            starts.append((first, at))
            at += _BATCH_HEAD + size
        offset, at = starts[-1]
        segment.write_bytes(data[:at])
        return f"{self.name}-0", offset


def _flat(listed: Any) -> list[Any]:
    if isinstance(listed, dict):
        return [item for part in listed.values() for item in _flat(part)]
    return list(listed) if isinstance(listed, list | tuple) else [listed]


def _sink(kind: SinkKind, at: SinkPlace) -> Topic:
    big = {"kafka.message.max.bytes": str(MESSAGE_BYTES_MAX)} if at.workload.name == "big" else {}
    extra = {**big, **_CLIENTS[kind.name], **at.extra}
    return Topic(at.server.bootstrap, f"{at.name}-out", at.pipeline_address, extra=extra, topics=at.workload.topics)


def _source(at: SourcePlace, name: str = "kafka") -> TopicSource:
    at_pipeline, extra = at.pipeline_address, _CLIENTS[name]
    return TopicSource(at.server.bootstrap, f"{at.name}-in", at_pipeline, extra=extra, topics=at.topics)


_CLIENTS: dict[str, dict[str, Any]] = {"kafka": {}, "kafka-librdkafka": {"client": "librdkafka"}}
"""Options of the pipeline, by kind."""

SYSTEM = System(
    (
        SinkKind("kafka", "kafka", _sink, server="kafka", source="kafka", two_phase=True, own=True, expires=True),
        SinkKind(
            "kafka-librdkafka",
            "kafka",
            _sink,
            server="kafka",
            source="kafka-librdkafka",
            two_phase=True,
            expires=True,
        ),
    ),
    tuple(SourceKind(n, TopicSource, partial(_source, name=n), server="kafka") for n in _CLIENTS),
    properties={
        # By default the broker looks for expired transactions every ten seconds: too long for a case.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "message.max.bytes": str(MESSAGE_BYTES_MAX),
    },
    proxy=KafkaProxy,
)
