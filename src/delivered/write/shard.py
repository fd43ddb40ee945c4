"""One task, one shard: take the rows, prepare, tell the driver."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from delivered.contract import ShardWriter, Sink
from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import SHARDS_MAX
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, BatchPlan, Prepared, ShardMessage


def fingerprint_seed(scope: Scope) -> int:
    """The same for every incarnation, so that an audit can add them up."""
    return seed_of(scope.pipeline, scope.sink)


def write_shard(
    sink: Sink,
    plan: BatchPlan,
    shard: int,
    attempt: int,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
) -> ShardMessage:
    """Do with a shard what the batch's plan says.

    Args:
        shard: 0-based; stable when the batch runs again.
        attempt: 0 for the first attempt of this task in this run of the batch.
        batches: rows in the sink's input schema; consumed once, unless the shard is skipped.

    Raises:
        InvariantBroken: the shard is out of bounds, or was not part of the batch that is being repaired.
    """
    if not 0 <= shard < SHARDS_MAX:
        raise InvariantBroken(
            "SHARDS_TOO_MANY",
            f"Shard {shard} of batch {plan.batch}: a batch may have at most {SHARDS_MAX} shards.",
            next_step="write with fewer partitions, for instance df.coalesce(200)",
        )
    action = plan.action_for(shard)
    if action is Action.SKIP:
        return ShardMessage(plan, shard, attempt, Action.SKIP)
    if plan.guarantee is Guarantee.AT_MOST_ONCE and attempt > 0:
        # An earlier attempt of this task may have sent records. Sending again could double them.
        action = Action.GIVE_UP
    seed = fingerprint_seed(plan.scope)
    if action is Action.GIVE_UP:
        lost = sum((fingerprint(sink.records(b), seed) for b in batches), Fingerprint())
        return ShardMessage(plan, shard, attempt, Action.GIVE_UP, given_up=lost)
    writer = sink.shard_writer(Work(plan.scope, plan.batch, shard, attempt), plan.guarantee, schema)
    try:
        prepared = _stage_and_prepare(sink, writer, plan, shard, attempt, batches, seed)
    except BaseException:
        writer.abort()
        raise
    # Records of a shard that was written, which the sink gave up without an answer: a count, for nobody knows which.
    unanswered = Fingerprint(int(prepared.handle.get("given_up", 0)))
    return ShardMessage(plan, shard, attempt, Action.WRITE, prepared=prepared, given_up=unanswered)


def _stage_and_prepare(
    sink: Sink,
    writer: ShardWriter,
    plan: BatchPlan,
    shard: int,
    attempt: int,
    batches: Iterator[pa.RecordBatch],
    seed: int,
) -> Prepared:
    exactly_once = plan.guarantee is Guarantee.EXACTLY_ONCE
    write = StepId.WRITE_STAGE if exactly_once else StepId.WRITE_SEND
    promise = StepId.WRITE_PREPARE if exactly_once else StepId.WRITE_FLUSH
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    total = Fingerprint()
    reach(write, Moment.BEFORE, **facts)
    for batch in batches:
        total += fingerprint(sink.records(batch), seed)
        writer.stage(batch)
        reach(write, Moment.AFTER, rows=total.count, **facts)
    reach(promise, Moment.BEFORE, **facts)
    # The writer learns the fingerprint only now: sinks that keep it beside the rows write it last.
    handle = writer.prepare(total)
    reach(promise, Moment.AFTER, **facts)
    return Prepared(shard, attempt, total, handle)
