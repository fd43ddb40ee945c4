"""The configured source: what it assumes, what it checks before a start, and how a slice is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from delivered.connectors.outbox import OutboxOptions, changes, events, slot
from delivered.connectors.outbox.changes import CHANGE, MESSAGE
from delivered.connectors.outbox.client import connect, explaining, transaction
from delivered.connectors.outbox.driver import HISTORY, NUMBERED, PollDriver, WalDriver
from delivered.connectors.outbox.layout import Layout, layout
from delivered.connectors.outbox.positions import Positions
from delivered.connectors.outbox.shape import check_identity
from delivered.connectors.outbox.slot import missing_columns
from delivered.contract.finding import Finding
from delivered.contract.source import Address, Slice, Source, SourceDriver
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.rows import Rows
from delivered.patterns.caller import quoted

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
        found = self.planned().layout
        return () if found is None else found.keys

    def recheck(self) -> None:
        self._checked()

    def _checked(self) -> list[Finding]:
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            found = self._check_outbox(connection) if self.options.changes is None else []
            return found + (self._check_log(connection) if self.options.by_log else [])

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
        return events.COLUMNS if self.options.changes is None else self._layout().columns

    def raw_schema(self) -> pa.Schema:
        if self.options.changes is None:
            return events.COLUMNS.append(MESSAGE)
        return self._layout().columns.append(CHANGE)

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        if self.options.changes is None:
            found = list(events.Events(self.options, rejects=True).restored(raw))
        else:
            found = list(changes.restored(self.options, self._layout(), raw))
        return Rows(pa.concat_batches([rows.good for rows in found]), [r for rows in found for r in rows.rejected])

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
                yield from changes.batches(self.options, full.layout, found, start.get("truncated"), rejects=rejects)
        else:
            yield from self._logged(start, end, rejects)

    def _numbered(self, kind: str, start: dict[str, Any], end: int, rejects: bool) -> Iterator[Rows]:
        positions = Positions(self.options)
        with contextlib.closing(connect(self.options)) as connection, transaction(self.options, connection) as caller:
            if kind == NUMBERED:
                rows = positions.rows(caller, start["number"], end)
            else:
                rows = positions.history(caller, start["lsn"], end)
            yield from events.Events(self.options, rejects=rejects).batches(rows)

    def _logged(self, start: dict[str, Any], end: int, rejects: bool) -> Iterator[Rows]:
        found, reader = events.Events(self.options, rejects=rejects), events.Reader(self.options)
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
        found = []
        if lost := missing_columns(now):
            found.append(
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
            found.append(
                Finding.build("OUTBOX_CHILDREN", refuses=False, children=", ".join(children), table=options.table)
            )
        return found

    def _check_log(self, connection: psycopg.Connection[Any]) -> list[Finding]:
        options = self.options
        now = slot.state(connection, options)
        slot.check_server(now, options)
        found = self._checked_changes(connection, now) if options.changes is not None else []
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
            return found
        slot.check_slot(now, options, {"lsn": 0})
        held, limit = now.held_back or 0, now.keep_size
        return [
            *found,
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
