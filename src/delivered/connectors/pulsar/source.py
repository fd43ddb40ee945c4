"""The Pulsar source: the messages of a batch, detection of lost messages, and the read of one slice on an executor.

Every entry of a slice's range is accounted for: its messages were received, or Pulsar reports that it completes none
(not the last chunk of a message; not dispatched to readers), or it was deleted, which is an error. A chunked message
belongs to the slice with its last chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import pyarrow as pa

from delivered.connectors.pulsar import (
    EARLIEST,
    LATEST,
    SOURCE,
    START,
    Partition,
    Position,
    SourceOptions,
    Timestamp,
    Where,
    fields,
    from_json,
    physical,
    ranges,
    refuse_latest_start,
    rest,
    short_name,
    to_json,
)
from delivered.connectors.pulsar.client import (
    Admin,
    Bounds,
    Missing,
    Registered,
    Retention,
    explained,
    pulsar,
    version_schema,
    warm_client,
)
from delivered.connectors.pulsar.columns import VERSION, Messages, Values, columns_of, registered, rejected_rows, shape
from delivered.contract.source import Address, Finding, Offsets, Retained, Slice, Source, SourceDriver
from delivered.kits.schemas.values import canonical
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, Unreachable, UsageError
from delivered.model.limits import SOURCE_BATCH_RECORDS_MAX, SOURCE_PATIENCE_S
from delivered.model.rows import Origin, Rejection, Rows
from delivered.source import admit

log = logging.getLogger("delivered.pulsar")

_Snapshot = Mapping[Partition, Bounds]


@dataclass(frozen=True)
class PulsarSource(Source):
    """`delivered_pulsar` as a source. Holds options, no connection."""

    options: SourceOptions
    schemas: tuple[tuple[str, Registered], ...] = ()
    """Schema per topic to decode values; empty: the current ones, if the options ask for any."""

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        kept = "by its subscription or by retention" if self.options.subscription else "by retention, or a subscription"
        assumes = [
            f"Pulsar keeps the messages of {self.options.what} until their batch is logged ({kept})",
            "brokers are not restored from a copy of their disks that is less than a minute old",
        ]
        if not self.options.fail_on_data_loss:
            assumes.append(
                "failOnDataLoss is false: messages that Pulsar deletes before they are read are lost, with a warning"
            )
        return SourceCapability("pulsar", replayable=True, sent_twice=True, assumes=tuple(assumes), decodes=True)

    def address(self) -> Address:
        return Address("pulsar", frozenset([self.options.url]), frozenset(self.options.topics))

    def preflight(self) -> Sequence[Finding]:
        options = self.options
        try:
            admin = Admin(options)
            snapshot = all_bounds(admin, options)
            check_connection(options, physical(next(iter(snapshot))))
            self.schema()
            subscription = options.subscription
            if subscription is not None:
                used = [physical(p) for p in snapshot if admin.consumers(physical(p), subscription)]
                if used:
                    return [
                        Finding.build(
                            "SUBSCRIPTION_IN_USE", refuses=True, subscription=subscription, used=short_name(used[0])
                        )
                    ]
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return []

    def earlier(self, end: Offsets, until: Offsets) -> Offsets:
        at, bounds = from_json(end), from_json(until)
        return to_json({p: min(bound, at.get(p, bound), key=lambda x: x.order) for p, bound in bounds.items()})

    def schema(self) -> pa.Schema:
        schemas = [(t, shape(SOURCE, t, schema).arrow) for t, schema in self.planned().schemas]
        for topic, kind in schemas:
            if not kind.equals(schemas[0][1]):
                raise UsageError(
                    "SCHEMAS_DIFFER",
                    topic=short_name(topic),
                    kind=kind,
                    first_topic=short_name(schemas[0][0]),
                    first_kind=schemas[0][1],
                )
        return columns_of(self.options.headers, schemas[0][1] if schemas and not self.options.canonical else None)

    def raw_schema(self) -> pa.Schema:
        return columns_of(self.options.headers, None).append(VERSION) if self.options.typed else self.schema()

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        if not self.options.typed:
            return Rows(raw)
        (topic,), admin = set(raw.column("topic").to_pylist()), Admin(self.options)
        full = self.planned()
        registered = dict(full.schemas)[topic]
        values = Values(SOURCE, topic, registered, lambda n: admin.schema(topic, n))
        versions = [registered.version if v is None else v for v in raw.column(VERSION.name).to_pylist()]
        decoded, bad = values.column(raw.column("value").to_pylist(), versions, [None] * raw.num_rows)
        rows = raw.drop_columns([VERSION.name])
        rows = rows.set_column(rows.schema.get_field_index("value"), pa.field("value", decoded.type), decoded)
        rejected = [Rejection(Origin.SOURCE, why.message, raw.slice(at, 1).to_pylist()[0]) for at, why in bad.items()]
        return rejected_rows(rows, raw.select(["key", "value"]), rejected, bad)

    def planned(self) -> Self:
        options = self.options
        if self.schemas or not options.typed:
            return self
        admin = Admin(options)
        return replace(self, schemas=tuple((t, registered(admin, SOURCE, t, options.version)) for t in options.topics))

    def driver(self) -> PulsarDriver:
        return PulsarDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return (rows.good for rows in self._read(piece, rejects=False))

    def read_rows(self, piece: Slice) -> Iterator[Rows]:
        """Rejects messages that their schema does not fit."""
        return self._read(piece, rejects=True)

    def _read(self, piece: Slice, *, rejects: bool) -> Iterator[Rows]:
        topic, number, start, end = piece.data
        schema = dict(self.planned().schemas).get(topic)
        first, last = Position.from_text(start), Position.from_text(end)
        return read_slice(self.options, (topic, number), first, last, schema, rejects)


class PulsarDriver(SourceDriver):
    """See `delivered.contract.source.SourceDriver`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._admin = Admin(options)
        self._frozen: _Snapshot | None = None
        self._moved: dict[Partition, Position] = {}

    def initial(self) -> Offsets:
        held, start = self._initial()
        self._hold(held)
        return to_json(start)

    def check_initial(self) -> None:
        self._initial()

    def _initial(self) -> tuple[Mapping[Partition, Position], Mapping[Partition, Position]]:
        """Positions to hold, and the same ones as those of a checkpoint."""
        options = self._options
        if options.ending is not None:
            raise UsageError("OPTION_CONFLICT.PULSAR_END")
        where = options.starting or Where("startingOffsets", LATEST)
        if where.stored:
            stored = {p: s for p, s in where.each.items() if isinstance(s, Position)}
            return stored, stored
        snapshot = self._frozen or self._snapshot()
        at = self._resolve(where, snapshot)
        return at, {p: before_first(snapshot[p]) if s == START else s for p, s in at.items()}

    def check_offsets(self, offsets: Offsets) -> None:
        from_json(offsets)

    def parts(self, at: Offsets) -> Mapping[str, Any]:
        return {physical(partition): str(position) for partition, position in from_json(at).items()}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        before = from_json(start)
        snapshot = self._frozen or self._snapshot()
        at = self._begin(before, snapshot)
        sizes = {p: rest(at[p], snapshot[p].last, snapshot[p].ledgers) for p in snapshot}
        # In proportion to the pending entries; the limit counts messages, of which an entry may hold many.
        shares = admit({p: n * (rows_max or 1) for p, n in sizes.items()}, rows_max)
        ends: dict[Partition, Position] = {}
        for p, bounds in snapshot.items():
            if sizes[p] == 0:
                ends[p] = at[p] if p in before else bounds.last
            elif rows_max is None:
                ends[p] = bounds.last
            else:
                ends[p] = cut(self._admin, physical(p), at[p], bounds, shares[p])
            ends[p] = with_follower(ends[p], bounds)
        if ends == before:
            return start
        return to_json(ends)

    def newest(self) -> Offsets | None:
        return to_json({p: b.last for p, b in self._snapshot().items()})

    def retained(self, at: Offsets) -> Retained:
        """By ledgers and policies."""
        return retained(self._admin, self._snapshot(), from_json(at))

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """The last entry read, hashed, with the time at which it was published."""
        digests: dict[str, str] = {}
        for partition, position in from_json(at).items():
            topic = physical(partition)
            if position.entry >= 0 and (digest := self._admin.entry_digest(topic, position.ledger, position.entry)):
                digests[topic] = digest
        return digests

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        now, positions = self.landmarks(at), {physical(p): position for p, position in from_json(at).items()}
        for topic, digest in now.items():
            if known.get(topic, digest) != digest:
                self._lost(
                    f"{short_name(topic)} has another entry at {positions[topic]} than this stream has read: its "
                    "ledgers were restored from an older copy, and it has grown again. Messages that have positions "
                    "before the stream's now are not read"
                )

    def freeze(self) -> None:
        self._frozen = self._snapshot()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last = from_json(start), from_json(end)
        pieces = []
        for partition, stop in sorted(last.items()):
            begin = first.get(partition, START)
            if begin.order < stop.order and stop.entry >= 0:
                pieces.append(Slice((*partition, str(begin), str(stop)), partition=short_name(physical(partition))))
        return pieces

    def batch(self) -> tuple[Offsets, Offsets]:
        starting = self._options.starting or Where("startingOffsets", EARLIEST)
        refuse_latest_start(starting)
        snapshot = self._snapshot()
        start = self._resolve(starting, snapshot)
        end = self._resolve(self._options.ending or Where("endingOffsets", LATEST), snapshot)
        for partition, position in start.items():
            if position.order > end[partition].order and end[partition].entry >= 0:
                raise UsageError(
                    "OPTION_VALUE.PULSAR_RANGE",
                    partition=short_name(physical(partition)),
                    position=position,
                    end=end[partition],
                )
        return to_json(start), to_json(end)

    def acknowledge(self, end: Offsets) -> None:
        if self._options.subscription is None:
            return
        try:
            self._hold(from_json(end))
        except DeliveredError as error:
            # Progress is in the checkpoint. The next batch moves the cursor again.
            log.warning("the subscription %r was not moved: %s", self._options.subscription, error)

    def _hold(self, at: Mapping[Partition, Position]) -> None:
        """Advance the subscription, so that messages after these positions are retained."""
        name = self._options.subscription
        if name is None:
            return
        for partition, position in at.items():
            if self._moved.get(partition) == position:
                continue
            topic = physical(partition)
            bounds = self._admin.bounds(topic)
            behind = bounds.cursors.get(name)
            # A partly read batch is retained completely.
            wanted = position if position.index is None else Position(position.ledger, position.entry - 1)
            if behind is None or behind.order < wanted.order:
                self._admin.move(topic, name, wanted, exists=behind is not None)
            self._moved[partition] = position

    def _snapshot(self) -> _Snapshot:
        return all_bounds(self._admin, self._options)

    def _resolve(self, where: Where, snapshot: _Snapshot) -> dict[Partition, Position]:
        silent = [p for p in snapshot if where.spot(p) is None]
        foreign = [p for p in where.each if p not in snapshot]
        if silent or foreign:
            topic = short_name(physical((silent or foreign)[0]))
            problem = f"does not name {topic}" if silent else f"names {topic}, not read here"
            raise UsageError("OPTION_VALUE.PULSAR_PARTITIONS", option=where.option, problem=problem)
        found_at: dict[Partition, Position] = {}
        for partition, bounds in snapshot.items():
            match where.spot(partition):
                case Position() as position:
                    found_at[partition] = self._existing(where, partition, position, bounds)
                case Timestamp(ms):
                    found_at[partition] = self._at_time(partition, ms, bounds)
                case str() as word:
                    found_at[partition] = START if word == EARLIEST else bounds.last
        return found_at

    def _existing(self, where: Where, partition: Partition, position: Position, bounds: Bounds) -> Position:
        """Reject a position of the user's that does not exist."""
        beyond = position.order[:2] > bounds.stored.order[:2]
        if self._options.fail_on_data_loss and (beyond or is_deleted(position, bounds)):
            first = bounds.ledgers[0][0] if bounds.ledgers else "none"
            raise UsageError(
                "OFFSET_OUT_OF_RANGE.PULSAR",
                option=where.option,
                position=position,
                partition=short_name(physical(partition)),
                first=first,
                last=bounds.last,
            )
        return bounds.last if beyond else position

    def _at_time(self, partition: Partition, ms: int, bounds: Bounds) -> Position:
        try:
            position = self._admin.before(physical(partition), ms)
        except Missing:
            return bounds.last
        # Never beyond the snapshot's end: messages may have been published since.
        return min(position, bounds.last, key=lambda p: p.order)

    def _begin(self, before: Mapping[Partition, Position], snapshot: _Snapshot) -> dict[Partition, Position]:
        """First position of each partition in the batch."""
        at: dict[Partition, Position] = {}
        for partition, position in before.items():
            name = short_name(physical(partition))
            if partition not in snapshot:
                self._lost(f"{name} no longer exists, or is no longer read")
            elif is_deleted(position, snapshot[partition]):
                first = snapshot[partition].ledgers[0][0] if snapshot[partition].ledgers else "none"
                self._lost(
                    f"{name} has ledgers from {first}; messages after {position}, the position of this stream, "
                    "were deleted, or the topic was"
                )
            elif position.order[:2] > snapshot[partition].stored.order[:2] and position.entry >= 0:
                self._lost(
                    f"{name} ends at {snapshot[partition].stored}, before {position}, the position of this stream"
                )
        for partition in snapshot:
            at[partition] = before.get(partition, START)
        return at

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise InvariantBroken("DATA_LOST.PULSAR_TOPIC", what=what)
        log.warning("%s; messages may be lost, and failOnDataLoss is false", what)


