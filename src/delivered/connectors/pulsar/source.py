"""The Pulsar source: the messages of a batch, and detection of lost messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from delivered.connectors.pulsar.client import Admin, Bounds, Missing, Registered
from delivered.connectors.pulsar.columns import VERSION, Rejecting, Values, columns_of, registered, shape
from delivered.connectors.pulsar.options import SOURCE, SourceOptions, refuse_latest_start
from delivered.connectors.pulsar.positions import (
    EARLIEST,
    LATEST,
    START,
    Partition,
    Position,
    Timestamp,
    Where,
    from_json,
    physical,
    short_name,
    to_json,
)
from delivered.connectors.pulsar.reader import cut, is_deleted, rest
from delivered.contract.finding import Finding
from delivered.contract.powers import Address
from delivered.contract.source import RAW, Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.source.ranges import admit

log = logging.getLogger("delivered.pulsar")

_Snapshot = Mapping[Partition, Bounds]


@dataclass(frozen=True)
class PulsarSource:
    """`delivered_pulsar` as a source. Holds options, no connection."""

    options: SourceOptions
    schemas: tuple[tuple[str, Registered], ...] = ()
    """Schema per topic to decode values; empty: the current ones, if the options ask for any."""
    rejects: Rejecting | None = None

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
        return SourceCapability(system="pulsar", replayable=True, sent_twice=True, assumes=tuple(assumes))

    def address(self) -> Address:
        """See `delivered.contract.powers.HasAddress`."""
        return Address("pulsar", frozenset([self.options.url]), frozenset(self.options.topics))

    def preflight(self) -> Sequence[Finding]:
        from delivered.connectors.pulsar.reader import check_connection

        options = self.options
        try:
            admin = Admin(options)
            snapshot = _snapshot(admin, options)
            check_connection(options, physical(next(iter(snapshot))))
            self.schema()
            subscription = options.subscription
            if subscription is not None:
                used = [physical(p) for p in snapshot if admin.consumers(physical(p), subscription)]
                if used:
                    return [
                        Finding(
                            "SUBSCRIPTION_IN_USE",
                            f"The subscription {subscription!r} of {short_name(used[0])} has consumers; their "
                            "acknowledgements would interfere with the pipeline's progress.",
                            True,
                            "use a subscription without consumers",
                        )
                    ]
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return []

    def earlier(self, end: Offsets, until: Offsets) -> Offsets:
        """See `delivered.contract.powers.OrdersOffsets`."""
        at, bounds = from_json(end), from_json(until)
        return to_json({p: min(bound, at.get(p, bound), key=lambda x: x.order) for p, bound in bounds.items()})

    def schema(self) -> pa.Schema:
        found = [(t, shape(SOURCE, t, schema).arrow) for t, schema in self.planned().schemas]
        for topic, kind in found:
            if not kind.equals(found[0][1]):
                raise UsageError(
                    "SCHEMAS_DIFFER",
                    f"{SOURCE}: {short_name(topic)!r} has values of {kind}, and {short_name(found[0][0])!r} of "
                    f"{found[0][1]}; one column cannot hold both.",
                    next_step="read each topic in its own query, or set schema to bytes",
                )
        schema = columns_of(self.options.headers, found[0][1] if found and not self.options.canonical else None)
        return schema if self.rejects is None or not found else self.rejects.columns(schema)

    def rejecting(self, *, kept: bool, raw: bool = False) -> PulsarSource:
        """See `delivered.contract.schemas.RejectsRecords`: messages that their schema does not fit."""
        return replace(self, rejects=Rejecting(kept, raw)) if self.options.typed else self

    def raw_schema(self) -> pa.Schema:
        return columns_of(self.options.headers, None).append(VERSION) if self.options.typed else self.schema()

    def decoded(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `delivered.contract.schemas.RejectsRecords`."""
        if not self.options.typed:
            return raw
        (topic,), admin = set(raw.column("topic").to_pylist()), Admin(self.options)
        full = self.planned()
        registered = dict(full.schemas)[topic]
        values = Values(SOURCE, topic, registered, lambda n: admin.schema(topic, n))
        versions = [registered.version if v is None else v for v in raw.column(VERSION.name).to_pylist()]
        found, bad = values.column(raw.column("value").to_pylist(), versions, [None] * raw.num_rows)
        made = raw.drop_columns([VERSION.name])
        made = made.set_column(made.schema.get_field_index("value"), pa.field("value", found.type), found)
        reasons = [{"reason": bad[at].message} if at in bad else None for at in range(made.num_rows)]
        rejects = self.rejects or Rejecting(kept=False, raw=False)
        return rejects.rows(made, [raw.column(f.name) for f in RAW.type], reasons)

    def planned(self) -> PulsarSource:
        """See `delivered.contract.powers`."""
        options = self.options
        if self.schemas or not options.typed:
            return self
        admin = Admin(options)
        return replace(self, schemas=tuple((t, registered(admin, SOURCE, t, options.version)) for t in options.topics))

    def driver(self) -> PulsarDriver:
        return PulsarDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        from delivered.connectors.pulsar.reader import read_slice

        topic, number, start, end = piece.data
        schema = dict(self.planned().schemas).get(topic)
        first, last = Position.from_text(start), Position.from_text(end)
        return read_slice(self.options, (topic, number), first, last, schema, self.rejects)


