"""Shared state of the engine: the sinks of one pipeline behind one ledger, for one driver."""

from __future__ import annotations

from dataclasses import dataclass, field

from delivered.contract.sink import Sink
from delivered.engine.committers import Committers
from delivered.engine.sinks import Sinks
from delivered.ledger import Ledger
from delivered.model.capability import LedgerPlace
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.work import Owner, Tolerance

_NONE_TAKEN = Tolerance()


@dataclass
class Swept:
    """
    Attributes:
        at_s: of time.monotonic(), when orphans were aborted last.
    """

    at_s: float = float("-inf")


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        ledger, committers: of the sinks, opened for `scope`.
        sinks: their names, as in `Prepared.sink`.
        owner: this driver. Two processes of one driver share its id.
        transform: fingerprint of the transform that produces the rows; empty: unknown.
    """

    scope: Scope
    guarantee: Guarantee
    owner: Owner
    ledger: Ledger
    committers: Committers
    sinks: frozenset[str]
    tolerance: Tolerance = Tolerance()
    transform: str = ""
    swept: Swept = field(default_factory=Swept, compare=False)

    @classmethod
    def open(
        cls,
        sinks: Sinks,
        scope: Scope,
        guarantee: Guarantee,
        owner: Owner,
        tolerance: Tolerance = _NONE_TAKEN,
        transform: str = "",
    ) -> Context:
        """Connects on first use."""
        ledger, committers = sinks.ledger(scope), sinks.committers(scope)
        return cls(scope, guarantee, owner, ledger, committers, sinks.names, tolerance, transform)

    def close(self) -> None:
        self.ledger.close()
        self.committers.close()


def open_ledger(sink: Sink, scope: Scope) -> Ledger:
    """The ledger at one sink."""
    return Ledger(sink.store(scope), scope, carries_rows=LedgerPlace.among([sink.capability()]).carries_rows)
