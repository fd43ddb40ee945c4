"""Produces Arrow columns: record batches by partition, their order, sequences and retries until acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import NoAnswer, NotSent, protocol, record_batch
from delivered.clients.kafka.channel import Buffer, Pending
from delivered.clients.kafka.consumer import headers
from delivered.clients.kafka.protocol import (
    Confirmation,
    Failures,
    NoTopic,
    ProducerError,
    Wire,
    is_leader,
    server_name,
)
from delivered.clients.kafka.record_batch import RECORD_OVERHEAD, SEQUENCES, Headers, Rows
from delivered.clients.kafka.transactions import Transaction, end_request, is_stored
from delivered.model.errors import BadRecord
from delivered.model.limits import RECORD_BATCH_BYTES_MAX, REQUEST_TIMEOUT_S
from delivered.model.patience import Stall
from delivered.source import HEADERS

# Record batches of one partition between encoding and acknowledgement: their order, sequences, retries. No I/O.
#
# A broker remembers the last five batches of an idempotent producer in each partition. So at most five are unanswered;
# a batch that is sent again keeps its sequence, and nothing new is sent before it is acknowledged, which could make the
# broker forget it. Batches are sent again in their order, one at a time, once every other one has its response.

UNANSWERED_MAX = 5
"""Batches of one partition in flight: as many as brokers remember."""
MISSING_S = 5.0
"""How long a topic or partition may be unknown to a broker: metadata of a new one takes time to spread."""
_BACKOFF_S_MIN, _BACKOFF_S_MAX = 0.01, 0.5


class Verdict(Enum):
    """What a response means for a batch."""

    STORED = auto()
    AGAIN = auto()
    """Not stored; send it again."""
    MAYBE = auto()
    """Possibly stored; send it again only with a sequence."""
    ELSEWHERE = auto()
    """Not stored by this broker: refresh the metadata, then send it again."""
    MISSING = auto()
    """The topic or partition is unknown, perhaps not for long."""
    GAP = auto()
    """A preceding batch is missing. Expected while one is unanswered, otherwise the broker lost records or state."""
    TOO_LARGE = auto()
    FATAL = auto()
    """Rejected because of the producer: it can send nothing more."""
    REJECTED = auto()
    """Rejected for good."""


VERDICTS: dict[int, tuple[str, Verdict]] = {
    0: ("NO_ERROR", Verdict.STORED),
    2: ("INVALID_MSG", Verdict.AGAIN),
    3: ("UNKNOWN_TOPIC_OR_PART", Verdict.MISSING),
    5: ("LEADER_NOT_AVAILABLE", Verdict.ELSEWHERE),
    6: ("NOT_LEADER_FOR_PARTITION", Verdict.ELSEWHERE),
    7: ("REQUEST_TIMED_OUT", Verdict.MAYBE),
    8: ("BROKER_NOT_AVAILABLE", Verdict.ELSEWHERE),
    9: ("REPLICA_NOT_AVAILABLE", Verdict.ELSEWHERE),
    10: ("MSG_SIZE_TOO_LARGE", Verdict.TOO_LARGE),
    13: ("NETWORK_EXCEPTION", Verdict.MAYBE),
    14: ("COORDINATOR_LOAD_IN_PROGRESS", Verdict.AGAIN),
    15: ("COORDINATOR_NOT_AVAILABLE", Verdict.AGAIN),
    16: ("NOT_COORDINATOR", Verdict.AGAIN),
    17: ("TOPIC_EXCEPTION", Verdict.REJECTED),
    18: ("RECORD_LIST_TOO_LARGE", Verdict.TOO_LARGE),
    19: ("NOT_ENOUGH_REPLICAS", Verdict.AGAIN),
    20: ("NOT_ENOUGH_REPLICAS_AFTER_APPEND", Verdict.MAYBE),
    29: ("TOPIC_AUTHORIZATION_FAILED", Verdict.REJECTED),
    31: ("CLUSTER_AUTHORIZATION_FAILED", Verdict.FATAL),
    45: ("OUT_OF_ORDER_SEQUENCE_NUMBER", Verdict.GAP),
    46: ("DUPLICATE_SEQUENCE_NUMBER", Verdict.STORED),
    47: ("INVALID_PRODUCER_EPOCH", Verdict.FATAL),
    48: ("INVALID_TXN_STATE", Verdict.FATAL),
    49: ("INVALID_PRODUCER_ID_MAPPING", Verdict.FATAL),
    51: ("CONCURRENT_TRANSACTIONS", Verdict.AGAIN),
    53: ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", Verdict.FATAL),
    56: ("KAFKA_STORAGE_ERROR", Verdict.ELSEWHERE),
    59: ("UNKNOWN_PRODUCER_ID", Verdict.GAP),
    74: ("FENCED_LEADER_EPOCH", Verdict.ELSEWHERE),
    75: ("UNKNOWN_LEADER_EPOCH", Verdict.ELSEWHERE),
    89: ("THROTTLING_QUOTA_EXCEEDED", Verdict.AGAIN),
    90: ("PRODUCER_FENCED", Verdict.FATAL),
    100: ("UNKNOWN_TOPIC_ID", Verdict.MISSING),
    103: ("INCONSISTENT_TOPIC_ID", Verdict.ELSEWHERE),
    120: ("TRANSACTION_ABORTABLE", Verdict.FATAL),
}
"""Error code of a Produce response -> its name in librdkafka, meaning. Any other is REJECTED."""


_NETWORK_EXCEPTION = 13


def verdict_of(code: int) -> tuple[str, Verdict]:
    return VERDICTS.get(code, (f"ERROR_{code}", Verdict.REJECTED))


@dataclass(eq=False)
class Batch:
    """An encoded record batch.

    Attributes:
        largest: key and value of its record, in bytes; 0: it has several.
        deadline: of time.monotonic(), for its acknowledgement.
        sequence: of the first record; -1: without.
        number: counts the partition's batches as they are sent first; -1: not yet.
        again: it was sent again.
        missing_since: since when its partition is unknown; 0: it is known.
    """

    data: Buffer
    records: int
    largest: int
    deadline: float
    sequence: int
    missing_since: float = 0.0
    number: int = -1
    again: bool = False


class PartitionQueue:
    """Batches of one partition. Used by one thread.

    Args:
        sequenced: batches carry sequences, so a repeated one is stored once.

    Attributes:
        next: sequence of the next record; -1: without.
        end: offset behind the last batch that was acknowledged in its turn, if the broker reported it.
    """

    def __init__(self, topic: str, partition: int, sequenced: bool) -> None:
        self.topic, self.partition = topic, partition
        self.end: int | None = None
        self._sequenced = sequenced
        self.next = 0 if sequenced else -1
        self._waiting: deque[Batch] = deque()
        self._unanswered: list[Batch] = []
        self._settling = False
        self._number = 0
        self._pause_s = _BACKOFF_S_MIN
        self._not_before = 0.0

    def __len__(self) -> int:
        """Batches without an outcome."""
        return len(self._waiting) + len(self._unanswered)

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def records(self) -> int:
        return sum(b.records for b in (*self._waiting, *self._unanswered))

    def add(self, batch: Batch) -> None:
        """A new batch, which carries the sequence `next`."""
        self._waiting.append(batch)
        if self._sequenced:
            self.next = (self.next + batch.records) % SEQUENCES

    def due(self, now: float) -> float | None:
        """When the next batch may be sent, of time.monotonic(); None: not before a response."""
        if not self._waiting or self._settling:
            return None
        if self._unanswered and self._sequenced:
            first = self._unanswered[0]
            if self._waiting[0].number >= 0 or first.again or self._number - first.number >= UNANSWERED_MAX:
                return None
        elif len(self._unanswered) >= UNANSWERED_MAX:
            return None
        return max(now, self._not_before)

    def expired(self, now: float) -> list[Batch]:
        """Remove waiting batches whose deadline has passed. With sequences, what follows them cannot be sent either."""
        found = [b for b in self._waiting if b.deadline <= now]
        if found:
            self._waiting = deque(b for b in self._waiting if b.deadline > now)
        return found

    def take(self) -> Batch:
        """The next batch to send. Only when `due`."""
        batch = self._waiting.popleft()
        if batch.number < 0:
            batch.number, self._number = self._number, self._number + 1
        else:
            batch.again = True
        self._unanswered.append(batch)
        return batch

    def is_first(self, batch: Batch) -> bool:
        """Whether every preceding batch is acknowledged."""
        return self._unanswered[0] is batch and not any(_before(b, batch) for b in self._waiting)

    def drop(self, batch: Batch) -> None:
        """The batch has its outcome."""
        self._unanswered.remove(batch)
        self._pause_s, self._not_before = _BACKOFF_S_MIN, 0.0
        self._settled()

    def put_back(self, batch: Batch, now: float, pause: bool = True) -> None:
        """The batch is to be sent again, in its place."""
        self._unanswered.remove(batch)
        self._waiting.insert(self._place(batch), batch)
        if pause:
            self._not_before = now + self._pause_s
            self._pause_s = min(self._pause_s * 1.5, _BACKOFF_S_MAX)
        self._settling = self._sequenced
        self._settled()

    def replace(self, batch: Batch, parts: Sequence[Batch]) -> None:
        """Replace an unanswered batch by smaller ones, which carry its sequences."""
        self._unanswered.remove(batch)
        at = self._place(batch)
        for i, part in enumerate(parts):
            part.number = batch.number
            self._waiting.insert(at + i, part)
        self._settling = self._sequenced
        self._settled()

    def purge(self) -> list[Batch]:
        """Remove what waits."""
        found = list(self._waiting)
        self._waiting.clear()
        return found

    def _place(self, batch: Batch) -> int:
        return sum(1 for b in self._waiting if _before(b, batch)) if self._sequenced else 0

    def _settled(self) -> None:
        if not self._unanswered:
            self._settling = False


def _before(a: Batch, b: Batch) -> bool:
    """Whether sequence a precedes b, across the wrap."""
    return 0 < (b.sequence - a.sequence) % SEQUENCES < SEQUENCES // 2


# Rows to record batches: which partition, how many records.

BATCH_BYTES = 1_000_000
"""Of a record batch before compression."""
_STRIPE_BYTES = 64 << 10
"""Records without a key and a partition: as many as this go to one partition before the next one."""


class Encoder:
    """
    Attributes:
        bytes_max: of a record, and of a batch as sent.
    """

    def __init__(self, config: Mapping[str, str], held: Transaction | None, transactional: bool) -> None:
        self.bytes_max = int(config.get("message.max.bytes", "1048588"))
        self._stripe = int.from_bytes(np.random.bytes(2), "big")
        self._settings: dict[str, Any] = {
            "compression": config.get("compression.type", "none"),
            "bytes_max": self.bytes_max,
            "producer_id": -1 if held is None else held.producer_id,
            "producer_epoch": -1 if held is None else held.epoch,
            "transactional": transactional,
        }

    def within_limit(self, rows: Rows, failures: Failures) -> Rows:
        """Without records that the client itself rejects."""
        size = pc.fill_null(pc.cast(pc.binary_length(rows.value), pa.int64()), 0)
        if rows.key is not None:
            size = pc.add(size, pc.fill_null(pc.cast(pc.binary_length(rows.key), pa.int64()), 0))
        longest = self.bytes_max - RECORD_OVERHEAD
        if (pc.max(size).as_py() or 0) <= longest:
            return rows
        bad = pc.greater(size, longest)
        for length in size.filter(bad).to_pylist():
            failures.add("MSG_SIZE_TOO_LARGE", length)
        good = pc.invert(bad)
        return Rows(
            rows.topic,
            None if rows.key is None else rows.key.filter(good),
            rows.value.filter(good),
            None if rows.headers is None else rows.headers.filter(good),
            None if rows.partition is None else rows.partition[np.asarray(good)],
        )

    def spread(self, rows: Rows, count: int) -> Iterator[tuple[int, Any]]:
        """Partitions with rows, and which rows."""
        n = len(rows)
        if n == 0:
            return
        partition = rows.partition
        if partition is None or (partition < 0).any():
            by_key = np.full(n, -1, np.int32)
            if rows.key is not None:
                by_key = record_batch.partition_of(rows.key, count)
            partition = by_key if partition is None else np.where(partition < 0, by_key, partition).astype(np.int32)
        free = np.flatnonzero(partition < 0)
        if len(free):
            stripe = max(1, int(_STRIPE_BYTES * n / max(1, bytes_of(rows))))
            partition[free] = (self._stripe + np.arange(len(free)) // stripe) % count
            self._stripe += 1 + len(free) // stripe
        chosen, bounds = record_batch.group(np.ascontiguousarray(partition, np.int32), count)
        for p in np.flatnonzero(np.diff(bounds)).tolist():
            yield p, chosen[bounds[p] : bounds[p + 1]]

    def encode(self, rows: Rows, chosen: Any, sequence: int, deadline: float) -> Iterator[Batch]:
        """Rows of one partition. Raises BadRecord: a record's headers are too large."""
        now = time.time_ns() // 1_000_000
        for one in record_batch.encode(
            *(rows.key, rows.value, rows.headers),
            timestamps=now,
            rows=chosen,
            sequence=sequence,
            target_bytes=BATCH_BYTES,
            **self._settings,
        ):
            largest = _size(rows.key, rows.value, int(chosen[one.first])) if one.count == 1 else 0
            yield Batch(one.data, one.count, largest, deadline, one.sequence)

    def halves(self, batch: Batch, at: tuple[str, int]) -> list[Batch]:
        """The records of a batch that is too large for the topic, in smaller ones."""
        decoded = record_batch.decode(batch.data, at, 0, aborted=None, headers=True, bytes_max=RECORD_BATCH_BYTES_MAX)
        [records] = pa.Table.from_batches(decoded).combine_chunks().to_batches()
        parts, sequence = list[Batch](), batch.sequence
        half = records.num_rows // 2
        for piece in (records.slice(0, half), records.slice(half)):
            key, value = piece.column("key"), piece.column("value")
            for one in record_batch.encode(
                *(key, value, piece.column("headers")),
                timestamps=np.asarray(piece.column("timestamp").cast(pa.timestamp("ms")).cast(pa.int64())),
                sequence=sequence,
                **self._settings,
            ):
                largest = _size(key, value, one.first) if one.count == 1 else 0
                parts.append(Batch(one.data, one.count, largest, batch.deadline, one.sequence))
                sequence = record_batch.next_sequence(sequence, one.count) if sequence >= 0 else -1
        return parts


