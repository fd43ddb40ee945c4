"""Reads one slice on an executor: the messages of a range of entries of one partition.

Every entry of the range is accounted for: its messages were received, or Pulsar reports that it completes none (not the
last chunk of a message; not dispatched to readers), or it was deleted, which is an error. A chunked message belongs to
the slice with its last chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar.client import Admin, Bounds, Registered, explained, pulsar, version_schema, warm_client
from delivered.connectors.pulsar.columns import Rejecting, Rows, Values
from delivered.connectors.pulsar.options import SOURCE, SourceOptions
from delivered.connectors.pulsar.positions import START, Partition, Position, fields, physical, short_name
from delivered.kits.schemas.values import canonical
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_PATIENCE_S

Ledgers = Sequence[tuple[int, int]]
_SAMPLES = 4


def ranges(start: Position, end: Position, ledgers: Ledgers) -> list[tuple[int, int, int]]:
    """(ledger, first entry, last entry + 1) of the ranges after `start`, up to `end`."""
    found = []
    for ledger, count in ledgers:
        if ledger < start.ledger or ledger > end.ledger:
            continue
        first = 0
        if ledger == start.ledger:
            first = start.entry + (1 if start.index is None else 0)
        stop = end.entry + 1 if ledger == end.ledger else count
        if first < stop:
            found.append((ledger, first, stop))
    return found


def rest(start: Position, end: Position, ledgers: Ledgers) -> int:
    """Number of entries after `start`, up to `end`."""
    return sum(stop - first for _, first, stop in ranges(start, end, ledgers))


def is_deleted(position: Position, bounds: Bounds) -> bool:
    """Whether messages after `position` may have been deleted.

    Pulsar deletes complete ledgers, the oldest first (empty ones at any time). While the position's ledger or an older
    one exists, nothing after it was deleted.
    """
    if position == START or not bounds.ledgers:
        return position != START and not bounds.ledgers
    return bounds.ledgers[0][0] > max(position.ledger, position.follower if position.follower is not None else -1)


def cut(admin: Admin, physical: str, start: Position, bounds: Bounds, messages: int) -> Position:
    """End of a batch of about `messages`, at least one entry.

    Estimated from the message counts of a few entries. The result is logged, so it need not be reproducible.
    """
    pieces = ranges(start, bounds.last, bounds.ledgers)
    total = sum(stop - first for _, first, stop in pieces)
    wanted = min(total, messages)
    for _ in range(2):
        held = [
            1 if found is None or found.chunk is not None else found.messages
            for found in (admin.entry(physical, *_nth(pieces, n)) for n in _spread(wanted))
        ]
        wanted = max(1, min(total, messages * len(held) // sum(held)))
        if max(held) == 1:
            break
    return Position(*_nth(pieces, wanted - 1))


def _spread(count: int) -> list[int]:
    return sorted({n * (count - 1) // max(1, _SAMPLES - 1) for n in range(_SAMPLES)})


def _nth(pieces: Sequence[tuple[int, int, int]], number: int) -> tuple[int, int]:
    for ledger, first, stop in pieces:
        if number < stop - first:
            return ledger, first + number
        number -= stop - first
    raise IndexError(number)


log = logging.getLogger("delivered.pulsar")

_POLL_MS = 500
_BATCH_BYTES = 16 << 20
_QUEUE = 2_000
_CHUNK_BACK_MAX = 10_000
"""Entries before a slice that are searched for a message's first chunk."""

Place = tuple[int, int, int]
"""Ledger, entry, index in the batch (-1: no batch)."""


def check_connection(options: SourceOptions, topic: str) -> None:
    """Raise Unreachable or UsageError if the topic cannot be read. It must exist, or this would create it."""
    with _reader(options, topic, pulsar().MessageId.latest, inclusive=False):
        pass


def read_slice(
    options: SourceOptions,
    partition: Partition,
    start: Position,
    end: Position,
    schema: Registered | None = None,
    rejects: Rejecting | None = None,
) -> Iterator[pa.RecordBatch]:
    """Messages after `start`, up to and including the entry (or index) of `end`, in order.

    Args:
        schema: of the topic, to decode values; None: bytes.
        rejects: None: a message that cannot be decoded is an error.

    Memory is bounded by the client's queue and one batch. An empty range sends no request (P17).

    Raises:
        BadRecord: a message does not match the schema version that it names.
        InvariantBroken: messages of the range no longer exist, and `failOnDataLoss` is true.
        Unreachable: the brokers did not answer for two minutes.
        UsageError: reading is not permitted.
    """
    if start.order >= end.order:
        return
    yield from _Reading(options, partition, start, end, schema, rejects).batches()


