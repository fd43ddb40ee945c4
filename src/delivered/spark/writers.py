"""Delivered sinks as Spark writers, for streams, `foreachBatch` and df.write: where Spark's calls meet the engine."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from delivered.engine.shard import may_send, write_shard
from delivered.engine.sinks import Sinks
from delivered.engine.transform import decode
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import Scope
from delivered.model.patience import in_query
from delivered.model.rows import OnBadRow, Rows
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, CheckpointView, ShardMessage, Tolerance
from delivered.spark.compat import StreamArrowWriter
from delivered.spark.internals import running_batch
from delivered.spark.task import arm, running_task

if TYPE_CHECKING:
    from delivered.engine.runner import Runner
    from delivered.engine.transform import Direct
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

    def __init__(self, spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> None:
        self._spec = spec
        self._sinks = sinks
        self._schema = schema
        self._plan: BatchPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._plan is None:
            from delivered.pipeline.written_schemas import with_schemas

            try:
                plan = self._recover()
                self._sinks = with_schemas(self._spec, self._sinks, self._schema, plan)
                self._plan = plan
            except DeliveredError as error:
                # PySpark wraps any other type in "Could not serialize object".
                raise pickle.PicklingError(str(error)) from None
        return {**self.__dict__, **dict.fromkeys(self._stays)}

    def _recover(self) -> BatchPlan:
        raise NotImplementedError

    def _planned(self) -> BatchPlan:
        if self._plan is None:
            raise InvariantBroken("NO_PLAN")
        return self._plan

    def _write(self, batches: Iterator[Rows]) -> WriterCommitMessage:
        arm(self._planned().scope.pipeline)
        in_query()
        task = running_task()
        shard, attempt = task.partitionId(), task.attemptNumber()
        plan = self._planned()
        asks = partial(may_send, plan, shard)
        message = write_shard(self._sinks, plan, shard, attempt, batches, self._schema, asks)
        return ShardCommit(replace(message, task=task.taskAttemptId()))


class BatchOfQuery(Recovering):
    """A batch of a streaming query: of its sink, or of its `foreachBatch`."""

    def _recover(self) -> BatchPlan:
        return plan_next(self._spec, self._sinks, self._schema)

    def _check_running(self, *, outside: bool) -> None:
        """Args: outside: the task may run on a user's thread, for which Spark knows no query."""
        plan, running = self._planned(), running_batch(running_task())
        planned = (plan.scope.incarnation, str(plan.batch))
        if running != planned and not (outside and running == (None, None)):
            raise InvariantBroken("BATCH_DIFFERS.TASK", running=running, planned=planned)

    def _commit(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        from delivered.checkpoint.folder import read_view  # not in a task

        arm(self._spec.pipeline)
        in_query()
        shards = messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            incarnation, offsets = plan.scope.incarnation, plan.offsets
        else:
            view = read_view(checkpoint_of(self._spec))
            incarnation, offsets = view.incarnation, view.offsets
        from delivered.checkpoint.history import add

        runner, checkpoint = find_runner(self._spec, self._sinks, incarnation), checkpoint_of(self._spec)
        rejected = partial(rejected_rows, self._spec, self._schema)
        runner.commit(batch, offsets, shards, report=partial(add, checkpoint), rejected=rejected)
        reach(StepId.LOG, Moment.BEFORE, batch=batch)

    def _abort(self, messages: list[WriterCommitMessage | None]) -> None:
        shards = messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            find_runner(self._spec, self._sinks, plan.scope.incarnation).abort(shards)


class StreamWriter(BatchOfQuery, StreamArrowWriter):
    """One object per batch. Spark creates it twice: where it plans the batch, and where it commits."""

    _stays = ("_spec",)

    def __init__(self, spec: PipelineSpec, sinks: Sinks, schema: pa.Schema, direct: Direct | None = None) -> None:
        super().__init__(spec, sinks, schema)
        self._direct = direct

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self._check_running(outside=False)
        return self._write(self._direct.rows(iterator) if self._direct is not None else map(decode, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        self._abort(messages)


class ForeachWriter(BatchOfQuery, DataSourceArrowWriter):
    """One batch of a query, written by its `foreachBatch`: like that of a stream, but through `df.write`."""

    def _recover(self) -> BatchPlan:
        plan = super()._recover()
        if plan.batch != self._spec.batch:
            raise InvariantBroken(
                "BATCH_DIFFERS.FOREACH_BATCH",
                batch=self._spec.batch,
                checkpoint=self._spec.checkpoint,
                planned=plan.batch,
            )
        return plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self._check_running(outside=True)
        rows = map(decode, iterator)
        if self._spec.one_of_each:
            from delivered.engine.keys import one_of_each_key  # other tasks do not load it

            return self._write(one_of_each_key(self._sinks, rows))
        return self._write(rows)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, self._spec.batch or 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class BatchWriter(Recovering, DataSourceArrowWriter):
    """A run is the only batch of an incarnation that its run id identifies."""

    def __init__(self, spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> None:
        # Every run is its own incarnation, on purpose.
        super().__init__(replace(spec, tolerance=Tolerance(new_checkpoint=True)), sinks, schema)
        self._run = spec.run

    def _recover(self) -> BatchPlan:
        arm(self._spec.pipeline)
        return find_runner(self._spec, self._sinks, self._run).plan(CheckpointView.of_run(self._run), self._schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(map(decode, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        arm(self._spec.pipeline)
        runner = find_runner(self._spec, self._sinks, self._run)
        view = CheckpointView.of_run(self._run)
        runner.commit(view.batch, view.offsets, messages_of(messages), run=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        find_runner(self._spec, self._sinks, self._run).abort(messages_of(messages))


def plan_next(spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> BatchPlan:
    """Recover a stream, and plan its next batch according to the checkpoint."""
    from delivered.checkpoint.folder import holds_state, read_view, repartitions_before

    arm(spec.pipeline)
    checkpoint = checkpoint_of(spec)
    view = read_view(checkpoint)
    if view.batch:
        in_query()
    own = find_runner(spec, sinks, view.incarnation)
    first = own.is_first(view, spec.start or "")
    if first:
        view = replace(view, repartitions=repartitions_before(checkpoint, view.batch))
    # In foreachBatch the user decides what is written, perhaps twice to one sink: always compared.
    keeps_state = partial(holds_state, checkpoint) if spec.batch is None else lambda: True
    plan = own.plan(view, schema, start=spec.start or "", keeps_state=keeps_state)
    if spec.on_bad_row is not OnBadRow.FAIL and (first or spec.rejects):
        from delivered.checkpoint.sidecar import forget_task_files

        forget_task_files(checkpoint, view.batch, decided=plan.is_decided)
    return plan


def rejected_rows(spec: PipelineSpec, schema: pa.Schema, plan: BatchPlan) -> Rows | None:
    """Records of a batch that its tasks could not turn into rows. None: there are none.

    Runs on the driver, after all tasks.
    """
    if spec.on_bad_row is OnBadRow.FAIL or spec.checkpoint is None:
        return None
    if not (spec.rejects or plan.is_decided):  # what an earlier start decided may hold some
        return None
    from delivered.checkpoint.sidecar import gather_task_files
    from delivered.engine.transform import join_rejected, unpack_rejected

    records = gather_task_files(spec.checkpoint, plan.batch, spec.start or "", join_rejected)
    return None if records is None else Rows(pa.RecordBatch.from_pylist([], schema=schema), unpack_rejected(records))


def checkpoint_of(spec: PipelineSpec) -> str:
    if spec.checkpoint is None:
        raise InvariantBroken("CHECKPOINT_UNKNOWN")
    return spec.checkpoint


def messages_of(messages: Sequence[WriterCommitMessage | None]) -> list[ShardMessage | None]:
    return [m.message if isinstance(m, ShardCommit) else None for m in messages]


def find_runner(spec: PipelineSpec, sinks: Sinks, incarnation: str) -> Runner:
    """The runner of a pipeline, opened once per process, which Spark reuses for many batches."""
    from delivered.engine.context import Context
    from delivered.engine.owner import located
    from delivered.engine.runner import Runner

    if spec.sender is None:
        raise InvariantBroken("OWNER_UNKNOWN", pipeline=spec.pipeline)
    scope, owner = spec.scope(sinks, incarnation), spec.sender.owner
    key = (scope, owner.id, replace(spec, start=None, batch=None).to_option())
    if key in _runners:
        _runners.move_to_end(key)
        return _runners[key]
    opened = Context.open(sinks, scope, spec.guarantee, located(owner), spec.tolerance, spec.transform)
    register = None
    if spec.guarantee is Guarantee.AT_MOST_ONCE:
        from delivered.engine.arbiter import registered  # no other guarantee needs it

        register = partial(registered, scope, owner, spec.sender.address)
    _runners[key] = Runner(sinks, opened, register)
    while len(_runners) > _RUNNERS_MAX:
        _, old = _runners.popitem(last=False)
        old.close()
    return _runners[key]


_RUNNERS_MAX = 8
_runners: OrderedDict[tuple[Scope, str, str], Runner] = OrderedDict()
