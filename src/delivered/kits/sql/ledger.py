"""Owner and decisions in tables of the user's database: a batch's rows and its decision get in by one transaction.

Keys that a dedup remembers get in by the same transaction: see `delivered.kits.sql.keys`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from delivered.kits.sql.database import C, Connection, Database
from delivered.kits.sql.dialect import Dialect
from delivered.kits.sql.keys import keep, open_memory
from delivered.model.archive import Archived
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.work import Begun, Decision, LedgerState, Owner

T = TypeVar("T")
_SINK = "pipeline = :pipeline AND sink = :sink"
_SCOPE = f"{_SINK} AND incarnation = :incarnation"
_OTHER = f"{_SINK} AND incarnation <> :incarnation"
_ARCHIVE_VERSION = 3
"""Of the ledger's tables, from which on there is the archive."""
_SAME = "n.pipeline = d.pipeline AND n.sink = d.sink AND n.incarnation = d.incarnation"


class SqlLedger(ABC, Generic[C]):
    """See `delivered.contract.sink.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, database: Database[C], dialect: Dialect, scope: Scope) -> None:
        self._database = database
        self._sql = dialect
        self._scope = scope
        self._key: dict[str, Any] = {
            "pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation
        }  # fmt: skip
        self._connection: C | None = None
        self._claimed: tuple[str, int] | None = None

    @abstractmethod
    def claim(self, owner: Owner) -> LedgerState: ...

    @abstractmethod
    def _open(self) -> C:
        """The connection of this ledger, opened if need be."""

    @abstractmethod
    def _begin(self, connection: C) -> None:
        """Open a transaction that will write."""

    @abstractmethod
    def _version(self, connection: C) -> int:
        """Of the ledger's tables."""

    @abstractmethod
    def _read(self, question: Callable[[C], T], nothing: T) -> T:
        """One consistent view, whatever others commit meanwhile; `nothing` where there is no ledger yet."""

    def _peek(self, question: Callable[[C], T], nothing: T) -> T:
        """As `_read`, by a process that may not be the owner."""
        return self._read(question, nothing)

    @abstractmethod
    def _add_rows(self, connection: C, decision: Decision) -> None:
        """Inside the decision's transaction, make staged rows those of the table.

        Reaches the crash points of `commit.apply` once per participant that staged.
        """

    @abstractmethod
    def _after_failed_commit(self, error: Exception, there: Callable[[C], bool]) -> Outcome[None]:
        """COMMIT ended in an error: tell whether the transaction is in. `there` looks for what it wrote."""

    @abstractmethod
    def close(self) -> None: ...

    def resume(self, owner_id: str) -> LedgerState:
        state = self._read(self._state, LedgerState())
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claimed = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        return self._peek(self._state, LedgerState())

    def begin(self, begun: Begun) -> Outcome[None]:
        key = {**self._key, "batch": begun.batch, "offsets": begun.offsets}

        def write(connection: C) -> None:
            # Not an update: what tells the newest row is set when a row is made.
            self._sql.delete(connection, "begun", _SCOPE, self._key)
            connection.execute(
                self._sql(
                    "INSERT INTO {begun} (pipeline, sink, incarnation, batch, offsets) "
                    "VALUES (:pipeline, :sink, :incarnation, :batch, :offsets)"
                ),
                key,
            )

        return self._one_transaction(write, lambda connection: self._state(connection).begun == begun)

    def decide(self, decision: Decision) -> Outcome[None]:
        """The decision, and with it the rows that were staged, in one transaction.

        1  look whether this very decision is in already
        2  hold the owner's row; check that this claim is the newest
        3  make the rows of this sink's participants that staged them visible   <- crash points of commit.apply
        4  dedup.keep: the keys that the batch let in count
        5  write the decision, forget old ones
        6  COMMIT                                                               <- from here on the batch counts
        """
        text = decision.to_json()

        def there(connection: C) -> bool:
            return self._decision(connection, decision.batch) == text

        def write(connection: C) -> None:
            known = self._decision(connection, decision.batch)
            if known == text:  # got in between the first look and the hold
                return
            if known is not None and Decision.from_json(known).revision >= decision.revision:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, for other rows. They are visible and "
                    "stay; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            self._add_rows(connection, decision)
            keep(self._sql, connection, decision, self._claimed[1] if self._claimed else 0)
            self.record(connection, decision.batch, text)

        return self._one_transaction(write, there)

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
        """See `delivered.contract.powers.KnowsOthers`."""

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

        return self._read(question, [])

    def record(self, connection: C, batch: int, decision: str) -> None:
        """Write a decision, or its next revision; forget those beyond the history. Inside an open transaction."""
        connection.execute(
            self._sql(
                "INSERT INTO {decision} (pipeline, sink, incarnation, batch, decision) "
                "VALUES (:pipeline, :sink, :incarnation, :batch, :decision) "
                + self._sql.known("pipeline, sink, incarnation, batch", "decision")
            ),
            {**self._key, "batch": batch, "decision": decision},
        )
        horizon = {**self._key, "horizon": batch - LEDGER_HISTORY_BATCHES}
        self._sql.delete(connection, "decision", f"{_SCOPE} AND batch <= :horizon", horizon)

    def _take(self, connection: C, owner: Owner) -> LedgerState:
        """The claim itself, inside an open transaction that writes."""
        connection.execute(
            self._sql(
                "INSERT INTO {owner} (pipeline, sink, id, epoch, host, process, started_ms, superseded) "
                "VALUES (:pipeline, :sink, '', 0, '', 0, 0, :superseded) " + self._sql.known("pipeline, sink", None)
            ),
            {"pipeline": self._scope.pipeline, "sink": self._scope.sink, "superseded": self._sql.pack([])},
        )
        current, epoch = self._owner(connection, hold=True) or (Owner(""), 0)
        superseded = current.superseded
        if owner.id in superseded:
            raise self._fenced(owner.id, current)
        if current.id not in (owner.id, ""):
            superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
        now = replace(owner, superseded=superseded)
        connection.execute(
            self._sql(
                "UPDATE {owner} SET id = :id, epoch = :epoch, host = :host, process = :process, "
                f"started_ms = :started, superseded = :superseded WHERE {_SINK}"
            ),
            {
                "pipeline": self._scope.pipeline, "sink": self._scope.sink, "id": now.id, "epoch": epoch + 1,
                "host": now.host, "process": now.process, "started": now.started_ms,
                "superseded": self._sql.pack(superseded),
            },
        )  # fmt: skip
        self._forget_incarnations(connection)
        state = self._state(connection)
        open_memory(self._sql, connection, self._scope, fresh=state.last is None)
        return state

    def _one_transaction(self, write: Callable[[C], None], there: Callable[[C], bool]) -> Outcome[None]:
        """Run `write` under this claim, unless `there` says that its work is in. Never runs it twice (P19)."""
        try:
            connection = self._open()
            self._begin(connection)
            if there(connection):
                self._undo(connection)
                return Ok(None)
            self._check_claim(connection)
            write(connection)
        except DeliveredError as error:
            self.close()
            return Failed(str(error))
        except self._database.errors() as error:
            # COMMIT was not sent: what loses its connection is rolled back.
            self.close()
            return Failed(str(self._database.explained(error)))
        except BaseException:
            self.close()
            raise
        try:
            connection.execute("COMMIT")  # THE line that decides a batch in this sink
        except self._database.errors() as error:
            self.close()
            return self._after_failed_commit(error, there)
        return Ok(None)

    def _undo(self, connection: C) -> None:
        """End a transaction that wrote nothing. What goes wrong is no answer to anything."""
        try:
            connection.execute("ROLLBACK")
        except self._database.errors():
            self.close()

    def _check_claim(self, connection: C) -> None:
        held = self._owner(connection, hold=True)
        mine = self._claimed
        if held is None or mine is None or (held[0].id, held[1]) != mine:
            raise self._fenced(mine[0] if mine else "none", held[0] if held else None)

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} {self._database.where} any more; it belongs to {other}, or to a later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )

    def _state(self, connection: C) -> LedgerState:
        held = self._owner(connection)
        last = self._one(connection, f"SELECT decision FROM {{decision}} WHERE {_SCOPE} ORDER BY batch DESC LIMIT 1")
        begun = self._one(connection, f"SELECT batch, offsets FROM {{begun}} WHERE {_SCOPE}")
        newest = f"(SELECT max(batch) FROM {{decision}} AS n WHERE {_SAME})"
        earlier = connection.execute(
            self._sql(
                f"SELECT decision FROM {{decision}} AS d WHERE {_OTHER} AND batch = {newest} "
                f"ORDER BY {self._sql.written['decision']} DESC"
            ),
            self._key,
        ).fetchall()
        earlier_begun = connection.execute(
            self._sql(
                f"SELECT incarnation, batch, offsets FROM {{begun}} WHERE {_OTHER} AND incarnation NOT IN "
                f"(SELECT incarnation FROM {{decision}} WHERE {_SINK}) ORDER BY {self._sql.written['begun']} DESC"
            ),
            self._key,
        ).fetchall()
        return LedgerState(
            owner=held[0] if held and held[0].id else None,
            last=Decision.from_json(last[0]) if last else None,
            begun=Begun(begun[0], begun[1]) if begun else None,
            earlier=tuple(Decision.from_json(row[0]) for row in earlier),
            earlier_begun=tuple((i, Begun(batch, offsets)) for i, batch, offsets in earlier_begun),
            epoch=held[1] if held else 0,
            archived=self._archived(connection) if last is None else None,
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

    def _decision(self, connection: C, batch: int) -> str | None:
        row = self._one(connection, f"SELECT decision FROM {{decision}} WHERE {_SCOPE} AND batch = :batch", batch=batch)
        return None if row is None else str(row[0])

    def _forget_incarnations(self, connection: C) -> None:
        """Of other incarnations keep the newest decision; of very old ones the archived entry.

        What a statement deletes from, it reads in a query of its own below: MySQL takes it no other way.
        """
        newest = f"SELECT incarnation AS i, max(batch) AS b FROM {{decision}} WHERE {_OTHER} GROUP BY incarnation"
        where = f"{_OTHER} AND (incarnation, batch) NOT IN (SELECT i, b FROM ({newest}) AS newest)"
        self._sql.delete(connection, "decision", where, self._key)
        values = {**self._key, "kept": LEDGER_INCARNATIONS}
        for table, written in self._sql.written.items():
            kept = f"SELECT incarnation FROM {{{table}}} WHERE {_OTHER} ORDER BY {written} DESC LIMIT :kept"
            where = f"{_OTHER} AND incarnation NOT IN (SELECT incarnation FROM ({kept}) AS kept)"
            text = table if table == "decision" else "NULL"
            old = connection.execute(self._sql(f"SELECT incarnation, {text} FROM {{{table}}} WHERE {where}"), values)
            for incarnation, decision in old.fetchall():
                self._archive(connection, incarnation, decision)
            self._sql.delete(connection, table, where, values)

    def _archive(self, connection: C, incarnation: str, decision: str | None) -> None:
        """A decision's entry takes the place of that of a batch that was only begun, never the other way round."""
        entry = Decision.from_json(decision).archived if decision is not None else Archived.begun(incarnation)
        statement = (
            "INSERT INTO {archive} (pipeline, sink, incarnation, entry) "
            "VALUES (:pipeline, :sink, :incarnation, :entry) "
            + self._sql.known("pipeline, sink, incarnation", "entry" if decision is not None else None)
        )
        connection.execute(self._sql(statement), {**self._key, "incarnation": incarnation, "entry": entry.encode()})

    def _archived(self, connection: C) -> Archived | None:
        if self._version(connection) < _ARCHIVE_VERSION:  # looked at by somebody who may not migrate it
            return None
        row = self._one(connection, f"SELECT entry FROM {{archive}} WHERE {_SCOPE}")
        return None if row is None else Archived.decode(bytes(row[0]))

    def _one(self, connection: Connection, statement: str, **values: Any) -> Any:
        return connection.execute(self._sql(statement), {**self._key, **values}).fetchone()
