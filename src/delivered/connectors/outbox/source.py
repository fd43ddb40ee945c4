"""The configured source: checked options, no connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.outbox import changes, events, peek, slot
from delivered.connectors.outbox.database import connect, explaining, transaction
from delivered.connectors.outbox.identity import check_identity
from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.connectors.outbox.pgoutput import Op
from delivered.connectors.outbox.poll import PollDriver
from delivered.connectors.outbox.positions import Positions
from delivered.connectors.outbox.wal import HISTORY, NUMBERED, WalDriver
from delivered.contract.finding import Finding
from delivered.contract.powers import Address
from delivered.contract.source import Slice, SourceDriver
from delivered.kits.caller import quoted
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, Refused, UsageError

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class OutboxSource:
    """
    Attributes:
        columns, keys: of a change stream, as the table had them when the query was planned; and of its primary key.
    """

    options: OutboxOptions
    columns: pa.Schema | None = None
    keys: tuple[str, ...] = ()

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        options = self.options
        if options.changes is not None:
            assumes = [
                f"rows that were in {options.table} before the slot {options.slot} was made are loaded by other means",
                f"the slot {options.slot} is this pipeline's alone",
            ]
        elif options.by_log:
            assumes = [f"rows of {options.table} are not updated", f"the slot {options.slot} is this pipeline's alone"]
        else:
            assumes = [
                f"rows of {options.table} are not updated, and only this source deletes them",
                f"ids of {options.table} never repeat",
                "within a batch, rows come in the order of their ids, not of their commits",
            ]
        if options.by_log:
            age = ", which has the same timeline" if options.changes is not None else " that is less than a minute old"
            assumes.append(f"the server is not restored from a copy of its files{age}")
        return SourceCapability(
            system="outbox",
            replayable=True,
            local=options.dialect == "sqlite",
            consumed="an outbox forgets what its pipeline is past: its slot moves on, or its rows are deleted",
            assumes=tuple(assumes),
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
                if self.options.changes is None:
                    self._check_outbox(connection)
                return self._check_log(connection) if self.options.by_log else []
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def wal_held_back(self) -> int | None:
        """Bytes of WAL that the slot keeps the server from removing; None: there is no slot, or none is used."""
        if not self.options.by_log:
            return None
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            return slot.state(connection, self.options).held_back

    def planned(self) -> OutboxSource:
        if self.options.changes is None or self.columns is not None:
            return self
        with contextlib.closing(connect(self.options)) as connection, explaining(self.options):
            columns, keys = changes.described(connection, self.options)
            return replace(self, columns=columns, keys=keys)

    def schema(self) -> pa.Schema:
        if self.options.changes is None:
            return events.COLUMNS
        columns = self.planned().columns
        if columns is None:
            raise UsageError(
                "OUTBOX_TABLE",
                f"{OWNER}: the columns of {self.options.table} are unknown.",
                next_step="check the table's name and the user's right to read it",
            )
        return columns

    def address(self) -> Address:
        """See `delivered.contract.powers.HasAddress`."""
        options = self.options
        return Address(options.dialect, frozenset([options.place]), frozenset([options.table.removeprefix("public.")]))

    def driver(self) -> SourceDriver:
        return WalDriver(self.options) if self.options.by_log else PollDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        kind, start, end = piece.data
        if kind in (NUMBERED, HISTORY):
            yield from self._numbered(kind, start, end)
        elif self.options.changes is not None:
            found = ((at, c) for _, at, c in peek.peek(self.options, start, end) if c.relation.oid == start["#table"])
            yield from changes.batches(self.options, self.schema(), self.keys, found)
        else:
            yield from self._logged(start, end)

    def _numbered(self, kind: str, start: dict[str, Any], end: int) -> Iterator[pa.RecordBatch]:
        positions = Positions(self.options)
        with (
            contextlib.closing(connect(self.options)) as connection,
            transaction(self.options, connection) as caller,
        ):
            if kind == NUMBERED:
                rows = positions.rows(caller, start["number"], end)
            else:
                rows = positions.history(caller, start["lsn"], end)
            yield from events.Events(self.options).batches(rows)

    def _logged(self, start: dict[str, Any], end: int) -> Iterator[pa.RecordBatch]:
        found, reader = events.Events(self.options), events.Reader(self.options)
        for begin, _, change in peek.peek(self.options, start, end):
            if change.op is not Op.INSERT or change.new is None or change.relation.oid != start["#table"]:
                continue
            id_, kind, key, type_, payload = reader.read(change.relation, change.new)
            found.add(begin.lsn, begin.time_us, id_, kind, key, type_, payload)
            if found.full:
                yield found.take()
        if not found.empty:
            yield found.take()

    def _check_outbox(self, connection: Any) -> None:
        with transaction(self.options, connection) as caller:
            Positions(self.options).check(caller)

    def _check_log(self, connection: psycopg.Connection[Any]) -> list[Finding]:
        options = self.options
        now = slot.state(connection, options)
        slot.check_server(now, options)
        if options.changes is not None:
            check_identity(connection, options)
        able, owns = connection.execute(
            "SELECT rolsuper OR rolreplication, rolsuper OR pg_has_role(c.relowner, 'USAGE') FROM pg_roles, pg_class c "
            "WHERE rolname = current_user AND c.oid = to_regclass(%s)",
            [quoted("postgres", options.table)],
        ).fetchone() or (False, False)
        if not able:
            raise Refused(
                "OUTBOX_REPLICATION",
                f"{OWNER}: the user may not use replication slots at {options.system}.",
                next_step="ALTER ROLE ... REPLICATION"
                + ("" if options.changes else ', or write .option("method", "poll"), which needs no such right'),
            )
        if now.kind is None:
            if now.publishes is None and not owns:
                raise Refused(
                    "OUTBOX_PUBLICATION",
                    f"{OWNER}: there is no publication {options.publication}, and the user does not own the table.",
                    next_step=f"CREATE PUBLICATION {options.publication} FOR TABLE {options.table} as its owner",
                )
            return []
        slot.check_slot(now, options, {"lsn": 0})
        held, limit = now.held_back or 0, now.keep_size
        return [
            Finding(
                "OUTBOX_WAL",
                f"the slot {options.slot} holds back {held / 2**20:.1f} MiB of WAL at {options.system}; "
                + ("max_slot_wal_keep_size is -1: it may fill the disk" if limit == "-1" else f"its limit is {limit}"),
                False,
            )
        ]
