"""A librdkafka producer: Arrow buffers in, no Python object per record.

A numpy array of `rd_kafka_message_t` gets pointers and lengths computed from the Arrow offsets; one call produces a
whole chunk. librdkafka copies the records, so no buffer must outlive the call, and its queue bounds the memory.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delivered.connectors.kafka.errors import Failures, ProducerError
from delivered.connectors.kafka.librdkafka import Argument, Client, Memory, Message, Metadata, Value, name_of, text_of
from delivered.connectors.kafka.protocol import server_name
from delivered.connectors.kafka.sink_options import OWNER, SinkOptions
from delivered.model.guarantee import Guarantee
from delivered.model.patience import Stall

QUEUE_KBYTES_MAX = 65_536
"""Queued rows per producer. Bounds a worker's memory, whatever the batch size."""

QUEUE_RECORDS_MAX = 400_000
DELIVERY_TIMEOUT_S = 120
"""at_least_once: how long a record may wait for its acknowledgement; longer than a broker restart."""

_POLL_MS = 5
"""How long a writer sleeps while the queue is full."""
ROWS_PER_CALL = 16_384
"""Rows per call; their structs take 1.2 MB."""

_MESSAGE = np.dtype(Message)
_UNASSIGNED = -1
_COPY, _PARTITION = 0x2, 0x8
_QUEUE_FULL = -184
_FATAL = -150
_VTYPE_TOPIC, _VTYPE_PARTITION, _VTYPE_VALUE, _VTYPE_KEY = 1, 3, 4, 5
_VTYPE_MSGFLAGS, _VTYPE_HEADERS = 7, 10
_EMPTY = ctypes.create_string_buffer(1)
"""Empty values point here: a null pointer would make them null."""


def producer_config(options: SinkOptions, guarantee: Guarantee, transactional_id: str | None) -> dict[str, str]:
    """A producer's settings by librdkafka's names; the user's override the defaults, not what the guarantee needs."""
    config = {
        "client.id": "delivered",
        "linger.ms": "5",
        "queue.buffering.max.kbytes": str(QUEUE_KBYTES_MAX),
        "queue.buffering.max.messages": str(QUEUE_RECORDS_MAX),
        "message.max.bytes": "1048588",  # the broker's default; the client's default is lower
        "socket.nagle.disable": "true",
        "reconnect.backoff.ms": "20",
        "retry.backoff.ms": "20",
        "topic.metadata.refresh.fast.interval.ms": "50",
        "topic.metadata.propagation.max.ms": "5000",
    }
    if options.compression is not None:
        config["compression.type"] = options.compression
    config |= options.resolved()
    config |= {
        "acks": "all",
        "partitioner": "murmur2_random",
        "delivery.report.only.error": "true",
    }
    match guarantee:
        case Guarantee.EXACTLY_ONCE:
            config |= {
                "transactional.id": transactional_id or "",
                "transaction.timeout.ms": str(options.transaction_timeout_s * 1000),
                "enable.idempotence": "true",
            }
            config.setdefault("message.timeout.ms", str(options.transaction_timeout_s * 1000))
        case Guarantee.AT_LEAST_ONCE:
            config |= {"enable.idempotence": "true"}
            config.setdefault("message.timeout.ms", str(DELIVERY_TIMEOUT_S * 1000))
        case Guarantee.AT_MOST_ONCE:
            # A request without an answer may have been stored, so it is given up instead of retried.
            config |= {"enable.idempotence": "false", "message.send.max.retries": "0", "acks": options.acks}
            config.setdefault("message.timeout.ms", "30000")
    return config


@dataclass(frozen=True)
class Rows:
    """Rows for one topic.

    Attributes:
        key, value: binary or large_binary; key None: every key is null.
        headers: list<struct<key: string, value: binary>>, or None.
        partition: int32, -1: by key; or None.
    """

    topic: str
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None = None
    partition: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int) -> Rows:
        if start == 0 and length >= len(self):
            return self
        return Rows(
            self.topic,
            None if self.key is None else self.key.slice(start, length),
            self.value.slice(start, length),
            None if self.headers is None else self.headers.slice(start, length),
            None if self.partition is None else self.partition[start : start + length],
        )


Headers = Sequence[tuple[str, bytes | None]]


