"""Shared state of the engine: the sinks of one pipeline behind one ledger, for one driver."""

from __future__ import annotations

from dataclasses import dataclass, field

from delivered.contract.sink import Committer, Sink, SinkGroup
from delivered.ledger.ledger import Ledger
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
    swept: Swept = field(default_factory=Swept, compare=False)

    @classmethod
    def open(
        cls,
        sink: Sink | SinkGroup,
        scope: Scope,
        guarantee: Guarantee,
        owner: Owner,
        tolerance: Tolerance = _NONE_TAKEN,
        transform: str = "",
    ) -> Context:
        """Connects on first use."""
        others = sink.others if isinstance(sink, SinkGroup) else frozenset[str]()
        ledger, committer = open_ledger(sink, scope), sink.committer(scope)
        return cls(scope, guarantee, owner, ledger, committer, tolerance, others, transform)


def open_ledger(sink: Sink | SinkGroup, scope: Scope) -> Ledger:
    """The ledger, at the sink that holds it according to the plan."""
    sinks = [m.sink for m in sink.members] if isinstance(sink, SinkGroup) else [sink]
    place = LedgerPlace.among([s.capability() for s in sinks])
    return Ledger(sink.store(scope), scope, carries_rows=place.carries_rows)
