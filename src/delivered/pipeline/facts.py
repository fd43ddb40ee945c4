"""Collects facts for the planner: on a pipeline's definition, its columns at every sink, checkpoint, ledger, live
systems, and session."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from delivered.checkpoint import (
    find_damaged,
    find_unwritable,
    is_done,
    newest_offsets,
    read_logged,
    read_view,
    repartitions_before,
    sidecar,
)
from delivered.checkpoint.sidecar import find_changed_dedup, read_decider, read_removed
from delivered.contract.sink import Sink
from delivered.contract.source import Finding, Source
from delivered.engine import Member, Sinks
from delivered.engine.context import Context, check_targets, find_living, open_shared_ledger
from delivered.engine.recover import check_next_batch, find_other_ledgers, find_rename, judge
from delivered.model.capability import Guarantee, SourceCapability, WriteMode
from delivered.model.errors import (
    DeliveredError,
    InvariantBroken,
    MissingExtra,
    Refused,
    TargetChanged,
    Unreachable,
    UsageError,
    missing_extra,
)
from delivered.model.identity import SOURCE, Scope
from delivered.model.options import find_option, resolve_secret
from delivered.model.patience import asking_once
from delivered.model.work import CheckpointView, LedgerState, Owner
from delivered.pipeline.changing import changing_in_sql
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, Item, Projection, datasets
from delivered.pipeline.registry import PREFIX, connectors
from delivered.pipeline.spec import CHECKPOINT, NO_INCARNATION, PipelineSpec, Reading, SinkSpec
from delivered.pipeline.sql import UNKNOWN, Place, SqlFacts, check_sql, is_readable
from delivered.planner import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    Refusal,
    Request,
    SinkFacts,
    SourceFacts,
    TransformFacts,
    make_plan,
)
from delivered.planner.request import Alternatives

# Whether a sink upserts by the key that changes of its source name their rows by.


def check_change_key(pipeline: Definition, sink: Endpoint, mode: WriteMode) -> Iterator[Finding]:
    """A refusal if the sink gets the source's own columns; a warning after SQL, which may give others their names."""
    endpoints = list(pipeline.sources.values())
    if not mode.upserts or len(endpoints) != 1 or endpoints[0].is_spark_own:
        return
    if pipeline.transform.kind not in ("none", "sql"):
        return
    source = endpoints[0].source()
    try:
        key, wanted = source.row_key(), {name.lower() for name in mode.keys}
        columns = {name.lower() for name in source.planned().schema().names} if key else set()
    except DeliveredError:
        return  # said by the source's preflight
    if not key or wanted == {name.lower() for name in key} or not wanted <= columns:
        return
    refuses = pipeline.transform.kind == "none" and sink.projection.is_all
    yield Finding.build(
        "CHANGE_KEY",
        refuses=refuses,
        sink=sink.label,
        keys=", ".join(mode.keys),
        source=endpoints[0].label,
        row_keys=", ".join(key),
        key_columns=",".join(key),
        alternative="" if refuses else "; or ignore this, if the transform gives other columns these names",
    )


ASYNC_PROGRESS = "asyncprogresstrackingenabled"
ASYNC_CONF = f"spark.sql.streaming.{ASYNC_PROGRESS}"

_SILENT_S_MAX = 3.0
"""How long a plan waits for one answer; a start waits longer."""

_SETTINGS = Path(__file__).with_name("spark-settings.txt")
"""Names of Spark's settings (tools/sql_arguments.py)."""
_MISSPELT = 0.92
"""Likeness of two names, as difflib has it, from which one is the other with a letter or two wrong."""

_SPARK_SOURCES_REPLAYABLE = frozenset(
    {"kafka", "delta", "iceberg", "parquet", "json", "csv", "text", "orc", "avro", "rate", "rate-micro-batch"}
)
"""Sources of Spark and its ecosystem whose offsets can be reread."""


@dataclass(frozen=True)
class SessionFacts:
    """Where a pipeline is to run.

    Attributes:
        async_progress: as the session is configured.
        jvm: of its driver; None: elsewhere (Spark Connect).
        check_transform: checks the transform against the source's columns, and its columns against the sinks; reports
            what makes the session slow.
    """

    master: str
    async_progress: bool
    jvm: psutil.Process | None
    check_transform: Callable[[], tuple[Finding, ...]]


def gather(pipeline: Definition, session: SessionFacts | None, *, offline: bool, takeover: bool) -> Request:
    """Everything about a pipeline, for `make_plan`.

    Args:
        session: None: there is none yet; servers are then asked once.
        offline: contact no server and no checkpoint; the plan then rests on the definition alone.

    Raises:
        UsageError: bad options.
        Refused: Spark's newest log files are cut off.
        Unreachable: the checkpoint or the ledger cannot be read.
    """
    with asking_once(_SILENT_S_MAX) if session is None else contextlib.nullcontext():
        return _gather(pipeline, session, offline, takeover)


