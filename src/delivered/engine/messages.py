"""The tasks' commit messages, checked before anything is decided; those of a decided batch are compared with it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from delivered.engine.context import Context
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, ReplayDiffers
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.options import shown, starting_at
from delivered.model.work import Account, Action, Archived, Decision, Prepared, ShardMessage

log = logging.getLogger(__name__)

LOST = "source"
"""Reason of what is given up because the source no longer has it (`Prepared.given_up`)."""


def checked(context: Context, batch: int, messages: Sequence[ShardMessage | None]) -> list[ShardMessage]:
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


def written(messages: Sequence[ShardMessage]) -> tuple[Prepared, ...]:
    return tuple(p for m in messages for p in m.participants)


def all_skipped(messages: Sequence[ShardMessage]) -> bool:
    return bool(messages) and all(m.did in (Action.SKIP, Action.COMPARE) for m in messages)


def repeats(messages: Sequence[ShardMessage]) -> bool:
    """Whether the run was decided before it was planned. Without tasks, there is nothing to compare."""
    return not messages or any(m.did is Action.COMPARE for m in messages)


def check_same_rows(context: Context, decided: Archived, messages: Sequence[ShardMessage]) -> None:
    """Check that a run that is already decided has the same rows.

    Raises:
        Refused: it has other rows. None of them was written.
    """
    rows = sum((m.compared[context.scope.sink] for m in messages if m.did is Action.COMPARE), Fingerprint())
    rows += sum((p.fingerprint for p in written(messages) if p.sink == context.scope.sink), Fingerprint())
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


def ran_again(messages: Sequence[ShardMessage]) -> bool:
    """Whether more tasks of the batch may have run than those that report.

    Attempts are numbered from 0 again when Spark reruns a stage (P31), but the numbers of its tasks have a gap then,
    unless all of them ran again. So have those of two queries that run at once, for which this is a false alarm.
    """
    tasks = [m.task for m in messages if m.task is not None]
    return any(m.attempt for m in messages) or (bool(tasks) and max(tasks) - min(tasks) >= len(tasks))


def check_same_state(decided: Decision, messages: Sequence[ShardMessage], *, run: bool) -> None:
    """Check that the rerun of a decided batch of a stateful query has the same rows, as Spark commits the rerun's
    state. Rows may have moved to another shard. `repaired` compares rewritten shards.

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
        if _same(sum(before.values(), none), sum(after.values(), none)):
            continue
        differing = [n for n in sorted({*before, *after}) if not _same(before.get(n, none), after.get(n, none))]
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


def complete(context: Context, batch: int, messages: Sequence[ShardMessage]) -> None:
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
                "SHARD_UNWRITTEN", batch=batch, guarantee=m.plan.guarantee.value, shard=m.shard, did=m.did.value
            )


def orphans(messages: Sequence[ShardMessage], decision: Decision) -> list[Prepared]:
    """Prepared participants that the decision does not name."""
    kept = {_key(p) for p in decision.participants}
    return [p for p in written(messages) if p.handle and _key(p) not in kept]


def repaired(context: Context, last: Decision, messages: Sequence[ShardMessage]) -> Decision:
    """The next revision of the decision, with new participants replacing those that timed out.

    A shard that comes back shorter was decided with records that the source no longer has. The rest is written, and the
    missing ones are given up, if the user accepts that (`Tolerance.lost_records`): the revision counts them.

    Raises:
        ReplayDiffers: the rerun had other shards, other rows, or fewer rows that the user did not give up. What it
            prepared was aborted.
        InvariantBroken: a shard that had to be rewritten was not.
    """
    plan = messages[0].plan
    new = {(p.shard, p.sink): p for p in written(messages)}
    try:
        missing = _missing(last, plan.rewrite, messages)
        if missing and not context.tolerance.lost_records:
            raise _records_missing(context, last, missing)
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


def _same(decided: Fingerprint, now: Fingerprint) -> bool:
    """Whether the rows are the same, as far as `now`, which may be only a count, shows."""
    return now in (decided, Fingerprint(decided.count))


def _key(p: Prepared) -> tuple[int, str, str]:
    return p.shard, p.sink, str(sorted(p.handle.items()))


def _missing(
    last: Decision, rewrite: Mapping[int, frozenset[str]], messages: Sequence[ShardMessage]
) -> dict[tuple[int, str], int]:
    """(shard, sink) -> number of decided records that the rerun lacks. Raises if it differs in any other way."""
    decided = {(p.shard, p.sink): p.fingerprint for p in last.participants}
    shards = len({p.shard for p in last.participants})
    if len(messages) != shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER", batch=last.batch, shards=shards, current=len(messages), rewrite=sorted(rewrite)
        )
    if {(p.shard, p.sink) for p in written(messages)} != {
        (shard, s) for shard, sinks in rewrite.items() for s in sinks
    }:
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            batch=last.batch,
            shards=sorted(rewrite),
            written=sorted(p.shard for p in written(messages)),
        )
    missing: dict[tuple[int, str], int] = {}
    for p in written(messages):
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


def _records_missing(context: Context, last: Decision, missing: Mapping[tuple[int, str], int]) -> ReplayDiffers:
    parts = [f"{n:,} of shard {shard} at sink {sink!r}" for (shard, sink), n in sorted(missing.items())]
    return ReplayDiffers(
        "REPLAY_RECORDS_MISSING",
        batch=last.batch,
        missing=sum(missing.values()),
        parts=", ".join(parts[:20]),
        start=shown(_start_of(context, last)),
        end=shown(last.offsets),
    )


def _start_of(context: Context, last: Decision) -> str:
    """Where the previous batch ended, if the ledger still says so."""
    with suppress(DeliveredError):
        for decision in context.ledger.history():
            if decision.batch == last.batch - 1:
                return decision.offsets
    return "the start" if last.batch == 0 else "the end of the batch before"
