"""Combines rules and steps into a plan: assumptions, limits, what `dedup` recognises, forgets and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from delivered.model.bad_row import OnBadRow
from delivered.model.capability import Commit
from delivered.model.dedup import Dedup
from delivered.model.guarantee import Guarantee
from delivered.model.limits import KEY_TABLE_BYTES, STATE_BYTES_PER_KEY
from delivered.planner import group, sources
from delivered.planner.answer import Plan, Reason, Refusal, seconds
from delivered.planner.request import Request, SinkFacts, SourceFacts, TransformFacts
from delivered.planner.rules import reasons
from delivered.planner.steps import batch_steps, mechanism, recovery_steps


def make_plan(request: Request) -> Plan | Refusal:
    """Answer a request. Pure: the same request, the same answer."""
    reason = next(reasons(request), None)
    if reason is not None:
        return _refusal(request, reason)
    return Plan(
        pipeline=request.pipeline,
        guarantee=request.guarantee,
        mechanism=mechanism(request),
        steps=batch_steps(request),
        recovery=recovery_steps(request),
        ledger=request.ledger,
        assumptions=tuple(_assumptions(request)),
        limits=tuple(_limits(request)),
        warnings=(
            *sources.changed(request),
            *_transform_changed(request),
            *(f.message for f in request.findings),
        ),
        checked=tuple(line for s in request.sinks for line in s.checked),
        records=tuple(f"{part.label}: {part.capability.records}" for part in _by_choice(request)),
        order=group.order(request),
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


def _transform_changed(request: Request) -> Iterator[str]:
    """Warnings if the newest batches ran with another transform."""
    if request.checkpoint.transform_changed is None:
        return
    first, last = request.checkpoint.transform_changed
    ran = f"batch {last}" if first == last else f"batches {first} to {last}"
    yield (
        f"the transform changed: {ran} ran with another version. Its output stays as it is; from batch {last + 1} on "
        "this version runs. An audit recomputes the batches of this version and reports unknown for the others"
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
    found = list(dict.fromkeys(a for s in request.sources for a in s.capability.assumes))
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            found.extend(dict.fromkeys(a for s in request.sinks for a in s.capability.assumes))
            found.extend(_same_rows(request))
            found.extend(_one_row_per_key(request))
        case Guarantee.AT_LEAST_ONCE:
            found.append(f"readers of {_each(request)} tolerate duplicates")
            if request.transform.deterministic is False:
                found.append("a duplicate may differ from the first copy: the transform is not deterministic")
        case Guarantee.AT_MOST_ONCE:
            found.append(
                f"readers of {_each(request)} tolerate missing records; the ledger holds how many were given up"
            )
            if request.transform.kind in ("sql", "python"):
                found.append("a task that runs again gets the same rows as before, in the same shard")
    if request.keeps_state:
        found += _same_state(request)
        found.append("the state lives in Spark's checkpoint and is restored together with the offsets")
    return found


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
    found = []
    if validating:
        found.append(f"a row that is invalid for {' or '.join(validating)} {goes}")
    found += _failing_rows(request.transform, goes)
    stops = "server-side rejections (constraints, topic limits) always fail the query, regardless of on_bad_row"
    tail = f"; {', '.join(blind)} cannot validate rows before it writes" if blind else ""
    return [*found, stops + tail]


def _failing_rows(transform: TransformFacts, goes: str) -> list[str]:
    match transform.kind:
        case "arrow":
            return [f"a row for which {transform.text or 'the transform'} raises an exception {goes}"]
        case "sql" | "python":
            what = "SQL" if transform.kind == "sql" else "a DataFrame's operations"
            return [
                f"a row for which the transform fails stops the query, regardless of on_bad_row: Spark does not tell "
                f"which row {what} failed for. Use try_ functions (try_cast, try_divide), or a function over Arrow "
                "batches (delivered.arrow), whose failing rows are told apart"
            ]
        case _:
            return []


def _each(request: Request) -> str:
    return request.by_count("the sink", "every sink")


def _limits(request: Request) -> list[str]:
    exactly_once = request.guarantee is Guarantee.EXACTLY_ONCE
    limits = list(dict.fromkeys(limit for s in request.sinks for limit in s.capability.limits))
    timeouts = [p for s in request.sinks if (p := s.capability.prepared_timeout_s) is not None]
    if exactly_once:
        if timeouts:
            declared = request.execution.batch_s_max
            tail = f"; a batch may take {seconds(declared)}, as declared" if declared is not None else ""
            limits.append(f"a transaction times out {seconds(min(timeouts))} after its first row{tail}")
        if not all(s.capability.batch_atomic for s in request.sinks):
            limits.append("a reader may see the shards of a batch appear one after another")
    limits.extend(group.limits(request))
    limits.extend(_bad_rows(request))
    for source in request.sources:
        if source.capability.sent_twice and request.dedup is None:
            to = f" to {source.name}" if source.name else ""
            limits.append(f"a record that a producer sent twice{to} is delivered twice: the pipeline has no dedup")
    limits.extend(f"the source {s.label} uses files on this machine" for s in request.sources if s.capability.local)
    limits.extend(f"the sink {s.label} uses files on this machine" for s in request.sinks if s.capability.local)
    return limits


def _dedup(dedup: Dedup, system: str = "") -> tuple[str, ...]:
    """One line for each thing worth knowing before the start.

    Args:
        system: of the sink that decides.
    """
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
