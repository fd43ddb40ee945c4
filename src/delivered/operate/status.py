"""A pipeline's status, asked from outside: needs neither Spark nor the driver, claims nothing and fences nobody.

`problems_of` finds what is wrong in the answers, each with what fixes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from delivered.checkpoint.folder import is_done, logged
from delivered.checkpoint.history import batches, last_audits, totals
from delivered.contract.source import Source
from delivered.engine.context import open_shared_ledger
from delivered.engine.owner import running
from delivered.model.dedup import duration
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import by_source
from delivered.model.patience import within
from delivered.model.work import BatchReport, Decision, LedgerState
from delivered.operate.state import Driver, Problem, SinkStatus, Status
from delivered.operate.transactions import Open, open_transactions
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.receive import has_died
from delivered.planner import Trigger
from delivered.source import lag_by_partition

log = logging.getLogger(__name__)

ASK_S_MAX = 3.0
"""For all servers of a pipeline: a status must not wait as long as the pipeline does, nor a scrape time out."""
_CLOCKS_S = 5.0
"""By which the clocks of two machines may differ. Beyond it, what is shown is wrong, and nothing else: an undecided
transaction that is aborted is written again."""
_STALLED_S_MIN = 60.0
_STALLED_BATCHES = 5


def status(pipeline: Definition) -> Status:
    """Ask checkpoint, ledger, sinks and sources, for `ASK_S_MAX` in all. Never raises for what does not answer: it is a
    problem of the status."""
    with within(ASK_S_MAX):
        return _status(pipeline)


def _status(pipeline: Definition) -> Status:
    problems: list[Problem] = []
    answers: dict[str, Any] = {}
    with _asking(problems):
        incarnation, _ = logged(pipeline.checkpoint)
        state, sinks = _state(pipeline, incarnation)
        last = state.last
        answers |= from_ledger(state, last, sinks)
        answers |= {"visible": last is not None and is_done(pipeline.checkpoint, last.batch)}
    with _asking(problems):
        answers |= {"transactions": _transactions(pipeline)}
    for name, endpoint in pipeline.sources.items():
        if not endpoint.is_spark_own:
            with _asking(problems):
                source = endpoint.source()
                _ask_source(name, source, answers)
                if source.capability().received:
                    answers.setdefault("queues", {})[name] = (endpoint.system, _destination(endpoint))
                source.recheck()
    newest_reports = batches(pipeline.checkpoint, 20)
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
    if at is None:
        return
    with contextlib.closing(source.driver()) as driver:
        newest = driver.newest()
        behind = lag_by_partition({"endOffset": at, "latestOffset": newest}) if newest is not None else None
        add("lag", behind)
        if newest is not None and behind is not None:
            add("waiting_since_ms", driver.waiting_since(json.loads(at) if any(behind.values()) else newest, newest))


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


def _state(pipeline: Definition, incarnation: str | None) -> tuple[LedgerState, list[SinkStatus]]:
    """The ledger's state; every sink, without counts."""
    spec = pipeline.spec
    sinks = spec.open()
    with contextlib.closing(open_shared_ledger(sinks, spec.scope(sinks, incarnation))) as ledger:
        state = ledger.look()
    shown = zip(pipeline.all_sinks, sinks.members, strict=True)
    return state, [SinkStatus(m.name, e.system, 0, 0, m.dead_letters, _destination(e)) for e, m in shown]


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
    yield from receiver_problems(now)
    lag, age = now.lag_total, now.decided_age_s
    if lag and now.driver is Driver.STOPPED and pipeline.trigger.kind is not Trigger.AVAILABLE_NOW:
        yield Problem.build("STOPPED_WITH_LAG", lag=lag, start=start)
    elif lag and age is not None and age > (limit := _stalled_after(pipeline, reports)):
        yield Problem.build("STALLED", age=age, limit=limit, lag=lag)
    for sink, audit in now.audits.items():
        if audit["verdict"] == "broken":
            yield Problem.build("AUDIT_BROKEN", sink=sink, breaches="; ".join(audit["breaches"]))
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
    took = [sum(r.seconds.values()) for r in reports]
    gaps = [(b.decided_at_ms - a.decided_at_ms) / 1000 for a, b in pairwise(reports)]
    usual = sorted([*took, *gaps])[len(took + gaps) // 2] if took else 0.0
    return max(_STALLED_S_MIN, _STALLED_BATCHES * usual, pipeline.batch_s_max or 0.0)
