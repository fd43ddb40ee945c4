"""The archive of a ledger in files: immutable ones, each with some entries, any number of which is as good as one.

A file is never changed, and taken away only by one who wrote its entries into another before. So a driver that was
fenced in the middle, or that comes late, takes nothing from the archive: at worst an entry stands there twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from delivered.kits.table.store import Store
from delivered.model.archive import ENTRY_BYTES, Archive, Archived

FILES_MAX = 16
"""Small files before they are put together."""
FULL_BYTES = 65_536 * ENTRY_BYTES
"""A file of this size is left as it is."""


class ArchiveFiles:
    """
    Args:
        folder: below the store's root; nothing else lies there.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Archive:
        """All entries."""
        while True:
            found = [self._store.get(name) for name in self._names()]
            if all(data is not None for data in found):
                return Archive(b"".join(data for data in found if data is not None), repr(self._folder))
            # Put together with others since it was listed: those hold it now.

    def add(self, entries: Iterable[Archived]) -> None:
        """Durable when this returns. May be called again with the same entries."""
        data = b"".join(sorted({e.encode() for e in entries}))
        if not data:
            return
        self._put(data)
        small = {n: size for n, size in self._names().items() if size < FULL_BYTES}
        if len(small) > FILES_MAX:
            self._put_together(list(small))

    def _put_together(self, names: list[str]) -> None:
        found = {name: data for name in names if (data := self._store.get(name)) is not None}
        if not found:  # others were faster
            return
        whole = self._put(
            b"".join(sorted({a.encode() for data in found.values() for a in Archive(data, self._folder)}))
        )
        self._store.remove(name for name in found if name != whole)

    def _put(self, data: bytes) -> str:
        """Named by its contents: the same entries are the same file."""
        name = f"{self._folder}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.bin"
        self._store.put(name, data)
        return name

    def _names(self) -> dict[str, int]:
        files = self._store.files(self._folder)
        return {n: size for n, size in files.items() if n.endswith(".bin") and not n.rpartition("/")[2].startswith(".")}
