"""Upserts into a table of files: which staged row of a key counts, which rows of a file it replaces.

Rows of a batch bear `SHARD` and `ORDER`, their order of arrival. What counts is said in `delivered.kits.sql.merge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.sql.merge import key_in_two_shards, stored
from delivered.model.capability import WriteMode

ORDER, SHARD, _ROW = "\0order", "\0shard", "\0row"


def batch_of(shards: Iterable[Iterable[pa.Table]]) -> pa.Table:
    """All staged rows, with their shard and their order of arrival."""
    tables = []
    for number, shard in enumerate(shards):
        for rows in shard:
            tables.append(rows.append_column(SHARD, pa.array(np.full(rows.num_rows, number, dtype=np.int32))))
    whole = pa.concat_tables(tables)
    return whole.append_column(ORDER, pa.array(np.arange(whole.num_rows)))


def one_of_each(mode: WriteMode, rows: pa.Table, where: str) -> pa.Table:
    """Of each key the row that counts: see `delivered.kits.sql.merge`."""
    keys = list(mode.keys)
    if mode.version is None:
        spread = rows.group_by(keys, use_threads=False).aggregate([(SHARD, "min"), (SHARD, "max"), (ORDER, "max")])
        two = spread.filter(pc.not_equal(spread[f"{SHARD}_min"], spread[f"{SHARD}_max"]))
        if two.num_rows:
            raise key_in_two_shards(mode, [two[k][0].as_py() for k in keys], where)
        return rows.take(spread[f"{ORDER}_max"])
    ranked = rows.take(pc.sort_indices(rows, sort_keys=[(mode.version, "descending"), (ORDER, "ascending")]))
    ranked = ranked.append_column(_ROW, pa.array(np.arange(ranked.num_rows)))
    first = ranked.group_by(keys, use_threads=False).aggregate([(_ROW, "min")])
    return ranked.take(first[f"{_ROW}_min"])


@dataclass(frozen=True)
class Matches:
    """
    Attributes:
        source: rows of the batch whose key the file holds.
        row: rows of the file that are replaced, ascending.
        by: for each of them the row of the batch.
    """

    source: Any
    row: Any
    by: Any


def key_columns(mode: WriteMode) -> list[str]:
    """What `matches` needs of a file."""
    return [*mode.keys, *([mode.version] if mode.version is not None else [])]


def matches(mode: WriteMode, there: pa.Table, rows: pa.Table) -> Matches:
    """
    Args:
        there: `key_columns` of a file, all its rows in their order.
        rows: from `one_of_each`.
    """
    keys, version = list(mode.keys), [mode.version] if mode.version is not None else []
    there = there.rename_columns([*keys, *("\0stored" for _ in version)])
    there = there.append_column(_ROW, pa.array(np.arange(there.num_rows)))
    mine = rows.select(key_columns(mode)).append_column(ORDER, pa.array(np.arange(rows.num_rows)))
    both = there.join(mine, keys, join_type="inner", use_threads=False)
    source = both[ORDER].to_numpy()
    if version:
        newer = pc.or_kleene(pc.is_null(both["\0stored"]), pc.greater(both[version[0]], both["\0stored"]))
        both = both.filter(newer)
    both = both.sort_by(_ROW)
    return Matches(source, both[_ROW].to_numpy(), both[ORDER].to_numpy())


def rewritten(
    mode: WriteMode, batches: Iterable[pa.RecordBatch], columns: pa.Schema, rows: pa.Table, found: Matches
) -> Iterator[pa.RecordBatch]:
    """A file's rows, those that are replaced as the batch has them; columns that it lacks keep their values."""
    given = set(stored(mode, rows.schema).names)
    at = 0
    for batch in batches:
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


def new_rows(mode: WriteMode, rows: pa.Table, met: Any, columns: pa.Schema) -> pa.Table:
    """Rows of keys that the table does not hold; columns that they lack are null.

    Args:
        met: for each row whether its key was found.
    """
    new = rows.filter(pa.array(~met))
    if mode.delete is not None:
        new = new.filter(pc.invert(pc.fill_null(new[mode.delete], False)))
    return _in_columns(new, columns)


def _in_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    return pa.table(
        [rows[f.name] if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type) for f in columns],
        pa.schema([pa.field(f.name, f.type) for f in columns]),
    )
