"""What a batch makes of the table: files that come, and files that go, in the one commit of its decision.

append     the staged files come
overwrite  they come, and what the table has in the same partitions goes
upsert     the staged rows are reduced to one of each key; files that hold one of these keys go, and come again without
           the rows that are replaced; rows of new keys come

An upsert runs on the driver: it holds the batch's rows, one of each key, and one file's worth of keys, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.delta.client import Store
from delivered.connectors.delta.commit import DataFile
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.read import BATCH_ROWS, active_files, whole
from delivered.connectors.delta.target import table_schema
from delivered.connectors.delta.writer import DeltaFiles, text
from delivered.kits.table.merge import Matches, batch_of, key_columns, matches, new_rows, one_of_each, rewritten
from delivered.model.capability import WriteMode
from delivered.model.identity import Work


@dataclass(frozen=True)
class Effect:
    """
    Attributes:
        removes: paths of files that go.
        exact: worked out of what the table holds: as soon as that changes, anew.
        writer: of the files that come, if they are not the staged ones; as the ledger's record names it.
        discard: gives back what was written for this effect.
    """

    adds: Sequence[DataFile]
    removes: Sequence[str] = ()
    writer: str = ""
    exact: bool = False
    discard: Callable[[], None] = lambda: None


NOTHING = Effect(())


def effect(options: DeltaOptions, table: Any, store: Store, work: Work, shards: Sequence[Sequence[DataFile]]) -> Effect:
    """
    Args:
        shards: the staged files of each, in its order.

    Raises:
        UsageError: without a version, a key lies in two shards.
    """
    files = [file for shard in shards for file in shard]
    if options.write.upserts and files:
        return _upsert(options, table, store, work, shards)
    if options.write.replaces and files:
        taken = {tuple(file.partition.items()) for file in files}  # in the order of `partitionBy`, as the table's own
        there = active_files(options, table)
        gone = [f["path"] for f in there if tuple((n, text(n, v)) for n, v in f["partition"].items()) in taken]
        return Effect(files, gone, exact=True)
    return Effect(files)


def _upsert(
    options: DeltaOptions, table: Any, store: Store, work: Work, shards: Sequence[Sequence[DataFile]]
) -> Effect:
    mode, columns = options.write, table_schema(table)
    rows = one_of_each(mode, batch_of(_read(store, shards)), options.path)
    files = DeltaFiles(options.appending, work, columns, direct=False)
    removes: list[str] = []
    met = np.zeros(rows.num_rows, dtype=bool)
    try:
        for file in active_files(options, table):
            if not _may_hold(mode, file, rows):
                continue
            found = _matches(mode, store, file, columns, rows)
            met[found.source] = True
            if not len(found.row):
                continue
            removes.append(file["path"])
            for batch in rewritten(mode, _rows(store, file, columns), columns, rows, found):
                files.write(batch)
        for batch in new_rows(mode, rows, met, columns).to_batches(BATCH_ROWS):
            if batch.num_rows:
                files.write(batch)
        files.finish()
    except BaseException:
        files.discard()
        raise
    return Effect(files.done, removes, files.stem, True, files.discard)


def _read(store: Store, shards: Sequence[Sequence[DataFile]]) -> Iterator[Iterator[pa.Table]]:
    def one(path: str) -> pa.Table:
        with store.fs.open_input_file(path) as source:
            return pq.read_table(source, use_threads=False)

    return ((one(file.path) for file in shard) for shard in shards)


def _matches(mode: WriteMode, store: Store, file: dict[str, Any], columns: pa.Schema, rows: pa.Table) -> Matches:
    wanted = pa.schema([pa.field(n, columns.field(n).type) for n in key_columns(mode)])
    return matches(mode, pa.Table.from_batches(list(_rows(store, file, wanted)), wanted), rows)


def _rows(store: Store, file: dict[str, Any], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    stored_names = [f.name for f in columns if f.name not in file["partition"]]
    with store.fs.open_input_file(file["path"]) as source:
        reader = pq.ParquetFile(source, pre_buffer=False)
        there = [n for n in stored_names if n in reader.schema_arrow.names]
        if not there:  # of a file without any of them only the number of rows is known
            yield whole(pa.RecordBatch.from_pylist([{}] * reader.metadata.num_rows), columns, file["partition"])
            return
        for batch in reader.iter_batches(BATCH_ROWS, columns=there, use_threads=False):
            yield whole(batch, columns, file["partition"])


def _may_hold(mode: WriteMode, file: dict[str, Any], rows: pa.Table) -> bool:
    """By the bounds of the file's keys, where the log has them."""
    for key in mode.keys:
        low, high = file["min"].get(key), file["max"].get(key)
        if key in file["partition"]:
            low = high = file["partition"][key]
        if low is None or high is None or isinstance(low, str):
            continue  # texts are cut off in the log
        bounds = pc.min_max(rows[key]).as_py()
        try:
            if bounds["max"] < low or bounds["min"] > high:
                return False
        except TypeError:
            continue
    return True
