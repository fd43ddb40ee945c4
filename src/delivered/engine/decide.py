"""After a batch: check the tasks' messages, decide, apply."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from delivered.engine.apply import abort_orphans, apply_decided
from delivered.engine.context import Context, decided_targets, known_targets
from delivered.engine.messages import (
    all_skipped,
    check_same_rows,
    check_same_state,
    checked,
    complete,
    orphans,
    ran_again,
    repaired,
    repeats,
    written,
)
from delivered.model.errors import (
    DeliveredError,
    Fenced,
    InvariantBroken,
    OutcomeUnknown,
    PromiseBroken,
)
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.limits import CONNECT_TIMEOUT_S, DECISION_BYTES_MAX, OUTAGE_PATIENCE_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.patience import within
from delivered.model.step import Moment, parts, reach
from delivered.model.work import (
    Account,
    Action,
    BatchReport,
    Decision,
    LedgerState,
    Prepared,
    ShardMessage,
    transforms_after,
)

log = logging.getLogger(__name__)


def commit_batch(
    context: Context,
    batch: int,
    offsets: str,
    messages: Sequence[ShardMessage | None],
    *,
    run: bool = False,
    report: Callable[[BatchReport], None] = lambda _: None,
) -> Decision | None:
    """Make a batch count, then visible.

    Runs on the driver, after all tasks of the batch succeeded. May be called again for the same batch: an existing
    decision is only applied, never written twice.
    Before: every shard is prepared. After: the decision is durable and every participant visible.

        1  every task's message is present and belongs to this batch
        2  commit.decide   one durable record                      <- from here on the batch counts
        3  commit.apply    every participant becomes visible

    Args:
        offsets: the sources' offsets, for a batch without a single task.
        run: as in the `CheckpointView` that the batch was planned for.
        report: called once the batch is visible, if this call decided it.

    Returns:
        The decision, or None if every shard was already delivered.

    Raises:
        InvariantBroken: the messages are inconsistent. Nothing was decided.
        Fenced: another driver, or a later start of this one, owns the ledger. Nothing was decided.
        Refused: the run was already decided, with other rows. Nothing was written.
        ReplayDiffers: a rewritten shard differs from the decided one, or, in a query that keeps state, any shard does.
            Nothing was applied.
        OutcomeUnknown, PromiseBroken: the next start finishes the batch.
    """
    shards = checked(context, batch, messages)
    state = context.ledger.resume(context.owner.id, shards[0].plan.epoch if shards else None)
    _same_claim(state, batch, shards)
    last = state.last
    if last is not None and last.batch > batch:
        raise InvariantBroken("DECISION_OLD", batch=batch, newest=last.batch)
    if run and (again := last.archived if last is not None else state.archived) is not None and repeats(shards):
        try:
            check_same_rows(context, again, shards)
        except DeliveredError:
            _abort(context, orphans(shards, last) if last else list(written(shards)))
            raise
        if all(m.did is Action.COMPARE for m in shards):
            return None
    if last is not None and last.batch == batch:
        try:
            check_same_state(last, shards, run=run)
        except DeliveredError:
            _abort(context, orphans(shards, last))
            raise
        if all_skipped(shards):
            return None
        new = orphans(shards, last)
        if not (shards and shards[0].plan.rewrite and new):
            # Already committed; this is a repeated call. Anything prepared since is undecided.
            _abort(context, new)
            _apply(context, last)
            return last
        decision = repaired(context, last, shards)
    else:
        complete(context, batch, shards)
        decision = _decision(context, batch, offsets, shards, state)
    began = time.monotonic()
    after = shards[0].plan.after if shards else -1
    _decide(context, decision, orphans(shards, last) if last else list(written(shards)), after)
    decided = time.monotonic()
    _apply(context, decision)
    applied = time.monotonic()
    if len(context.sinks) > 1 and parts(decision.guarantee).apply is not None:
        ms = (applied - decided) * 1000
        log.info("batch %d: visible at all %d sinks %.1f ms after its decision", batch, len(context.sinks), ms)
    _tidy(context, decision, shards, run)
    report(_report(decision, shards, decided - began, applied - decided))
    return decision


def abort_batch(context: Context, messages: Sequence[ShardMessage | None]) -> None:
    """Abort what the tasks of a failed batch prepared. The next recovery aborts what is missed here.

    Runs on the driver, after tasks failed or `commit_batch` raised; may be called again. Never touches a decided
    batch. A decision of unknown outcome may still be in flight: it is fenced before anything is aborted.

    Args:
        messages: None: a task without one. What it left open would block readers until the next start.
    """
    shards = [m for m in messages if m is not None and any(p.handle for p in m.participants)]
    if not shards:
        return
    try:
        if context.ledger.resume(context.owner.id).epoch != shards[0].plan.epoch:
            _abort_superseded(context, shards)  # by a later start of this driver, which must not be fenced from here
            return
        state = context.ledger.claim(context.owner)
    except Fenced:
        _abort_superseded(context, shards)
        return
    except DeliveredError as error:
        log.warning("batch %d: prepared participants were not aborted: %s", shards[0].plan.batch, error)
        return
    last = state.last
    for m in shards:
        if last is None or m.plan.batch > last.batch:
            _abort(context, written([m]))
        elif m.plan.batch == last.batch:
            _abort(context, orphans([m], last))
    if None in messages:
        _abort_unheard(context, shards[0].plan.batch, [*([last] if last is not None else []), *state.earlier])


def _abort_superseded(context: Context, shards: Sequence[ShardMessage]) -> None:
    """Abort participants prepared after a later claim aborted orphans: left open, they would block readers.

    That claim fences every decision of this owner, and the later owner names only its own participants. So a
    participant that no decision names now will never be named.
    """
    try:
        decided = {d.batch: d for d in context.ledger.history()}
    except DeliveredError as error:
        log.warning("batch %d: prepared participants were not aborted: %s", shards[0].plan.batch, error)
        return
    for m in shards:
        if m.plan.batch in decided:
            _abort(context, orphans([m], decided[m.plan.batch]))
        elif not decided or m.plan.batch > min(decided):  # older decisions are no longer kept
            _abort(context, written([m]))


def _same_claim(state: LedgerState, batch: int, shards: Sequence[ShardMessage]) -> None:
    if shards and shards[0].plan.epoch != state.epoch:
        raise Fenced("PLAN_OUTDATED", batch=batch, epoch=shards[0].plan.epoch, state_epoch=state.epoch)


def _decision(
    context: Context, batch: int, offsets: str, shards: Sequence[ShardMessage], state: LedgerState
) -> Decision:
    participants, last = written(shards), state.last

    def account(sink: str) -> Account:
        before = last.account(sink) if last else Account()
        total = sum((p.fingerprint for p in participants if p.sink == sink), before.total)
        return Account(total, sum((m.given_up.get(sink, Fingerprint()) for m in shards), before.given_up))

    sinks = {*context.sinks, *(last.accounts if last else ())}
    return Decision(
        scope=context.scope,
        owner=context.owner.id,
        guarantee=shards[0].plan.guarantee if shards else context.guarantee,
        batch=batch,
        offsets=shards[0].plan.offsets if shards else offsets,
        participants=participants,
        accounts={sink: account(sink) for sink in sorted(sinks)},
        decided_at_ms=time.time_ns() // 1_000_000,
        targets=decided_targets(context, last, shards[0].plan.targets) if shards else known_targets(context, last),
        transforms=transforms_after(last, context.transform, batch),
        sequence=state.next_sequence,
    )


def _report(decision: Decision, shards: Sequence[ShardMessage], decide_s: float, apply_s: float) -> BatchReport:
    new = written(shards)
    return BatchReport(
        batch=decision.batch,
        decided_at_ms=decision.decided_at_ms,
        records=dict(sum((Counter({p.sink: p.fingerprint.count}) for p in new), Counter[str]())),
        shards=len(shards),
        rewritten=len({p.shard for p in new}) if decision.revision else 0,
        seconds={
            "plan": max((m.plan.seconds for m in shards), default=0.0),
            "stage": max((m.stage_s for m in shards), default=0.0),
            "prepare": max((m.prepare_s for m in shards), default=0.0),
            "decide": decide_s,
            "apply": apply_s,
        },
        bytes=sum(m.bytes for m in shards),
    )


def _decide(context: Context, decision: Decision, new: Sequence[Prepared], after: int) -> None:
    """Write the decision.

    Args:
        new: participants to abort if it is not written.
        after: the newest decided batch that the plan knew. See `BatchPlan`.
    """
    step = parts(decision.guarantee).decide
    size = len(decision.to_json())
    if size > DECISION_BYTES_MAX:
        _abort(context, new)
        raise InvariantBroken(
            "DECISION_TOO_LARGE",
            batch=decision.batch,
            size=size,
            participant_count=len(decision.participants),
            decision_bytes_max=DECISION_BYTES_MAX,
        )
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    while True:
        reach(step, Moment.BEFORE, batch=decision.batch)
        outcome: Outcome[None] = context.ledger.decide(decision, after=after)  # THE line that decides a batch
        if not isinstance(outcome, Unknown):
            break
        with within(OUTAGE_PATIENCE_S):
            outcome = _look(context, decision, outcome)
        if not isinstance(outcome, Failed) or time.monotonic() > deadline:
            break
        # Fenced and checked: the decision was not and cannot be written. The batch may be decided again.
        log.warning(
            "batch %d: its decision was not acknowledged and is not in the ledger; deciding again", decision.batch
        )
    match outcome:
        case Ok():
            reach(step, Moment.AFTER, batch=decision.batch)
        case Failed(reason):
            with within(CONNECT_TIMEOUT_S):  # the wait for a server that is away is over
                _abort(context, new)
            raise DeliveredError(
                "DECISION_FAILED", batch=decision.batch, reason=reason, consequence=_LEFT_BY_FAILURE[decision.guarantee]
            )
        case Unknown(reason):
            raise OutcomeUnknown("DECISION_UNKNOWN", batch=decision.batch, reason=reason)


_LEFT_BY_FAILURE = {
    Guarantee.EXACTLY_ONCE: "None of its new rows is visible; the batch runs again.",
    Guarantee.AT_LEAST_ONCE: "Its records are in the sink; the batch runs again and repeats them.",
    Guarantee.AT_MOST_ONCE: "Its records are in the sink; the next start counts them as given up.",
}


def _look(context: Context, decision: Decision, unknown: Unknown) -> Ok[None] | Failed | Unknown:
    """Fence a decision in flight, then check whether it was written."""
    try:
        last = context.ledger.claim(context.owner).last
    except DeliveredError as error:
        return Unknown(f"{unknown.reason}; then {error}")
    if last is None or (last.batch, last.revision) < (decision.batch, decision.revision):
        return Failed(unknown.reason)
    if last.to_json() == decision.to_json():
        return Ok(None)
    # Never touch participants of another decision.
    return Unknown(f"{unknown.reason}; then the ledger held another decision of batch {last.batch}")


def _abort(context: Context, participants: Sequence[Prepared]) -> None:
    """Abort participants that no decision names. The next recovery aborts those that cannot be reached now."""
    with within(OUTAGE_PATIENCE_S):
        for p in participants:
            if p.handle:
                context.committers.abort(p)


def _apply(context: Context, decision: Decision) -> None:
    step = parts(decision.guarantee).apply
    if step is None:
        return
    broken = apply_decided(context, decision, step)
    expired = [
        (p.shard, decision.scope_of(p).sink)
        for p in broken
        if not context.committers.was_committed(decision.work(p), p)
    ]
    if expired:
        text = ", ".join(f"{shard} at {sink!r}" for shard, sink in expired[:50])
        raise PromiseBroken("PROMISE_EXPIRED", batch=decision.batch, text=text)


def _tidy(context: Context, decision: Decision, shards: Sequence[ShardMessage], run: bool) -> None:
    """Abort participants that failed attempts of this batch left open. A run has no next batch that would find more."""
    if parts(decision.guarantee).apply is not None and (run or ran_again(shards)):
        _abort_unheard(context, decision.batch, [decision])


def _abort_unheard(context: Context, batch: int, keep: Sequence[Decision]) -> None:
    """Abort participants of tasks that sent no message. The next start aborts what is still open."""
    try:
        abort_orphans(context, *keep)
    except (Fenced, OutcomeUnknown) as error:
        log.warning("batch %d: %s", batch, error)
