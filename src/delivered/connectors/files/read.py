"""A scan of all rows of the folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from delivered.connectors.files import formats
from delivered.connectors.files.disk import failed, schema_file
from delivered.connectors.files.options import FilesOptions
from delivered.contract.source import Offsets, Slice
from delivered.kits.table.store import packed
from delivered.model.errors import UsageError


@dataclass(frozen=True)
class FolderScan:
    """See `delivered.contract.sink.BoundedScan`. Reads all files that a reader of the folder sees."""

    options: FilesOptions

    def schema(self) -> pa.Schema:
        """
        Raises:
            UsageError: this package never wrote to the folder.
        """
        found = stored_schema(self.options)
        if found is None:
            raise UsageError(
                "FOLDER_UNKNOWN",
                f"The folder {self.options.path!r} was never written by a pipeline.",
                next_step="run the pipeline first, or check the path",
            )
        return found

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"files": [names]}: excludes these."""
        known, sizes = set((since or {}).get("files", ())), self._files()
        return [Slice(group) for group in packed([n for n in sizes if n not in known], lambda name: sizes[name])]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        try:
            for name in piece.data:
                yield from formats.decode(self.options.format, self.options.folder / name, schema)
        except OSError as error:
            raise failed(self.options, error) from error

    def _files(self) -> dict[str, int]:
        """Size of every file that a reader sees, by name, whoever wrote it."""
        root = self.options.folder
        found = {}
        for path in sorted(root.rglob(f"*.{self.options.format}")):
            name = path.relative_to(root)
            if not any(part.startswith(("_", ".")) for part in name.parts):
                found[str(name)] = path.stat().st_size
        return found


def stored_schema(options: FilesOptions) -> pa.Schema | None:
    path: Path = schema_file(options)
    return pa.ipc.read_schema(pa.py_buffer(path.read_bytes())) if path.exists() else None
