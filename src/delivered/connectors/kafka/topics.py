"""The pipeline's internal topic: layout, creation, and a read_committed reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.model.errors import Refused, Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S

STATE_PARTITION = 0
"""Owners, newest decisions and begun batches: small, read at every start."""
HISTORY_PARTITION = 1
"""Decisions kept for the audit."""
MARKERS_FROM = 2
MARKER_PARTITIONS = 6
"""Shared by a pipeline's sinks; several, so that an open transaction of one sink rarely hides another's markers."""
PARTITIONS = MARKERS_FROM + MARKER_PARTITIONS

_FETCH_BYTES = 4 << 20
_READ_COMMITTED = 1

LEDGER_TOPICS = "__delivered_"
"""Prefix of internal topics without a configured name."""

_CONFIG = {
    "cleanup.policy": "compact",
    # A read costs what compaction has not removed yet: one or two segments per partition.
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "600000",
    "max.message.bytes": str(2 << 20),
}


def ledger_topic(scope: Scope, named: str | None) -> str:
    """Name of the pipeline's internal topic."""
    return named or f"{LEDGER_TOPICS}{scope.pipeline}"


def ensure_topic(wire: Wire, topic: str, replication: int | None) -> None:
    """Create the topic if it does not exist, and wait until its partitions have leaders.

    Args:
        replication: None: the broker's default.

    Raises:
        Refused: no permission, or the name is not allowed. Unreachable: no answer.
    """
    wire.forget()  # it may have been deleted since this process last saw it
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    if not _ready(wire, topic):
        _create(wire, topic, replication)
    while not _ready(wire, topic):
        if time.monotonic() > deadline:
            raise Unreachable(
                "LEDGER_UNAVAILABLE",
                f"The ledger's topic {topic!r} has no leader for some partition after {OUTAGE_PATIENCE_S:.0f} s.",
                next_step="check the brokers",
            )
        time.sleep(0.02)


def _ready(wire: Wire, topic: str) -> bool:
    try:
        for partition in range(PARTITIONS):
            wire.leader(topic, partition)
    except NoAnswer:
        return False
    return True


def _create(wire: Wire, topic: str, replication: int | None) -> None:
    from kafka.protocol.admin.topics import CreateTopicsRequest

    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806
    Config = Topic.CreatableTopicConfig  # noqa: N806
    request = CreateTopicsRequest(
        topics=[
            Topic(
                name=topic,
                num_partitions=PARTITIONS,
                replication_factor=-1 if replication is None else replication,
                assignments=[],
                configs=[Config(name=k, value=v) for k, v in _CONFIG.items()],
            )
        ],
        timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
        validate_only=False,
        max_version=5,
    )
    try:
        answer = wire.patiently(lambda: wire.ask(request))  # idempotent
    except NoAnswer as error:
        raise Unreachable(
            "LEDGER_UNAVAILABLE",
            f"The ledger's topic {topic!r} could not be created: {error}.",
            next_step="create the topic, or grant the user Create on it, then start again",
        ) from None
    found = answer.topics[0]
    if found.error_code in (protocol.NONE, protocol.TOPIC_ALREADY_EXISTS):
        return
    raise Refused(
        "LEDGER_TOPIC",
        f"The ledger's topic {topic!r} could not be created: {name_of(found.error_code)} {found.error_message or ''}.",
        next_step=f"create it with cleanup.policy=compact and {PARTITIONS} partitions; or set ledgerTopic to another",
    )


def topic_id(wire: Wire, topic: str) -> str | None:
    """A topic's id; None: the topic does not exist, or the brokers are too old for topic ids.

    Raises:
        NoAnswer: still no answer after 120 s.
    """

    def ask() -> Any:
        found = wire.topic(topic)
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE, protocol.UNKNOWN_TOPIC_OR_PARTITION):
            raise NoAnswer(f"topic {topic!r}: {name_of(found.error_code)}")
        return found

    found = wire.patiently(ask)
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    known: Any = found.topic_id
    return str(known) if known is not None and known.int else None


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes
    value: bytes | None


class CommittedReader:
    """A read_committed reader of one partition; each read continues after the last one. Not thread-safe."""

    def __init__(self, wire: Wire, topic: str, partition: int) -> None:
        self._wire = wire
        self._topic = topic
        self._partition = partition
        self.position = 0

    def read(self, deadline: float, wait: bool = True) -> Iterator[Record]:
        """Records of committed transactions, oldest first, up to the present end.

        Args:
            deadline: of time.monotonic().
            wait: for transactions that are open before that end; else stop at the last stable offset.

        Raises:
            NoAnswer: no answer, or such a transaction is still open at the deadline.
            NoTopic: the topic does not exist.
        """
        end: int | None = None
        pause = 0.002
        while end is None or self.position < end:
            part = self._wire.patiently(self._fetch)
            if end is None:
                # The first response's end covers everything that existed when this was called.
                end = part.high_watermark if wait else part.last_stable_offset
            before = self.position
            yield from self._records(part)
            if not part.records:
                # Compaction removed everything there.
                self.position = max(self.position, min(end, part.last_stable_offset))
            if self.position == before and self.position < end:
                if time.monotonic() > deadline:
                    raise NoAnswer(
                        f"a transaction that is still open hides partition {self._partition} of {self._topic!r} from "
                        f"offset {part.last_stable_offset} to {end}"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.25)

    def _fetch(self) -> Any:
        from kafka.protocol.consumer.fetch import FetchRequest

        Topic = FetchRequest.FetchTopic  # noqa: N806
        part = Topic.FetchPartition(
            partition=self._partition,
            current_leader_epoch=-1,
            fetch_offset=self.position,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=_FETCH_BYTES,
        )
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_FETCH_BYTES,
            isolation_level=_READ_COMMITTED,
            session_id=0,
            session_epoch=-1,
            topics=[Topic(topic=self._topic, partitions=[part])],
            forgotten_topics_data=[],
            rack_id="",
            max_version=11,
        )
        answer = self._wire.ask(request, self._wire.leader(self._topic, self._partition))
        if answer.error_code != protocol.NONE:
            raise NoAnswer(name_of(answer.error_code))
        found = answer.responses[0].partitions[0]
        if found.error_code == protocol.OFFSET_OUT_OF_RANGE and self.position == 0:
            raise NoAnswer("the start of the partition moved")
        if found.error_code != protocol.NONE:
            raise NoAnswer(f"{self._topic}-{self._partition}: {name_of(found.error_code)}")
        return found

    def _records(self, part: Any) -> Iterator[Record]:
        from kafka.record import MemoryRecords

        if not part.records:
            return
        aborted = sorted(((t.first_offset, t.producer_id) for t in part.aborted_transactions or ()), reverse=True)
        dead: set[int] = set()
        batches = MemoryRecords(bytes(part.records))
        while batches.has_next():
            batch = batches.next_batch()
            last = batch.base_offset + batch.last_offset_delta
            while aborted and aborted[-1][0] <= last:
                dead.add(aborted.pop()[1])
            if batch.is_control_batch:
                dead.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in dead):
                for record in batch:
                    if record.offset >= self.position and record.key is not None:
                        yield Record(record.offset, bytes(record.key), None if record.value is None else record.value)
            self.position = max(self.position, last + 1)
