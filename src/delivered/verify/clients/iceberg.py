"""An Iceberg table of an embedded catalog, read with pyiceberg: snapshot by snapshot, and what is there at the end by
a scan, as anybody would."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered.verify.clients.base import Disturbed, Look, Row, as_row
from delivered.verify.clients.folders import ROWS_MAX, Folder, parquet_rows

_POLL_S = 0.05
_PARTITION = "table"
_TABLE = "judged.effects"
_TRIES = 20
_REWRITTEN = "rewritten-by"
"""In the summary of a snapshot of ours that moves rows, and brings none."""


class IcebergTable(Folder):
    system = "iceberg"

    def options(self) -> dict[str, Any]:
        return {"format": "iceberg", "warehouse": str(self.path), "table": _TABLE, **self._extra}

    def read(self) -> list[Row]:
        """What a scan finds, each row at the place where its file came in.

        A row that the scan finds, and the files that snapshots added do not hold, has a place behind all others.
        """
        table = self._open()
        if table is None:
            return []
        left = Counter((r.key, r.value) for r in _scanned(table))
        found = []
        for name in (n for s in _line(table) for n in self._added(table, s)):
            for row in self._rows(name):
                if left[row.key, row.value] > 0:
                    left[row.key, row.value] -= 1
                    found.append(row)
        behind = self._order.number("in no snapshot") * ROWS_MAX
        return found + [Row(_PARTITION, behind + n, *what) for n, what in enumerate(left.elements())]

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """Snapshot by snapshot, so that no state that a reader could meet is left out."""
        known: set[int] = set()
        while True:
            last = stop.is_set()
            table = self._open()
            for snapshot in _line(table) if table is not None else []:
                if snapshot.snapshot_id in known:
                    continue
                rows = [row for name in self._added(table, snapshot) for row in self._rows(name)]
                if rows:
                    seen(Look(rows, whole=True))
                known.add(snapshot.snapshot_id)
            if last:
                return
            stop.wait(_POLL_S)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader that has looked at the table, and reads the files a while later."""
        table = self._there()
        before = len(_scanned(table))
        yield
        try:
            now = len(_scanned(table))
        except Exception as error:
            raise Disturbed(f"a snapshot could be read, and cannot any more: {error}") from error
        if now != before:
            raise Disturbed(f"a snapshot had {before} rows and has {now}")

    def append_nothing(self) -> None:
        self._changed(lambda table: table.append(table.schema().as_arrow().empty_table()))

    def compact(self) -> None:
        """All rows into one file, as one change of the table: the client knows no operation of that name."""

        def rewrite(table: Any) -> None:
            with table.transaction() as change:
                change.overwrite(table.scan().to_arrow(), snapshot_properties={_REWRITTEN: "judge"})

        self._changed(rewrite)

    def describe(self, text: str) -> None:
        def comment(table: Any) -> None:
            with table.transaction() as change:
                change.set_properties(comment=text)

        self._changed(comment)

    def _changed(self, change: Callable[[Any], None]) -> None:
        """Tried again while the pipeline's tasks commit, too."""
        from pyiceberg.exceptions import CommitFailedException

        for left in reversed(range(_TRIES)):
            try:
                return change(self._there())
            except CommitFailedException:
                if not left:
                    raise
        return None

    def _there(self) -> Any:
        table = self._open()
        if table is None:
            raise FileNotFoundError(f"there is no table {_TABLE} in {self.path}")
        return table

    def _open(self) -> Any:
        """None: it was not made yet."""
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.exceptions import NoSuchTableError
        from sqlalchemy.exc import OperationalError

        database = Path(self.path) / "catalog.db"
        if not database.exists():
            return None
        given = {"uri": f"sqlite:///{database}", "warehouse": f"file://{self.path}", "init_catalog_tables": "false"}
        catalog = SqlCatalog("default", **given)
        try:
            return catalog.load_table(_TABLE)
        except NoSuchTableError:
            return None
        except OperationalError as error:
            if "no such table" in str(error):  # of the catalog, which is being made
                return None
            raise
        finally:
            catalog.engine.dispose()

    def _added(self, table: Any, snapshot: Any) -> list[str]:
        """Files with new rows, in the order of the manifests."""
        from pyiceberg.manifest import ManifestEntryStatus

        if snapshot.summary is not None and snapshot.summary.additional_properties.get(_REWRITTEN):
            return []
        found = []
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id == snapshot.snapshot_id:
                    found.append(unquote(urlsplit(entry.data_file.file_path).path))
        return sorted(found)

    def _rows(self, path: str) -> list[Row]:
        return parquet_rows(Path(path), _PARTITION, self._order.number(path))


def _line(table: Any) -> list[Any]:
    """Snapshots of the main branch, oldest first."""
    found, at = [], table.metadata.current_snapshot_id
    while at is not None and (snapshot := table.snapshot_by_id(at)) is not None:
        found.append(snapshot)
        at = snapshot.parent_snapshot_id
    return found[::-1]


def _scanned(table: Any) -> list[Row]:
    rows = table.scan().to_arrow().to_pylist()
    return [as_row(_PARTITION, n, r) for n, r in enumerate(rows)]
