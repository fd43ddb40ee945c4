"""The user's table: create it, compare it with the rows, add columns. Changes no rows."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.client import (
    RETRIES_MAX,
    DataFile,
    Store,
    delta,
    explained,
    open_table,
    require_table,
    sync_versions,
)
from delivered.kits.sql.table import untyped
from delivered.kits.table import target
from delivered.kits.table.store import storage_options
from delivered.kits.table.target import TableTypes, canonical
from delivered.model.capability import APPEND
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.rows import RANGES, because, unstorable

# Partition values: as text in the table's log, and as folders.

NULL = "__HIVE_DEFAULT_PARTITION__"
FOLDER_BYTES_MAX = 200
"""Of one folder's name: file systems allow 255, object stores about 1,000 for the complete path."""

Part = tuple[tuple[str, str | None], ...]
"""Partition columns with their values, as in the log."""


def unstorable_parts(names: Sequence[str], batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row whose partition values the log cannot hold; None: there are none.

    Args:
        names: partition columns; the rows may lack some.
    """
    names = [n for n in names if n in batch.schema.names]
    reasons = unstorable(RANGES["delta partition"], batch.select(names))
    for name in names:
        column = batch.column(name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            why = f"column {name!r}: an empty text in a partition column, which Delta would read back as null"
            reasons = because(reasons, pc.equal(column, ""), why)
    return reasons


def part_folder(part: Part) -> str:
    """`day=2024-05-01/`, in Hive style. Readers use the log, not this name, so a long one is shortened."""
    return "".join(
        f"{_short(f'{quote(k, safe=str())}={NULL if v is None else quote(v, safe=str())}')}/" for k, v in part
    )


def _short(name: str) -> str:
    if len(name) <= FOLDER_BYTES_MAX:
        return name
    return f"{name[:100].rstrip('%')}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def text(value: Any) -> str | None:
    """A partition value, as in the log."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return value.isoformat(" ", "microseconds")  # with a T, the client can no longer open the table
    return value.isoformat() if isinstance(value, dt.date) else str(value)


_FEATURES = frozenset(
    {
        "appendOnly", "invariants", "checkConstraints", "changeDataFeed", "timestampNtz", "deletionVectors",
        "v2Checkpoint", "vacuumProtocolCheck",
    }
)  # fmt: skip
"""Writer features that appending files respects. Constraints are checked separately."""


class DeltaTypes(TableTypes):
    system = "Delta"
    table = "a Delta table"
    range = RANGES["delta"]


TYPES = DeltaTypes()


def ready(options: DeltaOptions, schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: the table does not exist and must not be created; or rows of this schema do not match it.
        Refused: the table requires writer features that this sink does not support.
    """
    TYPES.check(schema)
    schema = TYPES.canonical_schema(schema)
    table = open_table(options)
    if table is None:
        table = _create(options, schema)
    check_features(options, table)
    check_removes(options, table)
    missing = compare(options, table, schema, adds=True)
    if missing:
        _add_columns(options, table, missing)


def check(options: DeltaOptions) -> None:
    """Raise if this table cannot be written. Writes and deletes a small file next to it."""
    table = open_table(options)
    if table is None and not options.create:
        require_table(options)
    if table is not None:
        check_features(options, table)
        check_removes(options, table)
    with explained(options):
        target.probe(Store(options), "_delivered")


def table_schema(table: Any) -> pa.Schema:
    """The table's columns in canonical Arrow types, with their nullability."""
    schema: pa.Schema = pa.schema(table.schema().to_arrow())
    return pa.schema([pa.field(f.name, canonical(f.type) or f.type, f.nullable) for f in schema])


def check_removes(options: DeltaOptions, table: Any) -> None:
    """Raises Refused: the mode replaces rows, but the table is append-only."""
    if options.write != APPEND and dict(table.metadata().configuration).get("delta.appendOnly", "").lower() == "true":
        raise Refused("TABLE_FEATURES.APPEND_ONLY", path=options.path)


def check_features(options: DeltaOptions, table: Any) -> None:
    """Raises Refused: the table requires a writer feature that this sink does not support."""
    configuration = dict(table.metadata().configuration)
    unsupported = sorted(set(table.protocol().writer_features or ()) - _FEATURES)
    unsupported += sorted(key for key in configuration if key.startswith("delta.constraints."))
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        unsupported.append("delta.columnMapping.mode")
    for field in json.loads(table.schema().to_json())["fields"]:
        unsupported += [f"{key} of column {field['name']}" for key in field.get("metadata", {}) if key in _COLUMN_RULES]
    target.check_supported(options, unsupported)
    if "delta.setTransactionRetentionDuration" in configuration:
        raise Refused(
            "TABLE_FORGETS", path=options.path, retention=configuration["delta.setTransactionRetentionDuration"]
        )


_COLUMN_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity.start", "delta.identity.step")


def compare(options: DeltaOptions, table: Any, schema: pa.Schema, *, adds: bool = False) -> list[pa.Field]:
    """See `delivered.kits.table.target.compare`. Also raises UsageError if the options have other partitions."""
    partitions = list(table.metadata().partition_columns)
    if list(options.partition_by or ()) != partitions:
        raise UsageError(
            "PARTITIONS.DELTA" if partitions else "PARTITIONS.DELTA_NONE",
            path=options.path,
            current=partitions or "no column",
            wanted=list(options.partition_by or ()) or "none",
            partition_by=",".join(partitions) if partitions else None,
        )
    there = table_schema(table)
    binary = [n for n in partitions if pa.types.is_binary(there.field(n).type)]
    if binary:
        raise UsageError("PARTITION_TYPE.BINARY", path=options.path, column=binary[0])
    return target.compare(options, there, schema, partitions, adds=adds)


def same_columns(options: DeltaOptions, table: Any, schema: pa.Schema) -> None:
    """Check the table again at commit: others may have altered it since the start.

    Raises:
        UsageError: rows of this schema no longer match the table.
    """
    check_features(options, table)
    compare(options, table, schema)


def required(options: DeltaOptions, table: Any, files: Sequence[DataFile]) -> None:
    """Raises BadRecord: a NOT NULL column contains nulls."""
    columns = [f.name for f in table_schema(table) if not f.nullable]
    for file in files if columns else ():
        counts = json.loads(file.statistics).get("nullCount", {})
        for name in columns:
            if name in file.partition and file.partition[name] is None:
                raise _null(options, name, 0, file)
            if name in file.partition or counts.get(name) == 0:
                continue
            with Store(options).fs.open_input_file(file.path) as source:
                row = pc.index(pc.is_null(pq.read_table(source, columns=[name])[name]), True).as_py()
            if row >= 0:
                raise _null(options, name, row, file)


def _null(options: DeltaOptions, column: str, row: int, file: DataFile) -> BadRecord:
    return BadRecord("COLUMN_REQUIRED.DELTA_FILE", row=row, rows=file.rows, column=column, path=options.path)


def _create(options: DeltaOptions, schema: pa.Schema) -> Any:
    if not options.create:
        return require_table(options)
    check_created(options, schema)
    deltalake = delta()
    with explained(options):
        try:
            deltalake.DeltaTable.create(
                options.path, schema, mode="error", partition_by=list(options.partition_by or ()) or None,
                storage_options=storage_options(options.path, options.storage_resolved()),
            )  # fmt: skip
        except deltalake.exceptions.DeltaError:
            # Another driver may have created it; if not, raise the reason.
            if open_table(options) is None:
                raise
        sync_versions(options, 0, 0)
        return require_table(options)


def check_created(options: DeltaOptions, schema: pa.Schema) -> None:
    """Raises UsageError: no table can be created for rows of this schema; unknown types are not judged."""
    partitions = options.partition_by or ()
    for name in partitions:
        kind = schema.field(name).type if name in schema.names else None
        t = pa.types
        if kind is not None and untyped(schema.field(name)):
            continue
        if kind is None or not (t.is_string(kind) or t.is_integer(kind) or t.is_boolean(kind) or t.is_date32(kind)):
            raise UsageError("PARTITION_TYPE.COLUMN", name=name, kind=kind or "not a column of the rows")
    if len(partitions) == len(schema):
        raise UsageError("PARTITIONS.ALL_COLUMNS")
    _check_maps(schema)


def _check_maps(schema: pa.Schema) -> None:
    """The client (1.6) does not look into maps for what makes it enable the table's feature timestampNtz."""
    within = {f.name: set(_local_times(f.type)) for f in schema}
    bad = [name for name, places in within.items() if True in places]
    if bad and not any(False in places for places in within.values()):
        raise UsageError("TYPE_UNKNOWN.DELTA", column=bad[0], type=schema.field(bad[0]).type)


def _local_times(kind: pa.DataType, in_map: bool = False) -> Iterator[bool]:
    """For each timestamp without time zone, whether it is within a map."""
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            yield in_map
        return
    for at in range(kind.num_fields):
        yield from _local_times(kind.field(at).type, in_map or pa.types.is_map(kind))


def _add_columns(options: DeltaOptions, table: Any, missing: list[pa.Field]) -> None:
    from deltalake import CommitProperties, Schema

    deltalake = delta()
    before = table.version()
    with explained(options):
        try:
            table.alter.add_columns(
                Schema.from_arrow(pa.schema(missing)).fields,
                commit_properties=CommitProperties(max_commit_retries=RETRIES_MAX),
            )
        except deltalake.exceptions.DeltaError:
            # Another driver altered the table, perhaps in the same way.
            now = require_table(options)
            if any(f.name not in table_schema(now).names for f in missing):
                raise
        sync_versions(options, before + 1, require_table(options).version())


# Its files.


def active_files(options: DeltaOptions, table: Any) -> list[dict[str, Any]]:
    """Path, size, partition and statistics of every file of the opened table.

    Raises:
        UsageError: the table has deletion vectors.
    """
    with explained(options):
        if pa.table(table.deletion_vectors()).num_rows:
            raise UsageError("TABLE_HAS_DELETIONS", path=options.path)
        partitions = table.metadata().partition_columns
        files = pa.table(table.get_add_actions()).to_pylist()
    return [
        {
            "path": unquote(row["path"]),
            "size": int(row["size_bytes"]),
            "partition": {name: row["partition"][name] for name in partitions},
            "min": row.get("min") or {},
            "max": row.get("max") or {},
        }
        for row in sorted(files, key=lambda row: str(row["path"]))
    ]


_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")


def open_file(store: Store, path: str) -> Any:
    """A file of the table. Raises Refused: it is another table's, as in a shallow clone."""
    if _ABSOLUTE.match(path):
        raise Refused("TABLE_FEATURES.SHALLOW_CLONE", file=path)
    return store.fs.open_input_file(path)


def filled(batch: pa.RecordBatch, schema: pa.Schema, partition: Mapping[str, Any]) -> pa.RecordBatch:
    """A file's rows with the table's columns; columns that the file lacks are null."""
    arrays = []
    for field in schema:
        if field.name in partition:
            arrays.append(pa.repeat(_value(partition[field.name], field.type), batch.num_rows))
        elif field.name in batch.schema.names:
            column = batch.column(field.name)
            arrays.append(column if column.type.equals(field.type) else column.cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(f.name, f.type) for f in schema]))


def _value(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A partition value, perhaps as text of the log."""
    if not isinstance(value, str) or pa.types.is_string(kind):
        return pa.scalar(value, kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None and not re.search(r"(Z|[+-]\d\d:?\d\d)$", value):
        return pa.scalar(value).cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.scalar(value).cast(kind)
