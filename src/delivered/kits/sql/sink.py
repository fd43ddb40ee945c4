"""Bases of sinks that write to a table, a database, or a database server: their plan, their tasks' writers, what these
leave at a server until a batch is decided, and the committer that ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import re
import secrets
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa

from delivered.contract.sink import Committer, KeyMemory, OpenTransaction, SkippedRow, StoreSink, Writer
from delivered.contract.source import Finding
from delivered.kits.sql.database import (
    LEDGER_TABLES,
    C,
    Connection,
    Database,
    Definition,
    Dialect,
    Server,
    quoted,
    scope_values,
)
from delivered.kits.sql.merge import (
    SKIPPED_VERSION,
    Conditional,
    Merge,
    check_columns,
    check_count,
    check_emptied,
    check_merged,
    count_skipped,
    delete,
    describe_checks,
    fold_skipped,
    key_in_two_shards,
    read_dead_letters,
    upsert,
    without_key,
)
from delivered.kits.sql.table import (
    Mechanism,
    ServerOptions,
    TableOptions,
    Types,
    check_rows_lack,
    column_computed,
    numbered_schema,
    stored_columns,
)
from delivered.ledger import Swap
from delivered.model.capability import Commit, Guarantee, OnConflict, SinkCapability
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Target, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES, REDO_MEMORY_BYTES
from delivered.model.patience import query_patience_s
from delivered.model.rows import fitted
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Failed, Handle, Ok, Outcome, Prepared, Promise, Unknown

log = logging.getLogger("delivered.outage")
T = TypeVar("T")
HISTORY = f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept"


class TableSink(StoreSink):
    types: ClassVar[Types]

    def check_schema(self, schema: pa.Schema) -> None:
        self.types.check(schema)
        if self.options.write.upserts:
            check_columns(self.options.write, schema, self.types)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, self.types.canonical_schema(batch.schema))

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return without_key(self.options.write, batch, self.types.unstorable(batch))


class DatabaseSink(TableSink):
    options: TableOptions

    def check_schema(self, schema: pa.Schema) -> None:
        check_rows_lack(self.options, schema, folds_case=self.types.folds_case)
        self.types.check(numbered_schema(self.options, schema))
        super().check_schema(schema)

    @property
    def _database(self) -> Database[Any]:
        database: Database[Any] = self.parts["database"](self.options)
        return database

    def key_memory(self, scope: Scope) -> KeyMemory:
        from delivered.kits.sql.ledger import KeyTable

        return KeyTable(self._database, scope)

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        database = self._database
        if not database.exists():
            return None
        check: Callable[[pa.Schema], None] | None = database.ask(
            lambda connection: self.parts["table_check"](connection, self.options)
        )
        return check

    @property
    def _into(self) -> str:
        """Target and write mode, for the plan."""
        write = self.options.write
        text = f"table {self.options.table_text}"
        letters = ", broken constraints to dead letters" if write.on_constraint is OnConflict.DEAD_LETTER else ""
        if write.complete:
            return f"{text}, in place of all its rows"
        if write.insert:
            return f"{text}, by key ({write.keys_text}), a key that is there stays: {_ENDS[write.on_conflict]}{letters}"
        if write.upserts:
            text += f", by key ({write.keys_text})"
            text += f", newest {write.version} wins" if write.version else ", last row of a key wins"
            text += f", deletes where {write.delete}" if write.delete else ""
        if write.expected is not None:
            text = f"{text[: text.rindex(', newest')]}, only if its {write.version} is {write.expected}: "
            text += _ENDS[write.on_conflict]
        return text + letters

    @property
    def _assumed(self) -> tuple[str, ...]:
        """Assumptions of an upsert."""
        write = self.options.write
        if write.keeps_all:
            return (
                "rows of a key arrive in their order",
                *(("no other writer sets a version back",) if write.expected is not None else ()),
            )
        return ("rows of a key arrive in the order of its changes",) * (write.upserts and write.version is None)

    @property
    def _bounds(self) -> tuple[str, ...]:
        """Limits of upserts and conditional writes."""
        write = self.options.write
        limits = []
        if write.keeps_all or (write.upserts and write.version is None):
            limits.append("a batch that has rows of one key in several shards is refused")
        elif write.version is not None:
            limits.append("of two rows with the same key and version, either may win")
        if write.conditional:
            counts = LEDGER_TABLES["skipped"]
            limits.append(f"rows not written are counted in the ledger's table {counts}, dead letters in dead_letter")
        elif write.version is not None and write.delete is not None:
            limits.append("a delete discards the key's version: an older row of a later batch is inserted again")
        return tuple(limits)


_ENDS = {
    OnConflict.SKIP: "others are skipped and counted",
    OnConflict.DEAD_LETTER: "others to dead letters",
    OnConflict.FAIL: "others stop the query",
}


@dataclass(frozen=True)
class ServerTerms:
    """How a server carries out the steps of a plan.

    Attributes:
        load: how rows are written.
        transaction: kind of transaction that holds a shard's rows until the decision.
        prepare, commit: statements of such a transaction.
        moved: what remains to be done once rows and decision are committed in one transaction.
        holds: what prepared rows block.
        no_position: see `SinkCapability`.
    """

    load: str
    transaction: str
    prepare: str
    commit: str
    moved: str
    holds: str
    assumes: tuple[str, ...]
    limits: tuple[str, ...] = ()
    no_position: str = ""


class ServerSink(DatabaseSink):
    options: ServerOptions
    terms: ClassVar[ServerTerms]

    @property
    def _server(self) -> Server[Any]:
        server: Server[Any] = self.parts["database"](self.options)
        return server

    def capability(self) -> SinkCapability:
        terms, into = self.terms, self._into
        two_phase = self.options.mechanism is Mechanism.TWO_PHASE
        common: dict[str, Any] = {
            "system": self.parts.folder.rpartition(".")[2],
            "send": f"{terms.load} into {into}, one transaction per shard, visible when it commits",
            "remembers": True,
            "validates": True,
            "write": self.options.write,
            "adds_columns": self.options.merge_schema,
            "no_position": self.options.write.no_position
            or ("" if self.options.batch_column is not None else terms.no_position),
        }
        if not two_phase:
            return SinkCapability(
                commit=Commit.ONE_TRANSACTION,
                mechanism="ledger row in the sink's transaction",
                stage=f"{terms.load} into one staging table per shard",
                prepare="the staging table is committed, durable",
                decide=f"one transaction: rows of all shards into {into}, and the ledger row",
                apply=terms.moved,
                batch_atomic=True,
                assumes=(*terms.assumes, *self._assumed),
                transaction_limits=("rows are written twice: staged, then moved",),
                limits=(HISTORY, *self._bounds),
                **common,
            )
        return SinkCapability(
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"{terms.load} into {into}, {terms.transaction} per shard, invisible",
            prepare=f"a marker in the same transaction; {terms.prepare}",
            decide="one row in the ledger, by the driver that owns it",
            apply=f"{terms.commit} for each shard, from the driver",
            batch_atomic=False,
            assumes=(
                *terms.assumes,
                "no two shards of a batch write the same value of a unique key",
                *self._assumed,
            ),
            transaction_limits=(
                *terms.limits,
                "readers may see some shards of a batch a few ms before the others",
                f"prepared rows of a pipeline that never restarts {terms.holds}: `delivered transactions list` "
                "shows them and their age",
                *(
                    ("a row is judged by the table's content when its shard is prepared",)
                    * self.options.write.conditional
                ),
            ),
            limits=(HISTORY, *self._bounds),
            **common,
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        """Check the server. Refusing findings come last: nothing after them can be checked."""
        found: list[Finding] = []
        try:
            server = self._server  # imports the client library, if it is there
            connection = server.connect("preflight")
            try:
                with server.explaining():
                    found.extend(self.parts["look"](connection, self.options, guarantee))
            finally:
                server.discard(connection)
        except DeliveredError as error:
            found.append(Finding.refusal(error))
        return found

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        """A task's writer, which bears an outage of the server."""
        make = partial(self.parts["writer"], self.options, work, guarantee, schema)
        return RedoWriter(self._server, guarantee, make)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        server = self._server

        def once() -> pa.Array | None:
            with server.borrow() as connection:
                return self.parts["refused_rows"](connection, self.options, batch)

        return server.waiting(once, kept=True)

    def checked_target(self) -> Sequence[str]:
        server = self._server
        return describe_checks(self.options, server.ask(lambda connection: server.definition(connection, columns=True)))

    def ready_target(self, schema: pa.Schema) -> None:
        """See `delivered.contract.sink.Sink`: a table that is there must take every column. Tasks check the
        types, and create a table that is missing, with the first rows."""
        server = self._server
        found = server.waiting(lambda: server.ask(lambda connection: server.definition(connection, columns=True)))
        for name in numbered_schema(self.options, stored_columns(self.options.write, schema)).names:
            if name in found.computed:
                raise column_computed(self.options.table_text, name)

    def add_columns(self, schema: pa.Schema) -> None:
        if not self.options.merge_schema:
            return
        server = self._server

        def once() -> None:
            connection = server.connect("driver")
            try:
                with server.explaining():
                    server.migrate(connection)
                    self.parts["add_columns"](connection, self.options, self.types.plain_schema(schema))
            finally:
                server.discard(connection)

        server.waiting(once)


