"""Delivered sinks as Spark writers, for streams and df.write. Recovery of their batch: recovery.py."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from delivered.engine.in_band import decode
from delivered.engine.sinks import Sinks
from delivered.model.errors import InvariantBroken, Refused
from delivered.model.guarantee import Guarantee
from delivered.model.patience import in_query
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, Tolerance
from delivered.spark import recovery
from delivered.spark.recovery import Recovering
from delivered.spark.task import arm, running_batch, running_task

if TYPE_CHECKING:
    import pyarrow as pa

    from delivered.engine.transform import Direct
    from delivered.pipeline.spec import PipelineSpec


class BatchOfQuery(Recovering):
    """A batch of a streaming query: of its sink, or of its `foreachBatch`."""

    def _recover(self) -> BatchPlan:
        plan = recovery.plan_next(self._spec, self._sinks, self._schema)
        self._sinks = recovery.with_schemas(self._spec, self._sinks, self._schema, plan)
        return plan

    def _check_running(self, *, outside: bool) -> None:
        """Args: outside: the task may run on a user's thread, for which Spark knows no query."""
        plan, running = self._planned(), running_batch(running_task())
        planned = (plan.scope.incarnation, str(plan.batch))
        if running != planned and not (outside and running == (None, None)):
            raise InvariantBroken(
                "BATCH_DIFFERS",
                f"The task runs (query, batch) {running}, but the plan is for {planned}: the checkpoint changed "
                "while the batch was planned. Nothing was written.",
                next_step="check that no other driver uses this checkpoint, then restart",
            )

    def _commit(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        from delivered.checkpoint.folder import read_view  # not in a task

        arm(self._spec.pipeline)
        in_query()
        shards = recovery.messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            incarnation, offsets = plan.scope.incarnation, plan.offsets
        else:
            view = read_view(recovery.checkpoint_of(self._spec))
            incarnation, offsets = view.incarnation, view.offsets
        from delivered.checkpoint.history import add

        runner, checkpoint = recovery.runner(self._spec, self._sinks, incarnation), recovery.checkpoint_of(self._spec)
        rejected = partial(recovery.rejected_rows, self._spec, self._schema)
        runner.commit(batch, offsets, shards, report=partial(add, checkpoint), rejected=rejected)
        reach(StepId.LOG, Moment.BEFORE, batch=batch)

    def _abort(self, messages: list[WriterCommitMessage | None]) -> None:
        shards = recovery.messages_of(messages)
        plan = next((m.plan for m in shards if m is not None), None)
        if plan is not None:
            recovery.runner(self._spec, self._sinks, plan.scope.incarnation).abort(shards)


class StreamWriter(BatchOfQuery, DataSourceStreamArrowWriter):
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
                "BATCH_DIFFERS",
                f"foreachBatch writes batch {self._spec.batch}, and the checkpoint {self._spec.checkpoint!r} is about "
                f"to run batch {plan.batch}. Nothing was written.",
                next_step="pass the batch_id that foreachBatch was called with; check that no other driver uses this "
                "checkpoint",
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
        self._run = run_id(spec)

    def _recover(self) -> BatchPlan:
        plan = recovery.plan_run(self._spec, self._sinks, self._run, self._schema)
        self._sinks = recovery.with_schemas(self._spec, self._sinks, self._schema, plan)
        return plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(map(decode, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        arm(self._spec.pipeline)
        runner = recovery.runner(self._spec, self._sinks, self._run)
        runner.commit(0, f"run {self._run}", recovery.messages_of(messages), run=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        recovery.runner(self._spec, self._sinks, self._run).abort(recovery.messages_of(messages))


def run_id(spec: PipelineSpec) -> str:
    """The run's identity; generated if the guarantee allows duplicates.

    Raises:
        Refused: exactly_once or at_most_once without a run id: a restarted job could not be recognized.
    """
    if spec.run_id is not None:
        return spec.run_id
    if spec.guarantee is Guarantee.AT_LEAST_ONCE:
        return uuid.uuid4().hex
    raise Refused(
        "RUN_UNNAMED",
        f"df.write under {spec.guarantee.value} needs a run id: without one, a job restarted after a crash cannot be "
        "distinguished from a new job.",
        next_step='add .option("runId", "orders-2024-05-01"), or use the guarantee at_least_once; in SQL '
        "INSERT INTO t WITH ('runId' = '...')",
    )
