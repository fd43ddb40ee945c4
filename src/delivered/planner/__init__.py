"""Phase 2, before anything runs: request -> rules -> Plan(steps) or Refusal. Pure: no clock, no server, no Spark.

The plan of a request that no rule refuses: its steps, what they assume, what limits them, what `dedup` recognises.

The steps are those of the mechanism (model/step.py), each with what it does and what a crash right after it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from delivered.model.capability import Commit, Dedup, Guarantee, SinkCapability
from delivered.model.identity import batches_text
from delivered.model.limits import KEY_TABLE_BYTES, STATE_BYTES_PER_KEY
from delivered.model.rows import OnBadRow
from delivered.model.step import MECHANISMS, RECOVERY, Mechanism, Step, StepId, steps_of
from delivered.planner.answer import Plan, Reason, Refusal, seconds, to_json, to_text
from delivered.planner.request import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    Request,
    SinkFacts,
    SourceFacts,
    TransformFacts,
    Trigger,
    reasons,
    sink_warnings,
    source_warnings,
)

__all__ = [
    "CheckpointFacts",
    "EarlierFacts",
    "Execution",
    "Plan",
    "Refusal",
    "Request",
    "SinkFacts",
    "SourceFacts",
    "TransformFacts",
    "Trigger",
    "make_plan",
    "to_json",
    "to_text",
]


def make_plan(request: Request) -> Plan | Refusal:
    """Answer a request. Pure: the same request, the same answer."""
    reason = next(reasons(request), None)
    if reason is not None:
        return _refusal(request, reason)
    return Plan(
        pipeline=request.pipeline,
        guarantee=request.guarantee,
        mechanism=_mechanism(request),
        steps=_batch_steps(request),
        recovery=tuple(_RECOVERY[name] for name in RECOVERY[request.guarantee]),
        ledger=request.ledger,
        assumptions=tuple(_assumptions(request)),
        limits=tuple(_limits(request)),
        warnings=(
            *source_warnings(request),
            *sink_warnings(request),
            *_warn_of_transform_change(request),
            *map(str, request.findings),
        ),
        checked=tuple(line for s in request.sinks for line in s.checked),
        records=tuple(f"{part.label}: {part.capability.records}" for part in _by_choice(request)),
        order=_sink_order(request),
        dedup=_dedup(request.dedup, request.decider.capability.system) if request.dedup is not None else (),
    )


def _by_choice(request: Request) -> list[SourceFacts | SinkFacts]:
    """Sources and sinks that read or write records by one of several clients."""
    parts: tuple[SourceFacts | SinkFacts, ...] = (*request.sources, *request.sinks)
    return [part for part in parts if part.capability.records]


def _refusal(request: Request, reason: Reason) -> Refusal:
    weaker = [g for g in (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE) if g is not request.guarantee]
    # A server's features do not depend on whether it is up; but while it is down, no guarantee is possible.
    nearest = None if reason.transient else next((g for g in weaker if _can_be_had(request, g)), None)
    return Refusal(
        request.pipeline, request.guarantee, reason.code, reason.text, nearest, reason.way_out, reason.transient
    )


def _can_be_had(request: Request, guarantee: Guarantee) -> bool:
    return all(reason.transient for reason in reasons(replace(request, guarantee=guarantee)))


def _warn_of_transform_change(request: Request) -> Iterator[str]:
    """Warnings if the newest batches ran with another transform."""
    if request.checkpoint.transform_changed is None:
        return
    first, last = request.checkpoint.transform_changed
    yield (
        f"the transform changed: {batches_text(first, last)} ran with another version. Its output stays as it is; from "
        f"batch {last + 1} on this version runs. An audit recomputes the batches of this version and reports unknown "
        "for the others"
    )
    if request.guarantee is Guarantee.EXACTLY_ONCE and _promises(request):
        yield (
            f"if batch {last} is decided but one of its transactions timed out, the query stops (REPLAY_DIFFERS): "
            "start once with the previous transform"
        )


def _promises(request: Request) -> list[float]:
    """Prepared timeouts of the sinks that have one, in seconds."""
    return [
        s.capability.prepared_timeout_s
        for s in request.sinks
        if s.capability.commit is Commit.TWO_PHASE and s.capability.prepared_timeout_s is not None
    ]


def _assumptions(request: Request) -> list[str]:
    lines = list(dict.fromkeys(a for s in request.sources for a in s.capability.assumes))
    lines.extend(dict.fromkeys(a for s in request.sinks for a in s.capability.assumed_under(request.guarantee)))
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            lines.extend(_same_rows(request))
            lines.extend(_one_row_per_key(request))
        case Guarantee.AT_LEAST_ONCE:
            lines.append(f"readers of {_every_sink(request)} tolerate duplicates")
            if request.transform.deterministic is False:
                lines.append("a duplicate may differ from the first copy: the transform is not deterministic")
        case Guarantee.AT_MOST_ONCE:
            lines.append(
                f"readers of {_every_sink(request)} tolerate missing records; the ledger holds how many were given up"
            )
            if request.transform.kind in ("sql", "python"):
                lines.append("a task that runs again gets the same rows as before, in the same shard")
    if request.keeps_state:
        lines += _same_state(request)
        lines.append("the state lives in Spark's checkpoint and is restored together with the offsets")
    return lines


def _same_state(request: Request) -> list[str]:
    """Assumption of a stateful query: Spark keeps the state of a decided batch's rerun."""
    assumptions = []
    if request.dedup is not None and not request.dedup.in_table:
        assumptions.append("copies of one record in one batch are identical")
    if request.transform.deterministic is False:
        assumptions.append(
            f"no batch reruns after commit.decide: the transform{_changing(request)} is not deterministic and keeps "
            "state, so the query would stop (REPLAY_DIFFERS) before it goes on from values that were never delivered"
        )
    else:
        assumptions.append(
            "a rerun of a decided batch yields the same rows: the query keeps state, so they are read and compared, "
            "and a difference stops it (REPLAY_DIFFERS)"
        )
    return assumptions


