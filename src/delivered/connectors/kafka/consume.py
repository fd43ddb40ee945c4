"""One consumer, one partition at a time: records as Arrow batches, over confluent-kafka's Python objects.

`native_consume` does the same without a Python object per record. Which one serves is chosen by `new_consumer`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from delivered.connectors.kafka.client import connect, kafka_client
from delivered.connectors.kafka.client_errors import ConnectionErrors, explain
from delivered.connectors.kafka.offsets import Partition
from delivered.connectors.kafka.options import SourceOptions
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_QUEUE_KBYTES
from delivered.source.columns import HEADERS, columns, micros_of

_IGNORED = {
    "GROUP_AUTHORIZATION_FAILED",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "COORDINATOR_LOAD_IN_PROGRESS",
}
"""The consumer belongs to a group in name only: librdkafka wants one."""
_CONNECTION = {"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_NODE_UPDATE", "_WAIT_CACHE"}
_MOVED = {"NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REPLICA_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"}
OUT_OF_RANGE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}
GONE = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"}


@dataclass
class Fetched:
    """What one call brought.

    Attributes:
        batch: records in the order of offsets, all below the wanted end; None: none.
        position: every record below it that can be seen was handed out; -1: nothing new is known.
        end_of_log: the broker had nothing beyond `position` at that moment.
        out_of_range: the broker does not have the wanted offset.
        gone: the broker does not know the partition (perhaps only for a moment, after a restart).
    """

    batch: pa.RecordBatch | None = None
    position: int = -1
    end_of_log: bool = False
    out_of_range: bool = False
    gone: bool = False


class PartitionConsumer(Protocol):
    """A warm connection that reads one partition after the other. Used by one thread at a time."""

    def assign(self, partition: Partition, offset: int) -> None:
        """Go on with another partition, from this offset. What was fetched ahead before is dropped."""

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Wait for records, at most `timeout_s`; take what is there.

        Raises:
            UsageError, Unreachable: reading is not permitted, or the connection is refused.
        """

    def fetch_position(self) -> int:
        """Where librdkafka's fetcher stands, some seconds ago; -1: unknown. It moves over aborted records too."""

    def release(self) -> None:
        """Stop fetching; keep the connection."""

    def close(self) -> None: ...


def settings(options: SourceOptions) -> dict[str, str]:
    """librdkafka's settings of a reading consumer; secrets are not followed yet."""
    return {
        "client.id": "delivered",
        "group.id": "delivered-reader",
        "isolation.level": "read_committed",
        # A slice's end exists already: no reason to let the broker wait for more.
        "fetch.wait.max.ms": "10",
        "fetch.queue.backoff.ms": "2",
        "fetch.error.backoff.ms": "100",
        "max.partition.fetch.bytes": "4194304",
        "queued.min.messages": "1000000",
        "queued.max.messages.kbytes": str(SOURCE_QUEUE_KBYTES),
        "reconnect.backoff.max.ms": "1000",
        "statistics.interval.ms": "2000",
        "max.poll.interval.ms": "86400000",
        **options.client,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
        "enable.partition.eof": "true",
    }


def new_consumer(options: SourceOptions) -> PartitionConsumer:
    """The fastest consumer that works here. DELIVERED_KAFKA_CONSUMER=plain takes the other one."""
    kafka_client()
    if os.environ.get("DELIVERED_KAFKA_CONSUMER") != "plain":
        from delivered.connectors.kafka.native_consume import NativeConsumer, available

        if available():
            return NativeConsumer(options)
    return PlainConsumer(options)


def classify(fetched: Fetched, name: str, said: str, connection: ConnectionErrors, where: str, servers: str) -> None:
    """Take an error that came in place of a record. Raises what no waiting mends."""
    if name in OUT_OF_RANGE:
        fetched.out_of_range = True
    elif name in GONE:
        fetched.gone = True
    elif name in _CONNECTION or name in _MOVED or name in _IGNORED:
        connection.last = said
    else:
        raise explain(name, said, where, servers)


