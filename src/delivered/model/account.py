"""Running totals of a sink, by version of the transform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delivered.model.fingerprint import Fingerprint


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
