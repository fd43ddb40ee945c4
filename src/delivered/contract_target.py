"""What a connector may have besides: its resource tells its target from one that was made anew under its name, its
ledger what other ledgers lie in the same place. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from delivered.model.identity import OtherLedger


@runtime_checkable
class KnowsTarget(Protocol):
    """A resource that can tell its target from one of the same name that was made anew. Opt-in."""

    def targets(self) -> Mapping[str, str]:
        """Sink's name -> what the system knows its target by, in words: "topic id 3f0c..."; empty: it cannot tell, or
        there is no target yet.

        The same for as long as the target lives, whatever is written to it; another once it was dropped and made anew.
        Runs on the driver at recovery, after the claim. May be called again. Changes nothing.
        """


@runtime_checkable
class KnowsOthers(Protocol):
    """A ledger that can tell which others lie in the same place. A checkpoint that finds no batch of its own asks:
    its pipeline may have been renamed. Opt-in."""

    def others(self) -> Sequence[OtherLedger]:
        """Of other pipelines and sinks, those that know this incarnation first; at most `OTHERS_MAX`.

        Runs on the driver, after a claim. May be called again. Changes nothing.
        """
