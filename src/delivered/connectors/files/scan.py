"""A scan of all rows of the folder, between batches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import stat_result
from typing import Any

import pyarrow as pa

from delivered.connectors.files import FilesOptions, explained, failed, identity_file
from delivered.connectors.files.formats import decode, stored_schema
from delivered.contract.sink import BoundedScan, Changes
from delivered.contract.source import Offsets, Slice
from delivered.kits.table.store import packed
from delivered.model.errors import UsageError

NAMES_MAX = 1_000
"""Files that a position names, because no batch says when they were added."""
_BATCH = re.compile(r"batch=(.+)-(\d{10})(\..*)?/[^/]+")


@dataclass(frozen=True)
class FolderScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Reads all files that a reader of the folder sees.

    A position is the newest batch of each checkpoint; with the files of those that are not one rename (at_least_once,
    at_most_once), and files of others.
    """

    options: FilesOptions

    def schema(self) -> pa.Schema:
        """Raises UsageError: this package never wrote to the folder."""
        schema = stored_schema(self.options)
        if schema is None:
            raise UsageError("FOLDER_UNKNOWN", path=self.options.path)
        return schema

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"files": [names]}: excludes these."""
        files = self._files()
        if since is not None and self._same(since):
            files = {name: info for name, info in files.items() if not _lies_before(name, since)}
        if until is not None:
            same = self._same(until)
            files = {name: info for name, info in files.items() if same and _lies_before(name, until)}
        return [Slice(group) for group in packed(files, lambda name: files[name].st_size)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        with explained(self.options):
            for name in piece.data:
                yield from decode(self.options.format, self.options.folder / name, schema)

    def position(self) -> Offsets | None:
        """None: more than `NAMES_MAX` files would have to be named."""
        names = self._files()
        newest: dict[str, int] = {}
        found = {name: match for name in names if (match := _BATCH.fullmatch(name))}
        for match in found.values():
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
        named = [n for n in names if n not in found or (found[n][3] and int(found[n][2]) == newest[found[n][1]])]
        if len(named) > NAMES_MAX:
            return None
        return {"batches": newest, "files": named, "folder": self._identity()}

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """The number of files, and a hash of their names, sizes and times."""
        before = {name: info for name, info in self._files().items() if _lies_before(name, position)}
        digest = hashlib.blake2b(digest_size=16)
        for name, info in before.items():
            digest.update(f"{name} {info.st_size} {info.st_mtime_ns}\n".encode())
        return {"files": len(before), "digest": digest.hexdigest()}

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        path = self.options.path
        if not self._same(position):
            return Changes.deleted(f"folder {path}", recreated=bool(self._identity()))
        now = self.kept(position)
        if before is None or now == before:
            return Changes()
        was, there = before["files"], now["files"]
        if there < was:
            return Changes(altered=(f"folder {path}: {was - there} of {was} files were deleted",))
        if there > was:
            return Changes(altered=(f"folder {path}: {there - was} files were added among {was}",))
        return Changes(altered=(f"folder {path}: some of {was} files are others than before",))

    def _identity(self) -> str | None:
        try:
            return identity_file(self.options).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(self.options, error) from error

    def _same(self, position: Offsets) -> bool:
        return "folder" not in position or position["folder"] == self._identity()

    def _files(self) -> dict[str, stat_result]:
        """Every file that a reader sees, by name, from any writer."""
        root = self.options.folder
        files = {}
        with explained(self.options):
            for path in sorted(root.rglob(f"*.{self.options.format}")):
                name = path.relative_to(root)
                if not any(part.startswith(("_", ".")) for part in name.parts):
                    files[str(name)] = path.stat()
        return files


def _lies_before(name: str, position: Offsets) -> bool:
    if name in position.get("files", ()):
        return True
    match = _BATCH.fullmatch(name)
    newest = position.get("batches", {}).get(match[1]) if match else None
    if match is None or newest is None:
        return False
    return int(match[2]) < newest or (int(match[2]) == newest and match[3] is None)