def _changing(request: Request) -> str:
    return f" (it calls {', '.join(request.transform.changing)})" * bool(request.transform.changing)


def _same_rows(request: Request) -> list[str]:
    """Assumption of exactly_once for a stateless transform: only an expired transaction needs its rows again."""
    promises = _promises(request)
    if not promises or request.keeps_state or request.transform.kind == "none":
        return []
    span = seconds(min(promises))
    if request.transform.deterministic is False:
        return [
            f"no decided transaction times out ({span}): the transform{_changing(request)} is not deterministic, so "
            "its rows could not be rewritten, and the query would stop with an error"
        ]
    return [f"a rerun of a batch yields the same rows (matters only if a transaction times out: {span})"]


def _one_row_per_key(request: Request) -> list[str]:
    """Of output mode update: a row is a key's newest result, so a second one cannot be one, too."""
    writes = [s.capability.write for s in request.sinks if request.output_mode == "update"]
    keys = dict.fromkeys(w.keys_text for w in writes if w.upserts and w.version is None)
    return [f"a batch yields one row for each {key}: a second one stops the query (KEY_TWICE)" for key in keys]


def _bad_rows(request: Request) -> list[str]:
    """What happens to invalid rows, and which sinks cannot detect them before they write."""
    if request.on_bad_row is OnBadRow.FAIL:
        return []
    goes = (
        "is dropped and counted as given up"
        if request.on_bad_row is OnBadRow.DROP
        else f"goes to {request.dead_letters} in the same batch, with the reason"
    )
    written = [s.name for s in request.sinks if s.name != request.dead_letters]
    validating = [s.name for s in request.sinks if s.name in written and s.capability.validates]
    blind = [n for n in written if n not in validating]
    lines = []
    if validating:
        lines.append(f"a row that is invalid for {' or '.join(validating)} {goes}")
    lines += _failing_rows(request.transform, goes)
    stops = "server-side rejections (constraints, topic limits) always fail the query, regardless of on_bad_row"
    tail = f"; {', '.join(blind)} cannot validate rows before it writes" if blind else ""
    return [*lines, stops + tail]


def _failing_rows(transform: TransformFacts, goes: str) -> list[str]:
    match transform.kind:
        case "arrow":
            return [f"a row for which {transform.text or 'the transform'} raises an exception {goes}"]
        case "sql" | "python":
            what = "SQL" if transform.kind == "sql" else "a DataFrame's operations"
            return [
                f"a row for which the transform fails stops the query, regardless of on_bad_row: Spark does not report "
                f"which row {what} failed for. Use try_ functions (try_cast, try_divide), or a function over Arrow "
                "batches (delivered.arrow), whose failing rows are known"
            ]
        case _:
            return []


def _every_sink(request: Request) -> str:
    return request.by_count("the sink", "every sink")


