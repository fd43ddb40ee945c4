"""The steps of a plan: those of its mechanism (model/step.py), what each does, and what a crash after it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delivered.model.capability import SinkCapability
from delivered.model.guarantee import Guarantee
from delivered.model.step import MECHANISMS, RECOVERY, Mechanism, Step, StepId, steps_of
from delivered.planner import group
from delivered.planner.request import Request, SinkFacts, SourceFacts

_AGAIN = "nothing is visible; the batch runs again"


def batch_steps(request: Request) -> tuple[Step, ...]:
    """A batch's steps without failures, each kind once per sink that has it. Exactly one decides."""
    ids = steps_of(mechanism_of(request), keys_in_table=request.dedup is not None and request.dedup.in_table)
    found: list[Step] = []
    for name in ids:
        decided = any(step.decides for step in found)
        found += (_move if name is StepId.COMMIT_APPLY and not decided else _STEPS[name])(request)
    return tuple(found)


def recovery_steps(request: Request) -> tuple[Step, ...]:
    """The first steps of every start, with or without a preceding crash."""
    return tuple(_RECOVERY[name] for name in RECOVERY[request.guarantee])


def mechanism_of(request: Request) -> Mechanism:
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return MECHANISMS[request.guarantee][0]
    if not request.ledger.carries_rows:
        return Mechanism.TWO_PHASE
    return Mechanism.ONE_TRANSACTION if len(request.sinks) == 1 else Mechanism.LAST_RESOURCE


def mechanism(request: Request) -> str:
    """How the guarantee is kept, as a phrase."""
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            return group.mechanism(request)
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
                "a checkpoint's first batch is recorded as begun",
                "nothing was sent; the batch runs again",
            )
        ]
    before = request.by_count("", ", before the first row is sent to any sink")
    return [
        Step(StepId.BATCH_BEGIN, f"the batch is recorded as begun{before}", f"nothing was sent; {_given_up(request)}")
    ]


def _read(request: Request) -> Steps:
    return [Step(StepId.SOURCE_READ, _source(s), _after_read(request)) for s in request.sources]


def _source(source: SourceFacts) -> str:
    name = f"{source.name}: " if source.name else ""
    return f"{name}{source.label}, {'replayable by offset' if source.capability.replayable else 'not replayable'}"


def _note(request: Request) -> Steps:
    return [Step(StepId.DEDUP_NOTE, "admitted keys are noted, but do not count yet", _after_read(request))]


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
            "the whole batch is visible and is sent again", "the batch is sent to every sink again"
        )
        return _each(request, StepId.WRITE_FLUSH, lambda _: "every row acknowledged", again)
    seen = f"{request.by_count('the', 'its')} rows are visible; {_given_up(request)}"
    return _each(request, StepId.WRITE_FLUSH, lambda _: "every row acknowledged or counted as given up", seen)


def _decide(request: Request) -> Steps:
    sink, at_once = request.decider, mechanism_of(request) is not Mechanism.TWO_PHASE
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
    decider, last = request.decider, mechanism_of(request) is Mechanism.LAST_RESOURCE
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
    StepId.DEDUP_NOTE: _note,
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
