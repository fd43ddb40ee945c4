"""RabbitMQ streams as a source: messages are retained under offsets, so no receiver is needed.

A stream is one partition. Offsets have gaps: RabbitMQ uses some itself, at least one per segment. Messages are only
deleted from the start, so nothing after an existing offset is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from delivered.connectors.rabbitmq.client import Kind, kind
from delivered.connectors.rabbitmq.follow import end_offset, first_offset, message_at, patiently
from delivered.connectors.rabbitmq.stream_options import (
    EARLIEST,
    LATEST,
    OWNER,
    StreamOptions,
    Where,
)
from delivered.connectors.rabbitmq.stream_reader import digest, lost, read_slice
from delivered.contract.connector import Connector, Made
from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, UsageError
from delivered.source.columns import columns
from delivered.source.ranges import admit

log = logging.getLogger("delivered.rabbitmq")


CONNECTOR = Connector(
    "rabbitmq_stream",
    "rabbitmq",
    sources=Made(StreamOptions, "delivered.connectors.rabbitmq.stream:RabbitmqStreamSource"),
    instead="write with delivered_rabbitmq: to an exchange, or with the stream's name as routingKey",
    messaging=True,
)


@dataclass(frozen=True)
class RabbitmqStreamSource:
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
        return [
            Finding(
                "QUEUE_NOT_STREAM",
                f"{queue!r} is a queue, not a stream: acknowledged messages are deleted.",
                True,
                "use a receiver: format rabbitmq, with queue and log",
            )
            for queue in queues
        ]

    def schema(self) -> pa.Schema:
        return columns(self.options.headers)

    def driver(self) -> StreamDriver:
        return StreamDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema(), *piece.data)


class StreamDriver:
    """See `delivered.contract.source.SourceDriver`. Offsets are {"orders": 12}: per stream, the next message."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._frozen: dict[str, int] | None = None

    def initial(self) -> Offsets:
        if self._options.ending is not None:
            raise UsageError(
                "OPTION_CONFLICT",
                f"{OWNER}: option 'endingOffsets' is for a batch read; a stream has no end.",
                next_step="remove it, or use spark.read",
            )
        return self._resolve("startingOffsets", self._options.starting or LATEST)

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

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """See `delivered.contract.landmarks`: a message, hashed. AMQP 0-9-1 tells no time of a message's arrival."""
        found: dict[str, str] = {}
        for stream, position in at.items():
            if position > 0 and stream in self._options.streams:
                message = patiently(partial(message_at, self._options, stream, int(position) - 1))
                if message is not None and message.offset < position:
                    found[stream] = digest(message)
        return found

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        """See `delivered.contract.landmarks`."""
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
        found = [(s, int(start[s]), int(stop)) for s, stop in sorted(end.items()) if s in start]
        return [Slice((s, at, stop), partition=s) for s, at, stop in found if at < stop]

    def batch(self) -> tuple[Offsets, Offsets]:
        starting = self._options.starting or EARLIEST
        if starting == LATEST:
            raise UsageError(
                "OPTION_VALUE",
                f"{OWNER}: option 'startingOffsets' is latest for a batch read; only a stream can start there.",
                next_step='write .option("startingOffsets", "earliest"), or use readStream',
            )
        start = self._resolve("startingOffsets", starting)
        newest = self._ends(start)
        end = self._resolve("endingOffsets", self._options.ending or LATEST)
        for stream, stop in end.items():
            if not start[stream] <= stop <= newest[stream]:
                raise UsageError(
                    "OFFSET_OUT_OF_RANGE",
                    f"{OWNER}: {stream} would be read from {start[stream]} to {stop}; it ends at {newest[stream]}.",
                    next_step="correct the starting and ending offsets",
                )
        return start, end

    def acknowledge(self, end: Offsets) -> None:
        """Streams need no acknowledgement."""

    def close(self) -> None:
        """Nothing is open."""

    def _resolve(self, option: str, where: Where) -> Offsets:
        streams = self._options.streams
        if isinstance(where, dict):
            if set(where) != set(streams):
                raise UsageError(
                    "OPTION_VALUE",
                    f"{OWNER}: option {option!r} has {', '.join(where)}; it must have each of {', '.join(streams)}.",
                    next_step="name an offset for each stream",
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
