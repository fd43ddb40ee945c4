"""The ledger's records, in files next to the log. The log's application transactions show which are valid.

    _delivered/p-<pipeline>/s-<sink>/owner/<claim>.json
                                     decided/<incarnation>/<batch>-<hash>.json
                                     begun/<incarnation>/<hash>.json
                                     archive/<hash>.bin

    application transaction                          version
    delivered/<pipeline>/<sink>/owner                the newest claim: its count, and 32 random bits
    delivered/<pipeline>/<sink>/batch/<incarnation>  the newest decided batch
    delivered/<pipeline>/<sink>/record/<incarnation> the hash of its record
    delivered/<pipeline>/<sink>/begun/<incarnation>  the hash of the record of the newest begun batch

A file is written before the commit that points to it, so unreferenced files never count. Vacuum and readers ignore
folders whose names start with `_`. Each decision contains the hash of the previous one: a chain. Old incarnations leave
an entry in the archive; the log keeps their application transactions permanently.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from delivered.connectors.delta.client import Store
from delivered.connectors.delta.options import DeltaOptions
from delivered.kits.table.archive import ArchiveFiles
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope
from delivered.model.work import Begun, Decision, Owner

T = TypeVar("T")
_CLAIM_BITS = 32


@dataclass(frozen=True)
class Names:
    """Application transactions and folders of one pipeline and sink."""

    scope: Scope

    @property
    def _base(self) -> str:
        return f"delivered/{self.scope.pipeline}/{self.scope.sink}"

    @property
    def folder(self) -> str:
        return f"_delivered/p-{self.scope.pipeline}/s-{self.scope.sink}"

    @property
    def owner(self) -> str:
        return f"{self._base}/owner"

    @property
    def owner_folder(self) -> str:
        return f"{self.folder}/owner"

    def batch(self, incarnation: str) -> str:
        return f"{self._base}/batch/{incarnation}"

    def record(self, incarnation: str) -> str:
        return f"{self._base}/record/{incarnation}"

    def begun(self, incarnation: str) -> str:
        return f"{self._base}/begun/{incarnation}"

    def owner_file(self, claim: int) -> str:
        return f"{self.owner_folder}/{claim}.json"

    def decided_folder(self, incarnation: str) -> str:
        return f"{self.folder}/decided/{incarnation}"

    def decided_file(self, incarnation: str, batch: int, digest: int) -> str:
        return f"{self.decided_folder(incarnation)}/{batch}-{digest}.json"

    def begun_folder(self, incarnation: str) -> str:
        return f"{self.folder}/begun/{incarnation}"

    def begun_file(self, incarnation: str, digest: int) -> str:
        return f"{self.begun_folder(incarnation)}/{digest}.json"


def ledger_key(options: DeltaOptions, scope: Scope) -> tuple[str, ...]:
    """Identifies a ledger in this process."""
    return ("delta", options.path, scope.pipeline, scope.sink)


def next_claim(claim: int) -> int:
    """A unique number that increases with every claim, even among concurrent drivers."""
    return ((claim >> _CLAIM_BITS) + 1) << _CLAIM_BITS | secrets.randbits(_CLAIM_BITS)


def claim_of(owner_file: str) -> int:
    """The claim in a file name; 0: not such a file."""
    digits = owner_file.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else 0


@dataclass(frozen=True)
class Record:
    """A stored decision.

    Attributes:
        text: the decision's JSON.
        previous: (batch, hash) of the previous decision, if any.
        writer: of the committed files, if they are not the staged ones.
    """

    text: str
    previous: tuple[int, int] | None
    writer: str = ""

    def encode(self) -> bytes:
        data = {"decision": self.text, "previous": self.previous, **({"writer": self.writer} if self.writer else {})}
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        found = json.loads(data)
        previous = found["previous"]
        before = None if previous is None else (int(previous[0]), int(previous[1]))
        return cls(found["decision"], before, found.get("writer", ""))

    @property
    def decision(self) -> Decision:
        return Decision.from_json(self.text)


def digest(data: bytes) -> int:
    """63 bits, to fit an application transaction's version; never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1 or 1


