"""A scan of the table's rows, between versions of its log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.client import Store, explained, open_table, require_table
from delivered.connectors.delta.target import active_files, filled, table_schema
from delivered.contract.sink import BoundedScan, Changes
from delivered.contract.source import Offsets, Slice
from delivered.kits.table.position import Added, FileCommit, added_since
from delivered.kits.table.store import packed
from delivered.model.errors import Refused

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class DeltaScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Its files must not be vacuumed meanwhile."""

    options: DeltaOptions

    def schema(self) -> pa.Schema:
        return table_schema(require_table(self.options))

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"version": v}: reads what later versions added.

        Raises:
            UsageError: the table has deletion vectors.
            Refused: what later versions added cannot be distinguished from older rows.
        """
        table = require_table(self.options)
        if until is not None and not _same(table, until):
            return []
        files: Sequence[Mapping[str, Any]]
        if since is not None and _same(table, since):
            added = self._added(since, table.version() if until is None else int(until["version"]))
            if added.mixed:
                raise Refused("POSITION_LOST", where=self.options.path, position=since, reason=added.mixed)
            files = list(added.files.values())
        else:
            files = active_files(
                self.options, table if until is None else require_table(self.options, until["version"])
            )
        schema = table_schema(table).serialize().to_pybytes()
        return [Slice({"files": group, "schema": schema}) for group in packed(files, lambda file: int(file["size"]))]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        schema = pa.ipc.read_schema(pa.py_buffer(piece.data["schema"]))
        with explained(self.options):
            store = Store(self.options)
            for file in piece.data["files"]:
                with store.fs.open_input_file(file["path"]) as source:
                    for batch in pq.ParquetFile(source, pre_buffer=False).iter_batches(BATCH_ROWS, use_threads=False):
                        yield filled(batch, schema, file["partition"])

    def position(self) -> Offsets | None:
        """None: the table does not exist yet."""
        table = open_table(self.options) if self.options.write.only_adds else None
        return None if table is None else {"version": table.version(), "table": str(table.metadata().id)}

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        """By the log alone, which says what happened since."""
        del before
        table = open_table(self.options)
        if table is None or not _same(table, position):
            return Changes.deleted(f"the table at {self.options.path}", recreated=table is not None)
        if table.version() < int(position["version"]):
            back = f"the table at {self.options.path} is at version {table.version()}, and was at {position['version']}"
            return Changes(altered=(back,), continues=False)
        return self._added(position, table.version()).changes()

    def _added(self, since: Offsets, until: int) -> Added[dict[str, Any]]:
        """By the versions after `since`, up to `until`."""
        store, first = Store(self.options), int(since["version"]) + 1
        with explained(self.options):
            texts = [(version, store.get(f"_delta_log/{version:020d}.json")) for version in range(first, until + 1)]
            if missing := [version for version, text in texts if text is None]:
                return Added(mixed=f"versions {missing[0]} to {missing[-1]} are no longer in its log")
            added = added_since(c for version, text in texts if text is not None for c in _commits(version, text))
            if added.compacted:
                there = store.files("")
                added.keep_existing(there.__contains__)
        if any(file["deletions"] for file in added.files.values()):
            added.mixed = "rows that were added since were deleted by deletion vectors"
        return added


def _same(table: Any, position: Offsets) -> bool:
    known = str(table.metadata().id)
    return bool(position.get("table", known) == known)


def _commits(version: int, text: bytes) -> Iterator[FileCommit[dict[str, Any]]]:
    """A version of the log. Compaction keeps partitions apart, so each is a commit of its own."""
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    adds = [a["add"] for a in actions if "add" in a]
    removes = [a["remove"] for a in actions if "remove" in a]
    info: Mapping[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
    metrics = info.get("operationMetrics") or {}
    deleted = metrics.get("num_deleted_rows", metrics.get("numDeletedRows"))
    what = info.get("operation", "") + (f", {deleted} rows deleted" if deleted is not None else "")
    same_rows = not any(a.get("dataChange", True) for a in (*adds, *removes))
    parts: list[Any] = [None]
    if same_rows and all(r.get("partitionValues") is not None for r in removes):
        parts = [dict(part) for part in {tuple(sorted(a["partitionValues"].items())) for a in (*adds, *removes)}]
    for part in parts:
        yield FileCommit(
            f"version {version} ({what})",
            {unquote(a["path"]): _file(a) for a in adds if part in (None, a["partitionValues"])},
            [unquote(r["path"]) for r in removes if part in (None, r.get("partitionValues"))],
            same_rows,
        )


def _file(add: Mapping[str, Any]) -> dict[str, Any]:
    """As `active_files`, but for partition values, which are texts."""
    return {
        "path": unquote(add["path"]),
        "size": int(add["size"]),
        "partition": dict(add.get("partitionValues") or {}),
        "deletions": add.get("deletionVector") is not None,
    }
