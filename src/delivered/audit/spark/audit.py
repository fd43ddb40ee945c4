"""Audit one sink of one pipeline: read its source range and the sink, and account for every record.

An audit may run while the pipeline runs, and after a crash. Decided batches must be in the sink; batches that started
later may be. For that to hold, the ledger is read first, then the sink, then the checkpoint: the sink is never newer
than what it is compared with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.audit.evidence import read_ledger
from delivered.audit.judge import (
    account_for_dedup,
    account_for_earlier,
    account_for_skipped,
    account_for_upserts,
    contradictions,
    judge,
    report_of_ledger,
    report_of_result,
)
from delivered.audit.report import AuditReport, unknown_report
from delivered.audit.request import (
    AuditRequest,
    BadExpression,
    Earlier,
    Recompute,
    SourceRange,
    Transform,
    check_write_mode,
    find_earlier,
    id_sql,
    join_adjacent,
    parsed,
    plain,
    split_by_transform,
)
from delivered.audit.spark.recompute import recompute
from delivered.audit.spark.reconcile import Slots, hashed, reconcile
from delivered.audit.spark.slices import SliceRows, beyond_rows, kept_plain, shuffles_fit_for
from delivered.audit.spark.source import Deduplicated, FinalState, SentRows, expressions, record_columns
from delivered.checkpoint.folder import read_view
from delivered.contract.sink import BoundedScan, Sink
from delivered.contract.source import Source
from delivered.engine.shard import fingerprint_seed, validated
from delivered.model.capability import APPEND
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows
from delivered.pipeline.definition import Definition, grouping_columns
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import as_started, sink_as_started
from delivered.source import backwards
from delivered.spark.internals import from_arrow
from delivered.spark.rows import Failing, apply_transform, own_views, projected
from delivered.spark.settings import batches_fit_for
from delivered.spark.start import ready

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ERROR_LENGTH_MAX = 2_000
NOT_READABLE = "DELIVERED_NOT_READABLE"
"""Error code of a sink that cannot be read back at all."""

_START_WRONG = "the checkpoint sidecar records another start than that of its batch 0"

Progress = Callable[[str], None]


def audit_sink(
    pipeline: Definition,
    session: SparkSession | None,
    sink: str | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
    recompute: bool = False,
) -> AuditReport:
    """Audit one sink of a pipeline, against its own rows and columns.

    Raises:
        UsageError: no such sink, several sinks and none named, or one of Spark's own sources.
    """
    spark, request = request_for(pipeline, chosen_sink(pipeline, sink), session, samples_max, sink_from, recompute)
    with own_views(pipeline.transform, spark, pipeline.sources):
        return audit(spark, request, progress)


def request_for(
    pipeline: Definition,
    chosen: Endpoint,
    session: SparkSession | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None = None,
    recompute: bool = False,
) -> tuple[SparkSession, AuditRequest]:
    """
    Raises:
        UsageError: one of Spark's own sources.
        Refused: only a recompute can judge this.
    """
    sparks = next((e for e in pipeline.sources.values() if e.is_spark_own), None)
    if sparks is not None:
        raise UsageError("AUDIT_SOURCE", format=sparks.format, system=sparks.system)
    if not recompute and pipeline.output_mode != "append" and chosen.sink().capability().write == APPEND:
        raise Refused("AUDIT_OUTPUT_MODE", output_mode=pipeline.output_mode)
    spark = ready(pipeline, session)
    sources = {n: e.source().planned() for n, e in as_started(pipeline).items()}
    sinks = pipeline.spec.open()
    by = {**pipeline.audit_by, **chosen.audit}
    return spark, AuditRequest(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        sources=sources,
        sink=chosen.sink(),
        sink_name=chosen.name,
        transform=_all_transforms(pipeline, chosen, spark, sources),
        dedup=pipeline.dedup,
        id=by.get("id"),
        key=by.get("key"),
        own=by.get("own"),
        samples_max=samples_max,
        sink_from=dict(sink_from) if sink_from is not None else None,
        decided_by=sinks,
        transform_version=pipeline.spec.transform,
        recompute=_recompute(pipeline, chosen) if recompute else None,
        rejects=pipeline.on_bad_row is not OnBadRow.FAIL,
        dead_letters=next((m.name for m in sinks.members if m.dead_letters), None),
    )


def _recompute(pipeline: Definition, sink: Endpoint) -> Recompute:
    facts = pipeline.transform.facts()
    keys = sink.sink().capability().write.keys or grouping_columns(pipeline.transform.sql)
    sql = pipeline.transform.kind == "sql"
    return Recompute(pipeline.output_mode, tuple(keys), facts.changing, pipeline.transform.deterministic, sql)


def chosen_sink(pipeline: Definition, sink: str | None) -> Endpoint:
    """Raises UsageError: no such sink, or several and none named."""
    endpoints = {e.name or e.sink().name: e for e in pipeline.sinks}
    if sink is None and len(endpoints) == 1:
        return next(iter(endpoints.values()))
    if sink not in endpoints:
        reason = "no sink was named" if sink is None else f"no sink is named {sink!r}"
        raise UsageError("AUDIT_SINK.UNNAMED", reason=reason, endpoints=", ".join(endpoints))
    return endpoints[sink]


def _all_transforms(
    pipeline: Definition, sink: Endpoint, spark: SparkSession, sources: Mapping[str, Source]
) -> Transform | None:
    """The pipeline's transform, followed by the sink's projection."""
    failing = Failing.FAIL if pipeline.on_bad_row is OnBadRow.FAIL else Failing.SKIP
    shared = apply_transform(pipeline.transform, spark, sources, failing=failing)
    validating = pipeline.on_bad_row is OnBadRow.DEAD_LETTER
    if sink.projection.is_all and not validating:
        return shared if pipeline.transform.kind != "none" else None

    def all_of_it(frames: Mapping[str, DataFrame]) -> DataFrame:
        expected = projected(shared(frames), sink.projection)
        return _accepted(expected, sink_as_started(pipeline, sink)) if validating else expected

    return all_of_it


def audit(spark: SparkSession, request: AuditRequest, progress: Progress | None = None) -> AuditReport:
    """Reconcile source and sink. What cannot be read yields the verdict `unknown`, not an exception.

    Args:
        progress: called at each step with its description.

    Raises:
        UsageError: the id or key expression is invalid.
    """
    started = time.monotonic()
    say = progress or (lambda _: None)
    try:
        report = (_account if request.recompute is None else recompute)(spark, request, say)
    except BadExpression:
        raise
    except Exception as error:
        # A failed audit proves nothing.
        report = unknown_report(request.pipeline, request.named_sink, request.guarantee, reason(error))
    versions = {"delivered": version("delivered"), "pyspark": version("pyspark")}
    return replace(report, seconds=time.monotonic() - started, versions=versions)


def reason(error: Exception) -> str:
    """Why an audit could not run, for the report."""
    text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _ERROR_LENGTH_MAX else f"{text[:_ERROR_LENGTH_MAX]} ..."


def _account(spark: SparkSession, request: AuditRequest, say: Progress) -> AuditReport:
    """Account for every record."""
    mode = request.write_mode
    check_write_mode(mode, dedup=request.dedup is not None)
    if mode.upserts:
        request = replace(request, id=id_sql(mode), key=None)
    say("reading checkpoint and ledger")
    scope = Scope(request.pipeline, request.named_sink, read_view(request.checkpoint).incarnation)
    ledger = read_ledger(request.sink, scope, request.guarantee, request.decided_by, request.dead_letters)
    try:
        scan = request.sink.scan()
    except Refused as error:
        if error.code != NOT_READABLE:
            raise
        return report_of_ledger(request, ledger, reason(error))
    say("reading the sink")
    with ExitStack() as context:
        source = context.enter_context(closing(SentRows(spark, request)))
        probe = source.rows().drop(*([mode.delete] if mode.delete else []))
        context.enter_context(batches_fit_for(spark, probe.schema, from_arrow(scan.schema())))
        context.enter_context(kept_plain(spark))
        places = Slots()
        stored = stored_rows(spark, request, scan, scope, probe, places).persist(StorageLevel.DISK_ONLY)
        context.callback(stored.unpersist)
        # Before the checkpoint is read: no batch in the sink is newer than the checkpoint's latest.
        rows, foreign = _persist(stored, request)
        expected = ledger.visible.total.count if ledger.visible is not None else 0
        context.enter_context(shuffles_fit_for(spark, rows + expected))
        own = stored.filter("own").drop("own") if request.own is not None else stored
        view = read_view(request.checkpoint)
        start, unsure = source.start()
        end = parsed(ledger.visible.offsets) if ledger.visible is not None else None
        read = SourceRange(start, end, parsed(view.offsets))
        ranges = split_by_transform(ledger.visible, start) if ledger.visible is not None else []
        current, earlier = find_earlier(ranges, request.transform_version)
        why = _why_incomparable(request, read, unsure, earlier, probe)
        if why is not None:
            return replace(report_of_ledger(request, ledger, why), range_from=json.dumps(plain(start)))
        say("reading the source range and comparing")
        unclear, undeleted, ordered = 0, 0, True
        deduplicated: Deduplicated | None = None
        ahead: DataFrame | None = None
        state: FinalState | None = None
        if request.dedup is not None:
            ends = [(batch, parsed(text)) for batch, text in ledger.ends]
            deduplicated = context.enter_context(source.deduplicated(request.dedup, scope, start, ends))
        if mode.insert:
            sent, undecided = source.inserted(scope, read, own)
            there = own.join(undecided, "id", "left_anti")
        elif mode.upserts:
            state = source.upserted(read, deduplicated)
            state.unclear.persist(StorageLevel.DISK_ONLY)
            unclear = state.unclear.count()
            sent = source.hash_unordered(state.rows, scope)
            sent, there = (f.join(state.unclear, "id", "left_anti") for f in (sent, own))
        elif deduplicated is not None:
            coming = source.hash(scope, [read.undecided])[0] if read.undecided is not None else None
            sent, ahead, there = deduplicated.sides(own, coming)
        else:
            sent, ordered = source.hash(scope, join_adjacent(current))
            there = own
            if read.undecided is not None:
                ahead = source.hash(scope, [read.undecided])[0]
        with expressions(request):
            result = reconcile(sent, ahead, there, source.slots, places, request.samples_max)
            if state is not None and result.counts.unexpected:
                undeleted = there.join(state.deleted, "id", "left_semi").count()
            if request.own is not None and result.counts.lost and "own" in sent.columns:
                unsure = unsure or _own_is_wrong(sent, request.own)
        dedup_counts = deduplicated.counts if deduplicated is not None else None
    report = report_of_result(request, ledger, read, view.batch, result, ordered)
    report = replace(report, own=request.own or "", foreign=foreign, undeleted=undeleted)
    if earlier is not None:
        report = replace(report, given_up=report.given_up - earlier.given_up.count)
        report = account_for_earlier(report, earlier, request.sink.capability().adds_columns)
    report = replace(report, unknowns=(*report.unknowns, *contradictions(report)))
    if unsure:
        report = replace(report, judged=False, unknowns=(unsure, *report.unknowns))
    if request.dedup is not None and dedup_counts is not None:
        report = account_for_dedup(report, request.dedup, dedup_counts)
    if state is not None:
        report = account_for_upserts(report, mode, unclear)
    if mode.conditional:
        report = account_for_skipped(report, mode, ledger)
    return judge(report, versions_known=bool(request.transform_version) and all(r.transform for r in current))


def _why_incomparable(
    request: AuditRequest, read: SourceRange, unsure: str, earlier: Earlier | None, probe: DataFrame
) -> str | None:
    """Why source and sink cannot be compared at all; None: they can."""
    if (wrong := backwards(plain(read.start), plain(read.end or read.planned))) is not None:
        return f"the source range ends before it starts ({wrong}): {unsure or _START_WRONG}"
    if earlier is not None and (request.dedup is not None or request.write_mode.upserts):
        return (
            f"batches {earlier.batches} ran with another transform; the final row of a key depends on all batches, so "
            "this transform cannot recompute it"
        )
    if len(request.sources) > 1 and (beyond := beyond_rows(probe)):
        return (
            f"the transform puts rows of several sources together ({', '.join(beyond)}): which of them met depends on "
            "watermarks and on where batches ended, so the sources alone do not say what the sink must hold"
        )
    return None


def _persist(stored: DataFrame, request: AuditRequest) -> tuple[int, int]:
    """Read the rows of the sink; return their number, and how many belong to other writers."""
    if request.own is None:
        return stored.count(), 0
    with expressions(request):
        (row,) = stored.agg(F.count("*").alias("rows"), F.count_if(~F.col("own")).alias("foreign")).collect()
    return int(row["rows"]), int(row["foreign"])


def _own_is_wrong(sent: DataFrame, own: str) -> str:
    """Why records that look lost were attributed to other writers; empty if none were."""
    excluded = sent.filter("NOT own").count()
    if not excluded:
        return ""
    return f"{own!r} is not true for {excluded:,} records that this pipeline sent: it does not identify its records"


def stored_rows(
    spark: SparkSession, request: AuditRequest, scan: BoundedScan, scope: Scope, sent: DataFrame, places: Slots
) -> DataFrame:
    """Everything a reader of the sink sees, as rows for `reconcile`.

    Args:
        sent: a frame with the columns that were written to the sink.
        places: collects the slots of these rows.
    """
    slices = scan.slices(request.sink_from)
    frame = SliceRows(spark, scan, slices)
    names = record_columns(request, sent, frame.schema.names).names
    # Columns that the system adds give a record's position; without them, the read order does.
    added = [c for c in ("offset", "rowid") if c in frame.schema.names and c not in names]
    at = places.placed([s.partition if added == ["offset"] else "rows" for s in slices])

    def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(names)

    with expressions(request):
        return hashed(
            frame,
            canonical,
            fingerprint_seed(scope),
            at,
            request.id,
            request.key,
            own_sql=request.own,
            position=added[0] if added else None,
        )


def _accepted(frame: DataFrame, sink: Sink) -> DataFrame:
    """The valid rows of a frame, as the sink validates them."""
    if not sink.capability().validates:
        return frame

    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield validated(sink, Rows(batch)).good

    return frame.mapInArrow(pick, frame.schema)
