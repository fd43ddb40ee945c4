"""The ledger's records, in the table's own metadata.

    property                                        value
    delivered/<pipeline>/<sink>/owner               the owner and the epoch of its claim, as JSON
    delivered/<pipeline>/<sink>/decided/<incarnation>  the newest decision: its batch, the commit's mark, the record
    delivered/<pipeline>/<sink>/begun/<incarnation>    the newest begun batch, as JSON
    delivered/<pipeline>/<sink>/archive             entries of old incarnations, in base64

    branch                                          snapshot
    delivered/<pipeline>/<sink>                     of the newest claim; empty, without a parent

Properties survive snapshot expiry. A decision is also in the summary of its snapshot, where the audit reads older ones
for as long as the table keeps them. A record is deflated JSON in base64.
"""

from __future__ import annotations

import base64
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.connectors.iceberg.options import IcebergOptions
from delivered.model.archive import Archive, Archived
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope
from delivered.model.work import Begun, Decision, Owner

IN_SUMMARY = "delivered.decision"


@dataclass(frozen=True)
class Names:
    """Properties and branch of one pipeline and sink."""

    scope: Scope

    @property
    def branch(self) -> str:
        return f"delivered/{self.scope.pipeline}/{self.scope.sink}"

    @property
    def owner(self) -> str:
        return f"{self.branch}/owner"

    def decided(self, incarnation: str) -> str:
        return f"{self.branch}/decided/{incarnation}"

    @property
    def archive(self) -> str:
        return f"{self.branch}/archive"

    def begun(self, incarnation: str) -> str:
        return f"{self.branch}/begun/{incarnation}"

    def summary(self, decision: Decision) -> dict[str, str]:
        """Summary of a decision's snapshot."""
        return {
            "delivered.pipeline": self.scope.pipeline,
            "delivered.sink": self.scope.sink,
            "delivered.incarnation": decision.scope.incarnation,
            "delivered.batch": str(decision.batch),
            IN_SUMMARY: packed(decision.to_json()),
        }


@dataclass(frozen=True)
class Claim:
    """
    Attributes:
        epoch: grows with every claim.
        snapshot: of the branch.
    """

    owner: Owner
    epoch: int
    snapshot: int | None


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(where: str, text: str) -> str:
    """
    Raises:
        InvariantBroken: it is corrupt.
    """
    try:
        return zlib.decompress(base64.b64decode(text)).decode()
    except ValueError as error:
        raise _spoiled(where, error) from None
    except zlib.error as error:
        raise _spoiled(where, error) from None


class Records:
    """Reads the metadata of a loaded table."""

    def __init__(self, table: Any, scope: Scope) -> None:
        self._table = table
        self._names = Names(scope)
        self._properties: Mapping[str, str] = table.properties

    def claim(self) -> Claim | None:
        text = self._properties.get(self._names.owner)
        if text is None:
            return None
        try:
            owner, more = Owner.from_json(text)
            epoch = int(more["epoch"])
        except (ValueError, TypeError, KeyError) as error:
            raise _spoiled(self._names.owner, error) from None
        branch = self._table.metadata.refs.get(self._names.branch)
        return Claim(owner, epoch, branch.snapshot_id if branch else None)

    def decided(self, incarnation: str) -> Decision | None:
        name = self._names.decided(incarnation)
        text = self._properties.get(name)
        if text is None:
            return None
        return Decision.from_json(unpacked(name, text.rpartition(" ")[2]))

    def mark(self, incarnation: str) -> str | None:
        """Mark of the commit that decided the newest batch; part of its manifests' names."""
        text = self._properties.get(self._names.decided(incarnation))
        return None if text is None else text.split(" ")[1]

    def writer(self, incarnation: str) -> str | None:
        """Writer of the newest batch's files, if they are not the staged ones."""
        parts = (self._properties.get(self._names.decided(incarnation)) or "").split(" ")
        return parts[2] if len(parts) == 4 else None

    def newest(self, incarnation: str) -> int | None:
        """The newest decided batch."""
        text = self._properties.get(self._names.decided(incarnation))
        return None if text is None else int(text.partition(" ")[0])

    def begun(self, incarnation: str) -> Begun | None:
        name = self._names.begun(incarnation)
        text = self._properties.get(name)
        if text is None:
            return None
        try:
            return Begun.from_json(text)
        except (ValueError, KeyError) as error:
            raise _spoiled(name, error) from None

    def archive(self) -> Archive:
        name = self._names.archive
        try:
            return Archive(base64.b64decode(self._properties.get(name, ""), validate=True), repr(name))
        except ValueError as error:
            raise _spoiled(name, error) from None

    def archived(self, incarnation: str) -> Archived | None:
        return self.archive().find(incarnation)

    def incarnations(self) -> list[str]:
        """Incarnations that decided or began a batch."""
        starts = (self._names.decided(""), self._names.begun(""))
        return sorted({name.removeprefix(s) for s in starts for name in self._properties if name.startswith(s)})

    def history(self, incarnation: str) -> Iterator[Decision]:
        """Decisions still kept, oldest first; only the newest revision of each."""
        scope = self._names.scope
        own = {
            "delivered.pipeline": scope.pipeline,
            "delivered.sink": scope.sink,
            "delivered.incarnation": incarnation,
        }
        found: dict[int, Decision] = {}
        for snapshot in sorted(self._table.metadata.snapshots, key=lambda s: s.sequence_number or 0):
            properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            if IN_SUMMARY in properties and own.items() <= properties.items():
                text = unpacked(f"the summary of snapshot {snapshot.snapshot_id}", properties[IN_SUMMARY])
                decision = Decision.from_json(text)
                found[decision.batch] = decision
        last = self.decided(incarnation)
        if last is not None:
            found[last.batch] = last
            yield from (found[batch] for batch in sorted(found) if batch <= last.batch)


def decided_text(decision: Decision, mark: uuid.UUID, writer: str = "") -> str:
    """Args: writer: of files that are not the staged ones. Our names contain no spaces."""
    return f"{decision.batch} {mark} {writer + ' ' if writer else ''}{packed(decision.to_json())}"


def ledger_key(options: IcebergOptions, scope: Scope) -> tuple[str, ...]:
    """Identifies a ledger in this process."""
    return ("iceberg", options.catalog["uri"], options.catalog_name, options.table, scope.pipeline, scope.sink)


def _spoiled(where: str, error: Exception) -> InvariantBroken:
    return InvariantBroken(
        "LEDGER_RECORD_MISSING",
        f"The ledger's record in {where!r} of the table is corrupt: {error}. Without it, the last batch is unknown.",
        next_step="restore the property from an earlier metadata file of the table",
    )
