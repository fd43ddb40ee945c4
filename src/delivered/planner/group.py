"""Steps of a batch for several sinks, in the order in which the engine runs them.

`tests/unit/test_plan_order.py` runs the engine and compares.
"""

from __future__ import annotations

from delivered.model.guarantee import Guarantee
from delivered.model.step import Step, StepId
from delivered.planner.request import Request, SinkFacts
from delivered.planner.spark_steps import AGAIN, log_step, read_step


def batch_steps(request: Request) -> tuple[Step, ...]:
    """One step of each kind for each sink. Exactly one step decides."""
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            return _exactly_once(request)
        case Guarantee.AT_LEAST_ONCE:
            return _at_least_once(request)
        case Guarantee.AT_MOST_ONCE:
            return _at_most_once(request)


def mechanism(request: Request) -> str:
    """How exactly_once is kept, as a phrase."""
    last = f", {request.decider.name} as the last resource" if _last_resource(request) else ""
    return f"one decision for {len(request.sinks)} sinks{last}"


def order(request: Request) -> tuple[str, ...]:
    """Which sink decides, the order of the others, and why."""
    decider = request.decider
    named = ", ".join(s.name for s in request.sinks)
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return (
            f"{named}: rows are sent to each in this order",
            f"the ledger of {decider.name} records a batch once every sink has it",
        )
    if not _last_resource(request):
        return (
            f"{named}: each task prepares them in this order; the driver applies them in parallel",
            f"the ledger of {decider.name} decides for all: every sink can prepare, and it is listed first",
        )
    others = ", ".join(s.name for s in _others(request))
    return (
        f"{named}: each task prepares them in this order",
        f"{decider.name} decides for all: {decider.capability.system} cannot prepare a batch before it commits, so its "
        "own transaction carries the decision, as the last resource",
        f"{others}: prepared before it, so none can still vote no; applied after it, in parallel",
    )


def limits(request: Request) -> tuple[str, ...]:
    """What readers of several sinks may see (P27)."""
    names = [s.name for s in request.sinks]
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            others = ", ".join(s.name for s in _others(request))
            who = (
                f"readers of {request.decider.name} see a batch before readers of {others}"
                if _last_resource(request)
                else f"readers of {', '.join(names)} see a batch at different times"
            )
            return (
                f"{who}: it is visible in all after the last commit.apply (about 10 ms per transaction after "
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


def _exactly_once(request: Request) -> tuple[Step, ...]:
    decider, last = request.decider, _last_resource(request)
    steps = [read_step(request, AGAIN)]
    steps += [Step(StepId.WRITE_STAGE, f"{s.name}: {s.capability.stage}", AGAIN) for s in request.sinks]
    steps += [
        Step(StepId.WRITE_PREPARE, f"{s.name}: {s.capability.prepare}", f"{AGAIN}; prepared rows are aborted")
        for s in request.sinks
    ]
    if last:
        steps.append(
            Step(
                StepId.COMMIT_APPLY,
                f"{decider.name}: rows of each shard into the open transaction",
                "the transaction rolls back; the batch runs again for every sink",
            )
        )
    seen = (
        f"and is visible at {decider.name}; recovery makes the rest visible"
        if last
        else "but is not visible yet; recovery makes it visible"
    )
    steps.append(
        Step(
            StepId.COMMIT_DECIDE,
            f"{decider.name}: {decider.capability.decide}; it names the participants of every sink",
            f"the batch counts at every sink {seen}",
            decides=True,
        )
    )
    after = f"visible at {decider.name} and at" if last else "visible at"
    steps += [
        Step(
            StepId.COMMIT_APPLY,
            f"{s.name}: {s.capability.apply}",
            f"{after} every sink that was applied; recovery applies the rest, and Spark's rerun writes nothing",
        )
        for s in (_others(request) if last else request.sinks)
    ]
    return (*steps, log_step())


def _at_least_once(request: Request) -> tuple[Step, ...]:
    return (
        Step(
            StepId.BATCH_BEGIN,
            "a checkpoint's first batch is recorded as begun",
            "nothing was sent; the batch runs again",
        ),
        read_step(request, "the batch runs again; nothing of this shard was sent"),
        *(
            Step(
                StepId.WRITE_SEND,
                f"{s.name}: {s.capability.send}",
                "what was sent stays visible and is sent to every sink again",
            )
            for s in request.sinks
        ),
        *(
            Step(StepId.WRITE_FLUSH, f"{s.name}: every row acknowledged", "the batch is sent to every sink again")
            for s in request.sinks
        ),
        _record(request),
        log_step(),
    )


def _at_most_once(request: Request) -> tuple[Step, ...]:
    given_up = "the batch is given up at every sink, and its records are counted"
    return (
        Step(
            StepId.BATCH_BEGIN,
            "the batch is recorded as begun, before the first row is sent to any sink",
            f"nothing was sent; {given_up}",
        ),
        read_step(request, given_up),
        *(
            Step(StepId.WRITE_SEND, f"{s.name}: {s.capability.send}", f"what was sent stays visible; {given_up}")
            for s in request.sinks
        ),
        *(
            Step(
                StepId.WRITE_FLUSH,
                f"{s.name}: every row acknowledged or counted as given up",
                f"its rows are visible; {given_up}",
            )
            for s in request.sinks
        ),
        _record(request),
        log_step(),
    )


def _record(request: Request) -> Step:
    return Step(
        StepId.COMMIT_RECORD,
        f"counts and fingerprints of every sink into the ledger of {request.decider.name}",
        "nothing; the batch is recorded as delivered everywhere, and Spark's rerun writes nothing",
        decides=True,
    )
