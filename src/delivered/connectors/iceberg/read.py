"""The table as a source of all its rows, a slice for each few files, for the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import types
from delivered.connectors.iceberg.client import explained, require_table
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.columns import fitted
from delivered.source.bounded_scan import BoundedScan, BoundedScanDriver, packed

NONE = -1
"""In place of a snapshot's id: no rows."""


@dataclass(frozen=True)
class IcebergRows(BoundedScan):
    """The rows of one snapshot of a table, as a reader of the table finds them: deleted ones are not among them."""

    options: IcebergOptions

    def capability(self) -> SourceCapability:
        return SourceCapability(
            "iceberg",
            replayable=True,
            local=self.options.local,
            assumes=("a snapshot that is being read does not expire",),
        )

    def schema(self) -> pa.Schema:
        return _plain(require_table(self.options).schema())

    def driver(self) -> IcebergRowsDriver:
        return IcebergRowsDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        with explained(self.options):
            table = require_table(self.options)
            columns = table.schemas()[piece.data["schema"]]
            schema = _plain(columns)
            scan = ArrowScan(table.metadata, table.io, columns, AlwaysTrue())
            for task in piece.data["tasks"]:
                for batch in scan.to_record_batches([task]):
                    if batch.num_rows:
                        yield fitted(batch, schema)

    def tasks(self, snapshot: int) -> list[Any]:
        """What has to be read for a snapshot's rows, a task for each data file."""
        table = require_table(self.options)
        with explained(self.options):
            return sorted(table.scan(snapshot_id=snapshot).plan_files(), key=lambda task: task.file.file_path)


class IcebergRowsDriver(BoundedScanDriver):
    """Offsets are `{"snapshot": id, "schema": id}`: all rows of that snapshot; -1: none. A slice holds files that the
    end has and the start has not; one that was compacted in between counts as new."""

    def __init__(self, rows: IcebergRows) -> None:
        super().__init__(f"the table {rows.options.table!r}")
        self._rows = rows

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        if end["snapshot"] == NONE:
            return []
        before = self._rows.tasks(start["snapshot"]) if start["snapshot"] != NONE else []
        known = {task.file.file_path for task in before}
        fresh = [task for task in self._rows.tasks(end["snapshot"]) if task.file.file_path not in known]
        groups = packed(fresh, lambda task: int(task.file.file_size_in_bytes))
        return [Slice({"tasks": group, "schema": end["schema"]}) for group in groups]

    def batch(self) -> tuple[Offsets, Offsets]:
        metadata = require_table(self._rows.options).metadata
        snapshot = NONE if metadata.current_snapshot_id is None else metadata.current_snapshot_id
        return {"snapshot": NONE, "schema": 0}, {"snapshot": snapshot, "schema": metadata.current_schema_id}


def _plain(schema: Any) -> pa.Schema:
    """Without field ids."""
    return pa.schema([(f.name, types.canonical(f.type) or f.type) for f in types.to_arrow(schema)])
