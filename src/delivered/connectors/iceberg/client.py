"""The client library, imported on first use: catalogs, tables, their files, readable errors, and commits.

A commit asserts the state it is based on, and the catalog rejects it if that changed: the newest snapshot, schema and
partition spec, and the claim of the ledger's owner, which is a branch of the table. So a fenced driver can never
commit, and a commit that lost a race against other writers is rebased on theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyiceberg.table.update
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.io.pyarrow import ArrowProjectionVisitor, PyArrowFile, PyArrowFileIO
from pyiceberg.table import Transaction
from pyiceberg.table.locations import SimpleLocationProvider
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import AssertRefSnapshotId

from delivered.connectors.iceberg import IcebergOptions
from delivered.kits.options import not_a_file, not_a_folder
from delivered.kits.table import target
from delivered.kits.table.store import Store, make_folder, sync
from delivered.model.answers import UnexpectedAnswer
from delivered.model.errors import DeliveredError, Refused, extra
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import is_away, left_s, query_patience_s, wait_out
from delivered.model.rows import of_values
from delivered.model.work import Failed, Ok, Outcome, Unknown

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
    """Raises MissingExtra: the client library or a dependency of its SQL catalog is not installed."""
    with extra("iceberg"):
        import pyiceberg.io.pyarrow  # noqa: F401
        import sqlalchemy  # noqa: F401


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
        with _shaped():
            return _rest_catalog()(options.catalog_name, **properties)
    from pyiceberg.catalog.sql import SqlCatalog

    if options.warehouse is not None:
        make_folder(Path(options.warehouse))
    return _with_tables(lambda: SqlCatalog(options.catalog_name, **properties))


def _with_tables(new: Callable[[], Any]) -> Any:
    """A SQL catalog. Its client looks for both of its tables, and creates them without a lock: another driver that
    starts now may be faster with either."""
    from sqlalchemy.exc import DatabaseError

    for _ in range(2):
        try:
            return new()
        except DatabaseError as error:
            if not str(error.statement).lstrip().startswith("CREATE TABLE"):
                raise
    return new()


@cache
def _rest_catalog() -> type[Any]:
    """The client, whose requests end: by itself it would wait for a silent catalog for ever."""
    from pyiceberg.catalog.rest import RestCatalog

    class Catalog(RestCatalog):
        def _config_headers(self, session: Any) -> None:
            """Called with each new session, before its first request."""
            super()._config_headers(session)
            send = session.send

            def bounded(request: Any, **how: Any) -> Any:
                return send(request, **{**how, "timeout": how.get("timeout") or left_s(REQUEST_TIMEOUT_S)})

            session.send = bounded

    return Catalog


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
    return wait_out(f"the Iceberg catalog {where}", once, is_away, query_patience_s())


@contextlib.contextmanager
def _shaped() -> Iterator[None]:
    """Raise UnexpectedAnswer where the client fails over a catalog's answer, which it does not check everywhere."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UnexpectedAnswer(f"the catalog's answer has another shape ({type(error).__name__}: {error})") from error


def require_table(options: IcebergOptions) -> Any:
    """Raises UsageError: the table does not exist."""
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
        if "equality deletes" in str(error):
            raise Refused("TABLE_FEATURES.EQUALITY_DELETES", where=options.where) from error
        check = "the catalog.* options, the permissions, and whether the catalog is running"
        raise _misplaced(options) or target.unreachable(options, error, check) from error


def _misplaced(options: IcebergOptions) -> DeliveredError | None:
    """Why no catalog of SQLite, or no warehouse, can be where it should; None: another reason."""
    _, is_sqlite, file = options.catalog.get("uri", "").partition("sqlite:///")
    return (not_a_file(file) if is_sqlite else None) or (
        None if options.warehouse is None else not_a_folder(options.warehouse)
    )


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


# Null lists and maps of structs, which pyiceberg's reader (0.12) makes empty ones: an upsert would store them so.


def keep_nulls() -> None:
    """Mend the reader, once in a process. Call it before a scan."""
    reader: Any = ArrowProjectionVisitor
    if getattr(reader, "_keeps_nulls", False):
        return
    for name in ("list", "map"):
        setattr(reader, name, _keeping(getattr(reader, name)))
    reader._keeps_nulls = True


