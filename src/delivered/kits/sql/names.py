"""Names by which what a pipeline leaves at a server is known, and whose it is."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from delivered.model.identity import Scope, Work


@dataclass(frozen=True)
class Names:
    """Of one sink of one pipeline, in any incarnation.

    Attributes:
        check_bytes: of the hash that tells sinks apart whose written names are the same (names may hold dots), and
            their ledgers.
    """

    scope: Scope
    ledger_schema: str
    check_bytes: int = 4

    @property
    def check(self) -> str:
        text = f"{self.scope.pipeline}\0{self.scope.sink}\0{self.ledger_schema}"
        return hashlib.blake2b(text.encode(), digest_size=self.check_bytes).hexdigest()

    @property
    def staging_prefix(self) -> str:
        """Start of the names of all staging tables of this sink, and of no other's."""
        return f"s_{self.check}_"

    def staging(self, work: Work, nonce: str) -> str:
        """The staging table of one attempt of one shard."""
        return f"{self.staging_prefix}{work.batch}_{work.shard}_{nonce}"

    def is_staging(self, name: str) -> bool:
        prefix = self.staging_prefix
        return name.startswith(prefix) and re.fullmatch(r"\d+_\d+_[0-9a-f]{16}", name[len(prefix) :]) is not None


def new_nonce() -> str:
    """16 characters that nobody else has, nor ever had: two attempts of one shard never share a name."""
    return secrets.token_hex(8)
