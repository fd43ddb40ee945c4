"""What a ledger keeps of forgotten decisions: running totals, and the archive entry of an incarnation."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint

# Running totals of a sink, by version of the transform.


@dataclass(frozen=True)
class Account:
    """Running fingerprints of one sink: decided records, and those that at_most_once gave up."""

    total: Fingerprint = Fingerprint()
    given_up: Fingerprint = Fingerprint()

    def to_json(self) -> dict[str, str]:
        return {"total": str(self.total), "given_up": str(self.given_up)}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Account:
        return cls(Fingerprint.parse(data["total"]), Fingerprint.parse(data["given_up"]))


@dataclass(frozen=True)
class TransformVersion:
    """A version of the transform, used from one batch on until the next version.

    Attributes:
        fingerprint: of the transform; empty: unknown; `transforms.MIXED`: several.
        batch: the first one.
        after: the sources' offsets at the end of the previous batch; empty: there was none.
        accounts: totals before that batch, by sink name.
    """

    fingerprint: str
    batch: int = 0
    after: str = ""
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def to_json(self, ledger_sink: str) -> dict[str, Any]:
        """A record leaves the name of the ledger's sink empty."""
        return {
            "fingerprint": self.fingerprint,
            "batch": self.batch,
            "after": self.after,
            "accounts": {"" if name == ledger_sink else name: a.to_json() for name, a in self.accounts.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ledger_sink: str) -> TransformVersion:
        accounts = {name or ledger_sink: Account.from_json(a) for name, a in data["accounts"].items()}
        return cls(data["fingerprint"], data["batch"], data["after"], accounts)


# The permanent archive entry of an incarnation whose decisions a ledger has forgotten: enough to recognise it.
#
# Each run of `df.write` is an incarnation, whose id must be recognised for as long as it may be reused. The entry holds
# a hash of the name, and the number and a digest of the rows: 25 bytes in every ledger.

_ENTRY = struct.Struct(">8sQ8sB")
ENTRY_BYTES = _ENTRY.size
_UNDECIDED, _PARTLY = 1, 2
_NO_ROWS = bytes(8)


@dataclass(frozen=True)
class Archived:
    """
    Attributes:
        key: hash of the incarnation's name.
        rows: records decided, of all batches.
        digest: of their fingerprint.
        decided: False: a batch was begun under a weaker guarantee, but none decided.
        partly: at_most_once gave up records: `digest` does not cover all rows.
    """

    key: bytes
    rows: int = 0
    digest: bytes = _NO_ROWS
    decided: bool = True
    partly: bool = False

    @classmethod
    def of(cls, incarnation: str, total: Fingerprint, given_up: Fingerprint) -> Archived:
        """From the running fingerprints in its newest decision."""
        return cls(key_of(incarnation), total.count, digest_of(total), True, bool(given_up.count))

    @classmethod
    def begun(cls, incarnation: str) -> Archived:
        return cls(key_of(incarnation), decided=False)

    def holds(self, rows: Fingerprint) -> bool:
        """Whether these are the decided rows, as far as known."""
        return rows.count >= self.rows if self.partly else (rows.count, digest_of(rows)) == (self.rows, self.digest)

    def encode(self) -> bytes:
        return _ENTRY.pack(self.key, self.rows, self.digest, (not self.decided) * _UNDECIDED + self.partly * _PARTLY)

    @classmethod
    def decode(cls, data: bytes) -> Archived:
        key, rows, digest, flags = _ENTRY.unpack(data)
        return cls(key, rows, digest, not flags & _UNDECIDED, bool(flags & _PARTLY))


def key_of(incarnation: str) -> bytes:
    """64 bits: among a million names, two collide in one of 37 million ledgers; then a run is refused."""
    return hashlib.blake2b(incarnation.encode(), digest_size=8).digest()


def digest_of(rows: Fingerprint) -> bytes:
    return hashlib.blake2b(str(rows).encode(), digest_size=8).digest()


class Archive:
    """Any number of archived incarnations, as one string of bytes.

    Raises:
        InvariantBroken: the bytes are corrupt.
    """

    def __init__(self, data: bytes = b"", where: str = "the ledger") -> None:
        if len(data) % ENTRY_BYTES:
            raise InvariantBroken(
                "LEDGER_RECORD_MISSING",
                f"The archive of earlier runs in {where} has {len(data)} bytes, not a multiple of {ENTRY_BYTES}: it is "
                "corrupt.",
                next_step="restore it from a backup, together with the sink",
            )
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // ENTRY_BYTES

    def __iter__(self) -> Iterator[Archived]:
        for start in range(0, len(self.data), ENTRY_BYTES):
            yield Archived.decode(self.data[start : start + ENTRY_BYTES])

    def find(self, incarnation: str) -> Archived | None:
        """Of two entries, the decided one counts. Only matches are unpacked."""
        found = [Archived.decode(self.data[at : at + ENTRY_BYTES]) for at in self._places(key_of(incarnation))]
        return max(found, key=lambda entry: entry.decided, default=None)

    def with_more(self, more: Iterable[Archived]) -> Archive:
        """These entries, plus the missing ones of `more`."""
        new = [e.encode() for e in more if e not in self]
        return Archive(self.data + b"".join(new)) if new else self

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, Archived) and any(
            self.data.startswith(entry.encode(), at) for at in self._places(entry.key)
        )

    def _places(self, key: bytes) -> Iterator[int]:
        at = self.data.find(key)
        while at >= 0:
            if at % ENTRY_BYTES == 0:
                yield at
            at = self.data.find(key, at + 1)
