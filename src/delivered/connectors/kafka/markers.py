"""Markers: the record that each shard of a batch writes into its own transaction, and how it is found again.

A marker is visible if and only if the rows beside it are. Markers live in the pipeline's internal topic, apart from the
decisions: a prepared transaction holds back everything behind it in the partitions it wrote to.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from delivered.connectors.kafka import protocol
from delivered.connectors.kafka.protocol import NoAnswer, Wire, name_of
from delivered.model import record_format
from delivered.model.errors import OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work

STATE_PARTITION = 0
"""Owners, newest decisions, begun batches: small, read at every start."""
HISTORY_PARTITION = 1
"""Decisions kept for the audit."""
_MARKERS_FROM = 2
MARKER_PARTITIONS = 6
"""Sinks of one pipeline share these: an open transaction of one rarely hides a marker of another."""
PARTITIONS = _MARKERS_FROM + MARKER_PARTITIONS

_FETCH_BYTES = 4 << 20
_READ_COMMITTED = 1


LEDGER_TOPICS = "__delivered_"
"""Start of the names of internal topics that nobody named."""


def ledger_topic(scope: Scope, named: str | None) -> str:
    """Name of the pipeline's internal topic."""
    return named or f"{LEDGER_TOPICS}{scope.pipeline}"


def marker_partition(scope: Scope) -> int:
    digest = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).digest()
    return _MARKERS_FROM + int.from_bytes(digest, "big") % MARKER_PARTITIONS


def marker_key(scope: Scope, shard: int) -> bytes:
    return json.dumps(["marker", scope.pipeline, scope.sink, shard], separators=(",", ":")).encode()


def marker_value(work: Work, fingerprint: Fingerprint) -> bytes:
    marker = {
        "incarnation": work.scope.incarnation,
        "batch": work.batch,
        "attempt": work.attempt,
        "fingerprint": str(fingerprint),
    }
    return json.dumps(record_format.numbered(marker), separators=(",", ":")).encode()


def read_marker(value: bytes) -> tuple[str, int, Fingerprint]:
    """Incarnation, batch and fingerprint of a marker."""
    marker = record_format.known(json.loads(value), "a marker")
    return marker["incarnation"], marker["batch"], Fingerprint.parse(marker["fingerprint"])


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes
    value: bytes | None


class CommittedReader:
    """Reads one partition as a read_committed consumer does, from where it stopped, up to what was there when asked.

    Not safe for several threads.
    """

    def __init__(self, wire: Wire, topic: str, partition: int) -> None:
        self._wire = wire
        self._topic = topic
        self._partition = partition
        self.position = 0

    def read(self, deadline: float, wait: bool = True) -> Iterator[Record]:
        """Records of committed transactions, oldest first, up to the end as it is now.

        Args:
            deadline: of time.monotonic().
            wait: for transactions that are open before that end: without their outcome the answer would be a guess.
                Else only up to the first of them.

        Raises:
            NoAnswer: no answer, or such a transaction is still open at the deadline. NoTopic: there is no such topic.
        """
        end: int | None = None
        pause = 0.002
        while end is None or self.position < end:
            part = self._wire.patiently(self._fetch)
            if end is None:
                # The first answer's end is at least what was there when this was called.
                end = part.high_watermark if wait else part.last_stable_offset
            before = self.position
            yield from self._records(part)
            if not part.records:
                # Nothing is left there, committed or not: compaction took it.
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


def find_marker(wire: Wire, topic: str, work: Work, wait_s: float) -> Fingerprint | None:
    """Fingerprint in the marker of a shard of a batch if its rows are visible, else None.

    Raises:
        OutcomeUnknown: the partition could not be read to its end.
    """
    reader = CommittedReader(wire, topic, marker_partition(work.scope))
    key, found = marker_key(work.scope, work.shard), None
    try:
        for record in reader.read(time.monotonic() + wait_s):
            if record.key == key and record.value is not None:
                incarnation, batch, fingerprint = read_marker(record.value)
                if (incarnation, batch) == (work.scope.incarnation, work.batch):
                    found = fingerprint
    except NoAnswer as error:
        raise OutcomeUnknown(
            "MARKER_UNREADABLE",
            f"Whether shard {work.shard} of batch {work.batch} is visible cannot be told: {error}.",
            next_step="`delivered transactions list` shows who holds the partition; start again when it is free",
        ) from None
    return found