class _Reading:
    def __init__(
        self,
        options: SourceOptions,
        partition: Partition,
        start: Position,
        end: Position,
        schema: Registered | None,
        rejects: Rejecting | None,
    ) -> None:
        self._options = options
        self._topic = physical(partition)
        self._name = short_name(self._topic)
        self._start = start
        self._end = end
        self._admin = Admin(options, patient=True)
        self._rows = Rows(*partition, options.headers, self._values(partition[0], schema), rejects)
        bounds = self._admin.bounds(self._topic)
        if is_deleted(start, bounds):
            self._lost(f"messages after {start} of {self._name} no longer exist and were not read")
        self._ledgers = bounds.ledgers
        self._pieces = ranges(start, end, bounds.ledgers)
        if end.ledger not in {ledger for ledger, _ in bounds.ledgers}:
            self._lost(f"messages up to {end} of {self._name} no longer exist and were not read")
        self._at = 0  # index in _pieces
        self._next = self._pieces[0][1] if self._pieces else 0  # next expected entry
        self._seen: Place = (-1, -1, -1)  # the last message received

    def batches(self) -> Iterator[pa.RecordBatch]:
        rows = self._rows
        for message, place in self._messages():
            rows.add(message, place)
            if len(rows) >= SOURCE_BATCH_RECORDS_MAX or rows.bytes >= _BATCH_BYTES:
                yield rows.take()
        if len(rows):
            yield rows.take()

    def _values(self, topic: str, schema: Registered | None) -> Values | None:
        text = canonical if self._options.canonical else None
        return None if schema is None else Values(SOURCE, topic, schema, lambda n: self._admin.schema(topic, n), text)

    def _messages(self) -> Iterator[tuple[Any, Place]]:
        if not self._pieces:
            return
        ledger, entry = self._pieces[0][:2]
        first = _id(ledger, entry)
        stop_index = self._end.index
        waited_s = 0.0
        with _reader(self._options, self._topic, first, inclusive=True) as reader:
            while True:
                asked = time.monotonic()
                found = _next(reader)
                if found is None:
                    waited_s += time.monotonic() - asked
                    yield from self._account((self._end.ledger, self._end.entry + 1))
                    if self._done():
                        return
                    if waited_s > SOURCE_PATIENCE_S:
                        raise self._stalled()
                    continue
                waited_s = 0.0
                id_ = found.message_id()
                place = (id_.ledger_id(), id_.entry_id(), id_.batch_index())
                if place <= self._seen:
                    continue  # after a reconnect the broker dispatched it again
                yield from self._account(place[:2])
                if place[:2] > (self._end.ledger, self._end.entry) or (
                    stop_index is not None
                    and place[:2] == (self._end.ledger, self._end.entry)
                    and place[2] > stop_index
                ):
                    return
                self._seen = place
                if not self._skipped(place):
                    yield found, place
                self._pass(place, id_)
                if self._done():
                    return

    def _skipped(self, place: Place) -> bool:
        """Whether the previous batch read it: the range starts within this entry."""
        start = self._start
        return start.index is not None and place[:2] == (start.ledger, start.entry) and place[2] <= start.index

    def _pass(self, place: Place, id_: Any) -> None:
        """Advance past a received message; its entry is complete with the last one of the batch."""
        size = fields(id_.serialize()).get(6, 0) if place[2] >= 0 else 0
        at_end = self._end.index is not None and place[:2] == (self._end.ledger, self._end.entry)
        complete = place[2] < 0 or place[2] == size - 1 or (at_end and place[2] == self._end.index)
        self._go_to(place[0], place[1] + (1 if complete else 0))

    def _go_to(self, ledger: int, entry: int) -> None:
        while self._at < len(self._pieces) and self._pieces[self._at][0] < ledger:
            self._step()
        if self._at < len(self._pieces) and self._pieces[self._at][0] == ledger:
            self._next = max(self._next, entry)
            if self._next >= self._pieces[self._at][2]:
                self._step()

    def _step(self) -> None:
        self._at += 1
        self._next = self._pieces[self._at][1] if self._at < len(self._pieces) else 0

    def _done(self) -> bool:
        return self._at >= len(self._pieces)

    def _account(self, until: tuple[int, int]) -> Iterator[tuple[Any, Place]]:
        """Check the expected entries before `until` that brought no message.

        Yields chunked messages that began before the slice, which a reader that starts in it does not assemble.
        """
        while not self._done():
            ledger, _, _ = self._pieces[self._at]
            entry = self._next
            if (ledger, entry) >= until:
                return
            held = self._admin.entry(self._topic, ledger, entry)
            if held is None:
                self._lost(f"entry {ledger}:{entry} of {self._name} no longer exists and was not read")
            elif held.chunk is None and not held.hidden:
                seen = self._seen[2] + 1 if self._seen[:2] == (ledger, entry) else 0
                if seen >= held.messages:  # the client did not report the batch size
                    self._go_to(ledger, entry + 1)
                    continue
                if until == (self._end.ledger, self._end.entry + 1):
                    return  # it exists and will be dispatched
                raise InvariantBroken(
                    "SOURCE_SKIPPED",
                    f"{SOURCE}: the client received messages after entry {ledger}:{entry} of {self._name}, but not "
                    "that one.",
                    next_step="start again; report this if it recurs",
                )
            elif held.chunk is not None and held.chunk == held.chunks - 1:
                found = self._chunked(held.chunked, ledger, entry)
                if found is not None:
                    self._seen = (ledger, entry, -1)
                    yield found, self._seen
            self._go_to(ledger, entry + 1)

    def _chunked(self, which: str, ledger: int, entry: int) -> Any:
        """The message whose last chunk is this entry, read from its first chunk; None: that no longer exists."""
        first = None
        for place in islice(self._backwards(ledger, entry), _CHUNK_BACK_MAX):
            held = self._admin.entry(self._topic, *place)
            if held is not None and held.chunked == which and held.chunk == 0:
                first = place
                break
        if first is None:
            self._lost(f"the first chunk of the message that ends at {ledger}:{entry} of {self._name} no longer exists")
            return None
        deadline = time.monotonic() + SOURCE_PATIENCE_S
        with _reader(self._options, self._topic, _id(*first), inclusive=True) as reader:
            while time.monotonic() < deadline:
                found = _next(reader)
                if found is None:
                    continue
                id_ = found.message_id()
                if (id_.ledger_id(), id_.entry_id()) == (ledger, entry):
                    return found
                if (id_.ledger_id(), id_.entry_id()) > (ledger, entry):
                    break
        raise self._stalled()

    def _backwards(self, ledger: int, entry: int) -> Iterator[tuple[int, int]]:
        for kept, count in reversed(self._ledgers):
            if kept <= ledger:
                for at in range(entry if kept == ledger else count - 1, -1, -1):
                    yield kept, at

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise InvariantBroken(
                "DATA_LOST",
                f"{SOURCE}: {what}: deleted by retention or manually, or the topic was deleted and recreated.",
                next_step='find out why; to continue without them, restart with .option("failOnDataLoss", "false")',
            )
        log.warning("%s, and failOnDataLoss is false", what, extra={"topic": self._topic})

    def _stalled(self) -> Unreachable:
        owed = f"{self._pieces[self._at][0]}:{self._next}" if not self._done() else str(self._end)
        return Unreachable(
            "PULSAR_STALLED",
            f"{SOURCE}: no messages received from {self._name} at {self._options.url} for {SOURCE_PATIENCE_S:.0f} "
            f"s; the slice waits for entry {owed} and ends with {self._end}.",
            next_step="check the brokers; the batch will be read again",
        )


@contextmanager
def _reader(options: SourceOptions, topic: str, start: Any, inclusive: bool) -> Iterator[Any]:
    library = pulsar()
    client = warm_client(options)
    more = {"schema": version_schema()} if options.typed else {}
    try:
        reader = client.create_reader(
            topic, start, receiver_queue_size=_QUEUE, start_message_id_inclusive=inclusive, **more
        )
    except library.PulsarException as error:
        raise explained(error, options, short_name(topic)) from None
    try:
        yield reader
    finally:
        try:
            reader.close()
        except library.PulsarException as error:
            log.debug("closing a reader failed: %s", error)


def _id(ledger: int, entry: int) -> Any:
    library = pulsar()
    return library.MessageId.deserialize(library.MessageId(-1, ledger, entry, -1).serialize())


def _next(reader: Any) -> Any:
    """The next message, or None after a time-out."""
    try:
        return reader.read_next(_POLL_MS)
    except pulsar().Timeout:
        return None