# A shard sent again in the same task, after its server was lost and came back.


class ShardWriter(Writer):
    @property
    @abstractmethod
    def possible(self) -> PreparedRows | None:
        """What `prepare` may have left at the server when it raised; None: nothing."""


class RedoWriter(Writer):
    """See `delivered.contract.sink.Writer`.

    Until a shard is prepared, losing its connection rolls it back, so it may be sent again. After an unknown outcome of
    `prepare`, too, under exactly_once: the driver never hears of the first handle, and no decision can name it; it is
    ended on the new connection. Under at_least_once that may repeat the shard; under at_most_once the task fails.

    Args:
        make: a new writer, which first ends what earlier ones may have left.
    """

    def __init__(
        self, server: Server[Any], guarantee: Guarantee, make: Callable[[Sequence[PreparedRows]], ShardWriter]
    ) -> None:
        self._server = server
        self._guarantee = guarantee
        self._make = make
        self._left: list[PreparedRows] = []
        self._writer = make(())
        self._rows = _Rows()

    def stage(self, batch: pa.RecordBatch) -> None:
        if query_patience_s():
            self._rows.add(batch)
        try:
            self._writer.stage(batch)
        except DeliveredError as error:
            self._again(error, lambda _: None)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        try:
            promise: Promise = self._writer.prepare(fingerprint)
        except DeliveredError as error:
            if self._guarantee is Guarantee.AT_MOST_ONCE:
                raise
            promise = self._again(error, lambda writer: writer.prepare(fingerprint))
        self._rows.close()
        return promise

    def abort(self) -> None:
        self._rows.close()
        self._writer.abort()

    def _again(self, error: DeliveredError, then: Callable[[ShardWriter], T]) -> T:
        if not query_patience_s() or not self._server.is_away(error):
            raise error

        def once() -> T:
            if (left := self._writer.possible) is not None:
                self._left.append(left)
            self._writer.abort()
            self._writer = self._make(self._left)
            for batch in self._rows:
                self._writer.stage(batch)
            return then(self._writer)

        log.warning("%s; sending the shard again once the server is back", error.message.rstrip("."))
        return self._server.waiting(once)


