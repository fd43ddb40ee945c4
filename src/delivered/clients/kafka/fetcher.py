"""Reads partitions by Fetch requests: record batches in, Arrow columns out.

As soon as a response is here, the next request is sent, so that the broker and the network work while this one is
decoded. At most one response is held, and a few MB of its records decompressed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from delivered.clients.kafka import protocol
from delivered.clients.kafka.channel import Pending, varint
from delivered.clients.kafka.errors import NoAnswer, explain
from delivered.clients.kafka.protocol import NoTopic, Wire, name_of
from delivered.clients.kafka.record_batch import CorruptBatch, Decoded, Partition, decode
from delivered.clients.kafka.settings import committed_only, resolved
from delivered.model.limits import DECOMPRESSED_BYTES_MAX, KAFKA_RESPONSE_BYTES_MAX, REQUEST_TIMEOUT_S
from delivered.model.patience import within
from delivered.source import columns

FETCH_BYTES = 4 << 20
CHUNK_BYTES = 2 << 20
"""Decompressed records in one RecordBatch."""
_WAIT_MS = 10
_ABORTED_BYTES_MIN = 17
_PAUSE_S = 0.1
_FETCH, _VERSION_MAX = 1, 12
"""The last that names topics; the fields up to the records are read here, so that these are not copied."""

_UNKNOWN_PARTITION = {3, 100, 103}
_MOVED = {5, 6, 7, 8, 9, 13, 56, 74, 75, 78, -1, 2}
"""Errors that a later request may not meet, most of them at another broker."""
_LIES = (struct.error, IndexError, ValueError)
"""What a response raises that is not what it says to be."""


@dataclass
class Fetched:
    """Result of one call.

    Attributes:
        batch: records in offset order, all below the requested end; None: none.
        position: every visible record below it was returned; -1: no progress.
        end_of_log: the broker had nothing beyond `position` at that moment.
        out_of_range: the broker does not have the requested offset.
        unknown: the broker does not know the partition (perhaps only for a moment, after a restart).
    """

    batch: pa.RecordBatch | None = None
    position: int = -1
    end_of_log: bool = False
    out_of_range: bool = False
    unknown: bool = False


class Fetcher:
    """Reads one partition after another (a `RangeConsumer` of the connector). Not thread-safe.

    Args:
        owner: of the options, for errors.
        client: settings by librdkafka's names; secrets are not resolved yet.
        headers: whether to read them.
        batch_bytes_max: of a record batch, decompressed.
    """

    def __init__(
        self,
        owner: str,
        client: Mapping[str, str],
        headers: bool,
        batch_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    ) -> None:
        self._owner, self._servers = owner, client["bootstrap.servers"]
        self._headers, self._batch_bytes_max = headers, batch_bytes_max
        self._committed = committed_only(client)
        self._wire = Wire(resolved(client))
        self._partition: Partition = ("", -1)
        self._position = -1  # of the next request
        self._returned = -1  # position: all records below it were returned
        self._pending: Pending | None = None
        self._version = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._decoded: Decoded | None = None
        self._first_size = int(client.get("max.partition.fetch.bytes", FETCH_BYTES))
        self._size_max = int(client.get("fetch.max.bytes", KAFKA_RESPONSE_BYTES_MAX))
        self._wait_ms = int(client.get("fetch.wait.max.ms", _WAIT_MS))
        self._size = self._first_size
        self._not_before_s = 0.0
        self._ended_at = -1
        self._corrupt_at = -1
        self._trouble = ""

    def possible(self) -> bool:
        """Whether the brokers know the version of Fetch spoken here (Kafka 2.7). Raises Unreachable."""
        _, newest = self._wire.patiently(self._wire.channel).versions.api_versions.get(_FETCH, (0, 0))
        return int(newest) >= _VERSION_MAX

    def assign(self, partition: Partition, offset: int) -> None:
        self.release()
        self._partition, self._position = partition, offset
        self._returned = offset
        self._ended_at = self._corrupt_at = -1
        self._size = self._first_size

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Raises CorruptBatch, too: twice at the same offset; BatchTooLarge: after the records before it."""
        deadline = time.monotonic() + timeout_s
        if self._decoded is None:
            fetched = self._receive(end, deadline)
            if fetched is not None:
                return fetched
        return self._next()

    def _next(self) -> Fetched:
        decoded = self._decoded
        if decoded is None:
            return Fetched()
        try:
            batch = next(self._batches, None)
        except CorruptBatch:
            return self._again_or_raise()
        if batch is None:
            self._decoded, self._returned = None, decoded.position
            return Fetched(position=decoded.position)
        (topic, number), n = self._partition, batch.num_rows
        if n == 0:
            return Fetched()
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        arrays["topic"] = pa.repeat(pa.scalar(topic), n)
        arrays["partition"] = pa.repeat(pa.scalar(number, pa.int32()), n)
        schema = columns(self._headers)
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)
        self._returned = arrays["offset"][-1].as_py() + 1
        return Fetched(batch=batch, position=self._returned)

    def _again_or_raise(self) -> Fetched:
        """A corrupt batch is fetched once more: it may have been damaged on its way."""
        self._decoded = None
        self._drop_pending()
        if self._corrupt_at == self._returned:
            raise
        self._corrupt_at = self._position = self._returned
        return Fetched()

    def _receive(self, end: int, deadline: float) -> Fetched | None:
        """Wait for a response. None: its records are being decoded."""
        pause = self._not_before_s - time.monotonic()
        if pause > 0:
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            return Fetched()
        try:
            if self._pending is None:
                with within(max(0.1, deadline - time.monotonic())):
                    self._pending = self._send()
            if not self._pending.ready(deadline - time.monotonic()):
                if time.monotonic() - self._pending.sent_s > REQUEST_TIMEOUT_S:
                    self._pending.body(0)
                return Fetched()
            pending, self._pending = self._pending, None
            return self._parsed(pending.body(0), end)
        except NoTopic:
            return Fetched(unknown=True)
        except NoAnswer as error:
            self._pending = None
            return self._later(str(error))

    def _later(self, why: str, pause_s: float = _PAUSE_S) -> Fetched:
        self._trouble = why
        self._wire.forget()
        self._not_before_s = time.monotonic() + pause_s
        return Fetched()

    def _send(self) -> Pending:
        from kafka.protocol.consumer import FetchRequest

        (topic, number), FetchTopic = self._partition, FetchRequest.FetchTopic  # noqa: N806 - a class
        leader = self._wire.led(topic, number)
        place = FetchTopic.FetchPartition(
            partition=number,
            current_leader_epoch=leader.epoch,
            fetch_offset=self._position,
            partition_max_bytes=self._size,
        )
        request = FetchRequest(
            max_wait_ms=self._wait_ms,
            min_bytes=1,
            max_bytes=min(self._size, self._size_max),
            isolation_level=1 if self._committed else 0,
            topics=[FetchTopic(topic=topic, partitions=[place])],
            min_version=_VERSION_MAX,
            max_version=_VERSION_MAX,
        )
        return self._wire.post(request, leader.node)

    def _parsed(self, body: memoryview, end: int) -> Fetched | None:
        found = Response(body)
        if found.throttle_ms:  # the broker reads nothing earlier, and a request would time out
            self._not_before_s = time.monotonic() + found.throttle_ms / 1000
        code = found.error
        if code == protocol.OFFSET_OUT_OF_RANGE:
            return Fetched(out_of_range=True)
        if code in _UNKNOWN_PARTITION:
            self._wire.forget()
            return Fetched(unknown=True)
        if code in _MOVED:
            return self._later(name_of(code))
        if code:
            topic, number = self._partition
            raise explain(self._owner, name_of(code), "", f"{topic}-{number}", self._servers)
        if found.high < 0:  # above its quota, a client gets a response without partitions
            return Fetched()
        aborted = found.aborted if self._committed else None
        try:
            decoded = decode(
                found.records, self._partition, self._position, end,
                aborted=aborted, headers=self._headers, chunk_bytes=CHUNK_BYTES,
                bytes_max=self._batch_bytes_max,
            )  # fmt: skip
        except CorruptBatch:
            return self._again_or_raise()
        if decoded.position == self._position:
            if decoded.partial:
                self._size = min(KAFKA_RESPONSE_BYTES_MAX, max(decoded.partial, 2 * self._size))
                return Fetched()
            stable = found.last_stable if self._committed else found.high
            ended = self._position >= stable and self._ended_at != self._position
            if ended:
                self._ended_at = self._position
            return Fetched(position=self._position, end_of_log=ended)
        self._decoded, self._batches = decoded, iter(decoded)
        self._position = decoded.position
        if self._position < end and not found.throttle_ms:
            self._pending = self._send()  # travels while this response is decoded
        return None

    def fetch_position(self) -> int:
        return self._position

    def _drop_pending(self) -> None:
        self._pending = None  # its response is read, and dropped, before the next one

    def release(self) -> None:
        self._drop_pending()
        self._decoded, self._batches = None, iter(())

    def close(self) -> None:
        self._wire.close()


