"""Executor side: rows become text for LOAD DATA or INSERT, one transaction per shard; rows that the server refuses.

Text without a Python object per value: every column becomes an Arrow array of texts; one call of Arrow's
`binary_join_element_wise` joins the rows, and the data buffer of its result is the block. Text and binary columns are
copied, with a few bytes escaped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.mysql import TYPES, MysqlOptions, client, store, target
from delivered.connectors.mysql.client import ERRORS, Session, migrate
from delivered.kits.sql.database import Definition, give, quoted, take
from delivered.kits.sql.merge import check_rows, delete
from delivered.kits.sql.sink import PreparedRows, ShardWriter, new_nonce, write_marker
from delivered.kits.sql.table import (
    Mechanism,
    add_number,
    bytes_of,
    check_nulls,
    find_refused,
    find_too_long,
    long_values,
    stored_columns,
)
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import within
from delivered.model.rows import first_of, fitted
from delivered.model.work import Promise

BLOCK_ROWS = 16_384
BLOCK_BYTES = 4 << 20
"""Approximate bytes of values per block."""


@dataclass(frozen=True)
class Form:
    """Text format of rows.

    Attributes:
        first, between, last: delimiters of a row.
        null: text for null.
        quote: around everything but numbers.
        binary: before quoted binary values.
        escapes: bytes to escape and their replacements, in order.
    """

    first: bytes
    between: bytes
    last: bytes
    null: bytes
    quote: bytes
    binary: bytes
    escapes: tuple[tuple[bytes, bytes], ...]


LOAD = Form(
    b"", b"\t", b"\n", b"\\N", b"", b"",
    ((b"\\", b"\\\\"), (b"\t", b"\\t"), (b"\n", b"\\n"), (b"\0", b"\\0")),
)  # fmt: skip
INSERT = Form(b"(", b",", b"),", b"NULL", b"'", b"_binary", ((b"\\", b"\\\\"), (b"'", b"\\'"), (b"\0", b"\\0")))


def blocks(batch: pa.RecordBatch, form: Form) -> Iterator[tuple[int, memoryview]]:
    """Rows of `batch` as text, in bounded blocks, each with its number of rows.

    Args:
        batch: of plain types, with values that the server can store (`model.rows`).
    """
    size = batch.nbytes
    rows = BLOCK_ROWS if size <= BLOCK_BYTES else max(1, min(BLOCK_ROWS, batch.num_rows * BLOCK_BYTES // size))
    for start in range(0, batch.num_rows, rows):
        part = batch.slice(start, rows)
        yield part.num_rows, _block(part, form)


def _block(batch: pa.RecordBatch, form: Form) -> memoryview:
    fields = [_field(column, form) for column in batch.columns]
    # Append the row delimiter to a column: one array less to join.
    fields[0] = _around(fields[0], form.first, b"", form.null)
    fields[-1] = _around(fields[-1], b"", form.last, form.null)
    joined = pc.binary_join_element_wise(
        *fields, pa.scalar(form.between, pa.binary()), null_handling="replace", null_replacement=form.null.decode()
    )
    _, offsets, data = joined.buffers()
    ends = np.frombuffer(offsets, np.int32)
    return memoryview(data)[ends[joined.offset] : ends[joined.offset + batch.num_rows]]


def _around(column: pa.Array, before: bytes, after: bytes, null: bytes) -> pa.Array:
    if not before and not after:
        return column
    parts = [pa.scalar(x, pa.binary()) for x in (before, after, b"")]
    return pc.binary_join_element_wise(
        parts[0], column, parts[1], parts[2], null_handling="replace", null_replacement=null.decode()
    )


def _field(column: pa.Array, form: Form) -> pa.Array:
    """Encoded values; null stays null."""
    t = pa.types
    if t.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if t.is_null(kind):
        return pa.nulls(len(column), pa.binary())
    if t.is_string(kind) or t.is_binary(kind):
        return _quoted(_escaped(column.view(pa.binary()), form), form, form.binary if t.is_binary(kind) else b"")
    if t.is_boolean(kind):
        return column.cast(pa.uint8()).cast(pa.string()).view(pa.binary())
    if t.is_timestamp(kind):
        column = column.view(pa.int64()).view(pa.timestamp(kind.unit))  # in UTC, without a trailing Z
    if t.is_float32(kind):
        column = column.cast(pa.float64())  # the shortest text of the largest float parses to a larger double
    text = column.cast(pa.string()).view(pa.binary())
    number = t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)
    return text if number else _quoted(text, form, b"")


def _quoted(column: pa.Array, form: Form, before: bytes) -> pa.Array:
    if not form.quote:
        return column
    parts = [pa.scalar(x, pa.binary()) for x in (before + form.quote, form.quote, b"")]
    return pc.binary_join_element_wise(parts[0], column, parts[1], parts[2], null_handling="emit_null")


def _escaped(column: pa.Array, form: Form) -> pa.Array:
    """One scan over the bytes of all values usually shows that nothing needs escaping."""
    _, offsets, data = column.buffers()
    if data is None:
        return column
    ends = np.frombuffer(offsets, np.int32)
    values = np.frombuffer(data, np.uint8)[ends[column.offset] : ends[column.offset + len(column)]]
    for plain, escaped in form.escapes:
        if (values == plain[0]).any():
            column = pc.replace_substring(column, plain, escaped)
    return column


def packet_limit(session: Session) -> int | None:
    """Bytes of a statement at most, if rows are sent in statements; None: LOAD DATA sends them. Raises MySQLError."""
    local, packet = session.execute("SELECT @@local_infile, @@max_allowed_packet").fetchone()
    return None if local else int(packet)


class Loading:
    """Loads the rows of a shard in bounded blocks, by LOAD DATA LOCAL if the server allows it, else by INSERT.

    Inside an open transaction of `session`; used by one thread. The next block is encoded while the server loads one.
    LOAD DATA LOCAL implies IGNORE: it skips rows that violate a constraint and adjusts values, with only a warning. So
    warnings and missing rows are errors here. Methods raise BadRecord for a rejected row, and MySQLError.

    Args:
        into: the table, quoted for SQL.
        columns: the rows' columns, quoted, comma-separated.
    """

    def __init__(self, session: Session, options: MysqlOptions, into: str, columns: str) -> None:
        self._session = session
        self._options = options
        self._sent = 0
        self.rows = 0
        self._packet = packet_limit(session)
        if self._packet is None:
            self._form = LOAD
            self._statement = (
                f"LOAD DATA LOCAL INFILE 'delivered' INTO TABLE {into} CHARACTER SET binary "
                r"FIELDS TERMINATED BY '\t' ESCAPED BY '\\' LINES TERMINATED BY '\n' "
                f"({columns})"
            ).encode()
        else:
            self._form = INSERT
            self._statement = f"INSERT INTO {into} ({columns}) VALUES ".encode()

    def add(self, batch: pa.RecordBatch) -> None:
        """Args: batch: of plain types, with values that the server can store."""
        at = 0
        for rows, block in blocks(batch, self._form):
            self.end()
            if self._packet is None:
                self._session.start(self._statement, block)
                self._sent = rows
            else:
                self._insert(batch.slice(at, rows), block, self._packet)
            at += rows

    def _insert(self, rows: pa.RecordBatch, block: memoryview, packet: int) -> None:
        """One statement; more if the server would not accept it."""
        if len(self._statement) + len(block) < packet:
            self._session.start(self._statement + bytes(block[:-1]))
            self._sent = rows.num_rows
        elif rows.num_rows > 1:
            half = rows.num_rows // 2
            for part in (rows.slice(0, half), rows.slice(half)):
                self.end()
                ((_, smaller),) = blocks(part, self._form)
                self._insert(part, smaller, packet)
        else:
            raise client.row_refused(
                f"{long_values(rows)}as a statement it has {len(self._statement) + len(block)} bytes; the server's "
                f"max_allowed_packet is {packet}",
                self._options,
            )

    def end(self) -> None:
        """Wait until the server has loaded what was sent."""
        sent, self._sent = self._sent, 0
        if not sent:
            return
        rows, warnings = self._session.finish()
        if warnings:
            _, number, text = self._session.execute("SHOW WARNINGS LIMIT 1").fetchone()
            raise client.row_refused(f"{text} (warning {number}, one of {warnings})", self._options)
        if rows != sent:
            raise InvariantBroken("ROWS_DIFFER.MYSQL_LOADED", sent=sent, rows=rows)
        self.rows += rows


class LoadWriter(ShardWriter):
    """See `delivered.contract.sink.Writer`.

    exactly_once, two_phase: writes rows and a marker to the target, in an XA transaction that `prepare` leaves
        prepared. Then the session ends: in MariaDB no other session can commit the transaction while it is alive.
    exactly_once, one_transaction: writes rows to a staging table, which `prepare` commits.
    upserts and conditional writes: always writes to a staging table; except with one_transaction, `prepare` merges it
    into the target.
    at_least_once, at_most_once: writes rows to the target, which `prepare` commits; never resends a row.

    A shard without rows sends nothing and leaves nothing behind.
    """

    def __init__(
        self,
        options: MysqlOptions,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,
        left: Sequence[PreparedRows] = (),
    ) -> None:
        """Args: left: what earlier writers of this task may have left at the server."""
        self._options = options
        self._left = left
        self._staging = store.build_staging(options)
        self._server = self._staging.server
        self._work = work
        exactly_once = guarantee is Guarantee.EXACTLY_ONCE
        self._moved_later = exactly_once and options.mechanism is Mechanism.ONE_TRANSACTION
        self._prepares = exactly_once and not self._moved_later
        self._merges = options.write.merges
        self._schema = TYPES.plain_schema(schema)
        self._session: Session | None = None
        self._target: target.Target | None = None
        self._loading: Loading | None = None
        self._staged = ""
        self._gid = ""
        self._number = 0

    @property
    def possible(self) -> PreparedRows | None:
        """See `delivered.kits.sql.sink.ShardWriter`."""
        return PreparedRows(self._gid, self._staged) if self._gid or self._staged else None

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        if self._options.write.upserts:
            check_rows(self._options.write, batch)
        if self._session is None:
            self._session = take(self._server)
        with self._server.explaining():
            if self._loading is None:
                self._loading = self._begin(self._session)
            check_nulls(batch, self._ready.filled)
            self._loading.add(add_number(self._options, batch, self._number))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        session, loading = self._session, self._loading
        if session is None or loading is None:
            return Promise()
        with self._server.explaining():
            loading.end()
            if loading.rows != fingerprint.count:
                raise InvariantBroken(
                    "ROWS_DIFFER.MYSQL_SENT",
                    shard=self._work.shard,
                    batch=self._work.batch,
                    rows=loading.rows,
                    count=fingerprint.count,
                )
            handle = None
            if self._moved_later:
                handle = PreparedRows("", self._staged, self._ready.name, self._ready.columns)
            if self._merges:
                merge, definition = self._ready.merge, self._server.definition(session)
                kept = self._staging.reduce(session, self._staged, merge, loading.rows, definition)
                if handle is not None:
                    handle = replace(handle, kept=kept, stored=merge.columns, index=merge.index)
                else:
                    self._merge(session, definition)
            if self._prepares:
                handle = PreparedRows(self._promise(session, fingerprint))
            else:
                session.execute("COMMIT")
        self._session = self._loading = None
        staged, self._staged = self._staged, ""
        if self._prepares:
            self._server.discard(session)
            return Promise(handle)
        with contextlib.suppress(self._server.errors()):  # already prepared; the next start cleans up
            if staged:
                client.release_session(session)
            if staged and not self._moved_later:
                self._staging.drop(session, staged)
        give(self._server, session)
        return Promise(handle)

    def abort(self) -> None:
        session, staged = self._session, self._staged
        self._session = self._loading = None
        self._staged = ""
        # The server rolls back a closed session's transaction, but not its CREATE TABLE.
        self._server.discard(session)
        if staged:
            with contextlib.suppress(DeliveredError, self._server.errors()), within(CONNECT_TIMEOUT_S):
                fresh = self._server.connect("task")
                try:
                    self._staging.drop(fresh, staged)
                finally:
                    self._server.discard(fresh)

    @property
    def _ready(self) -> target.Target:
        if self._target is None:
            raise InvariantBroken("NO_TARGET.UNCHECKED")
        return self._target

    def _begin(self, session: Session) -> Loading:
        self._server.migrate(session)
        for rows in self._left:
            if rows.gid:
                store.end(session, rows.gid, commit=False)
            if rows.staged:
                self._staging.drop(session, rows.staged)
        if self._prepares:
            store.check_allowed(session, self._options)  # fail before the first row, not after the last
            if self._merges:
                store.give_up_earlier(session, self._work, self._options)
            self._gid = store.new_id(self._work, self._options.ledger_schema)
        self._target = ready = target.ready(session, self._options, self._schema)
        self._number = target.batch_number(session, self._server, self._options, self._work)
        if self._moved_later or self._merges:
            names = store.build_names(self._work.scope, self._options.ledger_schema)
            nonce = store.parse_nonce(self._gid) if self._prepares else new_nonce()
            table = names.staging(self._work, nonce)
            client.register_session(session, nonce)
            store.create(session, self._options, table, ready)
            self._staged = table
            session.execute("START TRANSACTION")
            return Loading(session, self._options, self._staging.full(table), ready.columns)
        if self._prepares:
            self._open_xa(session)
        else:
            session.execute("START TRANSACTION")
        return Loading(session, self._options, ready.name, ready.columns)

    def _open_xa(self, session: Session) -> None:
        if not session.nonce:
            client.register_session(session, store.parse_nonce(self._gid))
        session.execute(f"XA START {store.xid(self._gid)}")

    def _merge(self, session: Session, definition: Definition) -> None:
        """Merge reduced rows into the target, in the task's own transaction."""
        if self._prepares:
            session.execute("COMMIT")  # only the staging table
            self._open_xa(session)
        merge = self._ready.merge
        self._staging.add(session, self._staged, merge, self._work, definition)
        if self._options.write.delete is not None:
            delete(session, self._options, merge, self._staging.full(self._staged), definition)
        self._staging.check_types(session, [self._staged], merge.columns)

    def _promise(self, session: Session, fingerprint: Fingerprint) -> str:
        write_marker(session, self._server.dialect, self._work, self._gid, fingerprint)
        session.execute(f"XA END {store.xid(self._gid)}")
        session.execute(f"XA PREPARE {store.xid(self._gid)}")
        return self._gid


