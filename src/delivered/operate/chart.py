"""Charts of a page: SVG without scripts or fonts of its own, in the page's colours, as wide as the screen.

The plot is stretched to its width; what must not be stretched (text, marks) is HTML around it. Altair would need a
JavaScript engine to draw the same (decision 133).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median_low

from delivered import html
from delivered.model.identity import batches_text
from delivered.model.work import STEPS, BatchReport

SERIES_MAX = 7
"""As many as there are colours."""
POINTS_MAX = 240
_W, _H = 1000, 100
_TICKS_X = 4
_OUTLIER = 4.0
"""Times what is usual, beyond which a value is cut off."""
_USUAL = 0.98
"""The share of a line's points that a scale must hold."""
_CUT_LABELS_MAX = 3
_BARS_MIN = 20


@dataclass(frozen=True)
class Series:
    """
    Attributes:
        points: milliseconds since 1970, and a value that is not negative; in order of time.
        total: of others in the chart.
    """

    name: str
    points: Sequence[tuple[int, float]]
    total: bool = False

    @property
    def most(self) -> float:
        return max((v for _, v in self.points), default=0.0)


@dataclass(frozen=True)
class Span:
    """Of time, in milliseconds since 1970. Two points that are further apart than `gap_ms` are not joined, unless the
    width of a chart does not show it."""

    start_ms: int
    end_ms: int
    gap_ms: int

    def x(self, at_ms: int) -> float:
        return (at_ms - self.start_ms) / max(1, self.end_ms - self.start_ms) * _W


def lines(title: str, series: Iterable[Series], span: Span, unit: str = "") -> html.Html:
    """A line for each series; of many, the largest. Empty: there is no point."""
    shown, others = _largest([s for s in series if s.points])
    if not shown:
        return html.Html()
    top, marks = _scale(shown, span, unit)
    parts = []
    for number, one in enumerate(shown):
        label = f"{one.name}: {short(one.points[-1][1])}{unit}, at most {short(one.most)}{unit}"
        path = " ".join(_path(_thinned(one.points, span), span, top))
        css = "total" if one.total else f"c{number}"
        parts.append(html.Html(f'<path class="{css}" d="{path}"><title>{html.text(label)}</title></path>'))
    entries = [_entry("total" if s.total else f"c{n}", s, unit) for n, s in enumerate(shown)]
    legend = html.joined((*entries, html.element("li", others) if others else ""))
    return _figure(title, parts, (short(top) + unit, short(top / 2) + unit, "0"), _times(span), marks, legend)


def _entry(css: str, series: Series, unit: str) -> html.Html:
    value = html.element("b", f"{short(series.points[-1][1])}{unit}")
    return html.element("li", html.joined((html.Html(f'<i class="{css}"></i>'), ident(series.name), " ", value)))


def batches(reports: Sequence[BatchReport]) -> html.Html:
    """A bar for each batch, by step. A batch that takes much longer than the others is cut off, with its time above it.
    Empty: there is none."""
    if not reports:
        return html.Html()
    took = [sum(r.seconds.values()) for r in reports]
    limit = _OUTLIER * median_low(took)
    is_cut = max(took) > limit > 0
    top = nice(max(t for t in took if t <= limit) if is_cut else max(took))
    step = _W / max(len(reports), _BARS_MIN)
    parts, marks = [], list[Mark]()
    for i, (r, seconds) in enumerate(zip(reports, took, strict=True)):
        parts += [_rect(i * step, *part, step) for part in _stack(r, top)]
        at = (i + 0.4) * step / _W
        if seconds > top:
            parts.append(
                html.Html(f'<rect class="cut" x="{i * step:.1f}" y="12" width="{step * 0.8:.1f}" height="4"/>')
            )
            marks.append(Mark(at, f"{seconds:.3g} s", f"batch {r.batch}: {seconds:.3g} s", top=True))
        if what := _repairs(r, reports[i - 1] if i else None):
            marks.append(Mark(at, "▲", what))
    legend = [html.Html(f'<li><i class="c{n}"></i>{name}</li>') for n, name in enumerate(STEPS)]
    if is_cut:
        legend.append(html.Html("<li>cut off: a batch that took longer than the scale, with its time</li>"))
    if any(not m.top for m in marks):
        legend.append(html.Html("<li>▲ finished or repaired by a later start</li>"))
    first, last = reports[0].batch, reports[-1].batch
    ends = (f"batch {first}", f"batch {last}") if len(reports) >= _BARS_MIN else (batches_text(first, last),)
    scale = (f"{top:.3g} s", f"{top / 2:.3g} s", "0")
    title = "Time of the newest batches, by step"
    return _figure(title, parts, scale, ends, _readable(marks), html.joined(legend), css="bars")


@dataclass(frozen=True)
class Mark:
    """Above or below a plot.

    Attributes:
        at: share of the width.
        text: shown. title: shown when it is pointed at.
    """

    at: float
    text: str
    title: str
    top: bool = False


def ident(text: str) -> html.Html:
    """An id, topic or path: its lines break after its separators."""
    return html.Html(html.text(text).replace("-", "-<wbr>").replace("/", "/<wbr>").replace("_", "_<wbr>")
                     .replace(".", ".<wbr>").replace(":", ":<wbr>"))  # fmt: skip


def short(value: float) -> str:
    """For display, in at most six characters: "0.25", "12", "10.6k", "3.2M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def nice(value: float) -> float:
    """The next round number, half of which is one, too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while value < power:
        power /= 10
    return next(m * power for m in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if m * power >= value * 0.999999)


