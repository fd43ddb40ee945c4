"""Audit one sink of one pipeline: read its source range and the sink back, and say what became of every record.

May run while the pipeline runs, and after a crash. What must be in the sink is what the ledger says is decided; what
began after that may be there and need not. The order of reading makes that hold: the ledger first, then the sink, then
the checkpoint, so that the sink is never younger than what it is held against.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.audit.classes import Counts
from delivered.audit.judge import judged, with_earlier
from delivered.audit.report import AuditReport, Fingerprints, unknown_report
from delivered.audit.versions import Earlier, VersionRange, earlier, version_ranges
from delivered.contract.sink import BoundedScan, Sink
from delivered.contract.source import Offsets
from delivered.engine.shard import fingerprint_seed
from delivered.model.errors import DeliveredError, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.work import CheckpointView
from delivered.source.ranges import backwards
from delivered.spark import first_offsets
from delivered.spark.audit_dedup import of_dedup
from delivered.spark.audit_ledger import LedgerAccount, read_ledger
from delivered.spark.audit_sent import SentRange, sent_range
from delivered.spark.audit_spec import AuditSpec, BadExpression, expressions
from delivered.spark.checkpoint import read_view
from delivered.spark.final_state import check, id_sql, of_state
from delivered.spark.frames import SliceRows, batches_fit_for, kept_plain, shuffles_fit_for
from delivered.spark.reconcile import Result, Slots, hashed, reconcile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ERROR_LENGTH_MAX = 2_000
NOT_READABLE = "DELIVERED_NOT_READABLE"
"""Said by a sink that nobody can read back, whatever is done."""

_START_UNKNOWN = (
    "where batch 0 began is not recorded beside the checkpoint; where the source would begin today may be another place"
)
_START_WRONG = "what is recorded beside the checkpoint is not where its batch 0 began"

Progress = Callable[[str], None]


def audit(spark: SparkSession, spec: AuditSpec, progress: Progress | None = None) -> AuditReport:
    """Reconcile source and sink; never raises because something cannot be read: that is the verdict `unknown`.

    Args:
        progress: called with what is being done, a few times.

    Raises:
        UsageError: the id or key expression is wrong.
    """
    began = time.monotonic()
    say = progress or (lambda _: None)
    try:
        report = _audit(spark, spec, say)
    except BadExpression:
        raise
    except Exception as error:
        # Whatever went wrong in the checker, it saw no proof.
        report = unknown_report(spec.pipeline, spec.named_sink, spec.guarantee, _said(error))
    versions = {"delivered": version("delivered"), "pyspark": version("pyspark")}
    return _with(report, seconds=time.monotonic() - began, versions=versions)


def _said(error: Exception) -> str:
    text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _ERROR_LENGTH_MAX else f"{text[:_ERROR_LENGTH_MAX]} ..."


def _with(report: AuditReport, **changes: object) -> AuditReport:
    return AuditReport(**{**report.__dict__, **changes})


def _audit(spark: SparkSession, spec: AuditSpec, say: Progress) -> AuditReport:
    mode = spec.sink.capability().write
    check(mode)
    if mode.upserts:
        spec = replace(spec, id=id_sql(mode), key=None)
    say("reading checkpoint and ledger")
    incarnation = read_view(spec.checkpoint).incarnation
    scope = Scope(spec.pipeline, spec.named_sink, incarnation)
    ledger = read_ledger(spec.sink, scope, spec.guarantee, spec.decided_by, spec.dead_letters)
    try:
        scan = spec.sink.scan()
    except Refused as error:
        if error.code != NOT_READABLE:
            raise
        return _by_ledger(spec, incarnation, ledger, _said(error))
    say("reading the sink back")
    with sent_range(spec) as read, ExitStack() as held:
        probe = read.frame(spark, ()).drop(*([mode.delete] if mode.delete else []))
        kept = from_arrow_schema(scan.schema())
        held.enter_context(batches_fit_for(spark, probe.schema, kept))
        held.enter_context(kept_plain(spark))
        places = Slots()
        found = _found(spark, spec, scan, scope, probe, places).persist(StorageLevel.DISK_ONLY)
        try:
            # Before the checkpoint is read: what the sink holds now began no later than what the checkpoint says then.
            rows, foreign = _kept(found, spec)
            expected = ledger.visible.total.count if ledger.visible is not None else 0
            held.enter_context(shuffles_fit_for(spark, rows + expected))
            mine = found.filter("own").drop("own") if spec.own is not None else found
            view = read_view(spec.checkpoint)
            start, unsure = _start(spec, read)
            end = parsed(ledger.visible.offsets) if ledger.visible is not None else None
            planned = parsed(view.offsets)
            ranges = version_ranges(ledger.visible) if ledger.visible is not None else []
            again, others = earlier(ranges, spec.transform_version)
            reason = _uncounted(spec, start, end or planned, unsure, others)
            if reason is not None:
                return replace(_by_ledger(spec, incarnation, ledger, reason), range_from=json.dumps(start))
            say("reading the source range and comparing")
            unclear, undeleted, ahead, once = 0, 0, None, None
            if spec.dedup is not None:
                ends = [(batch, parsed(text)) for batch, text in ledger.ends]
                once = held.enter_context(read.once(spark, scope, start, ends, end))
            if mode.upserts:
                state = read.final(spark, start, end, planned, once)
                state.unclear.persist(StorageLevel.DISK_ONLY)
                unclear, ordered = state.unclear.count(), True
                sent = read.as_rows(state.rows, scope)
                sent, there = (f.join(state.unclear, "id", "left_anti") for f in (sent, mine))
            elif once is not None:
                coming = read.hashed(spark, scope, [(end or start, planned)])[0] if planned != end else None
                sent, ahead, there = once.sides(mine, coming)
                ordered = True
            else:
                sent, ordered = read.hashed(spark, scope, _offsets_of(again, start))
                there = mine
                if planned != end:
                    ahead = read.hashed(spark, scope, [(end or start, planned)])[0]
            with expressions(spec):
                result = reconcile(sent, ahead, there, read.slots, places, spec.samples_max)
                if mode.upserts and result.counts.unexpected:
                    undeleted = there.join(state.gone, "id", "left_semi").count()
                if spec.own is not None and result.counts.lost and "own" in sent.columns:
                    unsure = unsure or _own_wrong(sent, spec.own)
        finally:
            found.unpersist()
    report = _report(spec, incarnation, ledger, view, start, end, planned, result, ordered)
    report = replace(report, own=spec.own or "", foreign=foreign, undeleted=undeleted)
    if others is not None:
        report = with_earlier(replace(report, given_up=report.given_up - others.given_up.count), others)
    report = replace(report, unknowns=(*report.unknowns, *_contradictions(report)))
    if unsure:
        report = replace(report, judged=False, unknowns=(unsure, *report.unknowns))
    if once is not None and spec.dedup is not None:
        report = of_dedup(report, spec.dedup, once.counts)
    if mode.upserts:
        report = of_state(report, mode, unclear)
    return judged(report, versions_known=bool(spec.transform_version) and all(r.fingerprint for r in again))


def _kept(found: DataFrame, spec: AuditSpec) -> tuple[int, int]:
    """Keep what was read of the sink; return how many records it is, and how many of them are others'."""
    if spec.own is None:
        return found.count(), 0
    with expressions(spec):
        (row,) = found.agg(F.count("*").alias("rows"), F.count_if(~F.col("own")).alias("foreign")).collect()
    return int(row["rows"]), int(row["foreign"])