def _size(key: pa.Array | None, value: pa.Array, row: int) -> int:
    return sum(len(c[row].as_py() or b"") for c in (key, value) if c is not None)


def bytes_of(rows: Rows) -> int:
    return sum(c.nbytes for c in (rows.key, rows.value, rows.headers) if c is not None)


def joined(listed: list[Rows]) -> Iterator[Rows]:
    """Rows of one topic in one piece, if their columns are alike."""
    first = listed[0]
    kinds = {tuple(None if c is None else c.type for c in (r.key, r.value, r.headers)) for r in listed}
    if len(listed) == 1 or len(kinds) > 1 or len({r.partition is None for r in listed}) > 1:
        yield from listed
        return
    yield Rows(
        first.topic,
        None if first.key is None else pa.concat_arrays([r.key for r in listed]),
        pa.concat_arrays([r.value for r in listed]),
        None if first.headers is None else pa.concat_arrays([r.headers for r in listed]),
        None if first.partition is None else np.concatenate([r.partition for r in listed if r.partition is not None]),
    )


# What the senders of one process share.

PARTITIONS_AGE_S_MAX = 300.0


@dataclass
class Cluster:
    """
    Attributes:
        partitions: topic -> partition count, when it was asked for (time.monotonic()).
        throttled: broker -> when to send records to it again: it reads nothing earlier, and a request would time out.
    """

    wire: Wire
    servers: str
    partitions: dict[str, tuple[int, float]] = field(default_factory=dict)
    throttled: dict[int, float] = field(default_factory=dict)

    def count(self, topic: str) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        count, at = self.partitions.get(topic, (0, 0.0))
        if count and time.monotonic() - at < PARTITIONS_AGE_S_MAX:
            return count
        try:
            found = self.wire.topic(topic)
        except NoAnswer as error:
            if count:  # brokers are away; the last known count will do
                return count
            raise ProducerError("_TRANSPORT", str(error)) from None
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE):
            name, _ = verdict_of(found.error_code)
            raise ProducerError(name, protocol.name_of(found.error_code))
        count = len(found.partitions)
        self.partitions[topic] = (count, time.monotonic())
        return count

    def outdated(self, topic: str) -> None:
        """Ask again next time; until there is an answer, the last known count stands."""
        count, _ = self.partitions.get(topic, (0, 0.0))
        self.partitions[topic] = (count, float("-inf"))