def _gather(pipeline: Definition, session: SessionFacts | None, offline: bool, takeover: bool) -> Request:
    # All before the first server is asked: a bad option of the last sink is not to wait for the first source.
    opened = [(n, e, None if e.is_spark_own else e.source()) for n, e in pipeline.sources.items()]
    declared = [(e, e.sink()) for e in pipeline.all_sinks]
    sources = tuple(_build_source(*one, offline) for one in opened)
    readable = not any(f.refuses for s in sources for f in s.findings)
    sinks = tuple(_build_sink(pipeline, e, s, offline, readable) for e, s in declared)
    checkpoint = CheckpointFacts(pipeline.checkpoint, takeover=takeover)
    findings = [*(f for s in sources for f in s.findings), *(f for s in sinks for f in s.findings)]
    blocked = any(f.refuses for f in findings) or len({s.name for s in sinks}) < len(sinks) or not sinks
    if not offline and not blocked:
        checkpoint = _build_checkpoint(pipeline, session, takeover)
        sources = tuple(
            _with_position(s, *one, pipeline.checkpoint, checkpoint) for s, one in zip(sources, opened, strict=True)
        )
        blocked = any(f.refuses for s in sources for f in s.findings)
    transform = _build_transform(pipeline)
    transform = replace(transform, findings=(*transform.findings, *_find_misspelt(pipeline.conf)))
    if not offline and not blocked:
        found = check_columns(pipeline) if session is None else session.check_transform()
        found += _run_preflight(lambda: _find_no_webhook(pipeline))
        transform = replace(transform, findings=(*transform.findings, *found))
    return Request(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        sources=sources,
        sinks=sinks,
        checkpoint=checkpoint,
        transform=transform,
        execution=_build_execution(pipeline, session),
        on_bad_row=pipeline.on_bad_row,
        dead_letters=sinks[-1].name if pipeline.dead_letter is not None else None,
        dedup=pipeline.dedup,
        alternatives=alternatives,
        output_mode=pipeline.output_mode,
    )


def _find_misspelt(conf: Iterable[str]) -> Iterator[Finding]:
    """Warnings of names that Spark does not know and that are like one that it does: it ignores them without a word.

    Others may belong to an extension, or to a later version.
    """
    names = [name for name in conf if name.lower().startswith("spark.")]
    known = {name.lower(): name for name in _SETTINGS.read_text(encoding="ascii").split()} if names else {}
    for name in names:
        near = get_close_matches(name.lower(), list(known), n=1, cutoff=_MISSPELT)
        if near and name not in known.values():  # in another case, Spark ignores it, too
            yield Finding.build("SETTING_UNKNOWN", refuses=False, name=name, near=known[near[0]])


def _find_no_webhook(pipeline: Definition) -> Iterator[Finding]:
    """Nothing. Raises UsageError: a reference of `notify` leads nowhere here."""
    for key, reference in () if pipeline.notify is None else pipeline.notify.references:
        resolve_secret(f"notify.{key}", reference)
    yield from ()


def _build_transform(pipeline: Definition) -> TransformFacts:
    """The transform with the sinks' projections: both must give the same rows when a batch reruns."""
    facts = pipeline.transform.facts()
    texts = " ".join(text for e in pipeline.sinks for text in e.projection.texts)
    if not texts:
        return facts
    kind = "sql" if facts.kind == "none" else facts.kind
    return replace(facts.seen(changing_in_sql(texts)), kind=kind)


def _build_source(name: str, endpoint: Endpoint, source: Source | None, offline: bool) -> SourceFacts:
    """Args: source: None: Spark's own."""
    name = "" if name == SOURCE else name
    if source is None:
        known = endpoint.system.lower() in _SPARK_SOURCES_REPLAYABLE
        capability = SourceCapability(
            system=endpoint.system,
            replayable=known,
            sent_twice=endpoint.system.lower() == "kafka",
            why_not="" if known else "nothing is known of this format",
            assumes=(f"Spark's source {endpoint.system!r} gives the same records for the same offsets",),
        )
        return SourceFacts(endpoint.label, capability, name=name)
    findings = () if offline else _run_preflight(source.preflight, endpoint)
    if "subscribepattern" in map(str.lower, endpoint.options) and not offline and not findings:
        findings = _run_preflight(lambda: _find_no_match(endpoint, source), endpoint)
    return SourceFacts(endpoint.label, source.capability(), (*_find_unencrypted(endpoint, source), *findings), name)


def _with_start(facts: SourceFacts, endpoint: Endpoint) -> SourceFacts:
    """With a refusal if a new checkpoint cannot start where the options say."""
    named = any(option.lower().startswith(("starting", "ending")) for option in endpoint.options)
    if endpoint.is_spark_own or not named:
        return facts

    def check() -> Sequence[Finding]:
        with contextlib.closing(endpoint.source().driver()) as driver:
            driver.check_initial()
        return ()

    return replace(facts, findings=(*facts.findings, *_run_preflight(check, endpoint)))


