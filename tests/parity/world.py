"""A scenario's environment: a broker, a session, one of the two connectors, and independent clients."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic, OffsetSpec
from tests.kafka_tools import read_committed

from delivered.spark.internals import make_active

Fact = str | int | bool | None
Facts = dict[str, Fact]


@dataclass(frozen=True)
class Connector:
    """One of the two connectors: its format, and options that only it needs.

    Attributes:
        reads_with, writes_with: options of every source and sink.
    """

    format: str
    reads_with: Mapping[str, str] = field(default_factory=dict)
    writes_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.format != "kafka"

    @property
    def class_name(self) -> str:
        module = "delivered.spark.formats.DeliveredDataSource"
        return module if self.ours else "org.apache.spark.sql.kafka010.KafkaSourceProvider"


# How long its consumer waits for deleted records: 120 s by default.
SPARK = Connector("kafka", reads_with={"kafkaConsumer.pollTimeoutMs": "2000"})
OURS = Connector("delivered_kafka", writes_with={"guarantee": "at_least_once"})


@dataclass
class World:
    """
    Attributes:
        kafka: the fixture of that name, or one from `new_kafka`.
        folder: for checkpoints.
    """

    spark: Any
    kafka: Any
    folder: Path
    connector: Connector
    _names: Any = field(default_factory=itertools.count)

    @cached_property
    def _producer(self) -> Producer:
        return Producer({"bootstrap.servers": self.kafka.bootstrap, "acks": "all", "linger.ms": 2})

    @property
    def impatient(self) -> dict[str, str]:
        """Options that keep a sink from waiting a minute for a missing topic."""
        return {} if self.connector.ours else {"kafka__max__block__ms": "2000"}

    def name(self) -> str:
        return f"parity{'' if self.connector.ours else '-spark'}-{next(self._names)}"

    def checkpoint(self) -> str:
        return str(self.folder / self.name())

    # Topics, through independent clients

    def topic(self, *sizes: int, name: str | None = None, **config: Any) -> str:
        """A topic with as many partitions as sizes; partition p holds the numbers 100p to 100p + size - 1."""
        made = str(self.kafka.topic(len(sizes), name=name, **config))
        self.send(made, {p: range(100 * p, 100 * p + n) for p, n in enumerate(sizes)})
        return made

    def send(self, topic: str, values: Mapping[int, Iterable[Any]], **given: Any) -> None:
        """Values per partition; `given` as `Producer.produce` has it: key, timestamp, headers."""
        failed: list[str] = []
        for partition, numbers in values.items():
            for value in numbers:
                data = value if value is None or isinstance(value, bytes) else str(value).encode()
                while True:
                    try:
                        self._producer.produce(
                            topic,
                            data,
                            partition=partition,
                            on_delivery=lambda e, _: failed.append(str(e)) if e else None,
                            **given,
                        )
                        break
                    except BufferError:
                        self._producer.poll(0.1)
        assert self._producer.flush(30) == 0 and not failed, failed

    def transaction(self, topic: str, values: Iterable[Any], end: str = "commit") -> Callable[[], None]:
        """Send in a transaction, then commit, abort or leave it open; returns a function that commits an open one."""
        producer = Producer(
            {"bootstrap.servers": self.kafka.bootstrap, "transactional.id": f"{topic}-{next(self._names)}"}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, str(value).encode(), partition=0)
        producer.flush(30)
        sent = self._end(topic, IsolationLevel.READ_UNCOMMITTED)

        def finish(how: Callable[[float], None]) -> None:
            how(30)
            # The marker is written after the reply to the producer, so wait until readers see it.
            self.until(
                lambda: (
                    sent
                    < self._end(topic, IsolationLevel.READ_UNCOMMITTED)
                    == self._end(topic, IsolationLevel.READ_COMMITTED)
                )
            )

        if end != "open":
            finish(producer.abort_transaction if end == "abort" else producer.commit_transaction)
        return lambda: finish(producer.commit_transaction)

    def _end(self, topic: str, level: IsolationLevel) -> int:
        at = TopicPartition(topic, 0)
        asked = self.kafka.admin().list_offsets({at: OffsetSpec.latest()}, isolation_level=level)
        return int(asked[at].result(30).offset)

    def add_partitions(self, topic: str, count: int) -> None:
        self.kafka.admin().create_partitions([NewPartitions(topic, count)])[topic].result(30)
        self.until(lambda: len(self._producer.list_topics(topic, 10).topics[topic].partitions) == count)

    def create(self, topic: str) -> str:
        """With one partition; waits until the broker has forgotten a deleted one of that name."""

        def made() -> bool:
            try:
                self.kafka.admin().create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
            except KafkaException as error:
                assert error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS, error
                return False
            return True

        self.until(made)
        self.until(lambda: topic in self._producer.list_topics(topic, 10).topics)
        return topic

    def delete(self, topic: str) -> None:
        self.kafka.admin().delete_topics([topic])[topic].result(30)
        self.until(lambda: topic not in self.kafka.admin().list_topics(timeout=10).topics)

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        at = TopicPartition(topic, partition, before)
        self.kafka.admin().delete_records([at])[at].result(30)

    def until(self, holds: Callable[[], bool]) -> None:
        """Each check queries a server, which takes time."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "the state that the scenario waits for did not come"

    def records(self, topic: str) -> list[Any]:
        return read_committed(self.kafka.bootstrap, topic)

    def values(self, topic: str) -> str:
        return told([m.value() for m in self.records(topic)])

    # Through the connector

    def reader(self, reader: Any, options: Mapping[str, Any]) -> Any:
        given = {"kafka.bootstrap.servers": self.kafka.bootstrap, **self.connector.reads_with, **options}
        return reader.format(self.connector.format).options(**given)

    def batch(self, **options: Any) -> Any:
        """A DataFrame, not yet read. Options with `__` for a dot."""
        return self.reader(self.spark.read, _dotted(options)).load()

    def read(self, **options: Any) -> Fact:
        """Values of a batch read, or how it is refused."""
        return attempt(lambda: told([r[0] for r in self.batch(**options).select("value").collect()]))

    def stream(self, **options: Any) -> Any:
        return self.reader(self.spark.readStream, _dotted(options)).load()

    def run(self, checkpoint: str, frame: Any = None, **options: Any) -> list[list[Any]]:
        """Run a query with available now; the values of each batch."""
        made = self.stream(**options) if frame is None else frame
        query = Query(self, made, checkpoint, trigger={"availableNow": True})
        query.end()
        return query.batches

    def run_told(self, **options: Any) -> str:
        """As `run`, with a new checkpoint; all values."""
        return told(v for batch in self.run(self.checkpoint(), **options) for v in batch)

    def write(self, frame: Any, mode: str = "append", **options: Any) -> Fact:
        """Write rows as a batch: "written", or how it was refused."""
        given = {"kafka.bootstrap.servers": self.kafka.bootstrap, **_dotted(options), **self.connector.writes_with}
        if self.connector.ours:
            given |= {"pipeline": "parity"}
        writer = frame.write.format(self.connector.format).options(**given).mode(mode)

        def save() -> str:
            make_active(self.spark)  # Spark looks for a Python sink only in the thread's active session
            writer.save()
            return "written"

        return attempt(save)

    def write_stream(self, frame: Any, mode: str = "append", **options: Any) -> Any:
        given = {"kafka.bootstrap.servers": self.kafka.bootstrap, **_dotted(options), **self.connector.writes_with}
        writer = frame.writeStream.format(self.connector.format).options(**given).outputMode(mode)
        return writer.option("checkpointLocation", self.checkpoint()).queryName(self.name())


