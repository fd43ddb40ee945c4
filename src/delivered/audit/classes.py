"""What can happen to a record on its way, and what each guarantee allows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from delivered.model.guarantee import Guarantee


class Damage(StrEnum):
    """In the order of the report.

    Records are identified by id. A record that the source holds twice is expected twice.
    """

    LOST = "lost"
    """Sent, but not in the sink."""
    DUPLICATED = "duplicated"
    """In the sink more often than it was sent."""
    ALTERED = "altered"
    """In the sink under its id, but with another value."""
    UNEXPECTED = "unexpected"
    """In the sink under an id that nobody sent."""
    REORDERED = "reordered"
    """First seen in the sink after a record of the same key that was sent later. No guarantee covers order."""


class Verdict(StrEnum):
    """False beats unknown beats true."""

    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        return {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.UNKNOWN: 3}[self]


@dataclass(frozen=True)
class Counts:
    """Numbers of records; never of offsets, which leave gaps.

    Attributes:
        sent: what the transform made of the source range, all batches of which are decided.
        delivered: everything that the sink holds.
        in_progress: delivered before the decision, by batches that began and are not decided yet.
        earlier: delivered by batches that ran with another transform and cannot be recomputed, as far as the ledger
            accounts for them.
    """

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    unexpected: int = 0
    reordered: int = 0
    in_progress: int = 0
    earlier: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of(self, damage: Damage) -> int:
        return int(getattr(self, damage.value))

    @property
    def adds_up(self) -> bool:
        """Whether every record of both sides was put into exactly one class.

        An altered record is one that was sent and one that was delivered; the others are on one side only.
        """
        more = self.duplicated + self.unexpected + self.in_progress + self.earlier
        return self.delivered == self.sent - self.lost + more


def breaches(guarantee: Guarantee, counts: Counts, given_up: int) -> list[str]:
    """What the guarantee forbids in `counts`, as sentences; empty if it held.

    Args:
        given_up: records that at_most_once recorded as given up. Losses up to this number are within the
            guarantee. It is an upper bound, because some may have been sent before the crash.
    """
    found: list[str] = []
    if counts.lost and not guarantee.may_lose:
        found.append(f"{counts.lost} records are lost; {guarantee.value} promises none")
    if guarantee.may_lose and counts.lost > given_up:
        found.append(
            f"{counts.lost} records are lost but only {given_up} were recorded as given up; the other "
            f"{counts.lost - given_up} are unaccounted for"
        )
    if counts.duplicated and not guarantee.may_duplicate:
        found.append(f"{counts.duplicated} records are duplicated; {guarantee.value} promises none")
    if counts.altered:
        found.append(f"{counts.altered} records have a value other than the one sent")
    if counts.unexpected:
        found.append(f"{counts.unexpected} records in the sink were never sent")
    return found
