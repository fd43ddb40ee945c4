"""Runs of `delivered verify`, each kept as it was, and their pages: verdicts, reasons, a timeline per case, and how to
rerun each.

runs/<when>.json    rewritten after every case, so that a killed run is listed too
runs/<when>.html    the run's own page with its timelines, self-contained
index.html          every run of the folder, newest first

No network access, no scripts. Verdicts are words and shapes as well as colours of the Okabe-Ito palette, on a light and
on a dark page. Timelines are drawn by hand: with Altair and vl-convert one takes 240 ms and 10 kB instead of 0.3 ms and
1.5 kB, which is six minutes for a page of all stored cases.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from delivered import UsageError, html
from delivered_lab.verify.case import Result
from delivered_lab.verify.evidence import End, Operation, load
from delivered_lab.verify.faults import PLACES
from delivered_lab.verify.judge import RECOVERY_RATIO_MAX, Verdict
from delivered_lab.verify.matrix import FORMAT, GUARANTEES, read_results, write_file
from delivered_lab.verify.provenance import versions

_WIDTH, _LEFT, _ROW, _TOP = 880, 96, 18, 42


@dataclass(frozen=True)
class Square:
    """One field of the matrix: all cases of a failure point, for one guarantee and sink.

    Attributes:
        first: the id of the worst case's timeline on the page.
    """

    verdict: str
    sign: str
    cases: int
    faults: int
    first: str = ""


def write_report(results: Sequence[Result], path: Path) -> None:
    """Raises MissingExtra: the page needs the extra `report`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")


def page(results: Sequence[Result]) -> str:
    """The page, as HTML."""
    return html.page("delivered verify", _CASES_TEMPLATE, **_values(results))


def section(results: Sequence[Result]) -> html.Html:
    """The same as part of another page."""
    return html.part(f"<section><h1>delivered verify</h1>{_CASES_TEMPLATE}</section>", **_values(results))


