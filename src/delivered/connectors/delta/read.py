"""The table as a source of all its rows, a slice for each few files, for the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from delivered.connectors.delta.client import Store, explained, require_table
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import table_schema
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.errors import UsageError
from delivered.source.bounded_scan import BoundedScan, BoundedScanDriver, packed

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class DeltaRows(BoundedScan):
    """The rows of one version of a table."""

    options: DeltaOptions

    def capability(self) -> SourceCapability:
        return SourceCapability(
            "delta",
            replayable=True,
            local=self.options.local,
            assumes=("a version that is being read is not vacuumed",),
        )

    def schema(self) -> pa.Schema:
        return table_schema(require_table(self.options))

    def driver(self) -> DeltaRowsDriver:
        return DeltaRowsDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        schema = pa.ipc.read_schema(pa.py_buffer(piece.data["schema"]))
        with explained(self.options):
            store = Store(self.options)
            for file in piece.data["files"]:
                with store.fs.open_input_file(file["path"]) as source:
                    for batch in pq.ParquetFile(source, pre_buffer=False).iter_batches(BATCH_ROWS, use_threads=False):
                        yield whole(batch, schema, file["partition"])

    def files(self, version: int) -> list[dict[str, Any]]:
        """Path, size and partition of every file of a version.

        Raises:
            UsageError: somebody deleted rows inside files: what is left cannot be read by files.
        """
        return active_files(self.options, require_table(self.options, version))


def active_files(options: DeltaOptions, table: Any) -> list[dict[str, Any]]:
    """Path, size and partition of every file of the table as it was opened, with the bounds that its log has of them.

    Raises:
        UsageError: somebody deleted rows inside files: what is left cannot be read by files.
    """
    with explained(options):
        if pa.table(table.deletion_vectors()).num_rows:
            raise UsageError(
                "TABLE_HAS_DELETIONS",
                f"Rows of the table at {options.path!r} were deleted inside its files (deletion vectors).",
                next_step="run REORG TABLE ... APPLY (PURGE) on it, or audit an earlier version",
            )
        partitions = table.metadata().partition_columns
        found = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return [
        {
            "path": unquote(row["path"]),
            "size": int(row["size_bytes"]),
            "partition": {name: row[f"partition.{name}"] for name in partitions},
            "min": {name.removeprefix("min."): v for name, v in row.items() if name.startswith("min.")},
            "max": {name.removeprefix("max."): v for name, v in row.items() if name.startswith("max.")},
        }
        for row in sorted(found, key=lambda row: str(row["path"]))
    ]


class DeltaRowsDriver(BoundedScanDriver):
    """Offsets are `{"version": v}`: all rows of that version of the table; -1: none. A slice holds files that the end
    has and the start has not; one that was compacted in between counts as new."""

    def __init__(self, rows: DeltaRows) -> None:
        super().__init__(f"the table at {rows.options.path!r}")
        self._rows = rows

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        version, before = int(end["version"]), int(start["version"])
        if version < 0:
            return []
        known = {file["path"] for file in self._rows.files(before)} if before >= 0 else set()
        schema = table_schema(require_table(self._rows.options, version)).serialize().to_pybytes()
        fresh = [file for file in self._rows.files(version) if file["path"] not in known]
        return [Slice({"files": group, "schema": schema}) for group in packed(fresh, lambda file: int(file["size"]))]

    def batch(self) -> tuple[Offsets, Offsets]:
        return {"version": -1}, {"version": require_table(self._rows.options).version()}


def whole(batch: pa.RecordBatch, schema: pa.Schema, partition: dict[str, Any]) -> pa.RecordBatch:
    """A file's rows with the columns of the table: those that its writer did not know are NULL."""
    arrays = []
    for field in schema:
        if field.name in partition:
            value = partition[field.name]
            arrays.append(pa.repeat(pa.scalar(value, field.type), batch.num_rows))
        elif field.name in batch.schema.names:
            column = batch.column(field.name)
            arrays.append(column if column.type.equals(field.type) else column.cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(f.name, f.type) for f in schema]))
