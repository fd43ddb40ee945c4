"""librdkafka called directly: message structs in, Arrow buffers out, no Python object per record.

`rd_kafka_consume_batch_queue` fills an array of pointers to message structs. Numpy lays an array over all of memory
and gathers one field of all structs with one indexing step; Arrow copies keys and values out of librdkafka's buffers
with one `take`. Only headers are walked record by record.

The time of a record is not part of the public struct. It lies behind it, at a place that is found once per process by
comparing with `rd_kafka_message_timestamp`, and checked again in every chunk; where it is not found, that function is
called for every record.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.kafka.client_errors import ConnectionErrors, config_error, explain
from delivered.connectors.kafka.client_options import resolved
from delivered.connectors.kafka.consume import Fetched, Statistics, assemble, classify, settings
from delivered.connectors.kafka.librdkafka import ERROR_CALLBACK, STATISTICS_CALLBACK, consumer_library
from delivered.connectors.kafka.offsets import Partition
from delivered.connectors.kafka.options import SourceOptions
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX
from delivered.source.columns import HEADERS

I64 = npt.NDArray[np.int64]

_ERR, _RKT, _PARTITION, _PAYLOAD, _LENGTH, _KEY, _KEY_LENGTH, _OFFSET = 0, 8, 16, 24, 32, 40, 48, 56
_PUBLIC_BYTES, _PRIVATE_BYTES = 72, 128
"""Size of rd_kafka_message_t, and of the struct that it begins: reading so far is safe."""
_EOF = -191
_CONSUMER = 1


def available() -> bool:
    """Whether librdkafka can be called directly here."""
    return consumer_library() is not None


class _Memory:
    """All of this process's memory as an array of numbers: indexing gathers, and touches only what is indexed."""

    BASE, BYTES = 4096, 1 << 47  # nothing lies in the first page; Linux and macOS give no process more than that

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


# librdkafka calls back with a number instead of a Python object: an object could be gone by then.
_consumers: dict[int, NativeConsumer] = {}
_numbers = itertools.count(1)


@ERROR_CALLBACK  # type: ignore[untyped-decorator]
def _on_error(_rk: int, code: int, reason: bytes, opaque: int) -> None:
    consumer = _consumers.get(opaque)
    if consumer is not None:
        consumer.connection.note(consumer.name_of(code), reason.decode(errors="replace"))


@STATISTICS_CALLBACK  # type: ignore[untyped-decorator]
def _on_statistics(_rk: int, text: int, length: int, opaque: int) -> int:
    consumer = _consumers.get(opaque)
    if consumer is not None:
        consumer.statistics.text = ctypes.string_at(text, length).decode()
    return 0