def _values(results: Sequence[Result]) -> dict[str, Any]:
    columns = sorted({(r.between, r.guarantee, r.service) for r in results}, key=_order)
    groups = [(c, [r for r in results if (r.between, r.guarantee, r.service) == c]) for c in columns]
    return {
        "columns": columns,
        "places": [(p, text) for p, text in PLACES.items() if any(r.fired_at(p) is not None for r in results)],
        "square": lambda place, column: square(results, place, column),
        "speeds": [(c, s) for c in columns if (s := recovery(results, c)) is not None],
        "ratio_max": RECOVERY_RATIO_MAX,
        "groups": [(c, sorted(cases, key=lambda r: r.place)) for c, cases in groups],
        "timeline": _timeline_of,
        "anchor": _anchor,
        "total": len(results),
        "fired": sum(r.fired for r in results),
        "verdicts": {v.value: sum(r.verdict == v.value for r in results) for v in Verdict},
        "lost": sum(r.lost for r in results if r.guarantee != "at_most_once"),
        "duplicated": sum(r.duplicated for r in results if r.guarantee != "at_least_once"),
        "versions": versions(),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _anchor(r: Result) -> str:
    return "-".join((*r.between.split(), r.guarantee, r.service, r.workload, r.fault)).replace(" ", "-")


def square(results: Iterable[Result], place: str, column: tuple[str, str, str]) -> Square | None:
    """None: no case ran there."""
    there = [(r, r.fired_at(place)) for r in results if (r.between, r.guarantee, r.service) == column]
    found = [(r, fired) for r, fired in there if fired is not None]
    if not found:
        return None
    verdict = Verdict.worst([Verdict(r.verdict) for r, _ in found])
    first = next(_anchor(r) for r, _ in found if r.verdict == verdict.value)
    return Square(verdict.value, html.SIGNS[verdict], len(found), sum(fired for _, fired in found), first)


@dataclass(frozen=True)
class Speed:
    """Time to the first new visible record after a SIGKILL of the driver, for one guarantee and sink.

    Attributes:
        cases: those with a measurement; slow: those that took longer than twice a plain restart.
        plain_s, slowest_s: a plain restart, and the slowest restart after a kill, of the case with the worst ratio.
    """

    cases: int
    slow: int
    plain_s: float
    slowest_s: float

    @property
    def verdict(self) -> Verdict:
        return Verdict.BROKEN if self.slow else Verdict.HELD


def recovery(results: Iterable[Result], column: tuple[str, str, str]) -> Speed | None:
    """None: no case measured it."""
    found = [
        (r.plain_s, max(r.recovery_s))
        for r in results
        if (r.between, r.guarantee, r.service) == column and r.recovery_s and r.plain_s
    ]
    if not found:
        return None
    plain_s, slowest_s = max(found, key=lambda pair: pair[1] / pair[0])
    slow = sum(slowest > RECOVERY_RATIO_MAX * plain for plain, slowest in found)
    return Speed(len(found), slow, plain_s, slowest_s)


def _order(column: tuple[str, str, str]) -> tuple[int, str, str]:
    names = [g.value for g in GUARANTEES]
    return (names.index(column[1]), column[0], column[2])


def _timeline_of(result: Result) -> str:
    path = Path(result.folder) / "history.jsonl"
    return timeline(load(path)) if path.exists() else ""


def timeline(history: Sequence[Operation]) -> str:
    """Timeline of the actors: runs as bars with their end, faults as lines, what the reader saw as a curve."""
    until = max((o.at_s for o in history), default=1.0) or 1.0

    def x(at_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * at_s / until

    drivers = [o.process for o in history if o.name == "run" and o.end is End.STARTED]
    rows = {name: _TOP + _ROW * n for n, name in enumerate(["producer", *drivers, "reader"])}
    height = _TOP + _ROW * len(rows) + 26
    drawn = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of {until:.0f} seconds">']
    drawn += [
        f'<text x="0" y="{y + 4}">{html.text(name)}</text><line class="rail" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" '
        f'y2="{y}"/>'
        for name, y in rows.items()
    ]
    for o in history:
        if o.name == "run" and o.end is not End.STARTED:
            started_s = next((b.at_s for b in history if b.process == o.process and b.end is End.STARTED), 0.0)
            drawn.append(_run_bar(x(started_s), x(o.at_s), rows[o.process], o))
        elif o.name == "send" and o.end is End.OK:
            drawn.append(f'<circle class="send" cx="{x(o.at_s):.1f}" cy="{rows["producer"]}" r="3"/>')
    drawn += _seen(history, x, rows["reader"])
    for number, o in enumerate(o for o in history if o.process == "fault"):
        at = x(o.at_s)
        side = "end" if at > _WIDTH * 0.7 else "start"
        shift = -4 if side == "end" else 4
        drawn.append(
            f'<line class="fault" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 26}"/>'
            f'<text class="fault" x="{at + shift:.1f}" y="{8 + 8 * (number % 4)}" text-anchor="{side}">'
            f"{html.text(o.name)}</text>"
        )
    drawn += [
        f'<text class="tick" x="{x(s):.1f}" y="{height - 8}" text-anchor="middle">{s:.0f} s</text>'
        for s in (0.0, until / 4, until / 2, until * 3 / 4, until)
    ]
    return "".join([*drawn, "</svg>"])


def _run_bar(begin: float, end: float, y: int, o: Operation) -> str:
    how = {End.OK: "ok", End.FAILED: "failed", End.UNKNOWN: "killed"}[o.end]
    text = how if o.end is not End.FAILED else str(o.value.get("code", how))
    width = max(2.0, end - begin)
    return (
        f'<rect class="run {how}" x="{begin:.1f}" y="{y - 5}" width="{width:.1f}" height="10" rx="2">'
        f"<title>{html.text(o.process)}: {html.text(text)}</title></rect>"
        f'<text class="run" x="{begin + 4:.1f}" y="{y + 3}">{html.text(text)}</text>'
    )


def _seen(history: Sequence[Operation], x: Any, y: int) -> list[str]:
    """Effects seen by the reader so far, as a step curve over its row."""
    points = [(o.at_s, int(o.value["all"])) for o in history if o.process == "reader"]
    if not points:
        return []
    most = max(n for _, n in points) or 1
    path, level = [f"M {x(points[0][0]):.1f} {y + 7}"], y + 7.0
    for at_s, n in points:
        path.append(f"L {x(at_s):.1f} {level:.1f}")
        level = y + 7 - 14 * n / most
        path.append(f"L {x(at_s):.1f} {level:.1f}")
    return [f'<path class="seen" d="{" ".join(path)}"><title>{most} effects seen</title></path>']


_CASES_TEMPLATE = """<p class="made">{{ made }}</p>
<p>{{ total }} cases, {{ fired }} faults injected:
{% for verdict, count in verdicts.items() if count %}<b class="{{ verdict }}">{{ signs[verdict] }} {{ count }}
{{ verdict }}</b>{% if not loop.last %}, {% endif %}{% endfor %}. {{ lost }} records lost where none may be,
{{ duplicated }} duplicated where none may be. Every number comes from reading the sink with clients of the judge's own;
a case whose fault did not fire, or whose sink nobody read at the end, is invalid.</p>
<h2>Matrix</h2>
<div class="scroll"><table>
<tr><th>failure point</th>{% for sink, guarantee, service in columns %}<th>{{ guarantee }}<small>{{ sink }}, {{ service
}}</small></th>{% endfor %}</tr>
{% for place, text in places %}<tr><th>{{ place }}<small>{{ text }}</small></th>
{% for column in columns %}{% set s = square(place, column) %}<td class="square">
{% if s %}<a href="#{{ s.first }}"><b class="{{ s.verdict }}">{{ s.sign }} {{ s.verdict }}</b></a>
<small>{{ s.cases }} cases, {{ s.faults }}
faults</small>{% else %}<small>not run</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% if speeds %}<h2>Back after a kill</h2>
<p>From the start after a SIGKILL of the driver until a reader sees the first new record. It should take at most {{
ratio_max | round | int }} times a plain restart; this is reported apart from the verdicts.</p>
<div class="scroll"><table><tr><th>guarantee</th><th>cases</th><th>slower</th><th>worst ratio</th><th>there</th></tr>
{% for (sink, guarantee, service), s in speeds %}<tr><th>{{ guarantee }}<small>{{ sink }}, {{ service }}</small></th>
<td>{{ s.cases }}</td><td><b class="{{ s.verdict.value }}">{{ signs[s.verdict.value] }} {{ s.slow }}</b></td>
<td>{{ (s.slowest_s / s.plain_s) | round(2) }}</td><td>{{ s.slowest_s | round(1) }} s, plain {{ s.plain_s | round(1) }}
s</td></tr>
{% endfor %}</table></div>
{% endif %}<h2>Cases</h2>
{% for (sink, guarantee, service), cases in groups %}<h3>{{ guarantee }}, {{ sink }}, {{ service }}</h3>
{% for r in cases %}<details{% if r.verdict != "held" %} open{% endif %}><summary><b class="{{ r.verdict }}">{{
signs[r.verdict] }} {{ r.verdict }}</b> {{ r.place }} {{ r.fault }}, {{ r.workload }}: {{ r.text }}</summary>
<div><div id="{{ anchor(r) }}"></div>{% for reason in r.reasons %}<p class="broken">{{ reason }}</p>{% endfor %}
<p>{{ r.sent }} effects due, {{ r.delivered }} found; {{ r.lost }} lost, {{ r.duplicated }} duplicated
{%- if r.given_up is not none %}, {{ r.given_up }} given up{% endif %}. {{ r.fired }} faults in {{ r.runs }}
starts{% if r.start %} of drivers that were started ahead{% endif %}, {{ r.seconds }} s, seed {{ r.seed }}.
{%- for s in r.stops if s.got %} {{ s.when }}: stopped with {{ s.got }}.{% endfor %}
{%- if r.undelivered %} {{ r.undelivered }} records wait behind the stop.{% endif %}
{%- if r.recovery_s and r.plain_s %} Back after a kill in at most {{ r.recovery_s | max | round(1) }} s, a plain restart
takes {{ r.plain_s | round(1) }} s: <b class="{{ r.recovery }}">{{ signs[r.recovery] }} {{ "within" if r.recovery ==
"held" else "above" }} {{ ratio_max | round | int }}x</b>.{% endif %}</p>
{{ timeline(r) | safe }}
<p>{% for at, commit, code, verdict in r.ran %}{{ at }} commit {{ commit or "unknown" }}: {{ verdict }}.
{% endfor %}</p>
<p><code>{{ r.again }}</code></p></div></details>
{% endfor %}{% endfor %}
<h2>Versions</h2>
<p>{% for name, v in versions.items() %}{{ name }} {{ v }}{% if not loop.last %}, {% endif %}{% endfor %}</p>
"""


_log = logging.getLogger(__name__)
RUNS, INDEX = "runs", "index.html"


# -- runs of a folder --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """
    Attributes:
        name: of its files: start time and process.
        asked: what was requested, as on the command line.
        ended: None: still running, or killed.
    """

    name: str
    asked: str
    began: str
    ended: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **vars(self), "results": [r.to_json() for r in self.results]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "results": [Result.from_json(r) for r in data["results"]]})

    @property
    def verdict(self) -> Verdict:
        return Verdict.worst([Verdict(r.verdict) for r in self.results])

    @property
    def seconds(self) -> float | None:
        if self.ended is None:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()


class RunLog:
    """The current run."""

    def __init__(self, folder: Path, asked: str) -> None:
        self._folder = folder
        now = datetime.now(UTC)
        name = f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"
        self.run = Run(name, asked, now.isoformat(timespec="seconds"), versions=versions())

    def add(self, result: Result) -> None:
        """Add a result. The file is replaced atomically."""
        self.run.results.append(result)
        self._save()

    def end(self) -> Path | None:
        """Write the run's page and the list of all runs. Returns the list; None: no case ran.

        Raises:
            MissingExtra: the pages need the extra `report`.
        """
        if not self.run.results:
            return None
        self.run.ended = datetime.now(UTC).isoformat(timespec="seconds")
        self._save()
        write_report(self.run.results, self._folder / RUNS / f"{self.run.name}.html")
        return write_index(self._folder)

    def _save(self) -> None:
        path = self._folder / RUNS / f"{self.run.name}.json"
        write_file(path, json.dumps(self.run.to_json(), ensure_ascii=False))


def load_runs(folder: Path) -> list[Run]:
    """Newest first. Files that are not runs, or have a newer format, are skipped."""
    found = []
    for path in (folder / RUNS).glob("*.json"):
        try:
            found.append(Run.from_json(read_results(path)))
        except (ValueError, KeyError, TypeError):
            continue
        except UsageError as error:
            _log.warning("%s", error)
    return sorted(found, key=lambda r: r.name, reverse=True)


def write_index(folder: Path) -> Path:
    """The page that lists the runs of a folder. Raises MissingExtra: it needs the extra `report`."""
    path = folder / INDEX
    path.write_text(index(load_runs(folder), folder), encoding="utf-8")
    return path


def index(runs: Sequence[Run], folder: Path) -> str:
    """The page, as HTML."""
    return html.page(
        "delivered verify: runs",
        _RUNS_TEMPLATE,
        runs=runs,
        pages={r.name for r in runs if (folder / RUNS / f"{r.name}.html").exists()},
        counts=lambda r: {v.value: sum(x.verdict == v.value for x in r.results) for v in Verdict},
        services=lambda r: ", ".join(sorted({x.service for x in r.results})),
        lost=lambda r: sum(x.lost for x in r.results if x.guarantee != "at_most_once"),
        duplicated=lambda r: sum(x.duplicated for x in r.results if x.guarantee != "at_least_once"),
        total=sum(len(r.results) for r in runs),
        fired=sum(x.fired for r in runs for x in r.results),
    )


_RUNS_TEMPLATE = """<p class="made">runs: {{ runs | length }}, cases: {{ total }}, faults injected: {{ fired }}</p>
<div class="scroll"><table>
<tr><th>began</th><th>asked</th><th>run by</th><th>verdict</th><th>cases</th><th>faults</th>
<th>lost, duplicated<small>where none may be</small></th><th>back within 2x<small>of a plain restart</small></th>
<th>took</th></tr>
{% for r in runs %}<tr>
<td class="square">{% if r.name in pages %}<a href="runs/{{ r.name }}.html">{{ r.began[:16] | replace("T", " ") }}</a>
{%- else %}{{ r.began[:16] | replace("T", " ") }}{% endif %}</td>
<td class="asked" title="{{ r.asked }}"><code>{{ r.asked | truncate(120) }}</code></td><td>{{ services(r) }}</td>
<td class="square"><b class="{{ r.verdict.value }}">{{ signs[r.verdict.value] }} {{ r.verdict.value }}</b>
{%- if r.ended is none %}<small>did not end</small>{% endif %}</td>
<td>{{ r.results | length }}<small>{% for v, n in counts(r).items() if n %}{{ n }} {{ v }}
{%- if not loop.last %}, {% endif %}{% endfor %}</small></td>
<td>{{ r.results | sum(attribute="fired") }}</td><td>{{ lost(r) }}, {{ duplicated(r) }}</td>
{% set measured = r.results | selectattr("recovery", "in", ["held", "broken"]) | list %}
<td class="square">{% if measured %}{{ measured | selectattr("recovery", "equalto", "held") | list | length }} of {{
measured | length }}<small>cases with kills</small>{% else %}<small>not measured</small>{% endif %}</td>
<td class="square">{% if r.seconds is not none %}{{ (r.seconds / 60) | round(1) }} min{% else %}-{% endif %}</td>
</tr>
{% endfor %}</table></div>
"""
