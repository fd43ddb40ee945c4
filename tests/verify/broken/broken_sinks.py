"""Sinks that wrongly claim exactly_once, each broken in one way, and a correct one for comparison.

Found through their entry points when this folder is on PYTHONPATH, as any connector that is not ours would be. All
write to a table (key, value) of a SQLite file, or to what `broken_targets` knows; the ledger is in a SQLite file.
"""

from __future__ import annotations

import functools
import operator
import pickle
import sqlite3
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.sqlite import SqliteOptions, SqliteSink
from delivered.contract.connector import Connector, Factory
from delivered.contract.sink import Committer
from delivered.contract.sink import Writer as ContractWriter
from delivered.ledger import Change, Head, Ledgers
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import OtherLedger, Scope, Work
from delivered.model.work import Decision, Handle, LedgerState, Ok, Outcome, Owner, Prepared, Promise

Put = Callable[[Sequence["Row"]], None]
Row = tuple[bytes | None, bytes | None]


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("CREATE TABLE IF NOT EXISTS effects (key BLOB, value BLOB)")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS ledger (incarnation TEXT, batch INTEGER, decision TEXT, epoch INTEGER)"
    )
    connection.execute("CREATE TABLE IF NOT EXISTS owner (id TEXT, epoch INTEGER)")
    return connection


def insert(connection: sqlite3.Connection, rows: Sequence[Row], replace: bool = False) -> None:
    for key, value in rows if replace else ():
        connection.execute("DELETE FROM effects WHERE key = ?", (key,))
        connection.execute("INSERT INTO effects VALUES (?, ?)", (key, value))
    if replace:
        return
    connection.executemany("INSERT INTO effects VALUES (?, ?)", rows)


@dataclass(frozen=True)
class StagedFile(Handle):
    file: str


class Writer(ContractWriter):
    """Keeps rows in a file next to the table until the batch is decided."""

    def __init__(self, path: str, at_once: bool, replace: bool) -> None:
        self._path, self._at_once, self._replace = path, at_once, replace
        self._rows: list[Row] = []

    def stage(self, batch: pa.RecordBatch) -> None:
        rows = list(zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True))
        if self._at_once:
            with closing(connect(self._path)) as connection:
                insert(connection, rows, self._replace)
        else:
            self._rows += rows

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        if self._at_once:
            return Promise()
        file = f"{self._path}.staged-{uuid.uuid4().hex}"
        Path(file).write_bytes(pickle.dumps(self._rows))
        return Promise(StagedFile(file))

    def abort(self) -> None:
        self._rows = []


