"""What the tasks of a batch say, checked before anything is decided. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.engine.context import Context
from delivered.model.archive import Archived
from delivered.model.errors import InvariantBroken, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.work import Action, Decision, Prepared, ShardMessage

_AGAIN = "start the pipeline again; the batch runs again"


def checked(context: Context, batch: int, messages: Sequence[ShardMessage | None]) -> list[ShardMessage]:
    """The messages in the order of shards, one for each shard, all of this batch, claim and driver.

    Raises:
        InvariantBroken: they do not fit together. Nothing was decided.
    """
    said = [m for m in messages if m is not None]
    if len(said) != len(messages):
        raise InvariantBroken(
            "MESSAGE_MISSING",
            f"Batch {batch}: {len(messages) - len(said)} of {len(messages)} tasks sent no message, and Spark asks to "
            "commit. Nothing was decided.",
            next_step=_AGAIN,
        )
    for m in said:
        mine = (context.scope, context.owner.id, batch, said[0].plan.epoch)
        if (m.plan.scope, m.plan.owner, m.plan.batch, m.plan.epoch) != mine:
            raise InvariantBroken(
                "MESSAGE_FOREIGN",
                f"Batch {batch} of {context.scope}: shard {m.shard} speaks of batch {m.plan.batch} of {m.plan.scope}, "
                f"owner {m.plan.owner}; this driver is {context.owner.id}. Nothing was decided.",
                next_step=_AGAIN,
            )
    said.sort(key=lambda m: m.shard)
    if [m.shard for m in said] != list(range(len(said))):
        raise InvariantBroken(
            "SHARDS_INCOMPLETE",
            f"Batch {batch}: {len(said)} messages must speak of shards 0 to {len(said) - 1}, once each; they speak of "
            f"{[m.shard for m in said][:50]}. Nothing was decided.",
            next_step=_AGAIN,
        )
    return said


def written(said: Sequence[ShardMessage]) -> tuple[Prepared, ...]:
    return tuple(p for m in said for p in m.participants)


def all_skipped(said: Sequence[ShardMessage]) -> bool:
    return bool(said) and all(m.did is Action.SKIP for m in said)


def repeats(said: Sequence[ShardMessage]) -> bool:
    """Whether these are of a run that was decided before it was planned. One without tasks has no rows to compare."""
    return not said or any(m.did is Action.COMPARE for m in said)


def check_same_rows(context: Context, decided: Archived, said: Sequence[ShardMessage]) -> None:
    """Check that a run that was decided before has the same rows.

    Raises:
        Refused: it has others. None of them was written.
    """
    given = sum((m.compared for m in said), Fingerprint())
    given += sum((p.fingerprint for p in written(said) if not p.sink), Fingerprint())
    if decided.holds(given):
        return
    what = "others" if given.count == decided.rows else str(given.count)
    raise Refused(
        "RUN_ID_TAKEN",
        f"The run {context.scope.incarnation!r} of pipeline {context.scope.pipeline!r} was written to sink "
        f"{context.scope.sink!r} before, with {decided.rows} records; now it has {what}. A run id names the same rows "
        "each time. Nothing was written.",
        next_step="give other rows another runId; within foreachBatch one of the query's id and the batch's: "
        'f"{query_id}-{batch_id}"',
    )


def complete(context: Context, batch: int, said: Sequence[ShardMessage]) -> None:
    """Check that every shard of a new batch was written to every sink, or given up where that is allowed.

    Raises:
        InvariantBroken: a decision would leave a shard's records out.
    """
    sinks = sorted(("", *context.others))
    for m in said:
        named = sorted(p.sink for p in m.participants if p.shard == m.shard)
        wrote = m.did is Action.WRITE and named == sinks and len(m.participants) == len(sinks)
        gave_up = m.did is Action.GIVE_UP and m.plan.guarantee is Guarantee.AT_MOST_ONCE
        if not (wrote or gave_up):
            raise InvariantBroken(
                "SHARD_UNWRITTEN",
                f"Batch {batch} is new under {m.plan.guarantee.value}, and shard {m.shard} says {m.did.value}: its "
                "records would be left out. Nothing was decided.",
                next_step=_AGAIN,
            )


def orphans(said: Sequence[ShardMessage], decision: Decision) -> list[Prepared]:
    """What tasks prepared and the decision does not name."""
    named = {_key(p) for p in decision.participants}
    return [p for p in written(said) if p.holds and _key(p) not in named]


def _key(p: Prepared) -> tuple[int, str, str]:
    return p.shard, p.sink, str(sorted(p.handle.items()))
