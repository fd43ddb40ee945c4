"""The report as text."""

from __future__ import annotations

import io
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from delivered.audit.classes import Damage, Verdict
from delivered.audit.report import AuditReport, Sample

_PARTITIONS_SHOWN = 50
_STYLE = {Verdict.HELD: "bold green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "bold yellow"}
_ELEMENT = '<pre style="font-family: monospace; line-height: 1.2">{code}</pre>'
_COLUMNS = ("sent", "delivered", "lost", "duplicated", "altered", "unexpected", "reordered")


def render(report: AuditReport) -> RenderableType:
    """The whole report, for a console."""
    parts: list[RenderableType] = [_headline(report), _partitions(report)]
    parts.extend(_samples(damage, report.samples_of(damage)) for damage in Damage if report.samples_of(damage))
    if report.fingerprints is not None:
        parts.append(Text(f"fingerprints: {report.fingerprints.says}"))
    if report.history.batches:
        parts.append(_history(report))
    parts.extend(Text(f"  ledger: {fault}", style="yellow") for fault in report.history.faults)
    parts.extend(Text(f"  open transaction: {t}", style="yellow") for t in report.transactions)
    parts.extend(Text(f"  note: {note}", style="dim") for note in report.notes)
    return Group(*parts)


def as_text(report: AuditReport, width: int = 110) -> str:
    """The whole report as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(render(report))
    file = console.file
    return file.getvalue() if isinstance(file, io.StringIO) else ""


def as_html(report: AuditReport, width: int = 110) -> str:
    """The whole report as one HTML element, in colour; all text in it is escaped."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True, force_jupyter=False)
    console.print(render(report))
    return console.export_html(inline_styles=True, code_format=_ELEMENT)


def _headline(report: AuditReport) -> Text:
    text = Text()
    text.append(f"{report.pipeline} -> {report.sink}: {report.guarantee.value} ")
    text.append(report.verdict.value, style=_STYLE[report.verdict])
    for breach in report.breaches:
        text.append(f"\n  broken: {breach}", style="red")
    for reason in report.unknowns:
        text.append(f"\n  unknown: {reason}", style="yellow")
    if report.guarantee.may_lose:
        text.append(f"\n  given up, according to the ledger: {report.given_up:,}")
    if report.counts.in_progress:
        whose = "of undecided batches" if report.dedup is None else "may or may not be there"
        text.append(f"\n  {whose}: {report.counts.in_progress:,}")
    if report.counts.earlier:
        text.append(f"\n  of batches with another transform, according to the ledger: {report.counts.earlier:,}")
    if report.own:
        text.append(f"\n  foreign records, for which {report.own} is not true: {report.foreign:,}")
    if report.dedup is not None:
        text.append(
            f"\n  duplicates in the source: {report.dedup.deduplicated:,} of {report.dedup.records:,} records; "
            f"unclear: {report.dedup.unclear:,} keys"
        )
    text.append(f"\n  records are identified by {report.id_says}")
    return text


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


def _samples(damage: Damage, samples: list[Sample]) -> Table:
    table = Table(title=f"{damage.value}, the first {len(samples)}", title_justify="left")
    for name in ("id", "key", "source", "sink"):
        table.add_column(name, overflow="fold")
    for name in ("sent", "found"):
        table.add_column(name, justify="right")
    for s in samples:
        table.add_row(s.id, s.key or "", s.source or "", s.sink or "", str(s.sent), str(s.delivered))
    return table


def _history(report: AuditReport) -> Table:
    lines = report.history.lines
    table = Table(title=f"ledger, the last {len(lines)} of {report.history.batches} batches kept", title_justify="left")
    table.add_column("batch", justify="right")
    table.add_column("decided at (UTC)")
    for name in ("shards", "records", "given up", "rewritten"):
        table.add_column(name, justify="right")
    for line in lines:
        at = datetime.fromtimestamp(line.decided_at_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
        table.add_row(
            str(line.batch),
            at.removesuffix("+00:00"),
            str(line.shards),
            f"{line.records:,}",
            f"{line.given_up:,}",
            str(line.revision),
        )
    return table
