"""The tasks' commit messages, checked before anything is decided. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.engine.context import Context
from delivered.model.errors import InvariantBroken, Refused, ReplayDiffers
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.options import shown, starting_at
from delivered.model.work import Action, Archived, Decision, Prepared, ShardMessage

_AGAIN = "start the pipeline again; the batch runs again"


def checked(context: Context, batch: int, messages: Sequence[ShardMessage | None]) -> list[ShardMessage]:
    """The messages in shard order, one per shard, all of this batch, claim and driver.

    Raises:
        InvariantBroken: they are inconsistent. Nothing was decided.
    """
    shards = [m for m in messages if m is not None]
    if len(shards) != len(messages):
        raise InvariantBroken(
            "MESSAGE_MISSING",
            f"Batch {batch}: {len(messages) - len(shards)} of {len(messages)} tasks sent no message, yet Spark asks to "
            "commit. Nothing was decided.",
            next_step=_AGAIN,
        )
    for m in shards:
        expected = (context.scope, context.owner.id, batch, shards[0].plan.epoch)
        if (m.plan.scope, m.plan.owner, m.plan.batch, m.plan.epoch) != expected:
            raise InvariantBroken(
                "MESSAGE_FOREIGN",
                f"Batch {batch} of {context.scope}: the message of shard {m.shard} is for batch {m.plan.batch} of "
                f"{m.plan.scope}, owner {m.plan.owner}; this driver is {context.owner.id}. Nothing was decided.",
                next_step=_AGAIN,
            )
    shards.sort(key=lambda m: m.shard)
    if [m.shard for m in shards] != list(range(len(shards))):
        raise InvariantBroken(
            "SHARDS_INCOMPLETE",
            f"Batch {batch}: {len(shards)} messages must cover shards 0 to {len(shards) - 1}, once each; they cover "
            f"{[m.shard for m in shards][:50]}. Nothing was decided.",
            next_step=_AGAIN,
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
        f"Run {context.scope.incarnation!r} of pipeline {context.scope.pipeline!r} was already written to sink "
        f"{context.scope.sink!r} with {decided.rows} records; now it has {count}. A run id must always name the same "
        "rows. Nothing was written.",
        next_step="use another runId for other rows; in foreachBatch, combine the query's id and the batch's: "
        'f"{query_id}-{batch_id}"',
    )


def ran_again(messages: Sequence[ShardMessage]) -> bool:
    """Whether more tasks of the batch may have run than those that report.

    Attempts are numbered from 0 again when Spark reruns a stage (P31), but the numbers of its tasks have a gap then,
    unless all of them ran again. So have those of two queries that run at once, for which this is a false alarm.
    """
    tasks = [m.task for m in messages if m.task >= 0]
    return any(m.attempt for m in messages) or (bool(tasks) and max(tasks) - min(tasks) >= len(tasks))


def check_same_state(decided: Decision, messages: Sequence[ShardMessage], *, run: bool) -> None:
    """Check that the rerun of a decided batch of a stateful query has the same rows, as Spark commits the rerun's
    state. Rows may have moved to another shard. `engine.repair` compares rewritten shards.

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
            "REPLAY_DIFFERS",
            f"Batch {decided.batch} is decided and delivered, and reran with other rows in shards {differing[:50]}. "
            f"Shard {shard} at sink {sink!r} was decided with fingerprint {before.get(shard, none)}, but reran with "
            f"{after.get(shard, none)}. The state that Spark keeps of the rerun holds what was never delivered, so the "
            "query cannot go on from it. Nothing more was written. The transform was edited, is not deterministic, or "
            "the source no longer has some of the batch's records: lostRecords cannot give those up in a query that "
            f"keeps state, as its state would lack them, too. The batch ended at offsets {shown(decided.offsets)}"
            + (
                f"; the prepared rows of shards {dropped[:50]} were dropped before they became visible"
                if dropped
                else ""
            ),
            next_step="if the transform was edited since, start once with the previous one; if the source lost "
            "records, restore them. Otherwise remove what changes between runs (uuid(), rand(), now(), the order of "
            "rows) from the transform, and start where the batch ended, with empty state: a new checkpointLocation, "
            f"{starting_at(decided.offsets)} and, once, "
            '.option("newCheckpoint", "accept")'
            + (' and .option("missingLedger", "accept"): the dropped rows are then missing' if dropped else ""),
        )


def _same(decided: Fingerprint, now: Fingerprint) -> bool:
    """Whether the rows are the same, as far as `now`, which may be only a count, shows."""
    return now in (decided, Fingerprint(decided.count))


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
                "SHARD_UNWRITTEN",
                f"Batch {batch} is new under {m.plan.guarantee.value}, but shard {m.shard} reports {m.did.value}: "
                "its records would be lost. Nothing was decided.",
                next_step=_AGAIN,
            )


def orphans(messages: Sequence[ShardMessage], decision: Decision) -> list[Prepared]:
    """Prepared participants that the decision does not name."""
    kept = {_key(p) for p in decision.participants}
    return [p for p in written(messages) if p.handle and _key(p) not in kept]


def _key(p: Prepared) -> tuple[int, str, str]:
    return p.shard, p.sink, str(sorted(p.handle.items()))
