"""A ledger in tables of a database: who owns it, what was started and decided, keys of a dedup.

`Records` are its rows in one open transaction, `SqlLedger` the transactions. A ledger next to a sink's table writes a
batch's rows and its decision in one (`DecidedTable`); one without a table holds the decisions of sinks that cannot.
What the databases do differently is data (`Dialect`), or how a `Database` begins, claims and ends a transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from delivered.contract.sink import KeyMemory
from delivered.kits.sql.database import CLAIM_WAIT_S, C, Connection, Database, Dialect, scope_values
from delivered.kits.sql.merge import fold_skipped
from delivered.ledger import Change, Head, Swap, not_next, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, Unreachable
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import CONNECT_TIMEOUT_S, KEY_MEMORIES_KEPT, LEDGER_HISTORY_BATCHES
from delivered.model.patience import left_s, query_patience_s
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Archived, Decision, Failed, LedgerState, Ok, Outcome, Owner, Prepared, Started, Unknown

T = TypeVar("T")
_SINK = "pipeline = :pipeline AND sink = :sink"
_SCOPE = f"{_SINK} AND incarnation = :incarnation"
_OTHER = f"{_SINK} AND incarnation <> :incarnation"
_SAME = "n.pipeline = d.pipeline AND n.sink = d.sink AND n.incarnation = d.incarnation"
_ARCHIVE_VERSION = 3
"""Version of the ledger's tables that introduced the archive."""

_SEAL_VERSION = 5
"""And of the seals of audits."""

log = logging.getLogger(__name__)


class DecidedTable(Protocol):
    """The sink's table, written by the decision's transaction. Raises the client's errors."""

    @property
    def conditional(self) -> bool:
        """Whether the table decides which rows are written."""

    def move(self, connection: Any, scope: Scope, decision: Decision, staged: Sequence[Prepared]) -> None:
        """Move the staged rows of these participants to the table.

        Reaches the crash points of `commit.apply` once per participant.
        """

    def swap(self, connection: Any, swap: Swap) -> None:
        """Rename two tables. Only called if the ledger is a `SwapsTables`."""

    def has_swapped(self, swap: Swap) -> bool:
        """See `delivered.ledger.SwapsTables`."""

    def cannot_swap(self) -> str | None:
        """See `delivered.ledger.SwapsTables`."""


