"""The driver's hand on what tasks, perhaps dead by now, have prepared."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.connectors.postgres import stage, transactions
from delivered.connectors.postgres.client import connect, discard, explained
from delivered.connectors.postgres.migrate import migrate, version_of
from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.transactions import GONE, OpenTransaction
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Decision, Prepared
from delivered.sql.database import quoted

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
CONNECTIONS_MAX = 4
"""Participants are applied side by side."""


_BATCH = "WHERE pipeline = %s AND sink = %s AND incarnation = %s AND batch = %s"


class PostgresResource:
    """See `delivered.contract.Resource`. Also what `delivered transactions` shows and does.

    What a participant is, its handle says: a pipeline may change its mechanism between two starts.
    """

    def __init__(self, options: PostgresOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._pool: queue.LifoQueue[psycopg.Connection[Any] | None] = queue.LifoQueue()
        for _ in range(CONNECTIONS_MAX):
            self._pool.put(None)

    def apply(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """COMMIT PREPARED. What was staged got in with the decision already."""
        if transactions.KEY not in prepared.handle:
            return Ok(None)
        gid = str(prepared.handle[transactions.KEY])
        outcome = self._end(gid, commit=True)
        if isinstance(outcome, Failed):
            try:
                return Ok(None) if self._marked(work, gid) else outcome
            except DeliveredError as error:
                return Unknown(str(error))
        return outcome

    def applied(self, work: Work) -> bool:
        """Whether a committed marker, or a decision that moved the rows itself, names this shard of this batch; or a
        later batch was decided, which none is before all of this one is visible."""
        return self._marked(work) or self._moved(work)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        import psycopg

        if transactions.KEY in prepared.handle:
            match self._end(str(prepared.handle[transactions.KEY]), commit=False):
                case Failed():
                    return Ok(None)  # gone already
                case other:
                    return other
        if stage.KEY in prepared.handle:
            try:
                with self._borrowed() as connection:
                    stage.drop(connection, self._options, str(prepared.handle[stage.KEY]))
            except psycopg.Error as error:
                return Unknown(str(explained(error, self._options)))
            except DeliveredError as error:
                return Unknown(str(error))
        return Ok(None)

    def sweep(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Roll back prepared transactions, and drop staging tables, that `keep` does not name."""
        import psycopg

        gids = {p.handle.get(transactions.KEY) for p in keep}
        tables = {p.handle.get(stage.KEY) for p in keep}
        count = 0
        try:
            for transaction in self.open_transactions():
                if transaction.transactional_id not in gids:
                    match self._end(transaction.transactional_id, commit=False):
                        case Ok():
                            count += 1
                        case Unknown(reason):
                            return Unknown(reason)
                        case Failed():
                            pass  # gone since it was listed
            with self._borrowed() as connection:
                for table in stage.listed(connection, self._options, self._scope):
                    if table not in tables:
                        stage.drop(connection, self._options, table)
                        count += 1
        except psycopg.Error as error:
            return Unknown(str(explained(error, self._options)))
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(count)

    def set_up(self) -> None:
        """The table for markers, where another sink keeps the ledger. See `delivered.contract.SetsUp`."""
        self._ask(lambda c: migrate(c, self._options.ledger_schema))

    def forget(self, batch: int) -> None:
        """Markers of batches before this one, which a decision in this database would have forgotten."""

        def delete(connection: psycopg.Connection[Any]) -> None:
            connection.execute(
                f"DELETE FROM {quoted(self._options.ledger_schema)}.marker "  # noqa: S608
                f"{_BATCH.replace('batch =', 'batch <')}",
                [self._scope.pipeline, self._scope.sink, self._scope.incarnation, batch],
            )

        self._ask(delete)

    def open_transactions(self) -> list[OpenTransaction]:
        """Every prepared transaction of this sink of this pipeline, of any incarnation, oldest first.

        Raises:
            Unreachable: the server did not answer.
        """
        return self._ask(lambda c: transactions.listed(c, self._scope, self._options))

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or roll back, by hand, a prepared transaction.

        Raises:
            UsageError: the id belongs to somebody else, or nothing is prepared under it.
        """
        if not transactions.is_ours(self._scope, self._options.ledger_schema, transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                f"{transactional_id!r} is no transaction of pipeline {self._scope.pipeline!r}, sink "
                f"{self._scope.sink!r}: its ids start with "
                f"{transactions.id_prefix(self._scope, self._options.ledger_schema)!r}.",
                next_step="`delivered transactions list` shows them",
            )
        if all(t.transactional_id != transactional_id for t in self.open_transactions()):
            raise UsageError(
                "TRANSACTION_NOT_OPEN",
                f"Nothing is prepared under {transactional_id!r}.",
                next_step="`delivered transactions list` shows those that are open",
            )
        return self._end(transactional_id, commit)

    def close(self) -> None:
        for _ in range(CONNECTIONS_MAX):
            with contextlib.suppress(queue.Empty):
                discard(self._pool.get_nowait())
        while self._pool.qsize() < CONNECTIONS_MAX:
            self._pool.put(None)

    def _marked(self, work: Work, gid: str | None = None) -> bool:
        """Whether a committed marker names this shard of this batch; with `gid`: written by that transaction."""

        def question(connection: psycopg.Connection[Any]) -> bool:
            if version_of(connection, self._options.ledger_schema) == 0:
                return False
            later = connection.execute(
                f"SELECT 1 FROM {quoted(self._options.ledger_schema)}.decision "  # noqa: S608
                f"{_BATCH.replace('batch =', 'batch >')} LIMIT 1",
                _key(work),
            ).fetchone()
            if later is not None:  # its decision forgot the markers of this one
                return True
            found = connection.execute(
                f"SELECT gid FROM {quoted(self._options.ledger_schema)}.marker {_BATCH} AND shard = %s",  # noqa: S608
                [*_key(work), work.shard],
            ).fetchall()
            return bool(found) if gid is None else (gid,) in found

        return self._ask(question)

    def _moved(self, work: Work) -> bool:
        """Whether a decision moved the rows of this shard itself."""

        def question(connection: psycopg.Connection[Any]) -> bool:
            if version_of(connection, self._options.ledger_schema) == 0:
                return False
            row = connection.execute(
                f"SELECT decision FROM {quoted(self._options.ledger_schema)}.decision {_BATCH}",  # noqa: S608
                _key(work),
            ).fetchone()
            participants = Decision.from_json(row[0]).participants if row else ()
            return any(p.shard == work.shard and not p.sink and stage.KEY in p.handle for p in participants)

        return self._ask(question)

    def _end(self, gid: str, commit: bool) -> Outcome[None]:
        """May be repeated: an id names one transaction for ever."""
        import psycopg

        try:
            with self._borrowed() as connection:
                transactions.end(connection, gid, commit)
        except psycopg.Error as error:
            if error.sqlstate == GONE:
                return Failed(f"nothing is prepared under {gid}")
            return Unknown(str(explained(error, self._options)))
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(None)

    def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """A question that changes nothing; asked once more if the connection was an old one that is gone."""
        import psycopg

        for attempt in (1, 2):
            try:
                with self._borrowed() as connection:
                    return question(connection)
            except psycopg.OperationalError as error:
                if attempt == 2 or error.sqlstate is not None:
                    raise explained(error, self._options) from error
            except psycopg.Error as error:
                raise explained(error, self._options) from error
        raise AssertionError("not reached")

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection that no other thread has. One that had an error is not used again."""
        connection = self._pool.get()
        healthy = False
        try:
            if connection is None or connection.closed:
                connection = connect(self._options, "resource")
            yield connection
            healthy = True
        finally:
            if not healthy:
                discard(connection)
            self._pool.put(connection if healthy else None)


def _key(work: Work) -> list[str | int]:
    return [work.scope.pipeline, work.scope.sink, work.scope.incarnation, work.batch]
