"""Executor side: one COPY and one transaction per shard."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.postgres import encode, stage, target, transactions
from delivered.connectors.postgres.client import explained
from delivered.connectors.postgres.migrate import migrate
from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.types import TYPES
from delivered.kits.sql.database import give, take
from delivered.kits.sql.definition import Definition
from delivered.kits.sql.merge import check_rows
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.stage import delete
from delivered.kits.sql.stored import check_count
from delivered.kits.sql.transactions import Names, PreparedRows, mark, new_nonce
from delivered.kits.sql.types import check_widths
from delivered.model.columns import fitted
from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.prepared import Promise

if TYPE_CHECKING:
    import psycopg


class CopyWriter:
    """See `delivered.contract.sink.Writer`.

    exactly_once, two_phase: COPY into the target and a marker, in a transaction that `prepare` leaves prepared.
    exactly_once, one_transaction: COPY into a staging table, which `prepare` commits.
    upserts and conditional writes: always COPY into a staging table; except with one_transaction, `prepare` merges
    it into the target.
    at_least_once, at_most_once: COPY into the target, which `prepare` commits; never resends a row.

    `stage` blocks while the server is behind. A shard without rows sends nothing and leaves nothing behind.
    """

    def __init__(
        self,
        options: PostgresOptions,
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
        self._exactly_once = guarantee is Guarantee.EXACTLY_ONCE
        self._moved_later = self._exactly_once and options.mechanism is Mechanism.ONE_TRANSACTION
        self._merges = options.write.merges
        self._schema = TYPES.plain_schema(schema)
        self._connection: psycopg.Connection[Any] | None = None
        self._target: target.Target | None = None
        self._copying: Any = None
        self._copy: Any = None
        self._cursor: Any = None
        self._staged = self._gid = ""
        self._rows = 0

    @property
    def possible(self) -> PreparedRows | None:
        """See `delivered.kits.sql.redo.ShardWriter`."""
        return PreparedRows(self._gid, self._staged) if self._gid or self._staged else None

    def stage(self, batch: pa.RecordBatch) -> None:
        import psycopg

        if batch.num_rows == 0:
            return
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        if self._options.write.upserts:
            check_rows(self._options.write, batch)
        try:
            if self._copy is None:
                self._begin()
            check_widths(batch, self._ready.widths)
            for block in encode.blocks(batch, self._ready.kinds):
                self._copy.write(block)
            self._rows += batch.num_rows
        except psycopg.Error as error:
            raise explained(error, self._options) from error

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        import psycopg

        connection = self._connection
        if connection is None:
            return Promise()
        try:
            self._end_copy(connection, fingerprint)
            handle = None
            if self._moved_later:
                handle = PreparedRows("", self._staged, self._ready.name, self._ready.columns)
            if self._merges:
                found = self._server.definition(connection)
                kept = self._staging.reduce(connection, self._staged, self._ready.merge, self._rows, found)
                if handle is not None:
                    handle = replace(handle, kept=kept, stored=self._ready.merge.columns)
                else:
                    self._merge(connection, found)
            if self._moved_later or not self._exactly_once:
                connection.execute("COMMIT")
            else:
                handle = PreparedRows(self._prepare(connection, fingerprint))
        except psycopg.Error as error:
            raise explained(error, self._options) from error
        self._connection = None
        give(self._server, connection)
        return Promise(handle)

    def abort(self) -> None:
        connection, copying = self._connection, self._copying
        self._connection = self._copying = self._copy = None
        if copying is not None:
            given_up = RuntimeError("this shard was given up")
            with contextlib.suppress(Exception):
                copying.__exit__(RuntimeError, given_up, None)
        # The server rolls back a closed connection's transaction.
        self._server.discard(connection)

    @property
    def _ready(self) -> target.Target:
        if self._target is None:
            raise InvariantBroken("NO_TARGET", "Rows are sent before the table was checked.")
        return self._target

    def _begin(self) -> None:
        self._connection = connection = take(self._server)
        migrate(connection, self._options.ledger_schema)
        for rows in self._left:
            if rows.gid:
                transactions.end(connection, rows.gid, commit=False)
            if rows.staged:
                self._staging.drop(connection, rows.staged)
        if self._exactly_once and not self._moved_later:
            transactions.slots(connection, self._options)  # fail before the first row, not after the last
            if self._merges:
                transactions.give_up_earlier(connection, self._work, self._options)
        self._target = target.ready(connection, self._options, self._schema)
        connection.execute("BEGIN")
        into = self._target.name
        if self._moved_later or self._merges:
            self._staged = Names(self._work.scope, self._options.ledger_schema).staging(self._work, new_nonce())
            stage.create(connection, self._options, self._staged, self._target)
            into = self._staging.full(self._staged)
        self._cursor = connection.cursor()
        self._copying = self._cursor.copy(f"COPY {into} ({self._target.columns}) FROM STDIN (FORMAT binary)")
        self._copy = self._copying.__enter__()
        self._copy.write(encode.HEADER)

    def _merge(self, connection: psycopg.Connection[Any], found: Definition) -> None:
        """Merge reduced rows into the target, in the task's own transaction."""
        merge = self._ready.merge
        self._staging.add(connection, self._staged, merge, self._work, found)
        if self._options.write.delete is not None:
            delete(connection, self._options, merge, self._staging.full(self._staged), found)
        self._staging.drop(connection, self._staged)

    def _end_copy(self, connection: psycopg.Connection[Any], fingerprint: Fingerprint) -> None:
        self._copy.write(encode.TRAILER)
        self._copying.__exit__(None, None, None)
        self._copying = None
        shard = f"shard {self._work.shard} of batch {self._work.batch}"
        if self._rows != fingerprint.count:
            raise InvariantBroken(
                "ROWS_DIFFER", f"{shard}: {self._rows} rows were sent, but the fingerprint counts {fingerprint.count}."
            )
        if self._cursor.rowcount != self._rows:
            found = self._server.definition(connection)
            check_count(self._options, self._rows, self._cursor.rowcount, found, shard)

    def _prepare(self, connection: psycopg.Connection[Any], fingerprint: Fingerprint) -> str:
        from psycopg import sql

        self._gid = gid = transactions.new_id(self._work, self._options.ledger_schema)
        mark(connection, self._server.dialect, self._work, gid, fingerprint)
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
        return gid
