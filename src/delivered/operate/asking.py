"""A pipeline's status, asked from outside: needs neither Spark nor the driver, claims nothing and fences nobody.

`look` asks for the status of many, by files, folders of them, and ledgers. A file with
`ledger: {format: postgres, url: ..., dbtable: ...}` names a ledger, in the options of a sink to it: the status of each
of its pipelines, without their files, is what their decisions and owners say.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from delivered.audit.seal import Sealed
from delivered.checkpoint import is_done, read_logged, started_ms
from delivered.checkpoint.history import batches, last_audits, new_dead_letters, runs, samples, totals
from delivered.contract.source import HeldBack, Retained, Source
from delivered.engine.context import is_running, open_ledger, open_shared_ledger
from delivered.model.errors import DeliveredError, UsageError, shown
from delivered.model.identity import Scope, by_source
from delivered.model.patience import within
from delivered.model.work import BatchReport, Decision, LedgerState
from delivered.operate.rules import problems_of
from delivered.operate.status import (
    Driver,
    Problem,
    SealStatus,
    SinkStatus,
    Status,
    pace_of,
    read_seals,
    retained_by,
    unsealed_from,
)
from delivered.operate.transactions import Open, open_transactions
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered.pipeline.file import load_yaml
from delivered.pipeline.spec import NO_INCARNATION
from delivered.source import lag_by_partition

log = logging.getLogger(__name__)
T = TypeVar("T")

ASK_S_MAX = 3.0
"""For all servers of a pipeline: a status must not wait as long as the pipeline does, nor a scrape time out."""
_PIPELINES_AT_ONCE = 8
_PIPELINE, _LEDGER = "pipeline", "ledger"
_NOBODY = "-"


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
        incarnation, _ = read_logged(pipeline.checkpoint)
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
    if (lives := is_running(state.owner)) is None:
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
