"""Pipelines as one HTML page: what needs somebody, the way of the data, batches by step, open transactions, audits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from delivered import html
from delivered.checkpoint.history import audits, batches
from delivered.model.batch_report import STEPS, BatchReport
from delivered.model.errors import DeliveredError
from delivered.observe.status import Status
from delivered.observe.summary import summary
from delivered.pipeline.definition import Definition
from delivered.pipeline.facts import gather
from delivered.planner import Plan, make_plan

_FOLDER = Path(__file__).parent
_BATCHES = 60
_AUDITS = 20
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 840, 150, 44, 18
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""Of the steps, in order: Okabe-Ito's."""


@dataclass(frozen=True)
class Way:
    """How the data of a pipeline travels.

    Attributes:
        sources, sinks: labels: "kafka orders".
        mechanism: how the guarantee is kept; empty: the pipeline is refused, or its file cannot be read.
    """

    sources: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    mechanism: str = ""

    def html(self, guarantee: str) -> html.Html:
        """Empty: the pipeline's file cannot be read."""
        edge = f"{guarantee} by {self.mechanism}" if self.mechanism else guarantee
        return html.way(self.sources, edge, self.sinks) if self.sinks else html.Html()


def way_of(pipeline: Definition) -> Way:
    """From the definition alone."""
    try:
        plan = make_plan(gather(pipeline, None, offline=True, takeover=False))
    except DeliveredError:
        plan = None
    sources = tuple(e.label if n == "source" else f"{n}: {e.label}" for n, e in pipeline.sources.items())
    return Way(sources, tuple(e.label for e in pipeline.all_sinks), plan.mechanism if isinstance(plan, Plan) else "")


def page(
    found: Sequence[tuple[Status, Way]],
    *,
    refresh_s: float | None = None,
    action: Callable[[int, str, bool], str] | None = None,
) -> str:
    """
    Args:
        refresh_s: the page loads itself again after this long.
        action: the address that ends a transaction when it is posted to, by the pipeline's number here, the
            transaction's id, and whether to apply it; None: the page only names the command.

    Raises:
        MissingExtra: the extra `report` is not installed.
    """
    return html.page(
        "Pipelines",
        _FOLDER.joinpath("page.html").read_text(encoding="utf-8"),
        more_style=_FOLDER.joinpath("page.css").read_text(encoding="utf-8"),
        refresh_s=refresh_s,
        found=[(s, way, _bars(batches(s.checkpoint, _BATCHES)), audits(s.checkpoint, _AUDITS)) for s, way in found],
        steps=tuple(zip(STEPS, _COLOURS, strict=True)),
        action=action,
        summary=summary,
        at=html.utc,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        troubled=sum(bool(s.problems) for s, _ in found),
    )


@dataclass(frozen=True)
class Bars:
    """A chart of batches, drawn.

    Attributes:
        parts: x, y, width, height, colour, text of each part of a bar.
        marks: x, text of what happened at a batch: shards written again, batches that a later start finished.
        scale: y, text of lines.
    """

    parts: tuple[tuple[float, float, float, float, str, str], ...]
    marks: tuple[tuple[float, str], ...]
    scale: tuple[tuple[float, str], ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT


def _bars(reports: Sequence[BatchReport]) -> Bars | None:
    if not reports:
        return None
    most = max(sum(r.seconds.values()) for r in reports) or 1.0
    room, step = _HEIGHT - _BOTTOM, (_WIDTH - _LEFT) / max(len(reports), 20)
    parts, marks = [], []
    for i, r in enumerate(reports):
        x, y = _LEFT + i * step, float(room)
        rows = sum(r.records.values())
        for name, colour in zip(STEPS, _COLOURS, strict=True):
            height = r.seconds.get(name, 0.0) / most * (room - 12)
            y -= height
            text = f"batch {r.batch}, {rows:,} records: {name} {r.seconds.get(name, 0.0) * 1000:,.0f} ms"
            parts.append((x, y, step * 0.8, height, colour, text))
        missing = r.batch - reports[i - 1].batch - 1 if i else 0
        if r.rewritten or missing > 0:
            said = [f"batch {r.batch}: {r.rewritten} shards written again"] if r.rewritten else []
            said += [f"{missing} batches before {r.batch}: finished by a later start"] if missing > 0 else []
            marks.append((x + step * 0.4, "; ".join(said)))
    scale = tuple((room - share * (room - 12), f"{most * share:.3g} s") for share in (0.0, 0.5, 1.0))
    return Bars(tuple(parts), tuple(marks), scale)