class PulsarDriver:
    """See `delivered.contract.source.SourceDriver`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._admin = Admin(options)
        self._frozen: _Snapshot | None = None
        self._moved: dict[Partition, Position] = {}

    def initial(self) -> Offsets:
        options = self._options
        if options.ending is not None:
            raise UsageError(
                "OPTION_CONFLICT",
                f"{SOURCE}: option 'endingOffsets' is for a batch read; a stream has no end.",
                next_step="remove it, or use spark.read",
            )
        where = options.starting or Where("startingOffsets", LATEST)
        if where.stored:
            at = {p: s for p, s in where.each.items() if isinstance(s, Position)}
        else:
            at = self._resolve(where, self._frozen or self._snapshot())
        self._hold(at)
        return to_json(at)

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
            ends[p] = _with_follower(ends[p], bounds)
        if ends == before:
            return start
        return to_json(ends)

    def newest(self) -> Offsets | None:
        return to_json({p: b.last for p, b in self._snapshot().items()})

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """See `delivered.contract.landmarks`: the last entry read, hashed, with the time at which it was published."""
        found: dict[str, str] = {}
        for partition, position in from_json(at).items():
            topic = physical(partition)
            if position.entry >= 0 and (digest := self._admin.entry_digest(topic, position.ledger, position.entry)):
                found[topic] = digest
        return found

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        """See `delivered.contract.landmarks`."""
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
                    "OPTION_VALUE",
                    f"{SOURCE}: {short_name(physical(partition))} would be read from {position} to {end[partition]}, "
                    "which is before its start.",
                    next_step="correct the starting and ending offsets",
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

    def close(self) -> None:
        """Nothing is open."""

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
        return _snapshot(self._admin, self._options)

    def _resolve(self, where: Where, snapshot: _Snapshot) -> dict[Partition, Position]:
        silent = [p for p in snapshot if where.spot(p) is None]
        foreign = [p for p in where.each if p not in snapshot]
        if silent or foreign:
            found = short_name(physical((silent or foreign)[0]))
            problem = f"does not name {found}" if silent else f"names {found}, not read here"
            raise UsageError(
                "OPTION_VALUE",
                f"{SOURCE}: option {where.option!r} {problem}; it must name exactly the partitions that are read.",
                next_step="list all of them; earliest and latest are accepted as positions",
            )
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
        beyond = position.order[:2] > bounds.last.order[:2]
        if self._options.fail_on_data_loss and (beyond or is_deleted(position, bounds)):
            first = bounds.ledgers[0][0] if bounds.ledgers else "none"
            raise UsageError(
                "OFFSET_OUT_OF_RANGE",
                f"{SOURCE}: option {where.option!r} names {position} of {short_name(physical(partition))}, which has "
                f"ledgers from {first}, and ends at {bounds.last}.",
                next_step='name a position that exists, or .option("failOnDataLoss", "false")',
            )
        return bounds.last if beyond else position

    def _at_time(self, partition: Partition, ms: int, bounds: Bounds) -> Position:
        try:
            found = self._admin.before(physical(partition), ms)
        except Missing:
            return bounds.last
        # Never beyond the snapshot's end: messages may have been published since.
        return min(found, bounds.last, key=lambda p: p.order)

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
            elif position.order[:2] > snapshot[partition].last.order[:2] and position.entry >= 0:
                self._lost(f"{name} ends at {snapshot[partition].last}, before {position}, the position of this stream")
        for partition in snapshot:
            at[partition] = before.get(partition, START)
        return at

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise InvariantBroken(
                "DATA_LOST",
                f"{SOURCE}: {what}; messages may be lost.",
                next_step='find out why; to continue regardless, restart with .option("failOnDataLoss", "false")',
            )
        log.warning("%s; messages may be lost, and failOnDataLoss is false", what)


def _snapshot(admin: Admin, options: SourceOptions) -> _Snapshot:
    """Bounds of all partitions at one moment."""
    found: dict[Partition, Bounds] = {}
    for topic in options.topics:
        count = admin.partitions(topic)
        for number in range(count) if count else (-1,):
            found[topic, number] = admin.bounds(physical((topic, number)))
    return found


def _with_follower(position: Position, bounds: Bounds) -> Position:
    """Record the next ledger of one read to its end: later only this shows that none was between."""
    ids = [ledger for ledger, _ in bounds.ledgers]
    if position.index is not None or position.ledger not in ids[:-1]:
        return replace(position, follower=position.follower)
    at = ids.index(position.ledger)
    return replace(position, follower=ids[at + 1]) if position.entry + 1 >= bounds.ledgers[at][1] else position