class Query:
    """A running query that keeps the values of each batch.

    Args:
        trigger: as `DataStreamWriter.trigger` has it; None: as soon as records come.
        during: called with the number of each batch, before its rows are read.
    """

    def __init__(
        self,
        world: World,
        frame: Any,
        checkpoint: str,
        *,
        trigger: Mapping[str, Any] | None = None,
        during: Callable[[int], None] | None = None,
    ) -> None:
        self.batches: list[list[Any]] = []
        self._more = threading.Condition()

        def keep(rows: Any, number: int) -> None:
            if during is not None:
                during(number)
            found = [r[0] for r in rows.select("value").collect()]
            with self._more:
                self.batches.append(found)
                self._more.notify_all()

        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
        self.query = (writer.trigger(**trigger) if trigger else writer).start()

    def wait(self, batches: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.batches) >= batches, 60), "the batches did not come"

    def values(self) -> list[Any]:
        return [v for batch in self.batches for v in batch]

    def told(self) -> str:
        return told(self.values())

    def catch_up(self) -> str:
        self.query.processAllAvailable()
        return self.told()

    def end(self) -> None:
        """Wait until it ends by itself."""
        try:
            assert self.query.awaitTermination(120), "the query did not end"
        finally:
            self.query.stop()

    def stop(self) -> None:
        self.query.stop()


def told(values: Iterable[Any]) -> str:
    """Numbers in order as "0-9 12", other values as text; duplicates appear twice."""
    texts = [v.decode() if isinstance(v, (bytes, bytearray)) else str(v) for v in values]
    numbers = sorted(int(t) for t in texts if t.lstrip("-").isdigit())
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = [str(a) if a == b else f"{a}..{b}" for a, b in runs]
    return " ".join(said + sorted(t for t in texts if not t.lstrip("-").isdigit())) or "nothing"


def attempt(work: Callable[[], Fact]) -> Fact:
    """The result of `work`, or "refused"."""
    try:
        return work()
    except Exception as error:
        # A bug in the scenario must not look like a refusal of the connector.
        if isinstance(error, (AssertionError, NameError, TypeError, AttributeError)):
            raise
        return "refused"


def offsets(topic: str, places: Sequence[Any] | Mapping[Any, Any]) -> str:
    """{"topic": {"0": ..., "1": ...}}, as the options want it."""
    numbered = places.items() if isinstance(places, Mapping) else enumerate(places)
    return json.dumps({topic: {str(p): place for p, place in numbered}})


def _dotted(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k.replace("__", "."): v for k, v in options.items()}