def _with_position(
    facts: SourceFacts, name: str, endpoint: Endpoint, source: Source | None, location: str, known: CheckpointFacts
) -> SourceFacts:
    """With a refusal if the checkpoint's position is another source's, or a new one cannot start where it should."""
    if source is None:
        return facts
    # An earlier start counts, even without a batch.
    first = sidecar.read_first(location, name) if known.newest is None else None
    logged = known.offsets.get(name) if first is None else json.dumps(first)
    if logged is None:
        return _with_start(facts, endpoint) if known.newest is None else facts

    def check() -> Sequence[Finding]:
        try:
            offsets = json.loads(logged)
        except ValueError:
            offsets = None
        with contextlib.closing(source.driver()) as driver:
            try:
                driver.check_offsets(offsets if isinstance(offsets, dict) else {logged: None})
            except InvariantBroken as error:
                return [Finding.refusal(error)]
        return ()

    return replace(facts, findings=(*facts.findings, *_run_preflight(check, endpoint)))


def _build_sink(pipeline: Definition, endpoint: Endpoint, sink: Sink, offline: bool, readable: bool) -> SinkFacts:
    """Args: readable: no source refuses; else it is not asked, and waited for, once more."""
    findings = () if offline else _run_preflight(lambda: sink.preflight(pipeline.guarantee), endpoint)
    checked: tuple[str, ...] = ()
    if not offline and not any(f.refuses for f in findings):
        if readable:
            findings += _run_preflight(lambda: check_change_key(pipeline, endpoint, sink.capability().write))
        scope = Scope(pipeline.name, endpoint.name or sink.name, NO_INCARNATION)
        findings += _run_preflight(lambda: sink.check_ledger(scope), endpoint)
        checked = tuple(sink.checked_target())
    found = (*_find_unencrypted(endpoint, sink), *_find_loop(pipeline, endpoint), *findings)
    return SinkFacts(endpoint.name or sink.name, endpoint.label, sink.capability(), found, checked)


def _find_no_match(endpoint: Endpoint, source: Source) -> Iterator[Finding]:
    with contextlib.closing(source.driver()) as driver:
        newest = driver.newest() or {}
    if all(name.startswith("#") for name in newest):  # ours, about the others
        yield Finding.build("PATTERN_UNMATCHED", refuses=False, source=endpoint.label)


def _find_loop(pipeline: Definition, endpoint: Endpoint) -> Iterator[Finding]:
    """A refusal if the source reads again whatever this sink writes. With `where`, some rows may be meant to return."""
    read = {(_here(s), name) for e in pipeline.sources.values() for s, name in datasets(e)}
    for server, name in datasets(endpoint) if endpoint.projection.where is None else ():
        if name and (_here(server), name) in read:
            yield Finding.build("SINK_IS_SOURCE", refuses=True, sink=endpoint.label, name=name)


def _here(server: str) -> str:
    """A server of this machine under one name."""
    return re.sub(r"//(localhost|\[::1\])(?=:|$)", "//127.0.0.1", server)


def _find_unencrypted(endpoint: Endpoint, part: Any) -> Iterator[Finding]:
    """Warnings of a source's or sink's options, and of those that it wraps."""
    for sentence in getattr(getattr(part, "options", None), "in_clear", ()):
        yield Finding.build("UNENCRYPTED", refuses=False, label=endpoint.label, sentence=sentence)
    for inner in ("source", "sink", "queue"):
        if (wrapped := getattr(part, inner, None)) is not None and hasattr(wrapped, "options"):
            yield from _find_unencrypted(endpoint, wrapped)


def _run_preflight(preflight: Any, endpoint: Endpoint | None = None) -> tuple[Finding, ...]:
    """A preflight that raises becomes a refusal: a server that is down does not deserve a traceback.

    Args:
        endpoint: what is checked; if its server is not reached, the plan says which other one listens there.
    """
    try:
        return tuple(find_another(endpoint, f.code, f.message) or f if f.refuses else f for f in preflight())
    except Unreachable as error:
        if (another := find_another(endpoint, error.code, error.message)) is None:
            raise
        return (another,)
    except (Refused, MissingExtra) as error:
        return (Finding.refusal(error),)
    except ModuleNotFoundError as error:
        missing = missing_extra(str(error))
        if missing is None:
            raise
        return (Finding.refusal(missing),)


def _build_execution(pipeline: Definition, session: SessionFacts | None) -> Execution:
    options = {k.lower(): v.lower() for e in pipeline.all_sinks for k, v in e.options.items()}
    conf = {k.lower(): str(v).lower() for k, v in pipeline.conf.items()}
    asynchronous = "true" in (options.get(ASYNC_PROGRESS), conf.get(ASYNC_CONF))
    master = session.master if session is not None else pipeline.master or "local"
    return Execution(
        trigger=pipeline.trigger.kind,
        async_progress=asynchronous or (session is not None and session.async_progress),
        cluster=not master.startswith("local"),
        batch_s_max=pipeline.batch_s_max,
    )


