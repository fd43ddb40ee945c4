"""One task, one shard: take the rows, prepare at every sink, tell the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa

from delivered.contract import Member, Several, ShardWriter, Sink
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
    sink: Sink | Several,
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
    lines = _lines(sink, plan, shard)
    if action is Action.GIVE_UP:
        for batch in batches:
            for line in lines:
                line.count(batch)
        return ShardMessage(plan, shard, attempt, Action.GIVE_UP, given_up={n.member.id: n.total for n in lines})
    with ExitStack() as undo:
        writers = []
        for line in lines:
            writers.append(line.writer(plan, shard, attempt, schema))
            undo.callback(writers[-1].abort)
        participants = _stage_and_prepare(lines, writers, plan, shard, attempt, batches)
        undo.pop_all()
    # Records of a shard that was written, which the sink gave up without an answer: a count, for nobody knows which.
    unanswered = {p.sink: Fingerprint(int(p.handle.get("given_up", 0))) for p in participants}
    return ShardMessage(plan, shard, attempt, Action.WRITE, participants, unanswered)


@dataclass
class _Line:
    """What goes to one sink."""

    member: Member
    scope: Scope
    seed: int
    total: Fingerprint = Fingerprint()

    def writer(self, plan: BatchPlan, shard: int, attempt: int, schema: pa.Schema) -> ShardWriter:
        mine = self._routed(pa.RecordBatch.from_pylist([], schema=schema)).schema if self.member.route else schema
        return self.member.sink.shard_writer(Work(self.scope, plan.batch, shard, attempt), plan.guarantee, mine)

    def count(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of this sink, added to its fingerprint."""
        mine = self._routed(batch)
        self.total += fingerprint(self.member.sink.records(mine), self.seed)
        return mine

    def _routed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.member.route is None else self.member.route(batch)


def _lines(sink: Sink | Several, plan: BatchPlan, shard: int) -> list[_Line]:
    """One for each sink that this shard is written to."""
    members = sink.members if isinstance(sink, Several) else (Member("", plan.scope.sink, sink),)
    wanted = plan.rewrite.get(shard)
    found = []
    for member in members:
        if wanted is None or member.id in wanted:
            scope = replace(plan.scope, sink=member.id) if member.id else plan.scope
            found.append(_Line(member, scope, fingerprint_seed(scope)))
    return found


def _stage_and_prepare(
    lines: Sequence[_Line],
    writers: Sequence[ShardWriter],
    plan: BatchPlan,
    shard: int,
    attempt: int,
    batches: Iterator[pa.RecordBatch],
) -> tuple[Prepared, ...]:
    exactly_once = plan.guarantee is Guarantee.EXACTLY_ONCE
    write = StepId.WRITE_STAGE if exactly_once else StepId.WRITE_SEND
    promise = StepId.WRITE_PREPARE if exactly_once else StepId.WRITE_FLUSH
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    reach(write, Moment.BEFORE, **facts)
    for batch in batches:
        for line, writer in zip(lines, writers, strict=True):
            writer.stage(line.count(batch))
            reach(write, Moment.AFTER, rows=line.total.count, sink=line.scope.sink, **facts)
    prepared = []
    for line, writer in zip(lines, writers, strict=True):
        reach(promise, Moment.BEFORE, sink=line.scope.sink, **facts)
        # The writer learns the fingerprint only now: sinks that keep it beside the rows write it last.
        handle = writer.prepare(line.total)
        reach(promise, Moment.AFTER, sink=line.scope.sink, **facts)
        prepared.append(Prepared(shard, attempt, line.total, handle, line.member.id))
    return tuple(prepared)
