"""A pipeline's status, asked from outside: needs neither Spark nor the driver, claims nothing and fences nobody.

`look` asks for the status of many, by files, folders of them, and ledgers. A file with
`ledger: {format: postgres, url: ..., dbtable: ...}` names a ledger, in the options of a sink to it: the status of each
of its pipelines, without their files, is what their decisions and owners say. `problems_of` finds what is wrong in the
answers, each with what fixes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from delivered import html
from delivered.audit.sealed import Sealed
from delivered.checkpoint.folder import is_done, logged, started_ms
from delivered.checkpoint.history import Totals, batches, last_audits, samples, totals
from delivered.checkpoint.runs import Run, runs
from delivered.contract.source import DedupWindow, HeldBack, ReceiverReport, Retained, Source
from delivered.engine.context import open_ledger, open_shared_ledger
from delivered.engine.owner import running
from delivered.model.dedup import duration
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import SOURCE, Scope, by_source
from delivered.model.patience import within
from delivered.model.secrets import shown
from delivered.model.work import BatchReport, Decision, LedgerState
from delivered.operate.looks import NewDeadLetters, new_dead_letters
from delivered.operate.pace import Pace, duration_text, pace_of
from delivered.operate.problem import Problem
from delivered.operate.seals import (
    SealStatus,
    read_seals,
    retained_by,
    seal_problems,
    sealed_text,
    unsealed_from,
)
from delivered.operate.transactions import Open, open_transactions
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered.pipeline.file import load_yaml
from delivered.pipeline.receive import has_died
from delivered.pipeline.spec import NO_INCARNATION
from delivered.planner import Trigger
from delivered.source import lag_by_partition


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
    died = sum(map(has_died, reports))
    return f"{len(reports) - died}" + (f", {died} dead" if died else "")


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


log = logging.getLogger(__name__)

_PARTITIONS_SHOWN = 5
ASK_S_MAX = 3.0
"""For all servers of a pipeline: a status must not wait as long as the pipeline does, nor a scrape time out."""
_CLOCKS_S = 5.0
"""By which the clocks of two machines may differ. Beyond it, what is shown is wrong, and nothing else: an undecided
transaction that is aborted is written again."""
_STALLED_S_MIN = 15.0
_STALLED_BATCHES = 3
_BLOCKS_S_MIN = 15.0
_BLOCKS_SHARE = 0.1
"""Of its time-out: an application with a long one keeps its transactions open for long."""
_RUNS_SHOWN = 10


def status(pipeline: Definition) -> Status:
    """Ask checkpoint, ledger, sinks and sources, for `ASK_S_MAX` in all. Never raises for what does not answer: it is a
    problem of the status."""
    with within(ASK_S_MAX):
        return _status(pipeline)


def _status(pipeline: Definition) -> Status:
    problems: list[Problem] = []
    answers: dict[str, Any] = {"asked_ms": time.time_ns() // 1_000_000}
    incarnation: str | None = None
    with _asking(problems):
        incarnation, _ = logged(pipeline.checkpoint)
        state, sinks, sealed = _state(pipeline, incarnation, problems)
        last = state.last
        answers |= from_ledger(state, last, sinks)
        since = started_ms(pipeline.checkpoint) if pipeline.audit_every is not None else None
        seals = {n: SealStatus.of(s, last, n, pipeline.audit_every, since) for n, s in sealed.items()}
        answers |= {"seals": seals}
        answers |= {"visible": last is not None and is_done(pipeline.checkpoint, last.batch)}
    newest_reports = batches(pipeline.checkpoint, 20)
    if "driver" not in answers:
        answers |= _last_known(pipeline, newest_reports)
    with _asking(problems):
        answers |= {"transactions": _transactions(pipeline)}
    with _asking(problems):
        answers |= {"hidden": _hidden(pipeline, incarnation)}
    for name, endpoint in pipeline.sources.items():
        if not endpoint.is_spark_own:
            with _asking(problems):
                source = endpoint.source()
                _ask_source(name, source, answers)
                if source.capability().received:
                    answers.setdefault("queues", {})[name] = (endpoint.system, _destination(endpoint))
                source.recheck()
            with _asking(problems):
                answers["seals"] = _with_retained(answers.get("seals", {}), pipeline, incarnation, name, endpoint)
    answers |= {"pace": pace_of(samples(pipeline.checkpoint), answers.get("lag", {}))}
    answers |= {"runs": tuple(runs(pipeline.checkpoint))}
    answers |= {"new_dead_letters": new_dead_letters(pipeline.checkpoint, answers.get("sinks", ()))}
    status = Status(
        pipeline.name,
        pipeline.guarantee.value,
        pipeline.checkpoint,
        last=newest_reports[-1] if newest_reports else None,
        totals=totals(pipeline.checkpoint),
        audits=last_audits(pipeline.checkpoint),
        **answers,
    )
    problems += problems_of(pipeline, status, newest_reports)
    return replace(status, problems=tuple(problems))


def _ask_source(name: str, source: Source, answers: dict[str, Any]) -> None:
    """Add a source's answers to the fields of a `Status`."""

    def add(what: str, value: Any) -> None:
        if value is not None:
            answers.setdefault(what, {})[name] = value

    reports = source.receivers()
    add("receivers", None if reports is None else tuple(reports))
    add("windows", source.dedup_window())
    add("wal_held_back", source.wal_held_back())
    at = answers.get("positions", {}).get(name)
    with contextlib.closing(source.driver()) as driver:
        newest = driver.newest()  # also without a position: a source that does not answer is no healthy one
        if newest is not None and at is not None:
            behind = lag_by_partition({"endOffset": at, "latestOffset": newest})
            add("lag", behind)
            if behind is not None:
                start = json.loads(at) if any(behind.values()) else newest
                add("waiting_since_ms", driver.waiting_since(start, newest))
        add("held_back", driver.held_back())


