"""Makes the client's files on a local disk durable before anything points to them.

The client does not fsync. After a power loss, a durable catalog would point to missing metadata, and the table would be
lost (decision 010). The client loads this class by name, from the property `py-io-impl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from delivered.kits.table.durable import make_folder, sync


class DurableFileIO(PyArrowFileIO):
    """The client's FileIO, except that a local file and its name are durable once it is closed."""

    def new_output(self, location: str) -> PyArrowFile:
        file = super().new_output(location)
        path = local_path(location)
        return file if path is None else _DurableFile(file, path)


class _DurableFile(PyArrowFile):
    def __init__(self, file: PyArrowFile, path: Path) -> None:
        super().__init__(file.location, file._path, file._filesystem)
        self._local = path

    def create(self, overwrite: bool = False) -> Any:
        make_folder(self._local.parent)
        return _DurableStream(super().create(overwrite), self._local)


class _DurableStream:
    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._open = True

    def write(self, data: bytes) -> int:
        written = self._stream.write(data)
        return len(data) if written is None else int(written)

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        self._stream.close()
        if self._open:
            self._open = False
            sync([self._path, self._path.parent])

    def __enter__(self) -> _DurableStream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


def local_path(location: str) -> Path | None:
    """Path of a file on a local disk; None for an object store."""
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/"))
    return None if "://" in location else Path(location)
