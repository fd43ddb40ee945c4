"""The client library, imported on first use: files in the table's folder, commits and outcomes, readable errors."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.delta import DeltaOptions
from delivered.kits.options import not_a_folder
from delivered.kits.table import store, target
from delivered.kits.table.store import sync_checkpoint
from delivered.model.errors import DeliveredError, extra
from delivered.model.work import Failed, Handle, Ok, Outcome, Unknown

# The client library, imported on first use; files in the table's folder; readable errors.


def delta() -> Any:
    """Raises MissingExtra: the client library is not installed."""
    with extra("delta"):
        import deltalake
    return deltalake


def open_table(options: DeltaOptions, version: int | None = None) -> Any | None:
    """The table at its newest version or at `version`; None if there is none.

    Raises:
        Unreachable: the store did not answer, or rejected the credentials.
    """
    deltalake = delta()
    with explained(options):
        try:
            given = store.storage_options(options.path, options.storage_resolved())
            return deltalake.DeltaTable(options.path, version=version, storage_options=given)
        except deltalake.exceptions.TableNotFoundError:
            return None


def require_table(options: DeltaOptions, version: int | None = None) -> Any:
    """Raises UsageError: the table does not exist."""
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
        refusal = target.unreachable(options, error, "the path, the permissions and the storage.* options")
        raise not_a_folder(options.path) or refusal from error


class Store(store.Store):
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
        store.sync_versions(Path(options.path), first, last)


# One commit to a table's log, and its outcome.

log = logging.getLogger(__name__)

RETRIES_MAX = 100
"""Maximum number of other writers' versions that a commit is rebased on."""
CHECKPOINT_VERSIONS = 100
"""Versions between checkpoints of the log, unless the table sets `delta.checkpointInterval`."""
OVERTAKEN = "Failed to commit transaction: 0"
"""Error of an exact commit when a newer version exists."""
_CONFLICTS = ("Concurrent transaction failed", OVERTAKEN)


@dataclass(frozen=True)
class DataFile:
    """
    Attributes:
        path: relative to the table.
        partition: column -> value as the log writes it.
        statistics: Delta's JSON.
    """

    path: str
    size: int
    rows: int
    partition: Mapping[str, str | None]
    statistics: str
    modified_ms: int


@dataclass(frozen=True)
class StagedFiles(Handle):
    """The files of one shard, added by the driver's commit."""

    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class TableChange:
    """What one commit does.

    Attributes:
        removes: paths of removed files.
        exact: valid only for the table version it was computed from; fails if there is a newer one.
        transactions: application id -> version. Of two concurrent commits with the same id, the later one fails.
    """

    adds: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    removes: Sequence[str] = ()
    exact: bool = False


def commit(
    options: DeltaOptions, table: Any, change: TableChange, there: Callable[[Any], bool] | None = None
) -> Outcome[None]:
    """Write one version of the log; durable when it returns Ok.

    If the reply to a commit is lost, the client retries and may report a conflict with its own commit. So the log is
    read after any error.

    Args:
        table: as last read by this process; the base of the commit. Afterwards at a newer version.
        there: whether a newly opened table contains the change; default: whether it has all files.

    Returns:
        Failed: not committed, and the client no longer retries. Unknown: it may still be committed.
    """
    from deltalake import CommitProperties, PostCommitHookProperties, Transaction
    from deltalake.transaction import AddAction, RemoveAction

    deltalake = delta()
    actions: list[Any] = [
        AddAction(f.path, f.size, dict(f.partition), f.modified_ms, True, f.statistics) for f in change.adds
    ]
    now = time.time_ns() // 1_000_000
    actions += [RemoveAction(path, True, now) for path in change.removes]
    before = table.version()
    try:
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            table.metadata().partition_columns,
            commit_properties=CommitProperties(
                # The client does not detect that another commit already removed the same files (1.6.6).
                max_commit_retries=0 if change.exact else RETRIES_MAX,
                app_transactions=[Transaction(name, version) for name, version in change.transactions.items()],
            ),
            # `tidy` writes checkpoints: its errors must not look like a failed commit.
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
        )
    except (deltalake.exceptions.DeltaError, OSError) as error:
        outcome = _look(options, there or _all_there(change), error)
        if not isinstance(outcome, Ok):
            return outcome
    try:
        table.update_incremental()
        sync_versions(options, before + 1, table.version())
    except (deltalake.exceptions.DeltaError, OSError) as error:
        # Committed, but perhaps not durable.
        return Unknown(f"the commit succeeded but could not be made durable: {error}")
    return Ok(None)


def tidy(options: DeltaOptions, table: Any, before: int) -> None:
    """Write a checkpoint of the log if one is due since version `before`; delete old versions by the table's settings.

    Both are maintenance: errors are only logged, as the batch is committed.
    """
    try:
        configuration = table.metadata().configuration
        interval = int(configuration.get("delta.checkpointInterval", CHECKPOINT_VERSIONS))
        now = table.version()
        if now // interval == before // interval:
            return
        table.create_checkpoint()
        if options.local:
            sync_checkpoint(Path(options.path), now)
        if configuration.get("delta.enableExpiredLogCleanup", "true").lower() == "true":
            table.cleanup_metadata()
    except Exception as error:
        log.warning("maintenance of the log of the table at %r failed: %s", options.path, error)


def _look(options: DeltaOptions, there: Callable[[Any], bool], error: Exception) -> Outcome[None]:
    try:
        table = open_table(options)
        if table is not None and there(table):
            return Ok(None)
    except (DeliveredError, OSError) as second:
        return Unknown(f"{str(error)[:300]}; then {str(second)[:300]}")
    # The client detects a conflict before it writes. After any other error, its request may still be in flight.
    return Failed(str(error)[:500]) if any(c in str(error) for c in _CONFLICTS) else Unknown(str(error)[:500])


def _all_there(change: TableChange) -> Callable[[Any], bool]:
    from urllib.parse import unquote

    import pyarrow as pa

    def look(table: Any) -> bool:
        named = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
        added = {f.path for f in change.adds}
        return bool(added) and added <= {unquote(path) for path in named}

    return look
