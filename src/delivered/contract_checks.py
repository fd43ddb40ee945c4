"""What a sink implements whose options do not fit every guarantee. Opt-in."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from delivered.model.guarantee import Guarantee


@runtime_checkable
class ChecksGuarantee(Protocol):
    def check_guarantee(self, guarantee: Guarantee) -> None:
        """Raise UsageError if an option contradicts the guarantee. Runs on the driver; asks nobody."""
