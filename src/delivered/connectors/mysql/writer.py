"""Executor side: one transaction per shard."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from delivered.connectors.mysql import encode, errors, sessions, stage, target, transactions
from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.types import TYPES
from delivered.kits.sql.database import Definition, give, take
from delivered.kits.sql.merge import check_rows
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.stage import delete
from delivered.kits.sql.table import check_nulls
from delivered.kits.sql.transactions import PreparedRows, mark, new_nonce
from delivered.kits.sql.trial import long_values
from delivered.model.columns import fitted
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import within
from delivered.model.prepared import Promise

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


def packet_of(session: Session) -> int | None:
    """Bytes of a statement at most, if rows are sent in statements; None: LOAD DATA sends them. Raises MySQLError."""
    local, packet = session.execute("SELECT @@local_infile, @@max_allowed_packet").fetchone()
    return None if local else int(packet)


class Loading:
    """Loads the rows of a shard in bounded blocks, by LOAD DATA LOCAL if the server allows it, else by INSERT.

    Inside an open transaction of `session`; used by one thread. The next block is encoded while the server loads one.
    LOAD DATA LOCAL implies IGNORE: it skips rows that violate a constraint and adjusts values, with only a warning. So
    warnings and missing rows are errors here. Methods raise BadRecord for a rejected row, and MySQLError.

    Args:
        into: the table, quoted for SQL.
        columns: the rows' columns, quoted, comma-separated.
    """

    def __init__(self, session: Session, options: MysqlOptions, into: str, columns: str) -> None:
        self._session = session
        self._options = options
        self._sent = 0
        self.rows = 0
        self._packet = packet_of(session)
        if self._packet is None:
            self._form = encode.LOAD
            self._statement = (
                f"LOAD DATA LOCAL INFILE 'delivered' INTO TABLE {into} CHARACTER SET binary "
                r"FIELDS TERMINATED BY '\t' ESCAPED BY '\\' LINES TERMINATED BY '\n' "
                f"({columns})"
            ).encode()
        else:
            self._form = encode.INSERT
            self._statement = f"INSERT INTO {into} ({columns}) VALUES ".encode()

    def add(self, batch: pa.RecordBatch) -> None:
        """Args: batch: of plain types, with values that the server can store."""
        at = 0
        for rows, block in encode.blocks(batch, self._form):
            self.end()
            if self._packet is None:
                self._session.start(self._statement, block)
                self._sent = rows
            else:
                self._insert(batch.slice(at, rows), block, self._packet)
            at += rows

    def _insert(self, rows: pa.RecordBatch, block: memoryview, packet: int) -> None:
        """One statement; more if the server would not accept it."""
        if len(self._statement) + len(block) < packet:
            self._session.start(self._statement + bytes(block[:-1]))
            self._sent = rows.num_rows
        elif rows.num_rows > 1:
            half = rows.num_rows // 2
            for part in (rows.slice(0, half), rows.slice(half)):
                self.end()
                ((_, smaller),) = encode.blocks(part, self._form)
                self._insert(part, smaller, packet)
        else:
            raise errors.row_refused(
                f"{long_values(rows)}as a statement it has {len(self._statement) + len(block)} bytes; the server's "
                f"max_allowed_packet is {packet}",
                self._options,
            )

    def end(self) -> None:
        """Wait until the server has loaded what was sent."""
        sent, self._sent = self._sent, 0
        if not sent:
            return
        rows, warnings = self._session.finish()
        if warnings:
            _, number, text = self._session.execute("SHOW WARNINGS LIMIT 1").fetchone()
            raise errors.row_refused(f"{text} (warning {number}, one of {warnings})", self._options)
        if rows != sent:
            raise InvariantBroken(
                "ROWS_DIFFER",
                f"{sent} rows were sent, but the server loaded {rows}, without a warning.",
                next_step="start the pipeline again; the batch runs again",
            )
        self.rows += rows


class LoadWriter:
    """See `delivered.contract.sink.Writer`.

    exactly_once, two_phase: writes rows and a marker to the target, in an XA transaction that `prepare` leaves
        prepared. Then the session ends: in MariaDB no other session can commit the transaction while it is alive.
    exactly_once, one_transaction: writes rows to a staging table, which `prepare` commits.
    upserts and conditional writes: always writes to a staging table; except with one_transaction, `prepare` merges it
    into the target.
    at_least_once, at_most_once: writes rows to the target, which `prepare` commits; never resends a row.

    A shard without rows sends nothing and leaves nothing behind.
    """

    def __init__(
        self,
        options: MysqlOptions,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,
        left: Sequence[PreparedRows] = (),
    ) -> None:
        """Args: left: what earlier writers of this task may have left at the server."""
        self._options = options
        self._left = left
        self._staging = stage.build_staging(options)
        self._server = self._staging.server
        self._work = work
        exactly_once = guarantee is Guarantee.EXACTLY_ONCE
        self._moved_later = exactly_once and options.mechanism is Mechanism.ONE_TRANSACTION
        self._prepares = exactly_once and not self._moved_later
        self._merges = options.write.merges
        self._schema = TYPES.plain_schema(schema)
        self._session: Session | None = None
        self._target: target.Target | None = None
        self._loading: Loading | None = None
        self._staged = ""
        self._gid = ""

    @property
    def possible(self) -> PreparedRows | None:
        """See `delivered.kits.sql.sink.ShardWriter`."""
        return PreparedRows(self._gid, self._staged) if self._gid or self._staged else None

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        if self._options.write.upserts:
            check_rows(self._options.write, batch)
        if self._session is None:
            self._session = take(self._server)
        with self._server.explaining():
            if self._loading is None:
                self._loading = self._begin(self._session)
            check_nulls(batch, self._ready.filled)
            self._loading.add(batch)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        session, loading = self._session, self._loading
        if session is None or loading is None:
            return Promise()
        with self._server.explaining():
            loading.end()
            if loading.rows != fingerprint.count:
                raise InvariantBroken(
                    "ROWS_DIFFER",
                    f"Shard {self._work.shard} of batch {self._work.batch}: {loading.rows} rows were sent, but the "
                    f"fingerprint counts {fingerprint.count}.",
                )
            handle = None
            if self._moved_later:
                handle = PreparedRows("", self._staged, self._ready.name, self._ready.columns)
            if self._merges:
                merge, found = self._ready.merge, self._server.definition(session)
                kept = self._staging.reduce(session, self._staged, merge, loading.rows, found)
                if handle is not None:
                    handle = replace(handle, kept=kept, stored=merge.columns, index=merge.index)
                else:
                    self._merge(session, found)
            if self._prepares:
                handle = PreparedRows(self._promise(session, fingerprint))
            else:
                session.execute("COMMIT")
        self._session = self._loading = None
        staged, self._staged = self._staged, ""
        if self._prepares:
            self._server.discard(session)
            return Promise(handle)
        with contextlib.suppress(self._server.errors()):  # already prepared; the next start cleans up
            if staged:
                sessions.release(session)
            if staged and not self._moved_later:
                self._staging.drop(session, staged)
        give(self._server, session)
        return Promise(handle)

    def abort(self) -> None:
        session, staged = self._session, self._staged
        self._session = self._loading = None
        self._staged = ""
        # The server rolls back a closed session's transaction, but not its CREATE TABLE.
        self._server.discard(session)
        if staged:
            with contextlib.suppress(DeliveredError, self._server.errors()), within(CONNECT_TIMEOUT_S):
                fresh = self._server.connect("task")
                try:
                    self._staging.drop(fresh, staged)
                finally:
                    self._server.discard(fresh)

    @property
    def _ready(self) -> target.Target:
        if self._target is None:
            raise InvariantBroken("NO_TARGET", "Rows are sent before the table was checked.")
        return self._target

    def _begin(self, session: Session) -> Loading:
        self._server.migrate(session)
        for rows in self._left:
            if rows.gid:
                transactions.end(session, rows.gid, commit=False)
            if rows.staged:
                self._staging.drop(session, rows.staged)
        if self._prepares:
            transactions.check_allowed(session, self._options)  # fail before the first row, not after the last
            if self._merges:
                transactions.give_up_earlier(session, self._work, self._options)
            self._gid = transactions.new_id(self._work, self._options.ledger_schema)
        self._target = ready = target.ready(session, self._options, self._schema)
        if self._moved_later or self._merges:
            names = transactions.names_of(self._work.scope, self._options.ledger_schema)
            nonce = transactions.nonce_of(self._gid) if self._prepares else new_nonce()
            table = names.staging(self._work, nonce)
            sessions.register(session, nonce)
            stage.create(session, self._options, table, ready)
            self._staged = table
            session.execute("START TRANSACTION")
            return Loading(session, self._options, self._staging.full(table), ready.columns)
        if self._prepares:
            self._open_xa(session)
        else:
            session.execute("START TRANSACTION")
        return Loading(session, self._options, ready.name, ready.columns)

    def _open_xa(self, session: Session) -> None:
        if not session.nonce:
            sessions.register(session, transactions.nonce_of(self._gid))
        session.execute(f"XA START {transactions.xid(self._gid)}")

    def _merge(self, session: Session, found: Definition) -> None:
        """Merge reduced rows into the target, in the task's own transaction."""
        if self._prepares:
            session.execute("COMMIT")  # only the staging table
            self._open_xa(session)
        merge = self._ready.merge
        self._staging.add(session, self._staged, merge, self._work, found)
        if self._options.write.delete is not None:
            delete(session, self._options, merge, self._staging.full(self._staged), found)

    def _promise(self, session: Session, fingerprint: Fingerprint) -> str:
        mark(session, self._server.dialect, self._work, self._gid, fingerprint)
        session.execute(f"XA END {transactions.xid(self._gid)}")
        session.execute(f"XA PREPARE {transactions.xid(self._gid)}")
        return self._gid
