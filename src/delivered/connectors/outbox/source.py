"""The configured source: what it assumes and checks before a start, its two drivers, and how a slice is read.

One driver reads PostgreSQL's log, and moves its slot in `acknowledge` only, after Spark's commit log. The other polls:
it numbers the rows that it finds, and delivers them by number.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa
import tenacity

from delivered.connectors.outbox import EARLIEST, LATEST, OutboxOptions, slot
from delivered.connectors.outbox.client import connect, explaining, sqlstate, transaction
from delivered.connectors.outbox.positions import DELETED_MAX, NUMBERED_MAX, Positions
from delivered.connectors.outbox.rows import (
    CHANGE,
    COLUMNS,
    MESSAGE,
    Events,
    Layout,
    Reader,
    Shapes,
    change_batches,
    layout,
    restore_changes,
)
from delivered.connectors.outbox.slot import check_identity, missing_columns
from delivered.contract.source import Address, Finding, Offsets, Retained, Slice, Source, SourceDriver, foreign_offsets
from delivered.kits.sql.database import identify_file
from delivered.model import patience
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, Unreachable, UsageError
from delivered.model.rows import Rows
from delivered.patterns.caller import Caller, quoted

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class OutboxSource(Source):
    """
    Attributes:
        layout: of a change stream: its columns, as the next rows had them when the query was planned.
    """

    options: OutboxOptions
    layout: Layout | None = None

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        options = self.options
        if options.changes is not None:
            assumes = [
                f"rows that were in {options.table} before the slot {options.slot} was made are loaded by other means",
                f"no partition of {options.table} is truncated by its own name, of which the log says nothing; "
                "TRUNCATE of the table, and partitions attached with rows, detached or dropped, stop the query",
                f"the slot {options.slot} is this pipeline's alone",
            ]
        elif options.by_log:
            assumes = [
                f"rows of {options.table} are not updated",
                f"the slot {options.slot} is this pipeline's alone",
                f"rows from before the slot come in the order of {options.order or 'their ids'}; later ones of commits",
            ]
        else:
            assumes = [
                f"rows of {options.table} are not updated, and only this source deletes them",
                f"ids of {options.table} never repeat",
                f"rows found by one poll come in the order of {options.order or 'their ids'}, not of their commits",
            ]
        if options.by_log:
            age = ", which has the same timeline" if options.changes is not None else " that is less than a minute old"
            assumes.append(f"the server is not restored from a copy of its files{age}")
        return SourceCapability(
            system="outbox",
            replayable=True,
            local=options.dialect == "sqlite",
            decodes=True,
            consumed="an outbox forgets what its pipeline is past: its slot moves on, or its rows are deleted",
            assumes=tuple(assumes),
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            return self._checked()
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def row_key(self) -> tuple[str, ...]:
        layout_ = self.planned().layout
        return () if layout_ is None else layout_.keys

    def recheck(self) -> None:
        self._checked()

    def _checked(self) -> list[Finding]:
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            findings = self._check_outbox(connection) if self.options.changes is None else []
            return findings + (self._check_log(connection) if self.options.by_log else [])

    def wal_held_back(self) -> int | None:
        """Bytes of WAL that the slot keeps the server from removing; None: there is no slot, or none is used."""
        if not self.options.by_log:
            return None
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            return slot.state(connection, self.options).held_back

    def planned(self) -> Self:
        if self.options.changes is None or self.layout is not None:
            return self
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            connection.autocommit = True
            return replace(self, layout=layout(connection, self.options))

    def schema(self) -> pa.Schema:
        return COLUMNS if self.options.changes is None else self._layout().columns

    def raw_schema(self) -> pa.Schema:
        if self.options.changes is None:
            return COLUMNS.append(MESSAGE)
        return self._layout().columns.append(CHANGE)

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        if self.options.changes is None:
            decoded = list(Events(self.options, rejects=True).restored(raw))
        else:
            decoded = list(restore_changes(self.options, self._layout(), raw))
        return Rows(pa.concat_batches([rows.good for rows in decoded]), [r for rows in decoded for r in rows.rejected])

    def _layout(self) -> Layout:
        found = self.planned().layout
        if found is None:
            raise UsageError("OUTBOX_TABLE.COLUMNS", table=self.options.table)
        return found

    def address(self) -> Address:
        options = self.options
        return Address(options.dialect, frozenset([options.place]), frozenset([options.table.removeprefix("public.")]))

    def driver(self) -> SourceDriver:
        return WalDriver(self.options) if self.options.by_log else PollDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return (rows.good for rows in self._read(piece, rejects=False))

    def read_rows(self, piece: Slice) -> Iterator[Rows]:
        """Rejects what no row can hold."""
        return self._read(piece, rejects=True)

    def _read(self, piece: Slice, *, rejects: bool) -> Iterator[Rows]:
        kind, start, end = piece.data
        if kind in (NUMBERED, HISTORY):
            yield from self._numbered(kind, start, end, rejects)
        elif self.options.changes is not None:
            tables, full = slot.tables(start), self if self.layout is not None else self.planned()
            found = (one for one in slot.peek(self.options, start, end) if one[2].relation.oid in tables)
            if full.layout is not None:
                yield from change_batches(self.options, full.layout, found, start.get("truncated"), rejects=rejects)
        else:
            yield from self._logged(start, end, rejects)

    def _numbered(self, kind: str, start: dict[str, Any], end: int, rejects: bool) -> Iterator[Rows]:
        positions = Positions(self.options)
        with contextlib.closing(connect(self.options)) as connection, transaction(self.options, connection) as caller:
            if kind == NUMBERED:
                rows = positions.rows(caller, start["number"], end)
            else:
                rows = positions.history(caller, start["lsn"], end)
            yield from Events(self.options, rejects=rejects).batches(rows)

    def _logged(self, start: dict[str, Any], end: int, rejects: bool) -> Iterator[Rows]:
        found, reader = Events(self.options, rejects=rejects), Reader(self.options)
        for begin, relation, row in slot.inserts(self.options, start, end):
            found.add(begin.lsn, begin.time_us, reader.read(relation, row))
            if found.full:
                yield found.take()
        if not found.empty:
            yield found.take()

    def _check_outbox(self, connection: Any) -> list[Finding]:
        with transaction(self.options, connection) as caller:
            positions = Positions(self.options)
            positions.check(caller)
            kind = positions.unordered(caller)
        if kind is None:
            return []
        return [
            Finding.build(
                "OUTBOX_ORDER",
                refuses=False,
                outbox=self.options.outbox,
                kind=kind,
                which="(those from before the slot) " if self.options.by_log else "",
            )
        ]

    def _checked_changes(self, connection: psycopg.Connection[Any], now: slot.State) -> list[Finding]:
        options = self.options
        check_identity(connection, options, published=now.publishes is not None)
        findings = []
        if lost := missing_columns(now):
            findings.append(
                Finding.build(
                    "OUTBOX_COLUMNS.NOT_IN_LOG" if set(lost) <= set(now.generated) else "OUTBOX_COLUMNS.COLUMN_LIST",
                    refuses=False,
                    table=options.table,
                    lost=", ".join(lost),
                    publication=options.publication,
                )
            )
        (children,) = connection.execute(
            "SELECT ARRAY(SELECT inhrelid::regclass::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent "
            "WHERE i.inhparent = to_regclass(%s) AND c.relkind = 'r')",
            [quoted("postgres", options.table)],
        ).fetchone() or ([],)
        if children:
            findings.append(
                Finding.build("OUTBOX_CHILDREN", refuses=False, children=", ".join(children), table=options.table)
            )
        return findings

    def _check_log(self, connection: psycopg.Connection[Any]) -> list[Finding]:
        options = self.options
        now = slot.state(connection, options)
        slot.check_server(now, options)
        findings = self._checked_changes(connection, now) if options.changes is not None else []
        able, owns = connection.execute(
            "SELECT rolsuper OR rolreplication, rolsuper OR pg_has_role(c.relowner, 'USAGE') FROM pg_roles, pg_class c "
            "WHERE rolname = current_user AND c.oid = to_regclass(%s)",
            [quoted("postgres", options.table)],
        ).fetchone() or (False, False)
        if not able:
            raise Refused(
                "OUTBOX_REPLICATION",
                system=options.system,
                alternative=""
                if options.changes
                else ', or write .option("method", "poll"), which needs no such right',
            )
        if now.kind is None:
            if now.publishes is None and not owns:
                raise Refused("OUTBOX_PUBLICATION.NOT_OWNER", publication=options.publication, table=options.table)
            return findings
        slot.check_slot(now, options, {"lsn": 0})
        held, limit = now.held_back or 0, now.keep_size
        return [
            *findings,
            Finding.build(
                "OUTBOX_WAL",
                refuses=False,
                slot=options.slot,
                mib=held / 2**20,
                system=options.system,
                limit="max_slot_wal_keep_size is -1: it may fill the disk"
                if limit == "-1"
                else f"its limit is {limit}",
            ),
        ]


log = logging.getLogger("delivered.patterns.outbox")
T = TypeVar("T")
_LAST = "last"

IDLE_BYTES = 64 << 20
"""After this much WAL without a row, an empty batch moves the slot on, so that the server can remove the WAL."""
LOCK_WAIT_S = 15

WAL, NUMBERED, HISTORY = "wal", "numbered", "history"
"""What a slice reads: the log; rows that were there before the slot; delivered rows that were kept."""


class WalDriver(SourceDriver):
    """See `delivered.contract.source.SourceDriver`.

    Offsets are {"lsn": 26214400, "#system": "7304...", "#timeline": 1, "#table": 16384}: a position in the WAL, and
    whose. While rows from before the slot are read, {"lsn": ..., "number": 12, ...}; {"lsn": 0}: nothing is made yet.
    """

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._positions = Positions(options) if options.changes is None else None
        self._connection: psycopg.Connection[Any] | None = None
        self._locked = False
        self._frozen: int | None = None
        self._delivered: tuple[int, str] | None = None
        self._shapes = Shapes(options, self._run) if options.changes is not None else None

    def initial(self) -> Offsets:
        options = self._options
        if isinstance(options.starting, dict):
            return dict(options.starting)
        now = self._run(lambda c: slot.state(c, options))
        slot.check_server(now, options)
        if now.kind is None:
            return {"lsn": 0}
        slot.check_slot(now, options, {"lsn": 0})
        at = now.flushed if options.starting == LATEST else now.confirmed
        return self._offsets(now, at or 0) | self._backlog(0)

    def check_offsets(self, offsets: Offsets) -> None:
        if "lsn" not in offsets:
            raise foreign_offsets("an outbox (read from the log)", offsets)

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        self._lock()
        now = self._run(lambda c: slot.state(c, self._options))
        if not start["lsn"]:
            slot.check_server(now, self._options)
            if now.kind is None:
                now = self._made()
            start = self._offsets(now, now.confirmed or 0) | self._backlog(int(start.get("number", 0)))
        slot.check_slot(now, self._options, start)
        self._run(lambda c: slot.check_table(c, now, self._options, start))
        slot.check_server(now, self._options)
        at = int(start["lsn"])
        kept = self._shapes.check_catalogue(start, now) if self._shapes is not None else {}
        if "number" in start:
            last = self._last()
            if start["number"] < last:
                end = last if rows_max is None else min(last, start["number"] + rows_max)
                return {**self._offsets(now, at), "number": end}
        # Spark has logged the batch that ended here; without this, the peek would decode it again.
        self._acknowledged(start, now)
        until = now.flushed if self._frozen is None else self._frozen
        if until is None or until <= at:
            return start
        end_ = self._run(
            lambda c: slot.waiting(self._options, lambda: slot.peek_end(c, self._options, until, rows_max))
        )
        if end_ is None:
            return self._offsets(now, until) | kept if until - at >= IDLE_BYTES else start
        if self._shapes is None:
            return self._offsets(now, end_)
        end_, shape = self._shapes.cut(start, end_)
        return self._offsets(now, end_) | kept | shape

    def newest(self) -> Offsets | None:
        now = self._run(lambda c: slot.state(c, self._options))
        return None if now.flushed is None else self._offsets(now, now.flushed)

    def retained(self, at: Offsets) -> Retained:
        """Where the slot stands; with `keep`, the rows that are there."""
        options, positions, lsn = self._options, self._positions, int(at["lsn"])
        if positions is not None and options.keep:
            number = int(at.get("number", 0)) if "number" in at or not lsn else self._last()
            count = self._in_transaction(lambda caller: positions.missing(caller, lsn, number))
            return Retained({options.outbox: count} if count else {})
        now = self._run(lambda c: slot.state(c, options))
        dropped = lsn and (now.confirmed is None or now.confirmed > lsn or now.wal_status == "lost")
        return Retained({options.slot: 0} if dropped else {}, unknown="the slot moves on once a batch is logged")

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """The last transaction with a row, if this driver has acknowledged it."""
        known = self._delivered
        return {_LAST: known[1]} if known is not None and known[0] == int(at["lsn"]) else {}

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        """A slot that stands after the transaction knows that it was read. One that
        stands before it went back, by a crash of the server or in an older copy, and can be read again.
        """
        if _LAST not in known:
            return
        begin, now = int(known[_LAST].split("@")[0]), self._run(lambda c: slot.state(c, self._options))
        if now.confirmed is None or now.confirmed > begin:
            return
        found = None
        for some in _chunks(self._options, self._moved(at, now.confirmed), int(at["lsn"])):
            found = _landmark(some[-1])
        if found != known[_LAST]:
            slot.check_cluster(now, self._options, at)
            raise InvariantBroken(
                "OUTBOX_DATABASE_BEHIND.TRANSACTION",
                position=slot.lsn_text(int(at["lsn"])),
                system=self._options.system,
                actual=found,
                known=known[_LAST],
            )

    def freeze(self) -> None:
        self._frozen = self._run(lambda c: slot.state(c, self._options)).flushed

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last, pieces = int(start["lsn"]), int(end["lsn"]), list[Slice]()
        name = self._options.slot
        if "number" in end:
            return [Slice((NUMBERED, {"number": int(start.get("number", 0))}, int(end["number"])), name)]
        if ("number" in start or not first) and (at := int(start.get("number", 0))) < (numbered := self._last()):
            pieces.append(Slice((NUMBERED, {"number": at}, numbered), name))
        now = self._run(lambda c: slot.state(c, self._options))
        if self._options.keep and now.confirmed is not None and now.confirmed > first:
            pieces.append(Slice((HISTORY, dict(start), min(last, now.confirmed)), name))
            first = min(last, now.confirmed)
        if first < last:
            more = self._shapes.truncated(end, last) if self._shapes is not None else {}
            pieces.append(Slice((WAL, self._moved(end, first) | more, last), name))
        return pieces

    def batch(self) -> tuple[Offsets, Offsets]:
        now = self._run(lambda c: slot.state(c, self._options))
        slot.check_server(now, self._options)
        start = dict(self._options.starting) if isinstance(self._options.starting, dict) else None
        if now.kind is None or self._options.starting == LATEST:
            raise UsageError(
                "OUTBOX_BATCH.SLOT_NONE" if now.kind is None else "OUTBOX_BATCH.SLOT_LATEST",
                slot=self._options.slot,
                problem="; there is no such slot." if now.kind is None else "; startingOffsets is latest.",
            )
        start = start or self._offsets(now, now.confirmed or 0)
        slot.check_slot(now, self._options, start)
        return start, self._offsets(now, now.flushed or 0)

    def acknowledge(self, end: Offsets) -> None:
        try:
            self._lock()
            self._acknowledged(end, self._run(lambda c: slot.state(c, self._options)))
        except InvariantBroken:
            raise
        except DeliveredError as error:
            # The next batch does it before it looks for more.
            log.warning(
                "the slot %s was not moved on: %s", self._options.slot, error, extra={"slot": self._options.slot}
            )

    def close(self) -> None:
        self._locked = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _made(self) -> slot.State:
        backlog = self._positions if self._options.starting == EARLIEST else None
        if backlog is not None:
            self._in_transaction(backlog.check)
        self._run(lambda c: slot.create(c, self._options, backlog))
        return self._run(lambda c: slot.state(c, self._options))

    def _backlog(self, number: int) -> Offsets:
        """Where the rows from before the slot stand, if they were numbered and not all deleted."""
        if self._positions is None or self._options.starting != EARLIEST or not self._last():
            return {}
        return {"number": number}

    def _last(self) -> int:
        positions = self._positions
        if positions is None:
            return 0
        return self._in_transaction(lambda caller: positions.last(caller)[0] if positions.exists(caller) else 0)

    def _acknowledged(self, end: Offsets, now: slot.State) -> None:
        """Delete or record the rows delivered up to here, then advance the slot. Idempotent."""
        options, at, confirmed = self._options, int(end["lsn"]), now.confirmed
        if not at or confirmed is None:
            return
        if self._positions is not None and not options.keep:
            self._delete_numbered(int(end["number"]) if "number" in end else None)
        if "number" in end or confirmed >= at:
            return
        slot.check_slot(now, options, {**end, "lsn": confirmed})
        if self._positions is not None:
            self._deliver(end, confirmed, at)
        self._run(lambda c: slot.waiting(options, lambda: slot.advance(c, options, at)))

    def _delete_numbered(self, number: int | None) -> None:
        positions = self._positions
        if positions is None or not (until := self._last() if number is None else number):
            return
        while self._in_transaction(lambda caller: positions.delete_until(caller, until)):
            pass
        if number is None:
            self._in_transaction(positions.forget)

    def _deliver(self, end: Offsets, confirmed: int, at: int) -> None:
        positions, options = self._positions, self._options
        if positions is None:
            return
        if options.keep:
            self._in_transaction(positions.prepare)
        last: _Row | None = None
        for some in _chunks(options, self._moved(end, confirmed), at):

            def settle(caller: Any, some: list[_Row] = some) -> None:
                if options.keep:
                    positions.record(caller, [row[:3] for row in some])
                else:
                    positions.delete(caller, [row[2] for row in some])

            self._in_transaction(settle)
            last = some[-1]
        if last is not None:
            self._delivered = at, _landmark(last)

    def _offsets(self, now: slot.State, at: int) -> Offsets:
        return {"lsn": at, "#system": now.system, "#timeline": now.timeline, "#table": now.table}

    def _moved(self, offsets: Offsets, at: int) -> Offsets:
        """To read the log from `at` on. It has rows as a partition's if they were written while the publication did not
        publish partitions as the table.
        """
        leaves = self._run(lambda c: slot.leaves(c, self._options))
        return {**offsets, "lsn": at, "leaves": leaves}

    def _run(self, work: Callable[[Any], T]) -> T:
        """Work on the driver's connection, which holds the lock; repeated after an outage of the server."""

        def once() -> T:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._options)
                self._connection.autocommit = True
                if self._locked:
                    self._take_lock(self._connection)
            try:
                with explaining(self._options):
                    return work(self._connection)
            except Unreachable:
                self._connection.close()
                raise

        return patience.patiently(
            self._options.system, once, patience_s=patience.patience_s(answered=self._connection is not None)
        )

    def _in_transaction(self, work: Callable[[Any], T]) -> T:
        """As `_run`, in a transaction on a new connection."""

        def once() -> T:
            with (
                contextlib.closing(connect(self._options)) as connection,
                transaction(self._options, connection) as caller,
            ):
                return work(caller)

        return patience.patiently(self._options.system, once, patience_s=patience.patience_s(answered=True))

    def _lock(self) -> None:
        """Own the slot while this driver lives: two queries on one slot would consume each other's changes."""
        if not self._locked:
            self._run(self._take_lock)
            self._locked = True

    def _take_lock(self, connection: psycopg.Connection[Any]) -> None:
        key = lock_key(self._options.slot)
        try:
            connection.execute("SELECT set_config('lock_timeout', %s, false)", [f"{LOCK_WAIT_S}s"])
            connection.execute("SELECT pg_advisory_lock(%s)", [key])
        except Exception as error:
            if sqlstate(error) != "55P03":
                raise
            raise in_use(self._holder(connection, key), self._options.slot, self._options) from error

    @staticmethod
    def _holder(connection: psycopg.Connection[Any], key: int) -> str:
        row = connection.execute(
            "SELECT a.pid, a.application_name, a.backend_start::text FROM pg_locks l "
            "JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
            "AND l.classid::bigint = %s AND l.objid::bigint = %s",
            [key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF],
        ).fetchone()
        return "a session that has ended" if row is None else f"process {row[0]} ({row[1]}, connected since {row[2]})"