def all_bounds(admin: Admin, options: SourceOptions) -> _Snapshot:
    """Bounds of all partitions at one moment."""
    bounds: dict[Partition, Bounds] = {}
    for topic in options.topics:
        count = admin.partitions(topic)
        for number in range(count) if count else (-1,):
            bounds[topic, number] = admin.bounds(physical((topic, number)))
    return bounds


def before_first(bounds: Bounds) -> Position:
    """Right before the first message, so that it shows later if that was deleted; START: there is none."""
    return next((Position(ledger, -1) for ledger, count in bounds.ledgers if count), START)


def with_follower(position: Position, bounds: Bounds) -> Position:
    """Record the next ledger of one read to its end: later only this shows that none was between."""
    ids = [ledger for ledger, _ in bounds.ledgers]
    if position.index is not None or position.ledger not in ids[:-1]:
        return replace(position, follower=position.follower)
    at = ids.index(position.ledger)
    return replace(position, follower=ids[at + 1]) if position.entry + 1 >= bounds.ledgers[at][1] else position


# How long Pulsar keeps messages that no subscription waits for, by a topic's retention and the time of its messages.
#
# Brokers delete complete ledgers behind the slowest subscription, never the one that is written, once they have been
# closed for longer than the retention time, or while the others are larger than the retention size. So what is said
# here is the earliest time. Nothing says what a topic held before its first ledger.

