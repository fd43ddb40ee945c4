"""A scan of all rows of the table, and the effect of a batch on it: see `delivered.kits.table.merge`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import IcebergOptions
from delivered.connectors.iceberg.client import data_path, explained, require_table, store
from delivered.connectors.iceberg.target import compare
from delivered.connectors.iceberg.types import TYPES, plain
from delivered.connectors.iceberg.writer import IcebergFiles
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets, Slice
from delivered.kits.sql.merge import stored
from delivered.kits.table.merge import Effect, one_of_each, staged_rows, upsert
from delivered.kits.table.store import packed
from delivered.model.errors import UsageError
from delivered.model.identity import Work
from delivered.model.ranges import fitted

# Null lists and maps of structs, which pyiceberg's reader (0.12) makes empty ones: an upsert would store them so.


def keep_nulls() -> None:
    """Mend the reader, once in a process. Call it before a scan."""
    from pyiceberg.io.pyarrow import ArrowProjectionVisitor

    reader: Any = ArrowProjectionVisitor
    if getattr(reader, "_keeps_nulls", False):
        return
    for name in ("list", "map"):
        setattr(reader, name, _keeping(getattr(reader, name)))
    reader._keeps_nulls = True


def _keeping(project: Any) -> Any:
    def projected(self: Any, kind: Any, given: Any, *parts: Any) -> Any:
        result = project(self, kind, given, *parts)
        return (
            result
            if given is None or result is None or result.null_count == given.null_count
            else _masked(result, given)
        )

    return projected


def _masked(result: pa.Array, given: pa.Array) -> pa.Array:
    # Of a slice, as Arrow reads row groups of more than 131,072 rows: Arrow accepts no mask with sliced offsets.
    offsets, mask = pa.array(result.offsets.to_numpy()), given.is_null()
    if isinstance(result, pa.MapArray):
        return pa.MapArray.from_arrays(offsets, result.keys, result.items, result.type, mask=mask)
    return type(result).from_arrays(offsets, result.values, type=result.type, mask=mask)


# A scan of all rows of the table.

NONE = -1
"""Instead of a snapshot id: no rows."""


@dataclass(frozen=True)
class IcebergScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Reads the newest snapshot, without deleted rows; it must not expire
    meanwhile."""

    options: IcebergOptions

    def schema(self) -> pa.Schema:
        return plain(require_table(self.options).schema())

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"snapshot": id}: excludes the files of this snapshot; files compacted later count as new."""
        table = require_table(self.options)
        before = self._tasks(table, (since or {}).get("snapshot", NONE))
        known = {task.file.file_path for task in before}
        newest = table.metadata.current_snapshot_id
        fresh = [t for t in self._tasks(table, NONE if newest is None else newest) if t.file.file_path not in known]
        groups = packed(fresh, lambda task: int(task.file.file_size_in_bytes))
        return [Slice({"tasks": group, "schema": table.metadata.current_schema_id}) for group in groups]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        keep_nulls()
        with explained(self.options):
            table = require_table(self.options)
            columns = table.schemas()[piece.data["schema"]]
            schema = plain(columns)
            scan = ArrowScan(table.metadata, table.io, columns, AlwaysTrue())
            for task in piece.data["tasks"]:
                for batch in scan.to_record_batches([task]):
                    if batch.num_rows:
                        yield fitted(batch, schema)

    def _tasks(self, table: Any, snapshot: int) -> list[Any]:
        """Scan tasks of a snapshot, one per data file."""
        if snapshot == NONE:
            return []
        with explained(self.options):
            return sorted(table.scan(snapshot_id=snapshot).plan_files(), key=lambda task: task.file.file_path)


# The effect of a batch on the table: see `delivered.kits.table.merge`.
#
# It is based on a snapshot, which its commit asserts, and is recomputed if there is a newer one.


def overwritten(options: IcebergOptions, table: Any, files: Sequence[Any]) -> Effect:
    """
    Args:
        files: of all shards, by the table's partitions.

    Raises:
        UsageError: the table has files of an earlier partition spec, which cannot be compared.
    """
    if not files:
        return Effect()
    partitions = {tuple(f.partition) for f in files}
    spec = table.metadata.default_spec_id
    removes = []
    for task in _tasks(table):
        if task.file.spec_id != spec:
            raise UsageError("PARTITIONS.ICEBERG_OLD_SPEC", where=options.where)
        if tuple(task.file.partition) in partitions:
            removes.append(task.file)
    return Effect(files, removes)


def replaced(table: Any, files: Sequence[Any]) -> Effect:
    """Replace all of the table's files with `files`."""
    return Effect(files, [task.file for task in _tasks(table)])


def upserted(options: IcebergOptions, table: Any, work: Work, shards: Sequence[Sequence[str]]) -> Effect:
    """
    Args:
        shards: names of the staged files of each, in order.

    Raises:
        UsageError: without a version, a key is in two shards; or the rows no longer match the table.
    """
    if not any(shards):
        return Effect()
    mode = options.write
    rows = one_of_each(mode, staged_rows(store(table, data_path(table)), shards), options.table)
    compare(options, table, TYPES.canonical_schema(_without_helpers(stored(mode, rows.schema))))
    columns = plain(table.schema())
    files = IcebergFiles(options.appending, work, columns, direct=False)
    replaced_files = upsert(mode, rows, columns, [_File(table, task) for task in _tasks(table)], files)
    removes = [file.task.file for file in replaced_files]
    return Effect(files.done, removes, files.writer if files.done else "", True, files.discard)


def _tasks(table: Any) -> list[Any]:
    """Scan tasks for the table's rows, one per data file."""
    if table.metadata.current_snapshot_id is None:
        return []
    return sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)


@dataclass(frozen=True)
class _File:
    """See `delivered.kits.table.merge.TableFile`. `task`: from `_tasks`."""

    table: Any
    task: Any

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        """Only exact ones: bounds of texts and bytes may be truncated."""
        from pyiceberg.conversions import from_bytes
        from pyiceberg.types import IntegerType, LongType

        field, file = self.table.schema().find_field(key), self.task.file
        low, high = ((b or {}).get(field.field_id) for b in (file.lower_bounds, file.upper_bounds))
        if low is None or high is None or not isinstance(field.field_type, IntegerType | LongType):
            return None
        return from_bytes(field.field_type, low), from_bytes(field.field_type, high)

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Without rows that delete files mask."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        keep_nulls()
        chosen = self.table.schema().select(*columns.names)
        for batch in ArrowScan(self.table.metadata, self.table.io, chosen, AlwaysTrue()).to_record_batches([self.task]):
            yield fitted(batch, columns)


def _without_helpers(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f for f in schema if not f.name.startswith("\0")])
