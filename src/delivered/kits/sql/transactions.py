"""mechanism two_phase: what is said of a transaction that a task left prepared at a server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

KEY = "gid"
"""Name of the transaction's id in a participant's handle."""


@dataclass(frozen=True)
class OpenTransaction:
    """One prepared transaction, for a person. See `delivered.model.transactions.OpenTransaction`.

    Attributes:
        started_ms: when it was prepared, milliseconds since 1970: by the server's clock where the server tells.
        user: who prepared it, where the server tells.
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
    def participant(self) -> dict[str, Any]:
        return {KEY: self.transactional_id}

    def age_s(self) -> float:
        """Seconds since it was prepared, by this machine's clock."""
        return age_of(self.started_ms)


def age_of(started_ms: int) -> float:
    """Seconds since then, by this machine's clock."""
    return max(0.0, time.time() - started_ms / 1000)
