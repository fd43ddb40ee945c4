"""Delivered sinks as Spark writers, for streams and df.write, and tasks of `foreachBatch`: where Spark's calls meet the
engine."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

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
from delivered.spark.compat import ArrowWriter, StreamArrowWriter, WriterCommitMessage
from delivered.spark.internals import running_batch
from delivered.spark.task import arm, running_task

if TYPE_CHECKING:
    from delivered.engine.runner import Runner
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
            try:
                plan = self._recover()
                if any(m.sink.schema_columns for m in self._sinks.members):
                    from delivered.pipeline.spec import with_schemas

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
        return ShardCommit(_write_shard(self._sinks, self._planned(), batches, self._schema))


class StreamWriter(Recovering, StreamArrowWriter):
    """One object per batch. Spark creates it twice: where it plans the batch, and where it commits."""

    _stays = ("_spec",)

    def __init__(
        self,
        spec: PipelineSpec,
        sinks: Sinks,
        schema: pa.Schema,
        rows: Callable[[Iterator[pa.RecordBatch]], Iterator[Rows]],
    ) -> None:
        """Args: rows: those of what Spark hands to a task. Picklable."""
        super().__init__(spec, sinks, schema)
        self._rows = rows

    def _recover(self) -> BatchPlan:
        arm(self._spec.pipeline)
        view = read_view_of(self._spec)
        if view.batch:
            in_query()
        return plan_next(self._spec, find_runner(self._spec, self._sinks, view.incarnation), view, self._schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        check_running(self._planned())
        return self._write(self._rows(iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        arm(self._spec.pipeline)
        in_query()
        shards = messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            incarnation, offsets = plan.scope.incarnation, plan.offsets
        else:
            view = read_view_of(self._spec)
            incarnation, offsets = view.incarnation, view.offsets
        commit_next(
            self._spec, find_runner(self._spec, self._sinks, incarnation), self._schema, batchId, offsets, shards
        )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        shards = messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            find_runner(self._spec, self._sinks, plan.scope.incarnation).abort(shards)


@dataclass(frozen=True)
class ForeachTask:
    """What `mapInArrow` runs in each task of a `foreachBatch`: the shard's rows in, its message out.

    Attributes:
        schema: of the rows.
        one_of_each: a key of an upsert without version occurs once in a batch.
    """

    sinks: Sinks
    plan: BatchPlan
    schema: pa.Schema
    one_of_each: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_running(self.plan, outside=True)
        rows: Iterator[Rows] = map(decode, batches)
        if self.one_of_each:
            from delivered.engine.keys import check_keys_unique  # other tasks do not load it

            rows = check_keys_unique(self.sinks, rows)
        message = _write_shard(self.sinks, self.plan, rows, self.schema)
        yield pa.record_batch([pa.array([packed(message)], pa.binary())], names=[MESSAGE])


class BatchWriter(Recovering, ArrowWriter):
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


def _write_shard(sinks: Sinks, plan: BatchPlan, batches: Iterator[Rows], schema: pa.Schema) -> ShardMessage:
    arm(plan.scope.pipeline)
    in_query()
    task = running_task()
    shard, attempt = task.partitionId(), task.attemptNumber()
    message = write_shard(sinks, plan, shard, attempt, batches, schema, partial(may_send, plan, shard))
    return replace(message, task=task.taskAttemptId())


def check_running(plan: BatchPlan, *, outside: bool = False) -> None:
    """Check that the running task is one of the planned batch.

    Args:
        outside: it may run on a user's thread, for which Spark knows no query.
    """
    running, planned = running_batch(running_task()), (plan.scope.incarnation, str(plan.batch))
    if running != planned and not (outside and running == (None, None)):
        raise InvariantBroken("BATCH_DIFFERS.TASK", running=running, planned=planned)


MESSAGE = "message"
"""Column of a task's message to the driver."""


def packed(message: ShardMessage) -> bytes:
    """A message without its plan, which the driver has: offsets of thousands of partitions are in it."""
    plan = message.plan
    return pickle.dumps((plan.owner, plan.batch, plan.epoch, replace(message, plan=None)))  # type: ignore[arg-type]


def unpacked(data: bytes, plan: BatchPlan) -> ShardMessage:
    """The message of a task of this plan.

    Raises:
        InvariantBroken: it is of another one.
    """
    *running, message = pickle.loads(data)  # noqa: S301 - Spark carried it from our own task
    if running != (planned := [plan.owner, plan.batch, plan.epoch]):
        raise InvariantBroken("BATCH_DIFFERS.TASK", running=running, planned=planned)
    returned: ShardMessage = message
    return replace(returned, plan=plan)


def read_view_of(spec: PipelineSpec) -> CheckpointView:
    from delivered.checkpoint.folder import read_view  # not in a task

    return read_view(checkpoint_of(spec))


def plan_next(spec: PipelineSpec, own: Runner, view: CheckpointView, schema: pa.Schema) -> BatchPlan:
    """Recover a stream, and plan its next batch according to the checkpoint."""
    from delivered.checkpoint.folder import holds_state, repartitions_before

    checkpoint = checkpoint_of(spec)
    first = own.is_first(view, spec.start or "")
    if first:
        view = replace(view, repartitions=repartitions_before(checkpoint, view.batch))
    # In a foreachBatch of their own, users decide what is written, perhaps twice to one sink: always compared.
    own_call = spec.batch is not None and spec.start is None
    keeps_state = (lambda: True) if own_call else partial(holds_state, checkpoint)
    plan = own.plan(view, schema, start=spec.start or "", keeps_state=keeps_state)
    if spec.on_bad_row is not OnBadRow.FAIL and (first or spec.rejects):
        from delivered.checkpoint.sidecar import forget_task_files

        forget_task_files(checkpoint, view.batch, decided=plan.is_decided)
    return plan


def commit_next(
    spec: PipelineSpec,
    own: Runner,
    schema: pa.Schema,
    batch: int,
    offsets: str,
    messages: Sequence[ShardMessage | None],
) -> None:
    """Decide the planned batch of a stream, and make it visible. See `Runner.commit`."""
    from delivered.checkpoint.history import add  # not in a task

    report = partial(add, checkpoint_of(spec))
    own.commit(batch, offsets, messages, report=report, rejected=partial(rejected_rows, spec, schema))
    reach(StepId.LOG, Moment.BEFORE, batch=batch)


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
    from delivered.engine.owner import locate
    from delivered.engine.runner import Runner

    if spec.sender is None:
        raise InvariantBroken("OWNER_UNKNOWN", pipeline=spec.pipeline)
    scope, owner = Scope(spec.pipeline, sinks.decider.name, incarnation), spec.sender.owner
    key = (scope, owner.id, spec.key)
    with _lock:
        if key in _runners:
            _runners.move_to_end(key)
            return _runners[key]
    opened = Context.open(sinks, scope, spec.guarantee, locate(owner), spec.tolerance, spec.transform)
    register = None
    if spec.guarantee is Guarantee.AT_MOST_ONCE:
        from delivered.engine.arbiter import register_plan  # no other guarantee needs it

        register = partial(register_plan, scope, owner, spec.sender.address)
    runner = Runner(sinks, opened, register)
    # Closed when nobody uses it: in the user's process, other threads write batches of other queries.
    weakref.finalize(runner, opened.close).atexit = False
    with _lock:
        runner = _runners.setdefault(key, runner)
        while len(_runners) > _RUNNERS_MAX:
            _runners.popitem(last=False)
    return runner


_RUNNERS_MAX = 8
_lock = threading.Lock()
_runners: OrderedDict[tuple[Scope, str, str], Runner] = OrderedDict()
