"""Splits rows by a table's partitions; reports a task's data files to the driver in an Iceberg manifest next to them.

So a shard takes only a few bytes in a decision, however many files and columns it has. The driver copies the entries
into its snapshot's manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
)
from pyiceberg.typedef import Record

from delivered.kits.table.parquet import Written, split

Part = tuple[Any, ...]
"""Values of the partition fields, as in a manifest: dates and times are integers."""
_NO_SNAPSHOT = 0
"""Placeholder for the snapshot id, which the driver fills in when it copies the entries."""


def parts(table: Any, batch: pa.RecordBatch, rows: pa.RecordBatch) -> list[tuple[Part, pa.RecordBatch]]:
    """Split `rows` by the table's partition spec, with its fields computed from `batch`, which has the same rows."""
    spec, schema = table.spec(), table.schema()
    if not spec.fields:
        return [((), rows)]
    keys = []
    for field in spec.fields:
        source = schema.find_field(field.source_id)
        column = batch.column(schema.find_column_name(field.source_id))
        keys.append(_plain(field.transform.pyarrow_transform(source.field_type)(column)))
    return split(pa.RecordBatch.from_arrays(keys, [str(i) for i in range(len(keys))]), rows)


def _plain(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type):
        return values.cast(pa.int64())
    return values


def data_files(table: Any, path: str, written: Sequence[Written[Part]]) -> list[Any]:
    """The client's data files, with the statistics that the table's properties configure."""
    schema = table.schema()
    plan = compute_statistics_plan(schema, table.properties)
    ids = parquet_path_to_id_mapping(schema)
    found = []
    for file in written:
        statistics = _statistics(file.footer, plan, ids)
        found.append(
            DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=f"{path}/{file.name}",
                file_format=FileFormat.PARQUET,
                partition=Record(*file.part),
                file_size_in_bytes=file.size,
                sort_order_id=None,
                spec_id=table.metadata.default_spec_id,
                equality_ids=None,
                key_metadata=None,
                **statistics,
            )
        )
    return found


def _statistics(footer: Any, plan: dict[int, Any], ids: dict[str, int]) -> dict[str, Any]:
    """A file's statistics; bounds that the client cannot make, or would make too narrow, are absent.

    It makes none of dates outside Python's years, nor of a text whose 16th character is U+D7FF, and ignores row groups
    without bounds: those with texts of more than 4,096 bytes.
    """
    known = _with_counts(plan, _unbounded(footer, ids))
    try:
        return _of_client(footer, known, ids)
    except _NO_BOUNDS:
        bad = [n for n in known if not _has_bounds(footer, known, ids, n)]
        return _of_client(footer, _with_counts(known, bad), ids)


_NO_BOUNDS = (ValueError, TypeError, ArithmeticError, pa.ArrowException)


def _of_client(footer: Any, plan: dict[int, Any], ids: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = data_file_statistics_from_parquet_metadata(footer, plan, ids).to_serialized_dict()
    return found


def _has_bounds(footer: Any, plan: dict[int, Any], ids: dict[str, int], column: int) -> bool:
    """Whether the client can make the bounds of a column."""
    try:
        _of_client(footer, _with_counts(plan, [n for n in plan if n != column]), ids)
    except _NO_BOUNDS:
        return False
    return True


def _unbounded(footer: Any, ids: dict[str, int]) -> set[int]:
    """Columns with a row group that has values, but no bounds. Of NaN alone there are none by definition."""
    found = set()
    for at in range(footer.num_columns):
        if footer.schema.column(at).physical_type in ("FLOAT", "DOUBLE"):
            continue
        groups = [footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups)]
        if any(s is None or (s.num_values and not s.has_min_max) for s in groups):
            found.add(ids[footer.schema.column(at).path])
    return found


def _with_counts(plan: dict[int, Any], columns: Collection[int]) -> dict[int, Any]:
    """The plan without bounds for some columns."""
    counts = MetricsMode(MetricModeTypes.COUNTS)
    without = (MetricModeTypes.NONE, MetricModeTypes.COUNTS)
    return {n: replace(c, mode=counts) if n in columns and c.mode.type not in without else c for n, c in plan.items()}


def put(table: Any, output: Any, files: Sequence[Any]) -> int:
    """Write a manifest of these files; return its size in bytes.

    Args:
        output: the client's output file.
    """
    with write_manifest(
        format_version=table.metadata.format_version,
        spec=table.spec(),
        schema=table.schema(),
        output_file=output,
        snapshot_id=_NO_SNAPSHOT,
        avro_compression="deflate",
    ) as writer:
        for file in files:
            status = ManifestEntryStatus.ADDED
            writer.add(ManifestEntry.from_args(status=status, snapshot_id=_NO_SNAPSHOT, data_file=file))
    return int(writer.to_manifest_file().manifest_length)


def get(table: Any, path: str, size: int, spec_id: int) -> list[Any]:
    """The files of a manifest."""
    manifest = ManifestFile.from_args(
        manifest_path=path,
        manifest_length=size,
        partition_spec_id=spec_id,
        content=ManifestContent.DATA,
        sequence_number=0,
        min_sequence_number=0,
        added_snapshot_id=_NO_SNAPSHOT,
    )
    return [entry.data_file for entry in manifest.fetch_manifest_entry(table.io)]
