"""Reads one slice of a stream on an executor: the messages of a range of offsets."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from delivered.connectors.rabbitmq.follow import Follower, Message, end_offset, first_offset, patiently
from delivered.connectors.rabbitmq.properties import OFFSET, headers, routing_key
from delivered.connectors.rabbitmq.stream_options import OWNER, StreamOptions
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_PATIENCE_S
from delivered.source.columns import micros

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
    at, heard = start, time.monotonic()
    follower: Follower | None = None
    try:
        while at < stop:
            try:
                if follower is None:
                    follower = Follower(options, stream, at, options.prefetch)
                came = follower.take(_WAIT_S)
            except Unreachable:
                if time.monotonic() - heard > SOURCE_PATIENCE_S:
                    raise
                if follower is not None:
                    follower.close()
                    follower = None
                time.sleep(_WAIT_S)
                continue
            for message in came:
                if message.offset >= at:
                    at, heard = message.offset + 1, time.monotonic()
                    yield message
            if not came and time.monotonic() - heard > _SILENCE_S and _over(options, stream, at, stop):
                return
            if time.monotonic() - heard > SOURCE_PATIENCE_S:
                raise Unreachable(
                    "RABBITMQ_STALLED",
                    f"{OWNER}: no messages received from {stream} at {options.place} for {SOURCE_PATIENCE_S:.0f} "
                    f"s; the slice waits for offset {at} and ends before {stop}.",
                    next_step="check the server; the batch will be read again",
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
    found = headers(properties, but=OFFSET)
    if properties.message_id is not None:
        found.append(("amqp.message_id", properties.message_id))
    return found


def digest(message: Message) -> str:
    """What a producer gave it, hashed; constant, however often it is delivered."""
    properties = message.properties
    kept = sorted(headers(properties, but=OFFSET), key=repr)
    given = [message.offset, message.method.routing_key, properties.message_id, properties.timestamp, kept]
    return hashlib.blake2b(repr(given).encode() + message.body, digest_size=16).hexdigest()


def lost(options: StreamOptions, what: str) -> None:
    """Report lost messages. Raises if `failOnDataLoss`."""
    if options.fail_on_data_loss:
        raise InvariantBroken(
            "DATA_LOST",
            f"{OWNER}: {what}; messages may be lost.",
            next_step='find out why; to continue regardless, restart with .option("failOnDataLoss", "false")',
        )
    log.warning("%s; messages may be lost, and failOnDataLoss is false", what)