def _limits(request: Request) -> list[str]:
    exactly_once = request.guarantee is Guarantee.EXACTLY_ONCE
    limits = list(dict.fromkeys(li for s in request.sinks for li in s.capability.limits_under(request.guarantee)))
    timeouts = [p for s in request.sinks if (p := s.capability.prepared_timeout_s) is not None]
    if exactly_once:
        if timeouts:
            declared = request.execution.batch_s_max
            tail = f"; a batch may take {seconds(declared)}, as declared" if declared is not None else ""
            limits.append(f"a transaction times out {seconds(min(timeouts))} after its first row{tail}")
        if not all(s.capability.batch_atomic for s in request.sinks):
            limits.append("a reader may see the shards of a batch appear one after another")
    limits.extend(_limits_of_several(request))
    limits.extend(_bad_rows(request))
    for source in request.sources:
        if source.capability.sent_twice and request.dedup is None:
            to = f" to {source.name}" if source.name else ""
            limits.append(f"a record that a producer sent twice{to} is delivered twice: the pipeline has no dedup")
    for sink in request.sinks:
        if why := sink.capability.why_read_again(dedup=request.dedup is not None):
            limits.append(f"an audit of {sink.label} does not continue where the last one stopped: {why}")
    limits.extend(f"the source {s.label} uses files on this machine" for s in request.sources if s.capability.local)
    limits.extend(f"the sink {s.label} uses files on this machine" for s in request.sinks if s.capability.local)
    return limits


def _dedup(dedup: Dedup, system: str = "") -> tuple[str, ...]:
    """One line for each thing worth knowing before the start. Args: system: of the sink that decides."""
    if dedup.in_table:
        return _dedup_in_table(dedup, system)
    twice = Dedup(dedup.by, 2 * dedup.within_ms).within
    return (
        f"by {dedup.by_text}, before the transform: under every guarantee, a record whose {dedup.time} is at most "
        f"{dedup.within} after that of its key's first record is dropped; the audit counts it and does not call it "
        "lost",
        f"forgets: a duplicate more than {dedup.within} after its key's first record is a new record once the newest "
        f"{dedup.time} of the previous batches is {twice} past that first record",
        f"late: a record more than {dedup.within} older than the newest of the previous batches is dropped, even if it "
        "is the first of its key; one timestamp in the future makes all later records late",
        "a record without a key (one of the expressions is null) is a duplicate of no other",
        f"state: about {STATE_BYTES_PER_KEY} bytes of executor memory per key of 36 characters, for every key of the "
        f"last {twice} by {dedup.time}; all rows are shuffled by key",
    )


def _dedup_in_table(dedup: Dedup, system: str) -> tuple[str, ...]:
    size = KEY_TABLE_BYTES.get(system, max(KEY_TABLE_BYTES.values()))
    return (
        f"by {dedup.by_text}, before the transform: under every guarantee, a record whose {dedup.time} is at most "
        f"{dedup.within} from that of a delivered record of its key is dropped; the audit counts it and does not call "
        "it lost",
        "kept in tables next to the ledger: a key counts as seen if and only if its batch is decided",
        f"forgets: a key whose {dedup.time} is more than {dedup.within} before the newest one that the previous "
        "batches delivered; a later duplicate is a new record. A timestamp in the future counts as now",
        "late: no record is dropped for being late",
        "a record without a key (one of the expressions is null) is a duplicate of no other",
        f"costs: about {size} bytes in the database for every key of the last {dedup.within} by {dedup.time}, whatever "
        "its length; each key is looked up once, written twice and deleted twice; all rows are shuffled by key and "
        "buffered in their task until it has seen all its keys",
    )


_AGAIN = "nothing is visible; the batch runs again"


def _batch_steps(request: Request) -> tuple[Step, ...]:
    """A batch's steps without failures, each kind once per sink that has it. Exactly one decides."""
    ids = steps_of(_mechanism_of(request), keys_in_table=request.dedup is not None and request.dedup.in_table)
    steps: list[Step] = []
    for name in ids:
        decided = any(step.decides for step in steps)
        steps += (_move if name is StepId.COMMIT_APPLY and not decided else _STEPS[name])(request)
    return tuple(steps)


def _mechanism_of(request: Request) -> Mechanism:
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return MECHANISMS[request.guarantee][0]
    if not request.ledger.carries_rows:
        return Mechanism.TWO_PHASE
    return Mechanism.ONE_TRANSACTION if len(request.sinks) == 1 else Mechanism.LAST_RESOURCE


def _mechanism(request: Request) -> str:
    """How the guarantee is kept, as a phrase."""
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            return _mechanism_of_exactly_once(request)
        case Guarantee.AT_LEAST_ONCE:
            return "acknowledged sends, repeated after a crash"
        case Guarantee.AT_MOST_ONCE:
            return "sends that are never repeated"


