"""Executor side: Parquet files in the table's folder, committed later (exactly_once) or at once; refused rows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyiceberg.io import OutputFile
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

from delivered.connectors.iceberg import IcebergOptions
from delivered.connectors.iceberg.client import TableChange, commit, data_path, require_table, store, writing
from delivered.connectors.iceberg.target import (
    TYPES,
    VOID,
    check_features,
    compare,
    partition_parts,
    same_columns,
    to_arrow,
    unstorable_parts,
)
from delivered.contract.sink import Writer
from delivered.kits.sql.merge import check_rows
from delivered.kits.sql.table import stored_columns
from delivered.kits.table import shard, target
from delivered.kits.table.shard import PartFiles, Written, shard_writer, split
from delivered.kits.table.store import Store
from delivered.kits.table.target import Nowhere, but_missing, trial_work, unwritable
from delivered.model.capability import Guarantee, WriteMode
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Work
from delivered.model.rows import check_storable, first_of, fitted
from delivered.model.work import Handle, Outcome


def writer(options: IcebergOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    if exactly_once and options.write.upserts:
        return shard_writer(work, guarantee, StagedRows(options, work, schema))
    return shard_writer(work, guarantee, IcebergFiles(options, work, schema, direct=not exactly_once, requires=True))


class IcebergFiles:
    """See `delivered.kits.table.shard.ShardFiles`. Reads the table on the first row.

    Args:
        requires: whether nulls are checked that the table refuses.
    """

    def __init__(
        self, options: IcebergOptions, work: Work, schema: pa.Schema, direct: bool, requires: bool = False
    ) -> None:
        self._options = options
        self._requires = requires
        self._work = work
        self._schema = TYPES.canonical_schema(schema)
        self._place = shard.new_place(work, direct)
        self._table: Any = None
        self._stored: pa.Schema | None = None
        self._files: PartFiles[Part] | None = None
        self._done: list[Any] = []

    def write(self, batch: pa.RecordBatch) -> None:
        TYPES.check_values(batch)
        with but_missing(writing(self._options)):
            files, stored = self._open_files()
            check_storable(TYPES.system, batch, unstorable_parts(partition_parts(self._table), batch))
            plain = fitted(batch, self._schema)
            if self._requires:
                target.check(self._options.where, plain, unfilled(self._options.write, self._table, plain))
            for part, rows in parts(self._table, plain, fitted(plain, stored)):
                files.write(part, rows)

    @property
    def done(self) -> list[Any]:
        """After `finish`: the client's data files."""
        return self._done

    @property
    def writer(self) -> str:
        """Common prefix of the file names."""
        return f"{self._place.folder}/{self._place.stem}"

    def finish(self) -> int:
        if self._files is None:
            return 0
        with but_missing(writing(self._options)):
            path = data_path(self._table)
            self._done = data_files(self._table, path, self._files.finish())
        return sum(int(f.record_count) for f in self._done)

    def handle(self) -> StagedFiles | None:
        if not self._done:
            return None
        with but_missing(writing(self._options)):
            name = self._place.sibling("manifest.avro")
            output = self._table.io.new_output(f"{data_path(self._table)}/{name}")
            size = put(self._table, output, self._done)
        now = self._table.metadata
        columns = tuple(self._columns())
        return StagedFiles(self.writer, len(self._done), size, now.current_schema_id, now.default_spec_id, columns)

    def check(self) -> None:
        self._fits(require_table(self._options))

    def commit(self) -> Outcome[None]:
        def change(now: Any) -> TableChange:
            self._fits(now)
            scope = self._work.scope
            summary = {
                "delivered.pipeline": scope.pipeline,
                "delivered.sink": scope.sink,
                "delivered.incarnation": scope.incarnation,
                "delivered.batch": str(self._work.batch),
                "delivered.shard": str(self._work.shard),
            }
            return TableChange(
                folder=shard.direct_folder(scope), prefix=f"{self._work.batch}-", summary=summary, files=self._done
            )

        return commit(self._options, change)

    def discard(self) -> None:
        if self._files is not None:
            self._files.discard()
            with contextlib.suppress(Exception):
                store(self._table, data_path(self._table)).remove([self._place.sibling("manifest.avro")])

    def _open_files(self) -> tuple[PartFiles[Part], pa.Schema]:
        if self._files is None or self._stored is None:
            table = self._table = self._opened()
            check_features(self._options, table)
            compare(self._options, table, self._schema)
            columns = {f.name: f for f in to_arrow(table.schema())}
            self._stored = pa.schema([self._column(columns[name]) for name in self._schema.names])
            options = {"compression": self._options.compression, "store_decimal_as_integer": True}
            self._files = PartFiles(self._store, self._place, self._stored, options)
        return self._files, self._stored

    def _column(self, field: pa.Field) -> pa.Field:
        """A column in the files."""
        return field

    def _opened(self) -> Any:
        return require_table(self._options)

    def _store(self) -> Store:
        return store(self._table, data_path(self._table))

    def _fits(self, now: Any) -> None:
        written = self._table.metadata
        same_columns(self._options, now, written.current_schema_id, written.default_spec_id, self._columns())

    def _columns(self) -> list[int]:
        """Field ids in the files."""
        return [f.field_id for f in self._table.schema().fields if f.name in self._schema.names]


