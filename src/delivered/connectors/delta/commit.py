"""One commit to a table's log, and its outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered.connectors.delta.client import delta, open_table, sync_versions
from delivered.connectors.delta.options import DeltaOptions
from delivered.kits.table.durable import sync_checkpoint
from delivered.model.errors import DeliveredError
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Handle

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
