"""Steps of a batch that goes to several sinks, in the order in which the engine meets them.

`tests/unit/test_plan_order.py` runs the engine and compares.
"""

from __future__ import annotations

from delivered.model.capability import Commit
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
    """By what exactly_once is kept, as a phrase."""
    last = f", {request.decider.name} as the last resource" if _last_resource(request) else ""
    return f"one decision for {len(request.sinks)} sinks{last}"


def order(request: Request) -> tuple[str, ...]:
    """Which sink decides, in which order the others come, and why."""
    decider = request.decider
    named = ", ".join(s.name for s in request.sinks)
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return (
            f"{named}: rows leave to each in this order",
            f"the ledger of {decider.name} records a batch when every sink has it",
        )
    if not _last_resource(request):
        return (
            f"{named}: prepared in this order by each task, applied side by side by the driver",
            f"the ledger of {decider.name} decides for all: every sink can prepare, and it is named first",
        )
    others = ", ".join(s.name for s in _others(request))
    return (
        f"{named}: prepared in this order by each task",
        f"{decider.name} decides for all: {decider.capability.system} cannot promise a batch before it commits, so its "
        "own transaction carries the decision, as the last resource",
        f"{others}: prepared before it, so it is too late for them to say no; applied after it, side by side",
    )


def limits(request: Request) -> tuple[str, ...]:
    """What a reader of several sinks may see (P27)."""
    names = [s.name for s in request.sinks]
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            others = ", ".join(s.name for s in _others(request))
            who = (
                f"a reader of {request.decider.name} sees a batch before a reader of {others} does"
                if _last_resource(request)
                else f"readers of {', '.join(names)} see a batch at different moments"
            )
            return (
                f"{who}: all show it after the last commit.apply, which the log times from commit.decide on (some "
                "10 ms a transaction); after a crash between the two it is the next start that applies the rest",
            )
        case Guarantee.AT_LEAST_ONCE:
            return ("the sinks are not atomic with each other: after a crash one may hold a batch twice, another once",)
        case Guarantee.AT_MOST_ONCE:
            return (
                "the sinks are not atomic with each other: of a batch that was cut off one may hold rows that another "
                "lacks; what was given up is counted for each sink",
            )


def _last_resource(request: Request) -> bool:
    return request.decider.capability.commit is Commit.ONE_TRANSACTION


def _others(request: Request) -> list[SinkFacts]:
    return [s for s in request.sinks if s is not request.decider]


def _exactly_once(request: Request) -> tuple[Step, ...]:
    decider, last = request.decider, _last_resource(request)
    steps = [read_step(request, AGAIN)]
    steps += [Step(StepId.WRITE_STAGE, f"{s.name}: {s.capability.stage}", AGAIN) for s in request.sinks]
    steps += [
        Step(StepId.WRITE_PREPARE, f"{s.name}: {s.capability.prepare}", f"{AGAIN}; what was prepared is aborted")
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
    seen = f"{decider.name} shows it" if last else "no sink shows it yet"
    steps.append(
        Step(
            StepId.COMMIT_DECIDE,
            f"{decider.name}: {decider.capability.decide}; it names the participants of every sink",
            f"the batch counts at every sink: {seen}, and recovery makes the rest visible",
            decides=True,
        )
    )
    after = f"visible at {decider.name} and at" if last else "visible at"
    steps += [
        Step(
            StepId.COMMIT_APPLY,
            f"{s.name}: {s.capability.apply}",
            f"{after} every sink that was applied; recovery applies the rest, and Spark's re-run writes nothing",
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
                "what was sent stays visible, and is sent to every sink once more",
            )
            for s in request.sinks
        ),
        *(
            Step(StepId.WRITE_FLUSH, f"{s.name}: every row acknowledged", "the batch is sent to every sink once more")
            for s in request.sinks
        ),
        _record(request),
        log_step(),
    )


def _at_most_once(request: Request) -> tuple[Step, ...]:
    given_up = "the batch is given up at every sink, and what is given up is counted"
    return (
        Step(
            StepId.BATCH_BEGIN,
            "the batch is recorded as begun, before the first row leaves to any sink",
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
        "nothing; the batch is known to be in everywhere, and Spark's re-run writes nothing",
        decides=True,
    )
