"""Upserts in an audit: whether the final state follows from the source, and what the report says of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from delivered.audit.report import AuditReport
from delivered.model.capability import WriteMode
from delivered.model.errors import Refused


def check(mode: WriteMode) -> None:
    """
    Raises:
        Refused: the final state does not follow from the source.
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
            next_step="compare the newest partitions with a query of your own",
        )
    if mode.upserts and mode.version is None:
        raise Refused(
            "AUDIT_ORDER",
            f"The sink keeps the last row of each key ({mode.keys_text}) by order of arrival. Which one came last is "
            "known to the batches that ran, not to the source, so the table cannot be held against it.",
            next_step='write with .option("versionColumn", ...), or delivered audit --recompute',
        )


def id_sql(mode: WriteMode) -> str:
    """SQL that identifies a key."""
    columns = ", ".join("`" + k.replace("`", "``") + "`" for k in mode.keys)
    return f"to_json(struct({columns}))"


def of_state(report: AuditReport, mode: WriteMode, unclear: int) -> AuditReport:
    """The report on a sink that keeps one row of each key."""
    notes = [
        *report.notes,
        f"the sink keeps one row of each key ({mode.keys_text}): compared is the row with the greatest {mode.version} "
        "of the source range, without keys whose last row deletes; rows in between are in the ledger's total alone",
    ]
    if unclear:
        notes.append(f"{unclear} keys are not judged: deleted and perhaps brought back by an older row, or in progress")
    prints = report.fingerprints
    return replace(report, notes=tuple(notes), fingerprints=replace(prints, ledger=None) if prints else None)
