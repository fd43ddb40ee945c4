"""The ledger of a pipeline and sink, in the database that holds the rows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import target
from delivered.connectors.postgres.client import PostgresDatabase, explained, is_lost
from delivered.connectors.postgres.options import PostgresOptions
from delivered.kits.sql.database import Dialect, quoted
from delivered.kits.sql.names import Names
from delivered.kits.sql.server_store import CLAIM_WAIT_S, ServerStore
from delivered.kits.sql.stage import Staging
from delivered.kits.sql.target import missing_at_server
from delivered.kits.sql.transactions import PreparedRows
from delivered.ledger.store import Swap
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.outcome import Failed, Outcome, Unknown
from delivered.model.prepared import Prepared
from delivered.model.work import Decision

if TYPE_CHECKING:
    import psycopg


_TABLES = ("owner", "decision", "begun", "marker", "memory", "noted", "seen", "archive", "left_out", "dead_letter")


def dialect(schema: str) -> Dialect:
    """Dialect of a ledger in this schema."""
    s = quoted(schema).replace("%", "%%")
    return Dialect(
        tables={name: f"{s}.{name}" for name in _TABLES},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "decided_at", "begun": "begun_at"},
        hold=" FOR UPDATE",
        pack=list,
        unpack=_unpacked,
        hash=lambda value: f"decode('{value.hex()}', 'hex')",
        # A server's clock may be set back, or a standby's be behind: never before an earlier row. The owner's row is
        # locked meanwhile.
        now="greatest(now(), (SELECT max(begun_at) + interval '1 microsecond' FROM {begun} "
        "WHERE pipeline = :pipeline AND sink = :sink))",
    )


def _unpacked(names: Sequence[str]) -> Sequence[str]:
    return names


def staging(options: PostgresOptions) -> Staging:
    return Staging(options, PostgresDatabase(options), dialect(options.ledger_schema))


class PostgresStore(ServerStore["psycopg.Connection[Any]"]):
    def __init__(self, options: PostgresOptions, scope: Scope) -> None:
        super().__init__(staging(options), Names(scope, options.ledger_schema))
        self._options = options

    def _open(self, writes: bool = True) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = self._database.connect(self._role, writes=writes)
        return self._connection

    def _begin(self, connection: psycopg.Connection[Any]) -> None:
        """Pins synchronous_commit once more: behind a pooler, this may be another session than the one that set it."""
        level = getattr(connection, "settings", {}).get("synchronous_commit", "on")
        connection.execute(f"BEGIN; SET LOCAL synchronous_commit = '{level}'")

    def _begin_view(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    @contextlib.contextmanager
    def _claiming(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {CLAIM_WAIT_S * 1000}")
            yield

    def _after_failed_commit(self, error: Exception, there: Callable[[psycopg.Connection[Any]], bool]) -> Outcome[None]:
        del there  # the server may still be committing: only a claim can find out
        reason = str(explained(error, self._options))
        return Unknown(reason) if is_lost(error) else Failed(reason)

    def _move(self, connection: psycopg.Connection[Any], decision: Decision, move: Sequence[Prepared]) -> None:
        """Drops the staging tables in the same transaction."""
        super()._move(connection, decision, move)
        for prepared in move:
            self._staging.drop(connection, PreparedRows.of(prepared).staged)

    def has_swapped(self, swap: Swap) -> bool:
        """See `delivered.ledger.store.SwapsTables`: they change places in one transaction."""
        schema = "" if self._options.schema is None else f"{quoted(self._options.schema)}."

        def question(connection: psycopg.Connection[Any]) -> bool:
            row = connection.execute("SELECT to_regclass(%s)", [schema + quoted(swap.kept)]).fetchone()
            return row is not None and row[0] is not None

        return PostgresDatabase(self._options).ask(question)

    def cannot_swap(self) -> str | None:
        """See `delivered.ledger.store.SwapsTables`. Views and foreign keys would stay with the old table's rows."""

        def question(connection: psycopg.Connection[Any]) -> str | None:
            found = target.find(connection, self._options)
            if found is None:
                return f"there is no table {self._options.table_text!r}"
            row = connection.execute(
                "SELECT r.ev_class::regclass::text FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid "
                "WHERE d.refobjid = %(table)s AND d.classid = 'pg_rewrite'::regclass AND r.ev_class <> %(table)s UNION "
                "SELECT conname FROM pg_constraint WHERE confrelid = %(table)s LIMIT 1",
                {"table": found[0]},
            ).fetchone()
            return None if row is None else f"{row[0]!r} refers to the table, and would go on referring to its old rows"

        return PostgresDatabase(self._options).ask(question)

    def _swap(self, connection: psycopg.Connection[Any], swap: Swap) -> None:
        found = target.find(connection, self._options)
        if found is None:
            raise missing_at_server(self._options)
        full = found[1]
        schema = full[: -len(quoted(self._options.table)) - 1]
        connection.execute(f"ALTER TABLE {full} RENAME TO {quoted(swap.kept)}")
        connection.execute(f"ALTER TABLE {schema}.{quoted(swap.new)} RENAME TO {quoted(self._options.table)}")

    def _table(self, connection: psycopg.Connection[Any]) -> str | None:
        found = target.find(connection, self._options)
        return None if found is None else found[1]

    def _end_holders(self) -> str:
        import psycopg

        from delivered.connectors.postgres.session import standbys

        with contextlib.suppress(psycopg.Error, DeliveredError):
            connection = self._open()
            ended = connection.execute(
                "SELECT CASE WHEN wait_event = 'SyncRep' THEN NULL ELSE pg_terminate_backend(pid) END "
                "FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = %s AND xact_start IS NOT NULL AND pid <> pg_backend_pid()",
                [f"delivered {self._role}"],
            ).fetchall()
            if (None,) in ended:
                return standbys(connection)
        return ""

    @property
    def _see_holders(self) -> str:
        return (
            "find the session: SELECT pid, usename, application_name, state FROM pg_stat_activity WHERE xact_start IS "
            "NOT NULL; then SELECT pg_terminate_backend(pid)"
        )