def _build_checkpoint(pipeline: Definition, session: SessionFacts | None, takeover: bool) -> CheckpointFacts:
    spec = pipeline.spec
    sinks = spec.open()
    incarnation, newest = read_logged(pipeline.checkpoint)
    # Before the ledger, which a running pipeline advances.
    done = newest is not None and is_done(pipeline.checkpoint, newest)
    scope = spec.scope(sinks, incarnation)
    context = Context.open(sinks, scope, pipeline.guarantee, Owner("plan"), spec.tolerance)
    try:
        state = context.ledger.look()
        if newest is not None and (damaged := find_damaged(pipeline.checkpoint, newest)) is not None:
            raise _refused_damage(pipeline.checkpoint, *damaged, _find_newest(state))
        view = _next_batch(pipeline.checkpoint)
        others = () if newest is None else find_other_ledgers(context.ledger, state)
        other_name = find_rename(view, scope, spec.tolerance, others)
        refusals = dict(_refusals(context, view, state)) if newest is not None else {}
    finally:
        context.close()
    # Over Spark Connect the owner's process is the server, which outlives the query.
    connect = session is not None and session.jvm is None
    return CheckpointFacts(
        location=pipeline.checkpoint,
        incarnation=incarnation,
        newest=newest,
        ledger_newest=_find_newest(state),
        ledger_offsets="" if state.last is None else state.last.offsets,
        ledger_others=() if state.last is None else state.last.other_sinks,
        prepared_at=frozenset(p.sink for p in state.last.participants if p.handle) if state.last else frozenset(),
        owner=None if connect else find_living(state.owner, session.jvm if session is not None else None),
        unwritable=find_unwritable(pipeline.checkpoint),
        renamed=other_name,
        refusals=refusals,
        ledger_missing=newest is not None
        and _find_newest(state) is None
        and not pipeline.missing_ledger
        and (newest > 0 or done),
        ledger_behind=newest is not None
        and not pipeline.missing_ledger
        and _is_behind(state, pipeline.checkpoint, newest + int(done)),
        takeover=takeover,
        earlier=_build_earlier(state),
        accepts_new=pipeline.new_checkpoint,
        transform_changed=_find_transform_change(state, spec.transform),
        offsets_text=newest_offsets(pipeline.checkpoint),
        unfinished=newest is not None and not done,
        other_decider=_find_other_decider(pipeline, state, newest, done),
        removed=read_removed(pipeline.checkpoint),
        other_dedup=find_changed_dedup(pipeline.checkpoint, pipeline.dedup, scope.sink)
        if incarnation is not None
        else None,
    )


def _refusals(
    context: Context, view: CheckpointView, state: LedgerState
) -> Iterator[tuple[Guarantee, Refused | InvariantBroken]]:
    """What would stop the next batch, by guarantee."""
    if _find_newest(state) == view.batch and not view.offsets:
        return  # a running query logs them just now
    changed: TargetChanged | None = None
    try:
        check_targets(context, state.last)
    except TargetChanged as error:
        changed = error
    for guarantee in Guarantee:
        try:
            check_next_batch(replace(context, guarantee=guarantee), view, state)
            if changed is not None:
                raise changed
        except (Refused, InvariantBroken) as error:
            yield guarantee, error


def _refused_damage(location: str, log: str, batch: int, decided: int | None) -> Refused:
    """Args: decided: the newest batch of the ledger."""
    file = f"{location.removeprefix('file://').rstrip('/')}/{log}/{batch}"
    if log == "commits":
        return Refused("CHECKPOINT_DAMAGED.COMMITS", file=file, batch=batch)
    if decided is not None and decided >= batch:
        return Refused("CHECKPOINT_DAMAGED.DECIDED", file=file, batch=batch, location=location)
    return Refused("CHECKPOINT_DAMAGED.OFFSETS", file=file, batch=batch)


def _is_behind(state: LedgerState, checkpoint: str, following: int) -> bool:
    """Whether a ledger that knows the checkpoint lacks batches before the one that Spark runs first."""
    newest = _find_newest(state)
    decided = -1 if state.last is None else state.last.batch
    if newest in (None, following) or decided >= following - 1:
        return False
    return decided < following - 1 - repartitions_before(checkpoint, following)


def _find_other_decider(pipeline: Definition, state: LedgerState, newest: int | None, done: bool) -> str | None:
    """The sink that decided before and was removed, if the ledger asked now may lack a batch that it decided."""
    if newest is None or pipeline.missing_ledger:
        return None
    former = read_decider(pipeline.checkpoint)
    now = {e.sink_name for e in pipeline.all_sinks}
    own = -1 if state.last is None else state.last.batch
    up_to_date = own == newest or (done and own == newest - repartitions_before(pipeline.checkpoint, newest + 1))
    return None if former in now or up_to_date else former


def _find_newest(state: LedgerState) -> int | None:
    return max((r.batch for r in (state.last, state.started) if r is not None), default=None)


def _find_transform_change(state: LedgerState, now: str) -> tuple[int, int] | None:
    if state.last is None or state.last.transform in ("", now):
        return None
    return state.last.transforms[-1].batch, state.last.batch


def _build_earlier(state: LedgerState) -> EarlierFacts | None:
    if state.last is not None or state.started is not None or not state.earlier:
        return None
    earlier = state.earlier[0]
    return EarlierFacts(earlier.scope.incarnation, earlier.batch, earlier.offsets)


