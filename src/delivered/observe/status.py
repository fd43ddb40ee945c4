"""A pipeline's status, asked from outside: needs neither Spark nor the driver, claims nothing and fences nobody."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from delivered.checkpoint.folder import is_done, logged
from delivered.checkpoint.history import Totals, batches, last_audits, totals
from delivered.contract.powers import DatesRecords, HasDedupWindow, HoldsBackWal, ListsReceivers
from delivered.contract.queue import DedupWindow, ReceiverReport
from delivered.contract.source import Source
from delivered.engine.context import open_ledger
from delivered.engine.owner import running
from delivered.model.batch_report import BatchReport
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.offsets import by_source
from delivered.model.patience import within
from delivered.model.work import Decision, LedgerState
from delivered.observe.problems import Driver, Problem, problems_of
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.presence import is_gone
from delivered.pipeline.transactions import Open, open_transactions
from delivered.source.lag import lag_by_partition

log = logging.getLogger(__name__)

ASK_S_MAX = 3.0
"""For all servers of a pipeline: a status must not wait as long as the pipeline does, nor a scrape time out."""


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
        receivers: by source that they fill: those that run, and those that are gone without having been stopped.
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
        from delivered.observe.summary import in_notebook

        return in_notebook(self)

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


def status(pipeline: Definition) -> Status:
    """Ask checkpoint, ledger, sinks and sources, for `ASK_S_MAX` in all. Never raises for what does not answer: it is a
    problem of the status."""
    with within(ASK_S_MAX):
        return _status(pipeline)


def _status(pipeline: Definition) -> Status:
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    with _asking(problems):
        incarnation, _ = logged(pipeline.checkpoint)
        state, sinks = _state(pipeline, incarnation)
        last = state.last
        found |= of_ledger(state, last, sinks)
        found |= {"visible": last is not None and is_done(pipeline.checkpoint, last.batch)}
    with _asking(problems):
        found |= {"transactions": _transactions(pipeline)}
    for name, endpoint in pipeline.sources.items():
        if not endpoint.is_spark_own:
            with _asking(problems):
                source = endpoint.source()
                _ask_source(name, source, found)
                if isinstance(source, HasDedupWindow):
                    found.setdefault("queues", {})[name] = (endpoint.system, _destination(endpoint))
    newest_reports = batches(pipeline.checkpoint, 20)
    made = Status(
        pipeline.name,
        pipeline.guarantee.value,
        pipeline.checkpoint,
        last=newest_reports[-1] if newest_reports else None,
        totals=totals(pipeline.checkpoint),
        audits=last_audits(pipeline.checkpoint),
        **found,
    )
    problems += problems_of(pipeline, made, newest_reports)
    return replace(made, problems=tuple(problems))


def _ask_source(name: str, source: Source, found: dict[str, Any]) -> None:
    """Add what a source tells to the fields of a `Status`."""

    def tell(what: str, value: Any) -> None:
        if value is not None:
            found.setdefault(what, {})[name] = value

    if isinstance(source, ListsReceivers):
        tell("receivers", tuple(source.receivers()))
    if isinstance(source, HasDedupWindow):
        tell("windows", source.dedup_window())
    if isinstance(source, HoldsBackWal):
        tell("wal_held_back", source.wal_held_back())
    at = found.get("positions", {}).get(name)
    if at is None:
        return
    with contextlib.closing(source.driver()) as driver:
        newest = driver.newest()
        behind = lag_by_partition({"endOffset": at, "latestOffset": newest}) if newest is not None else None
        tell("lag", behind)
        if isinstance(driver, DatesRecords) and newest is not None and behind is not None:
            tell("waiting_since_ms", driver.waiting_since(json.loads(at), newest) if any(behind.values()) else {})


@contextlib.contextmanager
def _asking(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except DeliveredError as error:
        if all(p.text != error.message for p in problems):
            problems.append(Problem(error.code, error.message, error.next_step))
    except Exception as error:  # of a client: it must not hide the rest, nor other pipelines
        log.debug("not answered", exc_info=True)
        problems.append(
            Problem(
                "DELIVERED_UNEXPECTED",
                f"{type(error).__name__}: {error}",
                "look at the server's log and at `delivered doctor`; report it if it stays",
            )
        )


def _destination(endpoint: Endpoint) -> str:
    return endpoint.label.removeprefix(endpoint.system).strip()


def _state(pipeline: Definition, incarnation: str | None) -> tuple[LedgerState, list[SinkStatus]]:
    """The ledger's state; every sink, without counts."""
    spec = pipeline.spec
    sink = spec.open()
    scope = spec.scope(sink, incarnation)
    with contextlib.closing(open_ledger(sink, scope)) as ledger:
        state = ledger.look()
    sinks = [
        SinkStatus(e.name or e.sink().name, e.system, 0, 0, e is pipeline.dead_letter, _destination(e))
        for e in pipeline.all_sinks
    ]
    return state, sinks if spec.is_group else [replace(sinks[0], name=scope.sink, dead_letters=False)]


def of_ledger(state: LedgerState, last: Decision | None, sinks: Sequence[SinkStatus]) -> dict[str, Any]:
    """The fields of a `Status` that a ledger tells. `last`: the decision to show."""
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
    match running(state.owner):
        case None:
            return Driver.NONE if state.owner is None else Driver.ELSEWHERE
        case True:
            return Driver.RUNNING
        case _:
            return Driver.STOPPED


def _transactions(pipeline: Definition) -> tuple[Open, ...] | None:
    try:
        return tuple(open_transactions(pipeline))
    except UsageError as error:
        if error.code != "DELIVERED_NO_TRANSACTIONS":
            raise
        return None


def _receiver_json(report: ReceiverReport) -> dict[str, Any]:
    owner = report.owner
    return {
        "host": owner.host,
        "process": owner.process,
        "gone": is_gone(report),
        "at_ms": report.at_ms,
        "counts": dict(report.counts),
    }


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
