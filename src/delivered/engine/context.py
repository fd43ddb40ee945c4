"""What every part of the engine needs: the sinks of one pipeline behind one ledger, as one driver."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.contract.sink import Committer, Ledger
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.work import Owner, Tolerance


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        ledger, committer: the sink's, opened for `scope`.
        owner: this driver. Two processes of one driver share its id.
        others: the other sinks of the same batches, as `Prepared.sink` names them.
        transform: fingerprint of the transform that produces the rows; empty: unknown.
    """

    scope: Scope
    guarantee: Guarantee
    owner: Owner
    ledger: Ledger
    committer: Committer
    tolerance: Tolerance = Tolerance()
    others: frozenset[str] = frozenset()
    transform: str = ""
