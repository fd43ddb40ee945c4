"""The status of a pipeline: what its ledger, sinks, sources and checkpoint say, as `asking.py` puts it together."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from delivered import html
from delivered.checkpoint.history import NewDeadLetters, Run, Totals
from delivered.contract.source import DedupWindow, HeldBack, ReceiverReport
from delivered.model.identity import SOURCE
from delivered.model.work import BatchReport
from delivered.operate.pace import Pace
from delivered.operate.problem import Problem
from delivered.operate.seals import SealStatus, sealed_text
from delivered.operate.transactions import Open
from delivered.pipeline.receive import is_dead

_RUNS_SHOWN = 10


class Driver(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    ELSEWHERE = "on another host"
    NONE = "never started"
    UNKNOWN = "unknown"
    """The ledger did not answer."""


@dataclass(frozen=True)
class SinkStatus:
    """
    Attributes:
        records: decided in this checkpoint; None: unknown.
        given_up: at_most_once, an upper bound of what was lost.
        dead_letters: this sink holds them.
        destination: its topic, queue or table, for display.
    """

    name: str
    system: str
    records: int | None
    given_up: int
    dead_letters: bool = False
    destination: str = ""


@dataclass(frozen=True)
class Status:
    """
    Attributes:
        batch, decided_at_ms: of the newest decision in this checkpoint; None: there is none. If the ledger does not
            answer, of the newest batch that this machine knows.
        visible: Spark logged that batch, so its records are visible at every sink.
        owner: "process 12 on host", as the ledger has it.
        drivers_fenced: earlier drivers that the ledger names, a bounded number.
        lag: by source and partition, in the source's offsets; a source that does not count offsets is absent.
        held_back: by source, records that it holds and open transactions hide.
        hidden: by sink, records that open transactions of others hide from its readers.
        pace: rates in and out; None: unknown.
        runs: starts, ends and errors of its drivers, oldest first.
        new_dead_letters: by sink, those since an operator looked at them.
        waiting_since_ms: by source and partition, when the first record was written that waits; sources that date
            their records.
        receivers: by source that they fill: those that run, and those that ended without having been stopped.
        queues: system and name of each source that receivers fill.
        windows: by source, how long its log recognises a message.
        transactions: open at its sinks, of any checkpoint of this pipeline; None: its sinks keep none open.
        wal_held_back: bytes that each outbox slot keeps its server from removing.
        audits: the last one by sink: verdict, seconds since 1970, figures.
        seals: by sink: what audits have sealed.
        asked_ms: when, in milliseconds since 1970.
    """

    pipeline: str
    guarantee: str
    checkpoint: str
    driver: Driver = Driver.UNKNOWN
    owner: str = ""
    drivers_fenced: int = 0
    batch: int | None = None
    decided_at_ms: int | None = None
    visible: bool = False
    sinks: tuple[SinkStatus, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held_back: Mapping[str, HeldBack] = field(default_factory=dict)
    hidden: Mapping[str, HeldBack] = field(default_factory=dict)
    pace: Pace | None = None
    runs: tuple[Run, ...] = ()
    new_dead_letters: Mapping[str, NewDeadLetters] = field(default_factory=dict)
    waiting_since_ms: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    receivers: Mapping[str, tuple[ReceiverReport, ...]] = field(default_factory=dict)
    queues: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    windows: Mapping[str, DedupWindow] = field(default_factory=dict)
    transactions: tuple[Open, ...] | None = None
    wal_held_back: Mapping[str, int] = field(default_factory=dict)
    last: BatchReport | None = None
    totals: Totals = Totals()
    audits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seals: Mapping[str, SealStatus] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    asked_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    @property
    def decided_age_s(self) -> float | None:
        """Seconds since the newest decision."""
        return None if self.decided_at_ms is None else max(0.0, time.time() - self.decided_at_ms / 1000)

    @property
    def lag_total(self) -> int | None:
        """None: no source counts offsets, or none answered."""
        return sum(sum(partitions.values()) for partitions in self.lag.values()) if self.lag else None

    @property
    def lag_to_end(self) -> int | None:
        """With the offsets that open transactions hide: to the high watermark. None: as `lag_total`."""
        held = sum(h.total for h in self.held_back.values())
        return None if self.lag_total is None else self.lag_total + held

    @property
    def records(self) -> int | None:
        """At all sinks; None: unknown."""
        counts = [s.records for s in self.sinks]
        return None if None in counts or self.driver is Driver.UNKNOWN else sum(n for n in counts if n is not None)

    @property
    def lag_s(self) -> dict[str, dict[str, float]] | None:
        """Seconds since the first waiting record was written, by source and partition; 0: none waits. None: no source
        dates its records, or none answered."""
        now = time.time()
        return {
            source: {p: max(0.0, now - since[p] / 1000) if p in since else 0.0 for p in self.lag.get(source, since)}
            for source, since in self.waiting_since_ms.items()
        } or None

    @property
    def lag_s_max(self) -> float | None:
        """Of the partition that waits the longest."""
        lags = self.lag_s
        return None if lags is None else max((s for of in lags.values() for s in of.values()), default=0.0)

    def _repr_html_(self) -> str:
        head = html.joined((html.element("b", self.pipeline), f" {self.guarantee}"))
        return html.fragment(html.element("p", head), summary(self))

    def to_json(self) -> dict[str, Any]:
        lags = self.lag_s
        return {
            "pipeline": self.pipeline,
            "guarantee": self.guarantee,
            "checkpoint": self.checkpoint,
            "driver": self.driver.value,
            "owner": self.owner,
            "drivers_fenced": self.drivers_fenced,
            "batch": self.batch,
            "decided_at_ms": self.decided_at_ms,
            "decided_age_s": None if self.decided_age_s is None else round(self.decided_age_s, 1),
            "visible": self.visible,
            "sinks": [s.__dict__ for s in self.sinks],
            "positions": {name: _json_or_text(at) for name, at in self.positions.items()},
            "lag": self.lag,
            "lag_total": self.lag_total,
            "lag_to_end": self.lag_to_end,
            "held_back": {n: asdict(h) for n, h in self.held_back.items()},
            "hidden": {n: asdict(h) for n, h in self.hidden.items()},
            "pace": None if self.pace is None else self.pace.to_json(),
            "runs": [r.to_json() for r in self.runs[-_RUNS_SHOWN:]],
            "new_dead_letters": {n: asdict(d) for n, d in self.new_dead_letters.items()},
            "lag_s": None if lags is None else {n: {p: round(s, 1) for p, s in of.items()} for n, of in lags.items()},
            "receivers": {n: [_receiver_json(r) for r in of] for n, of in self.receivers.items()},
            "windows": {name: asdict(window) for name, window in self.windows.items()},
            "transactions": None if self.transactions is None else [t.to_json() for t in self.transactions],
            "wal_held_back": self.wal_held_back,
            "last_batch": self.last.to_json() if self.last is not None else None,
            "totals": self.totals.__dict__,
            "audits": self.audits,
            "seals": {sink: s.to_json() for sink, s in self.seals.items()},
            "problems": [p.__dict__ for p in self.problems],
        }


def unanswered(status: Status) -> bool:
    """Whether ledger, sinks, sources or checkpoint did not all answer."""
    return any(p.is_unanswered for p in status.problems)


def not_ready(status: Status) -> str | None:
    """Why the pipeline is not at work; None: its ledger names a driver that lives on this host and decides, or no
    record waits. A driver claims the ledger with its first batch: one that has nothing to do has not claimed it yet."""
    failed = [p.text for p in status.problems if p.code == "DELIVERED_STALLED" or p.is_unanswered]
    if failed:
        return failed[0]
    if status.driver is Driver.RUNNING or status.lag_total == 0:
        return None
    if status.driver in (Driver.NONE, Driver.UNKNOWN):
        return status.problems[0].text if status.problems else "no driver has claimed the ledger yet"
    waits = "" if status.lag_total is None else f", and {status.lag_total:,} offsets wait"
    return f"the driver that the ledger names is {status.driver.value}{waits}"


def summary(s: Status) -> html.Html:
    """Problems with what fixes them, and the newest figures."""
    figures: list[tuple[str, object]] = [("driver", s.driver.value)]
    if s.runs:
        figures.append(("last run", run_text(s.runs[-1])))
    if s.batch is not None and s.decided_at_ms is not None:
        figures += [("newest batch", s.batch), ("decided", html.utc(s.decided_at_ms))]
    if s.lag_total is not None:
        figures.append(("lag, offsets", lag_text(s)))
    if s.pace is not None:
        figures.append(("pace", s.pace.text))
    if s.lag_s_max is not None:
        figures.append(("lag, seconds", f"{s.lag_s_max:,.0f}"))
    for name, reports in s.receivers.items():
        figures.append((f"receivers{f' of {name}' * (name != SOURCE)}", receivers_text(reports)))
    for w in s.windows.values():
        figures.append(("ids kept, may be redelivered after", f"{w.kept_s:,.0f} s, {w.needed_s:,.0f} s"))
    for sink in s.sinks:
        lost = f", {sink.given_up:,} given up" if sink.given_up else ""
        count = "unknown" if sink.records is None else f"{sink.records:,}"
        figures.append((f"records in {sink.name}", f"{count}{lost}"))
    figures += [(f"sealed{f' in {n}' * (len(s.seals) > 1)}", sealed_text(seal)) for n, seal in s.seals.items()]
    figures += [("WAL held back", f"{held / 1048576:,.1f} MiB") for held in s.wal_held_back.values()]
    return html.joined((*(html.problem(p.code, p.text, p.next_step) for p in s.problems), html.figures(figures)))


def lag_text(s: Status) -> str:
    """To the last stable offset, and what is hidden behind it; for display."""
    held = (s.lag_to_end or 0) - (s.lag_total or 0)
    return "" if s.lag_total is None else f"{s.lag_total:,}" + (f" + {held:,} hidden" if held else "")


def run_text(run: Run) -> str:
    """For display: "failed 2026-11-26 06:12:44 UTC: [DELIVERED_...]"."""
    if run.ended_ms is None:
        return f"since {html.utc(run.started_ms)}"
    return f"failed {html.utc(run.ended_ms)}: [{run.code}]" if run.has_failed else f"stopped {html.utc(run.ended_ms)}"


def receivers_text(reports: Sequence[ReceiverReport]) -> str:
    """How many run, and how many ended without having been stopped."""
    died = sum(map(is_dead, reports))
    return f"{len(reports) - died}" + (f", {died} dead" if died else "")


def _receiver_json(report: ReceiverReport) -> dict[str, Any]:
    owner = report.owner
    return {
        "host": owner.host,
        "process": owner.process,
        "gone": is_dead(report),
        "at_ms": report.at_ms,
        "counts": dict(report.counts),
    }


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
