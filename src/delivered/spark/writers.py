"""Where Spark's calls meet the engine: sinks as writers, for streams and df.write; tasks of `foreachBatch` and dedup;
and the set-up of a process that works for a query: crash points, warnings, the running task and its batch."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from delivered.engine import Sinks
from delivered.engine.shard import may_send, write_shard
from delivered.engine.transform import MESSAGE, decode, pack_message
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.patience import in_query
from delivered.model.rows import Rows
from delivered.model.step import show_warnings, work_for
from delivered.model.work import BatchPlan, ShardMessage, Tolerance
from delivered.spark.internals import BATCH_ID, QUERY_ID, ArrowWriter, StreamArrowWriter, WriterCommitMessage

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.model.identity import Scope
    from delivered.pipeline.batches import Batches
    from delivered.pipeline.spec import PipelineSpec


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
                self._recover()
            except DeliveredError as error:
                # PySpark wraps any other type in "Could not serialize object".
                raise pickle.PicklingError(str(error)) from None
        return {**self.__dict__, **dict.fromkeys(self._stays)}

    def _on_driver(self) -> Batches:
        """Sets the process up for a call of the driver."""
        from delivered.pipeline.batches import Batches  # not in a task

        arm(self._spec.pipeline)
        return Batches(self._spec, self._sinks, self._schema)

    def _recover(self) -> None:
        batches = self._on_driver()
        view = batches.view()
        if view.batch:
            in_query()
        plan = batches.plan(view)
        self._sinks, self._plan = batches.sinks_for(plan), plan

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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        check_running(self._planned())
        return self._write(self._rows(iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        in_query()
        self._on_driver().commit(batchId, messages_of(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        self._on_driver().abort(messages_of(messages))


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
        yield pa.record_batch([pa.array([pack_message(message)], pa.binary())], names=[MESSAGE])


@dataclass(frozen=True)
class DedupTask:
    """Drops duplicates in a task, by a key table. Picklable; holds no connection."""

    sink: Sink
    scope: Scope
    within_us: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from delivered.engine.keys import drop_seen  # other tasks do not load it

        arm(self.scope.pipeline)
        query, batch = running_batch(running_task())
        if batch is None or query is None:
            raise InvariantBroken("NO_TASK.DEDUP")
        with closing(self.sink.key_memory(replace(self.scope, incarnation=query))) as memory:
            yield from drop_seen(memory, int(batch), self.within_us, rows)


class BatchWriter(Recovering, ArrowWriter):
    """A run is the only batch of an incarnation that its run id identifies."""

    def __init__(self, spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> None:
        # Every run is its own incarnation, on purpose.
        super().__init__(replace(spec, run_id=spec.run, tolerance=Tolerance(new_checkpoint=True)), sinks, schema)

    def _on_driver(self) -> Batches:
        from delivered.pipeline.batches import Run  # not in a task

        arm(self._spec.pipeline)
        return Run(self._spec, self._sinks, self._schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(map(decode, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._on_driver().commit(0, messages_of(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._on_driver().abort(messages_of(messages))


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


def messages_of(messages: Sequence[WriterCommitMessage | None]) -> list[ShardMessage | None]:
    return [m.message if isinstance(m, ShardCommit) else None for m in messages]


# Set-up of a process.

_armed = False
_modules_frozen = 0
"""How many modules were imported when the collector was last exempted from them."""


def arm(pipeline: str | None = None) -> None:
    """Install the handler of `delivered.crash` if the environment names a crash point. Cheap otherwise.

    Args:
        pipeline: that this process works for now.
    """
    task = TaskContext.get()
    if task is None:
        work_for(pipeline)
    else:
        batch = running_batch(task)[1]
        work_for(pipeline, batch=int(batch) if batch is not None else None, shard=task.partitionId())
    _spare_the_collector()
    arm_driver()


def arm_driver() -> None:
    """The part of `arm` for the user's own process, whose memory and whose current work are the user's."""
    global _armed
    show_warnings()
    if _armed or not os.environ.get("DELIVERED_CRASH"):
        return
    from delivered.crash import install_from_environment  # loaded only if needed

    install_from_environment()
    _armed = True


def running_task() -> TaskContext:
    """Raises InvariantBroken: no task runs here."""
    task = TaskContext.get()
    if task is None:
        raise InvariantBroken("NO_TASK.ROWS")
    return task


def running_batch(task: TaskContext) -> tuple[str | None, str | None]:
    """Query and batch of a task; None outside a stream."""
    return task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)


def _spare_the_collector() -> None:
    """Exempt what is imported from garbage collection: PySpark's daemon runs a full collection after every task.

    Again whenever modules were imported since: the first task imports as much as all that Spark itself needs. Not by
    gc.get_freeze_count, which walks all that is frozen.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()