def _keeping(project: Any) -> Any:
    def projected(self: Any, kind: Any, given: Any, *parts: Any) -> Any:
        result = project(self, kind, given, *parts)
        return (
            result
            if given is None or result is None or result.null_count == given.null_count
            else _masked(result, given)
        )

    return projected


def _masked(result: pa.Array, given: pa.Array) -> pa.Array:
    # Of a slice, as Arrow reads row groups of more than 131,072 rows: Arrow accepts no mask with sliced offsets.
    offsets, mask = pa.array(result.offsets.to_numpy()), given.is_null()
    if isinstance(result, pa.MapArray):
        return pa.MapArray.from_arrays(offsets, result.keys, result.items, result.type, mask=mask)
    return type(result).from_arrays(offsets, result.values, type=result.type, mask=mask)


# One commit to the table, and its outcome.

log = logging.getLogger(__name__)

RETRIES_MAX = 100
"""Maximum number of other writers' commits that one commit is rebased on."""
FOREVER_MS = 2**63 - 1
_parts: Any = pyiceberg.table.update
"""Updates and requirements, untyped: type checkers misread the client's field aliases."""


@dataclass(frozen=True)
class TableChange:
    """What one commit does.

    Attributes:
        folder: for the manifests of this commit, below the table's metadata.
        prefix: of their names.
        summary: of a new snapshot; None: no snapshot.
        files: data files added.
        removes: data files removed.
        branch: that the snapshot goes to; asserted to be unchanged.
        expires: snapshots to expire.
        claim: (branch, snapshot): asserted.
        mark: part of its manifests' names.
    """

    folder: str
    prefix: str
    summary: Mapping[str, str] | None = None
    files: Sequence[Any] = ()
    removes: Sequence[Any] = ()
    branch: str = MAIN_BRANCH
    properties: Mapping[str, str] = field(default_factory=dict)
    removals: Sequence[str] = ()
    expires: Sequence[int] = ()
    claim: tuple[str, int] | None = None
    mark: uuid.UUID = field(default_factory=uuid.uuid4)


def commit(options: IcebergOptions, change: Callable[[Any], TableChange | None]) -> Outcome[None]:
    """Make one commit; durable when it returns Ok.

    Retried if the catalog rejected it and the table has changed since: then it can no longer succeed. Whatever the
    catalog replies, the table is read first: a request resent in transit conflicts with itself although it was
    committed (P7).

    Args:
        change: called with the current table before each attempt. None: already committed. Its exceptions propagate;
            nothing was changed.

    Returns:
        Failed: not committed, and never will be. Unknown: it may still be committed.
    """
    error: Exception | None = None
    for _ in range(RETRIES_MAX):
        table = require_table(options)
        wanted = change(table)
        if wanted is None:
            return Ok(None)
        with explained(options):
            attempt = _Attempt(table, wanted)
        try:
            answer = catalog(options).commit_table(table, attempt.requirements, attempt.updates)
        except client_errors() as caught:
            error = caught
            try:
                now = open_table(options)
            except DeliveredError as second:
                return Unknown(f"{_reason(error)}; then {second}")
            if now is not None and attempt.there(now):
                return Ok(None)
            if not _final(error):
                return Unknown(_reason(error))
            attempt.discard()
            if now is None or now.metadata_location == table.metadata_location:
                return Failed(_reason(error))
            continue
        attempt.tidy(options, answer.metadata)
        return Ok(None)
    return Failed(f"lost against concurrent writers {RETRIES_MAX} times: {error and _reason(error)}")