_Row = tuple[int, int, bytes | str | None, int]
"""Where its commit record begins, its number there, its id, and the time of the commit."""


def _landmark(row: _Row) -> str:
    return f"{row[0]}@{row[3]}"


def _chunks(options: OutboxOptions, start: Offsets, end: int) -> Iterator[list[_Row]]:
    """Inserted rows in [start, end)."""
    reader, some, number, last = Reader(options), list[_Row](), 0, -1
    for begin, relation, row in slot.inserts(options, start, end):
        number, last = (number + 1, last) if begin.lsn == last else (1, begin.lsn)
        some.append((begin.lsn, number, reader.id_of(relation, row), begin.time_us))
        if len(some) >= DELETED_MAX:
            yield some
            some = []
    if some:
        yield some


def lock_key(name: str) -> int:
    """Of PostgreSQL's advisory lock; 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(f"delivered {name}".encode(), digest_size=8).digest(), "big", signed=True)


def in_use(holder: str, what: str, options: OutboxOptions) -> Refused:
    return Refused("OUTBOX_IN_USE", what=what, system=options.system, holder=holder, lock_wait_s=LOCK_WAIT_S)


_NEW = -1


class PollDriver(SourceDriver):
    """See `delivered.contract.source.SourceDriver`.

    Offsets are {"number": 12, "#id": "018f..."}: the last row that was read. -1: nothing is numbered yet.
    """

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._positions = Positions(options)
        self._connection: Any = None
        self._database: tuple[int, int] | None = None
        self._file: Any = None
        self._locked = False
        self._freezes = False
        self._frozen: int | None = None

    def initial(self) -> Offsets:
        if isinstance(self._options.starting, dict):
            return dict(self._options.starting)
        return {"number": _NEW}

    def check_offsets(self, offsets: Offsets) -> None:
        if "number" not in offsets or "lsn" in offsets:
            raise foreign_offsets("an outbox (polled)", offsets)

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        self._lock()
        at = int(start["number"])
        if at == _NEW:
            self._transaction(self._restart, writes=True)
            at = self._transaction(self._positions.last)[0] if self._options.starting == LATEST else 0
            start = self._offsets(at)
        else:
            self._check(start)
        if self._freezes and self._frozen is None:
            self._frozen = self._number_all()
        frozen = self._frozen
        last = self._transaction(self._positions.last)[0]
        if frozen is None and (rows_max is None or last < at + rows_max):
            limit = NUMBERED_MAX if rows_max is None else min(NUMBERED_MAX, rows_max)
            self._transaction(lambda caller: self._positions.number(caller, limit), writes=True)
            last = self._transaction(self._positions.last)[0]
        end = last if frozen is None else max(at, min(frozen, last))
        end = end if rows_max is None else min(end, at + rows_max)
        return start if end == at else self._offsets(end)

    def newest(self) -> Offsets | None:
        def newest(caller: Caller) -> int:
            if not self._positions.exists(caller):
                return 0
            return self._positions.last(caller)[0] + self._positions.unnumbered(caller)

        return {"number": self._transaction(newest)}

    def retained(self, at: Offsets) -> Retained:
        """By the numbers of the rows that are there."""
        number = max(0, int(at["number"]))
        count = self._transaction(lambda caller: self._positions.missing(caller, 0, number))
        unknown = "" if self._options.keep else "rows are deleted once their batch is logged, without keep"
        return Retained({self._options.outbox: count} if count else {}, unknown=unknown)

    def freeze(self) -> None:
        """At the first `latest`, which checks the table before it numbers rows: numbers given to a table that was
        restored would hide that."""
        self._freezes = True

    def _number_all(self) -> int:
        while (
            self._transaction(lambda caller: self._positions.number(caller, NUMBERED_MAX), writes=True) == NUMBERED_MAX
        ):
            pass
        return int(self._transaction(self._positions.last)[0])

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last = max(0, int(start["number"])), int(end["number"])
        return [Slice((NUMBERED, {"number": first}, last), self._options.outbox)] if first < last else []

    def batch(self) -> tuple[Offsets, Offsets]:
        if not self._transaction(self._positions.exists):
            raise UsageError("OUTBOX_BATCH.POLL", positions_table=self._options.positions)
        starting = self._options.starting
        start = dict(starting) if isinstance(starting, dict) else {"number": self._transaction(self._first)}
        return start, self._offsets(self._transaction(self._positions.last)[0])

    def acknowledge(self, end: Offsets) -> None:
        if self._options.keep or int(end["number"]) <= 0:
            return
        try:
            self._lock()
            while self._transaction(
                lambda caller: self._positions.delete_until(caller, int(end["number"])), writes=True
            ):
                pass
        except DeliveredError as error:
            log.warning("rows of %s were not deleted: %s", self._options.outbox, error)  # by the next batch

    def close(self) -> None:
        self._locked = False
        for held in (self._connection, self._file):
            if held is not None:
                held.close()
        self._connection = self._file = None

    def _restart(self, caller: Caller) -> None:
        """A new checkpoint: number all rows of the outbox again. Repeated until Spark logs a batch."""
        self._positions.check(caller)
        self._positions.prepare(caller)
        self._positions.restart(caller)

    def _first(self, caller: Caller) -> int:
        return self._positions.first(caller) - 1

    def _check(self, start: Offsets) -> None:
        """The row that was read last still has its number: else the table is another one, or of an older state."""
        at, known = int(start["number"]), start.get("#id")
        found = self._transaction(
            lambda caller: self._positions.id_of(caller, at) if self._positions.exists(caller) else None
        )
        if at > 0 and found != known:
            raise InvariantBroken(
                "OUTBOX_DATABASE_BEHIND.ROW",
                row=at,
                positions_table=self._options.positions,
                system=self._options.system,
                actual=found,
                known=known,
            )

    def _offsets(self, number: int) -> Offsets:
        return {"number": number, "#id": self._transaction(lambda caller: self._positions.id_of(caller, number))}

    def _transaction(self, work: Callable[[Caller], T], *, writes: bool = False) -> T:
        """Repeated after an outage of the server; `work` continues with the remaining rows."""

        def once() -> T:
            database = identify_file(self._options.file) if self._options.dialect == "sqlite" else None
            if self._connection is not None and database != self._database:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection, self._database = connect(self._options), database
                if self._locked:
                    self._take_lock()
            try:
                with transaction(self._options, self._connection, writes=writes) as caller:
                    return work(caller)
            except Unreachable:
                self._connection.close()
                self._connection = None
                raise

        return patience.patiently(
            self._options.system, once, patience_s=patience.patience_s(answered=self._connection is not None)
        )

    def _lock(self) -> None:
        """Own the positions for the life of this driver."""
        if not self._locked:
            self._transaction(lambda _: None)
            self._take_lock()
            self._locked = True

    def _take_lock(self) -> None:
        name, options = self._options.positions, self._options
        match options.dialect:
            case "postgres":
                locked = self._lock_session(self._connection, lock_key(name))
            case "mysql":
                values = [f"delivered {lock_key(name)}", LOCK_WAIT_S]
                with transaction(options, self._connection) as caller:
                    ((locked,),) = caller.execute("SELECT GET_LOCK(?, ?)", values).rows
            case _:
                locked = self._lock_file()
        if not locked:
            raise in_use("it", name, options)

    def _lock_session(self, connection: Any, key: int) -> bool:
        try:
            with transaction(self._options, connection) as caller:
                caller.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'")
                caller.execute("SELECT pg_advisory_lock(?)", [key])
        except DeliveredError as error:
            if sqlstate(error) != "55P03":
                raise
            return False
        return True

    def _lock_file(self) -> bool:
        """A process that dies releases it."""
        self._file = open(f"{self._options.file}-{self._options.positions}.lock", "a")  # noqa: PTH123, SIM115
        waiting = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BlockingIOError),
            wait=tenacity.wait_fixed(0.2),
            stop=tenacity.stop_after_delay(LOCK_WAIT_S),
            retry_error_callback=lambda _: False,
        )
        return waiting(lambda: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None
