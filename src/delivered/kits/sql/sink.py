"""Bases of sinks that write to a table, a database, or a database server, and of their tasks' writers; rows that a
server itself refuses, found before they are sent."""

from __future__ import annotations

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import KeyMemory, StoreSink, Writer
from delivered.contract.source import Finding
from delivered.kits.sql.database import LEDGER_TABLES, Server
from delivered.kits.sql.merge import check_columns, describe_checks, without_key
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
from delivered.kits.sql.transactions import PreparedRows
from delivered.model.capability import Commit, Guarantee, OnConflict, SinkCapability
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES, REDO_MEMORY_BYTES
from delivered.model.patience import query_patience_s
from delivered.model.ranges import because, fitted
from delivered.model.work import Promise

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

    def key_memory(self, scope: Scope) -> KeyMemory:
        from delivered.kits.sql.ledger import KeyTable

        return KeyTable(self.parts["database"](self.options), scope)

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
        server: Server[Any] = self.parts["database"](self.options)
        try:
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
        return RedoWriter(self.parts["database"](self.options), guarantee, make)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        server: Server[Any] = self.parts["database"](self.options)

        def once() -> pa.Array | None:
            with server.borrow() as connection:
                return self.parts["refused_rows"](connection, self.options, batch)

        return server.waiting(once, kept=True)

    def checked_target(self) -> Sequence[str]:
        server: Server[Any] = self.parts["database"](self.options)
        return describe_checks(self.options, server.ask(lambda connection: server.definition(connection, columns=True)))

    def ready_target(self, schema: pa.Schema) -> None:
        """See `delivered.contract.sink.Sink`: a table that is there must take every column. Tasks check the
        types, and create a table that is missing, with the first rows."""
        server: Server[Any] = self.parts["database"](self.options)
        found = server.waiting(lambda: server.ask(lambda connection: server.definition(connection, columns=True)))
        for name in numbered_schema(self.options, stored_columns(self.options.write, schema)).names:
            if name in found.computed:
                raise column_computed(self.options.table_text, name)

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        server: Server[Any] = self.parts["database"](self.options)
        check: Callable[[pa.Schema], None] | None = server.ask(
            lambda connection: self.parts["table_check"](connection, self.options)
        )
        return check

    def add_columns(self, schema: pa.Schema) -> None:
        if not self.options.merge_schema:
            return
        server: Server[Any] = self.parts["database"](self.options)

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

log = logging.getLogger("delivered.outage")
T = TypeVar("T")


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


# Rows that a server itself refuses, found before they are sent: loaded into an empty copy of the table.
#
# What a server refuses depends on its version, the table's indexes, types and functions. Some of it shows only when the
# rows move into the table, at the decision: too late to choose others.


def find_refused(
    batch: pa.RecordBatch, suspects: pa.Array, load: Callable[[pa.RecordBatch], str | None]
) -> pa.Array | None:
    """The reason for each row that `load` refuses, null for the others; None: all are fine.

    Args:
        suspects: which rows to try.
        load: tries rows and takes them back; why it was refused one of them. Of n rows with b refused ones, called
            about b * log2(n) times.
    """
    rows = pc.indices_nonzero(suspects)
    tried, found = batch.take(rows), dict[int, str]()
    left = [(0, tried.num_rows)] if tried.num_rows else []
    while left:
        at, count = left.pop()
        why = load(tried.slice(at, count))
        if why is not None and count == 1:
            found[rows[at].as_py()] = long_values(tried.slice(at, 1)) + why
        elif why is not None:
            left += [(at + count // 2, count - count // 2), (at, count // 2)]
    return pa.array([found.get(i) for i in range(batch.num_rows)], pa.string()) if found else None


def find_too_long(batch: pa.RecordBatch, widths: Mapping[str, int], unit: str) -> pa.Array | None:
    """As `find_refused`: values longer than their column.

    Args:
        widths: column -> maximum length.
        unit: "characters" or "bytes".
    """
    reasons: pa.Array | None = None
    for name, width in widths.items():
        column = batch.column(name)
        if pa.types.is_null(column.type):
            continue
        length = pc.utf8_length(column) if unit == "characters" else pc.binary_length(column)
        beyond = pc.greater(length, width)
        if pc.any(beyond).as_py():
            text = pc.binary_join_element_wise(
                f"column {name!r} has ", length.cast(pa.string()), f" {unit}; the table's column holds {width}", ""
            )
            reasons = because(reasons, beyond, text)
    return reasons


LONG_BYTES = 2_000
"""A value that an index may refuse: PostgreSQL's accept 2,704 bytes of all columns."""


def bytes_of(batch: pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """How long the texts and bytes of these columns are together, by row."""
    total = pa.repeat(0, batch.num_rows)
    for name in names:
        column = batch.column(name)
        if _is_bytes(column.type):
            total = pc.add(total, pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()))
    return total


def long_values(row: pa.RecordBatch) -> str:
    """The columns of a row that an index, or a limit of the server, may be about: in front of its reason."""
    lengths = {n: bytes_of(row, [n])[0].as_py() for n in row.schema.names}
    return "".join(f"column {name!r} has {length} bytes: " for name, length in lengths.items() if length > LONG_BYTES)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