class Statistics:
    """Keeps the last statistics as text; parsed only when somebody asks, which is when a read seems to stall."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str) -> None:
        self.text = text

    def fetch_position(self, partition: Partition) -> int:
        if not self.text:
            return -1
        topic = json.loads(self.text).get("topics", {}).get(partition[0], {})
        return int(topic.get("partitions", {}).get(str(partition[1]), {}).get("next_offset", -1))


def assemble(
    partition: Partition,
    key: pa.Array,
    value: pa.Array,
    offset: pa.Array,
    timestamp_ms: np.ndarray[Any, np.dtype[np.int64]],
    timestamp_type: pa.Array,
    headers: pa.Array | None,
) -> pa.RecordBatch:
    """Columns to a batch. `timestamp_type` as librdkafka counts: one more than Spark."""
    n = len(offset)
    timestamp = pa.array(micros_of(timestamp_ms), pa.int64()).view(pa.timestamp("us", tz="UTC"))
    arrays = [key, value, pa.repeat(pa.scalar(partition[0]), n), pa.repeat(pa.scalar(partition[1], pa.int32()), n)]
    arrays += [offset, timestamp, timestamp_type]
    if headers is not None:
        arrays.append(headers)
    return pa.RecordBatch.from_arrays(arrays, schema=columns(headers is not None))


class PlainConsumer:
    """Over confluent-kafka: slower, and works wherever it does."""

    def __init__(self, options: SourceOptions) -> None:
        self._ck = kafka_client()
        self._servers = options.servers
        self._headers = options.headers
        self._connection = ConnectionErrors()
        self._statistics = Statistics()
        self._partition: Partition = ("", -1)
        self._start = -1
        self._consumer = connect(
            self._ck.Consumer, settings(options), error_cb=self._connection, stats_cb=self._statistics
        )

    @property
    def _where(self) -> str:
        return f"{self._partition[0]}-{self._partition[1]}"

    def assign(self, partition: Partition, offset: int) -> None:
        self._partition, self._start = partition, offset
        self._consumer.assign([self._ck.TopicPartition(*partition, offset)])

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        fetched = Fetched()
        # One with patience, then what is there: `consume` would wait for all of a larger number.
        messages = self._consumer.consume(1, timeout_s)
        if messages:
            messages += self._consumer.consume(SOURCE_BATCH_RECORDS_MAX - 1, 0)
        elif self._connection.refused:
            raise explain(*self._connection.refused, self._where, self._servers)
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                if (message.topic(), message.partition()) == self._partition and message.offset() >= self._start:
                    records.append(message)
                    fetched.position = message.offset() + 1
            elif error.code() == self._ck.KafkaError._PARTITION_EOF:
                if (message.topic(), message.partition()) == self._partition:
                    fetched.position = max(fetched.position, message.offset())
                    fetched.end_of_log = True
            else:
                classify(fetched, error.name(), error.str(), self._connection, self._where, self._servers)
        records = [m for m in records if m.offset() < end]
        if records:
            fetched.batch = self._batch(records)
        return fetched

    def _batch(self, records: list[Any]) -> pa.RecordBatch:
        n = len(records)
        stamps = [m.timestamp() for m in records]
        headers = None
        if self._headers:
            rows = [m.headers() for m in records]
            headers = pa.array([None if not r else [{"key": k, "value": v} for k, v in r] for r in rows], HEADERS.type)
        return assemble(
            self._partition,
            pa.array([m.key() for m in records], pa.binary()),
            pa.array([m.value() for m in records], pa.binary()),
            pa.array([m.offset() for m in records], pa.int64()),
            np.fromiter((s[1] for s in stamps), np.int64, n),
            pa.array([s[0] - 1 for s in stamps], pa.int32()),
            headers,
        )

    def fetch_position(self) -> int:
        return self._statistics.fetch_position(self._partition)

    def release(self) -> None:
        self._consumer.unassign()

    def close(self) -> None:
        self._consumer.close()