def check_start(spec: PipelineSpec, sinks: Sinks) -> None:
    """Check that a query of the Spark idiom can start: options, guarantee, server, checkpoint, ledger.

    Runs where the batches will be planned, on the driver. Claims nothing and writes no row; what can change until the
    first batch is checked again there.

    Args:
        sinks: opened from the spec, for the query's columns.

    Raises:
        UsageError, Refused: the request is invalid or cannot be fulfilled.
        InvariantBroken: ledger and checkpoint do not belong together.
        Unreachable: a server or the checkpoint did not answer.
    """
    if spec.checkpoint is None:
        raise UsageError("CHECKPOINT_MISSING.QUERY")
    _refused_by_plan(spec, sinks, spec.checkpoint)
    _refused_by_ledger(spec, sinks, spec.checkpoint)


def check_sources(sources: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Check that what a query of the Spark idiom reads is there: Spark would find out in the first batch. A server that
    does not answer is waited for, by the query.

    Args:
        sources: format and options of each; those of Spark's own are left to Spark.

    Raises:
        Refused: a topic, table or folder is missing.
    """
    for name, options in sources:
        if not name.startswith(PREFIX):
            continue
        for finding in Endpoint(name, Reading.parse(options)[1]).source().preflight():
            if finding.refuses and finding.code.endswith("_MISSING"):
                raise Refused(finding.code, finding.message, finding.next_step)


def check_source_checkpoints(sources: Iterable[tuple[str, Mapping[str, str]]], own: str | None) -> None:
    """Check that a source of the Spark idiom that was given a checkpoint is alone in it.

    Args:
        sources: as in `check_sources`; a frame that is read twice is one source.
        own: checkpoint of the query; None: unknown.

    Raises:
        UsageError: it is another query's, or several sources have it.
    """
    found: dict[str, tuple[str, Mapping[str, str]]] = {}
    for name, options in sources:
        location = find_option(options, CHECKPOINT) if name.startswith(PREFIX) else None
        if location is None:
            continue
        if own is not None and _spelled(location) != _spelled(own):
            raise UsageError("SOURCE_CHECKPOINT.OTHER", location=location, own=own)
        if found.setdefault(_spelled(location), (name, options)) != (name, options):
            raise UsageError("SOURCE_CHECKPOINT.SHARED", location=location)


def _spelled(location: str) -> str:
    """Its path: the same store has several names, s3:// and s3a://, or none, if it is Hadoop's default."""
    return os.path.normpath(Path(re.sub(r"^\w+:(//[^/]*)?/*", "/", location)).absolute())


def _refused_by_plan(spec: PipelineSpec, sinks: Sinks, checkpoint: str) -> None:
    """By the planner's rules that need only the sink: source and transform are unknown here."""
    facts = [_sink_facts(spec, s, m) for s, m in zip(spec.sinks, sinks.members, strict=True)]
    source = SourceFacts("the query's source", SourceCapability("spark", replayable=True))
    # A stream appends; what a user's own foreachBatch gets is the user's business.
    mode = "complete" if facts[0].capability.write.complete and spec.batch is not None else "append"
    known = CheckpointFacts(checkpoint)
    request = Request(
        spec.pipeline, spec.guarantee, (source,), tuple(facts), known, alternatives=alternatives, output_mode=mode
    )
    plan = make_plan(request)
    if isinstance(plan, Refusal):
        raise plan.error


def _sink_facts(spec: PipelineSpec, declared: SinkSpec, member: Member) -> SinkFacts:
    label = Endpoint(declared.system, declared.options).label
    ledger = member.sink.check_ledger(Scope(spec.pipeline, member.name, NO_INCARNATION))
    findings = (*member.sink.preflight(spec.guarantee), *ledger)
    return SinkFacts(member.name, label, member.sink.capability(), findings)


def _refused_by_ledger(spec: PipelineSpec, sinks: Sinks, checkpoint: str) -> None:
    incarnation, newest = read_logged(checkpoint)
    scope = spec.scope(sinks, incarnation or NO_INCARNATION)
    ledger = open_shared_ledger(sinks, scope)
    try:
        state = ledger.look()
        if newest is not None and (damaged := find_damaged(checkpoint, newest)) is not None:
            raise _refused_damage(checkpoint, *damaged, _find_newest(state))
        view = _next_batch(checkpoint)
        others = () if newest is None else find_other_ledgers(ledger, state)
    finally:
        ledger.close()
    if _find_newest(state) == view.batch and not view.offsets:
        return  # the offsets that Spark will log are known only in the batch
    judge(state, view, scope, spec.guarantee, spec.tolerance, others)


def _next_batch(checkpoint: str) -> CheckpointView:
    """The batch that Spark will run first: the newest logged one, unless it is committed. Offsets: empty if unknown."""
    incarnation, newest = read_logged(checkpoint)
    if incarnation is None or newest is None:
        return CheckpointView(incarnation or NO_INCARNATION, 0, "", None)
    view = read_view(checkpoint)
    if view.logged == view.batch:
        view = replace(view, batch=view.batch + 1, offsets="")
    return replace(view, repartitions=repartitions_before(checkpoint, view.batch))


def alternatives() -> Alternatives:
    """What a refusal can recommend, from all installed connectors."""
    installed = connectors().values()
    able = [(c.name, c.transactions) for c in installed if c.transactions is not None]
    return Alternatives(
        tuple(f"{name} with {option}" if option else name for name, option in able),
        tuple(c.name for c in installed if c.key_table),
    )


# What a plan says of a transform's SQL, and of its columns at every sink, without Spark: what a start would refuse.
# Only what is certain is refused. What only Spark knows is a finding, `SQL_UNCHECKED`, and left to `run`.

UNCHECKED = "SQL_UNCHECKED"
_HARMLESS = re.compile(
    r"spark\.sql\.(shuffle|streaming|execution|adaptive|files|ansi\.enabled$|session\.timeZone)", re.IGNORECASE
)
"""Settings that change neither grammar nor names nor types."""
_SESSION_FROM = frozenset(("SPARK_REMOTE", "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"))
"""Variables that give a session more than is known here."""
_STAND_INS = (pa.string(), pa.binary(), pa.int64(), pa.bool_(), pa.timestamp("us", "UTC"))
"""Types in the place of an unknown one: what a sink refuses for each of them, with the same words, it refuses."""


def check_columns(pipeline: Definition) -> tuple[Finding, ...]:
    """Findings about the SQL and the columns that reach each sink. Asks sinks for their tables; changes nothing."""
    transform = pipeline.transform
    unknown = transform.kind == "python" or (transform.kind == "arrow" and transform.function is not None)
    if unknown or any(e.is_spark_own for e in pipeline.sources.values()):
        return ()
    try:
        sources = {n: e.source().planned().schema() for n, e in pipeline.sources.items()}
        if transform.kind != "sql":
            columns: pa.Schema | None = project(
                next(iter(sources.values())), Projection(tuple(map(Item, transform.select)))
            )
        else:
            facts = _sql(pipeline, sources)
            if facts.error is not None:
                return (Finding.refusal(facts.error),)
            if facts.doubt:
                return (Finding.build(UNCHECKED, refuses=False, reason=facts.doubt),)
            if facts.aggregates and pipeline.output_mode == "append" and pipeline.dedup is None:
                return (Finding.refusal(UsageError("OUTPUT_MODE.AGGREGATES")),)
            if facts.sorts and pipeline.output_mode != "complete":
                return (Finding.refusal(UsageError("OUTPUT_MODE.SORTS", mode=pipeline.output_mode)),)
            if facts.outer is not None and pipeline.dedup is None:
                return (Finding.refusal(facts.outer),)
            columns = facts.columns
        found: list[Finding] = []
        for endpoint in pipeline.sinks if columns is not None else ():
            _check_projection(pipeline, endpoint, columns)
            own = project(columns, endpoint.projection)
            _check(endpoint, own)
            found += _audited_by(pipeline, endpoint, own)
        return tuple(found)
    except UsageError as error:
        return (Finding.refusal(error),)
    except DeliveredError:
        return ()  # a server went away meanwhile: the start reports it


def check_analysed(
    pipeline: Definition, analyse: Callable[[Mapping[str, pa.Schema]], tuple[Sequence[pa.Schema], bool]]
) -> tuple[Finding, ...]:
    """The same with a session, which knows all that its SQL means. Reads no records; runs no Python transform.

    Args:
        analyse: columns by source -> those that reach each sink, and whether the transform is deterministic. Raises
            UsageError: it, or a sink's select, does not fit the columns.
    """
    own = any(e.is_spark_own for e in pipeline.sources.values())
    if own or pipeline.transform.kind not in ("none", "sql"):
        return ()
    try:
        schemas, repeatable = analyse({n: e.source().planned().schema() for n, e in pipeline.sources.items()})
        for endpoint, columns in zip(pipeline.sinks, schemas, strict=True):
            _check(endpoint, columns)
    except UsageError as error:
        return (Finding.refusal(error),)
    except DeliveredError:
        return ()  # a server went away meanwhile: the start reports it
    named = pipeline.transform.deterministic is not None or changing_in_sql(pipeline.transform.sql)
    return () if repeatable or named else (Finding.build("SQL_NOT_DETERMINISTIC", refuses=False),)


def _sql(pipeline: Definition, sources: Mapping[str, pa.Schema]) -> SqlFacts:
    if not is_readable():
        return SqlFacts(doubt="the package sqlglot is not installed")
    facts = check_sql(pipeline.transform.sql, sources, builtin=_is_builtin(pipeline))
    return SqlFacts(doubt=facts.error.message) if facts.error is not None and _has_session() else facts


def _is_builtin(pipeline: Definition) -> bool:
    """Whether the pipeline's session has Spark's own functions, tables and grammar, and no others."""
    if _SESSION_FROM & os.environ.keys() or (pipeline.master or "local").startswith("sc:"):
        return False
    settings = {**spark_defaults(), **pipeline.conf}
    return not any(k.startswith(("spark.sql.", "spark.remote")) and not _HARMLESS.match(k) for k in settings)


def _has_session() -> bool:
    """Whether a start in this process uses a session that is there, with whatever was registered in it."""
    spark = sys.modules.get("pyspark.sql")
    return spark is not None and spark.SparkSession.getActiveSession() is not None


def spark_defaults() -> dict[str, str]:
    """Spark's configuration file: a key and a value on each line, with blanks or an equals sign between them."""
    folder = os.environ.get("SPARK_CONF_DIR") or f"{os.environ.get('SPARK_HOME', '')}/conf"
    try:
        text = (Path(folder) / "spark-defaults.conf").read_text(encoding="utf-8")
    except OSError:
        return {}
    lines = (re.split(r"[\s=]+", x.strip(), maxsplit=1) for x in text.splitlines() if not x.lstrip().startswith("#"))
    return {words[0]: words[1] for words in lines if len(words) > 1}


def project(columns: pa.Schema, projection: Projection) -> pa.Schema:
    """The columns that one sink gets. Raises UsageError: it names a column that the rows do not have."""
    types = {f.name.lower(): f.type for f in columns}
    for item in projection.items:
        if item.sql is None and item.name.lower() not in types:
            raise UsageError("SELECT_COLUMN.PLAN", column=item.name, names=", ".join(columns.names))
    kinds = [(i.name, types[i.name.lower()] if i.sql is None else UNKNOWN) for i in projection.items]
    return pa.schema(kinds) if kinds else columns


def _check_projection(pipeline: Definition, endpoint: Endpoint, columns: pa.Schema) -> None:
    """Raises UsageError: `select` or `where` of a sink is no SQL over the rows."""
    projection, sink = endpoint.projection, endpoint.name or endpoint.sink().name
    texts = [("select", item.sql, "SELECT ", " FROM source") for item in projection.items if item.sql is not None]
    if projection.where is not None:
        texts.append(("where", projection.where, "SELECT 1 AS n FROM source WHERE ", ""))
    builtin = _is_builtin(pipeline) and not _has_session()
    for key, text, before, after in texts:
        place = Place(f"The `{key}` of the sink {sink!r}", before, after, rows="the rows have")
        error = check_sql(text, {"source": columns}, builtin=builtin, place=place).error
        if error is not None:
            raise error


def _audited_by(pipeline: Definition, endpoint: Endpoint, columns: pa.Schema) -> Iterator[Finding]:
    """What identifies records for an audit, and is no SQL over the sink's columns: a run goes on, no audit does."""
    for name, text in {**pipeline.audit_by, **endpoint.audit}.items():
        query = f"SELECT {text} FROM source"  # noqa: S608 - nothing runs it
        facts = check_sql(query, {"source": columns}, builtin=_is_builtin(pipeline))
        if facts.error is not None:
            sink, names = endpoint.sink().name, ", ".join(columns.names)
            yield Finding.build(
                "AUDIT_EXPRESSION.PLAN", refuses=False, name=name, text=text, sink=endpoint.name or sink, columns=names
            )


def _check(endpoint: Endpoint, columns: pa.Schema) -> None:
    """Raises UsageError: a start would refuse the columns."""
    sink = endpoint.sink()
    _certain(sink.check_schema, columns)
    if UNKNOWN not in columns.types:
        sink.check_rows(columns)
    if (check := sink.target_check()) is None:
        return
    try:
        check(columns)
    except UsageError as error:
        step = re.sub(r"(ADD COLUMN .+?) None", r"\1 ...", error.next_step or "")  # of an unknown type
        raise UsageError(error.args[0], error.message, step) from None


def _certain(check: Callable[[pa.Schema], None], columns: pa.Schema) -> None:
    """Raises UsageError: the check does, whatever the unknown types are."""
    errors = []
    for schema in _possible(columns):
        try:
            check(schema)
        except UsageError as error:
            errors.append(error)
            continue
        return
    if len({e.message for e in errors}) == 1:
        raise errors[0]


def _possible(columns: pa.Schema) -> Iterator[pa.Schema]:
    if UNKNOWN not in columns.types:
        yield columns
        return
    for kind in _STAND_INS:
        yield pa.schema([f.with_type(kind) if f.type == UNKNOWN else f for f in columns])


# What listens at an address, for a pipeline that was given another system's host and port, or the wrong protocol.
# Looked at only when a plan failed because a server did not answer as it should. Each probe is a connection that
# sends what a client of one system sends first, and looks at the first bytes of the answer.

_TIMEOUT_S = 1.0
_ANSWER_BYTES_MAX = 64
_AWAY = re.compile(r"(DELIVERED_)?(\w+_(UNREACHABLE|NO_ANSWER|CREDENTIALS)|CREDENTIALS_REFUSED)")
_PLACE = re.compile(r"(?<![\w.])(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][\w.-]*):(\d{1,5})\b")
_WANTS_TLS = re.compile(r"(SASL_)?SSL|[a-z+]*ssl://.*|(amqps|https)://.*", re.IGNORECASE)

KAFKA, POSTGRES, MYSQL, RABBITMQ = "Kafka", "PostgreSQL", "MySQL or MariaDB", "RabbitMQ (AMQP 0-9-1)"
PULSAR, STOMP, HTTP, GRPC = "Pulsar", "ActiveMQ (STOMP)", "an HTTP server", "a gRPC server"
_EXPECTED = {
    "kafka": KAFKA,
    "postgres": POSTGRES,
    "outbox": POSTGRES,
    "mysql": MYSQL,
    "rabbitmq": RABBITMQ,
    "pulsar": PULSAR,
    "activemq": STOMP,
    "rocketmq": GRPC,
}
_SWITCH = {
    "kafka": "kafka.security.protocol",
    "rabbitmq": "the url's scheme, amqp:// or amqps://",
    "pulsar": "the url's scheme, pulsar:// or pulsar+ssl://",
    "activemq": "the url's scheme, stomp:// or stomp+ssl://",
}
"""What turns TLS on and off, by system; the others negotiate it on one port."""


def _is_mysql(answer: bytes) -> bool:
    return answer[4:5] in (b"\x0a", b"\xff") and int.from_bytes(answer[:3], "little") < 512


_CORRELATION = b"\x7e\x11\xf0\x0d"
PROBES: tuple[tuple[str, bytes, Callable[[bytes], bool]], ...] = (
    (MYSQL, b"", _is_mysql),  # the server speaks first
    (POSTGRES, bytes.fromhex("0000000804d2162f"), lambda answer: answer in (b"S", b"N")),  # SSLRequest
    (RABBITMQ, b"AMQP\x00\x00\x00\x00", lambda answer: answer == b"AMQP\x00\x00\x09\x01"),  # no such version
    (
        KAFKA,  # ApiVersions, version 0
        bytes.fromhex("0000001300120000") + _CORRELATION + b"\x00\x09delivered",
        lambda answer: answer[4:8] == _CORRELATION,
    ),
    (
        PULSAR,  # CONNECT of protocol version 19; CONNECTED or ERROR
        bytes.fromhex("0000000d00000009080212050a01782013"),
        lambda answer: answer[8:10] in (b"\x08\x03", b"\x08\x09"),
    ),
    (
        STOMP,
        b"CONNECT\naccept-version:1.2\nhost:delivered\n\n\x00",
        lambda answer: answer.lstrip().startswith((b"CONNECTED", b"ERROR")),
    ),
    (HTTP, b"GET / HTTP/1.1\r\nHost: delivered\r\nConnection: close\r\n\r\n", lambda answer: answer[:5] == b"HTTP/"),
    (
        GRPC,  # the preface and empty settings; settings
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),
        lambda answer: answer[3:5] == b"\x04\x00",
    ),
)


