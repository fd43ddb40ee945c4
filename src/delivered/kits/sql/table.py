"""The user's table, for any database: its options, types of columns, columns compared with the rows, errors, a scan of
its rows, and rows that it refuses, found before they are sent."""

from __future__ import annotations

import hashlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self
from urllib.parse import SplitResult, parse_qs, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import BoundedScan
from delivered.contract.source import Finding
from delivered.kits.options import if_not_exists, merge_schema, not_blank, password_in_url, sink_name, write_mode
from delivered.kits.sql.database import quoted
from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord, UsageError, did_you_mean
from delivered.model.options import (
    Options,
    OptionType,
    Unfit,
    check_database_url,
    choice,
    integer,
    names_database,
    option,
    resolve_secret,
)
from delivered.model.rows import Range, because, check_storable, unstorable

LEDGER_SCHEMA_DEFAULT = "delivered"
LOCK_TIMEOUT_S_DEFAULT = 60


class Mechanism(StrEnum):
    """How a database server's sink provides exactly_once."""

    ONE_TRANSACTION = "one_transaction"
    """Tasks commit shards to staging tables; one driver transaction moves the rows and writes the decision."""
    TWO_PHASE = "two_phase"
    """Tasks leave prepared transactions; the driver decides, then commits each."""


class TableOptions(Options):
    """Base of a connector's options."""

    create: bool
    batch_column: str | None = None
    merge_schema: bool = merge_schema("before the first batch, after recovery; they are nullable")
    write: WriteMode = write_mode()

    @property
    @abstractmethod
    def table_text(self) -> str:
        """The table as the user wrote it."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The database, for messages: "at host:5432/shop"."""

    @property
    def sink_name(self) -> str:
        return sink_name(self.table_text)


@dataclass(frozen=True)
class TableName:
    """
    Attributes:
        schema, table: as stored at the server; schema None: the session's default.
    """

    schema: str | None
    table: str


