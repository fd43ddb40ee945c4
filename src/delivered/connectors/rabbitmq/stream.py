"""RabbitMQ streams as a source: messages are retained under offsets, so no receiver is needed.

A stream is one partition. Offsets have gaps: RabbitMQ uses some itself, at least one per segment. Messages are only
deleted from the start, so nothing after an existing offset is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from delivered.connectors.rabbitmq import EARLIEST, LATEST, Place, StreamOptions, Where
from delivered.connectors.rabbitmq.client import (
    OFFSET,
    Kind,
    connect,
    explained,
    headers,
    kind,
    pika,
    routing_key,
    stream_arguments,
    stream_offset,
)
from delivered.contract.connector import Connector, Factory
from delivered.contract.source import Finding, Offsets, Retained, Slice, Source, SourceDriver, foreign_offsets
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, Unreachable, UsageError
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_PATIENCE_S
from delivered.source import admit, columns, micros

# Consumes a stream from an offset, and finds a stream's first and last offset.
#
# AMQP 0-9-1 reports neither. A consumer at `first` receives the oldest message, one at `last` all of the last chunk:
# after its first message, the answer to any request on the channel arrives behind the rest of the chunk.

FIRST, LAST = "first", "last"
_LOOK_PREFETCH = 65_535
"""More than a chunk holds, so that all of the last one arrives."""
_END_SILENCE_S = 1.0
"""A stream never seen to hold a message counts as empty after this time."""
_PAUSE_S = 0.3
_AGE = re.compile(r"(\d+)([YMDhms])")
_AGE_S = {"Y": 31_557_600, "M": 2_629_800, "D": 86_400, "h": 3_600, "m": 60, "s": 1}
_AGE_PARTS = 16
"""Of a stream's maximum age: as precisely the age of a message is found, by asking what arrived since."""


@dataclass(frozen=True)
class Message:
    offset: int
    method: Any
    properties: Any
    body: bytes


class Follower:
    """Not thread-safe. Raises Unreachable if the connection is lost."""

    def __init__(self, place: Place, stream: str, at: int | str | datetime, prefetch: int) -> None:
        self._place = place
        self._stream = stream
        self._errors = (pika().exceptions.AMQPError, OSError)
        self._arrived: deque[Message] = deque()
        self._connection = connect(place)
        try:
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=prefetch)
            self._channel.basic_consume(stream, self._on_message, arguments={OFFSET: at})
        except self._errors as error:
            self.close()
            raise explained(error, place) from error

    def take(self, wait_s: float) -> list[Message]:
        """Received messages in offset order; waits for the first one."""
        try:
            if not self._arrived:
                self._connection.process_data_events(wait_s)
            if not self._channel.is_open:
                reason = getattr(self._channel, "_closing_reason", None) or "no reason given"
                raise Unreachable("RABBITMQ_CHANNEL_CLOSED", place=self._place.place, reason=reason)
            messages = list(self._arrived)
            self._arrived.clear()
            if messages:  # has no effect but credit: the server sends more
                self._channel.basic_ack(messages[-1].method.delivery_tag, multiple=True)
        except self._errors as error:
            raise explained(error, self._place) from error
        return messages

    def settle(self) -> None:
        """Wait until the rest of a chunk has arrived."""
        try:
            self._channel.queue_declare(self._stream, passive=True)
        except self._errors as error:
            raise explained(error, self._place) from error

    def counted(self) -> int:
        """The server's message count, some seconds old."""
        try:
            return int(self._channel.queue_declare(self._stream, passive=True).method.message_count)
        except self._errors as error:
            raise explained(error, self._place) from error

    def close(self) -> None:
        """The client requeues undelivered messages, which a stream rejects by closing the connection with an error."""
        with contextlib.suppress(*self._errors):
            if self._connection.is_open:
                self._connection.close()

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        del channel
        offset = stream_offset(properties)
        if offset is None:  # not acknowledged, so it stays
            raise UsageError("QUEUE_NOT_STREAM.READ", stream=self._stream, place=self._place.place)
        self._arrived.append(Message(offset, method, properties, body))


def first_offset(place: Place, stream: str, known: bool = False) -> int | None:
    """Offset of the oldest message; None: the stream is empty."""
    messages = _look(place, stream, FIRST, 1, known)
    return messages[0].offset if messages else None


def end_offset(place: Place, stream: str, known: bool = False) -> int:
    """Offset after the newest message at the time of the call; 0: the stream is empty.

    Args:
        known: it held messages before.
    """
    messages = _look(place, stream, LAST, _LOOK_PREFETCH, known)
    return messages[-1].offset + 1 if messages else 0


