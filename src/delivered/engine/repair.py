"""Compare rewritten shards of a decided batch with the decision."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from delivered.engine.context import Context
from delivered.engine.messages import written
from delivered.model.errors import InvariantBroken, ReplayDiffers
from delivered.model.work import Decision, ShardMessage


def repaired(context: Context, last: Decision, messages: Sequence[ShardMessage]) -> Decision:
    """The next revision of the decision, with new participants replacing those that timed out.

    Raises:
        ReplayDiffers: the rerun had other shards or other rows. What it prepared was aborted.
        InvariantBroken: a shard that had to be rewritten was not.
    """
    plan = messages[0].plan
    new = {(p.shard, p.sink): p for p in written(messages)}
    try:
        _same_batch(last, plan.rewrite, messages)
    except InvariantBroken:
        for p in new.values():
            if p.handle:
                context.committer.abort(p)
        raise
    return replace(
        last,
        owner=context.owner.id,
        participants=tuple(new.get((p.shard, p.sink), p) for p in last.participants),
        decided_at_ms=time.time_ns() // 1_000_000,
        revision=last.revision + 1,
    )


def _same_batch(last: Decision, rewrite: Mapping[int, frozenset[str]], messages: Sequence[ShardMessage]) -> None:
    decided = {(p.shard, p.sink): p.fingerprint for p in last.participants}
    shards = len({p.shard for p in last.participants})
    if len(messages) != shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER",
            f"Batch {last.batch} was decided with {shards} shards but reran with {len(messages)}; shards "
            f"{sorted(rewrite)} must be rewritten and can no longer be identified. Nothing more was applied.",
            next_step="start again with the previous number of partitions (spark.sql.shuffle.partitions, repartition)",
        )
    if {(p.shard, p.sink) for p in written(messages)} != {
        (shard, s) for shard, sinks in rewrite.items() for s in sinks
    }:
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            f"Batch {last.batch}: shards {sorted(rewrite)} had to be rewritten, but the tasks wrote "
            f"{sorted(p.shard for p in written(messages))}. Nothing more was applied.",
            next_step="start the pipeline again; the batch runs again",
        )
    for p in written(messages):
        before = decided[p.shard, p.sink]
        if before != p.fingerprint:
            raise ReplayDiffers(
                "REPLAY_DIFFERS",
                f"Batch {last.batch}, shard {p.shard}, sink {last.scope_of(p).sink!r}: decided with fingerprint "
                f"{before}, but reran with {p.fingerprint}. The transform is not deterministic. Nothing more was "
                "applied; what the other shards of the batch wrote is visible.",
                next_step="remove what changes between runs (rand(), now(), a lookup) from the transform, then start "
                "again",
            )
