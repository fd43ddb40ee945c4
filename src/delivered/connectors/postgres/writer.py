"""Executor side: one COPY and one transaction per shard, the blocks that it sends, and rows that the server refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.postgres import TYPES, PostgresOptions, store, target
from delivered.connectors.postgres.client import PostgresDatabase, about_a_row, explained
from delivered.connectors.postgres.target import Target, migrate
from delivered.kits.sql.database import Definition, give, quoted, take
from delivered.kits.sql.merge import ORDER, ROUND, check_count, check_rows, delete
from delivered.kits.sql.sink import Names, PreparedRows, ShardWriter, new_nonce, write_marker
from delivered.kits.sql.table import (
    LONG_BYTES,
    Mechanism,
    add_number,
    bytes_of,
    check_widths,
    find_refused,
    find_too_long,
    stored_columns,
)
from delivered.model.capability import Guarantee
from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.rows import first_of, fitted
from delivered.model.work import Promise

if TYPE_CHECKING:
    import psycopg


class CopyWriter(ShardWriter):
    """See `delivered.contract.sink.Writer`.

    exactly_once, two_phase: COPY into the target and a marker, in a transaction that `prepare` leaves prepared.
    exactly_once, one_transaction: COPY into a staging table, which `prepare` commits.
    upserts and conditional writes: always COPY into a staging table; except with one_transaction, `prepare` merges
    it into the target.
    at_least_once, at_most_once: COPY into the target, which `prepare` commits; never resends a row.

    `stage` blocks while the server is behind. A shard without rows sends nothing and leaves nothing behind.
    """

    def __init__(
        self,
        options: PostgresOptions,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,
        left: Sequence[PreparedRows] = (),
    ) -> None:
        """Args: left: what earlier writers of this task may have left at the server."""
        self._options = options
        self._left = left
        self._staging = store.PostgresStaging(options, PostgresDatabase(options))
        self._server = self._staging.server
        self._work = work
        self._exactly_once = guarantee is Guarantee.EXACTLY_ONCE
        self._moved_later = self._exactly_once and options.mechanism is Mechanism.ONE_TRANSACTION
        self._merges = options.write.merges
        self._schema = TYPES.plain_schema(schema)
        self._connection: psycopg.Connection[Any] | None = None
        self._target: Target | None = None
        self._copying: Any = None
        self._copy: Any = None
        self._cursor: Any = None
        self._staged = self._gid = ""
        self._rows = self._number = 0

    @property
    def possible(self) -> PreparedRows | None:
        """See `delivered.kits.sql.sink.ShardWriter`."""
        return PreparedRows(self._gid, self._staged) if self._gid or self._staged else None

    def stage(self, batch: pa.RecordBatch) -> None:
        import psycopg

        if batch.num_rows == 0:
            return
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        if self._options.write.upserts:
            check_rows(self._options.write, batch)
        try:
            if self._copy is None:
                self._begin()
            check_widths(batch, self._ready.widths)
            for block in blocks(add_number(self._options, batch, self._number), self._ready.kinds):
                self._copy.write(block)
            self._rows += batch.num_rows
        except psycopg.Error as error:
            raise explained(error, self._options) from error

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        import psycopg

        connection = self._connection
        if connection is None:
            return Promise()
        try:
            self._end_copy(connection, fingerprint)
            handle = None
            if self._moved_later:
                handle = PreparedRows("", self._staged, self._ready.name, self._ready.columns)
            if self._merges:
                found = self._server.definition(connection)
                kept = self._staging.reduce(connection, self._staged, self._ready.merge, self._rows, found)
                if handle is not None:
                    handle = replace(handle, kept=kept, stored=self._ready.merge.columns)
                else:
                    self._merge(connection, found)
            if self._moved_later or not self._exactly_once:
                connection.execute("COMMIT")
            else:
                handle = PreparedRows(self._prepare(connection, fingerprint))
        except psycopg.Error as error:
            raise explained(error, self._options) from error
        self._connection = None
        give(self._server, connection)
        return Promise(handle)

    def abort(self) -> None:
        connection, copying = self._connection, self._copying
        self._connection = self._copying = self._copy = None
        if copying is not None:
            given_up = RuntimeError("this shard was given up")
            with contextlib.suppress(Exception):
                copying.__exit__(RuntimeError, given_up, None)
        # The server rolls back a closed connection's transaction.
        self._server.discard(connection)

    @property
    def _ready(self) -> Target:
        if self._target is None:
            raise InvariantBroken("NO_TARGET.UNCHECKED")
        return self._target

    def _begin(self) -> None:
        self._connection = connection = take(self._server)
        migrate(connection, self._options.ledger_schema)
        for rows in self._left:
            if rows.gid:
                store.end(connection, rows.gid, commit=False)
            if rows.staged:
                self._staging.drop(connection, rows.staged)
        if self._exactly_once and not self._moved_later:
            store.slots(connection, self._options)  # fail before the first row, not after the last
            if self._merges:
                store.give_up_earlier(connection, self._work, self._options)
        self._target = target.ready(connection, self._options, self._schema)
        self._number = target.batch_number(connection, self._server, self._options, self._work)
        connection.execute("BEGIN")
        into = self._target.name
        if self._moved_later or self._merges:
            self._staged = Names(self._work.scope, self._options.ledger_schema).staging(self._work, new_nonce())
            create_staging(connection, self._options, self._staged, self._target)
            into = self._staging.full(self._staged)
        self._cursor = connection.cursor()
        self._copying = self._cursor.copy(f"COPY {into} ({self._target.columns}) FROM STDIN (FORMAT binary)")
        self._copy = self._copying.__enter__()
        self._copy.write(HEADER)

    def _merge(self, connection: psycopg.Connection[Any], found: Definition) -> None:
        """Merge reduced rows into the target, in the task's own transaction."""
        merge = self._ready.merge
        self._staging.add(connection, self._staged, merge, self._work, found)
        if self._options.write.delete is not None:
            delete(connection, self._options, merge, self._staging.full(self._staged), found)
        self._staging.drop(connection, self._staged)

    def _end_copy(self, connection: psycopg.Connection[Any], fingerprint: Fingerprint) -> None:
        self._copy.write(TRAILER)
        self._copying.__exit__(None, None, None)
        self._copying = None
        shard = f"shard {self._work.shard} of batch {self._work.batch}"
        if self._rows != fingerprint.count:
            raise InvariantBroken("ROWS_DIFFER.POSTGRES", shard=shard, rows=self._rows, count=fingerprint.count)
        if self._cursor.rowcount != self._rows:
            found = self._server.definition(connection)
            check_count(self._options, self._rows, self._cursor.rowcount, found, shard)

    def _prepare(self, connection: psycopg.Connection[Any], fingerprint: Fingerprint) -> str:
        from psycopg import sql

        self._gid = gid = store.new_id(self._work, self._options.ledger_schema)
        write_marker(connection, self._server.dialect, self._work, gid, fingerprint)
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
        return gid


