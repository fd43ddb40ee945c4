"""Reads a partition of the internal topic: committed records, up to an end that no stale answer can hide.

A Fetch response's high watermark is no end: a leader that has just been elected learns it from its followers, and until
then reports an old one. ListOffsets does not answer before (KIP-207), and no answer of an earlier leader epoch counts.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.errors import NoAnswer, only
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.clients.kafka.record_batch_native import library
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.limits import REQUEST_TIMEOUT_S

HIDDEN_S = 2.0
"""How long an open transaction may hide what is read before it is asked whether its end was lost."""

_FETCH_BYTES = 4 << 20
NOBODY = -1
_CODECS = (0, 1)
"""None and gzip, which `ledger_write` uses."""
_UNPACKED_BYTES_MAX = 256 << 20
_RECORDS_MAX = 1 << 20
"""Of a batch."""
_UNCOMMITTED, _COMMITTED = 0, 1
_LATEST = -1


@dataclass(frozen=True)
class Record:
    """
    Attributes:
        producer: the producer id of its transaction, which the broker checked; NOBODY: it was written in none, and no
            ledger or task of ours did that.
        epoch: of that producer.
        key: empty: the batch at this offset has a right checksum, but is none that a ledger writes.
    """

    offset: int
    key: bytes
    value: bytes | None
    producer: int
    epoch: int


class Hidden(NoAnswer):
    """An open transaction hides the end of a partition."""


def _every(_: Record) -> bool:
    return True


def damaged(topic: str, partition: int, offset: int, why: str) -> InvariantBroken:
    """The error for what a ledger's own record cannot be."""
    return InvariantBroken(
        "LEDGER_DAMAGED",
        f"Topic {topic!r}, partition {partition}, offset {offset}: {why}. What it held is unknown, so it was not "
        "skipped, and the query stops.",
        next_step="check the brokers' disks; restore the topic from a replica that holds this offset undamaged (elect "
        "it as leader), then start again",
    )


