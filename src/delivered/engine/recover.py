"""Before a batch: finish what was decided, abort what was not, and plan each shard's action. `judge` says what ledger
and checkpoint mean together; it is pure: no clock, no I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delivered.engine.context import Context, check_targets, find_known_targets
from delivered.engine.decide import (
    abort_late_orphans,
    abort_orphans,
    apply_decided,
    confirm_logged,
    settle_ends,
)
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, LedgerAhead, LedgerBehind, OutcomeUnknown, PromiseBroken, Refused
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import LEDGER_INCARNATIONS, OUTAGE_PATIENCE_S
from delivered.model.options import shown, starting_at, without_newest
from delivered.model.patience import within
from delivered.model.step import RECOVERY, Moment, StepId, parts, reach
from delivered.model.work import (
    Action,
    Archived,
    BatchPlan,
    CheckpointView,
    Decision,
    Failed,
    LedgerState,
    Ok,
    Started,
    Tolerance,
    Unknown,
)

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
        4  recover.abort_orphans   abort undecided participants; refuse a batch that is visible and not decided
        5  batch.begin     without exactly_once: from here on, records may be sent
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
                _refuse_visible(context, view)
            elif state.last is not None:
                abort_late_orphans(context, state.last)
            begin = parts(guarantee).begin
            # After a decision under at_least_once, `judge` takes every batch for a started one.
            repeated = state.last is not None and state.last.guarantee is Guarantee.AT_LEAST_ONCE
            if begin is not None and (guarantee is Guarantee.AT_MOST_ONCE or not repeated):
                epoch = _begin(context, view, begin, state)
    if first:
        add_columns()
    return BatchPlan(
        context.scope, context.owner.id, guarantee, view.batch, view.offsets, action, rewrite, epoch, targets,
        after=state.held,
    )  # fmt: skip


def _judge(context: Context, view: CheckpointView, state: LedgerState) -> Verdict:
    # Whether batch 0 ran before under another name is checked at the start (`pipeline/facts.py`).
    others = find_other_ledgers(context.ledger, state) if view.batch else ()
    return judge(state, view, context.scope, context.guarantee, context.tolerance, others)


def check_next_batch(context: Context, view: CheckpointView, state: LedgerState) -> None:
    """Raise what would stop the batch about to run before anything of it is written, apart from targets."""
    verdict = judge(state, view, context.scope, context.guarantee, context.tolerance)
    unfinished = verdict.decision if isinstance(verdict, DecidedBatch) else _find_unfinished(state)
    if unfinished is not None:
        _check_sinks(context, unfinished)


def find_other_ledgers(ledger: Ledger, state: LedgerState) -> Sequence[OtherLedger]:
    """Other ledgers in the same place, if this one lacks the checkpoint it should hold, perhaps after a rename.

    Not for a checkpoint without a batch, which no ledger needs to hold.
    """
    if state.last is not None or state.started is not None or state.archived is not None:
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


def _refuse_visible(context: Context, view: CheckpointView) -> None:
    """Raises LedgerBehind: rows of a batch that was never decided are visible; writing it would double them."""
    tolerance = context.tolerance
    if tolerance.missing_ledger or tolerance.repeated_batch or context.guarantee is Guarantee.AT_LEAST_ONCE:
        return
    for sink, shards in context.committers.visible_shards(view.batch).items():
        raise LedgerBehind(
            "BATCH_VISIBLE",
            batch=view.batch,
            incarnation=view.incarnation,
            sink=sink,
            shards=shards,
            starting_offsets=starting_at(view.offsets),
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


# What ledger and checkpoint mean together. Pure.


@dataclass(frozen=True)
class NewBatch:
    """The batch was neither decided nor started."""


@dataclass(frozen=True)
class DecidedBatch:
    """The batch is decided; what is left of it must be applied."""

    decision: Decision


@dataclass(frozen=True)
class StartedBatch:
    """at_most_once: the batch may have sent records, but was not recorded as done."""

    started: Started


@dataclass(frozen=True)
class ArchivedRun:
    """The run was decided and finished so long ago that only its archive entry is left."""

    archived: Archived


_OTHERS_SHOWN = 5

Verdict = NewBatch | DecidedBatch | StartedBatch | ArchivedRun


def judge(
    state: LedgerState,
    view: CheckpointView,
    scope: Scope,
    guarantee: Guarantee,
    tolerance: Tolerance,
    others: Sequence[OtherLedger] = (),
) -> Verdict:
    """Classify the batch about to run.

    Args:
        others: other ledgers in the same place, if this one has nothing of the checkpoint.

    Raises:
        LedgerAhead: the checkpoint was restored from an older copy.
        LedgerBehind: the sink or its ledger was restored from an older copy, or replaced.
        Refused: the checkpoint is new, but an earlier one already wrote to this sink; or the guarantee became stricter,
            and records of this batch may have been sent under the weaker one.
    """
    last, started = state.last, state.started
    if last is None and state.archived is not None:
        return _judge_archived(state.archived, view, guarantee, tolerance)
    newest = max((r.batch for r in (last, started) if r is not None), default=None)
    if newest is not None and newest > view.batch:
        raise LedgerAhead(
            "LEDGER_AHEAD.START",
            newest=newest,
            incarnation=view.incarnation,
            batch=view.batch,
            action=_recovery_action(
                last.offsets if last is not None else started.offsets if started is not None else ""
            ),
        )
    if last is not None and last.batch == view.batch:
        _check_offsets(last.offsets, view)
        return DecidedBatch(last)
    if started is not None and started.batch == view.batch:
        _check_offsets(started.offsets, view)
        return _judge_started(started, guarantee, tolerance)
    if newest is None:
        if (error := find_rename(view, scope, tolerance, others)) is not None:
            raise error
        _check_first_batch(state, view, scope, guarantee, tolerance, others)
    elif (last.batch if last else -1) < view.batch - 1 - view.repartitions and not tolerance.missing_ledger:
        # Every batch that Spark logged was decided. If it only started, its decision was lost.
        raise LedgerBehind(
            "LEDGER_BEHIND.START",
            batch=view.batch,
            newest=last.batch if last else "none",
            action=without_newest(last.offsets if last else "", last.other_sinks if last else ()),
        )
    if last is not None and last.guarantee is Guarantee.AT_LEAST_ONCE:
        # Under at_least_once, a batch leaves no record until it is done.
        return _judge_started(Started(view.batch, view.offsets), guarantee, tolerance)
    return NewBatch()


def _judge_started(started: Started, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """Classify a batch whose records may already have been sent."""
    match guarantee:
        case Guarantee.AT_MOST_ONCE:
            return StartedBatch(started)
        case Guarantee.AT_LEAST_ONCE:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE if tolerance.repeated_batch:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE:
            raise Refused("BATCH_BEGUN", batch=started.batch)


def _judge_archived(archived: Archived, view: CheckpointView, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """Classify a batch of an incarnation that the ledger has archived."""
    if not archived.decided:
        return _judge_started(Started(view.batch, view.offsets), guarantee, tolerance)
    if view.run:
        return ArchivedRun(archived)
    if tolerance.missing_ledger:
        return NewBatch()
    raise LedgerBehind(
        "LEDGER_FORGOTTEN",
        batch=view.batch,
        incarnation=view.incarnation,
        rows=archived.rows,
        ledger_incarnations=LEDGER_INCARNATIONS,
    )


def _check_offsets(decided: str, view: CheckpointView) -> None:
    if decided != view.offsets:
        raise LedgerAhead(
            "LEDGER_AHEAD.OFFSETS",
            batch=view.batch,
            incarnation=view.incarnation,
            decided=shown(decided),
            offsets=shown(view.offsets),
            action=_recovery_action(decided),
        )


def _recovery_action(offsets: str) -> str:
    """How to continue after the last decided batch, without an audit."""
    return (
        "restore the newest checkpoint; or start a new one where the last decided batch ended: a new "
        f'checkpointLocation, {starting_at(offsets)} and, once, .option("newCheckpoint", "accept")'
    )


def find_rename(
    view: CheckpointView, scope: Scope, tolerance: Tolerance, others: Sequence[OtherLedger]
) -> LedgerBehind | None:
    """Why a checkpoint must not continue that is in the ledger under another name."""
    former = next((o for o in others if o.same_incarnation), None)
    if former is None or tolerance.missing_ledger:
        return None
    what, name, now = "sink", former.sink, scope.sink
    if former.pipeline != scope.pipeline:
        what, name, now = "pipeline", former.pipeline, scope.pipeline
    named_by = " (without the option, the pipeline is named after the query)" if what == "pipeline" else ""
    return LedgerBehind(
        "LEDGER_RENAMED",
        incarnation=view.incarnation,
        what=what,
        name=name,
        batch=view.batch,
        current=now,
        named_by=named_by,
    )


def _check_first_batch(
    state: LedgerState,
    view: CheckpointView,
    scope: Scope,
    guarantee: Guarantee,
    tolerance: Tolerance,
    others: Sequence[OtherLedger],
) -> None:
    if view.batch > 0 and not tolerance.missing_ledger:
        known = ", ".join(f"{o.pipeline!r} (sink {o.sink!r})" for o in others[:_OTHERS_SHOWN])
        raise LedgerBehind(
            "LEDGER_MISSING.START",
            batch=view.batch,
            pipeline=scope.pipeline,
            sink=scope.sink,
            incarnation=view.incarnation,
            known=f" Ledgers in the same place: {known}." if known else "",
            renamed="if the pipeline or its sink was renamed, restore the name; " if known else "",
        )
    if guarantee is Guarantee.AT_LEAST_ONCE or tolerance.new_checkpoint:
        return
    if state.earlier:
        earlier = state.earlier[0]
        raise Refused(
            "CHECKPOINT_NEW.DECIDED",
            incarnation=view.incarnation,
            pipeline=earlier.scope.pipeline,
            batch=earlier.batch,
            sink=earlier.scope.sink,
            earlier_incarnation=earlier.scope.incarnation,
            offsets=shown(earlier.offsets),
            starting_offsets=starting_at(earlier.offsets),
        )
    if state.earlier_started:
        incarnation, started = state.earlier_started[0]
        raise Refused(
            "CHECKPOINT_NEW.STARTED",
            incarnation=view.incarnation,
            started_incarnation=incarnation,
            batch=started.batch,
            offsets=shown(started.offsets),
            starting_offsets=starting_at(started.offsets),
        )
