"""A librdkafka consumer: message structs in, Arrow buffers out, no Python object per record.

`rd_kafka_consume_batch_queue` fills an array of pointers to message structs. A numpy array over all of memory gathers
one field of all structs with one indexing step; Arrow copies keys and values out of librdkafka's buffers with one
`take`. Only headers are walked record by record.

A record's timestamp is not part of the public struct. It lies behind it, at an offset that is found once per process by
comparing with `rd_kafka_message_timestamp`, and checked again in every chunk. If it is not found, that function is
called for every record.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.kafka.errors import ConnectionErrors, explain
from delivered.connectors.kafka.librdkafka import Client, Message, name_of
from delivered.connectors.kafka.offsets import Partition
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.connectors.kafka.settings import resolved
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_QUEUE_KBYTES
from delivered.source.columns import HEADERS, columns, micros_of

_OUT_OF_RANGE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}
_GONE = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"}
_RETRIABLE = {
    *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_NODE_UPDATE", "_WAIT_CACHE"),
    *("NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REPLICA_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
    # Unused: librdkafka requires a group id, but the consumer never joins a group.
    *("GROUP_AUTHORIZATION_FAILED", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS"),
}
"""librdkafka recovers from these by itself."""

I64 = npt.NDArray[np.int64]

_ERR, _RKT, _PARTITION, _PAYLOAD, _LENGTH, _KEY, _KEY_LENGTH, _OFFSET = (
    getattr(Message, name).offset for name, _ in Message._fields_[:-1]
)
_PUBLIC_BYTES, _PRIVATE_BYTES = ctypes.sizeof(Message), 128
"""Size of rd_kafka_message_t, and of the private struct that starts with it, which is safe to read."""
_EOF = -191


@dataclass
class Fetched:
    """Result of one call.

    Attributes:
        batch: records in offset order, all below the requested end; None: none.
        position: every visible record below it was returned; -1: no progress.
        end_of_log: partition EOF: the broker had nothing beyond `position` at that moment.
        out_of_range: the broker does not have the requested offset.
        gone: the broker does not know the partition (perhaps only for a moment, after a restart).
    """

    batch: pa.RecordBatch | None = None
    position: int = -1
    end_of_log: bool = False
    out_of_range: bool = False
    gone: bool = False


def settings(options: SourceOptions) -> dict[str, str]:
    """librdkafka's consumer settings; secrets are not resolved yet."""
    return {
        "client.id": "delivered",
        "group.id": "delivered-reader",
        "isolation.level": "read_committed",
        # A slice's end exists already: the broker need not wait for more.
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


class _Memory:
    """All of this process's memory as an array of numbers: indexing gathers, and touches only what is indexed."""

    BASE, BYTES = 4096, 1 << 47  # the first page is unmapped; Linux and macOS give no process more than 2^47

    def __init__(self, kind: str) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (self.BASE, True),
            "shape": (self.BYTES // int(kind[2:]),),
            "typestr": kind,
        }


@lru_cache(maxsize=2)
def _all_memory(kind: str) -> npt.NDArray[Any]:
    return np.asarray(_Memory(kind))


def _words(at: I64) -> I64:
    """The 8-byte numbers at these addresses, which are multiples of 8."""
    found: I64 = _all_memory("<i8")[(at - _Memory.BASE) >> 3]
    return found


def _halves(at: I64) -> npt.NDArray[np.int32]:
    """The 4-byte numbers at these addresses, which are multiples of 4."""
    found: npt.NDArray[np.int32] = _all_memory("<i4")[(at - _Memory.BASE) >> 2]
    return found


class PartitionConsumer(Client):
    """A warm connection that reads one partition after another. Not thread-safe."""

    def __init__(self, options: SourceOptions) -> None:
        self._servers = options.servers
        self._headers = options.headers
        self._connection = ConnectionErrors()
        self._statistics = ""  # kept as text: parsed only if a read seems to stall
        self._partition: Partition = ("", -1)
        self._start = -1
        self._room = np.zeros(SOURCE_BATCH_RECORDS_MAX, dtype=np.int64)
        super().__init__(self.CONSUMER, resolved(settings(options)), OWNER)
        self._lib.rd_kafka_poll_set_consumer(self._rk)
        self._queue = self._lib.rd_kafka_queue_get_consumer(self._rk)

    def on_error(self, name: str, detail: str) -> None:
        self._connection.note(name, detail)

    def on_statistics(self, text: str) -> None:
        self._statistics = text

    @property
    def _where(self) -> str:
        return f"{self._partition[0]}-{self._partition[1]}"

    def assign(self, partition: Partition, offset: int) -> None:
        """Assign a partition, from this offset. Records fetched ahead for the previous one are dropped."""
        self._partition, self._start = partition, offset
        lib, topic = self._lib, partition[0].encode()
        wanted = lib.rd_kafka_topic_partition_list_new(1)
        lib.rd_kafka_topic_partition_list_add(wanted, topic, partition[1])
        lib.rd_kafka_topic_partition_list_set_offset(wanted, topic, partition[1], offset)
        code = lib.rd_kafka_assign(self._rk, wanted)
        lib.rd_kafka_topic_partition_list_destroy(wanted)
        if code:
            raise explain(name_of(code), "", self._where, self._servers)

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Wait at most `timeout_s` for records; return what is there.

        Raises:
            UsageError, Unreachable: reading is not permitted, or the connection is refused.
        """
        lib, room = self._lib, self._room
        # Wait for one record, then take what is there: the call would wait for all of a larger number.
        n = lib.rd_kafka_consume_batch_queue(self._queue, int(timeout_s * 1000), room.ctypes.data, 1)
        if n <= 0:
            if self._connection.refused:
                raise explain(*self._connection.refused, self._where, self._servers)
            return Fetched()
        n += max(0, lib.rd_kafka_consume_batch_queue(self._queue, 0, room.ctypes.data + 8, len(room) - 1))
        messages = room[:n]
        try:
            return self._take(messages, end)
        finally:
            # In C from end to end: no bytecode runs between two calls.
            deque(map(lib.rd_kafka_message_destroy, messages.tolist()), maxlen=0)

    def _take(self, messages: I64, end: int) -> Fetched:
        fetched = Fetched()
        errors = _halves(messages + _ERR)
        if errors.any():
            for i in np.flatnonzero(errors):
                self._event(fetched, int(messages[i]), int(errors[i]))
            messages = messages[errors == 0]
        # librdkafka drops records of an earlier assignment; checked again here.
        offsets = _words(messages + _OFFSET)
        ours = (_halves(messages + _PARTITION) == self._partition[1]) & (offsets >= self._start)
        topics = _words(messages + _RKT)
        for topic in np.unique(topics):
            if self._lib.rd_kafka_topic_name(int(topic)).decode() != self._partition[0]:
                ours &= topics != topic
        if not ours.all():
            messages, offsets = messages[ours], offsets[ours]
        if len(offsets):
            fetched.position = max(fetched.position, int(offsets[-1]) + 1)
            if offsets[-1] >= end:
                below = int(np.searchsorted(offsets, end))
                messages, offsets = messages[:below], offsets[:below]
        if len(offsets):
            fetched.batch = self._batch(messages, offsets)
        return fetched

    def _event(self, fetched: Fetched, message: int, code: int) -> None:
        at = np.array([message], dtype=np.int64)
        if code == _EOF:
            topic = int(_words(at + _RKT)[0])
            number = int(_halves(at + _PARTITION)[0])
            if topic and (self._lib.rd_kafka_topic_name(topic).decode(), number) == self._partition:
                fetched.position = max(fetched.position, int(_words(at + _OFFSET)[0]))
                fetched.end_of_log = True
            return
        detail = (self._lib.rd_kafka_message_errstr(message) or b"").decode(errors="replace")
        name = name_of(code)
        if name in _OUT_OF_RANGE:
            fetched.out_of_range = True
        elif name in _GONE:
            fetched.gone = True
        elif name in _RETRIABLE:
            self._connection.last = detail
        else:
            raise explain(name, detail, self._where, self._servers)

    def _batch(self, messages: I64, offsets: I64) -> pa.RecordBatch:
        (topic, number), n = self._partition, len(offsets)
        stamps, types = self._timestamps(messages)
        arrays = [
            _gather(_words(messages + _KEY), _words(messages + _KEY_LENGTH)),
            _gather(_words(messages + _PAYLOAD), _words(messages + _LENGTH)),
            pa.repeat(pa.scalar(topic), n),
            pa.repeat(pa.scalar(number, pa.int32()), n),
            pa.array(offsets),
            pa.array(micros_of(stamps), pa.int64()).view(pa.timestamp("us", tz="UTC")),
            pa.array(types - np.int32(1)),  # librdkafka's enumeration is Spark's plus one
        ]
        if self._headers:
            arrays.append(pa.array([self._headers_of(m) for m in messages.tolist()], HEADERS.type))
        return pa.RecordBatch.from_arrays(arrays, schema=columns(self._headers))

    def _timestamps(self, messages: I64) -> tuple[I64, npt.NDArray[np.int32]]:
        """Milliseconds since 1970, and librdkafka's type: 0 none, 1 by the producer, 2 by the broker."""
        place = _Clock.place
        # Check a few in every chunk, including the first and the last.
        sample = messages[:: max(1, len(messages) // 8)] if place else messages
        asked = [self._ask_timestamp(m) for m in [*sample.tolist(), int(messages[-1])]]
        known = np.array(asked, dtype=np.int64)
        if place is None and not _Clock.hopeless:
            place = _Clock.find(messages, known[:-1])
        if place is not None:
            at = np.append(sample, messages[-1])
            if (_words(at + place[0]) == known[:, 0]).all() and (_halves(at + place[1]) == known[:, 1]).all():
                return _words(messages + place[0]), _halves(messages + place[1])
            _Clock.place, _Clock.hopeless = None, True
            known = np.array([self._ask_timestamp(m) for m in [*messages.tolist(), int(messages[-1])]], dtype=np.int64)
        return np.ascontiguousarray(known[:-1, 0]), known[:-1, 1].astype(np.int32)

    def _ask_timestamp(self, message: int) -> tuple[int, int]:
        kind = ctypes.c_int(0)
        stamp = self._lib.rd_kafka_message_timestamp(message, ctypes.byref(kind))
        return int(stamp), kind.value

    def _headers_of(self, message: int) -> list[dict[str, Any]] | None:
        lib, handle = self._lib, ctypes.c_void_p()
        if lib.rd_kafka_message_headers(message, ctypes.byref(handle)) != 0:
            return None
        name, value, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
        found: list[dict[str, Any]] = []
        for i in itertools.count():
            got = lib.rd_kafka_header_get_all(handle, i, ctypes.byref(name), ctypes.byref(value), ctypes.byref(size))
            if got != 0:
                break
            content = None if value.value is None else ctypes.string_at(value.value, size.value)
            found.append({"key": (name.value or b"").decode(errors="replace"), "value": content})
        return found or None

    def fetch_position(self) -> int:
        """Position of librdkafka's fetcher some seconds ago; -1: unknown. It also moves over aborted records."""
        topic = json.loads(self._statistics or "{}").get("topics", {}).get(self._partition[0], {})
        return int(topic.get("partitions", {}).get(str(self._partition[1]), {}).get("next_offset", -1))

    def release(self) -> None:
        """Stop fetching; keep the connection."""
        self._lib.rd_kafka_assign(self._rk, None)

    def close(self) -> None:
        if (rk := self._detach()) is not None:
            self._lib.rd_kafka_consumer_close(rk)
            self._lib.rd_kafka_queue_destroy(self._queue)
            self._lib.rd_kafka_destroy(rk)


class _Clock:
    """Where a record's timestamp lies behind the public struct.

    Attributes:
        place: offsets of the timestamp (8 bytes) and its type (4 bytes) from the start; None: not known.
        hopeless: the search failed; do not search again.
    """

    place: tuple[int, int] | None = None
    hopeless = False
    _SURE = 16

    @classmethod
    def find(cls, messages: I64, known: npt.NDArray[np.int64]) -> tuple[int, int] | None:
        """Search for the timestamps that librdkafka returned; None if not found, or too few to be sure."""
        if len(messages) < cls._SURE or not known[:, 1].any():
            return None
        times = [at for at in range(_PUBLIC_BYTES, _PRIVATE_BYTES, 8) if (_words(messages + at) == known[:, 0]).all()]
        types = [at for at in range(_PUBLIC_BYTES, _PRIVATE_BYTES, 4) if (_halves(messages + at) == known[:, 1]).all()]
        # The type is a small number that may match by chance, so it must stand right before the timestamp.
        near = [(t, k) for t in times for k in types if k == t - 4]
        if len(near) != 1:
            cls.hopeless = len(times) != 1
            return None
        cls.place = near[0]
        return cls.place


def _gather(addresses: I64, lengths: I64) -> pa.Array:
    """Copy values from anywhere in memory into one binary array; address 0 is null."""
    n = len(addresses)
    nothing = addresses == 0
    nulls = int(nothing.sum())
    if nulls == n:
        return pa.nulls(n, pa.binary())
    if nulls:
        addresses = np.where(nothing, addresses[~nothing][0], addresses)
        lengths = np.where(nothing, 0, lengths)
    base = int(addresses.min())
    total = int(lengths.sum())
    # Value i is the span from bound 2i to bound 2i+1; gaps between values are never taken. The last bound belongs to no
    # value: it corrects the mean length, from which Arrow estimates the size of the result.
    bounds = np.empty(2 * n + 1, dtype=np.int64)
    bounds[0:-1:2] = addresses - base
    bounds[1:-1:2] = bounds[0:-1:2] + lengths
    bounds[-1] = bounds[0] + 2 * total
    spans = pa.Array.from_buffers(
        pa.large_binary(), 2 * n, [None, pa.py_buffer(bounds), pa.foreign_buffer(base, 1 << 46)]
    )
    taken = pc.take(spans, pa.array(np.arange(0, 2 * n, 2)), boundscheck=False).cast(pa.binary())
    if nulls:
        mask = pa.py_buffer(np.packbits(~nothing, bitorder="little"))
        taken = pa.Array.from_buffers(pa.binary(), n, [mask, *taken.buffers()[1:]], nulls)
    return taken
