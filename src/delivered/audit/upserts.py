"""Upserts in an audit: whether the source determines the final state, and the report on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from delivered.audit.classes import Damage
from delivered.audit.report import AuditReport
from delivered.model.capability import WriteMode
from delivered.model.errors import Refused
from delivered.model.ranges import backquoted


def check(mode: WriteMode, *, dedup: bool = False) -> None:
    """
    Raises:
        Refused: the source does not determine the final state.
    """
    if mode.complete:
        raise Refused(
            "AUDIT_ORDER",
            "Each batch replaces all rows of the table, so the ledger's total is not that of the table.",
            next_step="delivered audit --recompute",
        )
    if mode.replaces:
        raise Refused(
            "AUDIT_ORDER",
            f"Each batch replaces what the sink has of its values in {', '.join(mode.replaces)}. What is left of "
            "earlier batches is known to the batches that ran, not to the source, so the table cannot be held against "
            "it.",
            next_step="delivered audit --recompute",
        )
    if mode.expected is not None:
        raise Refused(
            "AUDIT_ORDER",
            f"A row is written only if the stored row has its {mode.expected}. Which rows matched is known only to the "
            "batches that ran, not from the source, so the table cannot be compared with it.",
            next_step="delivered audit --recompute; conflicts are counted in the ledger's table left_out",
        )
    if mode.insert and dedup:
        raise Refused(
            "AUDIT_ORDER",
            "Which of a key's rows came first is not judged together with a dedup.",
            next_step="compare the keys with a query of your own",
        )
    if mode.upserts and not mode.insert and mode.version is None:
        raise Refused(
            "AUDIT_ORDER",
            f"The sink keeps the last row of each key ({mode.keys_text}) by order of arrival. Which one came last is "
            "known only to the batches that ran, not from the source, so the table cannot be compared with it.",
            next_step='write with .option("versionColumn", ...), or delivered audit --recompute',
        )


def id_sql(mode: WriteMode) -> str:
    """SQL that identifies a key."""
    return f"to_json(struct({', '.join(map(backquoted, mode.keys))}))"


def of_state(report: AuditReport, mode: WriteMode, unclear: int) -> AuditReport:
    """The report on a sink that keeps one row per key."""
    notes = [
        *report.notes,
        f"the sink keeps one row of each key ({mode.keys_text}): compared is the row with the greatest {mode.version} "
        "of the source range, without keys whose last row deletes; rows in between are in the ledger's total alone",
    ]
    if unclear:
        notes.append(f"{unclear} keys are not judged: deleted and perhaps brought back by an older row, or in progress")
    prints = report.fingerprints
    return replace(report, notes=tuple(notes), fingerprints=replace(prints, ledger=None) if prints else None)


def of_conditional(report: AuditReport, mode: WriteMode, left_out: Mapping[str, int], handed: int) -> AuditReport:
    """The report on a table that decides which rows are written: rows that it rejected are not lost.

    The counts come from the transactions that wrote the rows. They excuse that many differences, and no more.

    Args:
        left_out: by kind, of all visible batches.
        handed: rows that these batches handed to the sink.
    """
    counts = report.counts
    conflict, constraint = left_out.get("conflict", 0), left_out.get("constraint", 0)
    # With insert: keys of which no row was written. Such a key existed before, or violated a constraint.
    excused = max(counts.sent - (handed - conflict - constraint), 0) if mode.insert else constraint
    lost = min(counts.lost, constraint, excused)
    altered = min(counts.altered, excused - lost)
    note = f"the table allowed all but {conflict + constraint:,} rows, by the ledger: {conflict:,} conflicts, "
    notes = [f"{note}{constraint:,} broken constraints"]
    if mode.insert:
        notes.append(
            f"compared is the first row of each key ({mode.keys_text}); of keys in several source partitions, any"
        )
    if altered:
        notes.append(f"{altered:,} keys hold another row than was sent: it stood there before, by the ledger's count")
    if lost:
        notes.append(f"{lost:,} rows are missing because they broke a constraint, by the ledger's count")
    explained = {Damage.LOST: counts.lost == lost, Damage.ALTERED: counts.altered == altered}
    return replace(
        report,
        counts=replace(counts, sent=counts.sent - lost, lost=counts.lost - lost, altered=counts.altered - altered),
        samples=tuple(s for s in report.samples if not explained.get(s.damage)),
        notes=(*report.notes, *notes),
        fingerprints=None if lost or altered else report.fingerprints,
    )
