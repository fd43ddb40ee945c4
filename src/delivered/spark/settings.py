"""The options of a sink that belong to the pipeline, not to a connector."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import checked_name
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import Option, OptionTable, choice
from delivered.model.work import Tolerance

PIPELINE_OPTIONS = OptionTable(
    "delivered",
    (
        Option("guarantee", "at_most_once, at_least_once or exactly_once.", required=True),
        Option("pipeline", "Name of the pipeline; two pipelines that share a sink need two names.", "the query's name"),
        Option("sink", "Name of this sink in its pipeline.", "made from its target"),
        Option("newCheckpoint", "accept: start over although an earlier checkpoint wrote to this sink.", "refuse"),
        Option("missingLedger", "accept: go on although the ledger lacks batches of this checkpoint.", "refuse"),
        Option("repeatedBatch", "accept: exactly_once may repeat a batch that a weaker guarantee began.", "refuse"),
        Option("newTarget", "accept: go on although the sink's topic or table was dropped and made anew.", "refuse"),
        Option(
            "runId",
            "df.write only: names these rows. Given again, they are written once, and other rows are refused.",
        ),
        Option("checkpointLocation", "Spark's: where the query keeps its checkpoint."),
        Option("queryName", "Spark's: the query's name."),
    ),
)

TRANSFORM_OPTION = "delivered.transform"
"""What `Pipeline` tells the sink of its transform."""
START_OPTION = "delivered.start"
"""Another value at each start of a query: the processes that plan and commit its batches outlive it."""

_ASYNC_PROGRESS = "asyncprogresstrackingenabled"


@dataclass(frozen=True)
class PipelineSettings:
    """
    Attributes:
        sink: None: the connector's default name.
        checkpoint: as Spark passes it; None for a write that is not a stream.
        transform: fingerprint of the pipeline's transform; empty: nobody told it.
        start: tells one start of the query from the next in a session; empty: nobody told it.
    """

    guarantee: Guarantee
    pipeline: str
    sink: str | None
    checkpoint: str | None
    run_id: str | None
    tolerance: Tolerance
    transform: str = ""
    start: str = ""


def split_options(options: Mapping[str, str]) -> tuple[PipelineSettings, dict[str, str]]:
    """Take the pipeline's options out; return them, and the connector's rest.

    Raises:
        UsageError: no guarantee, or a value that is not allowed.
        Refused: asynchronous progress tracking, under which the offsets of a batch run again may differ.
    """
    known = {o.name.lower() for o in PIPELINE_OPTIONS.options}
    ours = {k: v for k, v in options.items() if k.lower() in known}
    rest = {k: v for k, v in options.items() if k.lower() not in {*known, TRANSFORM_OPTION, START_OPTION}}
    guarantee = Guarantee.parse(next((v for k, v in ours.items() if k.lower() == "guarantee"), None))
    values = PIPELINE_OPTIONS.restore(ours)
    for key in [k for k in rest if k.lower().startswith("asyncprogress")]:
        value = rest.pop(key)
        if key.lower() == _ASYNC_PROGRESS and value.lower() == "true" and guarantee is not Guarantee.AT_LEAST_ONCE:
            raise Refused(
                "ASYNC_PROGRESS",
                f"Asynchronous progress tracking logs offsets after the batch; a batch that runs again may read other "
                f"records, and {guarantee.value} cannot hold.",
                next_step="take asyncProgressTrackingEnabled out, or name the guarantee at_least_once",
            )
    tolerance = Tolerance(
        new_checkpoint=_accepts(values, "newCheckpoint"),
        missing_ledger=_accepts(values, "missingLedger"),
        repeated_batch=_accepts(values, "repeatedBatch"),
        new_target=_accepts(values, "newTarget"),
    )
    sink = values.get("sink")
    return (
        PipelineSettings(
            guarantee=guarantee,
            pipeline=_pipeline_name(values),
            sink=checked_name("sink", sink) if sink is not None else None,
            checkpoint=values.get("checkpointLocation"),
            run_id=values.get("runId"),
            tolerance=tolerance,
            transform=next((v for k, v in options.items() if k.lower() == TRANSFORM_OPTION), ""),
            start=next((v for k, v in options.items() if k.lower() == START_OPTION), ""),
        ),
        rest,
    )


def _accepts(values: Mapping[str, str], name: str) -> bool:
    return choice(("refuse", "accept")).parse("delivered", name, values.get(name, "refuse")) == "accept"


def _pipeline_name(values: Mapping[str, str]) -> str:
    if "pipeline" in values:
        return checked_name("pipeline", values["pipeline"])
    if "queryName" in values:
        return re.sub(r"[^A-Za-z0-9._-]", "-", values["queryName"])[:NAME_LENGTH_MAX]
    if "checkpointLocation" in values:
        location = values["checkpointLocation"].rstrip("/")
        return "checkpoint-" + hashlib.blake2b(location.encode(), digest_size=6).hexdigest()
    if "runId" in values:
        return "batch"
    raise UsageError(
        "PIPELINE_UNNAMED",
        "The pipeline has no name: the ledger needs one to know its batches again.",
        next_step='add .option("pipeline", "orders")',
    )