def _scale(shown: Sequence[Series], span: Span, unit: str) -> tuple[float, list[Mark]]:
    """The scale's end, and, where a short peak is cut off by it, the peak's value."""
    most = max(s.most for s in shown)
    values = sorted(v for s in shown for _, v in s.points)
    usual = values[int(len(values) * _USUAL)] if len(values) >= _BARS_MIN else most
    if most <= _OUTLIER * usual or not usual:
        return nice(most), []
    at, value = max((p for s in shown for p in s.points), key=lambda p: p[1])
    text = f"{short(value)}{unit}"
    return nice(usual * 1.5), [Mark(span.x(at) / _W, text, f"cut off: {text}", top=True)]


def _largest(series: Sequence[Series]) -> tuple[list[Series], str]:
    """As many as there are colours, and what is said of the others."""
    parts, totals = [s for s in series if not s.total], [s for s in series if s.total]
    if len(parts) <= SERIES_MAX:
        return [*parts, *totals], ""
    parts = sorted(parts, key=lambda s: -s.most)
    others = f"{len(parts) - SERIES_MAX} others, at most {short(parts[SERIES_MAX].most)}"
    return [*parts[:SERIES_MAX], *totals], others


def _thinned(points: Sequence[tuple[int, float]], span: Span) -> list[tuple[int, float]]:
    """At most `POINTS_MAX`, the highest of each part of the time: a peak stays."""
    highest: dict[int, tuple[int, float]] = {}
    for at, value in points:
        bucket = int(span.x(at) / _W * POINTS_MAX)
        if bucket not in highest or value >= highest[bucket][1]:
            highest[bucket] = (at, value)
    return [highest[b] for b in sorted(highest)]


def _path(points: Sequence[tuple[int, float]], span: Span, top: float) -> Iterator[str]:
    before: int | None = None
    gap_ms = max(span.gap_ms, 2.5 * (span.end_ms - span.start_ms) / POINTS_MAX)
    for at, value in points:
        joined = before is not None and at - before <= gap_ms
        x, y = span.x(at), _H - min(value / top, 1.0) * _H
        yield f"L{x:.1f} {y:.2f}" if joined else f"M{x:.1f} {y:.2f}h.1"
        before = at


def _stack(report: BatchReport, top: float) -> Iterator[tuple[float, float, int, str]]:
    """y, height, colour and text of each part of a bar, from below; nothing above the scale."""
    what = f"batch {report.batch}, {sum(report.records.values()):,} records, {report.bytes / 1048576:,.1f} MiB"
    below = 0.0
    for number, name in enumerate(STEPS):
        seconds = report.seconds.get(name, 0.0)
        height = min(seconds / top, 1.0 - below) * _H
        if height > 0:
            below += height / _H
            yield _H - below * _H, height, number, f"{what}: {name} {seconds * 1000:,.0f} ms"


def _rect(x: float, y: float, height: float, colour: int, text: str, step: float) -> html.Html:
    return html.Html(
        f'<rect class="c{colour}" x="{x:.1f}" y="{y:.2f}" width="{step * 0.8:.1f}" height="{height:.2f}">'
        f"<title>{html.text(text)}</title></rect>"
    )


def _repairs(report: BatchReport, before: BatchReport | None) -> str:
    missing = report.batch - before.batch - 1 if before is not None else 0
    repairs = [f"batch {report.batch}: {report.rewritten} shards written again"] if report.rewritten else []
    repairs += [f"{missing} batches before {report.batch}: finished by a later start"] if missing > 0 else []
    return "; ".join(repairs)


def _readable(marks: Sequence[Mark]) -> list[Mark]:
    """Of the times above the plot, the longest that leave each other room; of the others, the bar says it."""
    kept = [m for m in marks if not m.top]
    above: list[Mark] = []
    for mark in sorted((m for m in marks if m.top), key=lambda m: -float(m.text.split()[0])):
        if len(above) < _CUT_LABELS_MAX and all(abs(mark.at - other.at) > 0.2 for other in above):
            above.append(mark)
    return kept + above


def _times(span: Span) -> tuple[str, ...]:
    """UTC; with the date where the span holds more than a day."""
    shape = "%H:%M" if span.end_ms - span.start_ms <= 86_400_000 else "%m-%d %H:%M"
    steps = ((span.end_ms - span.start_ms) * i // (_TICKS_X - 1) for i in range(_TICKS_X))
    return tuple(datetime.fromtimestamp((span.start_ms + s) / 1000, UTC).strftime(shape) for s in steps)


def _figure(
    title: str,
    parts: Iterable[html.Html],
    scale: Sequence[str],
    below: Sequence[str],
    marks: Sequence[Mark],
    legend: html.Html,
    css: str = "lines",
) -> html.Html:
    def mark(m: Mark) -> html.Html:
        side = "right: 0" if m.at > 0.9 else f"left: {m.at * 100:.1f}%"
        edge = " edge" if m.at > 0.9 or (m.at < 0.06 and m.top) else ""
        where = f'class="{"above" if m.top else "below"}{edge}" style="{side}"'
        return html.Html(f'<span {where} title="{html.text(m.title)}">{html.text(m.text)}</span>')

    grid = html.Html("".join(f'<line class="grid" x1="0" x2="{_W}" y1="{y}" y2="{y}"/>' for y in (0, _H / 2, _H)))
    head = f'<svg viewBox="0 0 {_W} {_H}" preserveAspectRatio="none" role="img" aria-label="'
    plot = html.joined((html.Html(f'{head}{html.text(title)}">'), grid, *parts, html.Html("</svg>"), *map(mark, marks)))
    inner = (
        html.element("figcaption", title),
        html.element("div", html.joined(html.element("span", s) for s in scale), "y"),
        html.element("div", plot, "plot"),
        html.element("div", html.joined(html.element("span", b) for b in below), "x"),
        html.element("ul", legend, "legend"),
    )
    return html.element("figure", html.joined(inner), f"chart {css}")