class _Rows:
    """The rows of a shard: in memory, and beyond `REDO_MEMORY_BYTES` in a temporary file."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._filed = 0
        self._file: Any = None
        self._out: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._bytes += batch.nbytes
        if self._bytes <= REDO_MEMORY_BYTES:
            self._held.append(batch)
            return
        if self._out is None:
            self._file = tempfile.NamedTemporaryFile(prefix="delivered-shard-")  # noqa: SIM115 - see `close`
            self._out = pa.ipc.new_stream(self._file, batch.schema)
        self._out.write_batch(batch)
        self._filed += 1

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """May be left early, and followed by more rows."""
        yield from self._held
        if self._filed:
            self._file.flush()
            with pa.OSFile(self._file.name) as file, pa.ipc.open_stream(file) as reader:
                for _ in range(self._filed):
                    yield reader.read_next_batch()

    def close(self) -> None:
        self._held, self._filed = [], 0
        if self._file is not None:
            self._file.close()
            self._file = self._out = None


# What is left at a server until a batch is decided: prepared transactions, and rows in staging tables.

_STAGING_BYTES = 8


@dataclass(frozen=True)
class Names:
    """Names of one pipeline and sink, in any incarnation.

    Attributes:
        check_bytes: length of a hash that distinguishes sinks whose joined names are equal (names may contain dots),
            and their ledgers.
    """

    scope: Scope
    ledger_schema: str
    check_bytes: int = 4

    @property
    def check(self) -> str:
        return self._digest(self.check_bytes)

    def _digest(self, size: int) -> str:
        text = f"{self.scope.pipeline}\0{self.scope.sink}\0{self.ledger_schema}"
        return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()

    @property
    def staging_prefix(self) -> str:
        """Prefix of the names of this sink's staging tables, and of no others."""
        # Longer than `check`, as nothing else in it distinguishes two sinks.
        return f"s_{self._digest(_STAGING_BYTES)}_"

    def staging(self, work: Work, nonce: str) -> str:
        """Name of the staging table of one attempt of a shard."""
        return f"{self.staging_prefix}{work.batch}_{work.shard}_{nonce}"

    def is_staging(self, name: str) -> bool:
        prefix = self.staging_prefix
        return name.startswith(prefix) and re.fullmatch(r"\d+_\d+_[0-9a-f]{16}", name[len(prefix) :]) is not None


