"""Batches of a query that are written by `foreachBatch`: for output modes that Spark does not offer to Python sinks,
and for a user's own `foreachBatch`. They need no Python data source, and no second process on the driver.

    driver    Runner.plan                                       recover, then what each task does
    tasks     df.mapInArrow(ForeachTask).collect()              one message for each shard, of one attempt
    driver    Runner.commit                                     check the messages, decide, apply

The driver is the process in which the function of `foreachBatch` runs: the user's own; over Spark Connect, a worker of
the server.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from delivered.checkpoint import recall, remember
from delivered.engine.shard import may_send, write_shard
from delivered.engine.transform import MESSAGE, unpack_message, without_rejected
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.identity import checked_name
from delivered.model.patience import serving_query
from delivered.model.step import Moment, StepId, batch_of, reach
from delivered.model.translate import of_own_call, translated
from delivered.model.work import Action, ShardMessage, Tolerance
from delivered.pipeline.batches import Batches
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import check_start
from delivered.pipeline.spec import PipelineSpec, SinkSpec
from delivered.spark.check import checkpoint_store, sender_of
from delivered.spark.internals import is_connect, query_checkpoint, to_arrow
from delivered.spark.settings import unadapted
from delivered.spark.writers import ForeachTask, arm_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write_batch(
    df: DataFrame,
    batch_id: int,
    *,
    sink: Endpoint,
    guarantee: str | Guarantee,
    pipeline: str,
    checkpoint: str | Path | None = None,
    new_checkpoint: bool = False,
    missing_ledger: bool = False,
    repeated_batch: bool = False,
    new_target: bool = False,
    lost_records: bool = False,
) -> None:
    """Write one batch from your own `foreachBatch`, so that it counts once however often Spark runs it.

    Call it for every batch, even an empty one, once for each sink. A batch that reruns after its decision writes
    nothing: its rows are read and compared with the decided ones. Two sinks written this way are two decisions; after a
    crash between them, one is behind until the batch has run again.

    Args:
        df: the batch, or a frame derived from it, with the same rows each time that the batch runs.
        batch_id: as passed to `foreachBatch`.
        sink: from `delivered.kafka`, `delivered.sqlite`, `delivered.endpoint`. Mode upsert writes an update; mode
            complete replaces the table.
        pipeline: names the ledger, with the sink's name.
        checkpoint: the query's; None: that of the query on this thread, in a classic session.
        new_checkpoint: start over although an earlier checkpoint wrote to this sink.
        missing_ledger: continue although the ledger lacks batches of this checkpoint: they were written by other means,
            or not passed.
        repeated_batch: exactly_once may repeat a batch that a weaker guarantee began.
        new_target: continue although the sink's topic or table was dropped and recreated.
        lost_records: give up records of a decided batch that neither the sink nor the source still has.

    Raises:
        UsageError, Refused: the write is not possible as requested.
        ReplayDiffers: the batch was decided with other rows, or was written to this sink already.
    """
    if not hasattr(df, "sparkSession"):
        raise UsageError("SPARK_VALUE.FRAME", value=df, value_type=type(df).__name__)
    if not isinstance(sink, Endpoint) or not sink.projection.is_all:
        raise UsageError("ENDPOINT_VALUE.WRITE_BATCH", sink=sink, sink_type=type(sink).__name__)
    spec = PipelineSpec(
        pipeline=checked_name("pipeline", pipeline),
        guarantee=Guarantee.parse(guarantee),
        sinks=(SinkSpec(sink.system, sink.connector_options, sink.name),),
        checkpoint=str(checkpoint) if checkpoint is not None else _checkpoint(df),
        tolerance=Tolerance(new_checkpoint, missing_ledger, repeated_batch, new_target, lost_records),
        batch=batch_id,
    )
    option = replace(spec, batch=None).to_option()
    try:
        if option not in _checked:
            checkpoint_store(df.sparkSession, str(spec.checkpoint))
            check_start(spec, spec.open())
            _checked.add(option)
        save_batch(replace(spec, store=recall(str(spec.checkpoint))), df, batch_id)
    except DeliveredError as error:
        raise of_own_call(error) from None


def save_batch(spec: PipelineSpec, df: DataFrame, batch_id: int) -> None:
    """Write one batch of a pipeline."""
    arm_driver()
    remember(spec.checkpoint, spec.store)
    try:
        with batch_of(spec.pipeline):
            _save(replace(spec, batch=batch_id, sender=spec.sender or sender_of(df.sparkSession)), df, batch_id)
    except Exception as error:
        ours = translated(error)
        raise (ours if ours is not None else error) from None


def _save(spec: PipelineSpec, df: DataFrame, batch: int) -> None:
    schema = without_rejected(to_arrow(df.schema))
    batches = Batches(spec, spec.checked(schema), schema)
    with ExitStack() as held:
        view = batches.view()
        if view.batch:
            held.enter_context(serving_query())
        plan = batches.plan(view)
        if plan.batch != batch:
            raise InvariantBroken(
                "BATCH_DIFFERS.FOREACH_BATCH", batch=batch, checkpoint=spec.checkpoint, planned=plan.batch
            )
        held.enter_context(serving_query())
        if plan.action is Action.SKIP and not plan.rewrite:
            reach(StepId.LOG, Moment.BEFORE, batch=batch)
            return
        sinks = batches.sinks_for(plan)
        task = ForeachTask(sinks, plan, schema, spec.one_of_each)
        try:
            with unadapted(df.sparkSession):
                returned, tasks = _returned(df.mapInArrow(task, f"{MESSAGE} binary"))
        except Exception:
            batches.runner(view.incarnation).abort_unreported(plan)
            raise
        messages: list[ShardMessage | None] = [unpack_message(data, plan) for data in returned]
        messages += [None] * (tasks - len(messages))
        try:
            if not messages:  # no partitions: one shard, as in Spark's own writes, so that a rerun is compared
                messages = [write_shard(sinks, plan, 0, 0, iter(()), schema, partial(may_send, plan, 0))]
            batches.commit(batch, messages)
        except Exception:
            batches.abort(messages)
            raise


def _returned(frame: DataFrame) -> tuple[list[bytes], int]:
    """What the tasks returned, one value each, and how many tasks there were.

    PySpark reads rows from the JVM to the end of a socket: if the JVM dies meanwhile, the last ones are missing,
    perhaps all, without an error. Spark Connect counts them itself.
    """
    returned = [bytes(row[0]) for row in frame.collect()]
    return returned, len(returned) if is_connect(frame.sparkSession) else frame.rdd.getNumPartitions()


_checked: set[str] = set()
"""Checks already done in this process."""


def _checkpoint(df: DataFrame) -> str:
    """Checkpoint of the query that runs on this thread."""
    checkpoint = query_checkpoint(df)
    if checkpoint is not None:
        return checkpoint
    raise UsageError("CHECKPOINT_MISSING.FOREACH_BATCH")
