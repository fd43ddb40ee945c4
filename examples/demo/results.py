"""What the audits found: one table, one JSON file, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import origin
from examples.demo.killing import Life
from examples.demo.page import Row, page
from rich import box
from rich.table import Table

from delivered.audit.report import AuditReport, as_text

_COLUMNS = ("sent", "delivered", "lost", "duplicated", "given up")


@dataclass(frozen=True)
class Result:
    """One guarantee: what happened to the pipeline, and what the audit read."""

    report: AuditReport
    life: Life

    @property
    def row(self) -> Row:
        counts = self.report.counts
        return Row(
            guarantee=self.report.guarantee.value,
            sent=counts.sent,
            delivered=counts.delivered,
            lost=counts.lost,
            duplicated=counts.duplicated,
            given_up=self.report.given_up,
            verdict=self.report.verdict.value,
            kills=self.life.kills,
        )

    def to_json(self) -> dict[str, object]:
        row = self.row
        return {
            "guarantee": row.guarantee,
            "sent": row.sent,
            "delivered": row.delivered,
            "lost": row.lost,
            "duplicated": row.duplicated,
            "given_up": row.given_up,
            "kills": len(row.kills),
            "killed_at": list(row.kills),
            "verdict": row.verdict,
        }


def table(title: str, results: Sequence[Result]) -> Table:
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column("guarantee", no_wrap=True)
    for name in _COLUMNS:
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    for result in results:
        row = result.row
        numbers = (row.sent, row.delivered, row.lost, row.duplicated, row.given_up)
        style = "green" if row.verdict == "held" else "bold red"
        found.add_row(
            row.guarantee,
            *(f"{n:,}" for n in numbers),
            f"[{style}]{row.verdict}[/{style}]",
        )
    return found


def write(results: Sequence[Result], system: str, json_file: Path, page_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    stored = {"origin": origin(), "results": [r.to_json() for r in results]}
    json_file.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    kills = sum(len(r.life.kills) for r in results)
    sent = max((r.report.counts.sent for r in results), default=0)
    intro = (
        f"{sent:,} flights out of New York in 2013 went from {system}, through one pipeline per guarantee. Each was "
        f"killed with SIGKILL, the driver and all its workers, {kills} times in all, and started again. Then a Spark "
        "job read source and sink and compared them record by record."
    )
    details = [(f"audit of {r.row.guarantee}", as_text(r.report)) for r in results]
    text = page(f"{sent:,} flights, {kills} kills", intro, [r.row for r in results], details)
    page_file.write_text(text, encoding="utf-8")


def failures(results: Sequence[Result]) -> list[str]:
    """What the demo promised to show and did not."""
    found = []
    for result in results:
        row = result.row
        if row.verdict != "held":
            found.append(
                f"{row.guarantee}: {row.verdict}: {'; '.join([*result.report.breaches, *result.report.unknowns])}"
            )
        if row.guarantee == "at_least_once" and not row.duplicated:
            found.append("at_least_once: no duplicate appeared, so the kills met nothing")
        if row.guarantee == "at_most_once" and not row.lost:
            found.append("at_most_once: no loss appeared, so the kills met nothing")
    return found