class Producer(Client):
    """A producer. Not thread-safe.

    Attributes:
        failures: undelivered records since the last `clear`; counted, not raised.
    """

    def __init__(self, config: Mapping[str, str]) -> None:
        self._server = server_name(config["bootstrap.servers"])
        self._topics: dict[str, int] = {}
        self._structs = np.zeros(0, dtype=_MESSAGE)
        self.failures = Failures()
        super().__init__(self.PRODUCER, config, OWNER)

    def on_error(self, name: str, detail: str) -> None:
        self.failures.note(name, detail)
        self._note_fatal()

    def on_failed(self, code: int, size: int) -> None:
        self.failures.add(name_of(code), size)
        if code == _FATAL:
            self._note_fatal()

    # -- transactions ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Initialise the transactional id, which fences its previous holder."""
        # Connect first: init_transactions without a connection would retry only after 500 ms.
        result, timeout_ms = ctypes.POINTER(Metadata)(), int(timeout_s * 1000)
        if self._lib.rd_kafka_metadata(self._rk, 0, None, ctypes.byref(result), timeout_ms) == 0:
            self._lib.rd_kafka_metadata_destroy(result)
        self._check(self._lib.rd_kafka_init_transactions(self._rk, timeout_ms))

    def begin(self) -> None:
        self._check(self._lib.rd_kafka_begin_transaction(self._rk))

    def abort(self, timeout_s: float) -> None:
        """Purge the queue and abort the open transaction."""
        self._lib.rd_kafka_purge(self._rk, 0x1 | 0x2)
        self._lib.rd_kafka_poll(self._rk, 0)
        self._check(self._lib.rd_kafka_abort_transaction(self._rk, int(timeout_s * 1000)))

    # -- records -----------------------------------------------------------------------------------------------

    def send(self, rows: Rows) -> None:
        """Produce rows; blocks while the queue is full."""
        if rows.headers is not None and rows.headers.null_count < len(rows):
            nothing = itertools.repeat(None)
            for key, value, headers, partition in zip(
                nothing if rows.key is None else rows.key.to_pylist(),
                rows.value.to_pylist(),
                rows.headers.to_pylist(),
                itertools.repeat(_UNASSIGNED) if rows.partition is None else rows.partition.tolist(),
                strict=False,
            ):
                pairs = [(h["key"], h["value"]) for h in headers or ()]
                self.send_one(rows.topic, partition, key, value, pairs)
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
        keep = [_point_to(structs, "payload", "len", rows.value)]
        if rows.key is None:
            structs["key"] = 0
            structs["key_len"] = 0
        else:
            keep.append(_point_to(structs, "key", "key_len", rows.key))
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
            # A full queue rejects all later records too, which keeps the order; other errors concern one record.
            full = rest["err"][refused] == _QUEUE_FULL
            for i in refused[~full]:
                self.failures.add(name_of(int(rest["err"][i])), int(rest["len"][i] + rest["key_len"][i]))
            if not full.any():
                break
            done += int(refused[full][0])
            structs["err"][done:] = 0
            self._lib.rd_kafka_poll(self._rk, _POLL_MS)
            self._raise_fatal()
        del keep
        self._lib.rd_kafka_poll(self._rk, 0)

    def send_one(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()
    ) -> None:
        """Produce one record; blocks while the queue is full."""
        arguments = [
            Argument(_VTYPE_TOPIC, Value(cstr=topic.encode())),
            Argument(_VTYPE_PARTITION, Value(i32=partition)),
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
                self.failures.add(name_of(code), len(key or b"") + len(value or b""))
                return
            self._lib.rd_kafka_poll(self._rk, _POLL_MS)
            self._raise_fatal()

    def _headers(self, headers: Headers) -> int | None:
        if not headers:
            return None
        handle = self._lib.rd_kafka_headers_new(len(headers))
        for name, value in headers:
            encoded = name.encode()
            content = None if value is None else ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p)
            self._lib.rd_kafka_header_add(handle, encoded, len(encoded), content, 0 if value is None else len(value))
        return int(handle)

    def flush(self, timeout_s: float) -> None:
        """Wait until every produced record was acknowledged or is counted in `failures`.

        Raises:
            ProducerError: a fatal error, or records still unacknowledged after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        # Short at first: librdkafka notices an empty queue only when a call ends.
        pauses = itertools.chain(itertools.repeat(1, 100), itertools.repeat(20))
        with Stall(self._server) as stall:
            while self._lib.rd_kafka_flush(self._rk, next(pauses)) != 0:
                self._raise_fatal()
                waiting = self._lib.rd_kafka_outq_len(self._rk)
                stall.look(waiting)
                if time.monotonic() > deadline:
                    detail = f"{waiting} records were not acknowledged in {timeout_s:.0f} s{self.failures.hint()}"
                    raise ProducerError("_TIMED_OUT", detail)
        self._raise_fatal()

    def partitions(self, topic: str, timeout_s: float) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        result = ctypes.POINTER(Metadata)()
        code = self._lib.rd_kafka_metadata(self._rk, 0, self._topic(topic), ctypes.byref(result), int(timeout_s * 1000))
        if code != 0:
            raise ProducerError(name_of(code), text_of(code) + self.failures.hint())
        try:
            found = result.contents.topics[0]
            if found.err != 0:
                raise ProducerError(name_of(found.err), text_of(found.err))
            return int(found.partition_cnt)
        finally:
            self._lib.rd_kafka_metadata_destroy(result)

    def close(self) -> None:
        """Free the client and leave an open transaction open. Idempotent."""
        if (rk := self._detach()) is not None:
            self._lib.rd_kafka_purge(rk, 0x1 | 0x2)
            for topic in self._topics.values():
                self._lib.rd_kafka_topic_destroy(topic)
            self._lib.rd_kafka_destroy_flags(rk, 0)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _topic(self, name: str) -> int:
        handle = self._topics.get(name)
        if handle is None:
            handle = self._lib.rd_kafka_topic_new(self._rk, name.encode(), None)
            if not handle:
                code = self._lib.rd_kafka_last_error()
                raise ProducerError(name_of(code), f"topic {name!r}: {text_of(code)}")
            self._topics[name] = handle
        return handle

    def _check(self, error: int | None) -> None:
        if error:
            code = self._lib.rd_kafka_error_code(error)
            reason = self._lib.rd_kafka_error_string(error).decode(errors="replace")
            self._lib.rd_kafka_error_destroy(error)
            raise ProducerError(name_of(code), reason + self.failures.hint())

    def _note_fatal(self) -> None:
        code = self._lib.rd_kafka_fatal_error(self._rk, None, 0)
        if code != 0:
            self.failures.fatal = name_of(code)

    def _raise_fatal(self) -> None:
        errstr = ctypes.create_string_buffer(512)
        code = self._lib.rd_kafka_fatal_error(self._rk, errstr, len(errstr))
        if code != 0:
            raise ProducerError(name_of(code), errstr.value.decode(errors="replace"))


def _point_to(structs: npt.NDArray[Any], at: str, length: str, array: pa.Array) -> Any:
    """Write pointers and lengths of values into the structs; return the buffers to keep alive during the call."""
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
