"""Batches of a query that are written by `foreachBatch`: for output modes that Spark does not offer to Python sinks,
and for a user's own `foreachBatch`. The engine plans and commits them like those of a stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.model.identity import checked_name
from delivered.model.translate import translated
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import check_start
from delivered.pipeline.registry import PREFIX
from delivered.pipeline.spec import OPTION, PipelineSpec, SinkSpec
from delivered.spark.internals import query_checkpoint

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

    Raises:
        UsageError, Refused: the write is not possible as requested.
        ReplayDiffers: the batch was decided with other rows, or was written to this sink already.
    """
    if not isinstance(sink, Endpoint) or not sink.projection.is_all:
        raise UsageError("ENDPOINT_VALUE.WRITE_BATCH", sink=sink, sink_type=type(sink).__name__)
    spec = PipelineSpec(
        pipeline=checked_name("pipeline", pipeline),
        guarantee=Guarantee.parse(guarantee),
        sinks=(SinkSpec(sink.system, sink.connector_options, sink.name),),
        checkpoint=str(checkpoint) if checkpoint is not None else _checkpoint(df),
        batch=batch_id,
    )
    option = replace(spec, batch=None).to_option()
    if option not in _checked:
        check_start(spec, spec.open())
        _checked.add(option)
    save_batch(spec, df, batch_id)


def save_batch(spec: PipelineSpec, df: DataFrame, batch_id: int) -> None:
    """Write one batch of a pipeline."""
    writer = df.write.format(format_of(spec)).mode("append")
    try:
        writer.option(OPTION, replace(spec, batch=batch_id).to_option()).save()
    except Exception as error:
        ours = translated(error)
        raise (ours if ours is not None else error) from None


def format_of(spec: PipelineSpec) -> str:
    """That of any of its sinks: the spec names all of them."""
    return PREFIX + spec.sinks[0].system


_checked: set[str] = set()
"""Checks already done in this process."""


def _checkpoint(df: DataFrame) -> str:
    """Checkpoint of the query that runs on this thread."""
    checkpoint = query_checkpoint(df)
    if checkpoint is not None:
        return checkpoint
    raise UsageError("CHECKPOINT_MISSING.FOREACH_BATCH")
