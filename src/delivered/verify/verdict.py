"""What a judge may say."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """In the order in which they beat each other: false, unknown, true.

    `INVALID` speaks of the run, not of the pipeline: a fault that was required did not fire, or nobody read the sink
    at the end. Such a run never passes, whatever its checkers say; and what they saw broken stays broken.
    """

    BROKEN = "broken"
    INVALID = "invalid"
    UNKNOWN = "unknown"
    HELD = "held"

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """The one that beats all others; UNKNOWN when nobody said anything."""
        rank = list(cls)
        return min(verdicts, key=rank.index, default=cls.UNKNOWN)

    @property
    def exit_code(self) -> int:
        return {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.INVALID: 3, Verdict.UNKNOWN: 3}[self]
