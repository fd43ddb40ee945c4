"""A table of files: its sink, the types of its columns, checks of the user's table, and rows that it refuses.

One Arrow type represents all types with the same values:

Arrow                           stored as
boolean, int8..int64            the same
float, double                   the same
decimal up to 38 digits         the same
string, binary, any layout      string, binary
date                            date
timestamp with time zone        timestamp in UTC, microseconds
timestamp without               timestamp, microseconds
list, struct, map of these      list, struct, map
dictionary                      its values
others                          refused

Nulls where the table requires a value, in a column or in a field, element or entry within one, are found by looking;
what the library that writes the files refuses, by writing the rows nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.source import Finding
from delivered.kits import WarmClients
from delivered.kits.sql.sink import TableSink
from delivered.kits.sql.table import Types, find_refused, stored_columns, untyped
from delivered.kits.table import FileTableOptions
from delivered.kits.table.store import Store, find_outage
from delivered.model.capability import APPEND, Guarantee, WriteMode
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.rows import NOT_OF_A_ROW, because, first_of, first_reason, reason_of, rows_of_values

TRIAL_AGE_S = 10
"""How long a task judges rows by what it read of the table. Writers read it again."""
_trials: WarmClients[Trial] = WarmClients(4)


class FileTableSink(TableSink):
    types: ClassVar[TableTypes]

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        return preflight(self.options, guarantee, lambda: self.parts["check"](self.options))

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        table = self.parts["open_table"](self.options)
        return None if table is None and not self.options.create else partial(self._check_columns, table)

    def _check_columns(self, table: Any | None, schema: pa.Schema) -> None:
        columns = comparable(self.types, stored_columns(self.options.write, schema))
        if table is None:
            self.parts["check_created"](self.options, columns)
        else:
            self.parts["compare"](self.options, table, columns, adds=True)

    def ready_target(self, schema: pa.Schema) -> None:
        self.parts["ready"](self.options, stored_columns(self.options.write, schema))

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        parts = self.parts["unstorable_parts"](self.options.partition_by or (), batch)
        return first_of(super().invalid_rows(batch), parts)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        key = (self.options, batch.schema, int(time.monotonic() // TRIAL_AGE_S))
        with _trials.lent(key, lambda: self.parts["trial"](self.options, batch.schema)) as trial:
            return trial.refused(batch)


def canonical(kind: pa.DataType) -> pa.DataType | None:
    """The representative of all Arrow types with the same values; None: unsupported."""
    t = pa.types
    if t.is_dictionary(kind):
        return canonical(kind.value_type)
    if t.is_boolean(kind) or t.is_signed_integer(kind) or t.is_float32(kind) or t.is_float64(kind):
        return kind
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return pa.binary()
    if t.is_decimal128(kind) or t.is_date32(kind):
        return kind
    if t.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if t.is_map(kind):
        key, value = canonical(kind.key_type), canonical(kind.item_type)
        return pa.map_(key, value) if key is not None and value is not None else None
    if t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind):
        value = canonical(kind.value_type)
        return pa.list_(pa.field("element", value)) if value is not None else None
    if t.is_struct(kind):
        fields = [(f.name, canonical(f.type)) for f in kind]
        return None if not fields or any(k is None for _, k in fields) else pa.struct(fields)
    return None


def kept(field: pa.Field, kind: pa.DataType | None, system: str) -> pa.DataType:
    """
    Args:
        system: for the error: "a Delta table".

    Raises:
        UsageError: `kind` is None: the column's type is not supported.
    """
    if kind is None:
        raise UsageError("COLUMN_TYPE.UNSUPPORTED", column=field.name, type=field.type, system=system)
    return kind


def named_once(schema: pa.Schema) -> bool:
    """Whether there is a column, and names are unique ignoring case, as readers require, within structs too."""
    return bool(schema.names) and _unique(schema)


def _unique(fields: Iterable[pa.Field]) -> bool:
    lower = [f.name.lower() for f in fields]
    return len(set(lower)) == len(lower) and all(_unique(_children(f.type)) for f in fields)


def _children(kind: pa.DataType) -> list[pa.Field]:
    """Fields of a struct, or within a list or map."""
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


class TableTypes(Types):
    """Columns of a table of files, in the order of the rows."""

    columns_max = 1_000_000
    table: ClassVar[str]
    """For errors: "a Delta table"."""

    def canonical(self, kind: pa.DataType) -> pa.DataType | None:
        return canonical(kind)

    def declared(self, kind: pa.DataType) -> str | None:
        type_ = self.canonical(kind)
        return None if type_ is None else str(type_)

    def canonical_schema(self, schema: pa.Schema) -> pa.Schema:
        """Raises UsageError: a column's type is not supported."""
        return pa.schema([pa.field(f.name, kept(f, self.canonical(f.type), self.table)) for f in schema])

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError: no columns, duplicate names, or an unsupported type."""
        if not named_once(schema):
            raise UsageError("COLUMNS.TABLE", columns=schema.names, table=self.table)
        self.canonical_schema(schema)


def preflight(options: FileTableOptions, guarantee: Guarantee, look: Callable[[], None]) -> list[Finding]:
    """Args: look: checks the table; raises if it cannot be used."""
    mode = options.write
    if mode != APPEND and guarantee is not Guarantee.EXACTLY_ONCE:
        name = "upsert" if mode.upserts else "complete" if mode.complete else "overwrite"
        return [Finding.build("MODE_GUARANTEE.TABLE", refuses=True, name=name, guarantee=guarantee.value)]
    try:
        look()
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []


def probe(store: Store, folder: str) -> None:
    """Write and delete a small file. Raises the store's errors."""
    name = f"{folder}/probe-{uuid.uuid4().hex}"
    store.put(name, b"may this user write here?")
    store.remove([name])