class _Attempt:
    """A commit as sent to the catalog. Its manifests are written; nothing points to them yet."""

    def __init__(self, table: Any, change: TableChange) -> None:
        self._table = table
        self._change = change
        self.snapshot_id: int | None = None
        self.updates: tuple[Any, ...] = ()
        self.requirements: tuple[Any, ...] = (_parts.AssertTableUUID(uuid=table.metadata.table_uuid),)
        if change.claim is not None:
            self.requirements += (_at(*change.claim),)
        if change.files or change.removes:
            self.requirements += (
                _parts.AssertCurrentSchemaId(current_schema_id=table.metadata.current_schema_id),
                _parts.AssertDefaultSpecId(default_spec_id=table.metadata.default_spec_id),
            )
        if change.summary is not None:
            try:
                self._snapshot(change.summary)
            except BaseException:
                self.discard()
                raise
        if change.removals:
            self.updates += (_parts.RemovePropertiesUpdate(removals=list(change.removals)),)
        if change.properties:
            self.updates += (_parts.SetPropertiesUpdate(updates=dict(change.properties)),)
        if change.expires:
            self.updates += (_parts.RemoveSnapshotsUpdate(snapshot_ids=list(change.expires)),)

    def there(self, now: Any) -> bool:
        """Whether the current table contains this commit."""
        if self.snapshot_id is not None:
            return now.snapshot_by_id(self.snapshot_id) is not None
        return all(now.properties.get(k) == v for k, v in self._change.properties.items())

    def discard(self) -> None:
        """Delete the manifests; the next start finds those that remain."""
        with contextlib.suppress(Exception):
            files = store(self._table, metadata_path(self._table))
            files.remove([name for name in files.files(self._change.folder) if str(self._change.mark) in name])

    def tidy(self, options: IcebergOptions, now: Any) -> None:
        """Delete old metadata files if the table's properties say so. Errors are only logged: the commit succeeded."""
        try:
            catalog(options)._delete_old_metadata(self._table.io, self._table.metadata, now)
        except Exception as error:
            log.warning("could not delete old metadata of the table %s: %s", options.where, error)

    def _snapshot(self, summary: Mapping[str, str]) -> None:
        change, table = self._change, self._table
        metadata = table.metadata
        table.location_provider = lambda: _Locations(table, change)
        update = _Transaction(table).update_snapshot(snapshot_properties=dict(summary), branch=change.branch)
        merge = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        producer: Any = update.merge_append() if merge and change.files else update.fast_append()
        if change.removes:
            producer = update.overwrite()
            for file in change.removes:
                producer.delete_data_file(file)
        producer.commit_uuid = change.mark
        if change.branch != MAIN_BRANCH:
            producer._parent_snapshot_id = None  # a claim has no parent
        for file in change.files:
            producer.append_data_file(file)
        (added, moved), _ = producer._commit()
        self.snapshot_id = producer.snapshot_id
        if change.branch != MAIN_BRANCH:
            # Never expires, whatever the table's settings for other branches.
            moved = _parts.SetSnapshotRefUpdate(
                ref_name=change.branch, type="branch", snapshot_id=producer.snapshot_id, max_ref_age_ms=FOREVER_MS
            )
        self.updates += (added, moved)
        before = metadata.refs.get(change.branch)
        self.requirements += (_at(change.branch, before.snapshot_id if before else None),)


class _Transaction(Transaction):
    """Stages nothing: the client's own transaction copies all of the table metadata on every access."""

    @property
    def table_metadata(self) -> Any:
        return self._table.metadata


class _AssertRef(AssertRefSnapshotId):
    """Checks as catalog servers do; the client's own check rejects branches of a table without a snapshot."""

    def validate(self, base_metadata: Any) -> None:  # type: ignore[override]
        ref = base_metadata.refs.get(self.ref) if base_metadata is not None else None
        snapshot_id = ref.snapshot_id if ref is not None else None
        if base_metadata is None or snapshot_id != self.snapshot_id:
            raise CommitFailedException(
                f"Requirement failed: {self.ref} is at snapshot {snapshot_id}, expected was {self.snapshot_id}"
            )


def _at(branch: str, snapshot: int | None) -> Any:
    assertion: Any = _AssertRef
    return assertion(ref=branch, snapshot_id=snapshot)


class _Locations(SimpleLocationProvider):
    """Puts manifests where a later start finds them."""

    def __init__(self, table: Any, change: TableChange) -> None:
        super().__init__(table.location(), table.properties)
        self._start = f"{metadata_path(table)}/{change.folder}/{change.prefix}"

    def new_metadata_location(self, metadata_file_name: str) -> str:
        return f"{self._start}{metadata_file_name}"


def _final(error: Exception) -> bool:
    """Whether this error means that the commit did not happen and never will. Network errors (OSErrors and server
    errors) leave that open."""
    refused = (CommitFailedException, BadRequestError, ForbiddenError, UnauthorizedError, NoSuchTableError)
    return isinstance(error, refused) or (isinstance(error, ValueError) and not isinstance(error, OSError))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
