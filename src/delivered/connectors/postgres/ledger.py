"""The ledger: decisions of one sink of one pipeline, in the database that holds the rows."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.connectors.postgres import stage
from delivered.connectors.postgres.client import PostgresDatabase, check_of, discard, explained, is_lost
from delivered.connectors.postgres.migrate import migrate, version_of
from delivered.connectors.postgres.options import PostgresOptions
from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.outcome import Failed, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, LedgerState, Owner
from delivered.sql.database import quoted
from delivered.sql.ledger import Dialect, SqlLedger

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
_CLAIM_WAIT_MS = 1_000
"""How long a claim lets a decision that is under way come to its end by itself."""


def dialect(schema: str) -> Dialect:
    """Of a ledger that lies in this schema."""
    s = quoted(schema).replace("%", "%%")
    return Dialect(
        tables={name: f"{s}.{name}" for name in ("owner", "decision", "begun", "marker")},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "decided_at", "begun": "begun_at"},
        hold=" FOR UPDATE",
        pack=list,
        unpack=lambda names: names,
    )


class PostgresLedger(SqlLedger["psycopg.Connection[Any]"]):
    def __init__(self, options: PostgresOptions, scope: Scope) -> None:
        super().__init__(PostgresDatabase(options), dialect(options.ledger_schema), scope)
        self._options = options
        self._role = f"ledger {check_of(scope, options.ledger_schema)}"

    def claim(self, owner: Owner) -> LedgerState:
        """Takes the owner's row, which a decision holds from its start to its COMMIT: one that is under way is over
        when this returns, or was ended by the server, and one that comes later finds another epoch."""
        import psycopg

        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                connection = self._open()
                migrate(connection, self._options.ledger_schema)
                with connection.transaction():
                    connection.execute(f"SET LOCAL lock_timeout = {_CLAIM_WAIT_MS}")
                    state = self._take(connection, owner)
            except psycopg.Error as error:
                self.close()
                if error.sqlstate == "55P03":
                    self._end_holders()
                elif not is_lost(error):
                    raise explained(error, self._options) from error
                if time.monotonic() > deadline:
                    raise self._cannot_claim(error) from error
            else:
                self._claimed = (owner.id, state.epoch)
                return state

    def close(self) -> None:
        connection, self._connection = self._connection, None
        discard(connection)

    def record(self, connection: psycopg.Connection[Any], batch: int, decision: str) -> None:
        """Also forget markers of batches before it, which are all visible."""
        super().record(connection, batch, decision)
        connection.execute(
            self._sql(
                "DELETE FROM {marker} WHERE pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation "
                "AND batch < :batch"
            ),
            {**self._key, "batch": batch},
        )

    def _open(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = self._database.connect(self._role)
        return self._connection

    def _begin(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("BEGIN")

    def _read(self, question: Callable[[psycopg.Connection[Any]], T], nothing: T) -> T:
        """Asked once more if the connection was an old one that is gone."""
        import psycopg

        for attempt in (1, 2):
            try:
                connection = self._open()
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                found = question(connection) if version_of(connection, self._options.ledger_schema) else nothing
                connection.execute("COMMIT")
                return found
            except psycopg.Error as error:
                self.close()
                if attempt == 2 or not is_lost(error):
                    raise explained(error, self._options) from error
        raise AssertionError("not reached")

    def _after_failed_commit(self, error: Exception, there: Callable[[psycopg.Connection[Any]], bool]) -> Outcome[None]:
        del there  # the server may still be at it: only a claim can tell
        reason = str(explained(error, self._options))
        return Unknown(reason) if is_lost(error) else Failed(reason)

    def _add_rows(self, connection: psycopg.Connection[Any], decision: Decision) -> None:
        staged = [p for p in decision.to_move if stage.KEY in p.handle]
        stage.check_keys(connection, self._options, staged)
        for prepared in staged:
            facts = {"batch": decision.batch, "shard": prepared.shard}
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
            stage.move(connection, self._options, prepared)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
        stage.finish(connection, self._options, staged)

    def _forget_incarnations(self, connection: psycopg.Connection[Any]) -> None:
        super()._forget_incarnations(connection)
        connection.execute(
            self._sql(
                "DELETE FROM {marker} AS m WHERE pipeline = :pipeline AND sink = :sink AND incarnation <> :incarnation "
                "AND NOT EXISTS (SELECT 1 FROM {decision} AS d WHERE d.pipeline = m.pipeline AND d.sink = m.sink "
                "AND d.incarnation = m.incarnation AND d.batch = m.batch)"
            ),
            self._key,
        )

    def _end_holders(self) -> None:
        """Have the server end sessions of this very ledger that hold the owner's row and do not go on: a driver that
        was paused in mid-decision. What they had open is rolled back, so they are fenced."""
        import psycopg

        with contextlib.suppress(psycopg.Error):
            self._open().execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = %s AND xact_start IS NOT NULL AND pid <> pg_backend_pid()",
                [f"delivered {self._role}"],
            )

    def _cannot_claim(self, error: Exception) -> DeliveredError:
        if getattr(error, "sqlstate", None) != "55P03":
            return explained(error, self._options)
        return Unreachable(
            "LEDGER_LOCKED",
            f"Another session holds the ledger's row of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} at {self._options.place} for more than {CONNECT_TIMEOUT_S:.0f} s, and could not "
            "be ended.",
            next_step="see who: SELECT pid, usename, application_name, state FROM pg_stat_activity WHERE xact_start IS "
            "NOT NULL; then SELECT pg_terminate_backend(pid)",
        )