class CommittedReader:
    """A read_committed reader of one partition; each read continues after the last one. Not thread-safe.

    Attributes:
        position: of the next record.
    """

    def __init__(self, wire: Wire, topic: str, partition: int) -> None:
        self._wire = wire
        self._topic = topic
        self._partition = partition
        self._end = 0
        self.position = 0

    def reach(self, end: int) -> None:
        """Read at least up to this offset: it was acknowledged by all replicas in sync."""
        self._end = max(self._end, end)

    def read(self, deadline: float, wait: bool = True, ours: Callable[[Record], bool] = _every) -> Iterator[Record]:
        """Records of committed transactions, oldest first, up to the present end.

        Args:
            deadline: of time.monotonic().
            wait: for transactions that are open before that end; else stop at the last stable offset.
            ours: whether a record matters. Open transactions without such records are not waited for;
                the next read returns committed records behind them once more.

        Raises:
            NoAnswer: no answer. Hidden: such a transaction is still open at the deadline; the next read continues here.
            NoTopic: the topic does not exist.
        """
        end = self._wire.patiently(lambda: self._list_end(wait))
        pause = 0.002
        while self.position < end:
            part = self._wire.patiently(lambda: self._fetch(self.position, _COMMITTED))
            before = self.position
            yield from self._records(part)
            if not part.records:
                # Compaction removed everything there.
                self.position = max(self.position, min(end, part.last_stable_offset))
            if self.position == before and self.position < end:
                behind = self._behind_open(end, ours)
                if behind is not None:
                    yield from behind
                    return
                if time.monotonic() > deadline:
                    raise Hidden(
                        f"a transaction that is still open hides partition {self._partition} of {self._topic!r} from "
                        f"offset {part.last_stable_offset} to {end}"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.25)

    def _behind_open(self, end: int, ours: Callable[[Record], bool]) -> list[Record] | None:
        """Committed records from an open transaction's start to the end. None: records of ours are undecided.

        Between the last stable offset and the end, control records tell which transactions have ended.
        """
        at, found = self.position, list[Record]()
        undecided: dict[int, list[Record]] = {}
        while at < end:
            start = at
            part = self._wire.patiently(partial(self._fetch, start, _UNCOMMITTED))
            if not part.records:
                return None  # the leader does not know the end yet
            for batch in self._batches(part):
                at = max(at, batch.base_offset + batch.last_offset_delta + 1)
                if batch.is_control_batch:
                    records = undecided.pop(batch.producer_id, [])
                    if self._is_commit(batch):
                        found += records
                    continue
                records = [r for r in _read(batch) if r.offset >= start]
                if batch.is_transactional:
                    undecided.setdefault(batch.producer_id, []).extend(records)
                else:
                    found += records
            if at == start:
                return None
        if any(ours(r) for records in undecided.values() for r in records):
            return None
        return sorted(found, key=lambda r: r.offset)

    def _is_commit(self, control: Any) -> bool:
        try:
            return bool(next(iter(control)).commit)
        except Exception as error:  # any; no record: StopIteration
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise damaged(
                self._topic, self._partition, control.base_offset, f"an end of a transaction cannot be read: {what}"
            ) from None

    def end(self) -> int:
        """Where the partition ends now. Raises NoAnswer."""
        return self._wire.patiently(lambda: self._list_end(True))

    def _list_end(self, wait: bool) -> int:
        """The high watermark, never below one seen before; unless `wait`, the last stable offset."""
        from kafka.protocol.consumer import ListOffsetsRequest

        Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806
        leader = self._wire.led(self._topic, self._partition)
        part = Topic.ListOffsetsPartition(
            partition_index=self._partition, current_leader_epoch=leader.epoch, timestamp=_LATEST
        )
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=_UNCOMMITTED if wait else _COMMITTED,
            topics=[Topic(name=self._topic, partitions=[part])],
            max_version=6,
        )
        answer: Any = only(only(self._wire.ask(request, leader.node).topics, "topics").partitions, "partitions")
        if answer.error_code != protocol.NONE:
            raise self._error(answer.error_code)
        end = int(answer.offset)
        if wait and end < self._end:
            raise NoAnswer(f"{self._topic}-{self._partition} ends at offset {end}, but ended at {self._end} before")
        if wait:
            self._end = end
        return end

    def _fetch(self, offset: int, isolation: int) -> Any:
        from kafka.protocol.consumer.fetch import FetchRequest

        Topic = FetchRequest.FetchTopic  # noqa: N806
        leader = self._wire.led(self._topic, self._partition)
        part = Topic.FetchPartition(
            partition=self._partition,
            current_leader_epoch=leader.epoch,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=_FETCH_BYTES,
        )
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_FETCH_BYTES,
            isolation_level=isolation,
            session_id=0,
            session_epoch=-1,
            topics=[Topic(topic=self._topic, partitions=[part])],
            forgotten_topics_data=[],
            rack_id="",
            max_version=11,
        )
        answer = self._wire.ask(request, leader.node)
        if answer.error_code != protocol.NONE:
            raise NoAnswer(name_of(answer.error_code))
        found = only(only(answer.responses, "topics").partitions, "partitions")
        if found.error_code == protocol.OFFSET_OUT_OF_RANGE and offset == 0:
            raise NoAnswer("the start of the partition moved")
        if found.error_code != protocol.NONE:
            raise self._error(found.error_code)
        return found

    def _batches(self, part: Any) -> Iterator[Any]:
        """
        Raises:
            InvariantBroken: LEDGER_DAMAGED: a batch differs from what its producer sent.
        """
        from kafka.record import MemoryRecords

        if not part.records:
            return
        at = self.position
        try:
            batches = MemoryRecords(bytes(part.records))
            while batches.has_next():
                batch = batches.next_batch()
                at = batch.base_offset
                if not _has_checksum(batch):
                    raise damaged(self._topic, self._partition, at, "the record batch does not match its checksum")
                if batch.is_control_batch and batch.compression_type:
                    raise damaged(self._topic, self._partition, at, "a control batch is compressed")
                yield batch
        except DeliveredError:
            raise
        except Exception as error:  # kafka-python raises anything, for older formats and for bytes that are none
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise damaged(self._topic, self._partition, at, f"no record batch can be read: {what}") from None

    def _error(self, code: int) -> NoAnswer:
        return NoAnswer(f"{self._topic}-{self._partition}: {name_of(code)}")

    def _records(self, part: Any) -> Iterator[Record]:
        try:
            yield from self._visible(part)
        except (DeliveredError, NoAnswer):
            raise
        except Exception as error:  # kafka-python raises anything for bytes that are no record batch
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise NoAnswer(f"{self._topic}-{self._partition}: records that cannot be read: {what}") from None

    def _visible(self, part: Any) -> Iterator[Record]:
        aborted = sorted(((t.first_offset, t.producer_id) for t in part.aborted_transactions or ()), reverse=True)
        dead: set[int] = set()
        for batch in self._batches(part):
            last = batch.base_offset + batch.last_offset_delta
            while aborted and aborted[-1][0] <= last:
                dead.add(aborted.pop()[1])
            if batch.is_control_batch:
                dead.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in dead):
                yield from (r for r in _read(batch) if r.offset >= self.position)
            self.position = max(self.position, last + 1)


