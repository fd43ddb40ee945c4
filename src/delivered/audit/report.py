"""What an audit found, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from delivered.audit.classes import Counts, Damage, Verdict, breaches
from delivered.audit.history import History
from delivered.audit.versions import Earlier
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee

FORMAT = 1
"""Version of the JSON."""


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
        unclear: keys for which the source alone does not tell how often they must be there.
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


@dataclass(frozen=True)
class AuditReport:
    """
    Attributes:
        range_from, range_to: offsets of the source range, as JSON text; `range_to` is the end of the last batch that
            was decided and made visible.
        given_up: records that the ledger counts as given up (at_most_once).
        partitions: one line per source partition, at most `PARTITIONS_MAX`.
        samples: a bounded number per class.
        transactions: this pipeline's open ones at the sink.
        unknowns: why something is unknown. With any of these, the verdict is never `held`.
        judged: whether the counts may break the guarantee. False: they may not cover the pipeline's range; `unknowns`
            say why.
        earlier: batches that ran with another transform; None: there are none.
        own: SQL that identifies this pipeline's records; empty: not declared.
        foreign: records for which it is not true; they are in no count.
        undeleted: of the unexpected records, those whose keys this pipeline deleted: they are its own.
        notes: what a reader of the report should know; none of it changes the verdict.
        id_says: what identifies records in this audit.
        dedup: of a pipeline with dedup. `counts.in_progress` then also counts what may be in the sink of unclear
            keys.
    """

    pipeline: str
    sink: str
    guarantee: Guarantee
    incarnation: str = ""
    range_from: str = ""
    range_to: str = ""
    counts: Counts = Counts()
    given_up: int = 0
    partitions: tuple[PartitionLine, ...] = ()
    samples: tuple[Sample, ...] = ()
    fingerprints: Fingerprints | None = None
    history: History = History()
    transactions: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    judged: bool = True
    earlier: Earlier | None = None
    own: str = ""
    foreign: int = 0
    undeleted: int = 0
    notes: tuple[str, ...] = ()
    id_says: str = "the whole record"
    dedup: DedupCounts | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def handed_all(self) -> bool:
        """Whether the sink holds exactly what, by the ledger, decided batches handed to it."""
        prints = self.fingerprints
        return prints is not None and prints.ledger is not None and prints.delivered == prints.ledger

    @property
    def all_own(self) -> bool:
        """Whether every counted record is this pipeline's own."""
        return bool(self.own) or self.handed_all

    @property
    def breaches(self) -> list[str]:
        if not self.judged:
            return []
        counts = self.counts if self.all_own else replace(self.counts, unexpected=0)
        found = breaches(self.guarantee, counts, self.given_up)
        if self.undeleted:
            found.append(f"{self.undeleted} deleted keys are still in the sink")
        if self.earlier is not None and not self.guarantee.may_lose:
            if self.earlier.missing:
                found.append(
                    f"{self.earlier.missing} records of batches {self.earlier.batches} are lost: according to the "
                    "ledger, they were handed to the sink"
                )
            elif self.earlier.differs:
                found.append(
                    f"records of batches {self.earlier.batches} are lost or altered: the sink holds as many as the "
                    "ledger says, but with another fingerprint"
                )
        return found

    @property
    def verdict(self) -> Verdict:
        if self.breaches:
            return Verdict.BROKEN
        if self.unknowns or (self.counts.unexpected and not self.all_own):
            return Verdict.UNKNOWN
        return Verdict.HELD

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    def samples_of(self, damage: Damage) -> list[Sample]:
        return [s for s in self.samples if s.damage is damage]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "pipeline": self.pipeline,
            "sink": self.sink,
            "guarantee": self.guarantee.value,
            "verdict": self.verdict.value,
            "breaches": self.breaches,
            "unknowns": list(self.unknowns),
            "notes": list(self.notes),
            "incarnation": self.incarnation,
            "range": {"from": _json_or_text(self.range_from), "to": _json_or_text(self.range_to)},
            "id": self.id_says,
            "counts": asdict(self.counts) | {"given_up": self.given_up, "foreign": self.foreign},
            "own": self.own or None,
            **({"earlier": _earlier(self.earlier)} if self.earlier is not None else {}),
            **({"dedup": asdict(self.dedup)} if self.dedup is not None else {}),
            "partitions": [
                {
                    "partition": line.partition,
                    **asdict(line.counts),
                    "sent_fingerprint": str(line.sent_fingerprint),
                    "delivered_fingerprint": str(line.delivered_fingerprint),
                }
                for line in self.partitions
            ],
            "samples": {d.value: [_sample(s) for s in self.samples_of(d)] for d in Damage},
            "fingerprints": self.fingerprints.to_json() if self.fingerprints else None,
            "ledger": self.history.to_json(),
            "open_transactions": list(self.transactions),
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """The table that `delivered audit` prints."""
        from delivered.audit.table import as_text

        return as_text(self).rstrip("\n")

    def _repr_html_(self) -> str:
        """The same table, for a notebook."""
        from delivered.audit.table import as_html

        return as_html(self)


def _earlier(earlier: Earlier) -> dict[str, Any]:
    return {
        "batches": earlier.batches,
        "handed": str(earlier.handed),
        "missing": earlier.missing,
        "differs": earlier.differs,
    }


def _sample(sample: Sample) -> dict[str, Any]:
    return {k: v for k, v in asdict(sample).items() if k != "damage"}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def unknown_report(pipeline: str, sink: str, guarantee: Guarantee, reason: str) -> AuditReport:
    """The report of an audit that could not run: never a pass."""
    return AuditReport(pipeline, sink, guarantee, unknowns=(reason,))
