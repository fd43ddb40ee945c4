"""Audit a chain of pipelines: each hop as `audit/spark/run.py` does, then the first source against the last sink.

From end to end, the rows of the first source go through all transforms. Each must be in the last sink, or wait between
two pipelines, beyond what the later one has decided. Ledgers are read first, then sources and the sink, then
checkpoints: so each row is found at least once, and once more only if the batch that carries it on had begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.audit.chain import ChainReport, Stretch, linked, own_through, weakest
from delivered.audit.outcome import contradictions
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, BadExpression
from delivered.audit.sources import Positions, parsed
from delivered.audit.spark.reconcile import Slots, hashed, reconcile
from delivered.audit.spark.run import Progress, audit_sink, chosen_sink, found_rows, reason, request_for
from delivered.audit.spark.sent import SentRange, expressions, record_columns, sent_range
from delivered.checkpoint.folder import read_view
from delivered.contract.powers import Address, address_of
from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine.shard import fingerprint_seed
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.ranges import fitted
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.spark.frames import batches_fit_for, beyond_rows, keeps_partitions, kept_plain, shuffles_fit_for
from delivered.spark.rows import own_views
from delivered.spark.start import ready

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class _Hop:
    """One pipeline of the chain, to one of its sinks.

    Attributes:
        start, decided, newest: of its source: where the first batch began, where the last visible one ended, the end.
    """

    pipeline: Definition
    request: AuditRequest
    report: AuditReport
    read: SentRange
    start: Positions
    decided: Positions
    newest: Positions

    @property
    def source(self) -> Source:
        (source,) = self.request.sources.values()
        return source

    def written(self, spark: SparkSession, start: Positions, end: Positions) -> DataFrame:
        """What it writes for a range of its source."""
        slices = self.read.sources.slices(start, end) if start != end else []
        with own_views(self.pipeline.transform, spark, self.pipeline.sources):
            return self.read.frame(spark, slices)

    def from_rows(self, spark: SparkSession, rows: DataFrame) -> DataFrame:
        """What it writes for rows of its source."""
        with own_views(self.pipeline.transform, spark, self.pipeline.sources):
            return self.read.transformed(dict.fromkeys(self.pipeline.sources, rows))


def audit_chain(
    pipelines: Sequence[Definition],
    spark: SparkSession | None = None,
    *,
    sink: str | None = None,
    samples_max: int = 20,
    progress: Progress | None = None,
) -> ChainReport:
    """Account for every row from the first source to the last sink, per hop and from end to end.

    Args:
        pipelines: in the order of the data; each reads what the one before it writes.
        sink: of the last pipeline; None: all of them.
        samples_max: damaged rows listed, per class.
        progress: called at each step with its description.

    Raises:
        UsageError: two pipelines that are not linked, one with several sources, or no such sink.
        Refused: a hop that only a recompute can judge.
    """
    links = links_of(pipelines)
    last = pipelines[-1]
    ends = [chosen_sink(last, name) for name in ([sink] if sink is not None else last.sink_names)]
    spark = ready(last, spark)
    hops: list[Stretch] = []
    requests: list[AuditRequest] = []
    for pipeline, endpoint in [*zip(pipelines, links, strict=False), *((last, end) for end in ends)]:
        requests.append(request_for(pipeline, endpoint, spark, samples_max)[1])
        name = requests[-1].named_sink
        report = audit_sink(pipeline, spark, name, samples_max, None, progress)
        hops.append(Stretch(f"{pipeline.name} -> {name}", report, None))
    through: list[Stretch] = []
    for at in range(len(links), len(hops)):
        path = [*range(len(links)), at]
        found, waiting = _through(
            spark, pipelines, [requests[i] for i in path], [hops[i].report for i in path], progress
        )
        for i, rows in zip(path, waiting, strict=False):
            hops[i] = replace(hops[i], under_way=rows)
        through.append(replace(found, name=f"{pipelines[0].name} -> {requests[at].named_sink}, from end to end"))
    return ChainReport(tuple(p.name for p in pipelines), tuple(hops), tuple(through))


def links_of(pipelines: Sequence[Definition]) -> list[Endpoint]:
    """The sink of each pipeline but the last that the next one reads. Contacts no server.

    Raises:
        UsageError: two pipelines that are not linked, or one with several sources.
    """
    for pipeline in pipelines:
        if len(pipeline.sources) > 1:
            raise UsageError(
                "CHAIN_SOURCES",
                f"{pipeline.name} reads {len(pipeline.sources)} sources; in a chain, each pipeline reads one.",
                next_step="audit it alone: delivered audit",
            )
    sources = [address_of(e.source()) for p in pipelines for e in p.sources.values()]
    sinks = [[_address(e.sink()) for e in p.sinks] for p in pipelines]
    chosen = linked([p.name for p in pipelines], sinks, sources)
    return [p.sinks[i] for p, i in zip(pipelines, chosen, strict=False)]


def _address(sink: Sink) -> Address | None:
    """Where a sink writes: where its reader reads."""
    try:
        return address_of(sink.scan())
    except Refused:
        return None


def _through(
    spark: SparkSession,
    pipelines: Sequence[Definition],
    requests: Sequence[AuditRequest],
    reports: Sequence[AuditReport],
    progress: Progress | None,
) -> tuple[Stretch, list[int]]:
    """From the first source to one sink; and what waits for each hop, as far as it is known."""
    guarantee, uncertain = weakest([r.guarantee for r in reports])
    empty = AuditReport(pipelines[0].name, requests[-1].named_sink, guarantee, uncertain=uncertain)
    waiting: list[int] = []
    try:
        with _opened(pipelines, requests, reports) as hops, ExitStack() as held:
            for hop in hops:
                rows = hop.written(spark, hop.decided, hop.newest)
                waiting.append(max(rows.count() - hop.report.counts.in_progress, 0))
            (progress or (lambda _: None))(f"{empty.pipeline} -> {empty.sink}, from end to end")
            _check(hops, spark)
            return _compared(spark, hops, empty, held), waiting
    except BadExpression:
        raise
    except Exception as error:
        return Stretch("", replace(empty, unknowns=(reason(error),)), None), waiting


@contextmanager
def _opened(
    pipelines: Sequence[Definition], requests: Sequence[AuditRequest], reports: Sequence[AuditReport]
) -> Iterator[list[_Hop]]:
    with ExitStack() as held:
        hops = []
        for pipeline, request, report in zip(pipelines, requests, reports, strict=True):
            if not report.range_from or not report.range_to:
                raise _unfit(pipeline, "has no range that was compared with its sink")
            (name,) = pipeline.sources
            read = held.enter_context(sent_range(request))
            start, decided = ({name: _offsets(text, name)} for text in (report.range_from, report.range_to))
            hops.append(_Hop(pipeline, request, report, read, start, decided, read.sources.newest()))
        yield hops


def _offsets(text: str, name: str) -> dict[str, object]:
    found = json.loads(text)
    return dict(found[name]) if list(found) == [name] else dict(found)


def _unfit(pipeline: Definition, why: str) -> DeliveredError:
    return DeliveredError(
        "CHAIN_HOP", f"{pipeline.name} {why}: from end to end, nothing is judged.", next_step="see each hop"
    )


def _check(hops: Sequence[_Hop], spark: SparkSession) -> None:
    """Raise DeliveredError if a hop's rows do not each come from one row of its source."""
    for hop in hops:
        if hop.pipeline.dedup is not None:
            raise _unfit(hop.pipeline, "drops repeats")
        if hop.request.sink.capability().write.upserts or hop.pipeline.output_mode != "append":
            raise _unfit(hop.pipeline, "keeps one row per key")
        if hop.report.earlier is not None:
            raise _unfit(hop.pipeline, "ran with more than one transform")
        if beyond := beyond_rows(hop.written(spark, hop.start, hop.start)):
            raise _unfit(hop.pipeline, f"puts rows together ({', '.join(beyond)})")


