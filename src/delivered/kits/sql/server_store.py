"""The ledger in a database server, which can terminate sessions; markers are stored next to the decisions."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from delivered.kits.sql import stage
from delivered.kits.sql.database import C, Server
from delivered.kits.sql.names import Names
from delivered.kits.sql.store import SqlStore
from delivered.kits.sql.stored import check_emptied, check_rules
from delivered.ledger.store import Head
from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.outcome import Ok, Outcome
from delivered.model.patience import left_s, query_patience_s
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Owner

log = logging.getLogger(__name__)

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
    def _open(self, writes: bool = True) -> C:
        """See `SqlStore._open`. Args: writes: as of `Database.connect`."""

    @abstractmethod
    def _claiming(self, connection: C) -> AbstractContextManager[None]:
        """One transaction with a lock timeout of `CLAIM_WAIT_S`; committed at its end, or rolled back."""

    @abstractmethod
    def _begin_view(self, connection: C) -> None:
        """Open a read-only transaction with a consistent snapshot."""

    @abstractmethod
    def _end_holders(self) -> str:
        """Terminate idle sessions of this ledger that hold the owner's row: drivers paused mid-decision.
        Their transactions are rolled back, so they are fenced. Never raises.

        Never terminates one that waits for a standby: it has committed locally, and readers would see rows that a
        fail-over loses. Returns what it waits for; empty: there is none.
        """

    @property
    @abstractmethod
    def _see_holders(self) -> str:
        """SQL that shows the holders of a lock, so that a user can terminate them."""

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Locks the owner's row, which a decision holds from start to COMMIT: when this returns, a decision in
        flight has completed or was terminated, and any later one finds another epoch."""

        def once() -> int:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while True:
                try:
                    connection = self._open()
                    self._server.migrate(connection)
                    with self._claiming(connection):
                        return self._take(connection, successor)
                except self._server.errors() as error:
                    self.close()
                    if not self._server.is_locked(error):
                        raise self._server.explained(error) from error
                    waits_for = self._end_holders()
                    if waits_for and left_s(query_patience_s()) > CLAIM_WAIT_S:
                        log.warning("the ledger's row is held by a transaction that waits for %s", waits_for)
                    elif time.monotonic() > deadline:
                        raise self._cannot_claim(waits_for) from error

        # After an unknown outcome of its COMMIT, too: this owner may claim any number of times.
        return Ok(self._server.waiting(once, kept=True))

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
        return self._snapshot(question, nothing, writes=True)

    def _peek(self, question: Callable[[C], T], nothing: T) -> T:
        """A standby will do."""
        return self._snapshot(question, nothing, writes=False)

    def _snapshot(self, question: Callable[[C], T], nothing: T, writes: bool) -> T:
        def once() -> T:
            try:
                connection = self._open(writes)
                self._begin_view(connection)
                answer = question(connection) if self._server.version(connection) else nothing
                connection.execute("COMMIT")
                return answer
            except self._server.errors() as error:
                self.close()
                raise self._server.explained(error) from error

        return self._server.waiting(once, kept=True)

    def _move(self, connection: C, decision: Decision, move: Sequence[Prepared]) -> None:
        if not move and not self._staging.options.write.complete:
            return
        self._staging.check_keys(connection, move)
        found = self._server.definition(connection)
        if self._staging.options.write.complete and not decision.revision:
            table = self._table(connection)
            if table is not None:
                check_rules(self._staging.options, found)
                connection.execute(f"DELETE FROM {table}")
                check_emptied(connection, self._staging.options, table, found)
        for prepared in move:
            work = Work(self._scope, decision.batch, prepared.shard, prepared.attempt)
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=work.batch, shard=work.shard)
            self._staging.move(connection, prepared, work, found)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=work.batch, shard=work.shard)
        self._staging.delete(connection, move, found)

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

    def _cannot_claim(self, waits_for: str) -> DeliveredError:
        held = (
            f"Another session has held the ledger's row of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} {self._server.where} for more than {CONNECT_TIMEOUT_S:.0f} s, and "
        )
        if waits_for:
            return Unreachable(
                "LEDGER_LOCKED",
                f"{held}waits for {waits_for}. Its transaction is committed there only.",
                next_step="start the standby, or take it out of synchronous_standby_names and reload the "
                "configuration; then start again",
            )
        return Unreachable(
            "LEDGER_LOCKED",
            f"{held}could not be ended.",
            next_step=f"end that session, then start again: {self._see_holders}",
        )
