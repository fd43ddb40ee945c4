"""The ledger: decisions of one sink of one pipeline, in the database that holds the rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.connectors.postgres import stage
from delivered.connectors.postgres.client import check_of, connect, discard, explained, is_lost
from delivered.connectors.postgres.migrate import migrate, quoted, version_of
from delivered.connectors.postgres.options import PostgresOptions
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
_SINK = "pipeline = %(pipeline)s AND sink = %(sink)s"
_SCOPE = f"{_SINK} AND incarnation = %(incarnation)s"
_CLAIM_WAIT_MS = 1_000
"""How long a claim lets a decision that is under way come to its end by itself."""


class PostgresLedger:
    """See `delivered.contract.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, options: PostgresOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._schema = quoted(options.ledger_schema)
        self._key = {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation}
        self._role = f"ledger {check_of(scope, options.ledger_schema)}"
        self._connection: psycopg.Connection[Any] | None = None
        self._claimed: tuple[str, int] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        """Takes the owner's row, which a decision holds from its start to its COMMIT: one that is under way is over
        when this returns, or was ended by the server, and one that comes later finds another epoch."""
        import psycopg

        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                connection = self._open()
                migrate(connection, self._options.ledger_schema)
                state = self._claim_once(connection, owner)
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

    def resume(self, owner_id: str) -> LedgerState:
        state = self._read(self._state)
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claimed = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        return self._read(self._state)

    def begin(self, begun: Begun) -> Outcome[None]:
        def write(connection: psycopg.Connection[Any]) -> None:
            connection.execute(
                f"INSERT INTO {self._schema}.begun (pipeline, sink, incarnation, batch, offsets) "  # noqa: S608
                "VALUES (%(pipeline)s, %(sink)s, %(incarnation)s, %(batch)s, %(offsets)s) "
                "ON CONFLICT (pipeline, sink, incarnation) DO UPDATE SET batch = excluded.batch, "
                "offsets = excluded.offsets, begun_at = excluded.begun_at",
                {**self._key, "batch": begun.batch, "offsets": begun.offsets},
            )

        return self._one_transaction(write)

    def decide(self, decision: Decision) -> Outcome[None]:
        """The decision, and with it the rows that were staged, in one transaction.

        1  hold the owner's row; check that this claim is the newest
        2  look whether this very decision is in already
        3  move the rows of each participant that staged them     <- crash points of commit.apply
        4  write the decision, forget old ones and markers of batches before it
        5  COMMIT                                                 <- from here on the batch counts
        """
        text = decision.to_json()

        def write(connection: psycopg.Connection[Any]) -> None:
            known = self._decision(connection, decision.batch)
            if known == text:
                return
            if known is not None and Decision.from_json(known).revision >= decision.revision:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, for other rows. They are visible and "
                    "stay; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            for prepared in decision.to_move:
                if stage.KEY in prepared.handle:
                    facts = {"batch": decision.batch, "shard": prepared.shard}
                    reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
                    stage.move(connection, self._options, prepared)
                    reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
            record(connection, self._options.ledger_schema, decision.scope, decision.batch, text)

        return self._one_transaction(write)

    def history(self) -> Iterator[Decision]:
        def ask(connection: psycopg.Connection[Any]) -> list[str]:
            if version_of(connection, self._options.ledger_schema) == 0:
                return []
            rows = connection.execute(
                f"SELECT decision FROM {self._schema}.decision WHERE {_SCOPE} ORDER BY batch",  # noqa: S608
                self._key,
            )
            return [text for (text,) in rows]

        for text in self._read(ask):
            yield Decision.from_json(text)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        discard(connection)

    def _claim_once(self, connection: psycopg.Connection[Any], owner: Owner) -> LedgerState:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_CLAIM_WAIT_MS}")
            connection.execute(
                f"INSERT INTO {self._schema}.owner (pipeline, sink, id, epoch, host, process, started_ms, superseded) "  # noqa: S608
                "VALUES (%(pipeline)s, %(sink)s, '', 0, '', 0, 0, '{}') ON CONFLICT DO NOTHING",
                self._key,
            )
            current, epoch = self._owner(connection, hold=True) or (Owner(""), 0)
            superseded = current.superseded
            if owner.id in superseded:
                raise self._fenced(owner.id, current)
            if current.id not in (owner.id, ""):
                superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
            connection.execute(
                f"UPDATE {self._schema}.owner SET id = %(id)s, epoch = %(epoch)s, host = %(host)s, "  # noqa: S608
                f"process = %(process)s, started_ms = %(started)s, superseded = %(superseded)s WHERE {_SINK}",
                {
                    **self._key, "id": owner.id, "epoch": epoch + 1, "host": owner.host, "process": owner.process,
                    "started": owner.started_ms, "superseded": list(superseded),
                },
            )  # fmt: skip
            self._forget_incarnations(connection)
            return self._state(connection)

    def _one_transaction(self, write: Callable[[psycopg.Connection[Any]], None]) -> Outcome[None]:
        """Run `write` once under this claim. Never runs it twice (P19)."""
        import psycopg

        try:
            connection = self._open()
            connection.execute("BEGIN")
            self._check_claim(connection)
            write(connection)
        except psycopg.Error as error:
            # COMMIT was not sent: a server that lost the connection rolls back.
            self.close()
            return Failed(str(explained(error, self._options)))
        except DeliveredError as error:
            self.close()
            return Failed(str(error))
        except BaseException:
            self.close()
            raise
        try:
            connection.execute("COMMIT")  # THE line that decides a batch in this sink
        except psycopg.Error as error:
            self.close()
            reason = str(explained(error, self._options))
            return Unknown(reason) if is_lost(error) else Failed(reason)
        return Ok(None)

    def _check_claim(self, connection: psycopg.Connection[Any]) -> None:
        held = self._owner(connection, hold=True)
        mine = self._claimed
        if held is None or mine is None or (held[0].id, held[1]) != mine:
            raise self._fenced(mine[0] if mine else "none", held[0] if held else None)

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

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} at {self._options.place} any more; it belongs to {other}, or to a later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )

    def _state(self, connection: psycopg.Connection[Any]) -> LedgerState:
        if version_of(connection, self._options.ledger_schema) == 0:
            return LedgerState()
        held = self._owner(connection)
        s = self._schema
        last = connection.execute(
            f"SELECT decision FROM {s}.decision WHERE {_SCOPE} ORDER BY batch DESC LIMIT 1",  # noqa: S608
            self._key,
        ).fetchone()
        begun = connection.execute(f"SELECT batch, offsets FROM {s}.begun WHERE {_SCOPE}", self._key).fetchone()  # noqa: S608
        earlier = connection.execute(
            f"SELECT decision FROM (SELECT DISTINCT ON (incarnation) decision, decided_at FROM {s}.decision "  # noqa: S608
            f"WHERE {_SINK} AND incarnation <> %(incarnation)s ORDER BY incarnation, batch DESC) AS newest "
            "ORDER BY decided_at DESC",
            self._key,
        ).fetchall()
        earlier_begun = connection.execute(
            f"SELECT incarnation, batch, offsets FROM {s}.begun WHERE {_SINK} AND incarnation <> %(incarnation)s "  # noqa: S608
            f"AND incarnation NOT IN (SELECT incarnation FROM {s}.decision WHERE {_SINK}) ORDER BY begun_at DESC",
            self._key,
        ).fetchall()
        return LedgerState(
            owner=held[0] if held and held[0].id else None,
            last=Decision.from_json(last[0]) if last else None,
            begun=Begun(begun[0], begun[1]) if begun else None,
            earlier=tuple(Decision.from_json(row[0]) for row in earlier),
            earlier_begun=tuple((i, Begun(batch, offsets)) for i, batch, offsets in earlier_begun),
            epoch=held[1] if held else 0,
        )

    def _owner(self, connection: psycopg.Connection[Any], hold: bool = False) -> tuple[Owner, int] | None:
        row = connection.execute(
            f"SELECT id, host, process, started_ms, superseded, epoch FROM {self._schema}.owner WHERE {_SINK}"  # noqa: S608
            + (" FOR UPDATE" if hold else ""),
            self._key,
        ).fetchone()
        return None if row is None else (Owner(row[0], row[1], row[2], row[3], tuple(row[4])), row[5])

    def _decision(self, connection: psycopg.Connection[Any], batch: int) -> str | None:
        row = connection.execute(
            f"SELECT decision FROM {self._schema}.decision WHERE {_SCOPE} AND batch = %(batch)s",  # noqa: S608
            {**self._key, "batch": batch},
        ).fetchone()
        return None if row is None else str(row[0])

    def _forget_incarnations(self, connection: psycopg.Connection[Any]) -> None:
        """Of other incarnations keep the newest decision; of very old ones nothing."""
        s, other = self._schema, f"{_SINK} AND incarnation <> %(incarnation)s"
        key = {**self._key, "kept": LEDGER_INCARNATIONS}
        connection.execute(
            f"DELETE FROM {s}.decision AS d WHERE {other} AND batch < (SELECT max(batch) FROM {s}.decision AS n "  # noqa: S608
            "WHERE n.pipeline = d.pipeline AND n.sink = d.sink AND n.incarnation = d.incarnation)",
            key,
        )
        for table, at in (("decision", "decided_at"), ("begun", "begun_at")):
            connection.execute(
                f"DELETE FROM {s}.{table} WHERE {other} AND incarnation IN (SELECT incarnation FROM {s}.{table} "  # noqa: S608
                f"WHERE {other} ORDER BY {at} DESC OFFSET %(kept)s)",
                key,
            )
        connection.execute(
            f"DELETE FROM {s}.marker AS m WHERE {other} AND NOT EXISTS (SELECT 1 FROM {s}.decision AS d "  # noqa: S608
            "WHERE d.pipeline = m.pipeline AND d.sink = m.sink AND d.incarnation = m.incarnation "
            "AND d.batch = m.batch)",
            key,
        )

    def _read(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """One consistent view. Asked once more if the connection was an old one that is gone."""
        import psycopg

        for attempt in (1, 2):
            try:
                connection = self._open()
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                found = question(connection)
                connection.execute("COMMIT")
                return found
            except psycopg.Error as error:
                self.close()
                if attempt == 2 or not is_lost(error):
                    raise explained(error, self._options) from error
        raise AssertionError("not reached")

    def _open(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._options, self._role)
        return self._connection


def record(connection: psycopg.Connection[Any], schema: str, scope: Scope, batch: int, decision: str) -> None:
    """Write a decision, or its next revision; forget those beyond the history, and markers of batches before it, which
    are all visible. Inside an open transaction."""
    s = quoted(schema)
    key = {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation, "batch": batch}
    connection.execute(
        f"INSERT INTO {s}.decision (pipeline, sink, incarnation, batch, decision) "  # noqa: S608
        "VALUES (%(pipeline)s, %(sink)s, %(incarnation)s, %(batch)s, %(decision)s) "
        "ON CONFLICT (pipeline, sink, incarnation, batch) DO UPDATE SET decision = excluded.decision, "
        "decided_at = excluded.decided_at",
        {**key, "decision": decision},
    )
    connection.execute(
        f"DELETE FROM {s}.decision WHERE {_SCOPE} AND batch <= %(horizon)s",  # noqa: S608
        {**key, "horizon": batch - LEDGER_HISTORY_BATCHES},
    )
    connection.execute(f"DELETE FROM {s}.marker WHERE {_SCOPE} AND batch < %(batch)s", key)  # noqa: S608
