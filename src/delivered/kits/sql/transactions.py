"""What a pipeline leaves at a server until a batch is decided: its names, prepared transactions, their markers."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from delivered.contract.finding import Finding
from delivered.kits.sql.database import Connection, Dialect, scope_values
from delivered.kits.sql.options import ServerOptions
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.prepared import Handle

_STAGING_BYTES = 8


@dataclass(frozen=True)
class Names:
    """Names of one pipeline and sink, in any incarnation.

    Attributes:
        check_bytes: length of a hash that distinguishes sinks whose joined names are equal (names may contain dots),
            and their ledgers.
    """

    scope: Scope
    ledger_schema: str
    check_bytes: int = 4

    @property
    def check(self) -> str:
        return self._digest(self.check_bytes)

    def _digest(self, size: int) -> str:
        text = f"{self.scope.pipeline}\0{self.scope.sink}\0{self.ledger_schema}"
        return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()

    @property
    def staging_prefix(self) -> str:
        """Prefix of the names of this sink's staging tables, and of no others."""
        # Longer than `check`, as nothing else in it tells two sinks apart.
        return f"s_{self._digest(_STAGING_BYTES)}_"

    def staging(self, work: Work, nonce: str) -> str:
        """Name of the staging table of one attempt of a shard."""
        return f"{self.staging_prefix}{work.batch}_{work.shard}_{nonce}"

    def is_staging(self, name: str) -> bool:
        prefix = self.staging_prefix
        return name.startswith(prefix) and re.fullmatch(r"\d+_\d+_[0-9a-f]{16}", name[len(prefix) :]) is not None


def new_nonce() -> str:
    """16 unique characters, so that two attempts of a shard never share a name."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class PreparedRows(Handle):
    """A prepared shard at a server.

    Attributes:
        gid: of the prepared transaction that holds the rows; empty: they are in a staging table.
        staged: that table, in the ledger's schema. target: the table its rows move to; columns: theirs, for SQL.
        kept: mode upsert: number of winning rows; stored: names of the stored columns; index: on the keys (MySQL).
    """

    gid: str = ""
    staged: str = ""
    target: str = ""
    columns: str = ""
    kept: int = 0
    stored: tuple[str, ...] = ()
    index: str = ""


@dataclass(frozen=True)
class OpenTransaction:
    """One prepared transaction, for display. See `delivered.contract.powers.OpenTransaction`.

    Attributes:
        started_ms: when it was prepared, in milliseconds since 1970; by the server's clock if available.
        user: who prepared it, if available.
    """

    transactional_id: str
    batch: int
    shard: int
    started_ms: int
    targets: tuple[str, ...]
    user: str = ""
    database: str = ""
    state: str = "Prepared"

    @property
    def participant(self) -> PreparedRows:
        return PreparedRows(self.transactional_id)

    def age_s(self) -> float:
        """Seconds since it was prepared, by this machine's clock."""
        return age_of(self.started_ms)

    def timeout_s(self) -> None:
        return None


def check_deletions(options: ServerOptions) -> Iterator[Finding]:
    """Refuse deletes under two_phase."""
    if options.write.delete is not None:
        yield Finding(
            "DELETE_TWO_PHASE",
            "deleteColumn is not supported with mechanism two_phase: a delete of a key that does not exist takes no "
            "lock, so a conflict with another shard of the batch would not be detected.",
            True,
            'write .option("mechanism", "one_transaction")',
        )


def mark(connection: Connection, dialect: Dialect, work: Work, gid: str, fingerprint: Fingerprint) -> None:
    """Write the marker in the rows' transaction, as evidence of its commit."""
    connection.execute(
        dialect(
            "INSERT INTO {marker} (pipeline, sink, incarnation, batch, shard, gid, fingerprint) "
            "VALUES (:pipeline, :sink, :incarnation, :batch, :shard, :gid, :fingerprint)"
        ),
        {
            **scope_values(work.scope),
            "batch": work.batch,
            "shard": work.shard,
            "gid": gid,
            "fingerprint": str(fingerprint),
        },
    )


def age_of(started_ms: int) -> float:
    """Seconds since then, by this machine's clock."""
    return max(0.0, time.time() - started_ms / 1000)
