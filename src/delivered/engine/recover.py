"""Before a batch: finish what was decided, abort what was not, and plan each shard's action."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from delivered.engine.context import Context, check_targets, find_known_targets
from delivered.engine.decide import (
    abort_late_orphans,
    abort_orphans,
    apply_decided,
    confirm_logged,
    settle_ends,
)
from delivered.engine.rules import ArchivedRun, DecidedBatch, NewBatch, StartedBatch, Verdict, judge
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, LedgerAhead, LedgerBehind, OutcomeUnknown, PromiseBroken, Refused
from delivered.model.identity import OtherLedger
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.model.options import shown
from delivered.model.patience import within
from delivered.model.step import RECOVERY, Moment, StepId, parts, reach
from delivered.model.work import Action, BatchPlan, CheckpointView, Decision, Failed, LedgerState, Ok, Started, Unknown

log = logging.getLogger(__name__)


def plan_batch(
    context: Context,
    view: CheckpointView,
    *,
    first: bool,
    since: int | None = None,
    keeps_state: Callable[[], bool] = lambda: False,
    add_columns: Callable[[], None] = lambda: None,
) -> BatchPlan:
    """Recover, and plan the batch that Spark is about to run.

    Runs on the driver, before every batch. May be called again for the same batch, after a crash anywhere.

        1  recover.claim   become the only owner; from here on, older drivers are fenced
        2  recover.check   compare the ledger with the checkpoint and with the sinks' current targets; end transactions
                           whose confirmed end was lost
        3  recover.apply   finish the batch if it was decided; at the first batch of a new checkpoint, finish what an
                           earlier checkpoint decided
        4  recover.abort_orphans   abort undecided participants
        5  batch.begin     at_most_once: from here on, records may be sent
        6  add columns     to the targets, if the user wants that: prepared transactions that block it have ended

    A decided batch is finished under the guarantee of its decision, even if the pipeline's has changed.

    Args:
        first: this process did not plan the previous batch, or that batch failed: claim, and abort orphans. Otherwise
            only check that this driver still owns the ledger.
        since: epoch of this process's previous plan. If the ledger was claimed since, this counts as a first batch:
            the same session may have restarted the query, or have fenced a decision of unknown outcome.
        keeps_state: whether the query is stateful. Then a decided batch is read again and compared: Spark commits the
            rerun's state, which must not contain undelivered rows.
        add_columns: adds columns that the sinks' targets lack (`delivered.contract.sink.Sink`).

    Raises:
        Fenced, LedgerAhead, LedgerBehind, TargetChanged, PromiseBroken, Refused, OutcomeUnknown: a new start can
            continue from any partial change.
    """
    state = None if first else context.ledger.resume(context.owner.id, since)
    if state is None or since not in (None, state.epoch):
        first, state = True, _claim(context, view)
    reach(StepId.RECOVER_CHECK, Moment.BEFORE, batch=view.batch)
    try:
        verdict = _judge(context, view, state)
    except LedgerBehind:
        if first:
            raise
        # A claim's own record proves that what is read after it is the newest: no replica lags behind it.
        first, state = True, _claim(context, view)
        verdict = _judge(context, view, state)
    targets = check_targets(context, state.last) if first else find_known_targets(context, state.last)
    reach(StepId.RECOVER_CHECK, Moment.AFTER, batch=view.batch)
    settle_ends(context, state, first=first)
    guarantee, action, rewrite = context.guarantee, Action.WRITE, dict[int, frozenset[str]]()
    epoch = state.epoch
    match verdict:
        case DecidedBatch(decision):
            log.info("batch %d was decided; finishing it", view.batch, extra={"step": StepId.RECOVER_APPLY})
            newest = state.earlier[0] if state.earlier and (view.run or state.followed) else None
            rewrite = _finish_decided(context, decision, newest, followed=bool(state.followed))
            if state.followed and not view.run:
                _finish_earlier(context, newest)
            guarantee, action = decision.guarantee, Action.COMPARE if view.run or keeps_state() else Action.SKIP
        case ArchivedRun():
            _finish_earlier(context, state.earlier[0] if state.earlier else None)
            action = Action.COMPARE
        case StartedBatch():
            log.warning("batch %d was started by an earlier run; giving it up", view.batch)
            action = Action.GIVE_UP
            _finish_earlier(context, _find_unfinished(state))
        case NewBatch():
            if first:
                if state.last is not None and not state.followed:
                    confirm_logged(context, state.last)
                _finish_earlier(context, _find_unfinished(state))
            elif state.last is not None:
                abort_late_orphans(context, state.last)
            begin = parts(guarantee).begin
            if begin is not None and (state.last is None or guarantee is Guarantee.AT_MOST_ONCE):
                epoch = _begin(context, view, begin, state)
    if first:
        add_columns()
    return BatchPlan(
        context.scope, context.owner.id, guarantee, view.batch, view.offsets, action, rewrite, epoch, targets,
        after=state.held,
    )  # fmt: skip


def _judge(context: Context, view: CheckpointView, state: LedgerState) -> Verdict:
    others = find_other_ledgers(context.ledger, view, state)
    return judge(state, view, context.scope, context.guarantee, context.tolerance, others)


def find_other_ledgers(ledger: Ledger, view: CheckpointView, state: LedgerState) -> Sequence[OtherLedger]:
    """Other ledgers in the same place, if this one lacks the checkpoint it should hold, perhaps after a rename."""
    known = state.last is not None or state.started is not None or state.archived is not None
    if known or view.batch == 0:
        return ()
    try:
        return ledger.others()
    except DeliveredError as error:
        log.warning("could not list other ledgers: %s", error)
        return ()


def _claim(context: Context, view: CheckpointView) -> LedgerState:
    reach(StepId.RECOVER_CLAIM, Moment.BEFORE)
    try:
        state = context.ledger.claim(context.owner, view.batch)
    except LedgerAhead:
        _judge(context, view, context.ledger.look())  # says which offsets were decided
        raise
    reach(StepId.RECOVER_CLAIM, Moment.AFTER)
    return state


def _find_unfinished(state: LedgerState) -> Decision | None:
    """Another incarnation's decision that may not be applied yet: the newest, if it is newer than this one's. Whoever
    made it finished the earlier ones first."""
    return state.earlier[0] if state.earlier and (state.last is None or state.followed) else None


def _finish_decided(
    context: Context, decision: Decision, other: Decision | None = None, *, followed: bool = False
) -> dict[int, frozenset[str]]:
    """Apply a decided batch; return the shards whose prepared rows are missing, each with the sinks to rewrite it to.

    Args:
        other: the newest decision of other incarnations, if this incarnation may return after it. Its participants may
            still have to be applied, and are left alone.
        followed: `other` was made after `decision`, and so by an incarnation that first finished `decision`. Its
            evidence may be missing: markers are compacted.
    """
    _check_sinks(context, decision)
    keep = (decision,) if other is None else (decision, other)
    if StepId.RECOVER_APPLY not in RECOVERY[decision.guarantee]:
        abort_orphans(context, *keep)
        return {}
    reach(StepId.RECOVER_APPLY, Moment.BEFORE, batch=decision.batch)
    broken = apply_decided(context, decision, StepId.RECOVER_APPLY)
    # Read evidence only after orphans are aborted: their open transactions would hide it.
    abort_orphans(context, *keep)
    lost: dict[int, frozenset[str]] = {}
    for p in () if followed else broken:
        if not context.committers.was_committed(decision.work(p), p):
            lost[p.shard] = lost.get(p.shard, frozenset()) | {p.sink}
    if lost:
        log.warning(
            "batch %d: rewriting shards %s, whose prepared transactions timed out", decision.batch, sorted(lost)
        )
    reach(StepId.RECOVER_APPLY, Moment.AFTER, batch=decision.batch)
    return lost


def _check_sinks(context: Context, decision: Decision) -> None:
    """Participants at a sink removed since then can be neither applied nor queried."""
    removed = sorted({p.sink for p in decision.participants if p.handle} - context.sinks)
    if removed:
        raise Refused(
            "SINK_LEFT_OUT",
            batch=decision.batch,
            incarnation=decision.scope.incarnation,
            removed=removed,
            sinks=sorted(context.sinks),
        )


def _finish_earlier(context: Context, earlier: Decision | None) -> None:
    """Abort undecided participants; finish what an earlier incarnation decided and did not apply."""
    if earlier is None:
        abort_orphans(context)
        return
    lost = _finish_decided(context, earlier)
    if lost and not context.tolerance.missing_ledger:
        raise PromiseBroken(
            "EARLIER_BATCH_EXPIRED",
            batch=earlier.batch,
            incarnation=earlier.scope.incarnation,
            lost=sorted(lost),
            offsets=shown(earlier.offsets),
        )


def _begin(context: Context, view: CheckpointView, step: StepId, state: LedgerState) -> int:
    """Record that the batch may send records; return the epoch of the claim that holds afterwards."""
    reach(step, Moment.BEFORE, batch=view.batch)
    epoch, deadline = state.epoch, time.monotonic() + OUTAGE_PATIENCE_S
    started = Started(view.batch, view.offsets, state.next_sequence)
    while True:
        outcome = context.ledger.begin(started)
        if not isinstance(outcome, Unknown) or time.monotonic() > deadline:
            break
        # Fence what may be in flight, then begin again, which does nothing if it was written.
        with within(OUTAGE_PATIENCE_S):
            epoch = context.ledger.claim(context.owner).epoch
    match outcome:
        case Ok():
            pass
        case Failed(reason) | Unknown(reason):
            # Nothing was sent yet. If the record was written after all, the next start gives up the batch.
            raise OutcomeUnknown("BEGIN_UNKNOWN", batch=view.batch, reason=reason)
    reach(step, Moment.AFTER, batch=view.batch)
    return epoch