def create_staging(connection: psycopg.Connection[Any], options: PostgresOptions, table: str, into: Target) -> None:
    """Create a staging table with the columns of the rows, inside the open transaction. Raises psycopg.Error."""
    name = f"{quoted(options.ledger_schema)}.{quoted(table)}"
    write = options.write
    columns = ", ".join(map(quoted, into.merge.columns))
    if write.expected is not None:
        columns += f", {quoted(str(write.version))} AS {quoted(write.expected)}"
    connection.execute(
        f"CREATE TABLE {name} WITH (autovacuum_enabled = false) "  # noqa: S608
        f"AS SELECT {columns} FROM {into.name} WITH NO DATA"
    )
    if write.merges:
        more = f"ADD COLUMN {quoted(ORDER)} bigint GENERATED ALWAYS AS IDENTITY"
        if write.delete is not None:
            more += f", ADD COLUMN {quoted(write.delete)} boolean"
        if write.conditional:
            more += f", ADD COLUMN {quoted(ROUND)} bigint NOT NULL DEFAULT 1"
        connection.execute(f"ALTER TABLE {name} {more}")


# Arrow record batches as blocks of PostgreSQL's binary COPY format, with no Python object per value.
#
# A row is a 16-bit field count, then for each field a 32-bit length and its bytes; null has length -1. numpy lays out
# fixed-width columns; others (texts, bytes, numbers with nulls) stay Arrow arrays; one call of Arrow's
# `binary_join_element_wise` joins the rows. The data buffer of its result is the block.

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Signature, flags, length of the header extension."""
TRAILER = b"\xff\xff"

BLOCK_ROWS = 16_384
BLOCK_BYTES = 4 << 20
"""Approximate variable-length bytes per block."""

_EPOCH_DAYS = 10_957
_EPOCH_US = _EPOCH_DAYS * 86_400_000_000
"""From 1970-01-01 to 2000-01-01, PostgreSQL's epoch."""

