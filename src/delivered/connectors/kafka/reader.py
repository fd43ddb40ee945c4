"""Reads one slice: the records of a range of offsets of one partition, on an executor.

A range is complete when the consumer's position reaches its end, even if the last offsets hold no records: transaction
markers and aborted records take offsets too. Records are never counted by subtracting offsets.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka.fetcher import Fetched, Fetcher
from delivered.clients.kafka.librdkafka import SOURCE_SETTINGS, Consumer, by_arrow
from delivered.clients.kafka.record_batch import BatchTooLarge, Partition
from delivered.connectors.kafka.admin import KafkaDriverClient
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.contract.source import REJECTED
from delivered.kits.warm import WarmClients
from delivered.model.errors import InvariantBroken, Unreachable, UsageError
from delivered.model.limits import RESTART_CONFIRM_S, SOURCE_PATIENCE_S
from delivered.source.columns import columns
from delivered.source.ranges import Range

# Record batches that are too large to be decompressed, as dead letters of their source.

_RECORDS = pa.field("recordBatch", pa.int64())
"""In a letter: its value is a record batch of so many offsets, not a record's value."""

Read = Callable[[Callable[[BatchTooLarge, int], None]], Iterator[pa.RecordBatch]]
"""Reads a slice; calls its argument for what it leaves out."""


def raw_schema(headers: bool) -> pa.Schema:
    """Columns of records, and of what stands for a record batch."""
    return columns(headers).append(_RECORDS)


