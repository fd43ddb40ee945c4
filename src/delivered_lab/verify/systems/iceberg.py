"""An Iceberg table of an embedded catalog, read with pyiceberg: snapshot by snapshot, and the final state by a scan, as
any user would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered_lab.verify.systems.base import Row, SinkKind, System, as_row
from delivered_lab.verify.systems.tables import PARTITION, FileTable, on_disk

_TABLE = "judged.effects"
_TRIES = 20
_REWRITTEN = "rewritten-by"
"""Key in the summary of the judge's own snapshots that move rows and add none."""


class IcebergTable(FileTable):
    system = "iceberg"

    def place(self) -> dict[str, Any]:
        return {"warehouse": str(self.path), "table": _TABLE}

    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Snapshots of the main branch."""
        table = self._open()
        line, at = [], None if table is None else table.metadata.current_snapshot_id
        while at is not None and (snapshot := table.snapshot_by_id(at)) is not None:
            line.append(snapshot)
            at = snapshot.parent_snapshot_id
        for snapshot in reversed(line):
            if snapshot.snapshot_id not in known:
                yield {snapshot.snapshot_id}, _added(table, snapshot)

    def scan(self) -> list[Row] | None:
        table = self._open()
        return None if table is None else _scanned(table)

    def pinned(self) -> Callable[[], Any]:
        table = self._there()
        return lambda: len(_scanned(table))

    def append_nothing(self) -> None:
        self._changed(lambda table: table.append(table.schema().as_arrow().empty_table()))

    def compact(self) -> None:
        """Rewrite all rows into one file in a single commit: the client has no such operation."""

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
        """Retries, because the pipeline's tasks commit too."""
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
        """None: it does not exist yet."""
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.exceptions import NoSuchTableError
        from sqlalchemy.exc import OperationalError

        database = Path(self.path) / "catalog.db"
        if not database.exists():
            return None
        uri = f"sqlite:///{database}"
        catalog = SqlCatalog("default", uri=uri, warehouse=f"file://{self.path}", init_catalog_tables="false")
        try:
            return catalog.load_table(_TABLE)
        except NoSuchTableError:
            return None
        except OperationalError as error:
            if "no such table" in str(error):  # the catalog is still being created
                return None
            raise
        finally:
            catalog.engine.dispose()


def _added(table: Any, snapshot: Any) -> list[str]:
    """Files with new rows, in the order of the manifests."""
    from pyiceberg.manifest import ManifestEntryStatus

    if snapshot.summary is not None and snapshot.summary.additional_properties.get(_REWRITTEN):
        return []
    return sorted(
        unquote(urlsplit(entry.data_file.file_path).path)
        for manifest in snapshot.manifests(table.io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
        if entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id == snapshot.snapshot_id
    )


def _scanned(table: Any) -> list[Row]:
    return [as_row(PARTITION, n, r) for n, r in enumerate(table.scan().to_arrow().to_pylist())]


SYSTEM = System((SinkKind("iceberg", "iceberg", on_disk(IcebergTable), shared=True, upserts=True),))
