"""Rows to record batches by partition, and the batches' order, sequences and retries until acknowledged. No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import record_batch
from delivered.clients.kafka.channel import Buffer
from delivered.clients.kafka.errors import Failures
from delivered.clients.kafka.rows import RECORD_OVERHEAD, Rows
from delivered.clients.kafka.transactions import Transaction
from delivered.model.limits import RECORD_BATCH_BYTES_MAX

# Record batches of one partition between encoding and acknowledgement: their order, sequences, retries. No I/O.
#
# A broker remembers the last five batches of an idempotent producer in each partition. So at most five are unanswered;
# a batch that is sent again keeps its sequence, and nothing new is sent before it is acknowledged, which could make the
# broker forget it. Batches are sent again in their order, one at a time, once every other one has its response.

UNANSWERED_MAX = 5
"""Batches of one partition in flight: as many as brokers remember."""
SEQUENCES = 1 << 31
"""Sequences wrap around to 0."""
MISSING_S = 5.0
"""How long a topic or partition may be unknown to a broker: metadata of a new one takes time to spread."""
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.01, 0.5


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
    """

    def __init__(self, topic: str, partition: int, sequenced: bool) -> None:
        self.topic, self.partition = topic, partition
        self._sequenced = sequenced
        self.next = 0 if sequenced else -1
        self._waiting: deque[Batch] = deque()
        self._unanswered: list[Batch] = []
        self._settling = False
        self._number = 0
        self._pause_s = _PAUSE_S_MIN
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
        self._pause_s, self._not_before = _PAUSE_S_MIN, 0.0
        self._settled()

    def put_back(self, batch: Batch, now: float, pause: bool = True) -> None:
        """The batch is to be sent again, in its place."""
        self._unanswered.remove(batch)
        self._waiting.insert(self._place(batch), batch)
        if pause:
            self._not_before = now + self._pause_s
            self._pause_s = min(self._pause_s * 1.5, _PAUSE_S_MAX)
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
            "compression": config.get("compression.type", config.get("compression.codec", "none")),
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