def new_nonce() -> str:
    """16 unique characters, so that two attempts of a shard never share a name."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class PreparedRows(Handle):
    """A prepared shard at a server.

    Attributes:
        gid: of the prepared transaction that holds the rows; empty: they are in a staging table.
        staged: that table, in the ledger's schema. target: the table its rows move to; columns: theirs, for SQL.
        kept: mode upsert: number of winning rows; stored: names of the stored columns; index: on the keys (MySQL).
    """

    gid: str = ""
    staged: str = ""
    target: str = ""
    columns: str = ""
    kept: int = 0
    stored: tuple[str, ...] = ()
    index: str = ""


def open_transaction(gid: str, started_ms: int, options: ServerOptions) -> OpenTransaction:
    """A prepared transaction, as operators and audits see it."""
    return OpenTransaction(gid, "Prepared", PreparedRows(gid), (options.table_text,), started_ms)


def check_deletions(options: ServerOptions) -> Iterator[Finding]:
    """Refuse deletes under two_phase."""
    if options.write.delete is not None:
        yield Finding.build("DELETE_TWO_PHASE", refuses=True)


def write_marker(connection: Connection, dialect: Dialect, work: Work, gid: str, fingerprint: Fingerprint) -> None:
    """Write the marker in the rows' transaction, as evidence of its commit."""
    connection.execute(
        dialect(
            "INSERT INTO {marker} (pipeline, sink, incarnation, batch, shard, gid, fingerprint) "
            "VALUES (:pipeline, :sink, :incarnation, :batch, :shard, :gid, :fingerprint)"
        ),
        {
            **scope_values(work.scope),
            "batch": work.batch,
            "shard": work.shard,
            "gid": gid,
            "fingerprint": str(fingerprint),
        },
    )