CLOCKS_APART_MS = 60_000
"""Of producers, of brokers, and of the host that compares."""
_MINUTE_MS, _MEBIBYTE = 60_000, 1 << 20


def retained(
    admin: Admin,
    there: Mapping[Partition, Bounds],
    at: Mapping[Partition, Position],
) -> Retained:
    """See `delivered.contract.source.SourceDriver`."""
    policies, unknown = _policies(admin, {topic for topic, _ in at})
    missing: dict[str, int] = {}
    until: dict[str, int] = {}
    for partition, position in at.items():
        topic, name = partition[0], short_name(physical(partition))
        if (bounds := there.get(partition)) is None:
            unknown.append(f"{name}: no longer there, or no longer read")
            continue
        if is_deleted(position, bounds):
            missing[name] = 0
        retention = policies.get(topic)
        if retention is not None and (ms := _until(admin, partition, position, bounds, retention)) is not None:
            until[name] = ms
    return Retained(missing, until, "; ".join(unknown))


def reach_ms(admin: Admin, bounds: Mapping[Partition, Bounds]) -> dict[Partition, int | None]:
    """Messages published before this time, in ms since 1970, may have been removed; None: of any age; 0: none. Absent:
    this user may not see the topic's retention."""
    policies, _ = _policies(admin, {topic for topic, _ in bounds})
    return {p: _reach_ms(policies[p[0]], there.size) for p, there in bounds.items() if p[0] in policies}


