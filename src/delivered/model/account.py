"""What was delivered to a sink so far, and with which version of the transform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delivered.model.fingerprint import Fingerprint


@dataclass(frozen=True)
class Account:
    """Running fingerprints of one sink: what was decided, and what at_most_once gave up."""

    total: Fingerprint = Fingerprint()
    given_up: Fingerprint = Fingerprint()

    def to_json(self) -> dict[str, str]:
        return {"total": str(self.total), "given_up": str(self.given_up)}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Account:
        return cls(Fingerprint.parse(data["total"]), Fingerprint.parse(data["given_up"]))


@dataclass(frozen=True)
class TransformVersion:
    """The version of the transform that ran from one batch on, until the next version.

    Attributes:
        fingerprint: of the transform; empty: unknown; `transforms.MIXED`: several.
        batch: the first one.
        after: the sources' offsets at which the previous batch ended; empty: there was none.
        accounts: what was decided before that batch, by sink, as `Prepared.sink` names it.
    """

    fingerprint: str
    batch: int = 0
    after: str = ""
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "batch": self.batch,
            "after": self.after,
            "accounts": {name: a.to_json() for name, a in self.accounts.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TransformVersion:
        accounts = {name: Account.from_json(a) for name, a in data["accounts"].items()}
        return cls(data["fingerprint"], data["batch"], data["after"], accounts)