def unfilled(mode: WriteMode, table: Any, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.kits.table.target.unfilled`."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return target.unfilled(mode, schema_to_pyarrow(table.schema()), batch)


# Splits rows by a table's partitions; reports a task's data files to the driver in an Iceberg manifest next to them.
#
# So a shard takes only a few bytes in a decision, however many files and columns it has. The driver copies the entries
# into its snapshot's manifest.

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
        if str(field.transform) == VOID:
            keys.append(pa.nulls(batch.num_rows))
            continue
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
    files = []
    for file in written:
        statistics = _statistics(file.footer, plan, ids)
        files.append(
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
    return files


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
    statistics: dict[str, Any] = data_file_statistics_from_parquet_metadata(footer, plan, ids).to_serialized_dict()
    return statistics


def _has_bounds(footer: Any, plan: dict[int, Any], ids: dict[str, int], column: int) -> bool:
    """Whether the client can make the bounds of a column."""
    try:
        _of_client(footer, _with_counts(plan, [n for n in plan if n != column]), ids)
    except _NO_BOUNDS:
        return False
    return True


def _unbounded(footer: Any, ids: dict[str, int]) -> set[int]:
    """Columns with a row group that has values, but no bounds. Of NaN alone there are none by definition."""
    columns = set()
    for at in range(footer.num_columns):
        if footer.schema.column(at).physical_type in ("FLOAT", "DOUBLE"):
            continue
        groups = [footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups)]
        if any(s is None or (s.num_values and not s.has_min_max) for s in groups):
            columns.add(ids[footer.schema.column(at).path])
    return columns


def _with_counts(plan: dict[int, Any], columns: Collection[int]) -> dict[int, Any]:
    """The plan without bounds for some columns."""
    counts = MetricsMode(MetricModeTypes.COUNTS)
    without = (MetricModeTypes.NONE, MetricModeTypes.COUNTS)
    return {n: replace(c, mode=counts) if n in columns and c.mode.type not in without else c for n, c in plan.items()}


def put(table: Any, output: Any, files: Sequence[Any]) -> int:
    """Write a manifest of these files; return its size in bytes. Args: output: the client's output file."""
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


# Mode upsert: a task stages its rows unchanged, in plain Parquet; the driver writes the table's files.


@dataclass(frozen=True)
class StagedFiles(Handle):
    """One shard's.

    Attributes:
        writer: prefix of the files' names; files: their number.
        bytes: size of the manifest that lists them; schema, spec, columns: ids they were written with.
        rows: mode upsert: name, size and number of rows of each. Nothing else then.
    """

    writer: str
    files: int
    bytes: int = 0
    schema: int = -1
    spec: int = -1
    columns: tuple[int, ...] = ()
    rows: tuple[tuple[str, int, int], ...] = ()

    @property
    def manifest(self) -> str:
        return f"{self.writer}-manifest.avro"


class StagedRows:
    """See `delivered.kits.table.shard.ShardFiles`."""

    def __init__(self, options: IcebergOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._place = shard.new_place(work, direct=False)
        self._table: Any = None
        self._files: PartFiles[tuple[()]] | None = None
        self._done: list[Written[tuple[()]]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        check_rows(self._options.write, batch)
        with writing(self._options):
            files = self._open_files()
            target.check(self._options.where, batch, unfilled(self._options.write, self._table, batch))
            check_storable(TYPES.system, batch, unstorable_parts(partition_parts(self._table), batch))
            files.write((), batch)

    def finish(self) -> int:
        if self._files is not None:
            with writing(self._options):
                self._done = list(self._files.finish())
        return sum(f.rows for f in self._done)

    def handle(self) -> StagedFiles | None:
        rows = tuple((f.name, f.size, f.rows) for f in self._done)
        return StagedFiles(f"{self._place.folder}/{self._place.stem}", len(rows), rows=rows) if rows else None

    def check(self) -> None:
        raise InvariantBroken("MODE_GUARANTEE.ICEBERG")

    def commit(self) -> Outcome[None]:
        raise InvariantBroken("MODE_GUARANTEE.ICEBERG")

    def discard(self) -> None:
        if self._files is not None:
            self._files.discard()

    def _open_files(self) -> PartFiles[tuple[()]]:
        if self._files is None:
            table = self._table = require_table(self._options)
            check_features(self._options, table)
            compare(self._options, table, TYPES.canonical_schema(stored_columns(self._options.write, self._schema)))
            options = {"compression": self._options.compression}
            self._files = PartFiles(lambda: store(table, data_path(table)), self._place, self._schema, options)
        return self._files


class IcebergTrial:
    """See `delivered.kits.table.target.Trial`."""

    def __init__(self, options: IcebergOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._stored = stored_columns(options.write, self._schema)
        self._table = require_table(options)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        batch = fitted(batch, self._schema)
        reasons = unfilled(self._options.write, self._table, batch)
        reasons = first_of(reasons, unstorable_parts(partition_parts(self._table), batch))
        return unwritable(batch.select(self._stored.names), self._write, reasons)

    def _write(self, rows: pa.RecordBatch) -> None:
        files = _Files(self._options.appending, trial_work(), self._stored, direct=False)
        files.table = self._table
        try:
            files.write(rows)
            files.finish()
            put(self._table, _Uncounted(), files.done)
            for file in files.done:  # for the snapshot's summary
                self._table.spec().partition_to_path(file.partition, self._table.schema())
        finally:
            files.discard()


class _Files(IcebergFiles):
    table: Any = None

    def _column(self, field: pa.Field) -> pa.Field:
        return field.with_nullable(True)

    def _opened(self) -> Any:
        return self.table

    def _store(self) -> Store:
        return Nowhere()


class _Uncounted(OutputFile):
    """A manifest that is not kept."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    def __len__(self) -> int:
        return 0

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> Any:
        raise NotImplementedError

    def create(self, overwrite: bool = False) -> Any:
        del overwrite
        return io.BytesIO()