def message_at(place: Place, stream: str, offset: int) -> Message | None:
    """The message at an offset, or the next one. The stream must have one there or later."""
    messages = _look(place, stream, offset, 1, known=True)
    return messages[0] if messages else None


def first_since(place: Place, stream: str, seconds: int) -> int | None:
    """Offset of the first message that arrived at a time since 1970, or later; None: none did. To the chunk in which
    it was stored."""
    follower = Follower(place, stream, datetime.fromtimestamp(seconds, UTC), 1)
    try:
        messages = follower.take(_END_SILENCE_S)
        return messages[0].offset if messages else None
    finally:
        follower.close()


def retained(options: StreamOptions, at: Mapping[str, int]) -> Retained:
    """By first offsets and `x-max-age`. See `delivered.contract.source.SourceDriver`."""
    missing: dict[str, int] = {}
    until: dict[str, int] = {}
    unknown: list[str] = []
    for stream, position in at.items():
        if stream not in options.streams:
            unknown.append(f"{stream}: no longer read")
            continue
        first = patiently(partial(first_offset, options, stream, known=position > 0))
        if first is not None and first > position:
            missing[stream] = first - position
        try:
            arguments = stream_arguments(options, stream)
        except Refused as error:
            unknown.append(f"{stream}: {error.message}")
            continue
        age = _AGE.fullmatch(str(arguments.get("x-max-age", "")))
        if age is not None:
            ms = int(age[1]) * _AGE_S[age[2]] * 1000
            until[stream] = _now_ms() + int(ms * (1 - _age(options, stream, max(position, first or 0), ms)))
        if "x-max-length-bytes" in arguments:
            unknown.append(f"{stream}: AMQP 0-9-1 does not say how large it is, of x-max-length-bytes")
        unknown.append(f"{stream}: AMQP 0-9-1 does not say whether a policy limits it")
    return Retained(missing, until, "; ".join(unknown))


