"""The audit of a chain of pipelines, each of which reads what the one before it wrote. Pure."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delivered import html
from delivered.audit.classes import Damage, Verdict
from delivered.audit.report import FORMAT, STYLE, AuditReport, samples_table
from delivered.contract.powers import Address
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee
from delivered.terminal import printer

_COLUMNS = ("sent", "delivered", "lost", "duplicated", "altered", "unexpected")


@dataclass(frozen=True)
class Stretch:
    """One hop, or the whole chain to one of its ends.

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
    hops: tuple[Stretch, ...]
    ends: tuple[Stretch, ...]

    @property
    def verdict(self) -> Verdict:
        """False beats unknown beats true."""
        found = {s.report.verdict for s in (*self.hops, *self.ends)}
        return next(v for v in (Verdict.BROKEN, Verdict.UNKNOWN, Verdict.HELD) if v in found)

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
        text = io.StringIO()
        printer(file=text, width=130, color_system=None, force_jupyter=False).print(render_chain(self))
        return text.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """The same tables, for a notebook."""
        return html.fragment(html.from_rich(render_chain(self)))


def render_chain(report: ChainReport) -> Group:
    """The whole report, for a console."""
    table = Table(title=f"{' -> '.join(report.pipelines)}: {report.verdict.value}", title_justify="left")
    table.add_column("hop", overflow="fold")
    table.add_column("guarantee")
    for name in (*_COLUMNS, "under way"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    parts: list[RenderableType] = [table]
    for number, stretch in enumerate((*report.hops, *report.ends)):
        if number == len(report.hops):
            table.add_section()
        found = stretch.report
        style = STYLE[found.verdict]
        counts = [f"{getattr(found.counts, name):,}" for name in _COLUMNS]
        way = "?" if stretch.under_way is None else f"{stretch.under_way:,}"
        verdict = Text(found.verdict.value, style=style)
        table.add_row(stretch.name, found.guarantee.value, *counts, way, verdict)
        parts += [Text(f"{stretch.name}: broken: {text}", style="red") for text in found.breaches]
        parts += [Text(f"{stretch.name}: unknown: {text}", style="yellow") for text in found.unknowns]
        for damage in Damage:
            if samples := found.samples_of(damage):
                parts.append(samples_table(f"{stretch.name}: {damage.value}", samples))
        parts += [Text(f"{stretch.name}: {text}", style="dim") for text in found.notes]
    return Group(*parts)


def linked(
    names: Sequence[str], sinks: Sequence[Sequence[Address | None]], sources: Sequence[Address | None]
) -> list[int]:
    """Which sink of each pipeline but the last the next pipeline reads.

    A sink and a source are linked if they name the same system, share a server as it is written, and the source reads a
    topic or table that the sink writes.

    Args:
        sinks: of each pipeline; None: the connector does not say where it writes.
        sources: the only source of each pipeline.

    Raises:
        UsageError: fewer than two pipelines, two that are not linked, or one that writes there twice.
    """
    if len(names) < 2:
        raise UsageError(
            "CHAIN_SHORT",
            f"A chain has at least two pipelines; there are {len(names)}.",
            next_step="name them in the order of the data: delivered audit --chain relay.yaml enrich.yaml",
        )
    chosen = []
    for at, (before, after) in enumerate(pairwise(names)):
        source = sources[at + 1]
        found = [
            i for i, sink in enumerate(sinks[at]) if sink is not None and source is not None and sink.meets(source)
        ]
        if len(found) != 1:
            writes = ", ".join(str(s) if s is not None else "?" for s in sinks[at])
            raise UsageError(
                "CHAIN_LINK",
                f"{after} reads {source if source is not None else '?'}; {before} writes to {writes}: "
                + ("these are not the same place." if not found else "more than one of its sinks is this place."),
                next_step="name the pipelines in the order of the data, each reading what the one before it writes, "
                "with servers and names written alike (?: a system that cannot be in the middle of a chain)",
            )
        chosen += found
    return chosen


def own_through(reports: Sequence[AuditReport]) -> str:
    """SQL that is true for rows that the first pipeline's source sent; empty: others may have sent some in between.

    Args:
        reports: of each hop to one end.
    """
    *before, last = reports
    return last.own if all(r.all_own and not r.foreign for r in before) else ""


def weakest(guarantees: Sequence[Guarantee]) -> tuple[Guarantee, tuple[Damage, ...]]:
    """What a chain promises, and which damage proves nothing because another hop allows it."""
    loses, doubles = any(g.may_lose for g in guarantees), any(g.may_duplicate for g in guarantees)
    if doubles:
        return Guarantee.AT_LEAST_ONCE, (Damage.LOST,) if loses else ()
    return Guarantee.AT_MOST_ONCE if loses else Guarantee.EXACTLY_ONCE, ()
