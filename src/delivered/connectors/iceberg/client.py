"""The client library, imported on first use: catalogs, tables, their files, readable errors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from delivered.connectors.iceberg.options import IcebergOptions
from delivered.kits.table import target
from delivered.kits.table.durable import make_folder, sync
from delivered.kits.table.store import Store
from delivered.model.answers import UnexpectedAnswer
from delivered.model.errors import DeliveredError, MissingExtra
from delivered.model.patience import query_patience_s, wait_out
from delivered.model.ranges import of_values

# Makes the client's files on a local disk durable before anything points to them.
#
# The client does not fsync. After a power loss, a durable catalog would point to missing metadata, and the table would
# be lost (decision 010). The client loads this class by name, from the property `py-io-impl`.


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


FILE_IO = "delivered.connectors.iceberg.client.DurableFileIO"

_catalogs: dict[Any, Any] = {}
_lock = threading.Lock()


def need() -> None:
    """
    Raises:
        MissingExtra: the client library or a dependency of its SQL catalog is not installed.
    """
    try:
        import pyiceberg.io.pyarrow  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError:
        raise MissingExtra("iceberg") from None


def catalog(options: IcebergOptions) -> Any:
    """The catalog of this process, reused for later batches. Configured only by the options.

    Raises:
        Unreachable: it did not answer, or rejected the credentials.
    """
    need()
    # Forked processes must not share it.
    key = (os.getpid(), options.catalog_name, *sorted(options.catalog.items()))
    with _lock:
        if key not in _catalogs:
            with explained(options):
                _catalogs[key] = _open(options)
        return _catalogs[key]


def _open(options: IcebergOptions) -> Any:
    properties = {**options.catalog_resolved(), "py-io-impl": FILE_IO}
    if options.catalog["type"] == "rest":
        from pyiceberg.catalog.rest import RestCatalog

        with _shaped():
            return RestCatalog(options.catalog_name, **properties)
    from pyiceberg.catalog.sql import SqlCatalog

    if options.warehouse is not None:
        make_folder(Path(options.warehouse))
    return SqlCatalog(options.catalog_name, **properties)


def open_table(options: IcebergOptions) -> Any | None:
    """The current table; None if it does not exist. A running query waits for a catalog that restarts.

    Raises:
        Unreachable: catalog or store did not answer, or rejected the credentials.
    """

    def once() -> Any | None:
        known = catalog(options)
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with explained(options):
            try:
                with _shaped():
                    return known.load_table(options.identifier)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    where = options.catalog.get("uri", "").rpartition("@")[2]
    return wait_out(f"the Iceberg catalog {where}", once, _is_away, query_patience_s())


@contextlib.contextmanager
def _shaped() -> Iterator[None]:
    """Raise UnexpectedAnswer where the client fails over a catalog's answer, which it does not check everywhere."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UnexpectedAnswer(f"the catalog's answer has another shape ({type(error).__name__}: {error})") from error


def _is_away(error: BaseException) -> bool:
    """Whether a catalog that is a server did not answer, or its database."""
    import sqlalchemy.exc

    cause = error.__cause__
    if isinstance(cause, sqlalchemy.exc.DBAPIError):
        embedded = type(cause.orig).__module__.startswith("sqlite3")
        return not embedded and isinstance(cause, (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError))
    return isinstance(cause, ConnectionError) or type(cause).__name__ in ("ConnectionError", "ServiceUnavailableError")


def require_table(options: IcebergOptions) -> Any:
    """
    Raises:
        UsageError: the table does not exist.
    """
    table = open_table(options)
    if table is None:
        raise target.missing_table(options, "Iceberg", "table and catalog")
    return table


@contextlib.contextmanager
def explained(options: IcebergOptions) -> Iterator[None]:
    """Translate errors of the client, the catalog and the file system."""
    try:
        yield
    except DeliveredError:
        raise
    except client_errors() as error:
        check = "the catalog.* options, the permissions, and whether the catalog is running"
        raise target.unreachable(options, error, check) from error


@contextlib.contextmanager
def writing(options: IcebergOptions) -> Iterator[None]:
    """As `explained`, except for errors about values: they are of the rows, and raise BadRecord."""
    with explained(options), of_values("Iceberg's client"):
        yield


def client_errors() -> tuple[type[Exception], ...]:
    """The client's exceptions: they have no common base, and errors of its libraries pass through."""
    import pyiceberg.exceptions
    import sqlalchemy.exc

    own = [e for e in vars(pyiceberg.exceptions).values() if isinstance(e, type) and issubclass(e, Exception)]
    return (*own, sqlalchemy.exc.SQLAlchemyError, OSError, ValueError)


def data_path(table: Any) -> str:
    """Base URL of data files, without a trailing slash."""
    return str(table.properties.get("write.data.path") or f"{table.location().rstrip('/')}/data").rstrip("/")


def metadata_path(table: Any) -> str:
    return str(table.properties.get("write.metadata.path") or f"{table.location().rstrip('/')}/metadata").rstrip("/")


def store(table: Any, path: str) -> Store:
    """The files below a URL, with the credentials that the catalog returned for this table."""
    from pyarrow import fs

    scheme, netloc, root = table.io.parse_location(path)
    return Store(fs.SubTreeFileSystem(root, table.io.fs_by_scheme(scheme, netloc)), local_path(path))


def local_store_folders(table: Any) -> None:
    """Make the folder names of a new local table durable: the client does not sync them."""

    for path in (data_path(table), metadata_path(table)):
        folder = local_path(path)
        if folder is not None:
            make_folder(folder)
            sync([folder, *list(folder.parents)[:3]])
