"""Pipelines as HTML pages: an overview, a page for each, its dead letters; and all of it as one file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from delivered import html
from delivered.audit.seal import State
from delivered.checkpoint import batch_metadata
from delivered.checkpoint.history import SAMPLE_EVERY_S, Run, Sample, audits, batches, samples, states
from delivered.model.errors import DeliveredError
from delivered.model.identity import SOURCE, batches_text
from delivered.model.work import STEPS
from delivered.operate import chart
from delivered.operate.asking import look_at
from delivered.operate.chart import short
from delivered.operate.dead_letters import DeadLetter
from delivered.operate.rules import of_running_batch
from delivered.operate.status import Driver, Problem, SealStatus, Status, duration_text, records, span, summary
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import gather
from delivered.planner import Plan, make_plan


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


# The overview: those that need somebody first, or in the order of a column.

TROUBLE = "trouble"
_DRIVER_CSS = {Driver.RUNNING: "held", Driver.STOPPED: "soft", Driver.UNKNOWN: "unknown", Driver.ELSEWHERE: "soft"}
_FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        state: of the driver; "failed": its last run ended with an error. css: its class.
        since_ms: of that state, in milliseconds since 1970; None: unknown.
        dead, dead_new: dead letters, and those since somebody looked; None: it keeps none, or unknown.
        proved: its last seal or audit. proved_css: its verdict. proved_ms: when.
        href: of its own page.
    """

    status: Status
    state: str
    css: str
    since_ms: int | None
    dead: int | None
    dead_new: int
    proved: str
    proved_css: str
    proved_ms: int | None
    href: str = ""

    @classmethod
    def of(cls, s: Status, href: str = "") -> Row:
        state, css, since_ms = _driver_state(s)
        queues = [q.records for q in s.sinks if q.dead_letters]
        dead = None if not queues or None in queues else sum(q or 0 for q in queues)
        return cls(s, state, css, since_ms, dead, sum(d.count for d in s.new_dead_letters.values()), *_proved(s), href)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.status.problems

    @property
    def since(self) -> str:
        """For display: "3 h"."""
        return "" if self.since_ms is None else span(max(0.0, (self.status.asked_ms - self.since_ms) / 1000))

    @property
    def in_per_s(self) -> str:
        return "" if self.status.pace is None else short(self.status.pace.in_per_s)

    @property
    def out_per_s(self) -> str:
        return "" if self.status.pace is None else short(self.status.pace.out_per_s)

    @property
    def trend(self) -> str:
        """Of the lag: "grows", "shrinks", or empty."""
        pace = self.status.pace
        if pace is None or not pace.lag:
            return ""
        return "grows" if pace.grows else "shrinks" if pace.caught_up_s is not None else ""

    @property
    def lag_s(self) -> str:
        return "" if self.status.lag_s_max is None else span(self.status.lag_s_max)


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        name: in the query of an address.
        key: to sort by; None: unknown, which comes last.
        descending: the order that a first click gives: the largest first.
    """

    name: str
    title: str
    key: Callable[[Row], float | str | None]
    number: bool = False
    descending: bool = True


def _trouble(row: Row) -> float:
    return float(len(row.problems))


COLUMNS = (
    Column("name", "pipeline", lambda r: r.status.pipeline.lower(), descending=False),
    Column("state", "state", lambda r: r.state, descending=False),
    Column("since", "since", lambda r: r.since_ms),
    Column("in", "in, per s", lambda r: None if r.status.pace is None else r.status.pace.in_per_s, True),
    Column("out", "out, per s", lambda r: None if r.status.pace is None else r.status.pace.out_per_s, True),
    Column("lag_s", "lag, time", lambda r: r.status.lag_s_max, True),
    Column("lag", "lag, offsets", lambda r: r.status.lag_to_end, True),
    Column("dead", "dead letters", lambda r: r.dead, True),
    Column("proved", "sealed or audited", lambda r: r.proved_ms, descending=False),
)
_BY_NAME = {c.name: c for c in (*COLUMNS, Column(TROUBLE, "trouble", _trouble))}


@dataclass(frozen=True)
class Order:
    """As in an address: "lag" is the first click's order, "-lag" the other one."""

    column: Column = _BY_NAME[TROUBLE]
    reversed: bool = False

    @classmethod
    def parse(cls, text: str | None) -> Order:
        """Anything unknown: those that need somebody first."""
        name = (text or "").removeprefix("-")
        return cls(_BY_NAME[name], (text or "").startswith("-")) if name in _BY_NAME else cls()

    def next(self, column: Column) -> str:
        """What a click on this column asks for."""
        return f"-{column.name}" if column is self.column and not self.reversed else column.name

    def sign(self, column: Column) -> str:
        if column is not self.column:
            return ""
        return "▼" if column.descending is not self.reversed else "▲"

    def aria(self, column: Column) -> str:
        return {"▼": "descending", "▲": "ascending"}.get(self.sign(column), "none")

    def sorted(self, rows: Iterable[Row]) -> list[Row]:
        by_name = sorted(rows, key=lambda r: r.status.pipeline)
        descends = self.column.descending is not self.reversed
        known = [r for r in by_name if self.column.key(r) is not None]
        unknown = [r for r in by_name if self.column.key(r) is None]
        return [*sorted(known, key=lambda r: self.column.key(r) or 0, reverse=descends), *unknown]


def _driver_state(s: Status) -> tuple[str, str, int | None]:
    last = s.runs[-1] if s.runs else None
    if s.driver is Driver.RUNNING:
        return s.driver.value, "held", last.started_ms if last is not None and last.ended_ms is None else None
    ended_ms = None if last is None else last.ended_ms
    later = s.decided_at_ms is not None and ended_ms is not None and s.decided_at_ms > ended_ms
    if last is not None and last.has_failed and not later and s.driver is not Driver.ELSEWHERE:
        return _FAILED, "broken", ended_ms
    since_ms = s.decided_at_ms if later or ended_ms is None else ended_ms
    return s.driver.value, _DRIVER_CSS.get(s.driver, "soft"), since_ms if s.driver is Driver.STOPPED else None


def _proved(s: Status) -> tuple[str, str, int | None]:
    """Of the sink whose seal or audit is the oldest."""
    found: list[tuple[float, str, str]] = []
    for name, seals in s.seals.items():
        if seals.is_watched:
            if seals.last is None or seals.age_s is None:
                found.append((-math.inf, "never sealed", "unknown"))
            else:
                at_ms = s.asked_ms - seals.age_s * 1000
                state = seals.last.state
                css = {State.HELD: "held", State.BROKEN: "broken"}.get(state, "unknown")
                found.append((at_ms, f"sealed to {seals.last.last}, {span(seals.age_s)} ago", css))
        elif name in s.audits:
            found.append(_audited(s, s.audits[name]))
    found += [_audited(s, a) for name, a in s.audits.items() if name not in s.seals]
    if not found:
        return "", "soft", None
    at, text, css = min(found)
    return text, css, None if math.isinf(at) else int(at)


def _audited(s: Status, audit: Mapping[str, Any]) -> tuple[float, str, str]:
    at_ms, verdict = audit["at_ms"], audit["verdict"]
    return at_ms, f"audit {verdict}, {span(max(0.0, (s.asked_ms - at_ms) / 1000))} ago", verdict


# Pages.

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
