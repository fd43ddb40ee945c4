"""librdkafka called directly: Arrow buffers in, no Python object per record.

A numpy array is laid over `rd_kafka_message_t`; pointers and lengths are computed from the Arrow offsets, and one call
hands a whole chunk over. librdkafka copies what it takes, so that nothing here must outlive the call, and its queue
bounds the memory.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delivered.connectors.kafka.librdkafka import (
    DELIVERY_CALLBACK,
    ERROR_CALLBACK,
    Argument,
    Memory,
    Metadata,
    Value,
    producer_library,
)
from delivered.connectors.kafka.produce import (
    POLL_MS,
    Failures,
    ProducerError,
    Rows,
    flush_pauses,
    spread,
    timeout_error,
)
from delivered.connectors.kafka.protocol import server_name
from delivered.model.patience import Stall

ROWS_PER_CALL = 16_384
"""Rows in one call: their structs take 1.2 MB."""

_MESSAGE = np.dtype(
    {
        "names": ["err", "rkt", "partition", "payload", "len", "key", "key_len", "offset", "private"],
        "formats": ["<i4", "<u8", "<i4", "<u8", "<u8", "<u8", "<u8", "<i8", "<u8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)
_UNASSIGNED = -1
_COPY, _PARTITION = 0x2, 0x8
_QUEUE_FULL = -184
_FATAL = -150
_VTYPE_END, _VTYPE_TOPIC, _VTYPE_PARTITION, _VTYPE_VALUE, _VTYPE_KEY = 0, 1, 3, 4, 5
_VTYPE_MSGFLAGS, _VTYPE_HEADERS = 7, 10
_EMPTY = ctypes.create_string_buffer(1)
"""Where empty values point: a null pointer would make them null."""


# librdkafka calls back with a number instead of a Python object: an object could be gone by then.
_producers: dict[int, NativeProducer] = {}
_numbers = itertools.count(1)


@DELIVERY_CALLBACK  # type: ignore[untyped-decorator]
def _on_failed(_rk: int, message: Any, opaque: int) -> None:
    producer = _producers.get(opaque)
    if producer is not None:
        m = message.contents
        producer.failures.add(m.err, producer.name_of(m.err), m.len + m.key_len)
        if m.err == _FATAL:
            producer.note_fatal()


@ERROR_CALLBACK  # type: ignore[untyped-decorator]
def _on_error(_rk: int, code: int, reason: bytes, opaque: int) -> None:
    producer = _producers.get(opaque)
    if producer is not None:
        producer.failures.note(producer.name_of(code), reason.decode(errors="replace"))
        producer.note_fatal()


class NativeProducer:
    """One librdkafka producer. Used by one thread at a time.

    Attributes:
        failures: what could not be delivered since the last `flush`.
    """

    def __init__(self, config: Mapping[str, str]) -> None:
        lib = producer_library()
        if lib is None:
            raise RuntimeError("librdkafka's symbols cannot be reached")
        self._lib = lib
        self._server = server_name(config["bootstrap.servers"])
        self._topics: dict[str, int] = {}
        self._structs = np.zeros(0, dtype=_MESSAGE)
        self.failures = Failures()
        self._number = next(_numbers)
        self._rk: int | None = self._make(config)
        _producers[self._number] = self

    def _make(self, config: Mapping[str, str]) -> int:
        lib, said = self._lib, ctypes.create_string_buffer(512)
        conf = lib.rd_kafka_conf_new()
        for key, value in config.items():
            if lib.rd_kafka_conf_set(conf, key.encode(), value.encode(), said, len(said)) != 0:
                lib.rd_kafka_conf_destroy(conf)
                raise ProducerError("CONFIG", said.value.decode(errors="replace"), config=True)
        lib.rd_kafka_conf_set_dr_msg_cb(conf, _on_failed)
        lib.rd_kafka_conf_set_error_cb(conf, _on_error)
        lib.rd_kafka_conf_set_log_cb(conf, None)  # what matters comes back as errors
        lib.rd_kafka_conf_set_opaque(conf, self._number)
        rk = lib.rd_kafka_new(0, conf, said, len(said))
        if not rk:
            lib.rd_kafka_conf_destroy(conf)
            raise ProducerError("CONFIG", said.value.decode(errors="replace"), config=True)
        return int(rk)

    # -- transactions ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Take the transactional id; whoever held it is fenced."""
        self._connect(timeout_s)
        self._check(self._lib.rd_kafka_init_transactions(self._rk, int(timeout_s * 1000)))

    def _connect(self, timeout_s: float) -> None:
        # librdkafka asks for an id at once, finds no connection yet, and asks again 500 ms later: connect first.
        result = ctypes.POINTER(Metadata)()
        if self._lib.rd_kafka_metadata(self._rk, 0, None, ctypes.byref(result), int(timeout_s * 1000)) == 0:
            self._lib.rd_kafka_metadata_destroy(result)

    def begin(self) -> None:
        self._check(self._lib.rd_kafka_begin_transaction(self._rk))

    def abort(self, timeout_s: float) -> None:
        """Drop what is queued and abort the open transaction."""
        self._lib.rd_kafka_purge(self._rk, 0x1 | 0x2)
        self._lib.rd_kafka_poll(self._rk, 0)
        self._check(self._lib.rd_kafka_abort_transaction(self._rk, int(timeout_s * 1000)))

    # -- records -----------------------------------------------------------------------------------------------

    def send(self, rows: Rows) -> None:
        """Hand rows over; blocks while the queue is full."""
        if rows.headers is not None and rows.headers.null_count < len(rows):
            self._send_one_by_one(rows)
            return
        for start in range(0, len(rows), ROWS_PER_CALL):
            self._send_chunk(rows.slice(start, ROWS_PER_CALL))

    def _send_chunk(self, rows: Rows) -> None:
        n = len(rows)
        if len(self._structs) < n:
            self._structs = np.zeros(min(ROWS_PER_CALL, max(n, 1024)), dtype=_MESSAGE)
        structs = self._structs[:n]
        structs["err"] = 0
        structs["private"] = 0
        keep = [_lay(structs, "payload", "len", rows.value)]
        if rows.key is None:
            structs["key"] = 0
            structs["key_len"] = 0
        else:
            keep.append(_lay(structs, "key", "key_len", rows.key))
        flags = _COPY
        if rows.partition is not None:
            structs["partition"] = rows.partition
            flags |= _PARTITION
        topic = self._topic(rows.topic)
        done = 0
        while done < n:
            rest = structs[done:]
            taken = self._lib.rd_kafka_produce_batch(topic, _UNASSIGNED, flags, rest.ctypes.data, len(rest))
            if taken == len(rest):
                break
            refused = np.flatnonzero(rest["err"])
            # A full queue refuses all that follow, so that order is kept; anything else is about one record.
            full = rest["err"][refused] == _QUEUE_FULL
            for i in refused[~full]:
                self.failures.add(
                    int(rest["err"][i]), self.name_of(int(rest["err"][i])), int(rest["len"][i] + rest["key_len"][i])
                )
            if not full.any():
                break
            done += int(refused[full][0])
            structs["err"][done:] = 0
            self._lib.rd_kafka_poll(self._rk, POLL_MS)
            self._raise_fatal()
        del keep
        self._lib.rd_kafka_poll(self._rk, 0)

    def _send_one_by_one(self, rows: Rows) -> None:
        for topic, partition, key, value, headers in spread(rows):
            self.send_one(topic, partition, key, value, headers)

    def send_one(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        """Hand one record over; blocks while the queue is full."""
        arguments = [
            Argument(_VTYPE_TOPIC, Value(cstr=topic.encode())),
            Argument(_VTYPE_PARTITION, Value(i32=_UNASSIGNED if partition is None else partition)),
            Argument(_VTYPE_MSGFLAGS, Value(integer=_COPY)),
        ]
        keep = []
        for kind, content in ((_VTYPE_KEY, key), (_VTYPE_VALUE, value)):
            if content is not None:
                at = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p) if content else _EMPTY
                keep.append(at)
                address = ctypes.cast(at, ctypes.c_void_p).value
                arguments.append(Argument(kind, Value(mem=Memory(address, len(content)))))
        while True:
            given = list(arguments)
            handle = self._headers(headers)
            if handle:
                given.append(Argument(_VTYPE_HEADERS, Value(headers=handle)))
            array = (Argument * len(given))(*given)
            error = self._lib.rd_kafka_produceva(self._rk, array, len(given))
            if not error:
                return
            if handle:
                self._lib.rd_kafka_headers_destroy(handle)
            code = self._lib.rd_kafka_error_code(error)
            self._lib.rd_kafka_error_destroy(error)
            if code != _QUEUE_FULL:
                self.failures.add(code, self.name_of(code), len(key or b"") + len(value or b""))
                return
            self._lib.rd_kafka_poll(self._rk, POLL_MS)
            self._raise_fatal()

    def _headers(self, headers: list[tuple[str, bytes | None]] | None) -> int | None:
        if not headers:
            return None
        handle = self._lib.rd_kafka_headers_new(len(headers))
        for name, value in headers:
            encoded = name.encode()
            content = None if value is None else ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p)
            self._lib.rd_kafka_header_add(handle, encoded, len(encoded), content, 0 if value is None else len(value))
        return int(handle)

    def flush(self, timeout_s: float) -> None:
        """Wait until every record handed over was acknowledged or failed; `failures` tells which.

        Raises:
            ProducerError: a fatal error, or records were still on their way after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        pauses = flush_pauses()
        with Stall(self._server) as stall:
            while self._lib.rd_kafka_flush(self._rk, next(pauses)) != 0:
                self._raise_fatal()
                waiting = self._lib.rd_kafka_outq_len(self._rk)
                stall.look(waiting)
                if time.monotonic() > deadline:
                    raise timeout_error(f"{waiting} records were not acknowledged in {timeout_s:.0f} s", self.failures)
        self._raise_fatal()

    def partitions(self, topic: str, timeout_s: float) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        result = ctypes.POINTER(Metadata)()
        code = self._lib.rd_kafka_metadata(self._rk, 0, self._topic(topic), ctypes.byref(result), int(timeout_s * 1000))
        if code != 0:
            raise ProducerError(self.name_of(code), self._text_of(code) + self.failures.hint())
        try:
            found = result.contents.topics[0]
            if found.err != 0:
                raise ProducerError(self.name_of(found.err), self._text_of(found.err))
            return int(found.partition_cnt)
        finally:
            self._lib.rd_kafka_metadata_destroy(result)

    def close(self) -> None:
        """Free it without a word to the broker: an open transaction stays open. May be called again."""
        rk, self._rk = self._rk, None
        if rk is None:
            return
        self._lib.rd_kafka_purge(rk, 0x1 | 0x2)
        for topic in self._topics.values():
            self._lib.rd_kafka_topic_destroy(topic)
        self._topics = {}
        self._lib.rd_kafka_destroy_flags(rk, 0)
        _producers.pop(self._number, None)

    # -- helpers -----------------------------------------------------------------------------------------------

    def name_of(self, code: int) -> str:
        return str(self._lib.rd_kafka_err2name(code).decode())

    def _text_of(self, code: int) -> str:
        return str(self._lib.rd_kafka_err2str(code).decode())

    def _topic(self, name: str) -> int:
        handle = self._topics.get(name)
        if handle is None:
            handle = self._lib.rd_kafka_topic_new(self._rk, name.encode(), None)
            if not handle:
                code = self._lib.rd_kafka_last_error()
                raise ProducerError(self.name_of(code), f"topic {name!r}: {self._text_of(code)}")
            self._topics[name] = handle
        return handle

    def _check(self, error: int | None) -> None:
        if error:
            code = self._lib.rd_kafka_error_code(error)
            reason = self._lib.rd_kafka_error_string(error).decode(errors="replace")
            self._lib.rd_kafka_error_destroy(error)
            raise ProducerError(self.name_of(code), reason + self.failures.hint())

    def note_fatal(self) -> None:
        code = self._lib.rd_kafka_fatal_error(self._rk, None, 0)
        if code != 0:
            self.failures.fatal = self.name_of(code)

    def _raise_fatal(self) -> None:
        said = ctypes.create_string_buffer(512)
        code = self._lib.rd_kafka_fatal_error(self._rk, said, len(said))
        if code != 0:
            raise ProducerError(self.name_of(code), said.value.decode(errors="replace"))


def _lay(structs: npt.NDArray[Any], at: str, length: str, array: pa.Array) -> Any:
    """Write pointers and lengths of binary values into the structs; return what must live until the call is over."""
    kind: Any = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    valid, offset_buffer, data = array.buffers()
    n = len(array)
    offsets = np.frombuffer(offset_buffer, dtype=kind)[array.offset : array.offset + n + 1]
    base = data.address if data is not None and data.address else ctypes.addressof(_EMPTY)
    np.add(offsets[:-1], np.int64(base), out=structs[at], casting="unsafe")
    np.subtract(offsets[1:], offsets[:-1], out=structs[length], casting="unsafe")
    if valid is not None and array.null_count:
        nulls = np.asarray(array.is_null())
        structs[at][nulls] = 0
        structs[length][nulls] = 0
    return offset_buffer, data
