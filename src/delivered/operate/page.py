"""Pipelines as HTML pages: an overview, a page for each, its dead letters; and all of it as one file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from delivered import html
from delivered.audit.seal import State
from delivered.checkpoint.folder import batch_metadata
from delivered.checkpoint.history import SAMPLE_EVERY_S, Run, Sample, audits, batches, samples, states
from delivered.model.errors import DeliveredError
from delivered.model.identity import SOURCE, batches_text
from delivered.model.work import STEPS
from delivered.operate import chart
from delivered.operate.asking import look_at
from delivered.operate.dead_letters import DeadLetter
from delivered.operate.flow import Flow, flow_of
from delivered.operate.overview import COLUMNS, TROUBLE, Order, Row
from delivered.operate.pace import duration_text
from delivered.operate.rules import of_running_batch
from delivered.operate.seals import SealStatus, records, span
from delivered.operate.status import Driver, Status, summary

_FOLDER = Path(__file__).parent
_BATCHES = 60
_BATCHES_LISTED = 12
_AUDITS = 20
_RANGES = 12
_RUNS = 15
_SAMPLES_MAX = 20_000
_STATES_MAX = 5_000
_DATE = len("2026-01-01 ")
_HOUR_MS = 3_600_000
_GAP_S = 30.0
"""Without a sample, beyond which no line is drawn: no batch was planned."""
_RECORD_LENGTH_MAX = 2_000
HOURS = (1, 6, 24)
"""That the charts of a page can show."""


def look_with_flow(paths: Sequence[Path]) -> list[tuple[Status, Flow]]:
    """The status of pipeline files, as `look` asks for it, with how the data of each travels."""
    return [(answer, flow or Flow()) for answer, flow in look_at(paths, flow_of)]


@dataclass(frozen=True)
class Actions:
    """Of a page that is served: where its forms are sent to.

    Attributes:
        csrf: a secret of the server, which each form carries: only a page of this server knows it.
        end: the address that ends a transaction, by its id and whether to apply it.
        settle: by "retry", "drop" and "read", the address that does so with dead letters.
    """

    csrf: str
    end: Callable[[str, bool], str]
    settle: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """What is around the content of a served page.

    Attributes:
        refresh_s: the page loads itself again after this long; None: it does not.
        links: text and address, at the top.
    """

    refresh_s: float | None = None
    links: Sequence[tuple[str, str]] = ()


def page(pipelines: Sequence[tuple[Status, Flow]], *, more: str = "") -> str:
    """All in one file, which needs no server: the overview, then each pipeline.

    Args:
        more: at the end, escaped unless it is `Html`.

    Raises:
        MissingExtra: the extra `report` is not installed.
    """
    rows = [Row.of(s, f"#{_anchor(n)}") for n, (s, _) in enumerate(pipelines)]
    parts = [_overview(rows, Order(), None)]
    for n, (s, flow) in enumerate(pipelines):
        head = html.Html(f'<section id="{_anchor(n)}"><h2>{html.text(s.pipeline)} ')
        parts += [head, html.element("small", s.guarantee), html.Html("</h2>"), _pipeline(s, flow, None, None, 1)]
        parts.append(html.Html("</section>"))
    return _page("Pipelines", html.joined((*parts, more)), Frame())


def overview(
    rows: Sequence[Row], *, order: Order, frame: Frame, link: Callable[[str], str], waiting: int = 0, more: str = ""
) -> str:
    """All pipelines in one table, each a link to its own page.

    Args:
        link: the address of this page in another order.
        waiting: pipelines that were not answered yet.

    Raises:
        MissingExtra: as for `page`.
    """
    return _page("Pipelines", html.joined((_overview(rows, order, link, waiting), more)), frame)


def pipeline_page(
    s: Status,
    flow: Flow,
    *,
    frame: Frame,
    actions: Actions | None = None,
    dead_letters: str | None = None,
    hours: int = HOURS[0],
    link: Callable[[int], str] | None = None,
) -> str:
    """
    Args:
        actions: None: the page only names the commands.
        dead_letters: the address of the page that lists them.
        hours: that rate and lag are shown for.
        link: the address of this page for that many hours.

    Raises:
        MissingExtra: as for `page`.
    """
    head = html.element("p", s.guarantee, "made")
    spans = html.Html()
    if link is not None:
        choices = [html.element("b", f"{h} h") if h == hours else _link(f"{h} h", link(h)) for h in HOURS]
        spans = html.element("p", html.joined(("Rate and lag of the last ", *_apart(choices))), "legend")
    return _page(s.pipeline, html.joined((head, _pipeline(s, flow, actions, dead_letters, hours, spans))), frame)


def dead_letters_page(
    pipeline: str,
    listed: Sequence[DeadLetter],
    *,
    file: str,
    frame: Frame,
    actions: Actions | None,
    seen: Mapping[str, int],
    more: bool,
    settled: bool,
) -> str:
    """
    Args:
        file: of the pipeline, for commands.
        seen: by sink, how many there were before they were read.
        more: there are more than these.
        settled: those that were retried or dropped are among them.

    Raises:
        MissingExtra: as for `page`.
    """
    body = html.part(
        _FOLDER.joinpath("dead-letters.html").read_text(encoding="utf-8"),
        listed=listed, file=file, actions=actions, seen=seen, more=more, settled=settled,
        ident=chart.ident, length_max=_RECORD_LENGTH_MAX,
    )  # fmt: skip
    return _page(f"Dead letters of {pipeline}", body, frame)


def message_page(title: str, message: html.Html, frame: Frame) -> str:
    return _page(title, message, frame)


def _page(title: str, content: html.Html, frame: Frame) -> str:
    links = _apart(
        [html.Html(f'<a href="{html.text(address)}">{html.text(text)}</a>') for text, address in frame.links]
    )
    return html.page(
        title,
        '<p class="made">{{ now }} UTC{% if links %} &middot; {{ links }}{% endif %}</p>{{ content }}',
        more_style=_FOLDER.joinpath("page.css").read_text(encoding="utf-8"),
        refresh_s=frame.refresh_s,
        content=content,
        links=html.joined(links),
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )


def _link(text: str, address: str) -> html.Html:
    return html.Html(f'<a href="{html.text(address)}">{html.text(text)}</a>')


def _apart(parts: Sequence[html.Html]) -> list[html.Html]:
    return [html.joined((html.Html(" &middot; ") if n else "", part)) for n, part in enumerate(parts)]


def _anchor(number: int) -> str:
    return f"pipeline-{number}"


def _overview(rows: Sequence[Row], order: Order, link: Callable[[str], str] | None, waiting: int = 0) -> html.Html:
    return html.part(
        _FOLDER.joinpath("overview.html").read_text(encoding="utf-8"),
        rows=order.sorted(rows), columns=COLUMNS, order=order, link=link, waiting=waiting, trouble=TROUBLE,
        ident=chart.ident, troubled=sum(bool(r.problems) for r in rows),
    )  # fmt: skip


def _pipeline(
    s: Status, flow: Flow, actions: Actions | None, dead_letters: str | None, hours: int, spans: html.Html | None = None
) -> html.Html:
    newest = batches(s.checkpoint, _BATCHES) if s.checkpoint else []
    return html.part(
        _FOLDER.joinpath("page.html").read_text(encoding="utf-8"),
        s=s, flow=flow.html(s.pipeline, s.guarantee), summary=summary(s), actions=actions, dead_letters=dead_letters,
        rates=_rates(s, hours) if s.checkpoint else html.Html(), spans=spans or "",
        bars=chart.batches(newest), newest=newest[-_BATCHES_LISTED:], steps=STEPS,
        runs=[(r, _outcome(r, n == 0, s.driver)) for n, r in enumerate(reversed(s.runs[-_RUNS:]))],
        runs_more=max(0, len(s.runs) - _RUNS), transactions=[(t, _end(s, t)) for t in s.transactions or ()],
        watermark=_watermark(s), state=_state(s), audited=audits(s.checkpoint, _AUDITS) if s.checkpoint else [],
        chain=chain_line, ranges_shown=_RANGES, at=html.utc, ident=chart.ident, lasted=_lasted,
    )  # fmt: skip


def _end(s: Status, t: Any) -> str:
    """What an operator may do about an open transaction: "apply", "abort"; empty: its driver ends it."""
    return "" if of_running_batch(s, t) else "apply" if t.decided else "abort"


def _outcome(run: Run, is_newest: bool, driver: Driver) -> tuple[str, str]:
    """How a run ended, and its class."""
    if run.has_failed:
        return "failed", "broken"
    if run.ended_ms is not None:
        return "stopped", "soft"
    if not is_newest:
        return "killed", "broken"
    return {
        Driver.RUNNING: ("running", "held"),
        Driver.STOPPED: ("killed", "broken"),
    }.get(driver, ("no end known", "unknown"))


def _lasted(run: Run) -> str:
    return "" if run.ended_ms is None else duration_text(max(0.0, (run.ended_ms - run.started_ms) / 1000))


# Rate and lag.


def _rates(s: Status, hours: int) -> html.Html:
    kept = samples(s.checkpoint, _SAMPLES_MAX)
    start_ms = s.asked_ms - hours * _HOUR_MS
    inside = [k for k in kept if start_ms <= k.at_ms <= s.asked_ms]
    if not inside:
        if not kept:
            return html.Html()
        return html.element("p", f"No batch was planned since {html.utc(kept[-1].at_ms)} UTC.", "soft")
    # A young pipeline fills the width, too.
    start_ms = max(start_ms, min(inside[0].at_ms, s.asked_ms - _HOUR_MS // 12))
    times = chart.Span(start_ms, s.asked_ms, int(_GAP_S * 1000))
    several = len({k.source for k in inside}) > 1
    lag, out, arrived = _series(inside, several)
    many = len(out) > 1
    totals = [chart.Series("in, all" if many else "in", arrived, total=True)] if arrived else []
    return html.joined((
        chart.lines("Lag, in offsets", lag, times),
        chart.lines("Offsets delivered per second; and how many arrived", [*out, *totals], times, "/s"),
    ))  # fmt: skip


def _series(
    inside: Sequence[Sample], several: bool
) -> tuple[list[chart.Series], list[chart.Series], list[tuple[int, float]]]:
    """Lag and rate of each partition, and what arrived in all."""
    lag: dict[str, list[tuple[int, float]]] = {}
    out: dict[str, list[tuple[int, float]]] = {}
    arrived: list[tuple[int, float]] = []
    for source in sorted({k.source for k in inside}):
        own = [k for k in inside if k.source == source]
        prefix = f"{source} " if several and source != SOURCE else ""
        for k in own:
            for partition, value in k.lag.items():
                lag.setdefault(prefix + partition, []).append((k.at_ms, float(value)))
        for before, after in pairwise(own):
            seconds = (after.at_ms - before.at_ms) / 1000
            if not 0 < seconds <= max(_GAP_S, 2 * SAMPLE_EVERY_S):
                continue
            for partition, count in after.read.items():
                out.setdefault(prefix + partition, []).append((after.at_ms, count / seconds))
            grown = after.read_total + after.lag_total - before.lag_total
            arrived.append((after.at_ms, max(0.0, grown / seconds)))
    if several:
        arrived = []  # sources are sampled at different times: a sum would be of no moment
    return [chart.Series(n, p) for n, p in lag.items()], [chart.Series(n, p) for n, p in out.items()], arrived


# What Spark says of a stateful query.


def _watermark(s: Status) -> tuple[str, str] | None:
    """The watermark of the newest batch, and how old it is; None: the query has none."""
    if s.batch is None or not s.checkpoint:
        return None
    with contextlib.suppress(DeliveredError, ValueError, TypeError):
        found = batch_metadata(s.checkpoint, s.batch) or {}
        at_ms = int(found.get("batchWatermarkMs", 0))
        if at_ms > 0:
            return html.utc(at_ms), span(max(0.0, s.asked_ms / 1000 - at_ms / 1000))
    return None


def _state(s: Status) -> dict[str, Any] | None:
    kept = states(s.checkpoint, _STATES_MAX) if s.checkpoint else []
    if not kept:
        return None
    last = kept[-1]
    start_ms = max(kept[0].at_ms, s.asked_ms - 24 * _HOUR_MS)
    times = chart.Span(start_ms, max(s.asked_ms, start_ms + 1), 24 * _HOUR_MS)
    series = {o: [(k.at_ms, float(k.rows.get(o, 0))) for k in kept if k.at_ms >= start_ms] for o in last.rows}
    drawn = chart.lines("Rows of state, by operator", [chart.Series(o, p) for o, p in series.items()], times)
    rows = [(o, n, last.bytes.get(o, 0) / 1048576, sum(k.late.get(o, 0) for k in kept)) for o, n in last.rows.items()]
    return {"rows": rows, "batch": last.batch, "chart": drawn if len(kept) > 1 else ""}


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
