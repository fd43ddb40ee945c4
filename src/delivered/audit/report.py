"""What an audit found, of one sink or of a chain of pipelines: as data, as JSON, and as printed tables."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delivered import html
from delivered.audit.evidence import (
    Counts,
    Damage,
    DedupCounts,
    Fingerprints,
    History,
    PartitionLine,
    Sample,
    Verdict,
    breaches,
)
from delivered.audit.request import Earlier, KeyCheck
from delivered.audit.seal import Seal, State
from delivered.model.capability import Guarantee
from delivered.model.errors import one_line
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import batches_text
from delivered.terminal import printer

FORMAT = 2
"""Version of the JSON. 1: every audit covered all batches of the checkpoint; there were no `seals`."""

_PARTITIONS_SHOWN = 50
_STYLE = {Verdict.HELD: "bold green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "bold yellow"}
_COLUMNS = ("sent", "delivered", "lost", "duplicated", "altered", "unexpected", "reordered")
_CHAIN_COLUMNS = _COLUMNS[:-1]


@dataclass(frozen=True)
class Continuation:
    """What an audit continued, and the seals that it added.

    Attributes:
        first, last: batches that it compared; without any, `last` is before `first`.
        base: the seal that it continued from; None: it started with batch 0.
        seals: those that it added, oldest first.
        not_sealed: why it added none; empty: it did, or no batch was new.
        reads_all: why every audit of this sink reads all of it; empty: the next one continues.
        expired: what the sink removed of its sealed part as its settings say.
    """

    first: int
    last: int
    base: Seal | None = None
    seals: tuple[Seal, ...] = ()
    not_sealed: str = ""
    reads_all: str = ""
    expired: tuple[str, ...] = ()

    @property
    def newest(self) -> Seal | None:
        return self.seals[-1] if self.seals else self.base

    @property
    def unproved(self) -> tuple[Mapping[str, Any], ...]:
        """All ranges of the checkpoint that no audit proved, the newest `UNPROVED_MAX`."""
        newest = self.newest
        return () if newest is None else newest.unproved_until

    def to_json(self) -> dict[str, Any]:
        newest = self.newest
        return {
            "batches": {"first": self.first, "last": self.last},
            "continued_from": None if self.base is None else _seal_json(self.base),
            "added": [_seal_json(s) for s in self.seals],
            "not_sealed": self.not_sealed or None,
            "reads_all": self.reads_all or None,
            "expired": list(self.expired),
            "unproved": [dict(u) for u in self.unproved],
            "total": None if newest is None else newest.total.to_json(),
        }


def _seal_json(seal: Seal) -> dict[str, Any]:
    return {
        "number": seal.number,
        "sha256": seal.digest,
        "incarnation": seal.scope.incarnation,
        "batches": [seal.first, seal.last],
        "verdict": seal.verdict.value,
        "audited": seal.audited,
        "sealed_at_ms": seal.sealed_at_ms,
    }


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
        uncertain: classes whose counts prove nothing; `unknowns` say why.
        earlier: batches that ran with another transform; None: there are none.
        own: SQL that identifies this pipeline's records; empty: not declared.
        foreign: records for which it is not true; they are not counted.
        undeleted: of the unexpected records, those whose keys this pipeline deleted: they are its own.
        unexcused: lost records of batches that gave up none (at_most_once).
        late: records of sealed batches that came after their seal; they are among `counts.earlier`.
        notes: what a reader of the report should know; none of it changes the verdict.
        id_says: what identifies records in this audit.
        dedup: of a pipeline with dedup. `counts.in_progress` then also counts what may be in the sink of unclear
            keys.
        keys: if only a share of them was compared: `counts` are of their rows.
        continuation: the batches that it covers, in the chain of seals; None: all, and it was not sealed.
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
    uncertain: tuple[Damage, ...] = ()
    earlier: Earlier | None = None
    own: str = ""
    foreign: int = 0
    undeleted: int = 0
    unexcused: int = 0
    late: int = 0
    notes: tuple[str, ...] = ()
    id_says: str = "all columns"
    dedup: DedupCounts | None = None
    continuation: Continuation | None = None
    keys: KeyCheck | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def handed_all(self) -> bool:
        """Whether the sink holds exactly what the decided batches in the ledger handed to it."""
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
        counts = replace(counts, **{damage.value: 0 for damage in self.uncertain})
        violations = breaches(self.guarantee, counts, self.given_up)
        if self.unexcused and 0 < counts.lost <= self.given_up:
            violations.append(f"{self.unexcused} of the lost records are of batches that gave up none")
        if self.undeleted:
            violations.append(f"{self.undeleted} deleted keys are still in the sink")
        return [*violations, *self.earlier_breaches]

    @property
    def earlier_breaches(self) -> list[str]:
        """Of `breaches`, those of batches that were not compared."""
        earlier = self.earlier
        if earlier is None or not self.judged or self.guarantee.may_lose:
            return []
        if earlier.missing and not earlier.expired:
            return [
                f"{earlier.missing} records of batches {earlier.batches} are lost: according to the ledger, they were "
                "handed to the sink"
            ]
        if earlier.differs:
            return [
                f"records of batches {earlier.batches} are lost or altered: the sink holds as many as the ledger says, "
                "but with another fingerprint"
            ]
        return []

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
            "batches": None
            if self.continuation is None
            else {"first": self.continuation.first, "last": self.continuation.last},
            "seals": None if self.continuation is None else self.continuation.to_json(),
            "id": self.id_says,
            "counts": asdict(self.counts) | {"given_up": self.given_up, "foreign": self.foreign},
            "own": self.own or None,
            **({"earlier": _public(self.earlier, without="given_up")} if self.earlier is not None else {}),
            **({"dedup": asdict(self.dedup)} if self.dedup is not None else {}),
            **({"keys": self.keys.to_json()} if self.keys is not None else {}),
            "partitions": [_public(line, without="counts") | asdict(line.counts) for line in self.partitions],
            "samples": {d.value: [_public(s, without="damage") for s in self.samples_of(d)] for d in Damage},
            "fingerprints": self.fingerprints.to_json() if self.fingerprints else None,
            "ledger": self.history.to_json(),
            "open_transactions": list(self.transactions),
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
        }

    def summary(self) -> dict[str, Any]:
        """What a status shows of it."""
        report = self.to_dict()
        newest = None if self.continuation is None else self.continuation.newest
        return {
            **{name: report[name] for name in ("sink", "verdict", "breaches", "unknowns", "counts", "seconds")},
            **({"keys": report["keys"]} if self.keys is not None else {}),
            **({"seal": {"number": newest.number, "sha256": newest.digest}} if newest is not None else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """The table that `delivered audit` prints."""
        return as_text(self)

    def _repr_html_(self) -> str:
        """The same tables, for a notebook."""
        return html.fragment(html.from_rich(render(self)))


def _public(value: Any, without: str) -> dict[str, Any]:
    """The fields of a dataclass but one, fingerprints as text."""
    named = {f.name: getattr(value, f.name) for f in fields(value) if f.name != without}
    return {name: str(v) if isinstance(v, Fingerprint) else v for name, v in named.items()}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


@dataclass(frozen=True)
class Segment:
    """One hop, or the chain from end to end.

    Attributes:
        report: from end to end, `counts.delivered` is what the last sink holds.
        under_way: rows that are neither delivered nor lost: their batch is yet to come; None: unknown.
    """

    name: str
    report: AuditReport
    under_way: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "under_way": self.under_way, **self.report.to_dict()}


@dataclass(frozen=True)
class ChainReport:
    """
    Attributes:
        hops: one per pipeline; of the last one, one per sink.
        ends: from the first source to each sink of the last pipeline.
    """

    pipelines: tuple[str, ...]
    hops: tuple[Segment, ...]
    ends: tuple[Segment, ...]

    @property
    def verdict(self) -> Verdict:
        """False beats unknown beats true."""
        verdicts = {s.report.verdict for s in (*self.hops, *self.ends)}
        return next(v for v in (Verdict.BROKEN, Verdict.UNKNOWN, Verdict.HELD) if v in verdicts)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "chain": list(self.pipelines),
            "verdict": self.verdict.value,
            "hops": [s.to_dict() for s in self.hops],
            "end_to_end": [s.to_dict() for s in self.ends],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """What `delivered audit --chain` prints."""
        return as_text(self, width=130)

    def _repr_html_(self) -> str:
        """The same tables, for a notebook."""
        return html.fragment(html.from_rich(render(self)))


def unknown_report(pipeline: str, sink: str, guarantee: Guarantee, reason: str) -> AuditReport:
    """The report of an audit that could not run: never a pass."""
    return AuditReport(pipeline, sink, guarantee, unknowns=(reason,))


def render(report: AuditReport | ChainReport) -> Group:
    """The report, for a console."""
    return _render_chain(report) if isinstance(report, ChainReport) else _render_one(report)


def _render_one(report: AuditReport) -> Group:
    parts: list[RenderableType] = [_headline(report), _partitions(report)]
    parts.extend(_samples_table(d.value, report.samples_of(d)) for d in Damage if report.samples_of(d))
    if report.fingerprints is not None:
        parts.append(Text(f"fingerprints: {report.fingerprints.says}"))
    if report.history.batches:
        parts.append(_history(report))
    parts.extend(Text(f"  ledger: {fault}", style="yellow") for fault in report.history.faults)
    parts.extend(Text(f"  open transaction: {t}", style="yellow") for t in report.transactions)
    parts.extend(Text(f"  note: {note}", style="dim") for note in report.notes)
    return Group(*parts)


def as_text(report: AuditReport | ChainReport, width: int = 110) -> str:
    """The report as plain text."""
    text = io.StringIO()
    printer(file=text, width=width, color_system=None, force_jupyter=False).print(render(report))
    return text.getvalue().rstrip("\n")


def _render_chain(report: ChainReport) -> Group:
    table = Table(title=f"{' -> '.join(report.pipelines)}: {report.verdict.value}", title_justify="left")
    table.add_column("hop", overflow="fold")
    table.add_column("guarantee")
    for name in (*_CHAIN_COLUMNS, "under way"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    parts: list[RenderableType] = [table]
    for number, segment in enumerate((*report.hops, *report.ends)):
        if number == len(report.hops):
            table.add_section()
        one = segment.report
        style = _STYLE[one.verdict]
        counts = [f"{getattr(one.counts, name):,}" for name in _CHAIN_COLUMNS]
        under_way = "?" if segment.under_way is None else f"{segment.under_way:,}"
        verdict = Text(one.verdict.value, style=style)
        table.add_row(segment.name, one.guarantee.value, *counts, under_way, verdict)
        parts += [Text(f"{segment.name}: broken: {text}", style="red") for text in one.breaches]
        parts += [Text(f"{segment.name}: unknown: {text}", style="yellow") for text in one.unknowns]
        for damage in Damage:
            if samples := one.samples_of(damage):
                parts.append(_samples_table(f"{segment.name}: {damage.value}", samples))
        parts += [Text(f"{segment.name}: {text}", style="dim") for text in one.notes]
    return Group(*parts)


def _headline(report: AuditReport) -> Text:
    text = Text()
    text.append(f"{report.pipeline} -> {report.sink}: {report.guarantee.value} ")
    text.append(report.verdict.value, style=_STYLE[report.verdict])
    for breach in report.breaches:
        text.append(f"\n  broken: {breach}", style="red")
    for reason in report.unknowns:
        text.append(f"\n  unknown: {reason}", style="yellow")
    if report.continuation is not None:
        _append_seals(text, report.continuation)
    for line in report.keys.lines() if report.keys is not None else ():
        text.append(f"\n  {line}")
    if report.guarantee.may_lose:
        text.append(f"\n  given up, according to the ledger: {report.given_up:,}")
    if report.counts.in_progress:
        whose = "of undecided batches" if report.dedup is None else "may or may not be there"
        text.append(f"\n  {whose}: {report.counts.in_progress:,}")
    if report.counts.earlier:
        whose = "that the sink's retention reached"
        if report.late or report.earlier:
            whose = "with another transform, according to the ledger" if report.earlier else "that were sealed before"
        text.append(f"\n  of batches {whose}: {report.counts.earlier:,}")
    if report.own:
        text.append(f"\n  foreign records, for which {report.own} is not true: {report.foreign:,}")
    if report.dedup is not None:
        text.append(
            f"\n  duplicates in the source: {report.dedup.deduplicated:,} of {report.dedup.records:,} records; "
            f"unclear: {report.dedup.unclear:,} keys"
        )
    text.append(f"\n  records are identified by {report.id_says}")
    return text


def _append_seals(text: Text, sealed: Continuation) -> None:
    if (base := sealed.base) is not None:
        text.append(f"\n  sealed until batch {base.last} at {html.utc(base.sealed_at_ms)} UTC ({base.state.value})")
    if sealed.last < sealed.first:
        if not sealed.not_sealed:
            text.append("\n  no batch is new")
    else:
        by = f", sealed as number {sealed.seals[-1].number}" if sealed.seals else ""
        text.append(f"\n  this range: {batches_text(sealed.first, sealed.last)}{by}")
    for gap in sealed.unproved:
        style = "red" if gap["state"] == State.BROKEN else "yellow"
        batches = batches_text(gap["first"], gap["last"])
        text.append(f"\n  {gap['state']}: {batches}, {gap['records']:,} records: {gap['reason']}", style=style)
    if sealed.reads_all:
        text.append(f"\n  every audit of this sink reads all of it: {sealed.reads_all}", style="dim")
    for what in sealed.expired:
        text.append(f"\n  expired in the sink, sealed before: {what}", style="dim")
    if sealed.not_sealed:
        text.append(f"\n  not sealed: {sealed.not_sealed}", style="yellow")


def _partitions(report: AuditReport) -> Table:
    table = Table(title="records by source partition", title_justify="left", show_footer=len(report.partitions) > 1)
    total = report.counts
    table.add_column("partition", footer="all")
    for name in _COLUMNS:
        table.add_column(name, justify="right", footer=f"{getattr(total, name):,}")
    for line in report.partitions[:_PARTITIONS_SHOWN]:
        table.add_row(line.partition, *(f"{getattr(line.counts, name):,}" for name in _COLUMNS))
    if len(report.partitions) > _PARTITIONS_SHOWN:
        table.add_row(f"... {len(report.partitions) - _PARTITIONS_SHOWN} more", *([""] * len(_COLUMNS)))
    return table


def _samples_table(what: str, samples: list[Sample]) -> Table:
    """Damaged records, for a console."""
    table = Table(title=f"{what}, the first {len(samples)}", title_justify="left")
    for name in ("id", "key", "source", "sink"):
        table.add_column(name, overflow="fold")
    for name in ("sent", "found"):
        table.add_column(name, justify="right")
    for s in samples:
        texts = (one_line(text or "") for text in (s.id, s.key, s.source, s.sink))
        table.add_row(*texts, str(s.sent), str(s.delivered))
    return table


def _history(report: AuditReport) -> Table:
    lines = report.history.lines
    table = Table(title=f"ledger, the last {len(lines)} of {report.history.batches} batches kept", title_justify="left")
    table.add_column("batch", justify="right")
    table.add_column("decided at (UTC)")
    for name in ("shards", "records", "given up", "rewritten"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            str(line.batch),
            html.utc(line.decided_at_ms),
            str(line.shards),
            f"{line.records:,}",
            f"{line.given_up:,}",
            str(line.revision),
        )
    return table