def _read(batch: Any) -> list[Record]:
    producer = int(batch.producer_id) if batch.is_transactional else NOBODY
    epoch = int(batch.producer_epoch)
    try:
        if batch.compression_type not in _CODECS or batch.records_count > _RECORDS_MAX:
            raise ValueError("no ledger writes this")
        _unpack(batch)
        return [
            Record(r.offset, bytes(r.key), None if r.value is None else bytes(r.value), producer, epoch)
            for r in batch
            if r.key is not None
        ]
    except Exception:
        # Its checksum is right, so a producer made it so. Whether that matters depends on whose it is.
        return [Record(batch.base_offset, b"", None, producer, epoch)]


def _has_checksum(batch: Any) -> bool:
    """Whether a batch has its producer's checksum; by our C code, as it takes 0.3 s a megabyte in Python."""
    loaded = library()
    if loaded is None:
        return bool(batch.validate_crc())
    body = bytes(batch._buffer[batch.ATTRIBUTES_OFFSET :])
    return int(loaded.rb_crc32c(body, len(body), 0)) == int(batch.crc)


def _unpack(batch: Any) -> None:
    """Unpack a batch here: the client has no bound. Raises ValueError, zlib.error: it is none that a ledger writes."""
    if batch.compression_type == 0:
        return
    unpacking = zlib.decompressobj(wbits=31)
    found = unpacking.decompress(batch._buffer[batch.HEADER_STRUCT.size :], _UNPACKED_BYTES_MAX)
    if not unpacking.eof or unpacking.unused_data:  # too large, cut off, or more gzip members
        raise ValueError("no ledger writes this")
    batch._buffer, batch._pos, batch._decompressed = bytearray(found), 0, True


def barrier(wire: Wire, topic: str, partition: int) -> int:
    """An offset that is beyond every record committed so far: that of a tombstone which all replicas in sync have now.

    A leader that was replaced without knowing it cannot get one acknowledged.

    Raises:
        NoAnswer: not acknowledged within 120 s.
    """
    from kafka.protocol.producer.produce import ProduceRequest
    from kafka.record.default_records import DefaultRecordBatchBuilder

    Topic = ProduceRequest.TopicProduceData  # noqa: N806

    def ask() -> int:
        builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 20)
        builder.append(0, timestamp=time.time_ns() // 1_000_000, key=b'["barrier"]', value=None, headers=[])
        data = Topic.PartitionProduceData(index=partition, records=bytes(builder.build()))
        request = ProduceRequest(
            transactional_id=None,
            acks=-1,
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            topic_data=[Topic(name=topic, partition_data=[data])],
            max_version=9,
        )
        answer: Any = wire.ask(request, wire.leader(topic, partition))
        part = only(only(answer.responses, "topics").partition_responses, "partitions")
        if part.error_code != protocol.NONE:
            raise NoAnswer(f"{topic}-{partition}: {name_of(part.error_code)}")
        return int(part.base_offset) + 1

    return wire.patiently(ask)
