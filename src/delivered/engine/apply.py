"""Apply decided participants, idempotently and in parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import tenacity

from delivered.engine.context import Context
from delivered.model.errors import OutcomeUnknown
from delivered.model.identity import Work
from delivered.model.limits import APPLY_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.patience import within
from delivered.model.step import Moment, StepId, armed, reach
from delivered.model.work import Decision, Prepared

_PARALLEL_MAX = 16


def work_of(decision: Decision, prepared: Prepared) -> Work:
    """A participant's unit of work, at its own sink."""
    return Work(decision.scope_of(prepared), decision.batch, prepared.shard, prepared.attempt)


def apply_decided(context: Context, decision: Decision, step: StepId) -> list[Prepared]:
    """Apply every participant of a decision; return those whose prepared rows are gone.

    Runs on the driver. May be called again, by any process of the owner, as long as the decision is kept.

    Raises:
        OutcomeUnknown: a sink did not answer within 120 s. The decision stands; the next start applies it.
    """
    pending = [p for p in decision.participants if p.handle]

    def one(prepared: Prepared) -> Prepared | None:
        work = work_of(decision, prepared)
        facts = {"batch": decision.batch, "shard": prepared.shard, "sink": work.scope.sink}
        reach(step, Moment.BEFORE, **facts)
        match _settle(context, work, prepared):
            case Ok():
                reach(step, Moment.AFTER, **facts)
                return None
            case Failed():
                return prepared
            case Unknown(reason):
                raise OutcomeUnknown(
                    "APPLY_UNKNOWN",
                    f"Batch {decision.batch}, shard {prepared.shard} is decided, but sink {work.scope.sink!r} did "
                    f"not confirm within {APPLY_TIMEOUT_S:.0f} s that it is visible: {reason}.",
                    next_step="start the pipeline again once the sink responds; recovery finishes the batch",
                )

    failed: list[Prepared] = []
    if not armed() and len(pending) > 1:
        outcomes = context.committers.commit_all([(work_of(decision, p), p) for p in pending])
        failed = [p for p, o in zip(pending, outcomes, strict=True) if isinstance(o, Failed)]
        pending = [p for p, o in zip(pending, outcomes, strict=True) if isinstance(o, Unknown)]
    if armed() or len(pending) < 2:
        broken = [one(p) for p in pending]
    else:
        with ThreadPoolExecutor(min(_PARALLEL_MAX, len(pending))) as pool:
            broken = list(pool.map(one, pending))
    return failed + [p for p in broken if p is not None]


def _settle(context: Context, work: Work, prepared: Prepared) -> Outcome[None]:
    """Retry until the outcome is known. Safe: `Committer.commit` is idempotent for a participant."""
    asking = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda outcome: isinstance(outcome, Unknown)),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=2),
        stop=tenacity.stop_after_delay(APPLY_TIMEOUT_S),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else Unknown("never asked"),
    )
    with within(APPLY_TIMEOUT_S):
        outcome: Outcome[None] = asking(context.committers.commit, work, prepared)
    return outcome