@contextlib.contextmanager
def _asking(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except DeliveredError as error:
        if all(p.text != error.message for p in problems):
            problems.append(Problem(error.code, error.message, error.next_step))
    except Exception as error:  # of a client: it must not hide the rest, nor other pipelines
        log.debug("not answered", exc_info=True)
        problems.append(Problem.build("UNEXPECTED.STATUS", error_type=type(error).__name__, error=error))


def _destination(endpoint: Endpoint) -> str:
    return endpoint.label.removeprefix(endpoint.system).strip()


def _state(
    pipeline: Definition, incarnation: str | None, problems: list[Problem]
) -> tuple[LedgerState, list[SinkStatus], dict[str, Sealed]]:
    """The ledger's state; every sink, without counts; and the seals of each, which are no newer than the state."""
    spec = pipeline.spec
    sinks = spec.open()
    sealed: dict[str, Sealed] = {}
    with contextlib.closing(open_shared_ledger(sinks, spec.scope(sinks, incarnation))) as ledger:
        for member in sinks.members:
            if not member.dead_letters:
                with _asking(problems):
                    sealed[member.name] = read_seals(ledger, member.name)
        state = ledger.look()
    shown = zip(pipeline.all_sinks, sinks.members, strict=True)
    return state, [SinkStatus(m.name, e.system, 0, 0, m.dead_letters, _destination(e)) for e, m in shown], sealed


def _with_retained(
    seals: Mapping[str, SealStatus], pipeline: Definition, incarnation: str | None, name: str, endpoint: Endpoint
) -> dict[str, SealStatus]:
    """With what a source still has of the records that each sink's audits have not sealed; asked once a position."""
    starts = {
        sink: unsealed_from(s, incarnation, pipeline.checkpoint, name)
        for sink, s in seals.items()
        if s.is_watched and s.unsealed_batches
    }
    known: dict[str, Retained | None] = {}
    for at in starts.values():
        if at is not None and (key := json.dumps(at)) not in known:
            known[key] = retained_by(endpoint.source(), at)
    found = {sink: known.get(json.dumps(at)) for sink, at in starts.items()}
    return {n: s if (r := found.get(n)) is None else s.with_retained(name, r) for n, s in seals.items()}


def from_ledger(state: LedgerState, last: Decision | None, sinks: Sequence[SinkStatus]) -> dict[str, Any]:
    """The fields of a `Status` that come from a ledger. `last`: the decision to show."""
    owner = state.owner
    return {
        "driver": _driver(state),
        "owner": f"process {owner.process} on {owner.host}" if owner is not None else "",
        "drivers_fenced": len(owner.superseded) if owner is not None else 0,
        "batch": last.batch if last is not None else None,
        "decided_at_ms": last.decided_at_ms if last is not None else None,
        "positions": by_source(last.offsets) if last is not None else {},
        "sinks": tuple(_counted(last, sink) for sink in sinks),
    }


def _counted(last: Decision | None, sink: SinkStatus) -> SinkStatus:
    if last is None:
        return sink
    own = last.for_sink(sink.name)
    return replace(sink, records=own.total.count, given_up=own.given_up.count)


def _driver(state: LedgerState) -> Driver:
    if (lives := running(state.owner)) is None:
        return Driver.NONE if state.owner is None else Driver.ELSEWHERE
    return Driver.RUNNING if lives else Driver.STOPPED


def _last_known(pipeline: Definition, reports: Sequence[BatchReport]) -> dict[str, Any]:
    """The fields that come from a ledger, of one that does not answer."""
    known: dict[str, Any] = {
        "sinks": tuple(SinkStatus(e.sink_name, e.system, None, 0, destination=_destination(e)) for e in pipeline.sinks)
    }
    return known | ({"batch": reports[-1].batch, "decided_at_ms": reports[-1].decided_at_ms} if reports else {})


def _hidden(pipeline: Definition, incarnation: str | None) -> dict[str, HeldBack]:
    """What open transactions of others hide at each sink."""
    found: dict[str, HeldBack] = {}
    for endpoint in pipeline.all_sinks:
        scope = Scope(pipeline.name, endpoint.sink_name, incarnation or NO_INCARNATION)
        with contextlib.closing(endpoint.sink().committer(scope)) as committer:
            if (held := committer.held_back()) is not None:
                found[endpoint.sink_name] = held
    return found


def _transactions(pipeline: Definition) -> tuple[Open, ...] | None:
    try:
        return tuple(open_transactions(pipeline))
    except UsageError as error:
        if error.code != "DELIVERED_NO_TRANSACTIONS":
            raise
        return None


def problems_of(pipeline: Definition, now: Status, reports: Sequence[BatchReport]) -> Iterator[Problem]:
    start = "start the pipeline: delivered run PIPELINE.yaml"
    yield from hanging_transactions(now)
    for t in now.transactions or ():
        if t.hanging:
            continue
        if t.decided and now.driver is not Driver.RUNNING:
            yield Problem.build("TRANSACTION_UNAPPLIED", id=t.id, start=start)
        # Batches follow each other: one opened before the newest decision, which does not name it, has no batch left.
        age, since = t.age_s, now.decided_age_s
        stale = now.driver is not Driver.RUNNING or (since is not None and age is not None and age > since + _CLOCKS_S)
        if not t.decided and stale:
            yield Problem.build(
                "TRANSACTION_ORPHANED.OPEN_FOR" if age is not None else "TRANSACTION_ORPHANED.OPEN", id=t.id, age=age
            )
    yield from old_transactions(now)
    yield from blocking_transactions(now, _usual_s(reports))
    yield from receiver_problems(now)
    lag, age = now.lag_total, now.decided_age_s
    if age is not None and now.lag_s_max is not None:  # after a quiet hour, the first record has not waited for it
        age = min(age, now.lag_s_max)
    if lag and now.driver is Driver.STOPPED and pipeline.trigger.kind is not Trigger.AVAILABLE_NOW:
        yield Problem.build("STOPPED_WITH_LAG", lag=lag, why=_why_stopped(now), start=start)
    elif lag and age is not None and age > (limit := _stalled_after(pipeline, reports)):
        yield Problem.build("STALLED", age=age, limit=limit, lag=lag)
    if now.pace is not None and now.pace.grows and now.driver in (Driver.RUNNING, Driver.ELSEWHERE):
        yield Problem.build(
            "FALLING_BEHIND",
            arrived=now.pace.in_per_s,
            delivered=now.pace.out_per_s,
            behind=now.pace.behind_per_s,
            lag=now.pace.lag,
        )
    yield from run_problems(now)
    for sink, new in now.new_dead_letters.items():
        if new.count:
            looked = "the start" if new.since_ms is None else html.utc(new.since_ms)
            yield Problem.build("DEAD_LETTERS", sink=sink, count=new.count, since=looked)
    for sink, audit in now.audits.items():
        if audit["verdict"] == "broken":
            yield Problem.build("AUDIT_BROKEN", sink=sink, breaches="; ".join(audit["breaches"]))
        if audit.get("error"):
            yield Problem.build("AUDIT_NOT_RUN", sink=sink, reason=audit["error"])
    yield from seal_problems(now.seals)
    for s in now.sinks:
        if s.given_up:
            yield Problem.build("RECORDS_GIVEN_UP", sink=s.name, given_up=s.given_up)


def hanging_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.hanging:
            end = "apply" if t.decided else "abort"
            yield Problem.build(
                "TRANSACTION_HANGING.STATUS",
                id=t.id,
                outcome="committed" if t.decided else "aborted",
                partitions=", ".join(t.targets),
                end=end,
            )


def old_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.old and t.age_s is not None:
            limit = "" if t.timeout_s is None else f", and its server aborts it after {t.timeout_s:.0f} s"
            yield Problem.build(
                "TRANSACTION_OLD", id=t.id, age_s=t.age_s, limit=limit, end="apply" if t.decided else "abort"
            )


def blocking_transactions(now: Status, batch_s: float) -> Iterator[Problem]:
    """Of other applications, that have hidden records for longer than is usual.

    Args:
        batch_s: that a batch of this pipeline usually takes.
    """
    at_sources = [("TRANSACTION_BLOCKS.SOURCE", name, held) for name, held in now.held_back.items()]
    at_sinks = [("TRANSACTION_BLOCKS.SINK", name, held) for name, held in now.hidden.items()]
    for code, name, hides in (*at_sources, *at_sinks):
        for t in hides.by:
            open_s, share = t.age_s(), _BLOCKS_SHARE * (t.timeout_s or 0.0)
            if open_s is None or open_s <= max(_BLOCKS_S_MIN, _STALLED_BATCHES * batch_s, share):
                continue
            yield Problem.build(
                code,
                id=t.id or str(t.producer),
                who=f"The transaction {t.id!r}"
                if t.id
                else f"A transaction of producer {t.producer}, whose id no coordinator shows to this user",
                age=duration_text(open_s),
                limit="" if t.timeout_s is None else f" (its time-out is {duration_text(t.timeout_s)})",
                count=sum(hides.offsets.get(p, 0) for p in t.at),
                place=name,
                partitions=", ".join(f"{p} offset {offset}" for p, offset in sorted(t.at.items())[:_PARTITIONS_SHOWN]),
                command=t.end,
            )


def run_problems(now: Status) -> Iterator[Problem]:
    """The error that ended the last run, unless a later one goes on."""
    last = now.runs[-1] if now.runs else None
    if now.driver is Driver.RUNNING or last is None or last.ended_ms is None or not last.has_failed:
        return
    if now.decided_at_ms is not None and now.decided_at_ms > last.ended_ms:
        return  # by another driver, beside which this one could not start
    yield Problem.build(
        "RUN_FAILED",
        at=html.utc(last.ended_ms),
        host=last.host,
        process=last.process,
        batch="before its first batch" if last.batch is None else f"in batch {last.batch}",
        error=f"[{last.code}] {last.message}",
        step=last.next_step or "read the driver's log, then start the pipeline: delivered run PIPELINE.yaml",
    )


def _why_stopped(now: Status) -> str:
    if not now.runs:
        return ""
    last = now.runs[-1]
    if last.ended_ms is None:
        return (
            f" Process {last.process} on {last.host}, running since {html.utc(last.started_ms)}, ended without an "
            "error: it was killed, or its machine stopped."
        )
    return "" if last.has_failed else f" It was stopped at {html.utc(last.ended_ms)}."


def receiver_problems(now: Status) -> Iterator[Problem]:
    for source, reports in now.receivers.items():
        for r in filter(has_died, reports):
            ago = max(0.0, time.time() - r.at_ms / 1000)
            yield Problem.build("RECEIVER_GONE", source=source, process=r.owner.process, host=r.owner.host, seconds=ago)
    for source, window in now.windows.items():
        if window.short:
            yield Problem.build(
                "DEDUP_WINDOW_SHORT.STATUS",
                source=source,
                kept_s=window.kept_s,
                needed_s=window.needed_s,
                needed=duration(int(window.needed_s) * 1000),
            )


def _stalled_after(pipeline: Definition, reports: Sequence[BatchReport]) -> float:
    """Seconds without a decision that mean trouble while records wait."""
    return max(_STALLED_S_MIN, _STALLED_BATCHES * _usual_s(reports), pipeline.batch_s_max or 0.0)


def _usual_s(reports: Sequence[BatchReport]) -> float:
    """That a batch takes, or the time between two."""
    took = [sum(r.seconds.values()) for r in reports]
    gaps = [(b.decided_at_ms - a.decided_at_ms) / 1000 for a, b in pairwise(reports)]
    return sorted([*took, *gaps])[len(took + gaps) // 2] if took else 0.0


T = TypeVar("T")

_PIPELINES_AT_ONCE = 8
_PIPELINE, _LEDGER = "pipeline", "ledger"
_NOBODY = "-"


def files(paths: Iterable[Path]) -> list[Path]:
    """The pipeline files of these files and folders, in order. A folder's other YAML files are passed over.

    Raises:
        UsageError: there are none.
    """
    pipelines = [f for path in paths for f in (_pipelines_in(path) if path.is_dir() else [path])]
    if not pipelines:
        raise UsageError("NO_PIPELINES", paths=", ".join(map(str, paths)), key=_PIPELINE)
    return pipelines


def look(paths: Sequence[Path]) -> list[Status]:
    """The status of every pipeline, asked at the same time, and of those of ledgers. A file that cannot be read is a
    problem of its status."""
    ledgers = [path for path in paths if _holds(path, _LEDGER)]
    pipelines = look_at([path for path in paths if path not in ledgers], lambda _: None)
    return [s for s, _ in pipelines] + [s for path in ledgers for s in _look_at_ledger(path)]


def look_at(paths: Sequence[Path], view: Callable[[Definition], T]) -> list[tuple[Status, T | None]]:
    """As `look` at pipeline files, with a view of each definition; None: its file cannot be read."""

    def one(path: Path) -> tuple[Status, T | None]:
        try:
            pipeline = Definition.from_file(path)
            return _with_its_name(path, status(pipeline)), view(pipeline)
        except DeliveredError as error:
            return _failed(path, error), None

    with ThreadPoolExecutor(_PIPELINES_AT_ONCE) as pool:
        return list(pool.map(one, paths))


def _look_at_ledger(path: Path) -> list[Status]:
    """Every pipeline and sink in a ledger, each with its newest decision of any checkpoint."""
    try:
        options = load_yaml(path.read_text(encoding="utf-8"))[_LEDGER]
        if not isinstance(options, Mapping) or "format" not in options:
            raise UsageError("LEDGER_FILE", file=path, key=_LEDGER, value=shown(options))
        endpoint = Endpoint(options["format"], {k: as_text(k, v) for k, v in options.items() if k != "format"})
        sink = endpoint.sink()
        with within(ASK_S_MAX):
            with contextlib.closing(open_ledger(sink, Scope(_NOBODY, _NOBODY, NO_INCARNATION))) as ledger:
                others = ledger.others()
            return [_status_of(sink, endpoint.system, o.pipeline, o.sink) for o in sorted(others, key=str)]
    except DeliveredError as error:
        return [_failed(path, error)]


def _status_of(sink: Any, system: str, pipeline: str, name: str) -> Status:
    with contextlib.closing(open_ledger(sink, Scope(pipeline, name, NO_INCARNATION))) as ledger:
        sealed = read_seals(ledger, name)
        state = ledger.look()
    last = state.last or next(iter(state.earlier), None)
    guarantee = last.guarantee.value if last is not None else ""
    seals = {name: SealStatus.of(sealed, last, name)} if sealed.last is not None else {}
    return Status(pipeline, guarantee, "", **from_ledger(state, last, [SinkStatus(name, system, 0, 0)]), seals=seals)


def _failed(path: Path, error: DeliveredError) -> Status:
    return Status(path.stem, "", "", problems=(Problem(error.code, error.message, error.next_step),))


def _with_its_name(path: Path, answer: Status) -> Status:
    """With commands that run as they are."""
    named = [
        (p, p.next_step.replace("PIPELINE.yaml", shlex.quote(str(path))) if p.next_step else None)
        for p in answer.problems
    ]
    return replace(answer, problems=tuple(replace(p, next_step=step) for p, step in named))


def _pipelines_in(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.iterdir()) if f.suffix in (".yaml", ".yml") and _holds(f, _PIPELINE)]


def _holds(file: Path, key: str) -> bool:
    try:
        data = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    except (yaml.YAMLError, UsageError):
        return key == _PIPELINE  # its fault is reported
    return isinstance(data, dict) and key in data and (key == _PIPELINE or _PIPELINE not in data)