def _compared(spark: SparkSession, hops: Sequence[_Hop], empty: AuditReport, held: ExitStack) -> Stretch:
    last = hops[-1]
    request, scope = last.request, Scope(last.request.pipeline, last.request.named_sink, last.report.incarnation)
    origins, places = Slots(), Slots()
    probe = last.written(spark, last.start, last.start)
    columns = record_columns(request, probe, request.sink.scan().schema().names).names
    held.enter_context(batches_fit_for(spark, *(h.written(spark, h.start, h.start).schema for h in hops)))
    held.enter_context(kept_plain(spark))

    def as_found(number: int, start: Positions, end: Positions, slots: Slots) -> DataFrame:
        """What becomes of a range of a hop's source in the last sink, for `reconcile`."""
        frame = hops[number].written(spark, start, end)
        for before, after in pairwise(hops[number:]):
            frame = _carried(spark, before, after, frame)
        if (fewer := record_columns(request, frame, columns).names) != columns:
            raise _unfit(last.pipeline, f"writes {columns} from a row, and {fewer} without what the system adds to it")
        named = f"waits for {hops[number].pipeline.name}" if number else hops[0].pipeline.name
        with expressions(request):
            rows = hashed(
                frame, request.sink.records, fingerprint_seed(scope), _at(frame, slots, named), request.id,
                request.key, own_sql=request.own,
            )  # fmt: skip
        return rows.withColumn("key_hash", F.lit(None).cast("long"))

    sink = found_rows(spark, request, request.sink.scan(), scope, probe, places).persist(StorageLevel.DISK_ONLY)
    held.callback(sink.unpersist)
    there = sink.count()
    sent = as_found(0, hops[0].start, hops[0].decided, origins)
    source_end = as_found(0, hops[0].decided, hops[0].newest, Slots()).count()
    coming = [as_found(k, h.decided, h.newest, places) for k, h in enumerate(hops) if k and h.decided != h.newest]
    ahead = []
    for number, hop in enumerate(hops):
        planned = parsed(read_view(hop.request.checkpoint).offsets)
        if planned != hop.decided:
            ahead.append(as_found(number, hop.decided, planned, origins))
    held.enter_context(shuffles_fit_for(spark, there + hops[0].report.counts.sent))
    found = sink.withColumn("key_hash", F.lit(None).cast("long"))
    waits = 0
    for rows in coming:
        waits += rows.count()
        found = found.unionByName(rows, allowMissingColumns=True)
    if request.own is not None:
        foreign = there - sink.filter("own").count()
        there -= foreign
        found = found.filter("own")
    else:
        foreign = 0
    result = reconcile(sent, _union(ahead), found, origins, places, request.samples_max)
    counts = result.counts
    report = replace(
        empty,
        range_from=hops[0].report.range_from,
        range_to=hops[0].report.range_to,
        counts=counts,
        given_up=sum(h.report.given_up for h in hops),
        samples=result.samples,
        partitions=result.partitions,
        own=own_through([h.report for h in hops]),
        foreign=foreign,
        id_says=last.report.id_says,
    )
    report = replace(report, unknowns=(*contradictions(report), *_doubts(hops, report)))
    # Beside what the sink holds: what is still on its way to it.
    report = replace(report, counts=replace(counts, delivered=there))
    return Stretch("", report, max(source_end + waits - counts.in_progress, 0))


