"""What a status says, with its problems, and whether the pipeline is at work; as JSON and as HTML."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from delivered import html
from delivered.checkpoint.history import Totals
from delivered.contract.queue import DedupWindow, ReceiverReport
from delivered.model.catalogue import PREFIX, texts
from delivered.model.identity import SOURCE
from delivered.model.work import BatchReport
from delivered.operate.transactions import Open
from delivered.pipeline.receive import has_died


class Driver(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    ELSEWHERE = "on another host"
    NONE = "never started"


@dataclass(frozen=True)
class Problem:
    """
    Attributes:
        code: of an error, or DELIVERED_ and one of TRANSACTION_ORPHANED, TRANSACTION_UNAPPLIED, TRANSACTION_OLD,
            TRANSACTION_HANGING, STALLED, STOPPED_WITH_LAG, RECEIVER_GONE, DEDUP_WINDOW_SHORT, AUDIT_BROKEN,
            RECORDS_GIVEN_UP; or of a finding that would refuse a start now.
        next_step: what fixes it.
    """

    code: str
    text: str
    next_step: str | None

    @classmethod
    def build(cls, code: str, **values: object) -> Problem:
        """With the texts of the catalogue; `code` with its condition, without the prefix."""
        text, next_step = texts(code, values)
        return cls(PREFIX + code.partition(".")[0], text, next_step)

    @property
    def is_unanswered(self) -> bool:
        """Something did not answer."""
        return self.code.endswith(("UNREACHABLE", "UNREADABLE", "LOGIN"))


@dataclass(frozen=True)
class SinkStatus:
    """
    Attributes:
        records: decided in this checkpoint; given_up: at_most_once, an upper bound of what was lost.
        dead_letters: this sink holds them.
        destination: its topic, queue or table, for display.
    """

    name: str
    system: str
    records: int
    given_up: int
    dead_letters: bool = False
    destination: str = ""


@dataclass(frozen=True)
class Status:
    """
    Attributes:
        batch, decided_at_ms: of the newest decision in this checkpoint; None: there is none.
        visible: Spark logged that batch, so its records are visible at every sink.
        owner: "process 12 on host", as the ledger has it.
        drivers_fenced: earlier drivers that the ledger names, a bounded number.
        lag: by source and partition, in the source's offsets; a source that does not count offsets is absent.
        waiting_since_ms: by source and partition, when the first record was written that waits; sources that date
            their records.
        receivers: by source that they fill: those that run, and those that ended without having been stopped.
        queues: system and name of each source that receivers fill.
        windows: by source, how long its log recognises a message.
        transactions: open at its sinks, of any checkpoint of this pipeline; None: its sinks keep none open.
        wal_held_back: bytes that each outbox slot keeps its server from removing.
        audits: the last one by sink: verdict, seconds since 1970, figures.
    """

    pipeline: str
    guarantee: str
    checkpoint: str
    driver: Driver = Driver.NONE
    owner: str = ""
    drivers_fenced: int = 0
    batch: int | None = None
    decided_at_ms: int | None = None
    visible: bool = False
    sinks: tuple[SinkStatus, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    waiting_since_ms: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    receivers: Mapping[str, tuple[ReceiverReport, ...]] = field(default_factory=dict)
    queues: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    windows: Mapping[str, DedupWindow] = field(default_factory=dict)
    transactions: tuple[Open, ...] | None = None
    wal_held_back: Mapping[str, int] = field(default_factory=dict)
    last: BatchReport | None = None
    totals: Totals = Totals()
    audits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def decided_age_s(self) -> float | None:
        """Seconds since the newest decision."""
        return None if self.decided_at_ms is None else max(0.0, time.time() - self.decided_at_ms / 1000)

    @property
    def lag_total(self) -> int | None:
        """None: no source counts offsets, or none answered."""
        return sum(sum(partitions.values()) for partitions in self.lag.values()) if self.lag else None

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
            "lag_s": None if lags is None else {n: {p: round(s, 1) for p, s in of.items()} for n, of in lags.items()},
            "receivers": {n: [_receiver_json(r) for r in of] for n, of in self.receivers.items()},
            "windows": {name: asdict(window) for name, window in self.windows.items()},
            "transactions": None if self.transactions is None else [t.to_json() for t in self.transactions],
            "wal_held_back": self.wal_held_back,
            "last_batch": self.last.to_json() if self.last is not None else None,
            "totals": self.totals.__dict__,
            "audits": self.audits,
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
    if status.driver is Driver.NONE:
        return status.problems[0].text if status.problems else "no driver has claimed the ledger yet"
    waits = "" if status.lag_total is None else f", and {status.lag_total:,} offsets wait"
    return f"the driver that the ledger names is {status.driver.value}{waits}"


def summary(s: Status) -> html.Html:
    """Problems with what fixes them, and the newest figures."""
    figures: list[tuple[str, object]] = [("driver", s.driver.value)]
    if s.batch is not None and s.decided_at_ms is not None:
        figures += [("newest batch", s.batch), ("decided", html.utc(s.decided_at_ms))]
    if s.lag_total is not None:
        figures.append(("lag, offsets", f"{s.lag_total:,}"))
    if s.lag_s_max is not None:
        figures.append(("lag, seconds", f"{s.lag_s_max:,.0f}"))
    for name, reports in s.receivers.items():
        figures.append((f"receivers{f' of {name}' * (name != SOURCE)}", receivers_text(reports)))
    for w in s.windows.values():
        figures.append(("ids kept, may be redelivered after", f"{w.kept_s:,.0f} s, {w.needed_s:,.0f} s"))
    for sink in s.sinks:
        lost = f", {sink.given_up:,} given up" if sink.given_up else ""
        figures.append((f"records in {sink.name}", f"{sink.records:,}{lost}"))
    figures += [("WAL held back", f"{held / 1048576:,.1f} MiB") for held in s.wal_held_back.values()]
    return html.joined((*(html.problem(p.code, p.text, p.next_step) for p in s.problems), html.figures(figures)))


def receivers_text(reports: Sequence[ReceiverReport]) -> str:
    """How many run, and how many ended without having been stopped."""
    died = sum(map(has_died, reports))
    return f"{len(reports) - died}" + (f", {died} gone" if died else "")


def _receiver_json(report: ReceiverReport) -> dict[str, Any]:
    owner = report.owner
    return {
        "host": owner.host,
        "process": owner.process,
        "gone": has_died(report),
        "at_ms": report.at_ms,
        "counts": dict(report.counts),
    }


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