_RECOVERY = {
    step.id: step
    for step in (
        Step(StepId.RECOVER_CLAIM, "become the only owner of the ledger", "the next start claims again"),
        Step(StepId.RECOVER_CHECK, "compare ledger and checkpoint", "the next start checks again"),
        Step(StepId.RECOVER_APPLY, "finish the decided batch", "the next start finishes it"),
        Step(StepId.RECOVER_ABORT_ORPHANS, "abort undecided writes", "the next start aborts them"),
    )
}

_KEEP = Step(
    StepId.DEDUP_KEEP,
    "in the deciding transaction: admitted keys count, expired ones are deleted",
    "keys and decision commit together or not at all",
)
_LOG = Step(StepId.LOG, "Spark's own commit log", "nothing; the next batch runs")

Steps = list[Step]


def _each(
    request: Request,
    step: StepId,
    does: Callable[[SinkCapability], str],
    on_crash: str,
    sinks: Sequence[SinkFacts] | None = None,
) -> Steps:
    """One step per sink, in order."""
    chosen = request.sinks if sinks is None else sinks
    return [Step(step, _at(request, s, does(s.capability)), on_crash) for s in chosen]


def _at(request: Request, sink: SinkFacts, does: str) -> str:
    return request.by_count(does, f"{sink.name}: {does}")


def _given_up(request: Request) -> str:
    return f"the batch is given up{request.by_count('', ' at every sink')}, and its records are counted"


def _after_read(request: Request) -> str:
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            return _AGAIN
        case Guarantee.AT_LEAST_ONCE:
            return "the batch runs again; nothing of this shard was sent"
        case Guarantee.AT_MOST_ONCE:
            return _given_up(request)


def _begin(request: Request) -> Steps:
    if request.guarantee is Guarantee.AT_LEAST_ONCE:
        return [
            Step(
                StepId.BATCH_BEGIN,
                "the first batch sent this way is recorded as started",
                "nothing was sent; the batch runs again",
            )
        ]
    before = request.by_count("", ", before the first row is sent to any sink")
    return [
        Step(StepId.BATCH_BEGIN, f"the batch is recorded as started{before}", f"nothing was sent; {_given_up(request)}")
    ]


def _read(request: Request) -> Steps:
    return [Step(StepId.SOURCE_READ, _source(s), _after_read(request)) for s in request.sources]


def _source(source: SourceFacts) -> str:
    name = f"{source.name}: " if source.name else ""
    return f"{name}{source.label}, {'replayable by offset' if source.capability.replayable else 'not replayable'}"


def _admit(request: Request) -> Steps:
    return [Step(StepId.DEDUP_NOTE, "admitted keys are recorded, but do not count yet", _after_read(request))]


def _stage(request: Request) -> Steps:
    return _each(request, StepId.WRITE_STAGE, lambda sink: sink.stage, _AGAIN)


def _prepare(request: Request) -> Steps:
    return _each(
        request,
        StepId.WRITE_PREPARE,
        lambda sink: sink.prepare,
        _AGAIN + request.by_count("", "; prepared rows are aborted"),
    )


def _send(request: Request) -> Steps:
    if request.guarantee is Guarantee.AT_LEAST_ONCE:
        lost = f"what was sent stays visible and is sent{request.by_count('', ' to every sink')} again"
    else:
        lost = f"what was sent stays visible; {_given_up(request)}"
    return _each(request, StepId.WRITE_SEND, lambda sink: sink.send, lost)


def _flush(request: Request) -> Steps:
    if request.guarantee is Guarantee.AT_LEAST_ONCE:
        again = request.by_count(
            "the complete batch is visible and is sent again", "the batch is sent to every sink again"
        )
        return _each(request, StepId.WRITE_FLUSH, lambda _: "every row acknowledged", again)
    seen = f"{request.by_count('the', 'its')} rows are visible; {_given_up(request)}"
    return _each(request, StepId.WRITE_FLUSH, lambda _: "every row acknowledged or counted as given up", seen)


def _decide(request: Request) -> Steps:
    sink, at_once = request.decider, _mechanism_of(request) is not Mechanism.TWO_PHASE
    does = _at(request, sink, sink.capability.decide)
    does += request.by_count("", "; it names the participants of every sink")
    if at_once:
        one = "the batch counts and is visible; Spark's rerun writes nothing"
        several = f"and is visible at {sink.name}; recovery makes the rest visible"
    else:
        one = "the batch counts, and recovery makes all of it visible"
        several = "but is not visible yet; recovery makes it visible"
    after = request.by_count(one, f"the batch counts at every sink {several}")
    return [Step(StepId.COMMIT_DECIDE, does, after, decides=True)]


