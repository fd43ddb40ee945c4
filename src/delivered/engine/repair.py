"""A decided batch of which some shards had to be written again: check them against what was decided."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from delivered.engine.context import Context
from delivered.engine.messages import written
from delivered.model.errors import InvariantBroken, ReplayDiffers
from delivered.model.work import Decision, ShardMessage


def repaired(context: Context, last: Decision, said: Sequence[ShardMessage]) -> Decision:
    """The decision with the participants that replace those whose promise expired, one revision on.

    Raises:
        ReplayDiffers: the batch ran again with other shards or other rows. What it wrote was given back.
        InvariantBroken: a shard that had to be written again was not.
    """
    plan = said[0].plan
    new = {(p.shard, p.sink): p for p in written(said)}
    try:
        _same_batch(last, plan.rewrite, said)
    except InvariantBroken:
        for p in new.values():
            if p.holds:
                context.committer.abort(p)
        raise
    return replace(
        last,
        owner=context.owner.id,
        participants=tuple(new.get((p.shard, p.sink), p) for p in last.participants),
        decided_at_ms=time.time_ns() // 1_000_000,
        revision=last.revision + 1,
    )


def _same_batch(last: Decision, rewrite: Mapping[int, frozenset[str]], said: Sequence[ShardMessage]) -> None:
    decided = {(p.shard, p.sink): p.fingerprint for p in last.participants}
    shards = len({p.shard for p in last.participants})
    if len(said) != shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER",
            f"Batch {last.batch} was decided with {shards} shards and ran again with {len(said)}; shards "
            f"{sorted(rewrite)} must be written again and cannot be told apart now. Nothing more was applied.",
            next_step="start again with the former number of partitions (spark.sql.shuffle.partitions, repartition)",
        )
    if {(p.shard, p.sink) for p in written(said)} != {(shard, s) for shard, sinks in rewrite.items() for s in sinks}:
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            f"Batch {last.batch}: shards {sorted(rewrite)} had to be written again, the tasks wrote "
            f"{sorted(p.shard for p in written(said))}. Nothing more was applied.",
            next_step="start the pipeline again; the batch runs again",
        )
    for p in written(said):
        before = decided[p.shard, p.sink]
        if before != p.fingerprint:
            raise ReplayDiffers(
                "REPLAY_DIFFERS",
                f"Batch {last.batch}, shard {p.shard}, sink {last.scope_of(p).sink!r}: decided with fingerprint "
                f"{before}, ran again with {p.fingerprint}. The transform is not deterministic. Nothing more was "
                "applied; what the other shards of the batch wrote is visible.",
                next_step="take what changes between runs (rand(), now(), a look-up) out of the transform, then "
                "start again",
            )
