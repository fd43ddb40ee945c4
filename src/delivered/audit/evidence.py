"""What can happen to a record on its way, what each guarantee allows, and what an audit counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from delivered.model.fingerprint import Fingerprint
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
    """In the sink under an id that was never sent."""
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
        sent: the transform's output for the source range, all batches of which are decided.
        delivered: everything that the sink holds.
        in_progress: delivered before the decision, by batches that have started and are not decided yet.
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
    def damaged(self) -> bool:
        return any(self.of(damage) for damage in Damage)

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
        given_up: records that the ledger counts as given up. Under at_most_once, losses up to this number are within
            the guarantee: it is an upper bound, because some may have been sent before the crash. Under the others they
            are losses, even if the source no longer has the records either.
    """
    found: list[str] = []
    if given_up and not guarantee.may_lose:
        found.append(f"{given_up} records were given up, according to the ledger; {guarantee.value} promises none")
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


@dataclass(frozen=True)
class Sample:
    """One damaged record, by id. Its value stays in the cluster.

    Attributes:
        id: from the audit's `id` expression, or a hash of the record.
        key: as text, shortened.
        source, sink: partition and position, as in `orders-0 @ 17`; None: not there.
        sent, delivered: copies under this id.
    """

    damage: Damage
    id: str
    key: str | None
    source: str | None
    sink: str | None
    sent: int
    delivered: int


@dataclass(frozen=True)
class PartitionLine:
    """One partition of the source.

    Attributes:
        partition: its name; `-` for records that were never sent.
        sent_fingerprint, delivered_fingerprint: of what came from this partition.
    """

    partition: str
    counts: Counts
    sent_fingerprint: Fingerprint
    delivered_fingerprint: Fingerprint

    def __add__(self, other: PartitionLine) -> PartitionLine:
        """Both together, under this one's name."""
        return PartitionLine(
            self.partition,
            self.counts + other.counts,
            self.sent_fingerprint + other.sent_fingerprint,
            self.delivered_fingerprint + other.delivered_fingerprint,
        )


@dataclass(frozen=True)
class Fingerprints:
    """Three accounts of the same records. Look for the fault where one differs from the other two.

    Attributes:
        sent: reread from the source, through the transform.
        ledger: what the tasks handed to the sink, summed over all decided batches; None: no ledger was read.
        given_up: what at_most_once gave up, from the ledger.
        delivered: read back from the sink.
    """

    sent: Fingerprint
    ledger: Fingerprint | None
    given_up: Fingerprint
    delivered: Fingerprint

    @property
    def says(self) -> str:
        if self.ledger is None:
            return "source and sink agree" if self.sent == self.delivered else "source and sink differ"
        accounted = self.ledger + self.given_up
        if self.sent == accounted:
            if self.delivered == self.ledger:
                return "source, ledger and sink agree"
            return "source and ledger agree, the sink differs"
        if self.delivered == self.ledger:
            return (
                "ledger and sink agree, the source differs: the transform is not deterministic, or the source's "
                "records have changed or expired since"
            )
        if self.delivered == self.sent:
            return "source and sink agree, the ledger differs"
        return "source, ledger and sink all differ"

    def to_json(self) -> dict[str, Any]:
        return {
            "sent": str(self.sent),
            "ledger": str(self.ledger) if self.ledger is not None else None,
            "given_up": str(self.given_up),
            "delivered": str(self.delivered),
            "says": self.says,
        }


@dataclass(frozen=True)
class DedupCounts:
    """What the audit of a pipeline with dedup found in the source range.

    Attributes:
        records: of the source, in the range.
        deduplicated: of these, duplicates that must not be in the sink.
        judged: keys that must be in the sink once.
        unclear: keys for which the source alone does not show how often they must be there.
        late: of these, keys that may have been dropped as late.
        unlike: ids whose copies differ in the sink's columns; one of them was checked to be there.
        unlike_unclear: ids whose copies do not even yield the same number of records; they were not judged.
    """

    records: int = 0
    deduplicated: int = 0
    judged: int = 0
    unclear: int = 0
    late: int = 0
    unlike: int = 0
    unlike_unclear: int = 0
