"""Names of the objects that a pipeline creates at a server; they identify their owner."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from delivered.model.identity import Scope, Work

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