def age_of(started_ms: int) -> float:
    """Seconds since then, by this machine's clock."""
    return max(0.0, time.time() - started_ms / 1000)


CONNECTIONS_MAX = 4
"""Participants are applied in parallel."""

_BATCHES = "pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation AND batch"


@dataclass(frozen=True)
class Shards(Generic[C]):
    """Prepared shards of one pipeline and sink at a server. Functions of a connection raise the client's errors.

    Attributes:
        id_prefix: of the ids of its transactions, of any incarnation.
        is_ours: whether an id belongs to one of them.
        open: every prepared transaction, oldest first.
        end: commit (True) or roll back a prepared transaction, by its id. May be called again: ids are never reused.
            Returns whether it existed; if not, nothing will ever be prepared under this id.
        staged: every staging table. drop: drops one if it exists.
        identity: the table's at the server; None: it has none.
        staging_of: the staging table of the transaction of this id; None: the transaction dropped it.
        tables_remain: a staging table outlives the transaction that moved its rows.
        loses_commits: the server may acknowledge a commit and roll back, so the marker is looked up afterwards.
    """

    id_prefix: str
    is_ours: Callable[[str], bool]
    open: Callable[[C], list[OpenTransaction]]
    end: Callable[[C, str, bool], bool]
    staged: Callable[[C], list[str]]
    drop: Callable[[C, str], None]
    identity: Callable[[C], str | None]
    staging_of: Callable[[str], str | None] = lambda gid: None  # noqa: ARG005
    tables_remain: bool = False
    loses_commits: bool = False


