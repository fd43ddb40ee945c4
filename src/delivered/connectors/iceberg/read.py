"""A scan of all rows of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg.client import explained, require_table
from delivered.connectors.iceberg.nulls import keep_nulls
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.types import plain
from delivered.contract.source import Offsets, Slice
from delivered.kits.table.store import packed
from delivered.model.columns import fitted

NONE = -1
"""Instead of a snapshot id: no rows."""


@dataclass(frozen=True)
class IcebergScan:
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