_TIMESTAMPS_US = (1_000_000, (2**31 - 1) * 1_000_000)
"""Of the type timestamp in every version. Later ones of MariaDB end in 2106."""


def refused_rows(session: Session, options: MysqlOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`. Outside a transaction.

    Creates the table first if the options request it. Loads suspicious rows into an empty temporary table like the
    target, with its generated columns but without its constraints, except MariaDB's on JSON columns.

    Raises:
        UsageError, MySQLError: the table cannot take rows of this schema at all.
    """
    schema = TYPES.plain_schema(batch.schema)
    batch, existing = fitted(batch, schema), target.find(session, options)
    if existing is None and not options.create:
        return None
    migrate(session, options.ledger_schema)
    target.ready(session, options, schema)
    existing = existing or target.find(session, options)
    if existing is None:
        return None
    columns = _columns(session, existing)
    names = stored_columns(options.write, schema).names
    widths: dict[str, dict[str, int]] = {"characters": {}, "bytes": {}}
    for name in names:
        column = columns[name.lower()]
        if column.width is not None:
            widths["characters" if column.kind == "varchar" else "bytes"][name] = column.width
    reasons = None
    for unit, of in widths.items():
        reasons = first_of(reasons, find_too_long(batch, of, unit))
    valid = _valid_json(session, existing)
    suspects = _suspects(batch, names, columns, bool(valid), packet_limit(session))
    if reasons is not None:
        suspects = pc.and_(suspects, pc.is_null(reasons))
    if not pc.any(suspects).as_py():
        return reasons
    own = f"try_{new_nonce()}"
    table = f"{quoted(options.ledger_schema)}.{quoted(own)}"
    body = [f"{quoted(c.name)} {c.declared}" for c in columns.values()]
    body += [f"CHECK ({clause})" for clause in valid]
    session.execute(f"CREATE TEMPORARY TABLE {table} ({', '.join(body)}) ENGINE = InnoDB")
    into = ", ".join(map(quoted, names))

    def load(rows: pa.RecordBatch) -> str | None:
        try:
            loading = Loading(session, options, table, into)
            loading.add(rows)
            loading.end()
        except BadRecord as error:
            return client.refusal_text(error).replace(own, options.table_text)
        except ERRORS as error:
            if not client.about_a_row(error):
                raise
            return client.error_message(error).replace(own, options.table_text)
        finally:
            session.execute(f"DELETE FROM {table}")
        return None

    try:
        return first_of(reasons, find_refused(batch.select(names), suspects, load))
    finally:
        session.execute(f"DROP TEMPORARY TABLE {table}")


@dataclass(frozen=True)
class _Column:
    """
    Attributes:
        width: of texts and bytes, unless more than an Arrow value has.
        computed: an expression.
        declared: its declaration, without constraints.
    """

    name: str
    kind: str
    charset: str | None
    width: int | None
    computed: str | None
    declared: str


def _columns(session: Session, table: target.ServerTable) -> dict[str, _Column]:
    """By name in lower case."""
    rows = session.execute(
        "SELECT column_name, data_type, column_type, character_set_name, collation_name, character_maximum_length, "
        "generation_expression FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
        "ORDER BY ordinal_position",
        [table.base, table.name],
    ).fetchall()
    columns = {}
    for name, kind, shown, charset, collation, width, computed in rows:
        declared = f"{shown} CHARACTER SET {charset} COLLATE {collation}" if charset else shown
        declared += f" AS ({computed}) STORED" if computed else " NULL"
        known = None if width is None or kind in ("longtext", "longblob") else int(width)
        columns[name.lower()] = _Column(name, kind, charset, known, computed, declared)
    return columns


def _valid_json(session: Session, table: target.ServerTable) -> list[str]:
    """MariaDB's form of the type JSON is a check of its own."""
    if not session.mariadb:
        return []
    rows = session.execute(
        "SELECT check_clause FROM information_schema.check_constraints WHERE constraint_schema = %s AND "
        "table_name = %s AND check_clause LIKE 'json_valid(%%'",
        [table.base, table.name],
    ).fetchall()
    return [clause for (clause,) in rows]


def _suspects(
    batch: pa.RecordBatch, names: list[str], columns: dict[str, _Column], checked: bool, packet: int | None
) -> pa.Array:
    if checked or any(c.computed for c in columns.values()):
        return pa.repeat(True, batch.num_rows)
    suspects = pa.repeat(False, batch.num_rows)
    if packet is not None:  # escaped, values may be twice as long
        suspects = pc.greater(bytes_of(batch, names), (packet - 256 * len(names)) // 2)
    for name in names:
        column, values = columns[name.lower()], batch.column(name)
        if pa.types.is_null(values.type):
            continue
        mask = None
        if column.kind == "timestamp":
            micros = values.view(pa.int64())
            mask = pc.or_(pc.less(micros, _TIMESTAMPS_US[0]), pc.greater(micros, _TIMESTAMPS_US[1]))
        elif column.charset not in (None, "utf8mb4"):
            mask = pc.match_substring_regex(values, r"[\x{10000}-\x{10FFFF}]")
        if mask is not None:
            suspects = pc.or_(suspects, pc.fill_null(mask, False))
    return suspects
