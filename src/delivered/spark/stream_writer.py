"""Any sink of ours as a Spark streaming writer."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from delivered.contract.powers import ready_target
from delivered.contract.sink import Sink, SinkGroup
from delivered.engine.direct import Direct
from delivered.engine.shard import write_shard
from delivered.model.errors import DeliveredError, InvariantBroken, Unreachable
from delivered.model.patience import in_query
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, CheckpointView, ShardMessage
from delivered.spark.crash import arm
from delivered.spark.driver import Driver
from delivered.spark.settings import PipelineSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from delivered.engine.context import Context

log = logging.getLogger(__name__)


@dataclass
class ShardCommit(WriterCommitMessage):
    """Carries a shard's message to the driver."""

    message: ShardMessage


def write_task(
    sink: Sink | SinkGroup,
    plan: BatchPlan,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    direct: Direct | None = None,
) -> WriterCommitMessage:
    """One task of a batch, streamed or not. With `direct`, `batches` name slices that the task reads itself."""
    arm()
    in_query()
    if direct is not None:
        batches = direct.rows(batches)
    task = TaskContext.get()
    if task is None:
        raise InvariantBroken("NO_TASK", "A shard is written outside a Spark task.")
    return ShardCommit(write_shard(sink, plan, task.partitionId(), task.attemptNumber(), batches, schema))


class StreamWriter(DataSourceStreamArrowWriter):
    """One object per batch. Spark makes it twice: where it plans the batch, and anew where it commits.

    Only in the planning process is it pickled, for the tasks: that is where recovery runs.
    """

    def __init__(
        self,
        sink: Sink | SinkGroup,
        options: Mapping[str, str],
        settings: PipelineSettings,
        driver: Driver,
        schema: pa.Schema,
        direct: Direct | None = None,
    ) -> None:
        self._sink = sink
        self._direct = direct
        self._options = dict(options)
        self._settings = settings
        self._driver = driver
        self._schema = schema
        self._plan: BatchPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._plan is None:
            try:
                self._plan = self._recover()
            except DeliveredError as error:
                # Any other type would reach the user wrapped in "Could not serialize object".
                raise pickle.PicklingError(str(error)) from None
        return {**self.__dict__, "_options": {}}

    def _recover(self) -> BatchPlan:
        from delivered.engine.recover import plan_batch
        from delivered.spark import engine
        from delivered.spark.checkpoint import read_view

        arm()
        view = read_view(self._checkpoint)
        if view.batch:
            in_query()
        self._keep_source_facts(view)
        context = self._context(view.incarnation)
        first = engine.is_first(context.scope, self._driver, view, self._settings.start)
        if not first:
            reach(StepId.LOG, Moment.AFTER, batch=view.batch - 1)
        else:
            ready_target(self._sink, self._schema)
        since = engine.epoch(context.scope, self._driver)
        engine.forget(context.scope, self._driver)
        plan = plan_batch(context, view, first=first, since=since)
        engine.remember(context.scope, self._driver, view.batch, plan.epoch, self._settings.start)
        return plan

    def _keep_source_facts(self, view: CheckpointView) -> None:
        """Keep what the source cannot; a checkpoint that takes no file of ours is no reason to stop."""
        from delivered.spark import first_offsets
        from delivered.spark.handover import told
        from delivered.spark.offset_metadata import keep_for_source

        facts = told(self._driver.id, view.offsets)
        try:
            if facts.start is not None and view.batch == 0:
                first_offsets.note(self._checkpoint, facts.start)
                if facts.bare:
                    first_offsets.check(self._checkpoint, facts.start, json.loads(view.offsets), facts.lasting)
            if facts.metadata:
                keep_for_source(self._checkpoint, view.offsets, facts)
        except Unreachable as error:
            log.warning("what the source knows of its offsets is not kept, and no audit will know it: %s", error)

    @property
    def _checkpoint(self) -> str:
        location = self._settings.checkpoint
        if location is None:
            raise InvariantBroken("CHECKPOINT_UNKNOWN", "Spark passed no checkpointLocation to the sink.")
        return location

    def _context(self, incarnation: str) -> Context:
        from delivered.spark import engine

        return engine.context(self._sink, self._options, self._settings, incarnation, self._driver)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        plan = self._plan
        task = TaskContext.get()
        if plan is None or task is None:
            raise InvariantBroken("NO_PLAN", "A task got a writer without a plan.")
        running = (task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId"))
        planned = (plan.scope.incarnation, str(plan.batch))
        if running != planned:
            raise InvariantBroken(
                "BATCH_DIFFERS",
                f"The task runs (query, batch) {running}, and the plan is for {planned}: the checkpoint changed "
                "while the batch was planned. Nothing was written.",
                next_step="check that no other driver uses this checkpoint, then start again",
            )
        return write_task(self._sink, plan, iterator, self._schema, self._direct)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from delivered.engine.decide import commit_batch
        from delivered.spark.checkpoint import read_view

        arm()
        in_query()
        said = [m.message if isinstance(m, ShardCommit) else None for m in messages]
        plan = next((m.plan for m in said if m is not None), None)
        if plan is not None:
            incarnation, offsets = plan.scope.incarnation, plan.offsets
        else:
            view = read_view(self._checkpoint)
            incarnation, offsets = view.incarnation, view.offsets
        commit_batch(self._context(incarnation), batchId, offsets, said)
        reach(StepId.LOG, Moment.BEFORE, batch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        from delivered.engine.decide import abort_batch

        said = [m.message for m in messages if isinstance(m, ShardCommit)]
        if said:
            abort_batch(self._context(said[0].plan.scope.incarnation), said)