def _move(request: Request) -> Steps:
    """The deciding sink's move, in its transaction."""
    does = _at(request, request.decider, "rows of each shard into the open transaction")
    again = f"the transaction rolls back; the batch runs again{request.by_count('', ' for every sink')}"
    return [Step(StepId.COMMIT_APPLY, does, again)]


def _apply(request: Request) -> Steps:
    rest = "recovery applies the rest, and Spark's rerun writes nothing"
    decider, last = request.decider, _mechanism_of(request) is Mechanism.LAST_RESOURCE
    several = f"visible at {f'{decider.name} and at ' * last}every sink that was applied"
    after = f"{request.by_count('what is applied is visible', several)}; {rest}"
    others = [s for s in request.sinks if not last or s is not decider]
    return _each(request, StepId.COMMIT_APPLY, lambda s: s.apply, after, others)


def _record(request: Request) -> Steps:
    several = f"counts and fingerprints of every sink into the ledger of {request.decider.name}"
    does = request.by_count("counts and fingerprint into the ledger", several)
    everywhere = request.by_count("", " everywhere")
    after = f"nothing; the batch is recorded as delivered{everywhere}, and Spark's rerun writes nothing"
    return [Step(StepId.COMMIT_RECORD, does, after, decides=True)]


_STEPS: dict[StepId, Callable[[Request], Steps]] = {
    StepId.BATCH_BEGIN: _begin,
    StepId.SOURCE_READ: _read,
    StepId.DEDUP_NOTE: _admit,
    StepId.WRITE_STAGE: _stage,
    StepId.WRITE_PREPARE: _prepare,
    StepId.WRITE_SEND: _send,
    StepId.WRITE_FLUSH: _flush,
    StepId.DEDUP_KEEP: lambda _: [_KEEP],
    StepId.COMMIT_DECIDE: _decide,
    StepId.COMMIT_APPLY: _apply,
    StepId.COMMIT_RECORD: _record,
    StepId.LOG: lambda _: [_LOG],
}


def _mechanism_of_exactly_once(request: Request) -> str:
    """How exactly_once is kept, as a phrase."""
    if len(request.sinks) == 1:
        return request.decider.capability.mechanism
    last = f", {request.decider.name} as the last resource" if _last_resource(request) else ""
    return f"one decision for {len(request.sinks)} sinks{last}"


def _sink_order(request: Request) -> tuple[str, ...]:
    """Which sink decides, the order of the others, and why; empty: there is one."""
    if len(request.sinks) == 1:
        return ()
    decider = request.decider
    names = ", ".join(s.name for s in request.sinks)
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return (
            f"{names}: rows are sent to each in this order",
            f"the ledger of {decider.name} records a batch once every sink has it",
        )
    if not _last_resource(request):
        return (
            f"{names}: each task prepares them in this order; the driver applies them in parallel",
            f"the ledger of {decider.name} decides for all: every sink can prepare, and it is listed first",
        )
    others = ", ".join(s.name for s in _others(request))
    return (
        f"{names}: each task prepares them in this order",
        f"{decider.name} decides for all: {decider.capability.system} cannot prepare a batch before it commits, so its "
        "own transaction carries the decision, as the last resource",
        f"{others}: prepared before it, so none can still vote no; applied after it, in parallel",
    )


def _limits_of_several(request: Request) -> tuple[str, ...]:
    """What readers of several sinks may see (P27)."""
    names = [s.name for s in request.sinks]
    if len(names) == 1:
        return ()
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            others = ", ".join(s.name for s in _others(request))
            visibility = (
                f"readers of {request.decider.name} see a batch before readers of {others}"
                if _last_resource(request)
                else f"readers of {', '.join(names)} see a batch at different times"
            )
            return (
                f"{visibility}: it is visible in all after the last commit.apply (about 10 ms per transaction after "
                "commit.decide; the log has the time); after a crash in between, the next start applies the rest",
            )
        case Guarantee.AT_LEAST_ONCE:
            return ("writes are not atomic across sinks: after a crash, one may hold a batch twice and another once",)
        case Guarantee.AT_MOST_ONCE:
            return (
                "writes are not atomic across sinks: of an interrupted batch, one may hold rows that another lacks; "
                "given-up records are counted per sink",
            )


def _last_resource(request: Request) -> bool:
    return request.ledger.carries_rows


def _others(request: Request) -> list[SinkFacts]:
    return [s for s in request.sinks if s is not request.decider]
