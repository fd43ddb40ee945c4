"""The adapter between Spark's writers and the engine: where a batch is recovered and planned, committed and aborted."""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from delivered.contract.powers import add_columns, ready_target
from delivered.contract.schemas import WritesBySchema
from delivered.contract.sink import Sink, SinkGroup
from delivered.contract.source import REJECTED
from delivered.engine.grants import may_send
from delivered.engine.shard import write_shard
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.patience import in_query
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, BatchPlan, CheckpointView, ShardMessage
from delivered.spark.task import arm, running_task

if TYPE_CHECKING:
    from delivered.engine.context import Context
    from delivered.model.work import Arbiter
    from delivered.pipeline.spec import PipelineSpec

# The engine's driver code is imported where it is called: tasks unpickle writers, and must not load it.


@dataclass
class ShardCommit(WriterCommitMessage):
    """Carries a shard's message to the driver."""

    message: ShardMessage


class Recovering:
    """A writer that recovers and plans its batch when Spark pickles it for the tasks.

    Recovery (claim, check, apply, abort orphans) must run on the driver before the first task of a batch, and never
    later, when it would abort what the tasks prepared. PySpark has no hook for that. It creates a stream's writer twice
    per batch, in two long-lived driver processes: one plans, the other commits. A writer learns neither which process
    it is in nor when tasks start. But only the planning process pickles it, once, for the tasks; so does df.write,
    which then commits with the pickled writer. Should a Spark version change that, it is detected: tasks compare their
    query and batch with the plan, and a commit accepts only messages of its own batch and owner (decision 001).
    """

    _stays: tuple[str, ...] = ()
    """Attributes that are not pickled."""

    def __init__(self, spec: PipelineSpec, sink: Sink | SinkGroup, schema: pa.Schema) -> None:
        self._spec = spec
        self._sink = sink
        self._schema = schema
        self._plan: BatchPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._plan is None:
            try:
                self._plan = self._recover()
            except DeliveredError as error:
                # PySpark wraps any other type in "Could not serialize object".
                raise pickle.PicklingError(str(error)) from None
        return {**self.__dict__, **dict.fromkeys(self._stays)}

    def _recover(self) -> BatchPlan:
        raise NotImplementedError

    def _planned(self) -> BatchPlan:
        if self._plan is None:
            raise InvariantBroken(
                "NO_PLAN",
                "A task received a writer without a plan. Nothing was written.",
                next_step="run `delivered doctor`, which checks Spark's version, and report this with its output",
            )
        return self._plan

    def _write(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        arm(self._planned().scope.pipeline)
        in_query()
        task = running_task()
        shard, attempt = task.partitionId(), task.attemptNumber()
        plan = self._planned()
        asks = partial(may_send, plan, shard)
        message = write_shard(self._sink, plan, shard, attempt, batches, self._schema, asks)
        return ShardCommit(replace(message, task=task.taskAttemptId()))


def plan_next(spec: PipelineSpec, sink: Sink | SinkGroup, schema: pa.Schema) -> BatchPlan:
    """Recover a stream, and plan its next batch according to the checkpoint."""
    from delivered.checkpoint.folder import holds_state, read_view, repartitions_before
    from delivered.engine.recover import plan_batch

    arm(spec.pipeline)
    began = time.monotonic()
    checkpoint = checkpoint_of(spec)
    view = read_view(checkpoint)
    if view.batch:
        in_query()
    opened = context(spec, sink, view.incarnation)
    key = (opened.scope, spec.owner.id)
    before = _planned.pop(key, None)  # if this plan fails, the next one recovers in full
    first = before is None or not before.is_followed_by(view, spec.start)
    if first:
        view = replace(view, repartitions=repartitions_before(checkpoint, view.batch))
        ready_target(sink, schema)
    else:
        reach(StepId.LOG, Moment.AFTER, batch=view.batch - 1)
    since = before.epoch if before is not None else None
    arbiter = _arbiter(spec, opened.scope)
    # In foreachBatch the user decides what is written, perhaps twice to one sink: always compared.
    plan = plan_batch(
        opened,
        view,
        first=first,
        since=since,
        keeps_state=lambda: spec.batch is not None or holds_state(checkpoint),
        add_columns=partial(add_columns, sink, schema),
    )
    _planned[key] = _Planned(view.batch, plan.epoch, spec.start)
    if spec.on_bad_row is not OnBadRow.FAIL and (first or spec.rejects):
        from delivered.checkpoint import rejected

        rejected.forget(checkpoint, view.batch, decided=is_decided(plan))
    return replace(plan, seconds=time.monotonic() - began, arbiter=arbiter)


def is_decided(plan: BatchPlan) -> bool:
    """Whether the batch was decided, or may have been sent, by an earlier run."""
    return plan.action is not Action.WRITE or bool(plan.rewrite)


def rejected_shard(
    spec: PipelineSpec, sink: Sink | SinkGroup, schema: pa.Schema, messages: Sequence[ShardMessage]
) -> ShardMessage | None:
    """One more shard of a batch, prepared here: records that its tasks could not turn into rows. None: there are none.

    Runs on the driver, after all tasks.
    """
    if spec.on_bad_row is OnBadRow.FAIL or spec.checkpoint is None or not messages:
        return None
    plan = messages[0].plan
    if not (spec.rejects or is_decided(plan)):  # what an earlier start decided may hold some
        return None
    from delivered.checkpoint import rejected

    records = rejected.gather(spec.checkpoint, plan.batch, spec.start)
    if records is None:
        return None
    only = pa.RecordBatch.from_arrays([records], schema=pa.schema([REJECTED]))
    shard = len(messages)
    return write_shard(sink, plan, shard, 0, iter([only]), schema, partial(may_send, plan, shard))


def with_schemas(spec: PipelineSpec, sink: Sink | SinkGroup, schema: pa.Schema, plan: BatchPlan) -> Sink | SinkGroup:
    """The sink with the registered schemas that the rows of a planned batch are written with.

    Those of a decided batch are the ones that it was decided with: rows written again must have the same bytes. An
    undecided batch takes what the registry had at the start of the query; that is stored before its tasks start.
    """
    group = sink if isinstance(sink, SinkGroup) else None
    own = (
        [(plan.scope.sink, sink, schema)]
        if group is None
        else [(m.name, m.sink, s) for m, s in group.own_schemas(schema)]
    )
    formatted = [(name, each, rows) for name, each, rows in own if isinstance(each, WritesBySchema)]
    if not formatted or (plan.action is Action.SKIP and not plan.rewrite):
        return sink
    from delivered.checkpoint import sidecar

    where, decided = spec.checkpoint, is_decided(plan)
    known = sidecar.written_schemas(where, plan.batch) if decided and where is not None else None
    made: dict[str, WritesBySchema]
    if known is not None and all(f"{name}.{c}" in known for name, each, _ in formatted for c in each.columns):
        made = {name: each.by_ids({c: known[f"{name}.{c}"] for c in each.columns}) for name, each, _ in formatted}
    else:
        key = (plan.scope, spec.start)
        if not spec.start or key not in _settled:
            _settled.clear()
            _settled[key] = {name: each.settled(rows) for name, each, rows in formatted}
        made = _settled[key]
        if where is not None and not decided:
            ids = {f"{n}.{c}": i for n, s in made.items() for c, i in s.schema_ids().items()}
            sidecar.keep_written_schemas(where, plan.batch, ids)
    return group.with_sinks(made) if group is not None else next(iter(made.values()))


def plan_run(spec: PipelineSpec, sink: Sink | SinkGroup, run: str, schema: pa.Schema) -> BatchPlan:
    """Recover a batch write, and plan it as the only batch of an incarnation that its run id identifies."""
    from delivered.engine.recover import plan_batch

    arm(spec.pipeline)
    ready_target(sink, schema)
    view = CheckpointView(run, 0, f"run {run}", None, run=True)
    opened = context(spec, sink, run)
    arbiter = _arbiter(spec, opened.scope)
    plan = plan_batch(opened, view, first=True, add_columns=partial(add_columns, sink, schema))
    return replace(plan, arbiter=arbiter)


def _arbiter(spec: PipelineSpec, scope: Scope) -> Arbiter | None:
    """Who grants the batch's shards; before the ledger records that the batch may send."""
    if spec.guarantee is not Guarantee.AT_MOST_ONCE:
        return None
    from delivered.engine.granting import registered

    return registered(scope, spec.owner, spec.driver)


def commit(
    opened: Context, batch: int, offsets: str, messages: Sequence[ShardMessage | None], checkpoint: str | None = None
) -> None:
    """
    Args:
        checkpoint: of a query; its batches are reported there. None: it is a run.
    """
    from delivered.checkpoint.history import add
    from delivered.engine.decide import commit_batch

    report = partial(add, checkpoint) if checkpoint is not None else lambda _: None
    commit_batch(opened, batch, offsets, messages, run=checkpoint is None, report=report)


def abort(opened: Context, messages: Sequence[ShardMessage | None]) -> None:
    from delivered.engine.decide import abort_batch

    abort_batch(opened, messages)


def checkpoint_of(spec: PipelineSpec) -> str:
    if spec.checkpoint is None:
        raise InvariantBroken(
            "CHECKPOINT_UNKNOWN",
            "Spark passed no checkpointLocation to the sink. Nothing was written.",
            next_step='set it on the writer: .option("checkpointLocation", "...")',
        )
    return spec.checkpoint


def messages_of(messages: Sequence[WriterCommitMessage | None]) -> list[ShardMessage | None]:
    return [m.message if isinstance(m, ShardCommit) else None for m in messages]


def context(spec: PipelineSpec, sink: Sink | SinkGroup, incarnation: str) -> Context:
    """Ledger and committer of a pipeline, opened once per process, which Spark reuses for many batches."""
    from delivered.engine.context import Context
    from delivered.engine.owner import located

    scope = spec.scope(sink, incarnation)
    key = (scope, spec.owner.id, replace(spec, start="", batch=None).to_option())
    if key in _contexts:
        _contexts.move_to_end(key)
        return _contexts[key]
    _contexts[key] = Context.open(sink, scope, spec.guarantee, located(spec.owner), spec.tolerance, spec.transform)
    while len(_contexts) > _CONTEXTS_MAX:
        _, old = _contexts.popitem(last=False)
        old.ledger.close()
        old.committer.close()
    return _contexts[key]


@dataclass(frozen=True)
class _Planned:
    """The batch that this process planned last.

    Attributes:
        epoch: ledger epoch of its plan.
        start: identifies the start of its query.
    """

    batch: int
    epoch: int
    start: str

    def is_followed_by(self, view: CheckpointView, start: str) -> bool:
        """Whether Spark logged it and runs the next batch in the same start of the query: no claim is needed."""
        return self.batch == view.batch - 1 == view.logged and self.start == start


_CONTEXTS_MAX = 8
_contexts: OrderedDict[tuple[Scope, str, str], Context] = OrderedDict()
_planned: dict[tuple[Scope, str], _Planned] = {}
_settled: dict[tuple[Scope, str], dict[str, WritesBySchema]] = {}
"""Sinks with their schemas, of the start that was planned last."""
