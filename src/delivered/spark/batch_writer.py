"""Any sink of ours as a Spark batch writer: one run is one batch of an incarnation named by its run id."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from delivered.contract.powers import ready_target
from delivered.contract.sink import Sink
from delivered.model.errors import DeliveredError, InvariantBroken, Refused
from delivered.model.guarantee import Guarantee
from delivered.model.work import BatchPlan, CheckpointView
from delivered.spark.crash import arm
from delivered.spark.driver import Driver
from delivered.spark.settings import PipelineSettings
from delivered.spark.stream_writer import ShardCommit, write_task

if TYPE_CHECKING:
    import pyarrow as pa

    from delivered.engine.context import Context


def run_id(settings: PipelineSettings) -> str:
    """The run's identity; made up where a repetition is within the guarantee.

    Raises:
        Refused: exactly_once or at_most_once without a run id: a job that is started again could not be known again.
    """
    if settings.run_id is not None:
        return settings.run_id
    if settings.guarantee is Guarantee.AT_LEAST_ONCE:
        return uuid.uuid4().hex
    raise Refused(
        "RUN_UNNAMED",
        f"df.write under {settings.guarantee.value} needs a run id: without it a job that is started again after a "
        "crash cannot be told from a new one.",
        next_step='add .option("runId", "orders-2024-05-01"), or name the guarantee at_least_once; in SQL '
        "INSERT INTO t WITH ('runId' = '...')",
    )


class BatchWriter(DataSourceArrowWriter):
    """Pickled where Spark plans the job, which is where recovery runs, and carried on to tasks and to the commit."""

    def __init__(
        self, sink: Sink, options: Mapping[str, str], settings: PipelineSettings, driver: Driver, schema: pa.Schema
    ) -> None:
        self._sink = sink
        self._options = dict(options)
        self._settings = settings
        self._driver = driver
        self._schema = schema
        self._run = run_id(settings)
        self._plan: BatchPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._plan is None:
            try:
                self._plan = self._recover()
            except DeliveredError as error:
                raise pickle.PicklingError(str(error)) from None
        return self.__dict__

    def _recover(self) -> BatchPlan:
        from delivered.engine.recover import plan_batch

        arm()
        ready_target(self._sink, self._schema)
        return plan_batch(self._context(), CheckpointView(self._run, 0, f"run {self._run}", None, run=True), first=True)

    def _context(self) -> Context:
        from dataclasses import replace

        from delivered.model.work import Tolerance
        from delivered.spark import engine

        # Every run is an incarnation of its own, on purpose.
        settings = replace(self._settings, tolerance=Tolerance(new_checkpoint=True))
        return engine.context(self._sink, self._options, settings, self._run, self._driver)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self._plan is None:
            raise InvariantBroken("NO_PLAN", "A task got a writer without a plan.")
        return write_task(self._sink, self._plan, iterator, self._schema)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from delivered.engine.decide import commit_batch

        arm()
        said = [m.message if isinstance(m, ShardCommit) else None for m in messages]
        commit_batch(self._context(), 0, f"run {self._run}", said, run=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        from delivered.engine.decide import abort_batch

        abort_batch(self._context(), [m.message for m in messages if isinstance(m, ShardCommit)])