@dataclass(frozen=True)
class Records:
    """The rows of one ledger, in the open transaction of a connection. Raises the client's errors."""

    connection: Connection
    sql: Dialect
    scope: Scope
    version: int = _SEAL_VERSION
    """Of the tables; a process that only reads does not migrate them."""

    def run(self, statement: str, **values: Any) -> Any:
        return self.connection.execute(self.sql(statement), {**scope_values(self.scope), **values})

    def delete(self, table: str, where: str, **values: Any) -> None:
        self.sql.delete(self.connection, table, where, {**scope_values(self.scope), **values})

    def head(self) -> Head:
        """Lock the owner's row until the transaction ends, then read the head."""
        owner, epoch = self.owner(hold=True)
        (batch,) = self.run(f"SELECT max(batch) FROM {{decision}} WHERE {_SCOPE}").fetchone()
        return Head(owner, epoch, batch, self.last, self.started)

    def owner(self, *, hold: bool = False) -> tuple[Owner | None, int]:
        """The owner, if any, and the epoch of the last claim."""
        columns = "id, host, process, started_ms, superseded, epoch"
        row = self.run(f"SELECT {columns} FROM {{owner}} WHERE {_SINK}{self.sql.hold * hold}").fetchone()
        if row is None:
            return None, 0
        name, host, process, started_ms, superseded, epoch = row
        owner = Owner(name, host, process, started_ms, tuple(self.sql.unpack(superseded)))
        return owner if name else None, epoch

    def signature(self) -> str:
        """Nonce of the session that last held the owner's row; see `Dialect.sign`."""
        row = self.run(f"SELECT session FROM {{owner}} WHERE {_SINK}").fetchone()
        return str(row[0]) if row else ""

    def last(self) -> Decision | None:
        row = self.run(f"SELECT decision FROM {{decision}} WHERE {_SCOPE} ORDER BY batch DESC LIMIT 1").fetchone()
        return Decision.from_json(row[0]) if row else None

    def started(self) -> Started | None:
        row = self.run(f"SELECT batch, offsets FROM {{started}} WHERE {_SCOPE}").fetchone()
        return Started(row[0], row[1]) if row else None

    def holds(self, change: Change) -> bool:
        """Whether this change was written."""
        if change.decision is None:
            return self.started() == change.started
        decision = change.decision
        row = self.run(f"SELECT decision FROM {{decision}} WHERE {_SCOPE} AND batch = :batch", batch=decision.batch)
        return (row.fetchone() or (None,))[0] == decision.to_json()

    def history(self) -> list[str]:
        rows = self.run(f"SELECT decision FROM {{decision}} WHERE {_SCOPE} ORDER BY batch").fetchall()
        return [text for (text,) in rows]

    def state(self) -> LedgerState:
        owner, epoch = self.owner()
        newest = f"(SELECT max(batch) FROM {{decision}} AS n WHERE {_SAME})"
        order = self.sql.written
        decided = self.run(
            f"SELECT decision FROM {{decision}} AS d WHERE {_SINK} AND batch = {newest} ORDER BY {order['decision']}"
        ).fetchall()
        started = self.run(
            f"SELECT incarnation, batch, offsets FROM {{started}} WHERE {_SINK} ORDER BY {order['started']}"
        ).fetchall()
        return state_of(
            self.scope,
            owner,
            epoch,
            [Decision.from_json(text) for (text,) in decided],
            {i: Started(batch, offsets) for i, batch, offsets in started},
            lambda _: self._archived(),
        )

    def _archived(self) -> Archived | None:
        if self.version < _ARCHIVE_VERSION:
            return None
        row = self.run(f"SELECT entry FROM {{archive}} WHERE {_SCOPE}").fetchone()
        return None if row is None else Archived.decode(bytes(row[0]))

    def others(self) -> list[OtherLedger]:
        other = "NOT (pipeline = :pipeline AND sink = :sink)"
        same = " UNION ".join(
            f"SELECT pipeline, sink FROM {{{table}}} WHERE incarnation = :incarnation AND {other}"
            for table in ("decision", "started")
        )
        holders = {tuple(row) for row in self.run(same).fetchall()}
        owners = {tuple(row) for row in self.run(f"SELECT pipeline, sink FROM {{owner}} WHERE {other}").fetchall()}
        return named_first(OtherLedger(p, s, (p, s) in holders) for p, s in owners | holders)

    def seals(self, sink: str, first: int, *, newest: bool = False) -> list[str]:
        if self.version < _SEAL_VERSION:
            return []
        order = "number DESC LIMIT 1" if newest else "number"
        rows = self.run(
            "SELECT seal FROM {seal} WHERE pipeline = :pipeline AND sink = :sealed AND number >= :first "
            f"ORDER BY {order}",
            sealed=sink,
            first=first,
        )
        return [text for (text,) in rows.fetchall()]

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """Inserts first: it waits for another audit's transaction, and what is read then includes that one's seal."""
        self.run(
            "INSERT INTO {seal} (pipeline, sink, number, seal) VALUES (:pipeline, :sealed, :number, :seal) "
            + self.sql.known("pipeline, sink, number", None),
            sealed=sink,
            number=number,
            seal=text,
        )
        own = "FROM {seal} WHERE pipeline = :pipeline AND sink = :sealed AND number"
        (there,) = self.run(f"SELECT seal {own} = :number", sealed=sink, number=number).fetchone()
        (last,) = self.run(f"SELECT max(number) {own} <> :number", sealed=sink, number=number).fetchone()
        last = -1 if last is None else last
        if there != text:
            return not_next(sink, number, max(number, last))
        return Ok(None) if last >= number - 1 else not_next(sink, number, last)

    def claim(self, successor: Callable[[Head], Owner]) -> int:
        """Write the next owner; return the epoch of its claim. Forgets what is outdated."""
        self.run(
            "INSERT INTO {owner} (pipeline, sink, id, epoch, host, process, started_ms, superseded) "
            "VALUES (:pipeline, :sink, '', 0, '', 0, 0, :superseded) " + self.sql.known("pipeline, sink", None),
            superseded=self.sql.pack([]),
        )
        head = self.head()
        owner = successor(head)
        self.run(
            "UPDATE {owner} SET id = :id, epoch = :epoch, host = :host, process = :process, started_ms = :started, "
            f"superseded = :superseded WHERE {_SINK}",
            id=owner.id,
            epoch=head.epoch + 1,
            host=owner.host,
            process=owner.process,
            started=owner.started_ms,
            superseded=self.sql.pack(owner.superseded),
        )
        self._forget_incarnations()
        open_memory(self.sql, self.connection, self.scope, fresh=head.batch is None)
        return head.epoch + 1

    def start(self, started: Started) -> None:
        # No UPDATE: the column that identifies the newest row is set on insert.
        self.delete("started", _SCOPE)
        column, value = (f", {self.sql.written['started']}", f", {self.sql.now}") if self.sql.now else ("", "")
        self.run(
            f"INSERT INTO {{started}} (pipeline, sink, incarnation, batch, offsets{column}) "
            f"VALUES (:pipeline, :sink, :incarnation, :batch, :offsets{value})",
            batch=started.batch,
            offsets=started.offsets,
        )

    def record(self, batch: int, decision: str, *, conditional: bool = False) -> None:
        """Write a decision, or its next revision; delete those beyond the history, and the markers of earlier batches,
        all of which are visible."""
        self.run(
            "INSERT INTO {decision} (pipeline, sink, incarnation, batch, decision) "
            "VALUES (:pipeline, :sink, :incarnation, :batch, :decision) "
            + self.sql.known("pipeline, sink, incarnation, batch", "decision"),
            batch=batch,
            decision=decision,
        )
        if conditional:
            fold_skipped(self.connection, self.sql, self.scope, batch)
        self.delete("decision", f"{_SCOPE} AND batch <= :horizon", horizon=batch - LEDGER_HISTORY_BATCHES)
        if self.sql.marks:
            self.delete("marker", f"{_SCOPE} AND batch < :batch", batch=batch)

    def _forget_incarnations(self) -> None:
        """Keep only the newest decision of other incarnations; of very old ones, the archived entry.

        A DELETE reads its own table in a nested subquery: MySQL accepts no other form.
        """
        newest = f"SELECT incarnation AS i, max(batch) AS b FROM {{decision}} WHERE {_OTHER} GROUP BY incarnation"
        self.delete("decision", f"{_OTHER} AND (incarnation, batch) NOT IN (SELECT i, b FROM ({newest}) AS newest)")
        self.delete("skipped", _OTHER)  # the counts of other incarnations are never read
        old = outdated(self.state())
        for incarnation, entry in zip(old.incarnations, old.entries, strict=True):
            # A decision's entry replaces that of a started batch, never the reverse.
            self.run(
                "INSERT INTO {archive} (pipeline, sink, incarnation, entry) "
                "VALUES (:pipeline, :sink, :incarnation, :entry) "
                + self.sql.known("pipeline, sink, incarnation", "entry" if entry.decided else None),
                incarnation=incarnation,
                entry=entry.encode(),
            )
            for table in ("decision", "started"):
                self.delete(table, _SCOPE, incarnation=incarnation)
        if self.sql.marks:
            decided = f"SELECT incarnation, batch FROM {{decision}} WHERE {_SINK}"
            self.delete("marker", f"{_OTHER} AND (incarnation, batch) NOT IN ({decided})")