def comparable(types: TableTypes, schema: pa.Schema) -> pa.Schema:
    """The canonical columns, for `compare`; those of an unknown type stay as they are."""
    known = types.canonical_schema(pa.schema([f for f in schema if not untyped(f)]))
    return pa.schema([f if untyped(f) else known.field(f.name) for f in schema])


def compare(
    options: FileTableOptions, there: pa.Schema, schema: pa.Schema, partitions: Collection[str], *, adds: bool = False
) -> list[pa.Field]:
    """Columns to add to the table.

    Args:
        there: the table's columns, with their nullability.
        schema: of the rows, canonical.
        partitions: the table's partition columns.
        adds: whether columns can be added now, if the options request it.

    Raises:
        UsageError: names or types do not match, or a column is missing on one side.
    """
    lower = {name.lower(): name for name in there.names}
    missing = [field for field in schema if field.name not in there.names]
    for field in schema:
        known = lower.get(field.name.lower(), field.name)
        if known != field.name and field in missing:
            raise UsageError("COLUMN_CASE.TABLE", column=field.name, known=known, where=options.where)
        fits = untyped(field) or field in missing or there.field(field.name).type.equals(field.type)
        if not fits:
            raise UsageError(
                "COLUMN_TYPE.TABLE",
                column=field.name,
                table_type=there.field(field.name).type,
                where=options.where,
                type=field.type,
            )
    if missing and not (adds and options.merge_schema):
        raise UsageError(
            "COLUMN_MISSING.TABLE_MERGE" if options.merge_schema else "COLUMN_MISSING.TABLE",
            where=options.where,
            missing=", ".join(repr(f.name) for f in missing),
            columns=there.names,
        )
    needed = dict.fromkeys([*(f.name for f in there if not f.nullable), *partitions])
    absent = [name for name in needed if name not in schema.names]
    if absent:
        nested = "" if set(absent) <= set(there.names) else "; partitioning by a field of a struct is not supported"
        raise UsageError("COLUMN_REQUIRED.TABLE", where=options.where, missing=absent, nested=nested)
    return missing


def check_supported(options: FileTableOptions, unsupported: Sequence[str]) -> None:
    """
    Args:
        unsupported: writer features that the table requires and this sink does not support.

    Raises:
        Refused: there are such features.
    """
    if unsupported:
        raise Refused("TABLE_FEATURES.WRITER", where=options.where, unsupported=", ".join(unsupported))


def missing_table(options: FileTableOptions, system: str, check: str) -> UsageError:
    """Args: check: what the user should check."""
    return UsageError("TABLE_MISSING.TABLE", system=system, where=options.where, check=check)


def unreachable(options: FileTableOptions, error: Exception, check: str) -> DeliveredError:
    """Translate an error of the client or the file system."""
    if isinstance(error, OSError) and options.local:
        return DeliveredError("TABLE_STORAGE", where=options.where, error=str(error)[:500])
    outage = None if options.local else find_outage(f"the table {options.where}", error)
    return outage or Unreachable(
        "TABLE_UNREACHABLE", where=options.where, error_type=type(error).__name__, error=str(error)[:500], check=check
    )