@dataclass(frozen=True)
class Rejecting:
    """
    Attributes:
        headers: rows have them.
        kept: rows have the column REJECTED; else what is rejected is left out.
    """

    headers: bool
    kept: bool

    def read(self, read: Read, partition: Partition) -> Iterator[pa.RecordBatch]:
        found: list[dict[str, Any]] = []

        def keep(error: BatchTooLarge, offset: int) -> None:
            topic, number = partition
            found.append(
                {
                    "reason": error.message,
                    "topic": topic,
                    "partition": number,
                    "offset": offset,
                    "value": error.batch,
                    "more": json.dumps({_RECORDS.name: error.next_offset - offset}),
                }
            )

        for batch in read(keep):
            if found:
                yield from self._rejected(found)
                found.clear()
            yield batch.append_column(REJECTED, pa.nulls(batch.num_rows, REJECTED.type)) if self.kept else batch
        if found:
            yield from self._rejected(found)

    def decoded(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `delivered.contract.schemas.RejectsRecords`."""
        batches = raw.column(_RECORDS.name).is_valid()
        rows = raw.select(columns(self.headers).names)
        if not self.kept:
            return rows.filter(pc.invert(batches))
        why = "it is a record batch; raise maxRecordBatchBytes, and replay its offsets"
        reasons = [{"reason": why} if is_batch else None for is_batch in batches.to_pylist()]
        return rows.append_column(REJECTED, pa.array(reasons, REJECTED.type))

    def _rejected(self, found: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
        if self.kept:
            schema = columns(self.headers).append(REJECTED)
            yield pa.RecordBatch.from_pylist([{REJECTED.name: each} for each in found], schema=schema)


log = logging.getLogger("delivered.kafka")

Rejected = Callable[[BatchTooLarge, int], None]
"""Called for a record batch that is left out, with the first offset of it that would have been read."""

_POLL_S = 0.5
_STALL_LOOK_S = 5.0


class RangeConsumer(Protocol):
    """Reads one partition after another. Not thread-safe."""

    def assign(self, partition: Partition, offset: int) -> None:
        """Read a partition, from this offset. What was fetched ahead for the previous one is dropped."""

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Wait at most `timeout_s` for records; return what is there.

        Raises:
            UsageError, Unreachable: reading is not permitted, or the connection is refused.
        """

    def fetch_position(self) -> int:
        """Where fetching is; -1: unknown. It also moves over aborted records."""

    def release(self) -> None:
        """Stop fetching; keep the connection."""

    def close(self) -> None: ...


_idle: WarmClients[RangeConsumer] = WarmClients(2)


@contextmanager
def warm_consumer(options: SourceOptions) -> Iterator[RangeConsumer]:
    """An idle, connected consumer with the same options, or a new one."""
    key = repr((options.through, sorted(options.client.items()), options.headers, options.batch_bytes_max))
    with _idle.lent(key, lambda: _consumer(options)) as consumer:
        yield consumer  # if the slice is not read to its end, the consumer is closed
        consumer.release()


def _consumer(options: SourceOptions) -> RangeConsumer:
    if by_arrow(OWNER, options.through, options.client, SOURCE_SETTINGS):
        fetcher = Fetcher(OWNER, options.client, options.headers, options.batch_bytes_max)
        if fetcher.possible():
            return fetcher
        fetcher.close()
        if options.through == "arrow":
            raise UsageError(
                "KAFKA_TOO_OLD",
                f"{OWNER}: option 'client' is arrow, which needs Kafka 2.7; those at {options.servers} are older.",
                next_step="write client=auto or client=librdkafka",
            )
        log.warning("the brokers at %s are older than Kafka 2.7: reading through librdkafka", options.servers)
    return Consumer(OWNER, options.client, options.headers)


def read_range(
    options: SourceOptions, wanted: Range[Partition], rejected: Rejected | None = None
) -> Iterator[pa.RecordBatch]:
    """Records of a range, in offset order.

    Memory is bounded by the consumer's queue and one batch. An empty range sends no request.

    Args:
        rejected: called for a record batch above `maxRecordBatchBytes`, after the records before it were taken; None:
            it is an error.

    Raises:
        BatchTooLarge
        InvariantBroken: records of the range no longer exist, and `failOnDataLoss` is true.
        Unreachable: the brokers did not answer for two minutes, or rejected the connection.
        UsageError: reading is not permitted.
    """
    if wanted.start >= wanted.end:
        return
    with warm_consumer(options) as consumer:
        yield from _Reading(options, wanted, consumer, rejected).batches()


def written_at(options: SourceOptions, waiting: Mapping[Partition, tuple[int, int]]) -> dict[Partition, int]:
    """When the first visible record of each range of offsets was written, in milliseconds since 1970. Fetches little.

    Raises:
        Unreachable, UsageError, InvariantBroken: as `read_range`.
    """
    small = replace(options, headers=False, client={**options.client, "max.partition.fetch.bytes": "16384"})
    found: dict[Partition, int] = {}
    with closing(_consumer(small)) as consumer:
        for partition, (start, end) in waiting.items():
            reading = _Reading(small, Range(partition, start, end), consumer, lambda *_: None)
            first = next(reading.batches(), None)
            if first is not None:
                found[partition] = first.column("timestamp")[0].value // 1000
    return found


class _Reading:
    def __init__(
        self, options: SourceOptions, wanted: Range[Partition], consumer: RangeConsumer, rejected: Rejected | None
    ) -> None:
        self._options = options
        self._rejected = rejected
        self._wanted = wanted
        self._consumer = consumer
        self._position = wanted.start
        self._where = f"{wanted.key[0]}-{wanted.key[1]}"
        self._waited_s = 0.0
        self._look_at_s = _STALL_LOOK_S
        self._fetcher = -1
        self._asker: KafkaDriverClient | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        end = self._wanted.end
        self._consumer.assign(self._wanted.key, self._position)
        while self._position < end:
            asked = time.monotonic()
            try:
                fetched = self._consumer.fetch(end, _POLL_S)
            except BatchTooLarge as error:
                self._pass_over(error)
                continue
            # Count only the time spent waiting for the broker, not the task's own.
            self._waited_s += time.monotonic() - asked
            if fetched.batch is not None:
                yield fetched.batch
            if fetched.position > self._position:
                self._position = fetched.position
                self._waited_s, self._look_at_s = 0.0, _STALL_LOOK_S
            if self._position >= end:
                return
            if fetched.out_of_range or fetched.gone or fetched.end_of_log:
                self._confirm(fetched)
            elif self._waited_s > self._look_at_s:
                self._look_for_progress()

    def _pass_over(self, error: BatchTooLarge) -> None:
        if self._rejected is None:
            raise error
        self._rejected(error, max(error.offset, self._wanted.start))
        self._position = min(error.next_offset, self._wanted.end)
        self._waited_s = 0.0
        if self._position < self._wanted.end:
            self._consumer.assign(self._wanted.key, self._position)

    def _confirm(self, fetched: Fetched) -> None:
        """The log seems to end before the range does: ask until that is certain."""
        end = self._wanted.end
        stuck = fetched.out_of_range or fetched.gone  # librdkafka stopped fetching this assignment
        deadline = time.monotonic() + RESTART_CONFIRM_S
        while True:
            asked = time.monotonic()
            bounds = self._bounds()
            if bounds is None:
                self._waited_s += time.monotonic() - asked
                if self._waited_s > SOURCE_PATIENCE_S:
                    raise self._unreachable()
                if not stuck:
                    return  # nothing confirmed missing: go on reading
                deadline = time.monotonic() + RESTART_CONFIRM_S
                continue
            low, high = bounds
            if low > self._position:
                self._lost(self._position, min(low, end))
                self._position = min(low, end)
                stuck = True
            if high >= end:
                if stuck and self._position < end:
                    self._consumer.assign(self._wanted.key, self._position)
                return
            if time.monotonic() > deadline:
                self._lost(max(self._position, high), end)
                self._position = end
                return
            time.sleep(_POLL_S / 5)

    def _bounds(self) -> tuple[int, int] | None:
        """First offset and end (last stable offset) of the partition now; None: no answer.

        Not asked through the consumer, to which an unavailable broker and a missing partition look alike.
        """
        if self._asker is None:
            self._asker = KafkaDriverClient(self._options)
        try:
            found = self._asker.bounds(self._wanted.key)
        except Unreachable:
            self._asker.close()
            self._asker = None
            return None
        return found

    def _lost(self, start: int, end: int) -> None:
        text = (
            f"Offsets {start} to {end - 1} of {self._where} no longer exist and were not read: they were deleted "
            "(retention, DeleteRecords), or the topic was deleted and recreated."
        )
        if self._options.fail_on_data_loss:
            raise InvariantBroken(
                "DATA_LOST",
                f"{OWNER}: {text}",
                next_step='find out why; to continue without them, restart with .option("failOnDataLoss", "false")',
            )
        log.warning(text, extra={"topic": self._wanted.key[0], "partition": self._wanted.key[1]})

    def _look_for_progress(self) -> None:
        """No record for a while: check whether the fetcher advances, as it does over aborted records."""
        stands = self._consumer.fetch_position()
        if stands > self._fetcher:
            self._fetcher = stands
            self._waited_s, self._look_at_s = 0.0, _STALL_LOOK_S
            return
        if self._waited_s > SOURCE_PATIENCE_S:
            raise self._unreachable()
        # librdkafka does not report a topic that no longer exists: ask, at most every few seconds.
        self._confirm(Fetched(end_of_log=True))
        self._look_at_s = self._waited_s + _STALL_LOOK_S

    def _unreachable(self) -> Unreachable:
        return Unreachable(
            "KAFKA_STALLED",
            f"{OWNER}: no records received from {self._where} at {self._options.servers} for {SOURCE_PATIENCE_S:.0f} "
            f"s; the read is at offset {self._position} of {self._wanted.start} to {self._wanted.end}.",
            next_step="check the brokers; the batch will be read again",
        )
