"""Tables made of files: Delta, Iceberg, and a folder of Parquet files. Rows are in the order in which a reader found
their files; the final state of a table is read with the format's own library, as any user would."""

from __future__ import annotations

import json
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered_lab.verify.systems.base import Poll, ReadDisturbed, Row, SinkKind, SinkPlace, System, as_row, polling

ROWS_MAX = 1 << 24
"""Row positions reserved per file, before those of the next."""
PARTITION = "table"


class FileTable(ABC):
    """Args: extra: more options of the sink in the pipeline file."""

    system = "files"
    batch_atomic = True

    def __init__(self, path: Path, extra: dict[str, Any] | None = None) -> None:
        self.path = path
        self._extra = extra or {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Table options in the pipeline file."""

    @abstractmethod
    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Unknown commits, oldest first: their ids, and the files with new rows."""

    @abstractmethod
    def scan(self) -> list[Row] | None:
        """What any reader finds in the table; None: the same as the files hold, or no table exists."""

    @abstractmethod
    def pinned(self) -> Callable[[], Any]:
        """A function that rereads, and counts, what a reader that starts now sees."""

    def create(self) -> None:  # noqa: B027 - the pipeline makes it
        """Nothing to do."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def options(self) -> dict[str, Any]:
        return {"format": self.system, **self.place(), **self._extra}

    def open_transactions(self, pipeline: str) -> list[str]:
        """There is nothing for a reader to wait for."""
        del pipeline
        return []

    def read(self) -> list[Row]:
        """The result of a scan, each row at the position where its file was committed.

        A row that the scan finds, but the committed files do not hold, is placed after all others.
        """
        scanned = self.scan()
        rows = [row for _, files in self.commits(frozenset()) for name in files for row in self._rows(name)]
        if scanned is None:
            return rows
        left, found = Counter((r.key, r.value) for r in scanned), []
        for row in rows:
            if left[row.key, row.value] > 0:
                left[row.key, row.value] -= 1
                found.append(row)
        behind = self._number("in no commit") * ROWS_MAX
        return found + [Row(PARTITION, behind + n, *what) for n, what in enumerate(left.elements())]

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Commit by commit, so that no state visible to a reader is skipped."""
        known: set[Any] = set()
        for _ in polling(stop):
            for ids, files in self.commits(known):
                rows = [row for name in files for row in self._rows(name)]
                if rows:
                    seen(Poll(rows, snapshot=True))
                known |= ids

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader that has listed the data, and reads the files later."""
        again = self.pinned()
        before = again()
        yield
        try:
            now = again()
        except Exception as error:
            raise ReadDisturbed(f"what a reader had started to read cannot be read any more: {error}") from error
        if now != before:
            raise ReadDisturbed(f"a reader began with {before} rows and ended with {now}")

    def _rows(self, name: str) -> list[Row]:
        """Raises OSError: the file is missing, or not Parquet."""
        import pyarrow.parquet as pq

        number = self._number(name)
        with pq.ParquetFile(self.path / name) as file:
            rows = file.read().to_pylist()
        return [as_row(PARTITION, number * ROWS_MAX + n, r) for n, r in enumerate(rows)]

    def _number(self, name: str) -> int:
        """Number of a file, in the order first found: the same for all readers of a sink."""
        with self._lock:
            return self._numbers.setdefault(name, len(self._numbers))


def on_disk(table: type[FileTable]) -> Callable[[SinkKind, SinkPlace], FileTable]:
    """Its client in a case."""
    return lambda _, place: table(place.disk / "effects", dict(place.extra))


class DeltaTable(FileTable):
    system = "delta"

    def place(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Files with new rows. A commit that only moves rows into other files is marked: `dataChange` is false."""
        for version in (v for v in self._versions() if v not in known):
            text = (self.path / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8")
            actions = [json.loads(line) for line in text.splitlines() if line.strip()]
            yield {version}, [unquote(a["add"]["path"]) for a in actions if a.get("add", {}).get("dataChange")]

    def scan(self, version: int | None = None) -> list[Row] | None:
        if not self._versions():
            return None
        rows = self._open(version).to_pyarrow_table().to_pylist()
        return [as_row(PARTITION, n, r) for n, r in enumerate(rows)]

    def pinned(self) -> Callable[[], Any]:
        version = self._versions()[-1]
        return lambda: len(self.scan(version) or ())

    def append_nothing(self) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        table = self._open()
        write_deltalake(str(self.path), pa.schema(table.schema().to_arrow()).empty_table(), mode="append")

    def compact(self) -> None:
        self._open().optimize.compact()

    def describe(self, text: str) -> None:
        self._open().alter.set_table_description(text)

    def _open(self, version: int | None = None) -> Any:
        import deltalake

        return deltalake.DeltaTable(str(self.path), version=version)

    def _versions(self) -> list[int]:
        names = (p.name for p in (self.path / "_delta_log").glob("*.json"))
        return sorted(int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdigit())


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


_PATTERN = "batch=*/*.parquet"
"""The pattern that the sink's documentation gives to readers."""


class Files(FileTable):
    def place(self) -> dict[str, Any]:
        return {"path": str(self.path), "fileFormat": "parquet"}

    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """New files in one listing."""
        new = [name for name in self._listed() if name not in known]
        yield set(new), new

    def scan(self) -> list[Row] | None:
        return None

    def pinned(self) -> Callable[[], Any]:
        listed = self._listed()
        return lambda: [(name, len(self._rows(name))) for name in listed]

    def _listed(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.glob(_PATTERN))


SYSTEM = System(
    (
        SinkKind("delta", "delta", on_disk(DeltaTable), shared=True, upserts=True, own=True),
        SinkKind("iceberg", "iceberg", on_disk(IcebergTable), shared=True, upserts=True),
        SinkKind(
            "files", "files", on_disk(Files), absent={"F2": "a local folder: no network, no other writers"}, own=True
        ),
    )
)
