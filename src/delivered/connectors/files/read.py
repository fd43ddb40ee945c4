"""The folder as a source of all its rows, a slice for each few files, for the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from delivered.connectors.files import formats
from delivered.connectors.files.disk import failed, schema_file
from delivered.connectors.files.options import FilesOptions
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.errors import UsageError
from delivered.source.bounded_scan import BoundedScan, BoundedScanDriver, packed


@dataclass(frozen=True)
class FolderRows(BoundedScan):
    """The rows of all files that a reader of the folder sees."""

    options: FilesOptions

    def capability(self) -> SourceCapability:
        return SourceCapability("files", replayable=True, local=True, assumes=("files are only ever added",))

    def schema(self) -> pa.Schema:
        """
        Raises:
            UsageError: nothing was ever written to the folder by this package.
        """
        found = stored_schema(self.options)
        if found is None:
            raise UsageError(
                "FOLDER_UNKNOWN",
                f"The folder {self.options.path!r} holds nothing that a pipeline wrote.",
                next_step="run the pipeline first, or check the path",
            )
        return found

    def driver(self) -> FolderDriver:
        return FolderDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        try:
            for name in piece.data:
                yield from formats.decode(self.options.format, self.options.folder / name, schema)
        except OSError as error:
            raise failed(self.options, error) from error

    def files(self) -> dict[str, int]:
        """Name -> size of every file that a reader sees, whoever wrote it."""
        root = self.options.folder
        found = {}
        for path in sorted(root.rglob(f"*.{self.options.format}")):
            name = path.relative_to(root)
            if not any(part.startswith(("_", ".")) for part in name.parts):
                found[str(name)] = path.stat().st_size
        return found


class FolderDriver(BoundedScanDriver):
    """Offsets are `{"files": [names]}`: those that are read."""

    def __init__(self, rows: FolderRows) -> None:
        super().__init__(f"the folder {rows.options.path!r}")
        self._rows = rows

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        known, sizes = set(start["files"]), self._rows.files()
        fresh = [name for name in end["files"] if name not in known]
        return [Slice(group) for group in packed(fresh, lambda name: sizes.get(name, 0))]

    def batch(self) -> tuple[Offsets, Offsets]:
        return {"files": []}, {"files": list(self._rows.files())}


def stored_schema(options: FilesOptions) -> pa.Schema | None:
    path: Path = schema_file(options)
    return pa.ipc.read_schema(pa.py_buffer(path.read_bytes())) if path.exists() else None
