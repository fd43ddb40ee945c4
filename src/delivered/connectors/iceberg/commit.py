"""One commit to a table, and what became of it.

A commit names what it rests on, and the catalog refuses it if that changed meanwhile: the table's newest snapshot, its
columns and partitions, and the claim of the ledger's owner, which is a branch of the table. So a commit of a driver
that lost its claim never gets in, and one that lost against rows of somebody else is made anew on top of them.
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
"""Commits of other writers that one commit may have to go behind."""
FOREVER_MS = 2**63 - 1
_parts: Any = pyiceberg.table.update
"""Updates and requirements; as the client declares them, a type checker takes their fields' names for others."""


@dataclass(frozen=True)
class TableChange:
    """What one commit does.

    Attributes:
        folder: below the table's metadata, where manifests of this commit lie.
        prefix: of their names.
        summary: of a new snapshot; None: there is none.
        files: data files that the snapshot adds.
        removes: data files that it takes away.
        branch: that the snapshot goes to; that it is where it was, is asserted.
        expires: snapshots that are taken away.
        claim: (branch, snapshot): asserted.
        mark: in the names of its manifests.
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

    Tried again if the catalog says that it did not take it and the table has changed since it was read: by then it
    cannot get in any more. Whatever the catalog says, the table is looked at first: a request that was sent twice on
    the way meets itself, and a conflict is told although it is in (P7).

    Args:
        change: called before each try with the table as it is then. None: it is in already. What it raises, goes up:
            nothing was changed.

    Returns:
        Failed: not in, and will not get in. Unknown: it may still get in.
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
                return Unknown(f"{_said(error)}; then {second}")
            if now is not None and attempt.there(now):
                return Ok(None)
            if not _final(error):
                return Unknown(_said(error))
            attempt.discard()
            if now is None or now.metadata_location == table.metadata_location:
                return Failed(_said(error))
            continue
        attempt.tidy(options, answer.metadata)
        return Ok(None)
    return Failed(f"other writers were first {RETRIES_MAX} times: {error and _said(error)}")


class _Attempt:
    """A commit as the catalog is asked for it. Its manifests are written, and nothing points to them yet."""

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
        """Whether it is in, by the table as it is now."""
        if self.snapshot_id is not None:
            return now.snapshot_by_id(self.snapshot_id) is not None
        return all(now.properties.get(k) == v for k, v in self._change.properties.items())

    def discard(self) -> None:
        """Take the manifests away. Missed now, the next start finds them."""
        with contextlib.suppress(Exception):
            files = store(self._table, metadata_path(self._table))
            files.remove([name for name in files.files(self._change.folder) if str(self._change.mark) in name])

    def tidy(self, options: IcebergOptions, now: Any) -> None:
        """Old metadata files away, if the table asks for it. Its upkeep: an error is logged, the commit is in."""
        try:
            catalog(options)._delete_old_metadata(self._table.io, self._table.metadata, now)
        except Exception as error:
            log.warning("old metadata of the table %s was not taken away: %s", options.where, error)

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
            producer._parent_snapshot_id = None  # a claim stands alone
        for file in change.files:
            producer.append_data_file(file)
        (added, moved), _ = producer._commit()
        self.snapshot_id = producer.snapshot_id
        if change.branch != MAIN_BRANCH:
            # For good, whatever the table says of its other branches.
            moved = _parts.SetSnapshotRefUpdate(
                ref_name=change.branch, type="branch", snapshot_id=producer.snapshot_id, max_ref_age_ms=FOREVER_MS
            )
        self.updates += (added, moved)
        before = metadata.refs.get(change.branch)
        self.requirements += (_at(change.branch, before.snapshot_id if before else None),)


class _Transaction(Transaction):
    """Nothing is staged in it: the client's own copies the table's whole metadata each time that it is looked at."""

    @property
    def table_metadata(self) -> Any:
        return self._table.metadata


class _AssertRef(AssertRefSnapshotId):
    """As the catalog's servers check it; the client's own check refuses branches of a table without a snapshot."""

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
    """Manifests of a commit of ours, where a later start finds them."""

    def __init__(self, table: Any, change: TableChange) -> None:
        super().__init__(table.location(), table.properties)
        self._start = f"{metadata_path(table)}/{change.folder}/{change.prefix}"

    def new_metadata_location(self, metadata_file_name: str) -> str:
        return f"{self._start}{metadata_file_name}"


def _final(error: Exception) -> bool:
    """Whether a commit that ended so is not in, and will not get in. What came over a network may have been an answer
    to something else: those errors are OSErrors or servers' errors."""
    refused = (CommitFailedException, BadRequestError, ForbiddenError, UnauthorizedError, NoSuchTableError)
    return isinstance(error, refused) or (isinstance(error, ValueError) and not isinstance(error, OSError))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
