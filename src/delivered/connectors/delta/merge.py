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
from delivered.model.capability import WriteMode
from delivered.model.identity import Work
from delivered.sql.merge import key_in_two_shards, stored

_ORDER, _SHARD, _ROW = "\0order", "\0shard", "\0row"


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
    rows = _one_of_each(mode, _read(store, shards), options.path)
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
            for batch in _rewritten(mode, store, file, columns, rows, found):
                files.write(batch)
        new = rows.filter(pa.array(~met))
        if mode.delete is not None:
            new = new.filter(pc.invert(pc.fill_null(new[mode.delete], False)))
        for batch in _in_columns(new, columns).to_batches(BATCH_ROWS):
            if batch.num_rows:
                files.write(batch)
        files.finish()
    except BaseException:
        files.discard()
        raise
    return Effect(files.done, removes, files.stem, True, files.discard)


def _read(store: Store, shards: Sequence[Sequence[DataFile]]) -> pa.Table:
    """All staged rows, with their shard and their order of arrival."""
    tables = []
    for number, shard in enumerate(shards):
        for file in shard:
            with store.fs.open_input_file(file.path) as source:
                rows = pq.read_table(source, use_threads=False)
            tables.append(rows.append_column(_SHARD, pa.array(np.full(rows.num_rows, number, dtype=np.int32))))
    whole_batch = pa.concat_tables(tables)
    return whole_batch.append_column(_ORDER, pa.array(np.arange(whole_batch.num_rows)))


def _one_of_each(mode: WriteMode, rows: pa.Table, where: str) -> pa.Table:
    """Of each key the row that counts: see `delivered.sql.merge`."""
    keys = list(mode.keys)
    if mode.version is None:
        spread = rows.group_by(keys, use_threads=False).aggregate([(_SHARD, "min"), (_SHARD, "max"), (_ORDER, "max")])
        two = spread.filter(pc.not_equal(spread[f"{_SHARD}_min"], spread[f"{_SHARD}_max"]))
        if two.num_rows:
            raise key_in_two_shards(mode, [two[k][0].as_py() for k in keys], where)
        return rows.take(spread[f"{_ORDER}_max"])
    ranked = rows.take(pc.sort_indices(rows, sort_keys=[(mode.version, "descending"), (_ORDER, "ascending")]))
    ranked = ranked.append_column(_ROW, pa.array(np.arange(ranked.num_rows)))
    first = ranked.group_by(keys, use_threads=False).aggregate([(_ROW, "min")])
    return ranked.take(first[f"{_ROW}_min"])


@dataclass(frozen=True)
class _Matches:
    """
    Attributes:
        source: rows of the batch whose key the file holds.
        row: rows of the file that are replaced, ascending.
        by: for each of them the row of the batch.
    """

    source: Any
    row: Any
    by: Any


def _matches(mode: WriteMode, store: Store, file: dict[str, Any], columns: pa.Schema, rows: pa.Table) -> _Matches:
    keys, version = list(mode.keys), [mode.version] if mode.version is not None else []
    names = [*keys, *version]
    there = pa.Table.from_batches(
        list(_rows(store, file, pa.schema([columns.field(n) for n in names]))),
        pa.schema([pa.field(n, columns.field(n).type) for n in names]),
    )
    there = there.rename_columns([*keys, *("\0stored" for _ in version)])
    there = there.append_column(_ROW, pa.array(np.arange(there.num_rows)))
    mine = rows.select(names).append_column(_ORDER, pa.array(np.arange(rows.num_rows)))
    both = there.join(mine, keys, join_type="inner", use_threads=False)
    source = both[_ORDER].to_numpy()
    if version:
        newer = pc.or_kleene(pc.is_null(both["\0stored"]), pc.greater(both[version[0]], both["\0stored"]))
        both = both.filter(newer)
    both = both.sort_by(_ROW)
    return _Matches(source, both[_ROW].to_numpy(), both[_ORDER].to_numpy())


def _rewritten(
    mode: WriteMode, store: Store, file: dict[str, Any], columns: pa.Schema, rows: pa.Table, found: _Matches
) -> Iterator[pa.RecordBatch]:
    """The file's rows, those that are replaced as the batch has them; columns that it lacks keep their values."""
    given = set(stored(mode, rows.schema).names)
    at = 0
    for batch in _rows(store, file, columns):
        lo, hi = np.searchsorted(found.row, [at, at + batch.num_rows])
        here, by = found.row[lo:hi] - at, found.by[lo:hi]
        at += batch.num_rows
        kept = np.ones(batch.num_rows, dtype=bool)
        kept[here] = False
        yield batch.filter(pa.array(kept))
        if not len(here):
            continue
        new, old = rows.take(pa.array(by)), batch.take(pa.array(here))
        table = pa.table(
            [new[f.name] if f.name in given else old[f.name] for f in columns],
            pa.schema([pa.field(f.name, f.type) for f in columns]),
        )
        if mode.delete is not None:
            table = table.filter(pc.invert(pc.fill_null(new[mode.delete], False)))
        yield from table.combine_chunks().to_batches()


def _in_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    return pa.table(
        [rows[f.name] if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type) for f in columns],
        pa.schema([pa.field(f.name, f.type) for f in columns]),
    )


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