@contextlib.contextmanager
def but_missing(explained: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """`explained`, except for missing files, which are not a failure of the store."""
    missing_file = None
    with explained:
        try:
            yield
        except FileNotFoundError as error:
            missing_file = error
    if missing_file is not None:
        raise missing_file


_Mask = npt.NDArray[np.bool_]


def unfilled(mode: WriteMode, table: pa.Schema, batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row with such a null, null for the others; None: there are none.

    Args:
        mode: rows that delete others need no values.
        table: its columns, with the nullability of all of their parts.
        batch: its columns in the table's order of fields within structs.
    """
    reasons: pa.Array | None = None
    for field in table:
        if field.name in batch.schema.names and _requires(field):
            for path, mask in _unfilled(field, batch.column(field.name), field.name):
                why = f"column {path!r}: null, where the table requires a value"
                reasons = because(reasons, pa.array(mask), why)
    if reasons is None or mode.delete is None:
        return reasons
    deletes = pc.fill_null(batch.column(mode.delete), False)
    return pc.if_else(deletes, pa.scalar(None, pa.string()), reasons)


def has_nested_nulls(batch: pa.RecordBatch) -> bool:
    """Whether a field, an element or an entry within a column is null."""
    return any(_null_within(column) for column in batch.columns)


def check(where: str, batch: pa.RecordBatch, reasons: pa.Array | None) -> None:
    """
    Args:
        where: the table, for the error.
        reasons: as `unfilled` returns them.

    Raises:
        BadRecord: a row has a reason.
    """
    if (first := first_reason(reasons)) is None:
        return
    row, reason = first
    raise BadRecord("COLUMN_REQUIRED.ROW", row=row, num_rows=batch.num_rows, where=where, reason=reason)


def _requires(field: pa.Field) -> bool:
    """Whether a null may be missing a value anywhere in the field. The keys of maps are never null."""
    return not field.nullable or any(_requires(f) for f in _parts(field.type))


def _parts(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(kind):
        return [kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _unfilled(field: pa.Field, column: pa.Array, path: str) -> Iterator[tuple[str, _Mask]]:
    """Paths and rows of such nulls."""
    if not field.nullable and column.null_count:
        yield path, np.asarray(column.is_null())
    kind, t = field.type, pa.types
    if t.is_struct(kind):
        valid = np.asarray(column.is_valid())
        for at, part in enumerate(kind):
            if _requires(part):
                for inner, mask in _unfilled(part, column.field(at), f"{path}.{part.name}"):
                    if (mask & valid).any():
                        yield inner, mask & valid
    elif t.is_map(kind) and _requires(kind.item_field):
        for inner, mask in _unfilled(kind.item_field, column.items, f"{path}.value"):
            yield inner, rows_of_values(column, mask)
    elif (t.is_list(kind) or t.is_large_list(kind)) and _requires(kind.value_field):
        for inner, mask in _unfilled(kind.value_field, column.values, f"{path}[]"):
            yield inner, rows_of_values(column, mask)


def _null_within(column: pa.Array) -> bool:
    kind, t = column.type, pa.types
    if t.is_struct(kind):
        parts = [column.field(i) for i in range(kind.num_fields)]
    elif t.is_map(kind):
        parts = [column.items]
    elif t.is_list(kind) or t.is_large_list(kind):
        parts = [column.values]
    else:
        return False
    return any(part.null_count or _null_within(part) for part in parts)


def trial_work() -> Work:
    """Whose files are written nowhere."""
    return Work(Scope("trial", "trial", "trial"), 0, 0)


class Nowhere(Store):
    """Files that are counted, not kept."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def create(self, name: str) -> Any:
        del name
        return pa.MockOutputStream()

    def remove(self, names: object) -> None:
        """There are none."""


class Trial(Protocol):
    """Judges rows by the table as it was when it was first asked."""

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.sink.Sink.refused_rows`."""


def unwritable(
    batch: pa.RecordBatch, write: Callable[[pa.RecordBatch], None], known: pa.Array | None = None
) -> pa.Array | None:
    """The reason for each row for which `write` raises alone, null for the others; None: there are none.

    Of n rows with b bad ones, `write` is called about b * log2(n) times.

    Args:
        write: does with rows what a writer would do, but changes nothing. Also called with a row of nulls.
        known: reasons that rows have already; these are not tried.

    Raises:
        Exception: `write` raises for a row of nulls, too, or because of the machine: it is not because of a row.
    """
    tries = _Tries(write)
    suspects = pa.repeat(True, batch.num_rows) if known is None else pc.is_null(known)
    return first_of(known, find_refused(batch, suspects, tries.load))


@dataclass
class _Tries:
    write: Callable[[pa.RecordBatch], None]
    last: list[str] = dataclasses.field(default_factory=list)
    """The column of the last bad row: often that of the next one, too."""
    checked: bool = False

    def load(self, rows: pa.RecordBatch) -> str | None:
        why = self._raised(rows)
        if why is None:
            return None
        if not self.checked:
            self.write(_only(rows.slice(0, 1), None))
            self.checked = True
        return self._column(rows) + why if rows.num_rows == 1 else why

    def _raised(self, rows: pa.RecordBatch) -> str | None:
        try:
            self.write(rows)
        except BadRecord as error:
            return reason_of(error.__cause__) if isinstance(error.__cause__, Exception) else error.message
        except NOT_OF_A_ROW:
            raise
        except Exception as error:
            return reason_of(error)
        return None

    def _column(self, row: pa.RecordBatch) -> str:
        """The column whose value is refused where all others are null, in front of the reason."""
        for name in (*self.last, *row.schema.names):
            if self._raised(_only(row, name)) is not None:
                self.last = [name]
                return f"column {name!r}: "
        return ""


def _only(row: pa.RecordBatch, name: str | None) -> pa.RecordBatch:
    """The row with nulls in all other columns."""
    columns = [c if n == name else pa.nulls(1, c.type) for n, c in zip(row.schema.names, row.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=row.schema.names)
