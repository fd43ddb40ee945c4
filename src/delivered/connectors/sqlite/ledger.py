"""The ledger in the target database: a batch's rows and its decision get in by one transaction."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from delivered.connectors.sqlite import target
from delivered.connectors.sqlite.database import begin, connect, explained, rollback, writing
from delivered.connectors.sqlite.migrate import migrate, version_of
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.stage import read_staged, staged_schema
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken
from delivered.model.identity import Scope
from delivered.model.limits import (
    CONNECT_TIMEOUT_S,
    LEDGER_HISTORY_BATCHES,
    LEDGER_INCARNATIONS,
    OWNERS_REMEMBERED,
)
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner, Prepared

_SINK = "pipeline = :pipeline AND sink = :sink"
_SCOPE = f"{_SINK} AND incarnation = :incarnation"


class SqliteLedger:
    """See `delivered.contract.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, options: SqliteOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._key = {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation}
        self._connection: sqlite3.Connection | None = None
        self._claimed: tuple[str, int] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        connection = self._open()
        migrate(connection, self._options.path)
        with writing(connection, self._options.path, CONNECT_TIMEOUT_S):
            held = self._owner(connection)
            current, epoch = held if held is not None else (None, 0)
            superseded: tuple[str, ...] = ()
            if current is not None:
                superseded = current.superseded
                if owner.id in superseded:
                    raise self._fenced(owner.id, current)
                if current.id != owner.id:
                    superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
            now = replace(owner, superseded=superseded)
            connection.execute(
                "INSERT OR REPLACE INTO _delivered_owner (pipeline, sink, id, epoch, host, process, started_ms, "
                "superseded) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    self._scope.pipeline, self._scope.sink, now.id, epoch + 1, now.host, now.process, now.started_ms,
                    json.dumps(superseded),
                ),
            )  # fmt: skip
            self._forget_incarnations(connection)
            state = self._state(connection)
        self._claimed = (owner.id, epoch + 1)
        return state

    def resume(self, owner_id: str) -> LedgerState:
        connection = self._open()
        migrate(connection, self._options.path)
        with self._reading(connection):
            state = self._state(connection)
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claimed = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        if not Path(self._options.path).exists():
            return LedgerState()
        connection = connect(self._options.path, mode="ro")
        try:
            with self._reading(connection):
                return self._state(connection) if version_of(connection) else LedgerState()
        finally:
            connection.close()

    def begin(self, begun: Begun) -> Outcome[None]:
        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO _delivered_begun (pipeline, sink, incarnation, batch, offsets) "
                "VALUES (:pipeline, :sink, :incarnation, :batch, :offsets)",
                {**self._key, "batch": begun.batch, "offsets": begun.offsets},
            )

        def there(connection: sqlite3.Connection) -> bool:
            return self._state(connection).begun == begun

        return self._one_transaction(write, there)

    def decide(self, decision: Decision) -> Outcome[None]:
        """Rows of this sink's participants and the decision, in one transaction.

        1  become the one writer; look whether this very decision is in already
        2  check that this claim is the newest
        3  add the rows of each participant                    <- crash points of commit.apply
        4  write the decision, forget old ones
        5  COMMIT                                              <- from here on the batch counts, and is visible
        """
        text = decision.to_json()

        def there(connection: sqlite3.Connection) -> bool:
            return self._decision(connection, decision.batch) == text

        def write(connection: sqlite3.Connection) -> None:
            known = self._decision(connection, decision.batch)
            if known is not None and Decision.from_json(known).revision >= decision.revision:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, for other rows. They are visible and "
                    "stay; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            participants = [p for p in decision.to_move if p.handle]
            if participants:
                schema = staged_schema(self._options, self._scope, participants[0].handle)
                target.ready(connection, self._options, schema)
            for prepared in participants:
                facts = {"batch": decision.batch, "shard": prepared.shard}
                reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
                self._add_rows(connection, prepared)
                reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
            record(connection, decision.scope, decision.batch, text)

        return self._one_transaction(write, there)

    def history(self) -> Iterator[Decision]:
        if not Path(self._options.path).exists():
            return
        connection = connect(self._options.path, mode="ro")
        try:
            if version_of(connection) == 0:
                return
            rows = connection.execute(
                f"SELECT decision FROM _delivered_decision WHERE {_SCOPE} ORDER BY batch",  # noqa: S608
                self._key,
            )
            for (text,) in rows:
                yield Decision.from_json(text)
        except sqlite3.Error as error:
            raise explained(error, self._options.path) from error
        finally:
            connection.close()

    def close(self) -> None:
        if self._connection is not None:
            rollback(self._connection)
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _one_transaction(
        self, write: Callable[[sqlite3.Connection], None], there: Callable[[sqlite3.Connection], bool]
    ) -> Outcome[None]:
        """Run `write` under this claim, unless `there` says that its work is in. Never runs it twice."""
        try:
            connection = self._open()
            begin(connection)
            if there(connection):
                rollback(connection)
                return Ok(None)
            self._check_claim(connection)
            write(connection)
        except sqlite3.Error as error:
            self.close()
            return Failed(str(explained(error, self._options.path)))
        except DeliveredError as error:
            self.close()
            return Failed(str(error))
        except BaseException:
            self.close()
            raise
        try:
            connection.execute("COMMIT")  # THE line that decides a batch in this sink
        except sqlite3.Error as error:
            return self._look(explained(error, self._options.path), there)
        return Ok(None)

    def _look(self, error: DeliveredError, there: Callable[[sqlite3.Connection], bool]) -> Outcome[None]:
        """COMMIT ended in an error: undo what is still open, then ask the file itself."""
        self.close()
        try:
            connection = self._open()
            with self._reading(connection):
                found = there(connection)
        except DeliveredError as second:
            return Unknown(f"{error}; then {second}")
        # Closing the connection ended its transaction: what is not in now will not get in.
        return Ok(None) if found else Failed(str(error))

    def _add_rows(self, connection: sqlite3.Connection, prepared: Prepared) -> None:
        batches = read_staged(self._options, self._scope, prepared.handle)
        rows = target.insert(connection, self._options.table, batches)
        if rows != prepared.handle["rows"] or rows != prepared.fingerprint.count:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows were staged, prepared were {prepared.handle['rows']}, with a "
                f"fingerprint of {prepared.fingerprint.count}.",
                next_step="start the pipeline again; the batch runs again",
            )

    def _check_claim(self, connection: sqlite3.Connection) -> None:
        held = self._owner(connection)
        mine = self._claimed
        if held is None or mine is None or (held[0].id, held[1]) != mine:
            raise self._fenced(mine[0] if mine else "none", held[0] if held else None)

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} in {self._options.path!r} any more; it belongs to {other}, or to a later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )

    def _state(self, connection: sqlite3.Connection) -> LedgerState:
        held = self._owner(connection)
        last = connection.execute(
            f"SELECT decision FROM _delivered_decision WHERE {_SCOPE} ORDER BY batch DESC LIMIT 1",  # noqa: S608
            self._key,
        ).fetchone()
        begun = connection.execute(
            f"SELECT batch, offsets FROM _delivered_begun WHERE {_SCOPE}",  # noqa: S608
            self._key,
        ).fetchone()
        # SQLite gives the row of the maximum for the bare column beside max().
        earlier = connection.execute(
            f"SELECT decision, max(batch) FROM _delivered_decision WHERE {_SINK} AND incarnation <> :incarnation "  # noqa: S608
            "GROUP BY incarnation ORDER BY max(rowid) DESC",
            self._key,
        ).fetchall()
        earlier_begun = connection.execute(
            f"SELECT incarnation, batch, offsets FROM _delivered_begun WHERE {_SINK} AND incarnation <> :incarnation "  # noqa: S608
            f"AND incarnation NOT IN (SELECT incarnation FROM _delivered_decision WHERE {_SINK}) ORDER BY rowid DESC",
            self._key,
        ).fetchall()
        return LedgerState(
            owner=held[0] if held else None,
            last=Decision.from_json(last[0]) if last else None,
            begun=Begun(begun[0], begun[1]) if begun else None,
            earlier=tuple(Decision.from_json(row[0]) for row in earlier),
            earlier_begun=tuple((i, Begun(batch, offsets)) for i, batch, offsets in earlier_begun),
            epoch=held[1] if held else 0,
        )

    def _owner(self, connection: sqlite3.Connection) -> tuple[Owner, int] | None:
        row = connection.execute(
            f"SELECT id, host, process, started_ms, superseded, epoch FROM _delivered_owner WHERE {_SINK}",  # noqa: S608
            self._key,
        ).fetchone()
        return None if row is None else (Owner(row[0], row[1], row[2], row[3], tuple(json.loads(row[4]))), row[5])

    def _decision(self, connection: sqlite3.Connection, batch: int) -> str | None:
        row = connection.execute(
            f"SELECT decision FROM _delivered_decision WHERE {_SCOPE} AND batch = :batch",  # noqa: S608
            {**self._key, "batch": batch},
        ).fetchone()
        return None if row is None else str(row[0])

    def _forget_incarnations(self, connection: sqlite3.Connection) -> None:
        """Of other incarnations keep the newest decision; of very old ones nothing."""
        connection.execute(
            f"DELETE FROM _delivered_decision WHERE {_SINK} AND incarnation <> :incarnation AND batch < ("  # noqa: S608
            "SELECT max(batch) FROM _delivered_decision AS d WHERE d.pipeline = _delivered_decision.pipeline "
            "AND d.sink = _delivered_decision.sink AND d.incarnation = _delivered_decision.incarnation)",
            self._key,
        )
        for table in ("_delivered_decision", "_delivered_begun"):
            connection.execute(
                f"DELETE FROM {table} WHERE {_SINK} AND incarnation <> :incarnation AND rowid NOT IN ("  # noqa: S608
                f"SELECT rowid FROM {table} WHERE {_SINK} AND incarnation <> :incarnation "
                "ORDER BY rowid DESC LIMIT :kept)",
                {**self._key, "kept": LEDGER_INCARNATIONS},
            )

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self._options.path)
        return self._connection

    @contextlib.contextmanager
    def _reading(self, connection: sqlite3.Connection) -> Iterator[None]:
        """One consistent view, whatever others commit meanwhile."""
        try:
            connection.execute("BEGIN")
            yield
        except sqlite3.Error as error:
            raise explained(error, self._options.path) from error
        finally:
            rollback(connection)


def record(connection: sqlite3.Connection, scope: Scope, batch: int, decision: str) -> None:
    """Write a decision, or its next revision, and forget those beyond the history. Inside an open transaction."""
    connection.execute(
        "INSERT INTO _delivered_decision (pipeline, sink, incarnation, batch, decision) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (pipeline, sink, incarnation, batch) DO UPDATE SET decision = excluded.decision",
        (scope.pipeline, scope.sink, scope.incarnation, batch, decision),
    )
    connection.execute(
        "DELETE FROM _delivered_decision WHERE pipeline = ? AND sink = ? AND incarnation = ? AND batch <= ?",
        (scope.pipeline, scope.sink, scope.incarnation, batch - LEDGER_HISTORY_BATCHES),
    )
