"""The client library, imported where it is used: catalogs, tables, the files of a table, errors in plain words."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from delivered.connectors.iceberg.options import IcebergOptions
from delivered.kits.table import target
from delivered.kits.table.durable import make_folder, sync
from delivered.kits.table.store import Store
from delivered.model.errors import DeliveredError, MissingExtra

FILE_IO = "delivered.connectors.iceberg.disk.DurableFileIO"

_catalogs: dict[Any, Any] = {}
_lock = threading.Lock()


def need() -> None:
    """
    Raises:
        MissingExtra: the client library, or what its SQL catalog needs, is not installed.
    """
    try:
        import pyiceberg.io.pyarrow  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError:
        raise MissingExtra("iceberg") from None


def catalog(options: IcebergOptions) -> Any:
    """The catalog of this process, kept warm for later batches. Reads no configuration but the options.

    Raises:
        Unreachable: it did not answer, or turned the credentials away.
    """
    need()
    # Not handed from a process to those that it forks.
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

        return RestCatalog(options.catalog_name, **properties)
    from pyiceberg.catalog.sql import SqlCatalog

    if options.warehouse is not None:
        make_folder(Path(options.warehouse))
    return SqlCatalog(options.catalog_name, **properties)


def open_table(options: IcebergOptions) -> Any | None:
    """The table as it is now; None if there is none.

    Raises:
        Unreachable: catalog or store did not answer, or turned the credentials away.
    """
    known = catalog(options)
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with explained(options):
        try:
            return known.load_table(options.identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None


def require_table(options: IcebergOptions) -> Any:
    """
    Raises:
        UsageError: there is no table.
    """
    table = open_table(options)
    if table is None:
        raise target.missing_table(options, "Iceberg", "table and catalog")
    return table


@contextlib.contextmanager
def explained(options: IcebergOptions) -> Iterator[None]:
    """Errors of the client, the catalog and the file system as ours."""
    try:
        yield
    except DeliveredError:
        raise
    except client_errors() as error:
        check = "the catalog.* options, the rights, and whether the catalog runs"
        raise target.unreachable(options, error, check) from error


def client_errors() -> tuple[type[Exception], ...]:
    """What the client raises: its own errors have no base, and it lets those of its libraries through."""
    import pyiceberg.exceptions
    import sqlalchemy.exc

    own = [e for e in vars(pyiceberg.exceptions).values() if isinstance(e, type) and issubclass(e, Exception)]
    return (*own, sqlalchemy.exc.SQLAlchemyError, OSError, ValueError)


def data_path(table: Any) -> str:
    """The URL below which data files lie, without a slash at its end."""
    return str(table.properties.get("write.data.path") or f"{table.location().rstrip('/')}/data").rstrip("/")


def metadata_path(table: Any) -> str:
    return str(table.properties.get("write.metadata.path") or f"{table.location().rstrip('/')}/metadata").rstrip("/")


def store(table: Any, path: str) -> Store:
    """The files below a URL, by the credentials that the catalog gave for this table."""
    from pyarrow import fs

    from delivered.connectors.iceberg.disk import local_path

    scheme, netloc, root = table.io.parse_location(path)
    return Store(fs.SubTreeFileSystem(root, table.io.fs_by_scheme(scheme, netloc)), local_path(path))


def local_store_folders(table: Any) -> None:
    """Names of a new local table's folders, made durable: the client makes them and syncs nothing."""
    from delivered.connectors.iceberg.disk import local_path

    for path in (data_path(table), metadata_path(table)):
        folder = local_path(path)
        if folder is not None:
            make_folder(folder)
            sync([folder, *list(folder.parents)[:3]])