def _own_wrong(sent: DataFrame, own: str) -> str:
    """Why records that seem lost were taken for others'; empty if they were not."""
    left_out = sent.filter("NOT own").count()
    if not left_out:
        return ""
    return f"{own!r} is not true for {left_out:,} records that this pipeline sent: it does not tell them from others'"


def _uncounted(spec: AuditSpec, start: Offsets, end: Offsets, unsure: str, others: Earlier | None) -> str | None:
    """Why source and sink cannot be held against each other at all; None: they can."""
    if (wrong := backwards(start, end)) is not None:
        return f"the source range ends before it begins ({wrong}): {unsure or _START_WRONG}"
    if others is not None and (spec.dedup is not None or spec.sink.capability().write.upserts):
        return (
            f"batches {others.batches} ran with another transform, and what the sink keeps of a key rests on all "
            "batches: it cannot be recomputed with this one"
        )
    return None


def _offsets_of(ranges: Sequence[VersionRange], start: Offsets) -> list[tuple[Offsets, Offsets]]:
    """The ranges as offsets; those that follow each other are one."""
    found: list[tuple[Offsets, Offsets]] = []
    for r in ranges:
        begin, end = parsed(r.start) if r.start else start, parsed(r.end)
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _by_ledger(spec: AuditSpec, incarnation: str, ledger: LedgerAccount, why: str) -> AuditReport:
    """Where source and sink cannot be compared: what the pipeline says of itself, which proves nothing."""
    visible = ledger.visible
    total, given_up = (visible.total.count, visible.given_up.count) if visible is not None else (0, 0)
    said = f"the ledger says that {total:,} rows were delivered and {given_up:,} given up; nobody looked"
    return AuditReport(
        pipeline=spec.pipeline,
        sink=spec.named_sink,
        guarantee=spec.guarantee,
        incarnation=incarnation,
        range_to=json.dumps(parsed(visible.offsets)) if visible is not None else "",
        given_up=given_up,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=(why,),
        notes=(*ledger.notes, said),
    )


