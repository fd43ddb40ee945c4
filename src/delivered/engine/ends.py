"""Before a batch: transactions whose system confirmed an end that it may have lost."""

from __future__ import annotations

import logging
from dataclasses import replace

from delivered.engine.apply import apply_decided, work_of
from delivered.engine.context import Context
from delivered.model.errors import OutcomeUnknown, PromiseBroken
from delivered.model.identity import Work
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.step import RECOVERY, StepId
from delivered.model.work import Decision, LedgerState, Prepared

log = logging.getLogger(__name__)


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
                "ENDS_UNKNOWN",
                f"It is unknown whether the last batch of {context.scope.pipeline!r} is visible at sink "
                f"{context.scope.sink!r}: {reason}. Nothing was written.",
                next_step="start again once the server responds",
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
            if not context.committers.was_committed(work_of(logged, p), p)
        }
    )
    if missing and not context.tolerance.missing_ledger:
        raise PromiseBroken(
            "LOGGED_BATCH_LOST",
            f"Batch {logged.batch} of {context.scope.pipeline!r} was decided, applied and logged by Spark, but the "
            f"rows of shards {missing} are not in the sink: its server lost them since, for instance in a fail-over. "
            "Nothing was written.",
            next_step=f"delete the files commits/{logged.batch} and offsets/{logged.batch + 1} of the checkpoint and "
            "start again: Spark runs the batch again, and only these shards are written; or accept the gap once with "
            '.option("missingLedger", "accept")',
        )


def _participants(context: Context, decision: Decision) -> list[tuple[Work, Prepared]]:
    """Those of present sinks: others could be changed since the batch was finished."""
    return [(work_of(decision, p), p) for p in decision.participants if p.handle and p.sink in context.sinks]
