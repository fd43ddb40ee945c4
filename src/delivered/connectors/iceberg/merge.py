"""What a batch makes of the table: files that come, and files that go, in the one commit of its decision.

append     the staged files come
overwrite  they come, and what the table has in the same partitions goes
upsert     the staged rows are reduced to one of each key; files that hold one of these keys go, and come again without
           the rows that are replaced; rows of new keys come

An upsert runs on the driver: it holds the batch's rows, one of each key, and one file's worth of keys, in memory. It
rests on the snapshot that it was worked out of, which its commit asserts; behind another one it is worked out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.iceberg import types
from delivered.connectors.iceberg.client import data_path, store
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.target import compare
from delivered.connectors.iceberg.writer import IcebergFiles
from delivered.kits.sql.merge import stored
from delivered.kits.table.merge import batch_of, key_columns, matches, new_rows, one_of_each, rewritten
from delivered.model.columns import fitted
from delivered.model.errors import UsageError
from delivered.model.identity import Work


@dataclass(frozen=True)
class Effect:
    """
    Attributes:
        adds, removes: data files, as the client knows them.
        writer: of the files that come, if they are not the staged ones; as the ledger's record names it.
        discard: gives back what was written for this effect.
    """

    adds: Sequence[Any] = ()
    removes: Sequence[Any] = ()
    writer: str = ""
    discard: Callable[[], None] = lambda: None


def overwritten(options: IcebergOptions, table: Any, files: Sequence[Any]) -> Effect:
    """
    Args:
        files: of all shards, by the table's partitions.

    Raises:
        UsageError: the table holds files of other partitions than its own, which cannot be compared.
    """
    if not files:
        return Effect()
    taken = {tuple(f.partition) for f in files}
    spec = table.metadata.default_spec_id
    gone = []
    for task in _tasks(table):
        if task.file.spec_id != spec:
            raise UsageError(
                "PARTITIONS",
                f"The table {options.where} holds files that were written before its partitions were changed: which of "
                "them a batch replaces cannot be told. Nothing of the batch is visible.",
                next_step="rewrite the table's files by its present partitions, with another engine; or write by "
                'option("mode", "upsert")',
            )
        if tuple(task.file.partition) in taken:
            gone.append(task.file)
    return Effect(files, gone)


def upserted(options: IcebergOptions, table: Any, work: Work, shards: Sequence[Sequence[str]]) -> Effect:
    """
    Args:
        shards: names of the staged files of each, in its order.

    Raises:
        UsageError: without a version, a key lies in two shards; or the rows do not fit the table any more.
    """
    if not any(shards):
        return Effect()
    mode = options.write
    rows = one_of_each(mode, batch_of(_staged(table, shards)), options.table)
    compare(options, table, types.canonical_schema(_without_helpers(stored(mode, rows.schema))))
    columns = _plain(table.schema())
    files = IcebergFiles(options.appending, work, columns, direct=False)
    removes: list[Any] = []
    met = np.zeros(rows.num_rows, dtype=bool)
    try:
        for task in _tasks(table):
            if not _may_hold(mode.keys, table.schema(), task.file, rows):
                continue
            wanted = pa.schema([columns.field(n) for n in key_columns(mode)])
            found = matches(mode, pa.Table.from_batches(list(_rows(table, task, wanted)), wanted), rows)
            met[found.source] = True
            if not len(found.row):
                continue
            removes.append(task.file)
            for batch in rewritten(mode, _rows(table, task, columns), columns, rows, found):
                if batch.num_rows:
                    files.write(batch)
        for batch in new_rows(mode, rows, met, columns).to_batches():
            if batch.num_rows:
                files.write(batch)
        files.finish()
    except BaseException:
        files.discard()
        raise
    return Effect(files.done, removes, files.writer if files.done else "", files.discard)


def _tasks(table: Any) -> list[Any]:
    """What has to be read for the table's rows, a task for each data file."""
    if table.metadata.current_snapshot_id is None:
        return []
    return sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)


def _rows(table: Any, task: Any, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A file's rows in their order, without those that delete files name."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    chosen = table.schema().select(*columns.names)
    for batch in ArrowScan(table.metadata, table.io, chosen, AlwaysTrue()).to_record_batches([task]):
        yield fitted(batch, columns)


def _staged(table: Any, shards: Sequence[Sequence[str]]) -> Iterator[Iterator[pa.Table]]:
    files = store(table, data_path(table))

    def one(name: str) -> pa.Table:
        with files.fs.open_input_file(name) as source:
            return pq.read_table(source, use_threads=False)

    return ((one(name) for name in shard) for shard in shards)


def _plain(schema: Any) -> pa.Schema:
    """Without field ids."""
    return pa.schema([(f.name, types.canonical(f.type) or f.type) for f in types.to_arrow(schema)])


def _without_helpers(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f for f in schema if not f.name.startswith("\0")])


def _may_hold(keys: Sequence[str], schema: Any, file: Any, rows: pa.Table) -> bool:
    """By the bounds of the file's keys, where they are whole: those of texts and bytes may be cut off."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.types import IntegerType, LongType

    for key in keys:
        field = schema.find_field(key)
        lows: Mapping[int, bytes] = file.lower_bounds or {}
        highs: Mapping[int, bytes] = file.upper_bounds or {}
        low, high = lows.get(field.field_id), highs.get(field.field_id)
        if low is None or high is None or not isinstance(field.field_type, IntegerType | LongType):
            continue
        bounds = pc.min_max(rows[key]).as_py()
        if bounds["max"] < from_bytes(field.field_type, low) or bounds["min"] > from_bytes(field.field_type, high):
            return False
    return True
