"""A scan of all rows of the table."""

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
from delivered.kits.table.store import packed
from delivered.model.errors import UsageError

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class DeltaScan:
    """See `delivered.contract.sink.BoundedScan`. Reads the newest version, which must not be vacuumed meanwhile."""

    options: DeltaOptions

    def schema(self) -> pa.Schema:
        return table_schema(require_table(self.options))

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"version": v}: excludes the files of this version; files compacted later count as new.

        Raises:
            UsageError: the table has deletion vectors.
        """
        table, before = require_table(self.options), int((since or {}).get("version", -1))
        known: set[str] = set()
        if before >= 0:
            known = {file["path"] for file in active_files(self.options, require_table(self.options, before))}
        fresh = [file for file in active_files(self.options, table) if file["path"] not in known]
        schema = table_schema(table).serialize().to_pybytes()
        return [Slice({"files": group, "schema": schema}) for group in packed(fresh, lambda file: int(file["size"]))]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        schema = pa.ipc.read_schema(pa.py_buffer(piece.data["schema"]))
        with explained(self.options):
            store = Store(self.options)
            for file in piece.data["files"]:
                with store.fs.open_input_file(file["path"]) as source:
                    for batch in pq.ParquetFile(source, pre_buffer=False).iter_batches(BATCH_ROWS, use_threads=False):
                        yield whole(batch, schema, file["partition"])


def active_files(options: DeltaOptions, table: Any) -> list[dict[str, Any]]:
    """Path, size, partition and statistics of every file of the opened table.

    Raises:
        UsageError: the table has deletion vectors.
    """
    with explained(options):
        if pa.table(table.deletion_vectors()).num_rows:
            raise UsageError(
                "TABLE_HAS_DELETIONS",
                f"The table at {options.path!r} has deletion vectors, which are not supported.",
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


def whole(batch: pa.RecordBatch, schema: pa.Schema, partition: dict[str, Any]) -> pa.RecordBatch:
    """A file's rows with the table's columns; columns that the file lacks are null."""
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
