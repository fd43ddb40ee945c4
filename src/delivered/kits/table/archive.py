"""The archive of a ledger as immutable files, each with some of the entries.

A file is never changed, and is deleted only by a process that has already copied its entries to another file. So a
driver fenced midway removes nothing from the archive: at worst an entry is stored twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from delivered.kits.table.store import Store
from delivered.model.archive import ENTRY_BYTES, Archive, Archived

FILES_MAX = 16
"""Number of small files before they are compacted."""
FULL_BYTES = 65_536 * ENTRY_BYTES
"""Files of at least this size are not compacted."""


class ArchiveFiles:
    """
    Args:
        folder: below the store's root; contains nothing else.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Archive:
        """All entries."""
        while True:
            contents = [self._store.get(name) for name in self._names()]
            if all(data is not None for data in contents):
                return Archive(b"".join(data for data in contents if data is not None), repr(self._folder))
            # Compacted since the listing: another file has its entries.

    def add(self, entries: Iterable[Archived]) -> None:
        """Durable when this returns. May be called again with the same entries."""
        data = b"".join(sorted({e.encode() for e in entries}))
        if not data:
            return
        self._put(data)
        small = {n: size for n, size in self._names().items() if size < FULL_BYTES}
        if len(small) > FILES_MAX:
            self._compact(list(small))

    def _compact(self, names: list[str]) -> None:
        contents = {name: data for name in names if (data := self._store.get(name)) is not None}
        if not contents:  # another process was faster
            return
        compacted = self._put(
            b"".join(sorted({a.encode() for data in contents.values() for a in Archive(data, self._folder)}))
        )
        self._store.remove(name for name in contents if name != compacted)

    def _put(self, data: bytes) -> str:
        """Write a file named by its content hash, so that equal entries give the same file."""
        name = f"{self._folder}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.bin"
        self._store.put(name, data)
        return name

    def _names(self) -> dict[str, int]:
        files = self._store.files(self._folder)
        return {n: size for n, size in files.items() if n.endswith(".bin") and not n.rpartition("/")[2].startswith(".")}
