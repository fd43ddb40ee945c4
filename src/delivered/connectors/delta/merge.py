"""What a batch makes of the table: see `delivered.kits.table.merge`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivered.connectors.delta.client import Store
from delivered.connectors.delta.commit import DataFile
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.read import active_files, whole
from delivered.connectors.delta.target import table_schema
from delivered.connectors.delta.writer import DeltaFiles, text
from delivered.kits.table.merge import BATCH_ROWS, Effect, one_of_each, staged_rows, upsert
from delivered.model.identity import Work


def effect(options: DeltaOptions, table: Any, store: Store, work: Work, shards: Sequence[Sequence[DataFile]]) -> Effect:
    """
    Args:
        shards: the staged files of each, in its order.

    Raises:
        UsageError: without a version, a key lies in two shards.
    """
    files = [file for shard in shards for file in shard]
    if options.write.upserts and files:
        rows = staged_rows(store, [[file.path for file in shard] for shard in shards])
        columns = table_schema(table)
        made = DeltaFiles(options.appending, work, columns, direct=False)
        there = [_File(store, file) for file in active_files(options, table)]
        gone = upsert(options.write, one_of_each(options.write, rows, options.path), columns, there, made)
        removes = [file.data["path"] for file in gone]
        return Effect(made.done, removes, made.stem, True, made.discard)
    if options.write.replaces and files:
        taken = {tuple(file.partition.items()) for file in files}  # in the order of `partitionBy`, as the table's own
        found = active_files(options, table)
        gone = [f["path"] for f in found if tuple((n, text(n, v)) for n, v in f["partition"].items()) in taken]
        return Effect(files, gone, exact=True)
    return Effect(files)


@dataclass(frozen=True)
class _File:
    """See `delivered.kits.table.merge.TableFile`. `data`: from `active_files`."""

    store: Store
    data: dict[str, Any]

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        if key in self.data["partition"]:
            value = self.data["partition"][key]
            return None if value is None or isinstance(value, str) else (value, value)
        low, high = self.data["min"].get(key), self.data["max"].get(key)
        # Texts are cut off in the log.
        return None if low is None or high is None or isinstance(low, str) else (low, high)

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        partition = self.data["partition"]
        with self.store.fs.open_input_file(self.data["path"]) as source:
            reader = pq.ParquetFile(source, pre_buffer=False)
            there = [n for n in columns.names if n not in partition and n in reader.schema_arrow.names]
            if not there:  # of a file without any of them only the number of rows is known
                yield whole(pa.RecordBatch.from_pylist([{}] * reader.metadata.num_rows), columns, partition)
                return
            for batch in reader.iter_batches(BATCH_ROWS, columns=there, use_threads=False):
                yield whole(batch, columns, partition)
