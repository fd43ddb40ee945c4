"""Record batches of one partition between encoding and acknowledgement: their order, sequences, retries. No I/O.

A broker remembers the last five batches of an idempotent producer in each partition. So at most five are unanswered; a
batch that is sent again keeps its sequence, and nothing new is sent before it is acknowledged, which could make the
broker forget it. Batches are sent again in their order, one at a time, once every other one has its response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from delivered.clients.kafka.channel import Buffer

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