class ServerCommitter(Committer, Generic[C]):
    """See `delivered.contract.sink.Committer`. Also serves `delivered transactions`.

    The mechanism is read from the participant's handle: a pipeline may change it between starts.
    """

    def __init__(self, server: Server[C], options: ServerOptions, scope: Scope, shards: Shards[C]) -> None:
        self._server = server
        self._options = options
        self._sql = server.dialect
        self._scope = scope
        self._shards = shards
        self._pool: queue.LifoQueue[C | None] = queue.LifoQueue()
        for _ in range(CONNECTIONS_MAX):
            self._pool.put(None)

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Commit a prepared transaction. Staged rows became visible with the decision."""
        rows = PreparedRows.of(prepared)
        if rows.gid:
            outcome = self._end(rows.gid, commit=True)
            if isinstance(outcome, Unknown):
                return outcome
            if isinstance(outcome, Failed) or self._shards.loses_commits:
                try:
                    if not self._has_marker(work, rows.gid):
                        lost = f"the server acknowledged the commit of {rows.gid}, and lost it"
                        return outcome if isinstance(outcome, Failed) else Failed(lost)
                except DeliveredError as error:
                    return Unknown(str(error))
        return self._drop_staged(rows) if self._shards.tables_remain else Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - marked in the ledger
        """Whether a committed marker, or a decision that moved the rows itself, names this shard of this batch; or a
        later batch was decided, which implies that all of this one is visible."""
        return self._has_marker(work) or self._has_moved(work)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        rows = PreparedRows.of(prepared)
        outcome = self._end(rows.gid, commit=False) if rows.gid else Ok(None)  # Failed: rolled back already
        return outcome if isinstance(outcome, Unknown) else self._drop_staged(rows)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Roll back prepared transactions, and drop staging tables, that `keep` does not name."""
        kept = [PreparedRows.of(p) for p in keep]
        gids, tables = {rows.gid for rows in kept}, {rows.staged for rows in kept}
        count = 0

        def once(connection: C) -> None:
            nonlocal count
            for transaction in self._shards.open(connection):
                gid = transaction.transactional_id
                if gid not in gids and self._shards.end(connection, gid, False):
                    count += 1
            for table in self._shards.staged(connection):
                if table not in tables:
                    self._shards.drop(connection, table)
                    count += 1

        try:
            self._ask(once)
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(count)

    def skipped(self) -> dict[str, int]:
        """See `delivered.contract.sink.Committer`."""
        return self._ask(lambda c: count_skipped(c, self._sql, self._scope) if self._counts_skipped(c) else {})

    def dead_letters(self) -> list[SkippedRow]:
        """See `delivered.contract.sink.Committer`."""
        return self._ask(lambda c: read_dead_letters(c, self._sql, self._scope) if self._counts_skipped(c) else [])

    def _counts_skipped(self, connection: C) -> bool:
        return self._server.version(connection) >= SKIPPED_VERSION

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`."""
        known = self._ask(self._shards.identity)
        return {} if known is None else {self._scope.sink: Target(f"table {self._options.table_text}", known)}

    def set_up(self, guarantee: Guarantee, *, decides: bool) -> None:  # noqa: ARG002
        """Create the table for markers. See `delivered.contract.sink.Committer`."""
        if not decides:
            self._ask(self._server.migrate)

    def forget(self, batch: int) -> None:
        """Delete markers of earlier batches, as a decision in this database would have."""
        values = {**scope_values(self._scope), "batch": batch}
        self._ask(lambda c: self._sql.delete(c, "marker", f"{_BATCHES} < :batch", values))
        if self._options.write.conditional:
            self._ask(lambda c: fold_skipped(c, self._sql, self._scope, batch))

    def visible_shards(self, batch: int) -> list[int]:
        """By markers. See `delivered.contract.sink.Committer`."""

        def question(connection: C) -> list[int]:
            if self._server.version(connection) == 0:
                return []
            statement = self._sql(f"SELECT DISTINCT shard FROM {{marker}} WHERE {_BATCHES} >= :batch")
            rows = connection.execute(statement, {**scope_values(self._scope), "batch": batch}).fetchall()
            return sorted(int(shard) for (shard,) in rows)

        return self._ask(question)

    def open_transactions(self) -> list[OpenTransaction]:
        """Every prepared transaction of this pipeline and sink, of any incarnation, oldest first.

        Raises:
            Unreachable: the server did not answer.
        """
        return self._ask(self._shards.open)

    def end_by_id(self, transactional_id: str, commit: bool, handle: Handle | None = None) -> Outcome[None]:  # noqa: ARG002
        """Manually commit or roll back a prepared transaction.

        Raises:
            UsageError: the id is not ours, or there is no prepared transaction with this id.
        """
        if not self._shards.is_ours(transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                transactional_id=transactional_id,
                pipeline=self._scope.pipeline,
                sink=self._scope.sink,
                id_prefix=self._shards.id_prefix,
            )
        if all(t.transactional_id != transactional_id for t in self.open_transactions()):
            raise UsageError("TRANSACTION_NOT_OPEN.SQL", transactional_id=transactional_id)
        return self._end(transactional_id, commit)

    def close(self) -> None:
        for _ in range(CONNECTIONS_MAX):
            with contextlib.suppress(queue.Empty):
                self._server.discard(self._pool.get_nowait())
        while self._pool.qsize() < CONNECTIONS_MAX:
            self._pool.put(None)

    def _drop_staged(self, rows: PreparedRows) -> Outcome[None]:
        """Drop the staging table that remains of a handle, if there is one."""
        table = (self._shards.staging_of(rows.gid) if rows.gid else rows.staged) or ""
        return self._try(lambda connection: self._shards.drop(connection, table)) if table else Ok(None)

    def _end(self, gid: str, commit: bool) -> Outcome[None]:
        """Failed: no transaction is prepared under this id, nor ever will be."""
        match self._try(lambda connection: self._shards.end(connection, gid, commit)):
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
            values = {**scope_values(work.scope), "batch": work.batch}
            later = f"SELECT 1 FROM {{decision}} WHERE {_BATCHES} > :batch LIMIT 1"
            if connection.execute(self._sql(later), values).fetchone() is not None:
                return True  # its decision deleted the markers of this one
            markers = connection.execute(
                self._sql(f"SELECT gid FROM {{marker}} WHERE {_BATCHES} = :batch AND shard = :shard"),
                {**values, "shard": work.shard},
            ).fetchall()
            return bool(markers) if gid is None else gid in {row[0] for row in markers}

        return self._ask(question)

    def _has_moved(self, work: Work) -> bool:
        """Whether a decision moved the rows of this shard itself."""

        def question(connection: C) -> bool:
            if self._server.version(connection) == 0:
                return False
            participants = find_decided(connection, self._sql, work)
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


def find_decided(connection: Connection, sql: Dialect, work: Work) -> Sequence[Prepared]:
    """The participants of this sink that the decision of a batch names."""
    row = connection.execute(
        sql(f"SELECT decision FROM {{decision}} WHERE {_BATCHES} = :batch"),
        {**scope_values(work.scope), "batch": work.batch},
    ).fetchone()
    return Decision.from_json(row[0]).of(work.scope.sink) if row else ()


# Mechanism one_transaction: the driver moves rows from the tasks' staging tables to the target.


@dataclass(frozen=True)
class Staging:
    """Staging tables in the ledger's schema. Calls run inside an open transaction and raise the client's errors."""

    options: ServerOptions
    server: Server[Any]
    drops: ClassVar[bool] = False
    """The decision's transaction can drop staging tables."""

    @property
    def conditional(self) -> bool:
        """See `delivered.kits.sql.ledger.DecidedTable`."""
        return self.options.write.conditional

    def full(self, table: str) -> str:
        """The qualified name, quoted for SQL."""
        return f"{quoted(self.options.ledger_schema)}.{quoted(table)}"

    def drop(self, connection: Connection, table: str) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {self.full(table)}")

    def reduce(self, connection: Connection, table: str, merge: Merge, rows: int, found: Definition) -> int:
        """Keep the winning staged row of each key; return their number. If every row counts, number them instead.

        Args:
            rows: number of staged rows.

        Raises:
            UsageError: different keys are equal by the table's collation.
        """
        if not self.options.write.upserts:
            return rows
        check_merged(connection, self.options, merge, self.full(table), found)
        if self.options.write.keeps_all:
            connection.execute(merge.number(self.full(table)))
            return rows
        return rows - int(connection.execute(merge.reduce(self.full(table))).rowcount)

    def add(self, connection: Connection, table: str, merge: Merge, work: Work, found: Definition) -> None:
        """Merge reduced rows into the target, except deletes (see `_delete`).

        Raises:
            UsageError: the database did not store what it was given.
        """
        check_rules(self.options, found)
        name = self.full(table)
        if self.options.write.conditional:
            judge = Conditional(connection, self.server, merge, name, work, str(int(work.shard)), self.options, found)
            judge.run()
            return
        upsert(connection, self.options, merge, name, found)

    def move(self, connection: Any, scope: Scope, decision: Decision, staged: Sequence[Prepared]) -> None:
        """See `delivered.kits.sql.ledger.DecidedTable`."""
        if not staged and not self.options.write.complete:
            return
        self._check_keys(connection, staged)
        found = self.server.definition(connection)
        if self.options.write.complete and not decision.revision:
            table = self.server.table(connection)
            if table is not None:
                check_rules(self.options, found)
                connection.execute(f"DELETE FROM {table}")
                check_emptied(connection, self.options, table, found)
        for prepared in staged:
            work = Work(scope, decision.batch, prepared.shard, prepared.attempt)
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=work.batch, shard=work.shard)
            self._move_shard(connection, prepared, work, found)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=work.batch, shard=work.shard)
        self._delete(connection, staged, found)
        if staged:
            rows = [PreparedRows.of(p) for p in staged]
            self.check_types(connection, [r.staged for r in rows], rows[0].stored)
        if self.drops:
            for prepared in staged:
                self.drop(connection, PreparedRows.of(prepared).staged)

    def _move_shard(self, connection: Connection, prepared: Prepared, work: Work, found: Definition) -> None:
        """Move a shard's rows into the target.

        Raises:
            InvariantBroken: the staged rows differ from those prepared.
            UsageError: the database did not store what it was given.
            The client's error: the server rejected it, for instance because the staged rows are missing.
        """
        handle = PreparedRows.of(prepared)
        table, columns = handle.staged, handle.columns
        staged = self.full(table)
        if self.options.write.merges:
            row = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            self._check_staged(prepared, row[0] if row else 0, handle.kept)
            self.add(connection, table, self._merge(prepared), work, found)
            return
        check_rules(self.options, found)
        rows = connection.execute(f"INSERT INTO {handle.target} ({columns}) SELECT {columns} FROM {staged}").rowcount
        sent = prepared.fingerprint.count
        if rows != sent:
            there = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            self._check_staged(prepared, there[0] if there else 0, sent)
            check_count(self.options, sent, rows, found, f"shard {prepared.shard} of batch {work.batch}")

    def check_types(self, connection: Connection, tables: Sequence[str], columns: Sequence[str]) -> None:
        """Check that the target's columns still have the types that rows were staged for: the server adapts rows to
        others, and rounds silently. After rows were moved, in the same transaction: no type can change any more.

        Args:
            tables: staging tables.
            columns: those that were moved; none: all.

        Raises:
            UsageError: a column was altered meanwhile.
        """
        for column, was, now in self.altered(connection, tables):
            if not columns or column in columns:
                where = f"{self.options.table_text!r} {self.options.where}"
                raise UsageError("TABLE_ALTERED", where=where, what=f"its column {column!r} of {was} became {now}")

    def altered(self, connection: Any, tables: Sequence[str]) -> Iterable[tuple[str, str, str]]:
        """Columns whose type in one of these staging tables is not the target's: name, that type, the target's."""
        raise NotImplementedError

    def _check_staged(self, prepared: Prepared, rows: int, expected: int) -> None:
        if rows != expected:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER.SQL",
                shard=prepared.shard,
                rows=rows,
                table=self.options.table_text,
                prepared=expected,
            )

    def _check_keys(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Check the shards of a batch, before the first one is moved.

        Raises:
            UsageError: a key is in two shards, so their order is undefined.
        """
        write = self.options.write
        if len(staged) > 1 and write.upserts and (write.version is None or write.keeps_all):
            tables = [self.full(PreparedRows.of(p).staged) for p in staged]
            duplicate_key = connection.execute(self._merge(staged[0]).key_in_two(tables)).fetchone()
            if duplicate_key is not None:
                raise key_in_two_shards(write, duplicate_key, self.options.table_text)

    def _delete(self, connection: Connection, staged: Sequence[Prepared], found: Definition) -> None:
        """Apply the deletes of all shards, after the last one is moved: with a version, a delete must find older rows
        of any shard."""
        if self.options.write.delete is not None:
            for prepared in staged:
                table = self.full(PreparedRows.of(prepared).staged)
                delete(connection, self.options, self._merge(prepared), table, found)

    def _merge(self, prepared: Prepared) -> Merge:
        handle = PreparedRows.of(prepared)
        return Merge(self.options.write, handle.target, handle.stored)

    def swap(self, connection: Any, swap: Swap) -> None:
        raise NotImplementedError  # the server commits each DDL statement by itself

    def has_swapped(self, swap: Swap) -> bool:
        raise NotImplementedError

    def cannot_swap(self) -> str | None:
        raise NotImplementedError


def check_rules(options: TableOptions, definition: Definition) -> None:
    """Raises UsageError: a rule replaces the sink's statements, whose counts are then those of the rule's own."""
    if definition.rules:
        raise UsageError("TABLE_RULE", table=options.table_text, where=options.where, rules=", ".join(definition.rules))