# Partitions of an open transaction, announced to its coordinator before records are sent to them (decision 056).

_PAUSE_S = 0.05

At = tuple[str, int]
"""Topic and partition."""


class Announced:
    """
    Args:
        failed: called with a partition, the error's name, and whether it ends the transaction; partition None: only
            what is known of a connection.

    Attributes:
        added: partitions in the transaction.
        asked: whether the transaction may be open.
        unknown: a request was not answered, and may still arrive.
    """

    def __init__(self, wire: Wire, held: Transaction, failed: Callable[[At | None, str, bool], None]) -> None:
        self.added: set[At] = set()
        self.asked = self.unknown = False
        self._wire, self._held, self._failed = wire, held, failed
        self._pending: Pending | None = None
        self._node = -1  # that was asked last
        self._confirmation = Confirmation(wire, held.transactional_id)
        self._not_before = self._missing_since = 0.0

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def add(self, wanted: set[At]) -> None:
        """Announce partitions, unless a response is awaited."""
        from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

        held = self._held
        if self.waiting or time.monotonic() < self._not_before:
            return
        Topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic  # noqa: N806 - a class
        topics = [
            Topic(name=topic, partitions=sorted(p for t, p in wanted if t == topic))
            for topic in sorted({t for t, _ in wanted})
        ]
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=held.transactional_id,
            v3_and_below_producer_id=held.producer_id,
            v3_and_below_producer_epoch=held.epoch,
            v3_and_below_topics=topics,
            max_version=3,
        )
        try:
            self._node = self._wire.coordinator(held.transactional_id)
            self._pending = self._wire.post(request, self._node)
            self.asked = True
        except NoAnswer as error:
            self._retry(str(error))

    def receive(self, wait_s: float) -> bool:
        """Whether the response is here, or none will come."""
        pending = self._pending
        if pending is None:
            return True
        if not pending.ready(wait_s) and time.monotonic() - pending.sent_s < REQUEST_TIMEOUT_S:
            return False
        self._pending = None
        try:
            answer = pending.answer(0)
        except NoAnswer as error:
            self.unknown = True
            self._retry(str(error))  # adding a partition twice is harmless
            return True
        for topic in answer.results_by_topic_v3_and_below:
            for part in topic.results_by_partition:
                self._judge((topic.name, part.partition_index), part.partition_error_code)
        return True

    def _judge(self, at: At, code: int) -> None:
        name, verdict = verdict_of(code)
        match verdict:
            case Verdict.STORED:
                self.added.add(at)
                self._missing_since = 0.0
            case _ if code == protocol.OPERATION_NOT_ATTEMPTED:
                pass
            case Verdict.AGAIN | Verdict.ELSEWHERE | Verdict.MAYBE:
                self._retry(name)
            case Verdict.MISSING:
                now = time.monotonic()
                self._missing_since = self._missing_since or now
                if now - self._missing_since > MISSING_S:
                    self._failed(at, name, False)
                self._retry(name)
            case Verdict.FATAL if not self._confirmation.counts(self._node, code):
                self._retry(name)
            case Verdict.FATAL:
                self._failed(at, name, True)
            case _:
                self._failed(at, name, False)

    def _retry(self, detail: str) -> None:
        self._failed(None, detail, False)
        self._not_before = time.monotonic() + _PAUSE_S
        self._wire.forget(self._held.transactional_id)


