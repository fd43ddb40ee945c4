"""What commits change in a table of files: the effect of a batch, and the rows that were added since a position.

A batch's effect is what the decision's one commit adds and removes:

append     adds the staged files
overwrite  adds them, and removes the table's files in the same partitions
upsert     reduces the staged rows to one per key; rewrites the files that contain any of these keys; adds rows of
           new keys

An upsert runs on the driver, with the batch's rows (one per key) and the keys of one file in memory. Rows of a batch
have `SHARD` and `ORDER`, their order of arrival. Which row wins: `delivered.kits.sql.merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.contract.sink import Changes
from delivered.kits.sql.merge import key_in_two_shards
from delivered.kits.sql.table import stored_columns
from delivered.kits.table.shard import ShardFiles
from delivered.kits.table.store import Store
from delivered.model.capability import WriteMode
from delivered.model.rows import plain_rows

ORDER, SHARD, _ROW = "\0order", "\0shard", "\0row"
BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Effect:
    """
    Attributes:
        adds, removes: data files, as the table's connector represents them.
        writer: of the added files, if they are not the staged ones; as in the ledger's record.
        exact: computed from the table's content; must be recomputed when that changes.
        discard: deletes the files written for this effect.
    """

    adds: Sequence[Any] = ()
    removes: Sequence[Any] = ()
    writer: str = ""
    exact: bool = False
    discard: Callable[[], None] = lambda: None


class TableFile(Protocol):
    """A data file of the table."""

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        """Minimum and maximum of a column; None: unknown."""

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows in order, with these columns; the file may lack some of them."""


F = TypeVar("F", bound=TableFile)


def upsert(mode: WriteMode, rows: pa.Table, columns: pa.Schema, there: Iterable[F], files: ShardFiles) -> list[F]:
    """Write the new files; return those they replace.

    Args:
        rows: from `one_of_each`.
        columns: of the table.
        there: the table's files.
        files: receives the new rows. Discarded if this raises.
    """
    removes: list[F] = []
    matched = np.zeros(rows.num_rows, dtype=bool)
    wanted = pa.schema([columns.field(name) for name in _key_columns(mode)])
    try:
        for file in there:
            if not _may_hold(mode, file, rows):
                continue
            matches = _matches(mode, pa.Table.from_batches(list(file.rows(wanted)), wanted), rows)
            matched[matches.source] = True
            if not len(matches.row):
                continue
            removes.append(file)
            _write(files, _rewritten(mode, file.rows(columns), columns, rows, matches))
        _write(files, _new_rows(mode, rows, matched, columns).to_batches(BATCH_ROWS))
        files.finish()
    except BaseException:
        files.discard()
        raise
    return removes


