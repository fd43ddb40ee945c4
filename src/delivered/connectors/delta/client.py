"""The client library, imported where it is used; the files beside a table; errors in plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.delta.options import DeltaOptions
from delivered.model.errors import DeliveredError, MissingExtra, Unreachable, UsageError
from delivered.storage import delta_log, durable


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
        Unreachable: the store did not answer, or turned the credentials away.
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
        UsageError: there is no table.
    """
    table = open_table(options, version)
    if table is None:
        raise UsageError(
            "TABLE_MISSING",
            f"There is no Delta table at {options.path!r}.",
            next_step='check the path; or let it be created with .option("ifNotExists", "true")',
        )
    return table


@contextlib.contextmanager
def explained(options: DeltaOptions) -> Iterator[None]:
    """Errors of the client and of the file system as ours."""
    try:
        yield
    except (delta().exceptions.DeltaError, OSError) as error:
        raise unreachable(options, error) from error


def unreachable(options: DeltaOptions, error: Exception) -> DeliveredError:
    if isinstance(error, OSError) and options.local:
        return DeliveredError(
            "TABLE_STORAGE",
            f"The files of the table at {options.path!r} cannot be read or written: {str(error)[:500]}",
            next_step="make room on the disk, or give the user the right to write there; the batch runs again",
        )
    return Unreachable(
        "TABLE_UNREACHABLE",
        f"The table at {options.path!r} cannot be read or written: {str(error)[:500]}",
        next_step="check the path, the rights and the storage.* options",
    )


class Store:
    """Files at and below a table's folder, named relative to it. On a local disk what is put is durable."""

    def __init__(self, options: DeltaOptions) -> None:
        from pyarrow import fs

        self._local = Path(options.path) if options.local else None
        if self._local is not None:
            self.fs: Any = fs.SubTreeFileSystem(options.path, fs.LocalFileSystem(use_mmap=False))
        else:
            delta()
            from deltalake.fs import DeltaStorageHandler

            handler = DeltaStorageHandler(options.path, options.storage_resolved() or None)
            self._handler: Any = handler._handler
            self.fs = fs.PyFileSystem(handler)

    def make_folder(self, folder: str) -> None:
        """A local folder whose name is durable, and those above it. Object stores have none."""
        if self._local is None:
            return
        durable.make_folder(self._local / folder)

    def put(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        if self._local is None:
            file = self.create(name)
            file.write(data)
            file.close()
            return
        durable.put(self._local / name, data)

    def create(self, name: str) -> Any:
        """A new file to write to, in an object store there when it is closed; not durable on a local disk."""
        if self._local is not None:
            return self.fs.open_output_stream(name)
        return pa.PythonFile(_Bytes(self._handler.open_output_stream(name)), mode="w")

    def get(self, name: str) -> bytes | None:
        try:
            with self.fs.open_input_stream(name) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def files(self, folder: str) -> dict[str, int]:
        """Name -> size of every file below a folder."""
        return {f.path.lstrip("/"): f.size for f in self._list(folder, recursive=True) if f.is_file}

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, without its own."""
        if self._local is not None:
            return sorted(f.base_name for f in self._list(folder, recursive=False) if not f.is_file)
        start = folder.rstrip("/") + "/"
        found = {name.removeprefix(start).partition("/") for name in self.files(folder)}
        return sorted({first for first, slash, _ in found if slash})

    def remove(self, names: Iterable[str]) -> None:
        """A file that is gone already is no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.fs.delete_file(name)

    def sync(self, names: Iterable[str]) -> None:
        """Make local files and their folders durable."""
        if self._local is not None:
            paths = [self._local / name for name in names]
            durable.sync([*paths, *{p.parent for p in paths}])

    def _list(self, folder: str, recursive: bool) -> list[Any]:
        from pyarrow import fs

        found: list[Any] = self.fs.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=recursive))
        return found


class _Bytes:
    """The client's stream takes `bytes` alone; Arrow hands it buffers (deltalake 1.6.6)."""

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
        """The store has it when the stream is closed."""

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
        delta_log.sync_versions(Path(options.path), first, last)