@cache
def identify(host: str, port: int) -> tuple[str | None, bool]:
    """What listens there, None: nothing known; and whether it was asked over TLS. Takes a second.

    Each address is asked once: a start that waits for its server must not knock at another one's door all the time.
    """
    with ThreadPoolExecutor(1 + len(PROBES)) as pool:
        speaks_tls = pool.submit(_speaks_tls, host, port)  # beside the others: silence costs its second once
        for tls in (False, True):
            if tls and not speaks_tls.result():
                break
            answers = list(pool.map(partial(_ask, host, port, tls), (question for _, question, _ in PROBES)))
            found = (name for (name, _, fits), answer in zip(PROBES, answers, strict=True) if answer and fits(answer))
            if name := next(found, None):
                return name, tls
    return None, False


def _speaks_tls(host: str, port: int) -> bool:
    try:
        with _connect(host, port, tls=True):
            return True
    except (OSError, ValueError):
        return False


def _ask(host: str, port: int, tls: bool, question: bytes) -> bytes:
    """The first bytes of the answer; empty: none in time."""
    try:
        with _connect(host, port, tls=tls) as connection:
            connection.sendall(question)
            return connection.recv(_ANSWER_BYTES_MAX)
    except (OSError, ValueError):
        return b""


def _connect(host: str, port: int, *, tls: bool) -> socket.socket:
    """With TLS: with whoever it is, for nothing is sent that must not be read. Raises OSError, ValueError."""
    plain = socket.create_connection((host, port), _TIMEOUT_S)
    if not tls:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with plain:  # wrapped, the connection is no longer this object's
        return context.wrap_socket(plain, server_hostname=host)