def _policies(admin: Admin, topics: Iterable[str]) -> tuple[dict[str, Retention], list[str]]:
    """By topic; and why some are unknown."""
    found: dict[str, Retention] = {}
    unknown: list[str] = []
    for topic in sorted(topics):
        try:
            found[topic] = admin.retention(topic)
        except UsageError as error:
            if error.code != "DELIVERED_NOT_PERMITTED":
                raise
            unknown.append(f"{short_name(topic)}: this user may not see its retention (an administrator's token does)")
    return found, unknown


def _reach_ms(retention: Retention, size: int) -> int | None:
    if retention.keeps_all:
        return 0
    # What is left after a cut by size is at least that large.
    if retention.mebibytes >= 0 and size >= retention.mebibytes * _MEBIBYTE:
        return None
    return 0 if retention.minutes < 0 else _now_ms() - retention.minutes * _MINUTE_MS + CLOCKS_APART_MS


def _until(admin: Admin, partition: Partition, position: Position, bounds: Bounds, retention: Retention) -> int | None:
    """When the first message behind a position may be deleted, if no subscription waits for it; None: there is none, or
    it is kept."""
    behind = ranges(position, bounds.last, bounds.ledgers)
    if not behind or retention.keeps_all:
        return None
    ledger, first, _ = behind[0]
    entry = admin.entry(physical(partition), ledger, first)
    if entry is None or entry.published_ms is None:
        return None
    limits = [] if retention.minutes < 0 else [entry.published_ms + retention.minutes * _MINUTE_MS]
    if retention.mebibytes >= 0:
        # At the rate at which the topic has grown since that message.
        share = rest(position, bounds.last, bounds.ledgers) / max(1, sum(count for _, count in bounds.ledgers))
        grown, took_ms = bounds.size * share, max(1, _now_ms() - entry.published_ms)
        left = max(0.0, retention.mebibytes * _MEBIBYTE - grown)
        limits.append(_now_ms() + int(left / max(grown, 1.0) * took_ms))
    return min(limits)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# Reads one slice.