def _write(files: ShardFiles, batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        if batch.num_rows:
            files.write(batch)


def _may_hold(mode: WriteMode, file: TableFile, rows: pa.Table) -> bool:
    """Whether a file may contain one of the keys, by its statistics."""
    for key in mode.keys:
        bounds = file.bounds(key)
        if bounds is None:
            continue
        batch = pc.min_max(rows[key]).as_py()
        try:
            if batch["max"] < bounds[0] or batch["min"] > bounds[1]:
                return False
        except TypeError:  # not comparable
            continue
    return True


def staged_rows(store: Store, shards: Sequence[Sequence[str]]) -> pa.Table:
    """All staged rows in these Parquet files, with their shard and their order of arrival."""

    def one(name: str) -> pa.Table:
        with store.fs.open_input_file(name) as source:
            return pq.read_table(source, use_threads=False)

    return join_shards((one(name) for name in shard) for shard in shards)


def join_shards(shards: Iterable[Iterable[pa.Table]]) -> pa.Table:
    """All staged rows, with their shard and their order of arrival."""
    tables = []
    for number, shard in enumerate(shards):
        for rows in shard:
            tables.append(rows.append_column(SHARD, pa.array(np.full(rows.num_rows, number, dtype=np.int32))))
    batch = pa.concat_tables(tables)
    return batch.append_column(ORDER, pa.array(np.arange(batch.num_rows)))


def one_of_each(mode: WriteMode, rows: pa.Table, where: str) -> pa.Table:
    """The winning row of each key: see `delivered.kits.sql.merge`."""
    keys = list(mode.keys)
    if mode.version is None:
        spread = rows.group_by(keys, use_threads=False).aggregate([(SHARD, "min"), (SHARD, "max"), (ORDER, "max")])
        two = spread.filter(pc.not_equal(spread[f"{SHARD}_min"], spread[f"{SHARD}_max"]))
        if two.num_rows:
            first = two.select(keys).slice(0, 1).combine_chunks().to_batches()[0]
            raise key_in_two_shards(mode, list(plain_rows(first)[0].values()), where)
        return rows.take(spread[f"{ORDER}_max"])
    ranked = rows.take(pc.sort_indices(rows, sort_keys=[(mode.version, "descending"), (ORDER, "ascending")]))
    ranked = ranked.append_column(_ROW, pa.array(np.arange(ranked.num_rows)))
    first = ranked.group_by(keys, use_threads=False).aggregate([(_ROW, "min")])
    return ranked.take(first[f"{_ROW}_min"])


@dataclass(frozen=True)
class _Matches:
    """
    Attributes:
        source: rows of the batch whose key is in the file.
        row: replaced rows of the file, ascending.
        by: the replacing row of the batch for each of them.
    """

    source: Any
    row: Any
    by: Any


def _key_columns(mode: WriteMode) -> list[str]:
    """The columns that `_matches` reads."""
    return [*mode.keys, *([mode.version] if mode.version is not None else [])]


def _matches(mode: WriteMode, stored_rows: pa.Table, rows: pa.Table) -> _Matches:
    """
    Args:
        stored_rows: `_key_columns` of a file, all rows in order.
        rows: from `one_of_each`.
    """
    keys, version = list(mode.keys), [mode.version] if mode.version is not None else []
    stored_rows = stored_rows.rename_columns([*keys, *("\0stored" for _ in version)])
    stored_rows = stored_rows.append_column(_ROW, pa.array(np.arange(stored_rows.num_rows)))
    staged = rows.select(_key_columns(mode)).append_column(ORDER, pa.array(np.arange(rows.num_rows)))
    both = stored_rows.join(staged, keys, join_type="inner", use_threads=False)
    source = both[ORDER].to_numpy()
    if version:
        newer = pc.or_kleene(pc.is_null(both["\0stored"]), pc.greater(both[version[0]], both["\0stored"]))
        both = both.filter(newer)
    both = both.sort_by(_ROW)
    return _Matches(source, both[_ROW].to_numpy(), both[ORDER].to_numpy())


def _rewritten(
    mode: WriteMode, batches: Iterable[pa.RecordBatch], columns: pa.Schema, rows: pa.Table, matches: _Matches
) -> Iterator[pa.RecordBatch]:
    """A file's rows with the batch's values in replaced rows; columns missing from the batch keep their values."""
    batch_columns = set(stored_columns(mode, rows.schema).names)
    at = 0
    for batch in batches:
        lo, hi = np.searchsorted(matches.row, [at, at + batch.num_rows])
        replaced, by = matches.row[lo:hi] - at, matches.by[lo:hi]
        at += batch.num_rows
        unchanged = np.ones(batch.num_rows, dtype=bool)
        unchanged[replaced] = False
        yield batch.filter(pa.array(unchanged))
        if not len(replaced):
            continue
        new, old = rows.take(pa.array(by)), batch.take(pa.array(replaced))
        table = pa.table(
            [new[f.name] if f.name in batch_columns else old[f.name] for f in columns],
            pa.schema([pa.field(f.name, f.type) for f in columns]),
        )
        if mode.delete is not None:
            table = table.filter(pc.invert(pc.fill_null(new[mode.delete], False)))
        yield from table.combine_chunks().to_batches()


def _new_rows(mode: WriteMode, rows: pa.Table, matched: Any, columns: pa.Schema) -> pa.Table:
    """Rows of keys that are new to the table; missing columns are null.

    Args:
        matched: for each row, whether its key was found.
    """
    new = rows.filter(pa.array(~matched))
    if mode.delete is not None:
        new = new.filter(pc.invert(pc.fill_null(new[mode.delete], False)))
    return _in_columns(new, columns)


def _in_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    return pa.table(
        [rows[f.name] if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type) for f in columns],
        pa.schema([pa.field(f.name, f.type) for f in columns]),
    )