def _found(
    spark: SparkSession, spec: AuditSpec, scan: BoundedScan, scope: Scope, sent: DataFrame, places: Slots
) -> DataFrame:
    """Everything a reader of the sink sees, as rows for `reconcile`.

    Args:
        sent: a frame with the columns that the sink was given.
        places: gets the slots of these rows.
    """
    slices = scan.slices(spec.sink_from)
    frame = SliceRows(spark, scan, slices)
    names = _record_columns(spec.sink, sent)
    missing = [n for n in names if n not in frame.schema.names]
    if missing:
        raise DeliveredError(
            "AUDIT_COLUMNS",
            f"The sink {spec.named_sink!r} gives back the columns {frame.schema.names}; {missing} of the pipeline are "
            "not among them.",
            next_step="audit with the transform that the pipeline ran with",
        )
    # What the system adds to a record says where it stands; elsewhere the order of reading does.
    added = [c for c in ("offset", "rowid") if c in frame.schema.names and c not in names]
    at = places.placed([s.partition if added == ["offset"] else "rows" for s in slices])

    def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(names)

    with expressions(spec):
        return hashed(
            frame,
            canonical,
            fingerprint_seed(scope),
            at,
            spec.id,
            spec.key,
            own_sql=spec.own,
            position=added[0] if added else None,
        )


def _record_columns(sink: Sink, sent: DataFrame) -> list[str]:
    schema = to_arrow_schema(sent.schema, timezone="UTC")
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    return list(sink.records(empty).schema.names)


def _start(spec: AuditSpec, read: SentRange) -> tuple[Offsets, str]:
    """Where the pipeline's first batch began, and why that is not sure; empty if it is."""
    start = spec.source_from if spec.source_from is not None else first_offsets.kept(spec.checkpoint)
    return (start, "") if start is not None else (read.initial(), _START_UNKNOWN)


def parsed(text: str) -> Offsets:
    lines = text.strip().splitlines()
    if len(lines) != 1:
        raise DeliveredError(
            "AUDIT_SOURCES",
            f"The pipeline's batches have {len(lines)} sources; an audit follows one.",
            next_step="audit each sink's table with queries of your own, or split the pipeline",
        )
    offsets: Offsets = json.loads(lines[0])
    return offsets


def _report(
    spec: AuditSpec,
    incarnation: str,
    ledger: LedgerAccount,
    view: CheckpointView,
    start: Offsets,
    end: Offsets | None,
    planned: Offsets,
    result: Result,
    ordered: bool,
) -> AuditReport:
    visible = ledger.visible
    given_up = visible.given_up if visible is not None else Fingerprint()
    prints = Fingerprints(result.sent, visible.total if visible is not None else None, given_up, result.delivered)
    notes = list(ledger.notes)
    if planned != end:
        notes.append(f"batch {view.batch} began and is not decided; its records may be in the sink and need not be")
    if not ordered:
        notes.append("the transform moves rows between partitions: source partitions and order are not told")
    if result.null_ids:
        notes.append(f"{result.null_ids} records have no id; they are told apart by their whole content")
    if result.partitions_left_off:
        notes.append(f"{result.partitions_left_off} more source partitions are in the totals alone")
    return AuditReport(
        pipeline=spec.pipeline,
        sink=spec.named_sink,
        guarantee=spec.guarantee,
        incarnation=incarnation,
        range_from=json.dumps(start),
        range_to=json.dumps(end) if end is not None else "",
        counts=result.counts,
        given_up=given_up.count,
        partitions=result.partitions,
        samples=result.samples,
        fingerprints=prints,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=tuple(_unknowns(spec, ledger, result)),
        notes=tuple(notes),
        id_says=f"`{spec.id}`" if spec.id else "the whole record",
    )


def _unknowns(spec: AuditSpec, ledger: LedgerAccount, result: Result) -> list[str]:
    reasons = []
    if ledger.visible is None:
        reasons.append("the ledger holds no decided batch of this checkpoint: nothing was promised yet")
    if spec.guarantee is Guarantee.AT_MOST_ONCE and ledger.history.faults and result.counts.lost:
        reasons.append("the count of what was given up comes from a ledger whose batches do not follow each other")
    return reasons


def _contradictions(report: AuditReport) -> list[str]:
    """Where the audit cannot be right, whatever the pipeline did."""
    reasons = []
    counts, prints = report.counts, report.fingerprints
    if not counts.adds_up:
        reasons.append(f"the audit contradicts itself: {counts} do not add up")
    clean = counts == Counts(sent=counts.sent, delivered=counts.sent, reordered=counts.reordered)
    if clean and prints is not None and prints.sent != prints.delivered:
        reasons.append("the audit contradicts itself: no record differs, and the fingerprints do")
    return reasons
