"""An optional protocol of committers: a system that may lose what it confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from delivered.contract.powers import OpenTransaction
from delivered.model.identity import Work
from delivered.model.outcome import Outcome
from delivered.model.prepared import Prepared

Shards = Sequence[tuple[Work, Prepared]]


@runtime_checkable
class LosesEnds(Protocol):
    """Implemented by a `Committer` whose system may confirm the end of a transaction and then lose it in a crash.

    Rows of such a transaction stay hidden, and may get the outcome of a later one.
    """

    def settle_ends(self, decided: Shards, earlier: Callable[[], Sequence[Prepared]]) -> Outcome[int]:
        """End what its system lost the end of: by evidence beside the rows, never by the system's word alone.

        Runs on the driver: at recovery, before orphans are aborted, and before a batch if `ends_hold` is False.

        Args:
            decided: participants of the newest decision. What no decision names is aborted.
            earlier: those of older ones, which were applied and logged; called only if something was lost.

        Returns:
            How many were lost.

        Raises:
            DeliveredError: one cannot be ended. Nothing may be written before that.
        """

    def ends_hold(self, applied: Sequence[Prepared]) -> bool:
        """Whether these participants, applied since the last call, are certainly visible.

        Runs before every batch, and has to be cheap.
        """


@runtime_checkable
class EndLost(OpenTransaction, Protocol):
    """A transaction that its system reports as ended, and whose rows it still hides."""

    @property
    def committed(self) -> bool | None:
        """How it ended; None: the system does not know any more."""
