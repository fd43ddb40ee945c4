"""A pipeline's status, asked from outside: needs neither Spark nor the driver, claims nothing and fences nobody."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from delivered.checkpoint.folder import is_done, logged
from delivered.checkpoint.history import batches, last_audits, totals
from delivered.contract.powers import DatesRecords, HasDedupWindow, HoldsBackWal, ListsReceivers
from delivered.contract.source import Rechecks, Source
from delivered.engine.owner import running
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import by_source
from delivered.model.patience import within
from delivered.model.work import Decision, LedgerState
from delivered.operate.problems import problems_of
from delivered.operate.state import Driver, Problem, SinkStatus, Status
from delivered.operate.transactions import Open, open_transactions
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.source.lag import lag_by_partition

log = logging.getLogger(__name__)

ASK_S_MAX = 3.0
"""For all servers of a pipeline: a status must not wait as long as the pipeline does, nor a scrape time out."""


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
                if isinstance(source, Rechecks):
                    source.recheck()
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
    sinks = spec.open()
    with contextlib.closing(sinks.ledger(spec.scope(sinks, incarnation))) as ledger:
        state = ledger.look()
    shown = zip(pipeline.all_sinks, sinks.members, strict=True)
    return state, [SinkStatus(m.name, e.system, 0, 0, m.dead_letters, _destination(e)) for e, m in shown]


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
