"""What becomes of prepared participants: those that were decided are made visible, idempotently and in parallel; those
that no decision names are aborted; ends that a system confirmed and may have lost are settled by evidence."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import tenacity

from delivered.engine.context import Context
from delivered.model.errors import OutcomeUnknown, PromiseBroken
from delivered.model.identity import Work
from delivered.model.limits import APPLY_TIMEOUT_S, SWEEP_EVERY_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.patience import within
from delivered.model.step import RECOVERY, Moment, StepId, armed, reach
from delivered.model.work import Decision, LedgerState, Prepared

log = logging.getLogger(__name__)

_PARALLEL_MAX = 16


def apply_decided(context: Context, decision: Decision, step: StepId) -> list[Prepared]:
    """Apply every participant of a decision; return those whose prepared rows are missing.

    Runs on the driver. May be called again, by any process of the owner, as long as the decision is kept.

    Raises:
        OutcomeUnknown: a sink did not answer within 120 s. The decision stands; the next start applies it.
    """
    pending = [p for p in decision.participants if p.handle]

    def one(prepared: Prepared) -> Prepared | None:
        work = decision.work(prepared)
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
                    batch=decision.batch,
                    shard=prepared.shard,
                    sink=work.scope.sink,
                    apply_timeout_s=APPLY_TIMEOUT_S,
                    reason=reason,
                )

    failed: list[Prepared] = []
    if not armed() and len(pending) > 1:
        outcomes = context.committers.commit_all([(decision.work(p), p) for p in pending])
        failed = [p for p, o in zip(pending, outcomes, strict=True) if isinstance(o, Failed)]
        pending = [p for p, o in zip(pending, outcomes, strict=True) if isinstance(o, Unknown)]
    if armed() or len(pending) < 2:
        broken = [one(p) for p in pending]
    else:
        with ThreadPoolExecutor(min(_PARALLEL_MAX, len(pending))) as pool:
            broken = list(pool.map(one, pending))
    return failed + [p for p in broken if p is not None]


def abort_late_orphans(context: Context, *keep: Decision) -> None:
    """`abort_orphans`, at most once a minute: tasks of a superseded driver may outlive it, and open participants."""
    if time.monotonic() - context.swept.at_s > SWEEP_EVERY_S:
        abort_orphans(context, *keep)


def abort_orphans(context: Context, *keep: Decision) -> None:
    """Abort every open participant of this pipeline and sink that no decision in `keep` names.

    Raises:
        OutcomeUnknown: some may still be open.
        Fenced: another driver owns the ledger, and some may be its own.
    """
    reach(StepId.RECOVER_ABORT_ORPHANS, Moment.BEFORE)
    context.ledger.check_claim()
    context.swept.at_s = time.monotonic()
    match context.committers.abort_orphans([p for decision in keep for p in decision.participants]):
        case Ok(count):
            if count:
                log.info("aborted %d orphaned participants", count, extra={"step": StepId.RECOVER_ABORT_ORPHANS})
        case Failed(reason) | Unknown(reason):
            raise OutcomeUnknown(
                "ORPHANS_NOT_ABORTED", pipeline=context.scope.pipeline, sink=context.scope.sink, reason=reason
            )
    reach(StepId.RECOVER_ABORT_ORPHANS, Moment.AFTER)


def settle_ends(context: Context, state: LedgerState, *, first: bool) -> None:
    """See that what was decided is visible, by evidence beside the rows, and that no earlier batch is still open.

    Before every batch, and before anything of it is written: the last one was applied, and Spark has logged it, but its
    system may have restarted since. At a start always; later only if something has disturbed the sink.

    Raises:
        OutcomeUnknown: the sink did not answer. DeliveredError: a transaction hangs and cannot be ended.
    """
    if not first and (
        state.last is None or context.committers.ends_hold([p for _, p in _participants(context, state.last)])
    ):
        return
    *older, newest = [None, *state.oldest_first]

    def earlier() -> list[Prepared]:
        decisions = [*filter(None, older), *(d for d in context.ledger.history() if d != newest)]
        return [p for d in decisions for _, p in _participants(context, d)]

    match context.committers.settle_ends([] if newest is None else _participants(context, newest), earlier):
        case Ok(lost):
            if lost:
                log.warning("%d transactions were still open although their end was confirmed; ended them", lost)
        case Failed(reason) | Unknown(reason):
            raise OutcomeUnknown(
                "ENDS_UNKNOWN", pipeline=context.scope.pipeline, sink=context.scope.sink, reason=reason
            )


def confirm_logged(context: Context, logged: Decision) -> None:
    """Apply once more what Spark has logged as done, before orphans are aborted.

    A server that failed over, or lost the end of its log, may hold it as prepared again, which looks like an orphan.

    Raises:
        PromiseBroken: rows of a decided batch are certainly not visible. OutcomeUnknown: the sink did not answer.
    """
    if StepId.RECOVER_APPLY not in RECOVERY[logged.guarantee]:
        return
    known = tuple(p for _, p in _participants(context, logged))
    missing = sorted(
        {
            p.shard
            for p in apply_decided(context, replace(logged, participants=known), StepId.RECOVER_APPLY)
            if not context.committers.was_committed(logged.work(p), p)
        }
    )
    if missing and not context.tolerance.missing_ledger:
        raise PromiseBroken(
            "LOGGED_BATCH_LOST",
            batch=logged.batch,
            pipeline=context.scope.pipeline,
            shards=missing,
            next_batch=logged.batch + 1,
        )


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


def _participants(context: Context, decision: Decision) -> list[tuple[Work, Prepared]]:
    """Those of present sinks: others could be changed since the batch was finished."""
    return [(decision.work(p), p) for p in decision.participants if p.handle and p.sink in context.sinks]