class Records:
    """Reads the records that the log points to. Files never change, so they are cached."""

    def __init__(self, store: Store, scope: Scope) -> None:
        self.store = store
        self.names = Names(scope)
        self._kept: dict[str, bytes] = {}

    def owner(self, table: Any) -> tuple[Owner | None, int]:
        """The last owner and its claim; 0: none."""
        claim = table.transaction_version(self.names.owner)
        if claim is None:
            return None, 0
        return Owner.from_json(self._read(self.names.owner_file(claim)))[0], claim

    def newest(self, table: Any, incarnation: str) -> tuple[int, int] | None:
        """(batch, hash) of the newest decision."""
        batch = table.transaction_version(self.names.batch(incarnation))
        found = table.transaction_version(self.names.record(incarnation))
        return None if batch is None or found is None else (batch, found)

    def decided(self, incarnation: str, at: tuple[int, int]) -> Record:
        return Record.decode(self._read(self.names.decided_file(incarnation, *at), at[1]))

    def last(self, table: Any, incarnation: str) -> Decision | None:
        at = self.newest(table, incarnation)
        return None if at is None else self.decided(incarnation, at).decision

    def begun(self, table: Any, incarnation: str) -> Begun | None:
        found = table.transaction_version(self.names.begun(incarnation))
        if found is None:
            return None
        return Begun.from_json(self._read(self.names.begun_file(incarnation, found), found))

    def of(self, table: Any, incarnation: str) -> tuple[Decision | None, Begun | None]:
        """Newest decision and begun batch of an incarnation; neither if it is archived and its records deleted, even if
        the log still points to them."""
        last = self._unless_archived(self.last, table, incarnation)
        return last, self._unless_archived(self.begun, table, incarnation)

    def _unless_archived(self, read: Callable[[Any, str], T | None], table: Any, incarnation: str) -> T | None:
        try:
            return read(table, incarnation)
        except InvariantBroken:
            if self.archive.read().find(incarnation) is None:
                raise
            return None

    def chain(self, table: Any, incarnation: str) -> Iterator[Decision]:
        """Newest first, as far back as records are kept."""
        at = self.newest(table, incarnation)
        while at is not None:
            data = self.store.get(self.names.decided_file(incarnation, *at))
            if data is None:
                return
            record = Record.decode(data)
            yield record.decision
            at = record.previous

    def positions(self, table: Any, incarnation: str, batch: int) -> Iterator[tuple[int, int]]:
        """(batch, hash) of the decisions from the newest back to `batch`."""
        at = self.newest(table, incarnation)
        while at is not None and at[0] >= batch:
            yield at
            at = self.decided(incarnation, at).previous

    def incarnations(self) -> list[str]:
        """Those with a decision or a begun batch: empty folders remain."""
        folders = [f"{self.names.folder}/{kind}/" for kind in ("decided", "begun")]
        return sorted({n.removeprefix(f).partition("/")[0] for f in folders for n in self.store.files(f.rstrip("/"))})

    @property
    def archive(self) -> ArchiveFiles:
        return ArchiveFiles(self.store, f"{self.names.folder}/archive")

    def _read(self, name: str, expected: int | None = None) -> bytes:
        data = self._kept.get(name) or self.store.get(name)
        if data is None or (expected is not None and digest(data) != expected):
            raise InvariantBroken(
                "LEDGER_RECORD_MISSING",
                f"The table's log points to the ledger's record {name!r}, which is "
                f"{'missing' if data is None else 'corrupt'}. Without it, the last batch is unknown.",
                next_step="restore the table and its folder _delivered together from a backup",
            )
        if len(self._kept) > 16:
            self._kept.clear()
        self._kept[name] = data
        return data