Bytes2D = npt.NDArray[np.uint8]


@dataclass
class _Fixed:
    """Fixed-width bytes of every row; columns are appended on the right."""

    rows: int
    parts: list[Bytes2D] = field(default_factory=list)

    def constant(self, value: bytes) -> None:
        self.parts.append(np.broadcast_to(np.frombuffer(value, np.uint8), (self.rows, len(value))))

    def values(self, array: Bytes2D) -> None:
        self.parts.append(array)

    def array(self) -> pa.Array:
        """As a binary Arrow array."""
        width = sum(p.shape[1] for p in self.parts)
        out = np.empty((self.rows, width), np.uint8)
        at = 0
        for part in self.parts:
            out[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        offsets = np.arange(0, (self.rows + 1) * width, max(width, 1), dtype=np.int32)[: self.rows + 1]
        return pa.Array.from_buffers(pa.binary(), self.rows, [None, pa.py_buffer(offsets), pa.py_buffer(out)])


def blocks(batch: pa.RecordBatch, kinds: Sequence[str]) -> Iterator[memoryview]:
    """Rows of `batch` as COPY data, without header and trailer, in bounded blocks.

    Args:
        kinds: PostgreSQL type of each column, as `PostgresTypes.fitting` allows.
    """
    size = batch.nbytes
    rows = BLOCK_ROWS if size <= BLOCK_BYTES else max(1, min(BLOCK_ROWS, batch.num_rows * BLOCK_BYTES // size))
    for start in range(0, batch.num_rows, rows):
        yield _block(batch.slice(start, rows), kinds)


def _block(batch: pa.RecordBatch, kinds: Sequence[str]) -> memoryview:
    n = batch.num_rows
    segments: list[pa.Array] = []
    fixed = _Fixed(n)
    fixed.constant(len(kinds).to_bytes(2, "big"))
    for column, kind in zip(batch.columns, kinds, strict=True):
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.null_count == n:
            fixed.constant(b"\xff\xff\xff\xff")
        elif _is_bytes(column.type):
            prefix = b"\x01" if kind == "jsonb" else b""
            lengths = _lengths(column)
            lengths[lengths >= 0] += len(prefix)
            fixed.values(_big(lengths, ">i4"))
            segments.append(fixed.array())
            fixed = _Fixed(n)
            if prefix:
                segments.append(pa.repeat(pa.scalar(prefix, pa.binary()), n).filter(pa.array([True] * n)))
                segments[-1] = pc.if_else(column.is_valid(), segments[-1], pa.scalar(b"", pa.binary()))
            segments.append(_as_binary(column))
        else:
            values = _fixed_values(column, kind)
            if column.null_count == 0:
                fixed.constant(values.shape[1].to_bytes(4, "big"))
                fixed.values(values)
            else:
                valid = np.asarray(column.is_valid())
                fixed.values(_big(np.where(valid, values.shape[1], -1), ">i4"))
                segments.append(fixed.array())
                fixed = _Fixed(n)
                segments.append(_holes(values, valid))
    if fixed.parts:
        segments.append(fixed.array())
    if len(segments) == 1:
        return memoryview(segments[0].buffers()[2])
    joined = pc.binary_join_element_wise(*segments, b"", null_handling="replace", null_replacement=b"")
    _, offsets, data = joined.buffers()
    end = int(np.frombuffer(offsets, np.int32)[joined.offset + n])
    return memoryview(data)[:end]


def _is_bytes(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_string(kind) or t.is_binary(kind) or t.is_large_string(kind) or t.is_large_binary(kind))


def _as_binary(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.large_binary()).cast(pa.binary())
    return column if pa.types.is_binary(kind) else column.view(pa.binary())


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value; -1 for null."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    offsets = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32)
    lengths = np.diff(offsets[column.offset : column.offset + len(column) + 1]).astype(np.int64)
    if column.null_count:
        lengths[np.asarray(column.is_null())] = -1
    return lengths


def _holes(values: Bytes2D, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Fixed-width values; empty for null."""
    width = values.shape[1]
    offsets = np.zeros(len(valid) + 1, np.int32)
    np.cumsum(valid * width, out=offsets[1:])
    data = np.ascontiguousarray(values[valid])
    return pa.Array.from_buffers(pa.binary(), len(valid), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _big(values: npt.NDArray[np.generic], dtype: str) -> Bytes2D:
    """Numbers in network order, one row of bytes each."""
    packed = np.ascontiguousarray(values.astype(dtype))
    return packed.view(np.uint8).reshape(len(values), packed.dtype.itemsize)


_NUMBERS = {"int2": ">i2", "int4": ">i4", "int8": ">i8", "float4": ">f4", "float8": ">f8"}


def _fixed_values(column: pa.Array, kind: str) -> Bytes2D:
    """Values of a fixed-width type; arbitrary for null."""
    t = column.type
    if pa.types.is_decimal128(t):
        return _numeric(column, t.precision, t.scale)
    if pa.types.is_boolean(t):
        return np.asarray(column.cast(pa.uint8()).fill_null(0)).reshape(-1, 1)
    if pa.types.is_date32(t):
        return _big(np.asarray(column.view(pa.int32()).fill_null(0)).astype(np.int64) - _EPOCH_DAYS, ">i4")
    if pa.types.is_timestamp(t):
        micros = column.cast(pa.timestamp("us", t.tz)).view(pa.int64())
        return _big(np.asarray(micros.fill_null(0)) - _EPOCH_US, ">i8")
    if pa.types.is_time(t):
        return _big(np.asarray(column.cast(pa.time64("us")).view(pa.int64()).fill_null(0)), ">i8")
    return _big(np.asarray(column.fill_null(0)), _NUMBERS[kind])


def _numeric(column: pa.Array, precision: int, scale: int) -> Bytes2D:
    """Decimals in base 10,000, with the type's maximum number of digits: the server drops leading zeros."""
    n = len(column)
    fraction = -(-max(scale, 0) // 4)
    integers = max(1, -(-(precision - scale) // 4))
    digits = fraction + integers
    pairs = np.frombuffer(column.buffers()[1], np.uint64)[2 * column.offset : 2 * (column.offset + n)].reshape(n, 2)
    negative = pairs[:, 1].view(np.int64) < 0
    # Base 10,000 needs fractional digits in groups of four.
    pad = 4 * fraction - scale
    out = np.empty((n, digits), np.int64)
    if precision + pad <= 18:
        left = np.abs(pairs[:, 0].view(np.int64)) * 10**pad
        for i in range(digits - 1, -1, -1):
            left, out[:, i] = np.divmod(left, 10_000)
    else:
        limbs = _limbs(pairs, negative)
        _scale_up(limbs, 10**pad)
        for i in range(digits - 1, -1, -1):
            out[:, i] = _divide(limbs, 10_000)
    head = np.empty((n, 4), np.int64)
    head[:, 0], head[:, 1], head[:, 2], head[:, 3] = digits, integers - 1, np.where(negative, 0x4000, 0), max(scale, 0)
    words = np.concatenate([head, out], axis=1).astype(">u2")
    return words.view(np.uint8).reshape(n, 2 * words.shape[1])


def _limbs(pairs: npt.NDArray[np.uint64], negative: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.int64]]:
    """Magnitudes of 128-bit two's complement numbers, as five limbs of 32 bits, the highest first."""
    words = [pairs[:, i] >> np.uint64(s) & np.uint64(0xFFFFFFFF) for i, s in ((1, 32), (1, 0), (0, 32), (0, 0))]
    carry = negative.astype(np.int64)
    out: list[npt.NDArray[np.int64]] = []
    for word in reversed(words):
        value = np.where(negative, 0xFFFFFFFF - word.astype(np.int64), word.astype(np.int64)) + carry
        out.append(value & 0xFFFFFFFF)
        carry = value >> 32
    return [np.zeros(len(negative), np.int64), *reversed(out)]


def _scale_up(limbs: list[npt.NDArray[np.int64]], factor: int) -> None:
    carry = np.zeros_like(limbs[0])
    for i in range(len(limbs) - 1, -1, -1):
        value = limbs[i] * factor + carry
        limbs[i] = value & 0xFFFFFFFF
        carry = value >> 32


def _divide(limbs: list[npt.NDArray[np.int64]], divisor: int) -> npt.NDArray[np.int64]:
    """Divide in place; return the remainders."""
    rest = np.zeros_like(limbs[0])
    for i, limb in enumerate(limbs):
        value = (rest << 32) | limb
        limbs[i], rest = np.divmod(value, divisor)
    return rest


# Rows that PostgreSQL itself refuses: its parsers of JSON, enums, domains, and its indexes.

_WIDE = 400
"""Columns of which a row may exceed a page of 8,160 bytes, even if each is stored elsewhere."""


def refused_rows(
    connection: psycopg.Connection[Any], options: PostgresOptions, batch: pa.RecordBatch
) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`. Outside a transaction.

    Creates the table first if the options request it. Loads suspicious rows into an empty table like the target, with
    its indexes but without its constraints, in a transaction that is rolled back: no row of the target is locked, and
    rows of other shards do not conflict.

    Raises:
        UsageError, psycopg.Error: the table cannot take rows of this schema at all.
    """
    schema = TYPES.plain_schema(batch.schema)
    batch, found = fitted(batch, schema), target.find(connection, options)
    if found is None and not options.create:
        return None
    migrate(connection, options.ledger_schema)
    ready = target.ready(connection, options, schema)
    found = found or target.find(connection, options)
    if found is None:
        return None
    relation = found[0]
    reasons = find_too_long(batch, ready.widths, "characters")
    names = stored_columns(options.write, schema).names
    indexes = _indexes(connection, relation)
    suspects = _suspects(batch, names, indexes, _parses(connection, relation, names))
    if reasons is not None:
        suspects = pc.and_(suspects, pc.is_null(reasons))
    if not pc.any(suspects).as_py():
        return reasons
    kinds = [kind for name, kind in zip(batch.schema.names, ready.kinds, strict=False) if name in names]
    connection.execute("BEGIN")
    try:
        copy = _Copy(connection, options, relation, ready.name, tuple(names), tuple(kinds), indexes)
        return first_of(reasons, find_refused(batch.select(names), suspects, copy.load))
    finally:
        connection.execute("ROLLBACK")


@dataclass(frozen=True)
class _Index:
    """
    Attributes:
        body: its definition, from USING on.
        columns: those that it holds; None: expressions or a condition may use any.
    """

    name: str
    body: str
    columns: frozenset[str] | None


class _Copy:
    """An empty table like the target, inside the open transaction."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        options: PostgresOptions,
        relation: int,
        like: str,
        names: Sequence[str],
        kinds: Sequence[str],
        indexes: Sequence[_Index],
    ) -> None:
        self._connection, self._kinds, own = connection, kinds, f"try_{new_nonce()}"
        schema = quoted(options.ledger_schema)
        self._shown = {own: options.table_text}
        table = f"{schema}.{quoted(own)}"
        connection.execute(f"CREATE TABLE {table} (LIKE {like} INCLUDING GENERATED) WITH (autovacuum_enabled = false)")
        bound = connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND attnotnull AND NOT attisdropped",
            [relation],
        ).fetchall()
        if bound:  # constraints are not tried: another option is about them
            free = ", ".join(f"ALTER COLUMN {quoted(name)} DROP NOT NULL" for (name,) in bound)
            connection.execute(f"ALTER TABLE {table} {free}")
        for i, index in enumerate(indexes):
            name = f"{own}_i{i}"
            self._shown = {name: index.name, **self._shown}
            connection.execute(f"CREATE INDEX {quoted(name)} ON {table} {index.body}")
        self._statement = f"COPY {table} ({', '.join(map(quoted, names))}) FROM STDIN (FORMAT binary)"

    def load(self, rows: pa.RecordBatch) -> str | None:
        """Why a row was refused. Raises psycopg.Error if it was not about a row."""
        import psycopg

        why = None
        self._connection.execute("SAVEPOINT row")
        try:
            with self._connection.cursor().copy(self._statement) as copy:
                copy.write(HEADER)
                for block in blocks(rows, self._kinds):
                    copy.write(block)
                copy.write(TRAILER)
        except psycopg.Error as error:
            why = about_a_row(error)
            if why is None:
                raise
        self._connection.execute("ROLLBACK TO SAVEPOINT row")
        for own, shown in self._shown.items():
            why = why and why.replace(own, shown)
        return why


def _indexes(connection: psycopg.Connection[Any], relation: int) -> list[_Index]:
    """Those of the table and its partitions, each definition once."""
    rows = connection.execute(
        """SELECT c.relname, m.amname, pg_get_indexdef(c.oid), i.indexprs IS NULL AND i.indpred IS NULL,
                  (SELECT array_agg(a.attname::text) FROM pg_attribute a
                   WHERE a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey::int2[]))
           FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
           WHERE i.indislive AND (i.indrelid = %s OR i.indrelid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
           ORDER BY i.indrelid <> %s, c.relname""",
        [relation, relation, relation],
    ).fetchall()
    found: dict[str, _Index] = {}
    for name, method, definition, plain, columns in rows:
        body = definition[definition.index(f" USING {method} (") + 1 :]
        found.setdefault(body, _Index(name, body, frozenset(columns or ()) if plain else None))
    return list(found.values())


def _parses(connection: psycopg.Connection[Any], relation: int, names: Sequence[str]) -> bool:
    """Whether the server parses a column of the rows, or computes one from them."""
    row = connection.execute(
        """SELECT 1 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
           WHERE a.attrelid = %s AND NOT a.attisdropped AND a.attnum > 0 AND (a.attgenerated <> '' OR
             a.attname = ANY(%s) AND (t.typtype IN ('d', 'e') OR t.typname IN ('json', 'jsonb'))) LIMIT 1""",
        [relation, list(names)],
    ).fetchone()
    return row is not None


def _suspects(batch: pa.RecordBatch, names: Sequence[str], indexes: Sequence[_Index], parses: bool) -> pa.Array:
    if parses or len(names) > _WIDE or any(i.columns is None for i in indexes):
        return pa.repeat(True, batch.num_rows)
    suspects = pa.repeat(False, batch.num_rows)
    for index in indexes:
        held = [n for n in names if index.columns is not None and n in index.columns]
        suspects = pc.or_(suspects, pc.greater(bytes_of(batch, held), LONG_BYTES))
    return suspects
