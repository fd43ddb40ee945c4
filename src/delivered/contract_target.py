"""What a resource may have besides: it tells its target from one that was made anew under its name. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class KnowsTarget(Protocol):
    """A resource that can tell its target from one of the same name that was made anew. Opt-in."""

    def targets(self) -> Mapping[str, str]:
        """Sink's name -> what the system knows its target by, in words: "topic id 3f0c..."; empty: it cannot tell, or
        there is no target yet.

        The same for as long as the target lives, whatever is written to it; another once it was dropped and made anew.
        Runs on the driver at recovery, after the claim. May be called again. Changes nothing.
        """
