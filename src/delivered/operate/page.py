"""Pipelines as one HTML page: problems, how the data flows, batches by step, open transactions, seals, audits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from delivered import html
from delivered.audit.seal import State
from delivered.checkpoint.history import audits, batches
from delivered.model.errors import DeliveredError
from delivered.model.identity import batches_text
from delivered.model.work import STEPS, BatchReport
from delivered.operate.asking import look_at
from delivered.operate.seals import SealStatus, records
from delivered.operate.status import Status, summary
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import gather
from delivered.planner import Plan, make_plan

_FOLDER = Path(__file__).parent
_BATCHES = 60
_AUDITS = 20
_RANGES = 12
_DATE = len("2026-01-01 ")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 840, 150, 44, 18
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""Of the steps, in order: Okabe-Ito's."""


@dataclass(frozen=True)
class Flow:
    """How the data of a pipeline travels.

    Attributes:
        sources, sinks: label, "kafka orders", and the mechanism between it and the pipeline.
        mechanism: how the guarantee is kept; empty: the pipeline is refused, or its file cannot be read.
    """

    sources: tuple[tuple[str, str], ...] = ()
    sinks: tuple[tuple[str, str], ...] = ()
    mechanism: str = ""

    def html(self, pipeline: str, guarantee: str) -> html.Html:
        """Empty: the pipeline's file cannot be read."""
        how = f"{guarantee} by {self.mechanism}" if self.mechanism else guarantee
        return html.flow(self.sources, (pipeline, how), self.sinks) if self.sinks else html.Html()


def look_with_flow(paths: Sequence[Path]) -> list[tuple[Status, Flow]]:
    """The status of pipeline files, as `look` asks for it, with how the data of each travels."""
    return [(answer, flow or Flow()) for answer, flow in look_at(paths, flow_of)]


def flow_of(pipeline: Definition) -> Flow:
    """From the definition alone."""
    decides, mechanism = "", ""
    with contextlib.suppress(DeliveredError):
        request = gather(pipeline, None, offline=True, takeover=False)
        plan = make_plan(request)
        mechanism = plan.mechanism if isinstance(plan, Plan) else ""
        decides = request.by_count("", request.decider.name)
    sources = tuple((e.label if n == "source" else f"{n}: {e.label}", _read(e)) for n, e in pipeline.sources.items())
    return Flow(sources, tuple(_written(e, decides) for e in pipeline.all_sinks), mechanism)


def _read(endpoint: Endpoint) -> str:
    if endpoint.is_spark_own:
        return "Spark's own source"
    source = endpoint.source()
    if source.capability().received:
        return "receivers log, then acknowledge; ids recognised"
    return "offsets, replayable" if source.capability().replayable else "not replayable"


def _written(endpoint: Endpoint, decides: str) -> tuple[str, str]:
    sink = endpoint.sink()
    mechanism = sink.capability().mechanism
    label = f"{endpoint.name}: {endpoint.label}" if endpoint.name else endpoint.label
    return label, f"{mechanism}; decides for all" if (endpoint.name or sink.name) == decides else mechanism


def page(
    pipelines: Sequence[tuple[Status, Flow]],
    *,
    refresh_s: float | None = None,
    action: Callable[[int, str, bool], str] | None = None,
    links: Sequence[tuple[str, str]] = (),
    more: str = "",
) -> str:
    """
    Args:
        refresh_s: the page loads itself again after this long.
        action: the address that ends a transaction when it is posted to, by the pipeline's number here, the
            transaction's id, and whether to apply it; None: the page only names the command.
        links: text and address, at the top.
        more: at the end, escaped unless it is `Html`.

    Raises:
        MissingExtra: the extra `report` is not installed.
    """
    return html.page(
        "Pipelines",
        _FOLDER.joinpath("page.html").read_text(encoding="utf-8"),
        more_style=_FOLDER.joinpath("page.css").read_text(encoding="utf-8"),
        refresh_s=refresh_s,
        pipelines=[
            (s, flow, _bars(batches(s.checkpoint, _BATCHES)), audits(s.checkpoint, _AUDITS)) for s, flow in pipelines
        ],
        steps=tuple(zip(STEPS, _COLOURS, strict=True)),
        action=action,
        links=links,
        more=more,
        chain=chain_line,
        ranges_shown=_RANGES,
        summary=summary,
        at=html.utc,
        written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        troubled=sum(bool(s.problems) for s, _ in pipelines),
    )


@dataclass(frozen=True)
class Segment:
    """Of a chain of seals, as a line of time.

    Attributes:
        css: held, broken, unknown, never or unsealed.
        batches: how many; its width.
        label: "batches 0 to 41".
        text: what it is, with its figures and reasons.
        new: the first of its checkpoint, and not of all.
    """

    css: str
    batches: int
    label: str
    text: str
    new: bool = False


_CSS = {State.HELD: "held", State.BROKEN: "broken", State.UNKNOWN: "unknown", State.NEVER_AUDITED: "never"}


def chain_line(seals: SealStatus) -> list[Segment]:
    """Ranges of seals, oldest first, and what is not sealed yet."""
    segments: list[Segment] = []
    before = ""
    for r in seals.sealed.ranges:
        start, end = html.utc(r.sealed_from_ms), html.utc(r.sealed_at_ms)
        end = end.removeprefix(start[:_DATE])
        count = r.last_seal - r.first_seal + 1
        sealed = f"sealed {start}" if count == 1 else f"{count} seals, {start} to {end}"
        text = "; ".join((f"{r.state.value}: {records(r.records)}, {sealed}", *r.reasons))
        new = bool(before) and before != r.incarnation
        segments.append(Segment(_CSS[r.state], r.last - r.first + 1, batches_text(r.first, r.last), text, new))
        before = r.incarnation
    if seals.unsealed_batches:
        text = f"not sealed yet: {records(seals.unsealed_records)}; {seals.retention}"
        new = bool(seals.last) and seals.unsealed_from == 0
        last = seals.unsealed_from + seals.unsealed_batches - 1
        segments.append(Segment("unsealed", seals.unsealed_batches, batches_text(seals.unsealed_from, last), text, new))
    return segments


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
        what = f"batch {r.batch}, {sum(r.records.values()):,} records, {r.bytes / 1048576:,.1f} MiB"
        for name, colour in zip(STEPS, _COLOURS, strict=True):
            height = r.seconds.get(name, 0.0) / most * (room - 12)
            y -= height
            text = f"{what}: {name} {r.seconds.get(name, 0.0) * 1000:,.0f} ms"
            parts.append((x, y, step * 0.8, height, colour, text))
        missing = r.batch - reports[i - 1].batch - 1 if i else 0
        if r.rewritten or missing > 0:
            notes = [f"batch {r.batch}: {r.rewritten} shards written again"] if r.rewritten else []
            notes += [f"{missing} batches before {r.batch}: finished by a later start"] if missing > 0 else []
            marks.append((x + step * 0.4, "; ".join(notes)))
    scale = tuple((room - share * (room - 12), f"{most * share:.3g} s") for share in (0.0, 0.5, 1.0))
    return Bars(tuple(parts), tuple(marks), scale)