class SqlLedger(Generic[C]):
    """See `delivered.ledger.Store`.

    Args:
        table: whose rows the decisions make visible; None: those of other systems, which commit by themselves.
        role: shown in the server's list of sessions; by it a claim finds the session of a driver that hangs.
    """

    def __init__(
        self, database: Database[C], scope: Scope, table: DecidedTable | None = None, role: str = "ledger"
    ) -> None:
        self._database = database
        self._sql = database.dialect
        self._scope = scope
        self._table = table
        self._role = role
        self._connection: C | None = None

    @property
    def where(self) -> str:
        return self._database.where

    def read(self) -> LedgerState:
        return self._ask(Records.state, LedgerState())

    def peek(self) -> LedgerState:
        return self._peek(Records.state, LedgerState())

    def history(self) -> Iterator[Decision]:
        for text in self._peek(Records.history, list[str]()):
            yield Decision.from_json(text)

    def others(self) -> list[OtherLedger]:
        return self._ask(Records.others, [])

    def last_seal(self, sink: str) -> str | None:
        texts = self._peek(lambda records: records.seals(sink, 0, newest=True), list[str]())
        return texts[0] if texts else None

    def seals(self, sink: str, first: int = 0) -> list[str]:
        return self._peek(lambda records: records.seals(sink, first), list[str]())

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """One INSERT in a session of its own, which takes no lock that a decision needs, and which no claim ends.

        Sent again after an outage: if the first one was committed after all, the same text is found.
        """
        sent = False

        def once() -> Outcome[None]:
            nonlocal sent
            connection = self._database.connect("seal")
            try:
                self._database.migrate(connection)
                self._database.begin(connection)
                outcome = Records(connection, self._sql, self._scope).add_seal(sink, number, text)
                if isinstance(outcome, Ok):
                    sent = True
                    connection.execute("COMMIT")
                return outcome
            except self._database.errors() as error:
                raise self._database.explained(error) from error
            finally:
                self._database.discard(connection)

        try:
            return self._database.waiting(once)
        except DeliveredError as error:
            if not sent:
                raise
            return Unknown(str(error))

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Locks the owner's row, which a decision holds from start to COMMIT: when this returns, a decision in
        flight has completed or was terminated, and any later one finds another epoch."""

        def once() -> int:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while True:
                try:
                    connection = self._open()
                    self._database.migrate(connection)
                    with self._database.claiming(connection):
                        return self._signed(connection).claim(successor)
                except self._database.errors() as error:
                    self.close()
                    if not self._database.is_locked(error):
                        raise self._database.explained(error) from error
                    waits_for = self._end_holders()
                    if waits_for and left_s(query_patience_s()) > CLAIM_WAIT_S:
                        log.warning("the ledger's row is held by a transaction that waits for %s", waits_for)
                    elif time.monotonic() > deadline:
                        raise self._locked(waits_for) from error

        # After an unknown outcome of its COMMIT, too: this owner may claim any number of times.
        return Ok(self._database.waiting(once, kept=True))

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
            self._database.begin(connection)
            records = self._signed(connection)
            head = records.head()
            change = rule(head)
            if change is not None:
                self._put(connection, records, change, head.epoch)
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
        try:
            connection.execute("COMMIT")  # THE line that decides a batch in this sink
        except self._database.errors() as error:
            self.close()
            reason = str(self._database.explained(error))
            if self._database.may_commit(error):
                return Unknown(reason)
            # The transaction has ended, so the tables show its final outcome.
            try:
                return Ok(None) if self._ask(lambda after: after.holds(written), False) else Failed(reason)
            except DeliveredError as second:
                return Unknown(f"{reason}; then {second}")
        return Ok(None)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._database.discard(connection)

    def _put(self, connection: C, records: Records, change: Change, epoch: int) -> None:
        if change.started is not None:
            records.start(change.started)
        if (change.swap or change.move) and self._table is None:
            raise InvariantBroken("NO_TARGET.LEDGER", where=self.where)
        if change.swap is not None and self._table is not None:
            reach(StepId.COMMIT_APPLY, Moment.BEFORE)
            self._table.swap(connection, change.swap)
            if change.swap.retries is not None:
                self._check_retries(connection, *change.swap.retries)
            reach(StepId.COMMIT_APPLY, Moment.AFTER)
        if change.decision is not None:
            if self._table is not None:
                self._table.move(connection, self._scope, change.decision, change.move)
            activate_keys(self._sql, connection, change.decision, epoch)
            conditional = self._table is not None and self._table.conditional
            records.record(change.decision.batch, change.decision.to_json(), conditional=conditional)

    def _check_retries(self, connection: C, retries: Scope, batch: int) -> None:
        """Called once the old table is locked: a retry's rows are in it, and its decision visible here, or it will find
        the new table.

        Raises:
            Refused: dead letters were retried after this batch: their rows would stay behind in the old table.
        """
        last = Records(connection, self._sql, retries).last()
        if last is not None and last.batch > batch:
            raise Refused("REBUILD_RETRIED", pipeline=self._scope.pipeline)

    def _undo(self, connection: C) -> None:
        """Roll back a transaction that wrote nothing; ignores errors."""
        try:
            connection.execute("ROLLBACK")
        except self._database.errors():
            self.close()

    def _open(self) -> C:
        """The connection of this ledger, outside any transaction."""
        if self._connection is not None and not self._database.idle(self._connection):
            self.close()
        if self._connection is None:
            self._connection = self._database.connect(self._role)
        return self._connection

    def _end_holders(self) -> str:
        """See `Database.end_holders`; never raises."""
        with contextlib.suppress(DeliveredError, self._database.errors()):
            connection = self._open()
            records = Records(connection, self._sql, self._scope)
            return self._database.end_holders(connection, self._role, records.signature)
        return ""

    def _signed(self, connection: C) -> Records:
        """The records, in a read-write transaction. Where claims cannot see which session holds the owner's row, it is
        locked and signed."""
        records = Records(connection, self._sql, self._scope)
        if self._sql.sign:
            records.run(self._sql.sign, session=connection.nonce)  # type: ignore[attr-defined]
        return records

    def _ask(self, question: Callable[[Records], T], nothing: T) -> T:
        """Run a query on a consistent snapshot; `nothing`: there is no ledger yet."""

        def once() -> T:
            if not self._database.exists():
                return nothing
            try:
                return self._on_snapshot(self._open(), question, nothing)
            except self._database.errors() as error:
                self.close()
                raise self._database.explained(error) from error

        return self._database.waiting(once, kept=True)

    def _peek(self, question: Callable[[Records], T], nothing: T) -> T:
        """As `_ask`, on a connection of its own, for a process that may not be the owner. A standby will do."""

        def once() -> T:
            if not self._database.exists():
                return nothing
            return self._database.ask(lambda connection: self._on_snapshot(connection, question, nothing))

        return self._database.waiting(once)

    def _on_snapshot(self, connection: C, question: Callable[[Records], T], nothing: T) -> T:
        for statement in self._sql.snapshot:
            connection.execute(statement)
        version = self._database.version(connection)
        answer = question(Records(connection, self._sql, self._scope, version)) if version else nothing
        connection.execute("COMMIT")
        return answer

    def _locked(self, waits_for: str) -> DeliveredError:
        held = (
            f"Another session has held the ledger's row of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} {self.where} for more than {CONNECT_TIMEOUT_S:.0f} s, and "
        )
        if waits_for:
            return Unreachable("LEDGER_LOCKED.STANDBY", session=held, standby=waits_for)
        return Unreachable("LEDGER_LOCKED.SESSION", session=held, see_holders=self._sql.see_holders)


class SwappingLedger(SqlLedger[C]):
    """See `delivered.ledger.SwapsTables`: a database that renames tables in a transaction."""

    def __init__(self, database: Database[C], scope: Scope, table: DecidedTable, role: str = "ledger") -> None:
        super().__init__(database, scope, table, role)
        self.has_swapped = table.has_swapped
        self.cannot_swap = table.cannot_swap


# The keys of a pipeline's dedup, in tables next to the ledger.
#
#     memory    one row per checkpoint of a pipeline and sink: its last batch, and the newest time before that
#     admitted  keys that tasks admitted; not active yet, and valid only under the claim they were admitted under
#     seen      keys of decided batches
#
# A decision's transaction moves the batch's keys from `admitted` to `seen`, and deletes keys that expired by the newest
# time of the batches *before* it. So a batch rerun after its decision (a prepared transaction was lost) gets the same
# answers. Values are inlined in the SQL, because clients limit parameters; all are generated numbers and hexadecimal
# digits.

CHUNK = 2_000
"""Keys per statement."""


def memory_number(scope: Scope) -> int:
    """Short id of a checkpoint, stored in each of its rows."""
    text = f"{scope.pipeline}\0{scope.sink}\0{scope.incarnation}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def open_memory(sql: Dialect, connection: Connection, scope: Scope, *, fresh: bool) -> None:
    """In a claim's transaction: void what earlier claims admitted, and delete the memories of old checkpoints.

    Args:
        fresh: this checkpoint has no decided batch, so no memory can be missing.
    """
    key = scope_values(scope)
    number = memory_number(scope)
    sql.forget(connection, "admitted", "PRIMARY", f"number = {number}")
    if fresh:
        # Hosts' clocks differ: never before an earlier memory. The owner's row is locked.
        (newest,) = connection.execute(sql(f"SELECT max(made_ms) FROM {{memory}} WHERE {_SINK}"), key).fetchone()
        made_ms = max(int(time.time() * 1000), (newest or 0) + 1)
        connection.execute(
            sql(
                "INSERT INTO {memory} (pipeline, sink, incarnation, number, batch, newest_us, former_us, made_ms) "
                f"VALUES (:pipeline, :sink, :incarnation, {number}, -1, {_NEVER}, {_NEVER}, {made_ms}) "
                + sql.known("pipeline, sink, incarnation", None)
            ),
            key,
        )
    others = connection.execute(
        sql(f"SELECT number FROM {{memory}} WHERE {_SINK} AND incarnation <> :incarnation ORDER BY made_ms DESC"), key
    ).fetchall()
    for (old,) in others[KEY_MEMORIES_KEPT:]:
        for table in ("admitted", "seen"):
            sql.forget(connection, table, "PRIMARY", f"number = {int(old)}")
        sql.forget(connection, "memory", "of_number", f"number = {int(old)}")


_NEVER = -(1 << 62)
"""Before every time."""


def activate_keys(sql: Dialect, connection: Connection, decision: Decision, epoch: int) -> None:
    """In a decision's transaction, before its COMMIT: activate the keys of its batch.

    Does nothing without a dedup, or for a later revision of a batch, whose keys are active already.
    """
    number = memory_number(decision.scope)
    row = connection.execute(sql(f"SELECT batch, newest_us FROM {{memory}} WHERE number = {number}"), {}).fetchone()
    if row is None or int(row[0]) >= decision.batch:
        return
    claim = f"number = {number} AND epoch = {epoch}"
    own = f"{claim} AND batch = {decision.batch}"
    count, last = connection.execute(sql(f"SELECT count(*), max(at_us) FROM {{admitted}} WHERE {own}"), {}).fetchone()
    newest = former = int(row[1])
    if not count and former == _NEVER:
        return
    reach(StepId.DEDUP_KEEP, Moment.BEFORE, batch=decision.batch)
    sql.forget(connection, "seen", "of_time", f"number = {number} AND until_us < {former}")
    if count:
        connection.execute(
            sql(
                "INSERT INTO {seen} (number, hash, until_us, batch) "
                f"SELECT number, hash, until_us, batch FROM {{admitted}} WHERE {own} "
                + sql.known("number, hash, until_us", "batch")
            ),
            {},
        )
        # A single time in the future must not expire all other keys. The driver's clock only bounds it: set back, it
        # keeps keys for longer.
        newest = max(former, min(int(last), decision.decided_at_ms * 1_000))
    sql.forget(connection, "admitted", "PRIMARY", f"{claim} AND batch <= {decision.batch}")
    connection.execute(
        sql(
            f"UPDATE {{memory}} SET batch = {decision.batch}, former_us = {former}, newest_us = {newest} "
            f"WHERE number = {number}"
        ),
        {},
    )
    reach(StepId.DEDUP_KEEP, Moment.AFTER, batch=decision.batch)


class KeyTable(KeyMemory, Generic[C]):
    """See `delivered.contract.sink.KeyMemory`."""

    def __init__(self, database: Database[C], scope: Scope) -> None:
        self._database = database
        self._sql = database.dialect
        self._scope = scope
        self._number = memory_number(scope)
        self._epoch: int | None = None

    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = self._database.waiting(lambda: self._known(batch, keys), kept=True)
        return found

    def _known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        with self._database.borrow(writes=False) as connection:
            newest = self._opened(connection, batch)
            for part in _chunks(list(keys)):
                hashes = ", ".join(self._sql.hash(k) for k in part)
                rows = connection.execute(
                    self._sql(
                        f"SELECT hash, until_us FROM {{seen}} WHERE number = {self._number} AND hash IN ({hashes}) "
                        f"AND batch < {batch} AND until_us >= {newest}"
                    ),
                    {},
                ).fetchall()
                for key, until in rows:
                    found.setdefault(bytes(key), []).append(int(until))
        return found

    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """One transaction per statement: a hanging task holds no lock that a claim or decision needs."""
        for part in _chunks(list(zip(keys, times, untils, strict=True))):
            rows = ", ".join(
                f"({self._number}, {self._epoch}, {batch}, {self._sql.hash(k)}, {int(t)}, {int(u)})" for k, t, u in part
            )
            statement = self._sql(
                f"INSERT INTO {{admitted}} (number, epoch, batch, hash, at_us, until_us) VALUES {rows} "
                + self._sql.known("number, epoch, batch, hash, at_us", None)
            )
            self._database.waiting(partial(self._insert, statement), kept=True)

    def _insert(self, statement: str) -> None:
        """Idempotent: keys that are there stay."""
        with self._database.borrow(writes=True) as connection:
            connection.execute(statement, {})

    def close(self) -> None:
        """Connections are released after each query."""

    def _opened(self, connection: C, batch: int) -> int:
        """Read the current claim; return the newest time of the earlier batches."""
        row = connection.execute(
            self._sql(
                "SELECT m.batch, m.newest_us, m.former_us, o.epoch FROM {memory} AS m JOIN {owner} AS o "
                f"ON o.pipeline = m.pipeline AND o.sink = m.sink WHERE m.number = {self._number}"
            ),
            {},
        ).fetchone()
        if row is None:
            raise InvariantBroken("DEDUP_MEMORY_GONE", batch=batch, scope=self._scope)
        at, newest, former, epoch = (int(v) for v in row)
        self._epoch = epoch
        return former if at >= batch else newest


def _chunks(items: list[Any]) -> Iterator[list[Any]]:
    for at in range(0, len(items), CHUNK):
        yield items[at : at + CHUNK]