# Produces Arrow columns over the shared connections of the process: encoded as columns, without a client or threads.
#
# Whoever sends also reads responses: a `send` that finds too many bytes unanswered waits, and `flush` waits for all.

HELD_BYTES_MAX = 8 << 20
"""Rows held back until they fill batches."""
UNANSWERED_BYTES_MAX = 16 << 20
"""Encoded batches without an acknowledgement. With the rows held, and the requests' own copies: below 64 MB."""
REQUEST_BYTES_MAX = 4 << 20
_PAUSE_S_MAX = 0.05


@dataclass
class _Request:
    pending: Pending
    node: int
    batches: list[tuple[PartitionQueue, Batch]]


class Sender:
    """Sends rows through the brokers' leaders. Not thread-safe.

    Args:
        config: from `producer_config`.
        held: the transaction; or the producer id and epoch of an idempotent sender, without transactional id; None:
            not idempotent: a batch is sent at most once.

    Attributes:
        failures: undelivered records since the last `clear`; counted, not raised.
        used_at: of time.monotonic(), when it was last flushed.
    """

    def __init__(self, cluster: Cluster, config: Mapping[str, str], held: Transaction | None) -> None:
        self.failures = Failures()
        self._cluster, self._wire = cluster, cluster.wire
        self._held = held
        self._transactional = held is not None and held.transactional_id != ""
        self._acks = -1 if config.get("acks", "all") in ("all", "-1") else int(config["acks"])
        self._encoder = Encoder(config, held, self._transactional)
        self._timeout_s = int(config["message.timeout.ms"]) / 1000
        self.used_at = time.monotonic()
        self._rows: dict[str, list[Rows]] = {}
        self._held_bytes = self._unanswered_bytes = 0
        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        self._requests: list[_Request] = []
        self._announced = (
            Announced(self._wire, held, self._announcement_failed) if held and self._transactional else None
        )
        self._fatal: ProducerError | None = None
        self._unknown = False

    # -- records -----------------------------------------------------------------------------------------------

    def send(self, rows: Rows) -> None:
        """Send rows, or hold them until they fill batches; blocks while too much is unanswered."""
        self._raise_fatal()
        if len(rows) == 0:
            return
        self._rows.setdefault(rows.topic, []).append(rows)
        self._held_bytes += bytes_of(rows)
        if self._held_bytes < HELD_BYTES_MAX:
            partitions = self.partitions(rows.topic, REQUEST_TIMEOUT_S)
            if self._held_bytes < partitions * BATCH_BYTES:
                return
        self._encode_held()
        self._pump()
        while self._unanswered_bytes > UNANSWERED_BYTES_MAX:
            self._pump(wait=True)
            self._raise_fatal()

    def send_one(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()
    ) -> None:
        listed = [{"key": k, "value": v} for k, v in headers] or None
        columns = pa.array([key], pa.binary()), pa.array([value], pa.binary()), pa.array([listed], HEADERS.type)
        self.send(Rows(topic, *columns, partition=np.array([partition], np.int32)))

    def flush(self, timeout_s: float) -> None:
        """Wait until every record was acknowledged or is counted in `failures`.

        Raises:
            ProducerError: a fatal error, or records still unacknowledged after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._encode_held()
        with Stall(server_name(self._cluster.servers)) as stall:
            self._pump()
            while left := sum(map(len, self._queues.values())):
                self._raise_fatal()
                stall.look(left)
                if time.monotonic() > deadline:
                    waiting = sum(q.records for q in self._queues.values())
                    detail = f"{waiting} records were not acknowledged in {timeout_s:.0f} s{self.failures.hint()}"
                    raise ProducerError("_TIMED_OUT", detail)
                self._pump(wait=True)
        self._raise_fatal()
        self.used_at = time.monotonic()

    def partitions(self, topic: str, timeout_s: float) -> int:  # noqa: ARG002 - requests have their own time-out
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        return self._cluster.count(topic)

    def close(self) -> None:
        """Forget what was not sent, and leave an open transaction open. Connections stay. Idempotent."""
        self._rows.clear()
        for queue in self._queues.values():
            queue.purge()

    # -- transactions ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is sent: a transaction begins with its first partition."""

    def abort(self, timeout_s: float) -> None:
        """Drop what waits, and abort the open transaction.

        An unanswered request may still arrive. Then the epoch is raised as well, so that brokers reject it.
        """
        from kafka.protocol.producer.transaction import InitProducerIdRequest

        held, deadline = self._held, time.monotonic() + timeout_s
        self.close()
        while self._requests and time.monotonic() < deadline:
            self._receive(wait=True, purged=True)
        announced = self._announced
        if held is None or announced is None or not announced.asked:
            return
        request = end_request(held, commit=False)
        if self._unknown or self._requests or announced.waiting or announced.unknown:
            request = InitProducerIdRequest(
                transactional_id=held.transactional_id,
                transaction_timeout_ms=60_000,
                producer_id=held.producer_id,
                producer_epoch=held.epoch,
                min_version=3,
                max_version=4,
            )
        try:
            self._wire.ask_coordinator(held.transactional_id, request, again=True)
        except NoAnswer as error:
            raise ProducerError("_TIMED_OUT", str(error)) from None

    # -- batches -----------------------------------------------------------------------------------------------

    def _encode_held(self) -> None:
        rows, self._rows, self._held_bytes = self._rows, {}, 0
        for topic, listed in rows.items():
            for one in joined(listed):
                self._encode(topic, self._encoder.within_limit(one, self.failures))

    def _encode(self, topic: str, rows: Rows) -> None:
        deadline = time.monotonic() + self._timeout_s
        for partition, chosen in self._encoder.spread(rows, self.partitions(topic, REQUEST_TIMEOUT_S)):
            queue = self._queue(topic, partition)
            try:
                for batch in self._encoder.encode(rows, chosen, queue.next, deadline):
                    queue.add(batch)
                    self._unanswered_bytes += len(batch.data)
            except BadRecord as error:  # its headers are too large
                self.failures.add("MSG_SIZE_TOO_LARGE", self._encoder.bytes_max)
                self._end_quietly(str(error))
                return

    def _queue(self, topic: str, partition: int) -> PartitionQueue:
        found = self._queues.get((topic, partition))
        if found is None:
            found = self._queues[topic, partition] = PartitionQueue(topic, partition, self._held is not None)
        return found

    # -- requests ----------------------------------------------------------------------------------------------

    def _pump(self, wait: bool = False) -> None:
        """Take responses that are here, and send what may be sent. Args: wait: briefly, if there is nothing to do."""
        announcing = self._announced is not None and self._announced.waiting
        if announcing and self._announced is not None:
            announcing = not self._announced.receive(_PAUSE_S_MAX if wait and not self._requests else 0)
            wait = wait and announcing
        if self._receive(wait and not announcing):
            wait = False
        if self._fatal is None:
            sent = self._dispatch()
            if wait and not sent and not self._requests and not announcing:
                time.sleep(0.005)

    def _receive(self, wait: bool, purged: bool = False) -> bool:
        """Whether a response arrived, or its time is over."""
        left: list[_Request] = []
        any_ended = False
        for request in self._requests:
            # Responses of one broker arrive in order; wait for the oldest only.
            arrived = request.pending.ready(_PAUSE_S_MAX if wait and not any_ended and not left else 0.0)
            sent_s = max(request.pending.sent_s, self._cluster.throttled.get(request.node, 0.0))
            if not arrived and time.monotonic() - sent_s < REQUEST_TIMEOUT_S:
                left.append(request)
                continue
            any_ended = True
            try:
                answer = request.pending.answer(0)
            except NoAnswer as error:
                self._unanswered(request, str(error), purged)
            else:
                self._answered(request, answer)
        self._requests = left
        return any_ended

    def _unanswered(self, request: _Request, detail: str, purged: bool) -> None:
        self.failures.note("_TRANSPORT", detail)
        self._wire.forget()
        for queue, batch in request.batches:
            self._unknown = True
            if self._held is None:
                self._failed(queue, batch, "_TRANSPORT")
            elif purged:
                self._dropped(queue, batch)
            else:
                queue.put_back(batch, time.monotonic())

    def _answered(self, request: _Request, answer: Any) -> None:
        found = {(t.name, p.index): p for t in answer.responses for p in t.partition_responses}
        refresh = False
        if answer.throttle_time_ms:
            self._cluster.throttled[request.node] = time.monotonic() + answer.throttle_time_ms / 1000
        for queue, batch in request.batches:
            at = queue.topic, queue.partition
            name, verdict = verdict_of(found[at].error_code if at in found else _NETWORK_EXCEPTION)
            if verdict in (Verdict.GAP, Verdict.FATAL) and not is_leader(self._wire, request.node, *at):
                verdict = Verdict.ELSEWHERE
            now = time.monotonic()
            match verdict:
                case Verdict.STORED:
                    if found[at].base_offset >= 0 and queue.is_first(batch):
                        queue.end = found[at].base_offset + batch.records
                    self._dropped(queue, batch)
                case Verdict.AGAIN:
                    queue.put_back(batch, now)
                case Verdict.ELSEWHERE:
                    refresh = True
                    queue.put_back(batch, now)
                case Verdict.MAYBE if self._held is not None:
                    queue.put_back(batch, now)
                case Verdict.MISSING:
                    refresh = True
                    batch.missing_since = batch.missing_since or now
                    if now - batch.missing_since < MISSING_S:
                        queue.put_back(batch, now)
                    else:
                        self._failed(queue, batch, name)
                case Verdict.GAP if self._held is not None and not queue.is_first(batch):
                    queue.put_back(batch, now, pause=False)
                case Verdict.GAP if batch.again and self._held is not None:
                    self._repeated(queue, batch, name)
                case Verdict.GAP | Verdict.FATAL:
                    self._rejected(queue, batch, name)
                case Verdict.TOO_LARGE if batch.records > 1:
                    self._split(queue, batch)
                case _:
                    self._failed(queue, batch, name)
        if refresh:
            self._wire.forget()
            for queue, _ in request.batches:
                self._cluster.outdated(queue.topic)

    def _dispatch(self) -> bool:
        """Whether a request was sent."""
        from kafka.protocol.producer import ProduceRequest

        now, by_node = time.monotonic(), dict[int, list[PartitionQueue]]()
        wanted = set[tuple[str, int]]()
        for at, queue in self._queues.items():
            for batch in queue.expired(now):
                self._unanswered_bytes -= len(batch.data)
                self._count(batch, "_MSG_TIMED_OUT")
            due = queue.due(now)
            if due is None or due > now:
                continue
            if self._announced is not None and at not in self._announced.added:
                wanted.add(at)
                continue
            try:
                node = self._wire.leader(*at)
                if now >= self._cluster.throttled.get(node, now):
                    by_node.setdefault(node, []).append(queue)
            except NoTopic:
                self._reject(queue, "UNKNOWN_TOPIC_OR_PART")
            except NoAnswer as error:
                self.failures.note("_TRANSPORT", str(error))
                queue.put_back(queue.take(), now)
        if wanted and self._announced is not None:
            self._announced.add(wanted)
        Topic, Part = ProduceRequest.TopicProduceData, ProduceRequest.TopicProduceData.PartitionProduceData  # noqa: N806
        sent = False
        for node, queues in by_node.items():
            while queues:
                size, topics = 0, dict[str, list[Any]]()
                batches: list[tuple[PartitionQueue, Batch]] = []
                while queues and (not batches or size < REQUEST_BYTES_MAX):
                    queue = queues.pop(0)
                    batch = queue.take()
                    size += len(batch.data)
                    batches.append((queue, batch))
                    topics.setdefault(queue.topic, []).append(Part(index=queue.partition, records=batch.data))
                request = ProduceRequest(
                    transactional_id=self._held.transactional_id if self._held and self._transactional else None,
                    acks=self._acks,
                    timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                    topic_data=[Topic(name=t, partition_data=p) for t, p in topics.items()],
                    min_version=3,
                    max_version=11,
                )
                try:
                    self._requests.append(_Request(self._wire.post(request, node), node, batches))
                    sent = True
                except NotSent as error:
                    self.failures.note("_TRANSPORT", str(error))
                    self._wire.forget()
                    for queue, batch in batches:
                        queue.put_back(batch, time.monotonic())
        return sent

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _dropped(self, queue: PartitionQueue, batch: Batch) -> None:
        queue.drop(batch)
        self._unanswered_bytes -= len(batch.data)

    def _failed(self, queue: PartitionQueue, batch: Batch, name: str) -> None:
        self._dropped(queue, batch)
        self._count(batch, name)

    def _rejected(self, queue: PartitionQueue, batch: Batch, name: str) -> None:
        self._failed(queue, batch, name)
        self._end(name, f"partition {queue.partition} of {queue.topic!r}")

    def _repeated(self, queue: PartitionQueue, batch: Batch, name: str) -> None:
        """The broker does not recognise a batch that was sent again: it is missing, or the broker was killed after it
        had stored this and later ones. What a broker that was killed still knows of a producer is its last batch.
        """
        at, [sent] = (queue.topic, queue.partition), headers(batch.data)
        try:
            if is_stored(self._wire, at, sent, queue.end, time.monotonic() + REQUEST_TIMEOUT_S):
                self._dropped(queue, batch)
            else:
                self._rejected(queue, batch, name)
        except NoAnswer as error:
            self.failures.note("_TRANSPORT", str(error))
            self._wire.forget()
            queue.put_back(batch, time.monotonic())

    def _count(self, batch: Batch, name: str) -> None:
        for _ in range(batch.records):
            self.failures.add(name, batch.largest or len(batch.data))
        if self._held is not None:
            self._end_quietly(name)  # what follows would leave a gap

    def _announcement_failed(self, at: tuple[str, int] | None, name: str, fatal: bool) -> None:
        if fatal:
            self._end(name, f"the coordinator rejected partition {at}")
        elif at is None:
            self.failures.note("_TRANSPORT", name)
        elif at in self._queues:
            self._reject(self._queues[at], name)

    def _reject(self, queue: PartitionQueue, name: str) -> None:
        for batch in queue.purge():
            self._unanswered_bytes -= len(batch.data)
            self._count(batch, name)

    def _end_quietly(self, name: str) -> None:
        """Send nothing more: what waits is counted as failed."""
        for queue in self._queues.values():
            for batch in queue.purge():
                self._unanswered_bytes -= len(batch.data)
                for _ in range(batch.records):
                    self.failures.add("_PURGE_QUEUE", len(batch.data))
        self.failures.fatal = self.failures.fatal or name

    def _end(self, name: str, detail: str) -> None:
        self._fatal = self._fatal or ProducerError(name, detail + self.failures.hint())
        self._end_quietly(name)

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _split(self, queue: PartitionQueue, batch: Batch) -> None:
        """The topic's limit is lower: send the records in smaller batches."""
        parts = self._encoder.halves(batch, (queue.topic, queue.partition))
        self._unanswered_bytes += sum(len(p.data) for p in parts) - len(batch.data)
        queue.replace(batch, parts)