class Response:
    """A Fetch response of version 12 for one partition; `records` is a view of it. Raises NoAnswer: it is none."""

    def __init__(self, body: memoryview) -> None:
        try:
            self._read(body)
        except _LIES as error:
            raise NoAnswer(f"a Fetch response that cannot be read: {error}") from None

    def _read(self, body: memoryview) -> None:
        self.throttle_ms, self.error, _, at = *struct.unpack_from(">ihi", body, 0), 10
        self.records = memoryview(b"")
        self.aborted: list[tuple[int, int]] = []
        self.high = self.last_stable = -1
        topics, at = varint(body, at)
        if topics < 2:
            return
        size, at = varint(body, at)
        at += size - 1
        partitions, at = varint(body, at)
        if partitions < 2:
            return
        _, error, self.high, self.last_stable, _ = struct.unpack_from(">ihqqq", body, at)
        self.error, at = self.error or error, at + 30
        count, at = varint(body, at)
        if count - 1 > len(body) // _ABORTED_BYTES_MIN:
            raise ValueError(f"{count - 1} aborted transactions in {len(body)} bytes")
        for _ in range(count - 1):
            self.aborted.append(struct.unpack_from(">qq", body, at))
            tags, at = varint(body, at + 16)
            if tags:
                raise NoAnswer("an aborted transaction with unknown fields")
        at += 4
        size, at = varint(body, at)
        if size - 1 > len(body) - at:
            raise ValueError(f"{size - 1} bytes of records, with {len(body) - at} left")
        self.records = body[at : at + max(0, size - 1)]