def _union(frames: Sequence[DataFrame]) -> DataFrame | None:
    if not frames:
        return None
    first, *others = frames
    for frame in others:
        first = first.unionByName(frame)
    return first


def _at(frame: DataFrame, slots: Slots, name: str) -> Column:
    if not keeps_partitions(frame):
        return slots.unplaced(name)
    return slots.placed([name] * frame.rdd.getNumPartitions())


def _doubts(hops: Sequence[_Hop], report: AuditReport) -> list[str]:
    counts, found = report.counts, []
    if counts.unexpected and not report.all_own:
        found.append(
            f"{counts.unexpected:,} rows come from none of the first source: possibly foreign, there or in between"
        )
    if counts.lost and report.uncertain:
        found.append("one hop may lose rows and another one may repeat them: a loss proves nothing against either")
    for hop in hops[1:]:
        (endpoint,) = hop.pipeline.sources.values()
        options = {k.lower(): v for k, v in endpoint.options.items()}
        start = options.get("startingoffsets", "earliest" if endpoint.system == "outbox" else "latest")
        if counts.lost and start != "earliest":
            found.append(f"{hop.pipeline.name} started at {start}: what came before may be what is lost")
    return found


def _carried(spark: SparkSession, before: _Hop, after: _Hop, frame: DataFrame) -> DataFrame:
    """What `after` writes, from what `before` writes; without offsets, times and all else that the system adds."""
    rows = _as_read(before, after, frame)
    try:
        return after.from_rows(spark, rows)
    except AnalysisException as error:
        adds = sorted({f.name for f in after.source.schema()} - set(rows.columns))
        why = f"reads what the system adds to a row ({', '.join(adds)}): {str(error).splitlines()[0]}"
        raise _unfit(after.pipeline, why) from None


def _as_read(before: _Hop, after: _Hop, frame: DataFrame) -> DataFrame:
    """Rows of a sink as the source after it reads them."""
    sink, reads, writes = before.request.sink, address_of(after.source), address_of(before.request.sink.scan())
    by_row = writes is not None and writes.names is None and "topic" in frame.columns
    arrow = to_arrow_schema(frame.schema, timezone="UTC")

    def records(batch: pa.RecordBatch) -> pa.RecordBatch:
        made = sink.records(batch)
        return made.append_column("topic", batch.column("topic")) if by_row else made

    names = set(records(pa.RecordBatch.from_pylist([], schema=arrow)).schema.names)
    schema = pa.schema([f for f in after.source.schema() if f.name in names])
    rows = frame.mapInArrow(_each(records, schema), from_arrow_schema(schema))
    if by_row and reads is not None and reads.names is not None:
        return rows.filter(F.col("topic").isin(*sorted(reads.names)))
    return rows


def _each(
    records: Callable[[pa.RecordBatch], pa.RecordBatch], schema: pa.Schema
) -> Callable[..., Iterator[pa.RecordBatch]]:
    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield fitted(records(batch), schema)

    return each