class ServerOptions(TableOptions):
    """Base of the options of a sink that writes to a database server.

    A connector redeclares `url`, `named` and `ledger_schema` with its system's types.

    Attributes:
        url: without a password.
        password: the password or a reference; resolved where it is used.
    """

    url: str
    named: TableName
    user: str | None = option("user", "User to log in as.", default=None)
    password: str | None = option(
        "password",
        "The user's password; prefer env:NAME or file:PATH.",
        default=None,
        secret=True,
        example="env:PASSWORD",
    )
    mechanism: Mechanism = option(
        "mechanism",
        "How exactly_once is implemented: one_transaction or two_phase.",
        choice(Mechanism),
        default=Mechanism.ONE_TRANSACTION,
    )
    create: bool = if_not_exists(default=False)
    batch_column: str | None = option(
        "batchColumn",
        "Name of a bigint column that gets the number of the batch that wrote the row; an audit then reads only rows "
        "of batches that no earlier one has compared. Created and indexed with the table; not a column of the rows.",
        OptionType(not_blank),
        default=None,
        example="batch",
    )
    ledger_schema: str
    lock_timeout_s: int = option(
        "lockTimeout",
        "Seconds that a task or a decision waits for a lock held by another transaction.",
        integer(1, 3600),
        default=LOCK_TIMEOUT_S_DEFAULT,
    )

    @property
    def schema(self) -> str | None:
        return self.named.schema

    @property
    def table(self) -> str:
        return self.named.table

    @property
    def place(self) -> str:
        """Host, port and database, for messages."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path

    @property
    def table_text(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"

    @property
    def where(self) -> str:
        """For messages."""
        return f"at {self.place}"

    def password_resolved(self) -> str | None:
        """The resolved password; use at once, do not keep."""
        return None if self.password is None else resolve_secret("password", self.password)


def database_url(
    form: str,
    schemes: Collection[str],
    secret: Collection[str],
    check: Callable[[SplitResult], bool] | None = None,
) -> OptionType[str]:
    """URL of a database: one of these schemes, optionally after jdbc:, a database, no password.

    Args:
        form: example for messages.
        secret: parameters that hold passwords.
        check: the system's own rules; may raise Unfit, or ValueError as urlsplit does.
    """

    def read(text: str) -> str:
        url = text.strip().removeprefix("jdbc:")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in schemes and bool(parts.path.strip("/")) and names_database(parts)
            usable = usable and (check is None or check(parts))
        except ValueError:
            usable = False
        if not usable:
            # The value is not shown: an unparsable URL may contain a password.
            raise Unfit.build("OPTION_VALUE.FORM", form=form)
        if parts.password is not None or not parse_qs(parts.query).keys().isdisjoint(secret):
            raise password_in_url("env:DATABASE_PASSWORD")
        check_database_url(url)
        return url

    return OptionType(read)


def identifier(fits: Callable[[str], bool], rule: str) -> OptionType[str]:
    """An identifier of the server.

    Args:
        fits: whether the server accepts it.
        rule: what the server accepts, as a sentence.
    """

    def read(name: str) -> str:
        if not name.strip() or "\0" in name or not fits(name):
            raise Unfit.build("OPTION_VALUE.TABLE_PART", name=name, rule=rule)
        return name

    return OptionType(read)


def table_name(
    name: OptionType[str], quotes: str, fold: Callable[[str], str], outer: str, hint: str
) -> OptionType[TableName]:
    """A table name, with or without a schema.

    Args:
        outer: the system's term for a schema.
        quotes: quote characters for names; doubled inside a name.
        fold: case folding of unquoted names.
        hint: the next step if the text is not a table name.
    """
    part = "|".join([rf"{q}(?:[^{q}\0]|{q}{q})+{q}" for q in quotes] + [r"[^\W\d][\w$]*"])
    qualified = re.compile(rf"(?:({part})\s*\.\s*)?({part})")

    def plain(text: str) -> str:
        quote = text[0]
        return name.read(text[1:-1].replace(quote * 2, quote) if quote in quotes else fold(text))

    def read(text: str) -> TableName:
        match = qualified.fullmatch(text.strip())
        if match is None:
            raise Unfit.build("OPTION_VALUE.TABLE_NAME", text=text, outer=outer, action=hint)
        schema, table = match.groups()
        return TableName(schema and plain(schema), plain(table))

    return OptionType(read)


# Types of columns.


class Types(ABC):
    """A database's support of Arrow types. Stateless."""

    system: ClassVar[str]
    """Display name of the system."""
    columns_max: ClassVar[int]
    name_max: ClassVar[tuple[int, str] | None] = None
    """Length of a column's name, in bytes or characters."""
    folds_case: ClassVar[bool] = False
    """Names are case-insensitive."""
    nested_hint: ClassVar[str] = ""
    range: ClassVar[Range]
    """The values that it stores."""

    def unstorable(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The reason for each row that no table accepts, null for the others; None: all rows are valid.

        Constraints of the table are up to the database: a row that violates one fails the query.
        """
        return unstorable(self.range, batch)

    def check_values(self, batch: pa.RecordBatch) -> None:
        """Raise BadRecord for the first row that `unstorable` has a reason for."""
        check_storable(self.system, batch, self.unstorable(batch))

    @abstractmethod
    def declared(self, kind: pa.DataType) -> str | None:
        """SQL type of a new column for a plain type; None: unsupported."""

    def keeps(self, kind: pa.DataType) -> bool:
        """Whether values of a plain type are stored without loss."""
        return self.declared(kind) is not None

    def orders(self, kind: pa.DataType) -> bool:
        """Whether values of a plain type sort as they do in Arrow and Spark."""
        t = pa.types
        return bool(t.is_integer(kind) or t.is_date32(kind) or t.is_timestamp(kind))

    def plain(self, kind: pa.DataType) -> pa.DataType:
        """The representative of all types with the same values."""
        t = pa.types
        if t.is_dictionary(kind):
            return self.plain(kind.value_type)
        if t.is_large_string(kind) or t.is_string_view(kind):
            return pa.string()
        if t.is_large_binary(kind) or t.is_binary_view(kind):
            return pa.binary()
        if t.is_timestamp(kind) and kind.tz is not None:
            return pa.timestamp(kind.unit, "UTC")
        return kind

    def plain_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of `schema` in their order, with plain types, without metadata."""
        return pa.schema([pa.field(f.name, self.plain(f.type)) for f in schema])

    def canonical_schema(self, schema: pa.Schema) -> pa.Schema:
        """Plain types, columns sorted by name: a table's column order does not matter."""
        return pa.schema(sorted(self.plain_schema(schema), key=lambda f: f.name))

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError: a column cannot be stored."""
        if not 1 <= len(schema) <= self.columns_max:
            raise UsageError("COLUMNS.COUNT", count=len(schema), columns_max=self.columns_max)
        seen: dict[str, str] = {}
        for field in schema:
            self._check_name(field.name, seen)
            if not self.keeps(self.plain(field.type)):
                nested = pa.types.is_nested(field.type)
                way = f'to_json("{field.name}")' if nested else f'col("{field.name}").cast("string")'
                raise UsageError(
                    "TYPE_UNKNOWN.SYSTEM",
                    column=field.name,
                    type=field.type,
                    system=self.system,
                    cast=way,
                    nested_hint=self.nested_hint,
                )

    def _check_name(self, name: str, seen: dict[str, str]) -> None:
        known = name.lower() if self.folds_case else name
        if known in seen:
            why = f"are the same to {self.system}, which ignores case" if seen[known] != name else "have the same name"
            raise UsageError("COLUMN_TWICE", first=seen[known], name=name, reason=why)
        seen[known] = name
        limit, unit = self.name_max or (None, "")
        length = len(name.encode()) if unit == "bytes" else len(name)
        if not name or "\0" in name or (limit is not None and length > limit):
            bound = f": {self.system} allows 1 to {limit} {unit}" if limit is not None else ""
            raise UsageError("COLUMN_NAME.INVALID", name=name, bound=bound)


class ServerTypes(Types):
    """Types of a database whose columns are typed."""

    @abstractmethod
    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
        """Names of the database's types that store values of `kind` without loss, the best match first."""

    def keeps(self, kind: pa.DataType) -> bool:
        return bool(self.fitting(kind)) or bool(pa.types.is_null(kind))

    def orders(self, kind: pa.DataType) -> bool:
        return super().orders(kind) or bool(pa.types.is_decimal128(kind))

    def plain(self, kind: pa.DataType) -> pa.DataType:
        kind, t = super().plain(kind), pa.types
        if t.is_timestamp(kind) and kind.unit != "ns":
            return pa.timestamp("us", kind.tz)
        return pa.time64("us") if t.is_time(kind) and kind.unit != "ns" else kind


def shown(schema: pa.Schema) -> str:
    """Columns and types, for messages."""
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def check_widths(batch: pa.RecordBatch, widths: Mapping[str, int]) -> None:
    """
    Args:
        widths: column -> maximum number of characters.

    Raises:
        BadRecord: a text is longer; a server cuts spaces at its end without an error.
    """
    for name, width in widths.items():
        column = batch.column(name)
        longest = 0 if pa.types.is_null(column.type) else pc.max(pc.utf8_length(column)).as_py() or 0
        if longest > width:
            raise BadRecord("TEXT_TOO_LONG", name=name, longest=longest, width=width)


def check_nulls(batch: pa.RecordBatch, filled: Collection[str]) -> None:
    """
    Args:
        filled: columns whose nulls the database replaces by values of its own.

    Raises:
        BadRecord: a row has null there.
    """
    for name in filled:
        if name in batch.schema.names and batch.column(name).null_count:
            raise BadRecord("NULL_FILLED", name=name)


# The column of the batch; `batches.py` says what its numbers are good for.

BATCH_KIND = "bigint"


def stored_columns(mode: WriteMode, schema: pa.Schema) -> pa.Schema:
    """The columns that are stored in the table."""
    return pa.schema([f for f in schema if f.name not in (mode.delete, mode.expected)])


def numbered_schema(options: TableOptions, schema: pa.Schema) -> pa.Schema:
    """The rows' columns and the one of the batch, if there is one."""
    name = options.batch_column
    return schema if name is None else schema.append(pa.field(name, pa.int64()))


def record_schema(options: TableOptions, schema: pa.Schema) -> pa.Schema:
    """Without the column of the batch: what an audit and a fingerprint see."""
    return pa.schema([f for f in schema if f.name != options.batch_column])


def add_number(options: TableOptions, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
    if options.batch_column is None:
        return batch
    column = pa.repeat(pa.scalar(number, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, column], schema=numbered_schema(options, batch.schema))


def check_rows_lack(options: TableOptions, schema: pa.Schema, *, folds_case: bool) -> None:
    """Raises UsageError: the rows have a column of this name themselves."""
    own = options.batch_column
    for name in schema.names if own is not None else ():
        if name == own or (folds_case and name.lower() == str(own).lower()):
            raise UsageError("COLUMN_NAME.BATCH", name=name)


def check_column(
    options: ServerOptions, columns: Mapping[str, Column], indexed: Callable[[str], bool]
) -> Iterator[Finding]:
    """Check the column of a table that is there.

    Args:
        indexed: whether an index starts with this column.

    Raises:
        UsageError: it is missing, and not to be added; or of another type.
    """
    name = options.batch_column
    if name is None:
        return
    table, column = options.table_text, columns.get(name)
    spelt = name if re.fullmatch("[a-z_][a-z0-9_]*", name) else quoted(name)
    index = f"CREATE INDEX rows_by_batch ON {table} ({spelt})"
    if column is None:
        if options.merge_schema:
            return
        statement = f"ALTER TABLE {table} ADD COLUMN {spelt} {BATCH_KIND}"
        raise UsageError(
            "BATCH_COLUMN.MISSING", table=table, where=options.where, name=name, statement=statement, index=index
        )
    if column.computed:
        raise column_computed(table, name)
    if column.kind not in ("int8", BATCH_KIND):
        raise UsageError(
            "BATCH_COLUMN.TYPE", table=table, where=options.where, name=name, declared=column.shown, kind=BATCH_KIND
        )
    if not indexed(name):
        yield Finding.build("BATCH_COLUMN_INDEX", refuses=False, table=table, name=name, index=index)


# The table as it is at the server.

SLICES_MAX = 256


class TableScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Rows keep the Arrow types they were written with."""

    def schema(self) -> pa.Schema:
        """Raises UsageError: this package never wrote to the table."""
        schema = self._stored_schema()
        if schema is None:
            raise self._never_written()
        return schema

    @abstractmethod
    def _stored_schema(self) -> pa.Schema | None:
        """The table's schema according to the ledger; None: unknown."""

    @abstractmethod
    def _never_written(self) -> UsageError: ...


@dataclass(frozen=True)
class RowSum:
    """Rows of a table, whatever their order: how many, and the sum of their hashes, in hexadecimal."""

    count: int = 0
    sum: str = ""

    @classmethod
    def of(cls, rows: Iterable[bytes]) -> Self:
        """Args: rows: each as bytes that only equal rows have."""
        count = total = 0
        for row in rows:
            count += 1
            total += int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "big")
        return cls(count, f"{total % 2**64:016x}")

    def __add__(self, other: RowSum) -> RowSum:
        total = int(self.sum or "0", 16) + int(other.sum or "0", 16)
        return RowSum(self.count + other.count, f"{total % 2**64:016x}")


def difference(then: RowSum, now: RowSum) -> str | None:
    """What happened to rows, for messages; None: nothing that shows."""
    if now.count < then.count:
        return f"{then.count - now.count} of {then.count} rows were deleted"
    if now.count > then.count:
        return f"{now.count - then.count} rows were added among {then.count}"
    return f"{then.count} rows are as many as before, and some are others" if now != then else None


def steps(first: int, stop: int, at_least: int, total: int | None = None) -> list[tuple[int, int]]:
    """Split a range into at most `SLICES_MAX` pieces, the last one shorter.

    Args:
        total: total length of all ranges; None: this is the only one.
    """
    step = max(at_least, -(-(stop - first if total is None else total) // SLICES_MAX))
    return [(at, min(at + step, stop)) for at in range(first, stop, step)]


def spread(first: int, stop: int, count: int, length: int) -> list[tuple[int, int]]:
    """Ranges of one length, spread evenly over a longer one; all of it if they would cover it."""
    if stop - first <= count * length:
        return [(first, stop)] if first < stop else []
    starts = (first + (stop - first - length) * n // max(1, count - 1) for n in range(count))
    return [(start, start + length) for start in starts]


_MARK = re.compile(r"delivered ([0-9a-f]{32})")


def new_comment() -> str:
    """A comment that identifies a table created here, for databases without table ids."""
    return f"delivered {uuid.uuid4().hex}"


def id_in_comment(text: str | None) -> str | None:
    """The id in a table's comment; None: it was not created here."""
    comment = _MARK.search(text or "")
    return None if comment is None else comment[1]


def missing_error(table: str, where: str, next_step: str) -> UsageError:
    return UsageError("TABLE_MISSING.SQL", table=table, where=where, action=next_step)


def missing_at_server(options: ServerOptions, known: Iterable[str] = ()) -> UsageError:
    """Args: known: tables that there are."""
    action = 'create the table, correct the option dbtable, or add .option("ifNotExists", "true")'
    return missing_error(options.table_text, options.where, did_you_mean(options.table, known) + action)


def text_of(options: ServerOptions) -> str:
    """The table as the user wrote it, quoted for SQL."""
    return quoted(options.table) if options.schema is None else f"{quoted(options.schema)}.{quoted(options.table)}"


def permission(options: ServerOptions, user: str, rights: Sequence[str], table: str) -> Finding:
    lacks = " and ".join(rights)
    return Finding.build(
        "PERMISSION.TABLE",
        refuses=True,
        user=user,
        missing=lacks,
        table=options.table_text,
        place=options.place,
        rights=", ".join(rights),
        quoted_table=table,
    )


def no_right_to_alter(options: ServerOptions, said: Exception, statement: str, grant: str) -> UsageError:
    """
    Args:
        said: the server's error.
        statement: adds the columns.
        grant: gives the user the right to run it.
    """
    return UsageError(
        "PERMISSION.ALTER",
        table=options.table_text,
        where=options.where,
        error=" ".join(str(said.args[-1]).split()),
        statement=statement,
        grant=grant,
    )


def never_written(table: str, where: str, options: str) -> UsageError:
    return UsageError("TABLE_UNKNOWN", table=table, where=where, options=options)


def column_computed(table: str, column: str) -> UsageError:
    return UsageError("COLUMN_COMPUTED", column=column, table=table)


def column_missing(options: TableOptions, field: str, has: Collection[str], next_step: str) -> UsageError:
    action = f'add it with .option("mergeSchema", "true"), or {next_step}; or drop the column from the rows'
    return UsageError(
        "COLUMN_MISSING.SQL_MERGE" if options.merge_schema else "COLUMN_MISSING.SQL",
        table=options.table_text,
        where=options.where,
        field=field,
        columns=", ".join(has),
        action=action,
    )


def check_known(options: TableOptions, known: pa.Schema, now: pa.Schema, next_step: str) -> None:
    """Check the rows' columns against those written before. Rows may lack columns that were added to the table later.

    Raises:
        UsageError: they are others, or of other types.
    """
    lacking = [
        f for f in known if f.name not in now.names and not (options.merge_schema or _ADDED in (f.metadata or {}))
    ]
    fresh = [f for f in now if f.name not in known.names]
    if lacking or fresh or _other_types(known, now):
        raise _changed(options, known, now, next_step)


def extend(options: TableOptions, known: pa.Schema, now: pa.Schema, next_step: str) -> pa.Schema:
    """The columns written before and those of the rows, sorted by name; the new ones are marked.

    Raises:
        UsageError: a column has another type.
    """
    if _other_types(known, now):
        raise _changed(options, known, now, next_step)
    fresh = [f.with_metadata({_ADDED: "1"}) for f in find_absent(options, now, known.names)]
    return pa.schema(sorted([*known, *fresh], key=lambda f: f.name))


_ADDED = b"delivered.added"
"""Marks a column that was added after the first rows: rows of an earlier transform do not have it."""


def _other_types(known: pa.Schema, now: pa.Schema) -> bool:
    return any(f.name in known.names and known.field(f.name).type != f.type for f in now)


def _changed(options: TableOptions, known: pa.Schema, now: pa.Schema, next_step: str) -> UsageError:
    merge = "" if options.merge_schema or _other_types(known, now) else '.option("mergeSchema", "true"); or '
    return UsageError(
        "SCHEMA_CHANGED.SQL",
        table=options.table_text,
        where=options.where,
        known=shown(known),
        columns=shown(now),
        merge=merge,
        action=next_step,
    )


def find_absent(options: TableOptions, schema: pa.Schema, columns: Collection[str]) -> list[pa.Field]:
    """The rows' columns that the table lacks, and `mergeSchema` adds.

    Raises:
        UsageError: a name differs only in case from one of the table's, or the type of a new column is unknown.
    """
    lower = {name.lower(): name for name in columns}
    missing = [f for f in schema if f.name not in columns]
    for f in missing:
        known = lower.get(f.name.lower())
        if known is not None:
            raise UsageError(
                "COLUMN_CASE.SQL", column=f.name, known=known, table=options.table_text, where=options.where
            )
        if pa.types.is_null(f.type):
            raise UsageError("TYPE_UNKNOWN.ADDED", column=f.name, table=options.table_text, where=options.where)
    return missing


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        kind: name of the type, as in `ServerTypes.fitting`.
        shown: the type in SQL.
        precision, scale: of a bounded decimal; else None.
        required: NOT NULL without a default.
        computed: a generated column, or an identity column GENERATED ALWAYS.
        width: characters of a bounded text; else None.
        fills_null: the server replaces null by a value of its own.
    """

    kind: str
    shown: str
    precision: int | None
    scale: int | None
    required: bool
    computed: bool
    width: int | None = None
    fills_null: bool = False


def compare(
    options: ServerOptions, types: ServerTypes, schema: pa.Schema, columns: Mapping[str, Column], change: str
) -> tuple[str, ...]:
    """Check a schema against a table's columns; return the type of each.

    Args:
        change: SQL that changes a column's type: "ALTER COLUMN {name} TYPE".

    Raises:
        UsageError: a column is missing or of another type.
    """
    table, kinds = options.table_text, []
    for f in schema:
        column = columns.get(f.name)
        if column is None:
            wanted = "..." if untyped(f) else types.declared(f.type)
            action = f"ALTER TABLE {table} ADD COLUMN {quoted(f.name)} {wanted}"
            raise column_missing(options, f.name, columns, action)
        if column.computed:
            raise column_computed(table, f.name)
        if not _fits(types, f.type, column):
            raise UsageError(
                "COLUMN_TYPE.SQL",
                column=f.name,
                table=table,
                declared=column.shown,
                type=f.type,
                wanted="another type" if untyped(f) else types.declared(f.type),
                change=change.format(name=quoted(f.name)),
            )
        kinds.append(column.kind)
    absent = [n for n, c in columns.items() if c.required and n not in schema.names]
    if absent:
        raise UsageError("COLUMN_REQUIRED.SQL", missing=", ".join(map(repr, absent)), table=table)
    return tuple(kinds)


def check_typed(options: ServerOptions, schema: pa.Schema) -> None:
    """Check that a table can be created from a schema. Raises UsageError: a column has the type null."""
    if any(untyped(f) for f in schema):
        raise UsageError(
            "TYPE_UNKNOWN.CREATED", table=options.table_text, columns=[f.name for f in schema if untyped(f)]
        )


def untyped(f: pa.Field) -> bool:
    """Whether its type is null."""
    return bool(pa.types.is_null(f.type))


def _fits(types: ServerTypes, kind: pa.DataType, column: Column) -> bool:
    if pa.types.is_null(kind):
        return True
    if column.kind not in types.fitting(kind):
        return False
    if column.precision is None or column.scale is None or not pa.types.is_decimal(kind):
        return True
    # Another scale would change the digits, or round.
    return bool(kind.scale == column.scale and kind.precision <= column.precision)


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
