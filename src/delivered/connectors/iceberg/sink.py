"""The sink `delivered_iceberg`, and a scan of the table's rows, between its snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import IcebergOptions
from delivered.connectors.iceberg.client import explained, keep_nulls, need, open_table, require_table
from delivered.connectors.iceberg.target import TYPES, plain
from delivered.contract.sink import BoundedScan, Changes, Parts
from delivered.contract.source import Offsets, Slice
from delivered.kits.table.changes import Added, FileCommit, added_since
from delivered.kits.table.store import packed
from delivered.kits.table.target import FileTableSink
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import Refused
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.rows import fitted

_BACKUP = "catalog and table are backed up and restored together"
_CATALOG = "the catalog commits by compare-and-swap, and always returns the last committed state"


@dataclass(frozen=True)
class IcebergSink(FileTableSink):
    options: IcebergOptions

    types = TYPES
    parts = Parts(
        __package__,
        needs=need,
        check="target:check",
        ready="target:ready",
        open_table="client:open_table",
        compare="target:compare",
        check_created="target:check_created",
        unstorable_parts="target:unstorable_parts",
        writer="writer:writer",
        trial="writer:IcebergTrial",
        scan="sink:IcebergScan",
        store="store:IcebergStore",
        committer="store:IcebergCommitter",
    )

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="iceberg",
            commit=Commit.ONE_TRANSACTION,
            mechanism="one commit to the table, fenced by one of its branches",
            stage="Parquet files in the table's folder, not yet in any snapshot",
            prepare="files closed and durable, with a manifest next to them",
            decide="one commit: a snapshot with the files of all shards, and the ledger's record",
            apply="nothing to do; the decision made the rows visible",
            send="one snapshot per shard, visible when it is committed",
            batch_atomic=True,
            validates=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            no_position=self.options.write.no_position,
            local=self.options.local,
            assumes=(_BACKUP,) if self.options.local else (_BACKUP, _CATALOG),
            limits=(
                f"the last {LEDGER_HISTORY_BATCHES} decisions are readable as long as their snapshots are kept; the "
                "newest one permanently",
                "each batch adds a snapshot and a file per shard: compact the table and expire snapshots regularly",
            ),
        )


NONE = -1
"""Instead of a snapshot id: no rows."""


@dataclass(frozen=True)
class IcebergScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Without deleted rows; what it reads must not expire meanwhile."""

    options: IcebergOptions

    def schema(self) -> pa.Schema:
        return plain(require_table(self.options).schema())

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"snapshot": id}: reads what later snapshots added.

        Raises:
            Refused: what later snapshots added cannot be distinguished from older rows.
        """
        table = require_table(self.options)
        if until is not None and not _same(table, until):
            return []
        stop = _newest(table) if until is None else int(until["snapshot"])
        with explained(self.options):
            if since is not None and _same(table, since):
                added = _added(table, since, stop)
                if added.mixed:
                    where = self.options.where
                    raise Refused("POSITION_LOST", where=where, position=since, reason=added.mixed)
                tasks = [added.files[path] for path in sorted(added.files)]
            else:
                tasks = _tasks(table, stop)
        groups = packed(tasks, lambda task: int(task.file.file_size_in_bytes))
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

    def position(self) -> Offsets | None:
        """None: the table does not exist yet."""
        table = open_table(self.options) if self.options.write.only_adds else None
        if table is None:
            return None
        metadata = table.metadata
        snapshot = metadata.snapshot_by_id(_newest(table))
        rows = "0" if snapshot is None else snapshot.summary["total-records"]
        return {
            "snapshot": _newest(table),
            "sequence": metadata.last_sequence_number,
            "rows": None if rows is None else int(rows),
            "table": str(metadata.table_uuid),
        }

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        """By the snapshots alone, which say what happened since; once they have expired, by the number of rows."""
        del before
        table = open_table(self.options)
        if table is None or not _same(table, position):
            return Changes.deleted(f"table {self.options.table}", recreated=table is not None)
        with explained(self.options):
            return _added(table, position, _newest(table)).changes()


def _same(table: Any, position: Offsets) -> bool:
    uuid = str(table.metadata.table_uuid)
    return bool(position.get("table", uuid) == uuid)


def _newest(table: Any) -> int:
    newest = table.metadata.current_snapshot_id
    return NONE if newest is None else int(newest)


def _tasks(table: Any, snapshot: int) -> list[Any]:
    """Scan tasks of a snapshot, one per data file."""
    if snapshot == NONE:
        return []
    return sorted(table.scan(snapshot_id=snapshot).plan_files(), key=lambda task: str(task.file.file_path))


def _added(table: Any, since: Offsets, until: int) -> Added[Any]:
    """Tasks of the files that the snapshots after `since` added, up to `until`."""
    chain, start = [], int(since["snapshot"])
    at: int | None = until
    while at is not None and at not in (start, NONE) and (snapshot := table.metadata.snapshot_by_id(at)) is not None:
        chain.append(snapshot)
        at = snapshot.parent_snapshot_id
    if (NONE if at is None else at) != start:
        return _by_sequence(table, since, until)
    deletes: set[str] = set()
    added = added_since(_commit(table, snapshot, deletes) for snapshot in reversed(chain))
    live = {str(task.file.file_path): task for task in _tasks(table, until)}
    if added.compacted:
        added.keep_existing(lambda path: bool(table.io.new_input(path).exists()))
        if deletes and added.compacted:
            added.mixed = "rows were deleted, and then compacted with others"
    compacted = {path for group in added.compacted for path in group.files}
    for path, task in live.items():
        if path in added.files:
            added.files[path] = task
        elif path not in compacted and deletes & {str(file.file_path) for file in task.delete_files}:
            added.altered.append(f"rows of {path} were deleted")
    return added


def _by_sequence(table: Any, since: Offsets, until: int) -> Added[Any]:
    """By the sequence numbers of the files, once snapshots have expired: if files from before `since` still hold all of
    their rows, the others hold none of them."""
    if since["snapshot"] in {s.snapshot_id for s in table.metadata.snapshots}:
        return Added(
            altered=[f"the table no longer goes back to snapshot {since['snapshot']}"], mixed="it was rolled back"
        )
    at, found, held = since.get("sequence"), {}, 0
    tasks = {str(task.file.file_path): task for task in _tasks(table, until)}
    snapshot = table.metadata.snapshot_by_id(until)
    for manifest in () if snapshot is None else snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            path = str(entry.data_file.file_path)
            if path not in tasks or at is None or entry.file_sequence_number is None:
                continue
            if entry.file_sequence_number > at:
                found[path] = tasks[path]
            elif not tasks[path].delete_files:
                held += int(entry.data_file.record_count)
    if since.get("rows") is None or held != since["rows"]:
        return Added(mixed="the snapshots since have expired, and older files were removed or compacted meanwhile")
    return Added(found)


def _commit(table: Any, snapshot: Any, deletes: set[str]) -> FileCommit[Any]:
    """Args: deletes: gets the paths of the snapshot's delete files."""
    from pyiceberg.manifest import DataFileContent, ManifestEntryStatus
    from pyiceberg.table import FileScanTask
    from pyiceberg.table.snapshots import Operation

    adds, removes = {}, []
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            path = str(entry.data_file.file_path)
            if entry.snapshot_id not in (None, snapshot.snapshot_id) or entry.status == ManifestEntryStatus.EXISTING:
                continue
            if entry.data_file.content != DataFileContent.DATA:
                deletes.add(path)
            elif entry.status == ManifestEntryStatus.DELETED:
                removes.append(path)
            else:
                adds[path] = FileScanTask(entry.data_file)
    summary = snapshot.summary
    counts = (f"{summary[f'{what}-records'] or 0} rows {what}" for what in ("deleted", "added"))
    name = f"snapshot {snapshot.snapshot_id} ({summary.operation.value}, {', '.join(counts)})"
    return FileCommit(name, adds, removes, same_rows=summary.operation == Operation.REPLACE)
