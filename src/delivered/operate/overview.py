"""All pipelines in one table: those that need somebody first, or in the order of a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.audit.seal import State
from delivered.operate.chart import short
from delivered.operate.problem import Problem
from delivered.operate.seals import span
from delivered.operate.status import Driver, Status

TROUBLE = "trouble"
_CSS = {Driver.RUNNING: "held", Driver.STOPPED: "soft", Driver.UNKNOWN: "unknown", Driver.ELSEWHERE: "soft"}
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
        state, css, since_ms = _state(s)
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


def _state(s: Status) -> tuple[str, str, int | None]:
    last = s.runs[-1] if s.runs else None
    if s.driver is Driver.RUNNING:
        return s.driver.value, "held", last.started_ms if last is not None and last.ended_ms is None else None
    ended_ms = None if last is None else last.ended_ms
    later = s.decided_at_ms is not None and ended_ms is not None and s.decided_at_ms > ended_ms
    if last is not None and last.has_failed and not later and s.driver is not Driver.ELSEWHERE:
        return _FAILED, "broken", ended_ms
    since_ms = s.decided_at_ms if later or ended_ms is None else ended_ms
    return s.driver.value, _CSS.get(s.driver, "soft"), since_ms if s.driver is Driver.STOPPED else None


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