_SAMPLES = 4


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


_FIRST_POLL_MS, _POLL_MS = 16, 500
"""How long a message is waited for, before it is asked whether there will be one: ranges often end with the marker of a
transaction, which readers do not receive."""
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
    rejects: bool = False,
) -> Iterator[Rows]:
    """Messages after `start`, up to and including the entry (or index) of `end`, in order.

    Args:
        schema: of the topic, to decode values; None: bytes.
        rejects: a message that cannot be decoded is no error.

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
        rejects: bool,
    ) -> None:
        self._options = options
        self._topic = physical(partition)
        self._name = short_name(self._topic)
        self._start = start
        self._end = end
        self._admin = Admin(options, patient=True)
        self._rows = Messages(*partition, options.headers, self._values(partition[0], schema), rejects)
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

    def batches(self) -> Iterator[Rows]:
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
        waited_s, poll_ms = 0.0, _FIRST_POLL_MS
        with _reader(self._options, self._topic, first, inclusive=True) as reader:
            while True:
                asked = time.monotonic()
                message = _next(reader, poll_ms)
                if message is None:
                    waited_s, poll_ms = waited_s + time.monotonic() - asked, min(2 * poll_ms, _POLL_MS)
                    yield from self._account((self._end.ledger, self._end.entry + 1))
                    if self._done():
                        return
                    if waited_s > SOURCE_PATIENCE_S:
                        raise self._stalled()
                    continue
                waited_s, poll_ms = 0.0, _FIRST_POLL_MS
                id_ = message.message_id()
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
                    yield message, place
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
            elif held.encrypted and not held.hidden:
                raise UsageError("MESSAGE_ENCRYPTED", ledger=ledger, entry=entry, partition=self._name)
            elif held.chunk is None and not held.hidden:
                seen = self._seen[2] + 1 if self._seen[:2] == (ledger, entry) else 0
                if seen >= held.messages:  # the client did not report the batch size
                    self._go_to(ledger, entry + 1)
                    continue
                if until == (self._end.ledger, self._end.entry + 1):
                    return  # it exists and will be dispatched
                raise InvariantBroken("SOURCE_SKIPPED", ledger=ledger, entry=entry, partition=self._name)
            elif held.chunk is not None and held.chunk == held.chunks - 1:
                message = self._chunked(held.chunked, ledger, entry)
                if message is not None:
                    self._seen = (ledger, entry, -1)
                    yield message, self._seen
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
                message = _next(reader)
                if message is None:
                    continue
                id_ = message.message_id()
                if (id_.ledger_id(), id_.entry_id()) == (ledger, entry):
                    return message
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
            raise InvariantBroken("DATA_LOST.PULSAR_MESSAGES", what=what)
        log.warning("%s, and failOnDataLoss is false", what, extra={"topic": self._topic})

    def _stalled(self) -> Unreachable:
        owed = f"{self._pieces[self._at][0]}:{self._next}" if not self._done() else str(self._end)
        return Unreachable(
            "PULSAR_STALLED",
            partition=self._name,
            url=self._options.url,
            source_patience_s=SOURCE_PATIENCE_S,
            owed=owed,
            end=self._end,
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


def _next(reader: Any, timeout_ms: int = _POLL_MS) -> Any:
    """The next message, or None after a time-out."""
    try:
        return reader.read_next(timeout_ms)
    except pulsar().Timeout:
        return None
