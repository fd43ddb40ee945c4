"""One commit to a table's log, and what became of it."""

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
"""Versions of other writers that a commit may have to go behind."""
CHECKPOINT_VERSIONS = 100
"""A checkpoint of the log after so many versions, unless the table says otherwise: `delta.checkpointInterval`."""
OVERTAKEN = "Failed to commit transaction: 0"
"""Of an exact commit, behind a newer version."""
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
    """The files of one shard, which the driver's commit names."""

    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class TableChange:
    """What one commit does.

    Attributes:
        removes: paths of files that go.
        exact: it rests on the version of the table that it was made for: behind a newer one it fails.
        transactions: application id -> version. Two commits that name one id, and do not know of each other, conflict:
            the later one fails.
    """

    adds: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    removes: Sequence[str] = ()
    exact: bool = False


def commit(
    options: DeltaOptions, table: Any, change: TableChange, there: Callable[[Any], bool] | None = None
) -> Outcome[None]:
    """Write one version of the log; durable when it returns Ok.

    A commit whose answer was lost ends in an error of the client, also in one that says "conflict": the client sent it
    again and met itself. So every error is followed by a look at the log.

    Args:
        table: as this process saw it last; what the commit rests on. Afterwards at a newer version.
        there: whether the change is in, by a table just opened; default: whether all files are.

    Returns:
        Failed: not in, and the client does not send it any more. Unknown: it may still get in.
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
                # The client lets a commit that takes files away pass one that took them away already (1.6.6).
                max_commit_retries=0 if change.exact else RETRIES_MAX,
                app_transactions=[Transaction(name, version) for name, version in change.transactions.items()],
            ),
            # Checkpoints are written by `tidy`: an error there must not look like one of the commit.
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
        # In, and perhaps not durable.
        return Unknown(f"the commit was made, and could not be made durable: {error}")
    return Ok(None)


def tidy(options: DeltaOptions, table: Any, before: int) -> None:
    """A checkpoint of the log when one is due since version `before`; old versions away as the table's settings say.

    Both are the table's upkeep: an error is logged, the batch is in.
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
        log.warning("the log of the table at %r was not tidied up: %s", options.path, error)


def _look(options: DeltaOptions, there: Callable[[Any], bool], error: Exception) -> Outcome[None]:
    try:
        table = open_table(options)
        if table is not None and there(table):
            return Ok(None)
    except (DeliveredError, OSError) as second:
        return Unknown(f"{str(error)[:300]}; then {str(second)[:300]}")
    # A conflict is found by the client before it writes. After anything else its request may still be on its way.
    return Failed(str(error)[:500]) if any(c in str(error) for c in _CONFLICTS) else Unknown(str(error)[:500])


def _all_there(change: TableChange) -> Callable[[Any], bool]:
    from urllib.parse import unquote

    import pyarrow as pa

    def look(table: Any) -> bool:
        named = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
        mine = {f.path for f in change.adds}
        return bool(mine) and mine <= {unquote(path) for path in named}

    return look
