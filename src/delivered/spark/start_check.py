"""Whether a query can be started, asked before it starts: options, columns, guarantee, server, checkpoint, ledger.

Runs where the batches will be planned, on the driver, inside `schema()` of the sink's own format: the one piece of a
Python data source that Spark runs at once, in a classic session and over Spark Connect. It takes nothing and writes no
row; what can change until the first batch is judged again there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from delivered.contract.sink import Sink, SinkGroup
from delivered.engine.context import open_ledger
from delivered.engine.recover import other_ledgers
from delivered.engine.rules import judge
from delivered.model.capability import SourceCapability
from delivered.model.errors import UsageError
from delivered.model.identity import Scope
from delivered.model.work import CheckpointView
from delivered.pipeline.endpoint import Endpoint
from delivered.planner import CheckpointFacts, Refusal, Request, SinkFacts, SourceFacts, make_plan
from delivered.spark.checkpoint import read_view
from delivered.spark.facts import logged
from delivered.spark.settings import PipelineSettings

if TYPE_CHECKING:
    import pyarrow as pa

OPTION = "delivered.check"
"""Set by hooks.py: the query's columns and output mode."""

_NONE_YET = "none-yet"


def pack(columns: str, output_mode: str) -> str:
    """For the option `OPTION`.

    Args:
        columns: a StructType as JSON.
    """
    return json.dumps({"columns": json.loads(columns), "output_mode": output_mode.lower()})


Opened = tuple[Sink | SinkGroup, dict[str, str], PipelineSettings]
"""A sink, its own options, and those of its pipeline."""


def check_start(
    system: str, options: Mapping[str, str], opened: Callable[[Mapping[str, str], pa.Schema, bool], Opened]
) -> None:
    """
    Args:
        options: of the write, and `OPTION`.
        opened: opens the sink as every batch does, by options, columns and whether to overwrite.

    Raises:
        UsageError, Refused: the request cannot be had.
        InvariantBroken: ledger and checkpoint do not belong together.
        Unreachable: a server or the checkpoint gave no answer.
    """
    asked = json.loads(options[OPTION])
    given = {k: v for k, v in options.items() if k.lower() != OPTION}
    sink, rest, settings = opened(given, _rows(asked["columns"]), asked["output_mode"] == "complete")
    if isinstance(sink, SinkGroup):
        return  # `Pipeline` plans what has several sinks
    if settings.checkpoint is None:
        raise UsageError(
            "CHECKPOINT_MISSING",
            "The query names no checkpointLocation; the session's default is not told to a sink.",
            next_step='add .option("checkpointLocation", "/data/checkpoints/orders")',
        )
    _refused_by_plan(system, sink, rest, settings)
    _refused_by_ledger(sink, settings, settings.checkpoint)


def _rows(columns: object) -> pa.Schema:
    return to_arrow_schema(StructType.fromJson(columns), timezone="UTC")  # type: ignore[arg-type]


def _refused_by_plan(system: str, sink: Sink, options: Mapping[str, str], settings: PipelineSettings) -> None:
    """By the planner's rules, as far as a sink alone decides them: it knows neither source nor transform."""
    endpoint = Endpoint(system, options)
    name = settings.sink or sink.name
    facts = SinkFacts(name, endpoint.label, sink.capability(), tuple(sink.preflight(settings.guarantee)))
    source = SourceFacts("the query's source", SourceCapability("spark", replayable=True))
    checkpoint = CheckpointFacts(settings.checkpoint or "")
    plan = make_plan(Request(settings.pipeline, settings.guarantee, source, (facts,), checkpoint))
    if isinstance(plan, Refusal):
        raise plan.error


def _refused_by_ledger(sink: Sink, settings: PipelineSettings, checkpoint: str) -> None:
    view = _next_batch(checkpoint)
    scope = Scope(settings.pipeline, settings.sink or sink.name, view.incarnation)
    ledger = open_ledger(sink, scope)
    try:
        state = ledger.look()
        others = other_ledgers(ledger, view, state)
    finally:
        ledger.close()
    newest = max((r.batch for r in (state.last, state.begun) if r is not None), default=None)
    if newest == view.batch and not view.offsets:
        return  # which offsets Spark will log for it is known in the batch
    judge(state, view, scope, settings.guarantee, settings.tolerance, others)


def _next_batch(checkpoint: str) -> CheckpointView:
    """The batch that Spark will run first: the newest logged one, unless it is committed. Offsets: empty if unknown."""
    incarnation, newest = logged(checkpoint)
    if incarnation is None or newest is None:
        return CheckpointView(incarnation or _NONE_YET, 0, "", None)
    view = read_view(checkpoint)
    if view.logged != view.batch:
        return view
    return CheckpointView(view.incarnation, view.batch + 1, "", view.logged)
