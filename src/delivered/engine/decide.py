"""After a batch: check the tasks' messages, decide, apply.

Messages are checked before anything is decided; those of a decided batch are compared with its decision. Participants
that were decided are made visible, idempotently and in parallel; those that no decision names are aborted; ends that a
system confirmed and may have lost are settled by evidence.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import tenacity

from delivered.engine.context import Context, find_decided_targets, find_known_targets
from delivered.model.capability import Guarantee
from delivered.model.errors import (
    DeliveredError,
    Fenced,
    InvariantBroken,
    OutcomeUnknown,
    PromiseBroken,
    Refused,
    ReplayDiffers,
)
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import (
    APPLY_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DECISION_BYTES_MAX,
    OUTAGE_PATIENCE_S,
    SWEEP_EVERY_S,
)
from delivered.model.options import shown, starting_at
from delivered.model.patience import within
from delivered.model.step import RECOVERY, Moment, StepId, armed, parts, reach
from delivered.model.work import (
    Account,
    Action,
    Archived,
    BatchPlan,
    BatchReport,
    Decision,
    Failed,
    LedgerState,
    Ok,
    Outcome,
    Prepared,
    ShardMessage,
    Unknown,
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
    shards = check_messages(context, batch, messages)
    state = context.ledger.resume(context.owner.id, shards[0].plan.epoch if shards else None)
    _check_claim(state, batch, shards, run)
    last = state.last
    if last is not None and last.batch > batch:
        raise InvariantBroken("DECISION_OLD", batch=batch, newest=last.batch)
    if run and (again := last.archived if last is not None else state.archived) is not None and is_repeated(shards):
        try:
            check_same_rows(context, again, shards)
        except DeliveredError:
            _abort(context, find_orphans(shards, last) if last else list(collect_participants(shards)))
            raise
        if all(m.did is Action.COMPARE for m in shards):
            return None
    if last is not None and last.batch == batch:
        try:
            check_same_state(last, shards, run=run)
        except DeliveredError:
            _abort(context, find_orphans(shards, last))
            raise
        if shards and all(m.did in (Action.SKIP, Action.COMPARE) for m in shards):
            return None
        new = find_orphans(shards, last)
        if not (shards and shards[0].plan.rewrite and new):
            # Already committed; this is a repeated call. Anything prepared since is undecided.
            _abort(context, new)
            _apply(context, last)
            return last
        decision = build_revision(context, last, shards)
    else:
        check_complete(context, batch, shards)
        decision = _build_decision(context, batch, offsets, shards, state)
    began = time.monotonic()
    after = shards[0].plan.after if shards else -1
    _decide(context, decision, find_orphans(shards, last) if last else list(collect_participants(shards)), after)
    decided = time.monotonic()
    _apply(context, decision)
    applied = time.monotonic()
    if len(context.sinks) > 1 and parts(decision.guarantee).apply is not None:
        ms = (applied - decided) * 1000
        log.info("batch %d: visible at all %d sinks %.1f ms after its decision", batch, len(context.sinks), ms)
    _abort_leftovers(context, decision, shards, run)
    report(_build_report(decision, shards, decided - began, applied - decided))
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
            _abort(context, collect_participants([m]))
        elif m.plan.batch == last.batch:
            _abort(context, find_orphans([m], last))
    if None in messages:
        _abort_without_message(context, shards[0].plan.batch, [*([last] if last is not None else []), *state.earlier])


def abort_unreported(context: Context, plan: BatchPlan) -> None:
    """Abort what the tasks of a failed batch prepared, if the driver has none of their messages.

    Runs on the driver. What a task prepares later is aborted by the next start.
    """
    try:
        state = context.ledger.resume(context.owner.id)
        if state.epoch == plan.epoch:
            _abort_without_message(context, plan.batch, state.oldest_first)
    except DeliveredError as error:
        log.warning("batch %d: prepared participants were not aborted: %s", plan.batch, error)


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
            _abort(context, find_orphans([m], decided[m.plan.batch]))
        elif not decided or m.plan.batch > min(decided):  # older decisions are no longer kept
            _abort(context, collect_participants([m]))


def _check_claim(state: LedgerState, batch: int, shards: Sequence[ShardMessage], run: bool) -> None:
    if shards and shards[0].plan.epoch != state.epoch:
        code = "PLAN_OUTDATED.RUN" if run else "PLAN_OUTDATED.START"
        raise Fenced(code, batch=batch, epoch=shards[0].plan.epoch, state_epoch=state.epoch)


def _build_decision(
    context: Context, batch: int, offsets: str, shards: Sequence[ShardMessage], state: LedgerState
) -> Decision:
    participants, last = collect_participants(shards), state.last

    def account(sink: str) -> Account:
        before = last.account(sink) if last else Account()
        total = sum((p.fingerprint for p in participants if p.sink == sink), before.total)
        return Account(total, sum((m.given_up.get(sink, Fingerprint()) for m in shards), before.given_up))

    sinks = {*context.sinks, *(last.accounts if last else ())}
    targets = (
        find_decided_targets(context, last, shards[0].plan.targets) if shards else find_known_targets(context, last)
    )
    return Decision(
        scope=context.scope,
        owner=context.owner.id,
        guarantee=shards[0].plan.guarantee if shards else context.guarantee,
        batch=batch,
        offsets=shards[0].plan.offsets if shards else offsets,
        participants=participants,
        accounts={sink: account(sink) for sink in sorted(sinks)},
        decided_at_ms=time.time_ns() // 1_000_000,
        targets=targets,
        transforms=transforms_after(last, context.transform, batch),
        sequence=state.next_sequence,
    )


def _build_report(decision: Decision, shards: Sequence[ShardMessage], decide_s: float, apply_s: float) -> BatchReport:
    new = collect_participants(shards)
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
            outcome = _fence_and_look(context, decision, outcome)
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
                "DECISION_FAILED", batch=decision.batch, reason=reason, consequence=_CONSEQUENCES[decision.guarantee]
            )
        case Unknown(reason):
            raise OutcomeUnknown("DECISION_UNKNOWN", batch=decision.batch, reason=reason)


_CONSEQUENCES = {
    Guarantee.EXACTLY_ONCE: "None of its new rows is visible; the batch runs again.",
    Guarantee.AT_LEAST_ONCE: "Its records are in the sink; the batch runs again and repeats them.",
    Guarantee.AT_MOST_ONCE: "Its records are in the sink; the next start counts them as given up.",
}


def _fence_and_look(context: Context, decision: Decision, unknown: Unknown) -> Ok[None] | Failed | Unknown:
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
    expired = [(p.shard, decision.scope_of(p).sink) for p in find_invisible(context, decision, broken)]
    if expired:
        text = ", ".join(f"{shard} at {sink!r}" for shard, sink in expired[:50])
        raise PromiseBroken("PROMISE_EXPIRED", batch=decision.batch, text=text)


def _abort_leftovers(context: Context, decision: Decision, shards: Sequence[ShardMessage], run: bool) -> None:
    """Abort participants that failed attempts of this batch left open. A run has no next batch that would find more."""
    if parts(decision.guarantee).apply is not None and (run or may_have_rerun(shards)):
        _abort_without_message(context, decision.batch, [decision])


def _abort_without_message(context: Context, batch: int, keep: Sequence[Decision]) -> None:
    """Abort participants of tasks that sent no message. The next start aborts what is still open."""
    try:
        abort_orphans(context, *keep)
    except (Fenced, OutcomeUnknown) as error:
        log.warning("batch %d: %s", batch, error)


# The tasks' messages, checked before anything is decided; those of a decided batch are compared with it.

LOST = "source"
"""Reason of what is given up because the source no longer has it (`Prepared.given_up`)."""


def check_messages(context: Context, batch: int, messages: Sequence[ShardMessage | None]) -> list[ShardMessage]:
    """The messages in shard order, one per shard, all of this batch, claim and driver.

    Raises:
        InvariantBroken: they are inconsistent. Nothing was decided.
    """
    shards = [m for m in messages if m is not None]
    if len(shards) != len(messages):
        raise InvariantBroken("MESSAGE_MISSING", batch=batch, missing=len(messages) - len(shards), tasks=len(messages))
    for m in shards:
        expected = (context.scope, context.owner.id, batch, shards[0].plan.epoch)
        if (m.plan.scope, m.plan.owner, m.plan.batch, m.plan.epoch) != expected:
            raise InvariantBroken(
                "MESSAGE_FOREIGN",
                batch=batch,
                scope=context.scope,
                shard=m.shard,
                message_batch=m.plan.batch,
                message_scope=m.plan.scope,
                message_owner=m.plan.owner,
                id=context.owner.id,
            )
    shards.sort(key=lambda m: m.shard)
    if [m.shard for m in shards] != list(range(len(shards))):
        raise InvariantBroken(
            "SHARDS_INCOMPLETE",
            batch=batch,
            messages=len(shards),
            last=len(shards) - 1,
            shards=[m.shard for m in shards][:50],
        )
    return shards


def collect_participants(messages: Sequence[ShardMessage]) -> tuple[Prepared, ...]:
    return tuple(p for m in messages for p in m.participants)


def is_repeated(messages: Sequence[ShardMessage]) -> bool:
    """Whether the run was decided before it was planned. Without tasks, there is nothing to compare."""
    return not messages or any(m.did is Action.COMPARE for m in messages)


def check_same_rows(context: Context, decided: Archived, messages: Sequence[ShardMessage]) -> None:
    """Check that a run that is already decided has the same rows.

    Raises:
        Refused: it has other rows. None of them was written.
    """
    rows = sum((m.compared[context.scope.sink] for m in messages if m.did is Action.COMPARE), Fingerprint())
    rows += sum((p.fingerprint for p in collect_participants(messages) if p.sink == context.scope.sink), Fingerprint())
    if decided.holds(rows):
        return
    count = "different ones" if rows.count == decided.rows else str(rows.count)
    raise Refused(
        "RUN_ID_TAKEN",
        incarnation=context.scope.incarnation,
        pipeline=context.scope.pipeline,
        sink=context.scope.sink,
        rows=decided.rows,
        count=count,
    )


def may_have_rerun(messages: Sequence[ShardMessage]) -> bool:
    """Whether more tasks of the batch may have run than those that report.

    Attempts are numbered from 0 again when Spark reruns a stage (P31), but the numbers of its tasks have a gap then,
    unless all of them ran again. So have those of two queries that run at once, for which this is a false alarm.
    """
    tasks = [m.task for m in messages if m.task is not None]
    return any(m.attempt for m in messages) or (bool(tasks) and max(tasks) - min(tasks) >= len(tasks))


def check_same_state(decided: Decision, messages: Sequence[ShardMessage], *, run: bool) -> None:
    """Check that the rerun of a decided batch of a stateful query has the same rows, as Spark commits the rerun's
    state. Rows may have moved to another shard. `build_revision` compares rewritten shards.

    Raises:
        ReplayDiffers: it has other rows. Nothing was applied, and Spark does not commit the batch.
    """
    if run or not any(m.plan.action is Action.COMPARE for m in messages):
        return
    now: dict[str, dict[int, Fingerprint]] = {}
    for m in messages:
        for sink, rows in (*m.compared.items(), *((p.sink, p.fingerprint) for p in m.participants)):
            now.setdefault(sink, {})[m.shard] = rows
    none = Fingerprint()
    for sink, after in now.items():
        before = {p.shard: p.fingerprint for p in decided.of(sink)}
        if decided.guarantee is Guarantee.AT_MOST_ONCE:
            # Only the row count of a given-up shard is known.
            after = {shard: after.get(shard, none) for shard in before}
        if _same_rows(sum(before.values(), none), sum(after.values(), none)):
            continue
        differing = [n for n in sorted({*before, *after}) if not _same_rows(before.get(n, none), after.get(n, none))]
        shard = differing[0]
        dropped = sorted(messages[0].plan.rewrite)
        raise ReplayDiffers(
            "REPLAY_DIFFERS.STATE",
            batch=decided.batch,
            differing=differing[:50],
            shard=shard,
            sink=sink,
            before=before.get(shard, none),
            after=after.get(shard, none),
            offsets=shown(decided.offsets),
            dropped=f"; the prepared rows of shards {dropped[:50]} were dropped before they became visible"
            if dropped
            else "",
            starting_offsets=starting_at(decided.offsets),
            missing=' and .option("missingLedger", "accept"): the dropped rows are then missing' if dropped else "",
        )


def check_complete(context: Context, batch: int, messages: Sequence[ShardMessage]) -> None:
    """Check that every shard of a new batch was written to every sink, or given up where allowed.

    Raises:
        InvariantBroken: a decision would lose a shard's records.
    """
    sinks = sorted(context.sinks)
    for m in messages:
        sinks_written = sorted(p.sink for p in m.participants if p.shard == m.shard)
        wrote = m.did is Action.WRITE and sinks_written == sinks and len(m.participants) == len(sinks)
        gave_up = m.did is Action.GIVE_UP and m.plan.guarantee is Guarantee.AT_MOST_ONCE
        if not (wrote or gave_up):
            raise InvariantBroken(
                "SHARD_UNWRITTEN", batch=batch, guarantee=m.plan.guarantee.value, shard=m.shard, action=m.did.value
            )


def find_orphans(messages: Sequence[ShardMessage], decision: Decision) -> list[Prepared]:
    """Prepared participants that the decision does not name."""
    kept = {_key(p) for p in decision.participants}
    return [p for p in collect_participants(messages) if p.handle and _key(p) not in kept]


def build_revision(context: Context, last: Decision, messages: Sequence[ShardMessage]) -> Decision:
    """The next revision of the decision, with new participants replacing those that timed out.

    A shard that comes back shorter was decided with records that the source no longer has. The rest is written, and the
    missing ones are given up, if the user accepts that (`Tolerance.lost_records`): the revision counts them.

    Raises:
        ReplayDiffers: the rerun had other shards, other rows, or fewer rows that the user did not give up. What it
            prepared was aborted.
        InvariantBroken: a shard that had to be rewritten was not.
    """
    plan = messages[0].plan
    new = {(p.shard, p.sink): p for p in collect_participants(messages)}
    try:
        missing = _find_missing(last, plan.rewrite, messages)
        if missing and not context.tolerance.lost_records:
            raise _build_error(context, last, missing)
    except InvariantBroken:
        for p in new.values():
            if p.handle:
                context.committers.abort(p)
        raise
    accounts = dict(last.accounts)
    participants = []
    for before in last.participants:
        now = new.get((before.shard, before.sink), before)
        lost = before.fingerprint - now.fingerprint
        if lost.count:
            account = accounts[before.sink]
            accounts[before.sink] = Account(account.total - lost, account.given_up + lost)
            log.warning(
                "batch %d, shard %d, sink %s: gave up %d records that the source no longer has",
                last.batch, before.shard, before.sink, lost.count,
            )  # fmt: skip
        given_up = Counter(before.given_up) + Counter({LOST: lost.count})
        participants.append(replace(now, given_up={**now.given_up, **given_up}))
    return replace(
        last,
        owner=context.owner.id,
        participants=tuple(participants),
        accounts=accounts,
        decided_at_ms=time.time_ns() // 1_000_000,
        revision=last.revision + 1,
    )


def _same_rows(decided: Fingerprint, now: Fingerprint) -> bool:
    """Whether the rows are the same, as far as `now`, which may be only a count, shows."""
    return now in (decided, Fingerprint(decided.count))


def _key(p: Prepared) -> tuple[int, str, str]:
    return p.shard, p.sink, str(sorted(p.handle.items()))


def _find_missing(
    last: Decision, rewrite: Mapping[int, frozenset[str]], messages: Sequence[ShardMessage]
) -> dict[tuple[int, str], int]:
    """(shard, sink) -> number of decided records that the rerun lacks. Raises if it differs in any other way."""
    decided = {(p.shard, p.sink): p.fingerprint for p in last.participants}
    shards = len({p.shard for p in last.participants})
    if len(messages) != shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER", batch=last.batch, shards=shards, current=len(messages), rewrite=sorted(rewrite)
        )
    if {(p.shard, p.sink) for p in collect_participants(messages)} != {
        (shard, s) for shard, sinks in rewrite.items() for s in sinks
    }:
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            batch=last.batch,
            shards=sorted(rewrite),
            written=sorted(p.shard for p in collect_participants(messages)),
        )
    missing: dict[tuple[int, str], int] = {}
    for p in collect_participants(messages):
        before = decided[p.shard, p.sink]
        if p.fingerprint.count < before.count:
            missing[p.shard, p.sink] = before.count - p.fingerprint.count
        elif before != p.fingerprint:
            raise ReplayDiffers(
                "REPLAY_DIFFERS.SHARD",
                batch=last.batch,
                shard=p.shard,
                sink=last.scope_of(p).sink,
                before=before,
                after=p.fingerprint,
            )
    return missing


def _build_error(context: Context, last: Decision, missing: Mapping[tuple[int, str], int]) -> ReplayDiffers:
    parts = [f"{n:,} of shard {shard} at sink {sink!r}" for (shard, sink), n in sorted(missing.items())]
    return ReplayDiffers(
        "REPLAY_RECORDS_MISSING",
        batch=last.batch,
        missing=sum(missing.values()),
        parts=", ".join(parts[:20]),
        start=shown(_find_start(context, last)),
        end=shown(last.offsets),
    )


def _find_start(context: Context, last: Decision) -> str:
    """Where the previous batch ended, if the ledger still says so."""
    with suppress(DeliveredError):
        for decision in context.ledger.history():
            if decision.batch == last.batch - 1:
                return decision.offsets
    return "the start" if last.batch == 0 else "the end of the batch before"


# What becomes of prepared participants.

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
        match _commit_until_known(context, work, prepared):
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


def find_invisible(
    context: Context, decision: Decision, broken: Sequence[Prepared], *others: Decision
) -> list[Prepared]:
    """Of participants that were not applied, those whose rows are certainly not visible.

    Args:
        others: whose participants are kept, as the decision's are.

    Raises:
        OutcomeUnknown: see `abort_orphans`.
    """
    if broken:  # evidence is read only after orphans are aborted: their open transactions would hide it
        abort_orphans(context, decision, *others)
    return [p for p in broken if not context.committers.was_committed(decision.work(p), p)]


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
        state.last is None or context.committers.ends_hold([p for _, p in _present_participants(context, state.last)])
    ):
        return
    *older, newest = [None, *state.oldest_first]

    def earlier() -> list[Prepared]:
        decisions = [*filter(None, older), *(d for d in context.ledger.history() if d != newest)]
        return [p for d in decisions for _, p in _present_participants(context, d)]

    match context.committers.settle_ends([] if newest is None else _present_participants(context, newest), earlier):
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
    known = tuple(p for _, p in _present_participants(context, logged))
    broken = apply_decided(context, replace(logged, participants=known), StepId.RECOVER_APPLY)
    missing = sorted({p.shard for p in find_invisible(context, logged, broken)})
    if missing and not context.tolerance.missing_ledger:
        raise PromiseBroken(
            "LOGGED_BATCH_LOST",
            batch=logged.batch,
            pipeline=context.scope.pipeline,
            shards=missing,
            next_batch=logged.batch + 1,
        )


def _commit_until_known(context: Context, work: Work, prepared: Prepared) -> Outcome[None]:
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


def _present_participants(context: Context, decision: Decision) -> list[tuple[Work, Prepared]]:
    """Those of present sinks: others could be changed since the batch was finished."""
    return [(decision.work(p), p) for p in decision.participants if p.handle and p.sink in context.sinks]