class Anybody(str):
    """Equals every owner."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class Store:
    """Shows the rules of the ledger what they want to see: nobody is fenced, and no batch was decided since it was last
    read."""

    where = "in the table's file"

    def __init__(self, sink: BrokenSink, scope: Scope) -> None:
        self._sink, self._scope = sink, scope
        self._seen = LedgerState()

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        owner = successor(Head(None, 0, None, lambda: None, lambda: None))
        with closing(connect(self._sink.options.path)) as connection:
            (epoch,) = connection.execute("SELECT ifnull(max(epoch), 0) FROM owner").fetchone()
            connection.execute("INSERT INTO owner VALUES (?, ?)", (owner.id, epoch + 1))
        return Ok(epoch + 1)

    def read(self) -> LedgerState:
        """It is owned by whoever asks."""
        state = self.peek()
        self._seen = replace(state, owner=Owner(Anybody()))
        return self._seen

    def peek(self) -> LedgerState:
        with closing(connect(self._sink.options.path)) as connection:
            return self._state(connection)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        seen, last = self._seen, self._seen.last
        change = rule(Head(seen.owner, seen.epoch, last.batch if last else None, lambda: last, lambda: None))
        if change is not None and change.decision is not None:
            self._decide(change.decision)
        return Ok(None)

    def _decide(self, decision: Decision) -> None:
        with closing(connect(self._sink.options.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            known = connection.execute("SELECT 1 FROM ledger WHERE batch = ?", (decision.batch,)).fetchone()
            # A batch of this number was written before: by this checkpoint, or by another one, who cares.
            if not (self._sink.flaw == "batch_number_alone" and known is not None):
                staged = [p for p in decision.participants if p.handle]
                if self._sink.put is not None:
                    self._sink.put([r for p in staged for r in pickle.loads(Path(p.handle["file"]).read_bytes())])
                for prepared in staged if self._sink.put is None else ():
                    self._add(connection, prepared)
            connection.execute(
                "INSERT INTO ledger SELECT ?, ?, ?, ifnull(max(epoch), 0) FROM owner",
                (self._scope.incarnation, decision.batch, decision.to_json()),
            )
            connection.execute("COMMIT")

    def _add(self, connection: sqlite3.Connection, prepared: Prepared) -> None:
        rows: list[Row] = pickle.loads(Path(prepared.handle["file"]).read_bytes())
        insert(connection, rows, self._sink.options.write.upserts)
        if self._sink.flaw == "trusts_xor":
            # "Look whether it is in": a pair that was doubled cancels, so the check passes and adds it again.
            there = connection.execute("SELECT key, value FROM effects").fetchall()
            before, after = xor(there), xor([*there, *rows[:1], *rows[:1]])
            if before == after:
                insert(connection, [*rows[:1], *rows[:1]])

    def history(self) -> list[Decision]:
        return []

    def others(self) -> Sequence[OtherLedger]:
        return ()

    def close(self) -> None:
        pass

    def _state(self, connection: sqlite3.Connection) -> LedgerState:
        (epoch,) = connection.execute("SELECT ifnull(max(epoch), 0) FROM owner").fetchone()
        found = connection.execute("SELECT id FROM owner WHERE epoch = ?", (epoch,)).fetchone()
        state = LedgerState(owner=Owner(found[0]) if found else None, epoch=epoch)
        rows = connection.execute("SELECT incarnation, decision, epoch FROM ledger ORDER BY rowid DESC").fetchall()
        own = [(d, e) for i, d, e in rows if i == self._scope.incarnation]
        if self._sink.flaw == "forgets_batches" and own and own[0][1] < epoch:
            own = own[1:]  # what an earlier start decided last is not looked at: a replay of it is a new batch
        other = [d for i, d, _ in rows if i != self._scope.incarnation]
        if self._sink.flaw == "batch_number_alone":
            other = []
        last = Decision.from_json(own[0][0]) if own else None
        return replace(state, last=last, earlier=tuple(Decision.from_json(d) for d in other[:1]))


def xor(rows: Sequence[Row]) -> int:
    """How not to take a fingerprint."""
    return functools.reduce(operator.xor, (hash(r) for r in rows), 0)


class BrokenCommitter(Committer):
    def __init__(self, sink: BrokenSink) -> None:
        self._sink = sink

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        Path(prepared.handle["file"]).unlink(missing_ok=True)
        return Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        return True

    def abort(self, prepared: Prepared) -> Outcome[None]:
        Path(prepared.handle["file"]).unlink(missing_ok=True)
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        path = Path(self._sink.options.path)
        kept = {p.handle["file"] for p in keep if p.handle}
        # No ledger here asks who decides: what an older driver staged must be gone before it can.
        found = [f for f in path.parent.glob(f"{path.name}.staged-*") if str(f) not in kept]
        found = [] if self._sink.flaw == "fences_nobody" else found
        for file in found:
            if self._sink.flaw == "applies_undecided":
                with closing(connect(str(path))) as connection:
                    insert(connection, pickle.loads(file.read_bytes()))
            file.unlink()
        return Ok(len(found))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class BrokenSink(SqliteSink):
    """
    Attributes:
        put: adds rows to another table than the one in the SQLite file; None: to that one.
    """

    flaw: str = ""
    put: Put | None = None

    def preflight(self, guarantee: Guarantee) -> Sequence[Any]:
        return ()

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["key", "value"])

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Any:
        return Writer(self.options.path, self.flaw == "sends_at_once", self.options.write.upserts)

    def store(self, scope: Scope) -> Any:
        return Store(self, scope)

    def committer(self, scope: Scope) -> Any:
        return BrokenCommitter(self)


class SendsInEveryAttempt(Connector):
    """Its tasks take the number 0 for a first attempt, and ask nobody."""

    def sink(self, options: Mapping[str, str], ledgers: Ledgers | None = None) -> SqliteSink:
        from delivered import testing
        from delivered.engine.shard import write_shard

        # By the name under which tasks call it. Without `may_send` it goes by their numbers.
        if testing.write_shard is write_shard:
            testing.write_shard = lambda *args: write_shard(*args[:6])
        return SqliteSink(SqliteOptions.parse(options))


class BrokenConnector(Connector):
    def sink(self, options: Mapping[str, str], ledgers: Ledgers | None = None) -> BrokenSink:
        return BrokenSink(SqliteOptions.parse(options), "" if self.name == "honest" else self.name)


_SINKS = Factory(SqliteOptions, "broken_sinks:BrokenSink")
HONEST = BrokenConnector("honest", "", sinks=_SINKS)
SENDS_AT_ONCE = BrokenConnector("sends_at_once", "", sinks=_SINKS)
FORGETS_BATCHES = BrokenConnector("forgets_batches", "", sinks=_SINKS)
BATCH_NUMBER_ALONE = BrokenConnector("batch_number_alone", "", sinks=_SINKS)
APPLIES_UNDECIDED = BrokenConnector("applies_undecided", "", sinks=_SINKS)
FENCES_NOBODY = BrokenConnector("fences_nobody", "", sinks=_SINKS)
SENDS_IN_EVERY_ATTEMPT = SendsInEveryAttempt("sends_in_every_attempt", "", sinks=_SINKS)
TRUSTS_XOR = BrokenConnector("trusts_xor", "", sinks=_SINKS)
