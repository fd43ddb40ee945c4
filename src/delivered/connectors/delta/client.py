"""The client library, imported on first use; files in the table's folder; readable errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.delta.options import DeltaOptions
from delivered.kits.table import durable, target
from delivered.kits.table import store as storage
from delivered.model.errors import MissingExtra


def delta() -> Any:
    """
    Raises:
        MissingExtra: the client library is not installed.
    """
    try:
        import deltalake
    except ImportError:
        raise MissingExtra("delta") from None
    return deltalake


def open_table(options: DeltaOptions, version: int | None = None) -> Any | None:
    """The table at its newest version or at `version`; None if there is none.

    Raises:
        Unreachable: the store did not answer, or rejected the credentials.
    """
    deltalake = delta()
    with explained(options):
        try:
            return deltalake.DeltaTable(
                options.path, version=version, storage_options=options.storage_resolved() or None
            )
        except deltalake.exceptions.TableNotFoundError:
            return None


def require_table(options: DeltaOptions, version: int | None = None) -> Any:
    """
    Raises:
        UsageError: the table does not exist.
    """
    table = open_table(options, version)
    if table is None:
        raise target.missing_table(options, "Delta", "the path")
    return table


@contextlib.contextmanager
def explained(options: DeltaOptions) -> Iterator[None]:
    """Translate errors of the client and the file system."""
    try:
        yield
    except (delta().exceptions.DeltaError, OSError) as error:
        raise target.unreachable(options, error, "the path, the permissions and the storage.* options") from error


class Store(storage.Store):
    """Files at and below a table's folder."""

    def __init__(self, options: DeltaOptions) -> None:
        from pyarrow import fs

        if options.local:
            folder = fs.SubTreeFileSystem(options.path, fs.LocalFileSystem(use_mmap=False))
            super().__init__(folder, Path(options.path))
            return
        delta()
        from deltalake.fs import DeltaStorageHandler

        handler = DeltaStorageHandler(options.path, options.storage_resolved() or None)
        self._handler: Any = handler._handler
        super().__init__(fs.PyFileSystem(handler), None)

    def create(self, name: str) -> Any:
        if self._local is not None:
            return super().create(name)
        return pa.PythonFile(_Bytes(self._handler.open_output_stream(name)), mode="w")


class _Bytes:
    """Converts Arrow's buffers for the client's stream, which accepts only `bytes` (deltalake 1.6.6)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._at = 0
        self.closed = False

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._stream.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """The store has the data when the stream is closed."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._stream.close()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def sync_versions(options: DeltaOptions, first: int, last: int) -> None:
    """Make the commits first..last of a local table durable."""
    if options.local:
        durable.sync_versions(Path(options.path), first, last)
