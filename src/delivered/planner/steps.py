"""The steps of each mechanism, in the order in which the engine runs them, with what a crash after each costs.

`tests/unit/test_plan_order.py` runs the engine and compares.
"""

from __future__ import annotations

from delivered.model.capability import SinkCapability
from delivered.model.guarantee import Guarantee
from delivered.model.step import Step, StepId
from delivered.planner import group
from delivered.planner.request import Request
from delivered.planner.spark_steps import AGAIN, log_step, read_step


def batch_steps(request: Request) -> tuple[Step, ...]:
    """What a batch does if nothing fails. Exactly one step decides."""
    if request.is_group:
        return group.batch_steps(request)
    sink = request.sinks[0].capability
    match request.guarantee, request.ledger.carries_rows:
        case Guarantee.EXACTLY_ONCE, True:
            return _one_transaction(request, sink)
        case Guarantee.EXACTLY_ONCE, _:
            return _two_phase(request, sink)
        case Guarantee.AT_LEAST_ONCE, _:
            return _at_least_once(request, sink)
        case _:
            return _at_most_once(request, sink)


def recovery_steps(request: Request) -> tuple[Step, ...]:
    """What a start does first, whether after a crash or not."""
    claim = Step(StepId.RECOVER_CLAIM, "become the only owner of the ledger", "the next start claims again")
    check = Step(StepId.RECOVER_CHECK, "compare ledger and checkpoint", "the next start checks again")
    orphans = Step(StepId.RECOVER_ABORT_ORPHANS, "abort undecided writes", "the next start aborts them")
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return (claim, check, orphans)
    finish = Step(StepId.RECOVER_APPLY, "finish the decided batch", "the next start finishes it")
    return (claim, check, finish, orphans)


def mechanism(request: Request) -> str:
    """How the guarantee is kept, as a phrase."""
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            return group.mechanism(request) if request.is_group else request.sinks[0].capability.mechanism
        case Guarantee.AT_LEAST_ONCE:
            return "acknowledged sends, repeated after a crash"
        case Guarantee.AT_MOST_ONCE:
            return "sends that are never repeated"


def _two_phase(request: Request, sink: SinkCapability) -> tuple[Step, ...]:
    return (
        read_step(request, AGAIN),
        Step(StepId.WRITE_STAGE, sink.stage, AGAIN),
        Step(StepId.WRITE_PREPARE, sink.prepare, AGAIN),
        Step(
            StepId.COMMIT_DECIDE,
            sink.decide,
            "the batch counts, and recovery makes all of it visible",
            decides=True,
        ),
        Step(
            StepId.COMMIT_APPLY,
            sink.apply,
            "what is applied is visible; recovery applies the rest, and Spark's rerun writes nothing",
        ),
        log_step(),
    )


def _one_transaction(request: Request, sink: SinkCapability) -> tuple[Step, ...]:
    return (
        read_step(request, AGAIN),
        Step(StepId.WRITE_STAGE, sink.stage, AGAIN),
        Step(StepId.WRITE_PREPARE, sink.prepare, AGAIN),
        Step(
            StepId.COMMIT_APPLY,
            "rows of each shard into the open transaction",
            "the transaction rolls back; the batch runs again",
        ),
        Step(
            StepId.COMMIT_DECIDE,
            sink.decide,
            "the batch counts and is visible; Spark's rerun writes nothing",
            decides=True,
        ),
        log_step(),
    )


def _at_least_once(request: Request, sink: SinkCapability) -> tuple[Step, ...]:
    return (
        Step(
            StepId.BATCH_BEGIN,
            "a checkpoint's first batch is recorded as begun",
            "nothing was sent; the batch runs again",
        ),
        read_step(request, "the batch runs again; nothing of this shard was sent"),
        Step(StepId.WRITE_SEND, sink.send, "what was sent stays visible and is sent again"),
        Step(StepId.WRITE_FLUSH, "every row acknowledged", "the whole batch is visible and is sent again"),
        Step(
            StepId.COMMIT_RECORD,
            "counts and fingerprint into the ledger",
            "nothing; the batch is recorded as delivered, and Spark's rerun writes nothing",
            decides=True,
        ),
        log_step(),
    )


def _at_most_once(request: Request, sink: SinkCapability) -> tuple[Step, ...]:
    given_up = "the batch is given up, and its records are counted"
    return (
        Step(StepId.BATCH_BEGIN, "the batch is recorded as begun", f"nothing was sent; {given_up}"),
        read_step(request, given_up),
        Step(StepId.WRITE_SEND, sink.send, f"what was sent stays visible; {given_up}"),
        Step(StepId.WRITE_FLUSH, "every row acknowledged or counted as given up", f"the rows are visible; {given_up}"),
        Step(
            StepId.COMMIT_RECORD,
            "counts and fingerprint into the ledger",
            "nothing; the batch is recorded as delivered, and Spark's rerun writes nothing",
            decides=True,
        ),
        log_step(),
    )