def find_another(endpoint: Endpoint | None, code: str, text: str) -> Finding | None:
    """The refusal, if what an endpoint's options name is another server than it needs.

    Args:
        code, text: of the error with which the server was not reached. Others are not looked into.
    """
    if endpoint is None or endpoint.system not in _EXPECTED or not _AWAY.fullmatch(code):
        return None
    for host, port in _PLACE.findall(text):
        given = next((v for v in endpoint.options.values() if f"{host}:{port}" in v), None)
        if given is not None:
            error = _mismatch(endpoint, given, host, int(port))
            return None if error is None else Finding.refusal(error)
    return None


def _mismatch(endpoint: Endpoint, given: str, host: str, port: int) -> Refused | None:
    place, system = f"{host}:{port}", "mysql" if given.startswith("mysql:") else endpoint.system  # of an outbox
    expected = HTTP if given.startswith("http") else _EXPECTED[system]
    found, tls = identify(host.strip("[]"), port)
    if found is None:
        return None
    if found != expected:
        return Refused("ANOTHER_SERVER.PROTOCOL", place=place, found=found, expected=expected)
    switch = _SWITCH.get(endpoint.system)
    if switch is None or tls == any(_WANTS_TLS.fullmatch(v) for v in endpoint.options.values()):
        return None
    condition = "ANOTHER_SERVER.TLS_ALONE" if tls else "ANOTHER_SERVER.NO_TLS"
    return Refused(condition, place=place, expected=expected, switch=switch)
