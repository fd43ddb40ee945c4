"""One commit to a table, and its outcome.

A commit asserts the state it is based on, and the catalog rejects it if that changed: the newest snapshot, schema and
partition spec, and the claim of the ledger's owner, which is a branch of the table. So a fenced driver can never
commit, and a commit that lost a race against other writers is rebased on theirs.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyiceberg.table.update
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.table import Transaction
from pyiceberg.table.locations import SimpleLocationProvider
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import AssertRefSnapshotId

from delivered.connectors.iceberg.client import (
    catalog,
    client_errors,
    explained,
    metadata_path,
    open_table,
    require_table,
    store,
)
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.model.errors import DeliveredError
from delivered.model.outcome import Failed, Ok, Outcome, Unknown

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
        made = _Transaction(table).update_snapshot(snapshot_properties=dict(summary), branch=change.branch)
        merge = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        producer: Any = made.merge_append() if merge and change.files else made.fast_append()
        if change.removes:
            producer = made.overwrite()
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
    """Stages nothing: the client's own transaction copies the whole table metadata on every access."""

    @property
    def table_metadata(self) -> Any:
        return self._table.metadata


class _AssertRef(AssertRefSnapshotId):
    """Checks as catalog servers do; the client's own check rejects branches of a table without a snapshot."""

    def validate(self, base_metadata: Any) -> None:  # type: ignore[override]
        ref = base_metadata.refs.get(self.ref) if base_metadata is not None else None
        found = ref.snapshot_id if ref is not None else None
        if base_metadata is None or found != self.snapshot_id:
            raise CommitFailedException(
                f"Requirement failed: {self.ref} is at snapshot {found}, expected was {self.snapshot_id}"
            )


def _at(branch: str, snapshot: int | None) -> Any:
    made: Any = _AssertRef
    return made(ref=branch, snapshot_id=snapshot)


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