# Which files of a table hold the rows that were added since a position, from the commits since. Pure.
#
# A commit that removes files either keeps their rows, as compaction does, or changes them. What was compacted is read
# as it was before, while those files exist: a file that compaction wrote may hold rows of both sides of the position.

D = TypeVar("D")


@dataclass(frozen=True)
class FileCommit(Generic[D]):
    """One commit of a table.

    Attributes:
        name: for messages: "version 12 (DELETE)".
        adds: by path.
        removes: paths.
        same_rows: the added files hold the rows of the removed ones: compaction.
    """

    name: str
    adds: Mapping[str, D]
    removes: Collection[str] = ()
    same_rows: bool = False


@dataclass(frozen=True)
class Compacted(Generic[D]):
    """What compaction made of added files.

    Attributes:
        inner: the added files; they are left until the table's unused files are deleted.
        files: hold their rows now.
        others: `files` hold rows from before the position, too.
    """

    inner: frozenset[str]
    files: Mapping[str, D]
    others: bool


@dataclass
class Added(Generic[D]):
    """What was added since a position, and what happened to the rest.

    Attributes:
        files: hold the added rows, compacted or not.
        altered: commits that changed rows from before the position.
        mixed: why the added rows cannot be distinguished from others; empty: they can.
    """

    files: dict[str, D] = field(default_factory=dict)
    compacted: list[Compacted[D]] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    mixed: str = ""

    def take(self, commit: FileCommit[D]) -> None:
        """The next commit."""
        removes = set(commit.removes)
        groups = [g for g in self.compacted if removes & g.files.keys()]
        old = removes - self.files.keys() - {path for g in groups for path in g.files}
        if commit.same_rows:
            self._compact(commit, removes, groups, bool(old))
            return
        both = any(g.others for g in groups)
        for group in groups:
            if not group.others:
                self._replace(group)
        new = removes & self.files.keys()
        for path in new:
            del self.files[path]
        if old or both:
            self.altered.append(f"{commit.name} removed or changed rows")
        if (both or (old and new)) and commit.adds:
            self.mixed = f"{commit.name} rewrote rows of both sides of the position"
        elif not old:
            self.files |= commit.adds

    def keep_existing(self, exists: Callable[[str], bool]) -> None:
        """Read the compacted files instead of added ones that were deleted since."""
        for group in list(self.compacted):
            if not all(map(exists, group.inner)):
                if group.others:
                    self.mixed = "what was added was compacted with older files, and the files as they were are deleted"
                else:
                    self._replace(group)

    def changes(self) -> Changes:
        return Changes(altered=tuple(self.altered), unknown=(self.mixed,) * bool(self.mixed), continues=not self.mixed)

    def _compact(self, commit: FileCommit[D], removes: set[str], groups: list[Compacted[D]], old: bool) -> None:
        inner = removes & self.files.keys() - {path for g in self.compacted for path in g.inner}
        files = {path: f for g in groups for path, f in g.files.items() if path not in removes}
        if inner or groups:
            self.compacted = [g for g in self.compacted if g not in groups]
            names = frozenset(inner).union(*(g.inner for g in groups))
            others = old or any(g.others for g in groups)
            self.compacted.append(Compacted(names, {**files, **commit.adds}, others))

    def _replace(self, group: Compacted[D]) -> None:
        self.compacted.remove(group)
        for path in group.inner:
            self.files.pop(path, None)
        self.files |= group.files


def added_since(commits: Iterable[FileCommit[D]]) -> Added[D]:
    """Args: commits: those since the position, oldest first."""
    found: Added[D] = Added()
    for commit in commits:
        found.take(commit)
    return found
