"""The ledger in a database server, which can terminate sessions; markers are stored next to the decisions."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from delivered.kits.sql import stage
from delivered.kits.sql.database import C, Server
from delivered.kits.sql.names import Names
from delivered.kits.sql.store import SqlStore
from delivered.ledger.store import Head
from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.outcome import Ok, Outcome
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Owner

T = TypeVar("T")
CLAIM_WAIT_S = 1
"""How long a claim waits for a decision in flight before it terminates the session."""


class ServerStore(SqlStore[C]):
    """See `delivered.ledger.store.Store`."""

    def __init__(self, staging: stage.Staging, names: Names) -> None:
        super().__init__(staging.server, staging.dialect, names.scope)
        self._server: Server[C] = staging.server
        self._staging = staging
        self._role = f"ledger {names.check}"

    @property
    def _conditional(self) -> bool:
        return self._staging.options.write.conditional

    @abstractmethod
    def _claiming(self, connection: C) -> AbstractContextManager[None]:
        """One transaction with a lock timeout of `CLAIM_WAIT_S`; committed at its end, or rolled back."""

    @abstractmethod
    def _begin_view(self, connection: C) -> None:
        """Open a read-only transaction with a consistent snapshot."""

    @abstractmethod
    def _end_holders(self) -> None:
        """Terminate idle sessions of this ledger that hold the owner's row: drivers paused mid-decision.
        Their transactions are rolled back, so they are fenced. Never raises."""

    @property
    @abstractmethod
    def _see_holders(self) -> str:
        """SQL that shows the holders of a lock, so that a user can terminate them."""

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Locks the owner's row, which a decision holds from start to COMMIT: when this returns, a decision in
        flight has completed or was terminated, and any later one finds another epoch."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                connection = self._open()
                self._server.migrate(connection)
                with self._claiming(connection):
                    epoch = self._take(connection, successor)
            except self._server.errors() as error:
                self.close()
                if self._server.is_locked(error):
                    self._end_holders()
                elif not self._server.is_lost(error):
                    raise self._server.explained(error) from error
                if time.monotonic() > deadline:
                    raise self._cannot_claim(error) from error
            else:
                return Ok(epoch)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._server.discard(connection)

    def _record(self, connection: C, batch: int, decision: str) -> None:
        """Also delete the markers of earlier batches, all of which are visible."""
        super()._record(connection, batch, decision)
        self._sql.delete(
            connection,
            "marker",
            "pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation AND batch < :batch",
            {**self._key, "batch": batch},
        )

    def _version(self, connection: C) -> int:
        return self._server.version(connection)

    def _view(self, question: Callable[[C], T], nothing: T) -> T:
        """Retried once if a pooled connection was lost."""
        for attempt in (1, 2):
            try:
                connection = self._open()
                self._begin_view(connection)
                answer = question(connection) if self._server.version(connection) else nothing
                connection.execute("COMMIT")
                return answer
            except self._server.errors() as error:
                self.close()
                if attempt == 2 or not self._server.is_lost(error):
                    raise self._server.explained(error) from error
        raise AssertionError("not reached")

    def _move(self, connection: C, decision: Decision, move: Sequence[Prepared]) -> None:
        self._staging.check_keys(connection, move)
        if self._staging.options.write.complete and not decision.revision:
            table = self._table(connection)
            if table is not None:
                connection.execute(f"DELETE FROM {table}")
        for prepared in move:
            work = Work(self._scope, decision.batch, prepared.shard, prepared.attempt)
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=work.batch, shard=work.shard)
            self._staging.move(connection, prepared, work)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=work.batch, shard=work.shard)
        self._staging.delete(connection, move)

    @abstractmethod
    def _table(self, connection: C) -> str | None:
        """Full name of the target, quoted; None: there is none."""

    def _forget_incarnations(self, connection: C) -> None:
        super()._forget_incarnations(connection)
        self._sql.delete(
            connection,
            "marker",
            "pipeline = :pipeline AND sink = :sink AND incarnation <> :incarnation AND (incarnation, batch) NOT IN "
            "(SELECT incarnation, batch FROM {decision} WHERE pipeline = :pipeline AND sink = :sink)",
            self._key,
        )

    def _cannot_claim(self, error: Exception) -> DeliveredError:
        if not self._server.is_locked(error):
            return self._server.explained(error)
        return Unreachable(
            "LEDGER_LOCKED",
            f"Another session has held the ledger's row of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} {self._server.where} for more than {CONNECT_TIMEOUT_S:.0f} s, and could not "
            "be ended.",
            next_step=f"end that session, then start again: {self._see_holders}",
        )
