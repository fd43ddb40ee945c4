"""Owner and decisions in tables of the user's database.

One transaction writes a batch's rows, its decision and the keys of a dedup (`delivered.kits.sql.keys`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from delivered.kits.sql.conditional import fold
from delivered.kits.sql.database import C, Connection, Database, Dialect
from delivered.kits.sql.keys import keep, open_memory
from delivered.ledger.ledger import outdated, state_of
from delivered.ledger.store import Change, Head, Swap
from delivered.model.archive import Archived
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner

T = TypeVar("T")
_SINK = "pipeline = :pipeline AND sink = :sink"
_SCOPE = f"{_SINK} AND incarnation = :incarnation"
_OTHER = f"{_SINK} AND incarnation <> :incarnation"
_ARCHIVE_VERSION = 3
"""Version of the ledger's tables that introduced the archive."""
_SAME = "n.pipeline = d.pipeline AND n.sink = d.sink AND n.incarnation = d.incarnation"


class SqlStore(ABC, Generic[C]):
    """See `delivered.ledger.store.Store`."""

    def __init__(self, database: Database[C], dialect: Dialect, scope: Scope) -> None:
        self._database = database
        self._sql = dialect
        self._scope = scope
        self._key: dict[str, Any] = {
            "pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation
        }  # fmt: skip
        self._connection: C | None = None

    @property
    def where(self) -> str:
        return self._database.where

    @abstractmethod
    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]: ...

    @abstractmethod
    def _open(self) -> C:
        """The connection of this ledger, opened on first use."""

    @abstractmethod
    def _begin(self, connection: C) -> None:
        """Begin a read-write transaction."""

    @abstractmethod
    def _version(self, connection: C) -> int:
        """Version of the ledger's tables."""

    @abstractmethod
    def _view(self, question: Callable[[C], T], nothing: T) -> T:
        """Run a query on a consistent snapshot; returns `nothing` if there is no ledger yet."""

    def _peek(self, question: Callable[[C], T], nothing: T) -> T:
        """As `_view`, for a process that may not be the owner."""
        return self._view(question, nothing)

    @property
    @abstractmethod
    def _conditional(self) -> bool:
        """Whether the table decides which rows are written."""

    @abstractmethod
    def _move(self, connection: C, decision: Decision, move: Sequence[Prepared]) -> None:
        """Move the staged rows of these participants to the table, in the decision's transaction.

        Reaches the crash points of `commit.apply` once per participant.
        """

    def _swap(self, connection: C, swap: Swap) -> None:
        """Rename two tables, in the decision's transaction. Only called of a `SwapsTables`."""
        raise NotImplementedError

    @abstractmethod
    def _after_failed_commit(self, error: Exception, there: Callable[[C], bool]) -> Outcome[None]:
        """Resolve the outcome of a COMMIT that raised. `there` checks whether its write exists."""

    @abstractmethod
    def close(self) -> None: ...

    def read(self) -> LedgerState:
        return self._view(self._state, LedgerState())

    def peek(self) -> LedgerState:
        return self._peek(self._state, LedgerState())

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """One transaction, never run twice (P19).

        1  lock the owner's row, so that a claim waits or this write finds another epoch; call the rule
        2  move the staged rows of this sink's participants                     <- crash points of commit.apply
        3  dedup.keep: activate the keys that the batch admitted
        4  write the decision, delete old ones
        5  COMMIT                                                               <- from here on the batch counts
        """
        try:
            connection = self._open()
            self._begin(connection)
            head = self._head(connection)
            change = rule(head)
            if change is not None:
                self._put(connection, change, head.epoch)
        except self._database.errors() as error:
            # COMMIT was not sent: losing the connection rolls back.
            self.close()
            explained = self._database.explained(error)
            if self._database.is_away(explained):
                return Unknown(str(explained))  # the caller fences, and may then write again
            raise explained from error
        except BaseException:
            self.close()
            raise
        if change is None:
            self._undo(connection)
            return Ok(None)
        written = change

        def there(connection: C) -> bool:
            if written.decision is not None:
                return self._decision(connection, written.decision.batch) == written.decision.to_json()
            return self._begun(connection) == written.begun

        try:
            connection.execute("COMMIT")  # THE line that decides a batch in this sink
        except self._database.errors() as error:
            self.close()
            return self._after_failed_commit(error, there)
        return Ok(None)

    def history(self) -> Iterator[Decision]:
        def question(connection: C) -> list[str]:
            rows = connection.execute(
                self._sql(f"SELECT decision FROM {{decision}} WHERE {_SCOPE} ORDER BY batch"),
                self._key,
            ).fetchall()
            return [text for (text,) in rows]

        kept: list[str] = self._peek(question, [])
        for text in kept:
            yield Decision.from_json(text)

    def others(self) -> list[OtherLedger]:
        def question(connection: C) -> list[OtherLedger]:
            other = "NOT (pipeline = :pipeline AND sink = :sink)"
            same = " UNION ".join(
                f"SELECT pipeline, sink FROM {{{table}}} WHERE incarnation = :incarnation AND {other}"
                for table in ("decision", "begun")
            )
            holders = {tuple(row) for row in connection.execute(self._sql(same), self._key).fetchall()}
            owners = connection.execute(self._sql(f"SELECT pipeline, sink FROM {{owner}} WHERE {other}"), self._key)
            known = {tuple(row) for row in owners.fetchall()} | holders
            return named_first(OtherLedger(p, s, (p, s) in holders) for p, s in known)

        return self._view(question, [])

    def _record(self, connection: C, batch: int, decision: str) -> None:
        """Write a decision, or its next revision; delete those beyond the history. Inside an open transaction."""
        connection.execute(
            self._sql(
                "INSERT INTO {decision} (pipeline, sink, incarnation, batch, decision) "
                "VALUES (:pipeline, :sink, :incarnation, :batch, :decision) "
                + self._sql.known("pipeline, sink, incarnation, batch", "decision")
            ),
            {**self._key, "batch": batch, "decision": decision},
        )
        if self._conditional:
            fold(connection, self._sql, self._scope, batch)
        horizon = {**self._key, "horizon": batch - LEDGER_HISTORY_BATCHES}
        self._sql.delete(connection, "decision", f"{_SCOPE} AND batch <= :horizon", horizon)

    def _take(self, connection: C, successor: Callable[[Head], Owner]) -> int:
        """The claim itself, inside a read-write transaction."""
        connection.execute(
            self._sql(
                "INSERT INTO {owner} (pipeline, sink, id, epoch, host, process, started_ms, superseded) "
                "VALUES (:pipeline, :sink, '', 0, '', 0, 0, :superseded) " + self._sql.known("pipeline, sink", None)
            ),
            {"pipeline": self._scope.pipeline, "sink": self._scope.sink, "superseded": self._sql.pack([])},
        )
        head = self._head(connection)
        owner = successor(head)
        connection.execute(
            self._sql(
                "UPDATE {owner} SET id = :id, epoch = :epoch, host = :host, process = :process, "
                f"started_ms = :started, superseded = :superseded WHERE {_SINK}"
            ),
            {
                "pipeline": self._scope.pipeline, "sink": self._scope.sink, "id": owner.id, "epoch": head.epoch + 1,
                "host": owner.host, "process": owner.process, "started": owner.started_ms,
                "superseded": self._sql.pack(owner.superseded),
            },
        )  # fmt: skip
        self._forget_incarnations(connection)
        open_memory(self._sql, connection, self._scope, fresh=head.batch is None)
        return head.epoch + 1

    def _put(self, connection: C, change: Change, epoch: int) -> None:
        if change.begun is not None:
            # No UPDATE: the column that identifies the newest row is set on insert.
            self._sql.delete(connection, "begun", _SCOPE, self._key)
            column, value = (f", {self._sql.written['begun']}", f", {self._sql.now}") if self._sql.now else ("", "")
            connection.execute(
                self._sql(
                    f"INSERT INTO {{begun}} (pipeline, sink, incarnation, batch, offsets{column}) "
                    f"VALUES (:pipeline, :sink, :incarnation, :batch, :offsets{value})"
                ),
                {**self._key, "batch": change.begun.batch, "offsets": change.begun.offsets},
            )
        if change.swap is not None:
            reach(StepId.COMMIT_APPLY, Moment.BEFORE)
            self._swap(connection, change.swap)
            reach(StepId.COMMIT_APPLY, Moment.AFTER)
        if change.decision is not None:
            self._move(connection, change.decision, change.move)
            keep(self._sql, connection, change.decision, epoch)
            self._record(connection, change.decision.batch, change.decision.to_json())

    def _undo(self, connection: C) -> None:
        """Roll back a transaction that wrote nothing; ignores errors."""
        try:
            connection.execute("ROLLBACK")
        except self._database.errors():
            self.close()

    def _head(self, connection: C) -> Head:
        """Lock the owner's row until the transaction ends, then read the head."""
        owner, epoch = self._owner(connection, hold=True) or (None, 0)
        (batch,) = self._one(connection, f"SELECT max(batch) FROM {{decision}} WHERE {_SCOPE}")
        return Head(
            owner if owner is not None and owner.id else None,
            epoch,
            batch,
            lambda: self._last(connection),
            lambda: self._begun(connection),
        )

    def _state(self, connection: C) -> LedgerState:
        owner, epoch = self._owner(connection) or (None, 0)
        newest = f"(SELECT max(batch) FROM {{decision}} AS n WHERE {_SAME})"
        decided = connection.execute(
            self._sql(
                f"SELECT decision FROM {{decision}} AS d WHERE {_SINK} AND batch = {newest} "
                f"ORDER BY {self._sql.written['decision']}"
            ),
            self._key,
        ).fetchall()
        begun = connection.execute(
            self._sql(
                f"SELECT incarnation, batch, offsets FROM {{begun}} WHERE {_SINK} ORDER BY {self._sql.written['begun']}"
            ),
            self._key,
        ).fetchall()
        return state_of(
            self._scope,
            owner if owner is not None and owner.id else None,
            epoch,
            [Decision.from_json(row[0]) for row in decided],
            {i: Begun(batch, offsets) for i, batch, offsets in begun},
            lambda _: self._archived(connection),
        )

    def _owner(self, connection: C, hold: bool = False) -> tuple[Owner, int] | None:
        row = self._one(
            connection,
            f"SELECT id, host, process, started_ms, superseded, epoch FROM {{owner}} WHERE {_SINK}"
            + (self._sql.hold if hold else ""),
        )
        if row is None:
            return None
        name, host, process, started_ms, superseded, epoch = row
        return Owner(name, host, process, started_ms, tuple(self._sql.unpack(superseded))), epoch

    def _last(self, connection: C) -> Decision | None:
        row = self._one(connection, f"SELECT decision FROM {{decision}} WHERE {_SCOPE} ORDER BY batch DESC LIMIT 1")
        return Decision.from_json(row[0]) if row else None

    def _begun(self, connection: C) -> Begun | None:
        row = self._one(connection, f"SELECT batch, offsets FROM {{begun}} WHERE {_SCOPE}")
        return Begun(row[0], row[1]) if row else None

    def _decision(self, connection: C, batch: int) -> str | None:
        row = self._one(connection, f"SELECT decision FROM {{decision}} WHERE {_SCOPE} AND batch = :batch", batch=batch)
        return None if row is None else str(row[0])

    def _forget_incarnations(self, connection: C) -> None:
        """Keep only the newest decision of other incarnations; of very old ones, the archived entry.

        A DELETE reads its own table in a nested subquery: MySQL accepts no other form.
        """
        newest = f"SELECT incarnation AS i, max(batch) AS b FROM {{decision}} WHERE {_OTHER} GROUP BY incarnation"
        where = f"{_OTHER} AND (incarnation, batch) NOT IN (SELECT i, b FROM ({newest}) AS newest)"
        self._sql.delete(connection, "decision", where, self._key)
        # The counts of other incarnations are never read.
        self._sql.delete(connection, "left_out", _OTHER, self._key)
        old = outdated(self._state(connection))
        for incarnation, entry in zip(old.incarnations, old.entries, strict=True):
            key = {**self._key, "incarnation": incarnation}
            # A decision's entry replaces that of a begun batch, never the reverse.
            connection.execute(
                self._sql(
                    "INSERT INTO {archive} (pipeline, sink, incarnation, entry) "
                    "VALUES (:pipeline, :sink, :incarnation, :entry) "
                    + self._sql.known("pipeline, sink, incarnation", "entry" if entry.decided else None)
                ),
                {**key, "entry": entry.encode()},
            )
            for table in ("decision", "begun"):
                self._sql.delete(connection, table, _SCOPE, key)

    def _archived(self, connection: C) -> Archived | None:
        if self._version(connection) < _ARCHIVE_VERSION:  # read-only processes do not migrate the ledger
            return None
        row = self._one(connection, f"SELECT entry FROM {{archive}} WHERE {_SCOPE}")
        return None if row is None else Archived.decode(bytes(row[0]))

    def _one(self, connection: Connection, statement: str, **values: Any) -> Any:
        return connection.execute(self._sql(statement), {**self._key, **values}).fetchone()
