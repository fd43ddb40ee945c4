"""The user's table: create it, compare it with the rows, add columns. Changes no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.delta.client import Store, delta, explained, open_table, require_table, sync_versions
from delivered.connectors.delta.commit import RETRIES_MAX, DataFile
from delivered.connectors.delta.options import DeltaOptions
from delivered.kits.table import target
from delivered.kits.table.columns import TableTypes, canonical
from delivered.model.capability import APPEND
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.ranges import RANGES

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
    found: pa.Schema = pa.schema(table.schema().to_arrow())
    return pa.schema([pa.field(f.name, canonical(f.type) or f.type, f.nullable) for f in found])


def check_removes(options: DeltaOptions, table: Any) -> None:
    """
    Raises:
        Refused: the mode replaces rows, but the table is append-only.
    """
    if options.write != APPEND and dict(table.metadata().configuration).get("delta.appendOnly", "").lower() == "true":
        raise Refused(
            "TABLE_FEATURES",
            f"The table at {options.path!r} has the property delta.appendOnly: its rows cannot be replaced.",
            next_step='write .option("mode", "append"), or remove the property from the table',
        )


def check_features(options: DeltaOptions, table: Any) -> None:
    """
    Raises:
        Refused: the table requires a writer feature that this sink does not support.
    """
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
            "TABLE_FORGETS",
            f"The table at {options.path!r} deletes application transactions after "
            f"{configuration['delta.setTransactionRetentionDuration']}: a batch that runs again could then not be "
            "recognized.",
            next_step="remove the property delta.setTransactionRetentionDuration from the table",
        )


_COLUMN_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity.start", "delta.identity.step")


def compare(options: DeltaOptions, table: Any, schema: pa.Schema, *, adds: bool = False) -> list[pa.Field]:
    """See `delivered.kits.table.target.compare`. Also raises UsageError if the options have other partitions."""
    partitions = list(table.metadata().partition_columns)
    if list(options.partition_by or ()) != partitions:
        raise UsageError(
            "PARTITIONS",
            f"The table at {options.path!r} is partitioned by {partitions or 'no column'}, but option 'partitionBy' is "
            f"{list(options.partition_by or ()) or 'none'}.",
            next_step=f'write .option("partitionBy", "{",".join(partitions)}")' if partitions else "remove the option",
        )
    there = table_schema(table)
    binary = [n for n in partitions if pa.types.is_binary(there.field(n).type)]
    if binary:
        raise UsageError(
            "PARTITION_TYPE",
            f"The table at {options.path!r} is partitioned by {binary[0]!r}, which is binary: clients disagree about "
            "its text in the log.",
            next_step="write to a table that is partitioned by a string, for example hex(...)",
        )
    return target.compare(options, there, schema, partitions, adds=adds)


def same_columns(options: DeltaOptions, table: Any, schema: pa.Schema) -> None:
    """Check the table again at commit: others may have altered it since the start.

    Raises:
        UsageError: rows of this schema no longer match the table.
    """
    check_features(options, table)
    compare(options, table, schema)


def required(options: DeltaOptions, table: Any, files: Sequence[DataFile]) -> None:
    """
    Raises:
        BadRecord: a NOT NULL column contains nulls.
    """
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
    return BadRecord(
        "COLUMN_REQUIRED",
        f"Row {row} of the {file.rows} that a task wrote to one file is null in column {column!r}, which is NOT NULL "
        f"in the table at {options.path!r}. Nothing of its batch counts.",
        next_step="filter such rows, or fill in a value; or set on_bad_row: dead_letter with a dead_letter sink "
        "(docs/dead-letters.md)",
    )


def _create(options: DeltaOptions, schema: pa.Schema) -> Any:
    if not options.create:
        return require_table(options)
    partitions = list(options.partition_by or ())
    for name in partitions:
        kind = schema.field(name).type if name in schema.names else None
        t = pa.types
        if kind is None or not (t.is_string(kind) or t.is_integer(kind) or t.is_boolean(kind) or t.is_date32(kind)):
            raise UsageError(
                "PARTITION_TYPE",
                f"Option 'partitionBy' has {name!r}, which is {kind or 'not a column of the rows'}; it must be a "
                "string, an integer, a boolean or a date.",
                next_step=f"derive one, for example to_date({name})",
            )
    if len(partitions) == len(schema):
        raise UsageError(
            "PARTITIONS",
            "Option 'partitionBy' has every column; at least one must not be in it.",
            next_step="leave one column out of partitionBy",
        )
    _check_maps(schema)
    deltalake = delta()
    with explained(options):
        try:
            deltalake.DeltaTable.create(
                options.path, schema, mode="error", partition_by=partitions or None,
                storage_options=options.storage_resolved() or None,
            )  # fmt: skip
        except deltalake.exceptions.DeltaError:
            # Another driver may have created it; if not, raise the reason.
            if open_table(options) is None:
                raise
        sync_versions(options, 0, 0)
        return require_table(options)


def _check_maps(schema: pa.Schema) -> None:
    """The client (1.6) does not look into maps for what makes it enable the table's feature timestampNtz."""
    within = {f.name: set(_local_times(f.type)) for f in schema}
    bad = [name for name, places in within.items() if True in places]
    if bad and not any(False in places for places in within.values()):
        raise UsageError(
            "TYPE_UNKNOWN",
            f"Column {bad[0]!r} is {schema.field(bad[0]).type}; the client cannot create a Delta table whose "
            "timestamps without time zone are all within maps.",
            next_step="cast them to timestamp; or create the table by Spark, with delta.feature.timestampNtz",
        )


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