class NativeConsumer:
    """A `PartitionConsumer`."""

    def __init__(self, options: SourceOptions) -> None:
        lib: Any = consumer_library()
        self._lib = lib
        self._servers = options.servers
        self._headers = options.headers
        self.connection = ConnectionErrors()
        self.statistics = Statistics()
        self._partition: Partition = ("", -1)
        self._start = -1
        self._room = np.zeros(SOURCE_BATCH_RECORDS_MAX, dtype=np.int64)
        self._number = next(_numbers)
        _consumers[self._number] = self
        self._rk: int | None = self._make(settings(options))
        self._queue = self._lib.rd_kafka_queue_get_consumer(self._rk)

    def _make(self, wanted: dict[str, str]) -> int:
        lib, said = self._lib, ctypes.create_string_buffer(512)
        conf = lib.rd_kafka_conf_new()
        for key, value in resolved(wanted).items():
            if lib.rd_kafka_conf_set(conf, key.encode(), value.encode(), said, len(said)) != 0:
                lib.rd_kafka_conf_destroy(conf)
                raise config_error(said.value.decode(errors="replace"))
        lib.rd_kafka_conf_set_error_cb(conf, _on_error)
        lib.rd_kafka_conf_set_stats_cb(conf, _on_statistics)
        lib.rd_kafka_conf_set_log_cb(conf, None)  # what matters comes back as errors
        lib.rd_kafka_conf_set_opaque(conf, self._number)
        rk = lib.rd_kafka_new(_CONSUMER, conf, said, len(said))
        if not rk:
            lib.rd_kafka_conf_destroy(conf)
            raise config_error(said.value.decode(errors="replace"))
        lib.rd_kafka_poll_set_consumer(rk)
        return int(rk)

    @property
    def _where(self) -> str:
        return f"{self._partition[0]}-{self._partition[1]}"

    def name_of(self, code: int) -> str:
        return str(self._lib.rd_kafka_err2name(code).decode())

    def assign(self, partition: Partition, offset: int) -> None:
        self._partition, self._start = partition, offset
        lib, topic = self._lib, partition[0].encode()
        wanted = lib.rd_kafka_topic_partition_list_new(1)
        lib.rd_kafka_topic_partition_list_add(wanted, topic, partition[1])
        lib.rd_kafka_topic_partition_list_set_offset(wanted, topic, partition[1], offset)
        code = lib.rd_kafka_assign(self._rk, wanted)
        lib.rd_kafka_topic_partition_list_destroy(wanted)
        if code:
            raise explain(self.name_of(code), "", self._where, self._servers)

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        lib, room = self._lib, self._room
        # One with patience, then what is there: the call would wait for all of a larger number.
        n = lib.rd_kafka_consume_batch_queue(self._queue, int(timeout_s * 1000), room.ctypes.data, 1)
        if n <= 0:
            if self.connection.refused:
                raise explain(*self.connection.refused, self._where, self._servers)
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
        # What an earlier assignment left is dropped by librdkafka; this is the second look.
        offsets = _words(messages + _OFFSET)
        mine = (_halves(messages + _PARTITION) == self._partition[1]) & (offsets >= self._start)
        topics = _words(messages + _RKT)
        for topic in np.unique(topics):
            if self._lib.rd_kafka_topic_name(int(topic)).decode() != self._partition[0]:
                mine &= topics != topic
        if not mine.all():
            messages, offsets = messages[mine], offsets[mine]
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
        said = (self._lib.rd_kafka_message_errstr(message) or b"").decode(errors="replace")
        classify(fetched, self.name_of(code), said, self.connection, self._where, self._servers)

    def _batch(self, messages: I64, offsets: I64) -> pa.RecordBatch:
        stamps, types = self._timestamps(messages)
        return assemble(
            self._partition,
            _gather(_words(messages + _KEY), _words(messages + _KEY_LENGTH)),
            _gather(_words(messages + _PAYLOAD), _words(messages + _LENGTH)),
            pa.array(offsets),
            stamps,
            pa.array(types - np.int32(1)),
            self._all_headers(messages) if self._headers else None,
        )

    def _timestamps(self, messages: I64) -> tuple[I64, npt.NDArray[np.int32]]:
        """Milliseconds since 1970, and librdkafka's type: 0 none, 1 by the producer, 2 by the broker."""
        place = _Clock.place
        # A few in every chunk are compared, the first and the last among them.
        sample = messages[:: max(1, len(messages) // 8)] if place else messages
        asked = [self._ask_timestamp(m) for m in [*sample.tolist(), int(messages[-1])]]
        told = np.array(asked, dtype=np.int64)
        if place is None and not _Clock.hopeless:
            place = _Clock.find(messages, told[:-1])
        if place is not None:
            at = np.append(sample, messages[-1])
            if (_words(at + place[0]) == told[:, 0]).all() and (_halves(at + place[1]) == told[:, 1]).all():
                return _words(messages + place[0]), _halves(messages + place[1])
            _Clock.place, _Clock.hopeless = None, True
            told = np.array([self._ask_timestamp(m) for m in [*messages.tolist(), int(messages[-1])]], dtype=np.int64)
        return np.ascontiguousarray(told[:-1, 0]), told[:-1, 1].astype(np.int32)

    def _ask_timestamp(self, message: int) -> tuple[int, int]:
        kind = ctypes.c_int(0)
        stamp = self._lib.rd_kafka_message_timestamp(message, ctypes.byref(kind))
        return int(stamp), kind.value

    def _all_headers(self, messages: I64) -> pa.Array:
        return pa.array([self._headers_of(m) for m in messages.tolist()], HEADERS.type)

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
        return self.statistics.fetch_position(self._partition)

    def release(self) -> None:
        self._lib.rd_kafka_assign(self._rk, None)

    def close(self) -> None:
        rk, self._rk = self._rk, None
        if rk is not None:
            self._lib.rd_kafka_consumer_close(rk)
            self._lib.rd_kafka_queue_destroy(self._queue)
            self._lib.rd_kafka_destroy(rk)
            _consumers.pop(self._number, None)


class _Clock:
    """Where the time of a record lies behind the public struct.

    Attributes:
        place: distance of the time (8 bytes) and of its type (4 bytes) from the start; None: not known.
        hopeless: it was looked for and is not where it was expected: do not look again.
    """

    place: tuple[int, int] | None = None
    hopeless = False
    _SURE = 16

    @classmethod
    def find(cls, messages: I64, told: npt.NDArray[np.int64]) -> tuple[int, int] | None:
        """Look for the times that librdkafka told; None if they are not there, or too few to be sure."""
        if len(messages) < cls._SURE or not told[:, 1].any():
            return None
        times = [at for at in range(_PUBLIC_BYTES, _PRIVATE_BYTES, 8) if (_words(messages + at) == told[:, 0]).all()]
        types = [at for at in range(_PUBLIC_BYTES, _PRIVATE_BYTES, 4) if (_halves(messages + at) == told[:, 1]).all()]
        # The type is a small number that others may equal by chance: it stands right before the time.
        near = [(t, k) for t in times for k in types if k == t - 4]
        if len(near) != 1:
            cls.hopeless = len(times) != 1
            return None
        cls.place = near[0]
        return cls.place


def _gather(addresses: I64, lengths: I64) -> pa.Array:
    """Copy values that lie anywhere in memory into one binary array; address 0 is null."""
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
    # Value i is the span from bound 2i to bound 2i+1; what lies between two values is never taken. The last bound is
    # never a value's: it makes the mean length right, by which Arrow guesses the size of the result.
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
