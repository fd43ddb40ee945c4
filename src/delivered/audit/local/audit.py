"""Audit one sink of one pipeline in this process, if nothing in it is for Spark to do.

no transform, or one over Arrow batches
select without SQL, no where
no dedup, no upserts, no recomputation
id and key: none, or the name of a column; own: none, or 'true'
as many records as fit in `AUDIT_MEMORY_BYTES`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from delivered.audit.account import Progress, account, guarded
from delivered.audit.local.comparison import ALL_OWN, SentRows, in_process
from delivered.audit.local.request import chosen_sink, request_of
from delivered.audit.recheck import Rechecked, recheck
from delivered.audit.report import AuditReport
from delivered.audit.request import NeedsSpark, Sealing
from delivered.audit.seal import Seal
from delivered.engine.shard import validate
from delivered.engine.transform import ArrowTransform
from delivered.model.capability import APPEND
from delivered.model.rows import OnBadRow
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import sink_as_started


def audit_here(
    pipeline: Definition,
    sink: str | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
    recompute: bool = False,
    sealing: Sealing | None = None,
) -> AuditReport:
    """As `audit.spark.audit.audit_sink`, without Spark.

    Raises:
        NeedsSpark: there is something for Spark to do.
        UsageError, Refused: as in Spark.
    """
    chosen = chosen_sink(pipeline, sink)
    if (why := "it recomputes" if recompute else _why_spark(pipeline, chosen)) is not None:
        raise NeedsSpark(why)
    request = request_of(pipeline, chosen, samples_max, sink_from, sealing=sealing)
    say = progress or (lambda _: None)
    say("auditing without Spark")
    comparing = partial(in_process, _sent_rows(pipeline, chosen))
    return guarded(request, lambda: account(request, comparing, say), {"pyarrow": version("pyarrow")})


def recheck_here(
    pipeline: Definition, sink: str, seals: Sequence[Seal], wanted: Callable[[Seal], bool], progress: Progress
) -> list[Rechecked]:
    """As `audit.spark.audit.recheck_sink`, without Spark. Raises as `audit_here`."""
    chosen = chosen_sink(pipeline, sink)
    if (why := _why_spark(pipeline, chosen)) is not None:
        raise NeedsSpark(why)
    comparing = partial(in_process, _sent_rows(pipeline, chosen))
    return recheck(request_of(pipeline, chosen, 0), comparing, seals, wanted, progress)


def _why_spark(pipeline: Definition, sink: Endpoint) -> str | None:
    """What there is for Spark to do, as far as the definition says; None: nothing."""
    transform, mode = pipeline.transform.kind, sink.sink().capability().write
    own = {**pipeline.audit_by, **sink.audit}.get("own")
    reasons = {
        f"the transform is {'SQL' if transform == 'sql' else 'a function of DataFrames'}": transform
        in ("sql", "python"),
        "select or where of the sink is SQL": not sink.projection.is_plain,
        "the pipeline drops duplicates": pipeline.dedup is not None,
        "the sink keeps one row of each key": mode != APPEND,
        f"own is SQL: {own}": own is not None and own.strip().lower() != ALL_OWN,
    }
    return next((why for why, applies in reasons.items() if applies), None)


def _sent_rows(pipeline: Definition, sink: Endpoint) -> SentRows:
    transform = pipeline.transform
    rejecting = pipeline.on_bad_row is OnBadRow.DEAD_LETTER
    return SentRows(
        ArrowTransform(transform.select, transform.function),
        isolates=transform.isolates and pipeline.on_bad_row is not OnBadRow.FAIL,
        route=sink.projection.route,
        valid=partial(validate, sink_as_started(pipeline, sink)) if rejecting else None,
    )