def _age(options: StreamOptions, stream: str, offset: int, max_ms: int) -> float:
    """How old a message is, at most, as a part of the maximum age."""

    def is_younger(part: int) -> bool:
        at = first_since(options, stream, (_now_ms() - max_ms * part // _AGE_PARTS) // 1000)
        return at is not None and at <= offset

    parts = range(1, _AGE_PARTS)
    return (bisect_left(parts, True, key=lambda part: patiently(partial(is_younger, part))) + 1) / _AGE_PARTS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def patiently(what: Any) -> Any:
    """Retry until the server answers, across a restart."""
    deadline = time.monotonic() + SOURCE_PATIENCE_S
    while True:
        try:
            return what()
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _look(place: Place, stream: str, at: int | str, prefetch: int, known: bool) -> list[Message]:
    follower = Follower(place, stream, at, prefetch)
    try:
        began = time.monotonic()
        while not (messages := follower.take(_END_SILENCE_S)):
            # The server's count lags, and is 0 for a while after a restart.
            patience = SOURCE_PATIENCE_S / 4 if known or follower.counted() else _END_SILENCE_S
            if time.monotonic() - began > patience:
                return []
        if at == LAST:
            follower.settle()
            messages += follower.take(0)
        return messages
    finally:
        follower.close()


# Reads one slice of a stream on an executor: the messages of a range of offsets.

log = logging.getLogger("delivered.rabbitmq")

_WAIT_S = 0.5
_SILENCE_S = 5.0
"""After this time without messages, check that the rest of the slice exists."""
_BATCH_BYTES = 16 << 20


def read_slice(
    options: StreamOptions, schema: pa.Schema, stream: str, start: int, stop: int
) -> Iterator[pa.RecordBatch]:
    """Messages from `start` on, before `stop`, in order. Memory is bounded by the prefetch and one batch.

    Raises:
        InvariantBroken: messages of the range were deleted, and `failOnDataLoss` is true.
        Unreachable: no messages for two minutes.
        UsageError: the stream does not exist, or reading is not permitted.
    """
    rows = list[Message]()
    size = 0
    at, gap = start, None
    for message in _messages(options, stream, at, stop):
        if message.offset > at and gap is None:
            gap = at
        at = message.offset + 1
        if message.offset >= stop:
            break
        rows.append(message)
        size += len(message.body)
        if len(rows) >= SOURCE_BATCH_RECORDS_MAX or size >= _BATCH_BYTES:
            yield _batch(rows, stream, schema)
            rows, size = [], 0
    if rows:
        yield _batch(rows, stream, schema)
    if gap is not None:
        # Offsets used by RabbitMQ itself, or deleted messages: those are deleted from the start on.
        first = patiently(partial(first_offset, options, stream, known=True))
        if first is None or first > gap:
            lost(options, f"{stream} begins at {first}; messages from {gap} on were deleted before they were read")


def _messages(options: StreamOptions, stream: str, start: int, stop: int) -> Iterator[Message]:
    """Messages from `start` on, up to the first one at or after the slice's end."""
    at, answered_s = start, time.monotonic()
    follower: Follower | None = None
    try:
        while at < stop:
            try:
                if follower is None:
                    follower = Follower(options, stream, at, options.prefetch)
                came = follower.take(_WAIT_S)
            except Unreachable:
                if time.monotonic() - answered_s > SOURCE_PATIENCE_S:
                    raise
                if follower is not None:
                    follower.close()
                    follower = None
                time.sleep(_WAIT_S)
                continue
            for message in came:
                if message.offset >= at:
                    at, answered_s = message.offset + 1, time.monotonic()
                    yield message
            if not came and time.monotonic() - answered_s > _SILENCE_S and _over(options, stream, at, stop):
                return
            if time.monotonic() - answered_s > SOURCE_PATIENCE_S:
                raise Unreachable(
                    "RABBITMQ_STALLED",
                    stream=stream,
                    place=options.place,
                    source_patience_s=SOURCE_PATIENCE_S,
                    position=at,
                    stop=stop,
                )
    finally:
        if follower is not None:
            follower.close()


def _over(options: StreamOptions, stream: str, at: int, stop: int) -> bool:
    """Whether the stream ends before the slice. Raises then if `failOnDataLoss`."""
    end = patiently(partial(end_offset, options, stream, known=True))
    if end >= stop:
        return False
    lost(options, f"{stream} ends at {end}, but a batch must read from {at} to {stop}; it was recreated")
    return True


def _batch(rows: Sequence[Message], stream: str, schema: pa.Schema) -> pa.RecordBatch:
    n = len(rows)
    times = [None if m.properties.timestamp is None else micros(int(m.properties.timestamp), 1_000_000) for m in rows]
    columns = [
        pa.array([routing_key(m.method) for m in rows], pa.binary()),
        pa.array([m.body for m in rows], pa.binary()),
        pa.array([stream] * n, pa.string()),
        pa.array([0] * n, pa.int32()),
        pa.array([m.offset for m in rows], pa.int64()),
        pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        pa.array([0] * n, pa.int32()),
    ]
    if len(schema) > len(columns):
        columns.append(pa.array([_headers(m.properties) for m in rows], schema.field("headers").type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _headers(properties: Any) -> list[tuple[str, bytes | None]]:
    pairs = headers(properties, but=OFFSET)
    if properties.message_id is not None:
        pairs.append(("amqp.message_id", properties.message_id))
    return pairs


def digest(message: Message) -> str:
    """What a producer gave it, hashed; constant, however often it is delivered."""
    properties = message.properties
    kept = sorted(headers(properties, but=OFFSET), key=repr)
    parts = [message.offset, message.method.routing_key, properties.message_id, properties.timestamp, kept]
    return hashlib.blake2b(repr(parts).encode() + message.body, digest_size=16).hexdigest()


def lost(options: StreamOptions, what: str) -> None:
    """Report lost messages. Raises if `failOnDataLoss`."""
    if options.fail_on_data_loss:
        raise InvariantBroken("DATA_LOST.RABBITMQ", what=what)
    log.warning("%s; messages may be lost, and failOnDataLoss is false", what)


CONNECTOR = Connector(
    "rabbitmq_stream",
    "rabbitmq",
    sources=Factory(StreamOptions, "delivered.connectors.rabbitmq.stream:RabbitmqStreamSource"),
    instead="write with delivered_rabbitmq: to an exchange, or with the stream's name as routingKey",
    messaging=True,
)


@dataclass(frozen=True)
class RabbitmqStreamSource(Source):
    """Holds options, no connection."""

    options: StreamOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        what = ", ".join(self.options.streams)
        assumes = [
            f"RabbitMQ keeps the messages of {what} until their batch is logged (x-max-age, x-max-length-bytes)",
            "a stream that is recreated or restored has other messages at the offsets that were read",
            "no compressed batches of the stream protocol, which RabbitMQ does not deliver over AMQP 0-9-1",
        ]
        if not self.options.fail_on_data_loss:
            assumes.append("failOnDataLoss is false: messages deleted before they are read are lost")
        return SourceCapability(system="rabbitmq_stream", replayable=True, sent_twice=True, assumes=tuple(assumes))

    def preflight(self) -> Sequence[Finding]:
        try:
            queues = [s for s in self.options.streams if kind(self.options, s) is not Kind.STREAM]
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return [Finding.build("QUEUE_NOT_STREAM.START", refuses=True, queue=queue) for queue in queues]

    def schema(self) -> pa.Schema:
        return columns(self.options.headers)

    def driver(self) -> StreamDriver:
        return StreamDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema(), *piece.data)


class StreamDriver(SourceDriver):
    """See `delivered.contract.source.SourceDriver`. Offsets are {"orders": 12}: per stream, the next message."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._frozen: dict[str, int] | None = None

    def initial(self) -> Offsets:
        if self._options.ending is not None:
            raise UsageError("OPTION_CONFLICT.RABBITMQ_END")
        return self._resolve("startingOffsets", self._options.starting or LATEST)

    def check_offsets(self, offsets: Offsets) -> None:
        if not all(isinstance(at, int) for at in offsets.values()) or "lsn" in offsets or "number" in offsets:
            raise foreign_offsets("a RabbitMQ stream", offsets)

    def parts(self, at: Offsets) -> Mapping[str, Any]:
        return at

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        """A stream missing in `start` is added at its first message and read from the next batch on."""
        ends = self._frozen or self._ends(start)
        at: dict[str, int] = {s: int(start[s]) for s in ends if s in start}
        for stream, position in at.items():
            if position > ends[stream]:
                self._lost(f"{stream} ends at {ends[stream]}, before {position}, the position of this query")
                at[stream] = ends[stream]
        for stream in start.keys() - ends.keys():
            self._lost(f"{stream} is no longer read")
        shares = admit({s: ends[s] - at[s] for s in at}, rows_max)
        return {s: at[s] + shares[s] if s in at else self._first(s) for s in ends}

    def newest(self) -> Offsets | None:
        return dict(self._ends({}))

    def retained(self, at: Offsets) -> Retained:
        """By first offsets and `x-max-age`."""
        return retained(self._options, at)

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """A message, hashed. AMQP 0-9-1 reports no arrival time."""
        digests: dict[str, str] = {}
        for stream, position in at.items():
            if position > 0 and stream in self._options.streams:
                message = patiently(partial(message_at, self._options, stream, int(position) - 1))
                if message is not None and message.offset < position:
                    digests[stream] = digest(message)
        return digests

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        for stream, now in self.landmarks(at).items():
            if known.get(stream, now) != now:
                self._lost(
                    f"{stream} has another message before offset {at[stream]} than this query has read: it was deleted "
                    "and recreated, or restored from an older copy, and has grown again. Messages that have offsets "
                    "below the query's position now are not read"
                )

    def freeze(self) -> None:
        self._frozen = self._ends({})

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        ranges = [(s, int(start[s]), int(stop)) for s, stop in sorted(end.items()) if s in start]
        return [Slice((s, at, stop), partition=s) for s, at, stop in ranges if at < stop]

    def batch(self) -> tuple[Offsets, Offsets]:
        starting = self._options.starting or EARLIEST
        if starting == LATEST:
            raise UsageError("OPTION_VALUE.STREAM_BATCH_LATEST")
        start = self._resolve("startingOffsets", starting)
        newest = self._ends(start)
        end = self._resolve("endingOffsets", self._options.ending or LATEST)
        for stream, stop in end.items():
            if not start[stream] <= stop <= newest[stream]:
                raise UsageError(
                    "OFFSET_OUT_OF_RANGE.RABBITMQ", stream=stream, start=start[stream], stop=stop, newest=newest[stream]
                )
        return start, end

    def _resolve(self, option: str, where: Where) -> Offsets:
        streams = self._options.streams
        if isinstance(where, dict):
            if set(where) != set(streams):
                raise UsageError(
                    "OPTION_VALUE.STREAMS", option=option, actual=", ".join(where), streams=", ".join(streams)
                )
            return dict(where)
        return dict(self._ends({})) if where == LATEST else {s: self._first(s) for s in streams}

    def _ends(self, known: Mapping[str, int]) -> dict[str, int]:
        ask = partial(end_offset, self._options)
        return {s: patiently(partial(ask, s, known=bool(known.get(s)))) for s in self._options.streams}

    def _first(self, stream: str) -> int:
        return patiently(partial(first_offset, self._options, stream)) or 0

    def _lost(self, what: str) -> None:
        lost(self._options, what)
