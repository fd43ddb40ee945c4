"""Commits and aborts what tasks prepared in a database server."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from delivered.contract.powers import LeftOutRow
from delivered.kits.sql import stage
from delivered.kits.sql.conditional import LEFT_OUT_VERSION, counted, fold, kept
from delivered.kits.sql.database import C, Server
from delivered.kits.sql.names import Names
from delivered.kits.sql.transactions import OpenTransaction, PreparedRows
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import Target, Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared
from delivered.model.work import Decision

T = TypeVar("T")
CONNECTIONS_MAX = 4
"""Participants are applied in parallel."""

_BATCHES = "pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation AND batch"


class ServerCommitter(ABC, Generic[C]):
    """See `delivered.contract.sink.Committer`. Also serves `delivered transactions`.

    The mechanism is read from the participant's handle: a pipeline may change it between starts.
    """

    def __init__(self, staging: stage.Staging, names: Names) -> None:
        self._server: Server[C] = staging.server
        self._staging = staging
        self._sql = staging.dialect
        self._names = names
        self._scope = names.scope
        self._pool: queue.LifoQueue[C | None] = queue.LifoQueue()
        for _ in range(CONNECTIONS_MAX):
            self._pool.put(None)

    @abstractmethod
    def _list(self, connection: C) -> list[OpenTransaction]:
        """Every prepared transaction of this sink, oldest first. Raises the client's error."""

    @abstractmethod
    def _end_prepared(self, connection: C, gid: str, commit: bool) -> bool:
        """Commit or roll back a prepared transaction. May be called again: ids are never reused.

        Returns whether it existed; if not, nothing will ever be prepared under this id. Raises the client's error.
        """

    @property
    @abstractmethod
    def _id_prefix(self) -> str:
        """Prefix of the ids of this sink's transactions, of any incarnation."""

    @abstractmethod
    def _is_ours(self, gid: str) -> bool:
        """Whether an id belongs to a shard of this pipeline and sink."""

    @abstractmethod
    def _target(self, connection: C) -> Target | None:
        """The table's identity at the server; None: it has none. Raises the client's error."""

    @abstractmethod
    def _staged(self, connection: C) -> list[str]:
        """Every staging table of this pipeline and sink. Raises the client's error."""

    def _drop(self, connection: C, table: str) -> None:
        """Drop a staging table if it exists. Raises the client's error."""
        self._staging.drop(connection, table)

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Commit a prepared transaction. Staged rows became visible with the decision."""
        gid = PreparedRows.of(prepared).gid
        if not gid:
            return Ok(None)
        outcome = self._end(gid, commit=True)
        if isinstance(outcome, Failed):
            try:
                return Ok(None) if self._has_marker(work, gid) else outcome
            except DeliveredError as error:
                return Unknown(str(error))
        return outcome

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - marked in the ledger
        """Whether a committed marker, or a decision that moved the rows itself, names this shard of this batch; or a
        later batch was decided, which implies that all of this one is visible."""
        return self._has_marker(work) or self._has_moved(work)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        rows = PreparedRows.of(prepared)
        if rows.gid:
            match self._end(rows.gid, commit=False):
                case Failed():
                    return Ok(None)  # dropped already
                case other:
                    return other
        return self._drop_staged(rows)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Roll back prepared transactions, and drop staging tables, that `keep` does not name."""
        kept = [PreparedRows.of(p) for p in keep]
        gids, tables = {rows.gid for rows in kept}, {rows.staged for rows in kept}
        count = 0

        def once(connection: C) -> None:
            nonlocal count
            for transaction in self._list(connection):
                gid = transaction.transactional_id
                if gid not in gids and self._end_prepared(connection, gid, commit=False):
                    count += 1
            for table in self._staged(connection):
                if table not in tables:
                    self._drop(connection, table)
                    count += 1

        try:
            self._ask(once)
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(count)

    def left_out(self) -> dict[str, int]:
        """See `delivered.contract.powers.CountsLeftOut`."""

        return self._ask(lambda c: counted(c, self._sql, self._scope) if self._leaves_out(c) else {})

    def dead_letters(self) -> list[LeftOutRow]:
        """See `delivered.contract.powers.KeepsDeadLetters`."""
        return self._ask(lambda c: kept(c, self._sql, self._scope) if self._leaves_out(c) else [])

    def _leaves_out(self, connection: C) -> bool:
        return self._server.version(connection) >= LEFT_OUT_VERSION

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.powers.KnowsTarget`."""
        known = self._ask(self._target)
        return {} if known is None else {self._scope.sink: known}

    def set_up(self) -> None:
        """Create the table for markers. See `delivered.contract.powers.SetsUp`."""
        self._ask(self._server.migrate)

    def forget(self, batch: int) -> None:
        """Delete markers of earlier batches, as a decision in this database would have."""
        values = {**self._key, "batch": batch}
        self._ask(lambda c: self._sql.delete(c, "marker", f"{_BATCHES} < :batch", values))
        if self._staging.options.write.conditional:
            self._ask(lambda c: fold(c, self._sql, self._scope, batch))

    def open_transactions(self) -> list[OpenTransaction]:
        """Every prepared transaction of this pipeline and sink, of any incarnation, oldest first.

        Raises:
            Unreachable: the server did not answer.
        """
        return self._ask(self._list)

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Manually commit or roll back a prepared transaction.

        Raises:
            UsageError: the id is not ours, or there is no prepared transaction with this id.
        """
        if not self._is_ours(transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                f"{transactional_id!r} is not a transaction of pipeline {self._scope.pipeline!r}, sink "
                f"{self._scope.sink!r}: their ids start with {self._id_prefix!r}.",
                next_step="list them with `delivered transactions list`",
            )
        if all(t.transactional_id != transactional_id for t in self.open_transactions()):
            raise UsageError(
                "TRANSACTION_NOT_OPEN",
                f"There is no prepared transaction {transactional_id!r}.",
                next_step="list the open ones with `delivered transactions list`",
            )
        return self._end(transactional_id, commit)

    def close(self) -> None:
        for _ in range(CONNECTIONS_MAX):
            with contextlib.suppress(queue.Empty):
                self._server.discard(self._pool.get_nowait())
        while self._pool.qsize() < CONNECTIONS_MAX:
            self._pool.put(None)

    @property
    def _key(self) -> dict[str, Any]:
        scope = self._scope
        return {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation}

    def _drop_staged(self, rows: PreparedRows) -> Outcome[None]:
        """Drop the staging table of a handle, if it has one."""
        return self._try(lambda connection: self._drop(connection, rows.staged)) if rows.staged else Ok(None)

    def _end(self, gid: str, commit: bool) -> Outcome[None]:
        """Failed: no transaction is prepared under this id, nor ever will be."""
        match self._try(lambda connection: self._end_prepared(connection, gid, commit)):
            case Ok(prepared):
                return Ok(None) if prepared else Failed(f"there is no prepared transaction {gid}")
            case other:
                return other

    def _try(self, action: Callable[[C], T]) -> Outcome[T]:
        """Run a change; after any error of the client its outcome is unknown."""
        try:
            with self._borrowed() as connection:
                return Ok(action(connection))
        except self._server.errors() as error:
            return Unknown(str(self._server.explained(error)))
        except DeliveredError as error:
            return Unknown(str(error))

    def _has_marker(self, work: Work, gid: str | None = None) -> bool:
        """Whether a committed marker names this shard of this batch; with `gid`: written by that transaction."""

        def question(connection: C) -> bool:
            if self._server.version(connection) == 0:
                return False
            later = connection.execute(
                self._sql(f"SELECT 1 FROM {{decision}} WHERE {_BATCHES} > :batch LIMIT 1"), _values(work)
            ).fetchone()
            if later is not None:  # its decision deleted the markers of this one
                return True
            markers = connection.execute(
                self._sql(f"SELECT gid FROM {{marker}} WHERE {_BATCHES} = :batch AND shard = :shard"),
                {**_values(work), "shard": work.shard},
            ).fetchall()
            return bool(markers) if gid is None else gid in {row[0] for row in markers}

        return self._ask(question)

    def _has_moved(self, work: Work) -> bool:
        """Whether a decision moved the rows of this shard itself."""

        def question(connection: C) -> bool:
            if self._server.version(connection) == 0:
                return False
            row = connection.execute(
                self._sql(f"SELECT decision FROM {{decision}} WHERE {_BATCHES} = :batch"), _values(work)
            ).fetchone()
            participants = Decision.from_json(row[0]).of(work.scope.sink) if row else ()
            return any(p.shard == work.shard and PreparedRows.of(p).staged for p in participants)

        return self._ask(question)

    def _ask(self, question: Callable[[C], T]) -> T:
        """Run a query or an idempotent change; see `Server.waiting`."""

        def once() -> T:
            with self._server.explaining(), self._borrowed() as connection:
                return question(connection)

        return self._server.waiting(once, kept=True)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[C]:
        """A connection for exclusive use. It is closed after an error."""
        connection = self._pool.get()
        healthy = False
        try:
            if connection is None or not self._server.idle(connection):
                connection = self._server.connect("committer")
            yield connection
            healthy = True
        finally:
            if not healthy:
                self._server.discard(connection)
            self._pool.put(connection if healthy else None)


def _values(work: Work) -> dict[str, Any]:
    scope = work.scope
    return {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation, "batch": work.batch}
