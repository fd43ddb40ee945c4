"""Audit a chain of pipelines: each hop from its own last seal, as `audit/spark/audit.py` does, then from end to end.

Where the seals join (`audit/seal.py`), they say what arrived, and only rows on their way are read. Else the first
source is compared with the last sink: its rows go through all transforms. Each must be in the last sink, or wait
between two pipelines, beyond what the later one has decided. Ledgers are read first, then sources and the sink, then
checkpoints: so each row is found at least once, and once more only if the batch that carries it on had started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.audit.account import Progress, reason, written_otherwise
from delivered.audit.evidence import Damage, Verdict, count_open
from delivered.audit.judge import account_for_compaction, account_for_dead_letters, contradictions
from delivered.audit.local import chosen_sink
from delivered.audit.report import AuditReport, ChainReport, Segment
from delivered.audit.request import (
    AuditRequest,
    BadExpression,
    Positions,
    Sealing,
    find_earlier,
    parsed,
    plain,
    split_by_transform,
)
from delivered.audit.seal import Joined, Seal, SealedHop, current, join, read_sealed, why_apart
from delivered.audit.sealing import read_account
from delivered.audit.spark.audit import audit_sink, request_for, stored_rows
from delivered.audit.spark.reconcile import Slots, canonical_schema, hashed, reconcile, without_order
from delivered.audit.spark.slices import beyond_rows, keeps_partitions, kept_plain, shuffles_fit_for
from delivered.audit.spark.source import SentRows, expressions, record_columns, union
from delivered.checkpoint import read_view
from delivered.contract.sink import Sink
from delivered.contract.source import Address, Source
from delivered.engine import Sinks
from delivered.engine.context import open_shared_ledger
from delivered.engine.shard import fingerprint_seed
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.options import check_argument
from delivered.model.rows import fitted
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.spark.internals import from_arrow
from delivered.spark.rows import own_views
from delivered.spark.settings import batches_fit_for
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
    read: SentRows
    start: Positions
    decided: Positions
    newest: Positions

    @property
    def source(self) -> Source:
        (source,) = self.request.sources.values()
        return source

    def written(self, start: Positions, end: Positions) -> DataFrame:
        """What it writes for a range of its source."""
        slices = self.read.sources.slices(start, end) if start != end else []
        with self._views():
            return self.read.rows(slices)

    def written_for(self, rows: DataFrame) -> DataFrame:
        """What it writes for rows of its source."""
        with self._views():
            return self.read.transform(dict.fromkeys(self.pipeline.sources, rows))

    def probe(self) -> DataFrame:
        """No rows, with the columns that it writes."""
        return self.written(self.start, self.start)

    def _views(self) -> AbstractContextManager[None]:
        return own_views(self.pipeline.transform, self.read.spark, self.pipeline.sources)


def audit_chain(
    pipelines: Sequence[Definition],
    spark: SparkSession | None = None,
    *,
    sink: str | None = None,
    samples_max: int = 20,
    progress: Progress | None = None,
    full: bool = False,
) -> ChainReport:
    """Account for every row from the first source to the last sink, per hop and from end to end.

    Each hop continues from its last seal, and is sealed.

    Args:
        pipelines: in the order of the data; each reads what the one before it writes.
        sink: of the last pipeline; None: all of them.
        samples_max: damaged rows listed, per class.
        progress: called at each step with its description.
        full: read everything at each hop, and compare the first source with the last sink.

    Raises:
        UsageError: two pipelines that are not linked, one with several sources, or no such sink.
        Refused: a hop that only a recompute can judge.
    """
    check_argument("delivered.audit_chain", "pipelines", pipelines, Sequence, "a list of pipelines", "[one, two]")
    for pipeline in pipelines:
        check_argument("delivered.audit_chain", "pipelines", pipeline, Definition, "a list of pipelines", "[one, two]")
    links = links_of(pipelines)
    last = pipelines[-1]
    ends = [chosen_sink(last, name) for name in ([sink] if sink is not None else last.sink_names)]
    spark = ready(last, spark)
    hops: list[Segment] = []
    requests: list[AuditRequest] = []
    sealed: list[SealedHop] = []
    for pipeline, endpoint in [*zip(pipelines, links, strict=False), *((last, end) for end in ends)]:
        requests.append(request_for(pipeline, endpoint, spark, samples_max)[1])
        name = requests[-1].named_sink
        report = audit_sink(pipeline, spark, name, samples_max, None, progress, sealing=Sealing(full=full))
        hops.append(Segment(f"{pipeline.name} -> {name}", report, None))
        sealed.append(_sealed(pipeline, requests[-1], report))
    end_to_end: list[Segment] = []
    for at in range(len(links), len(hops)):
        path = [*range(len(links)), at]
        apart = "--full was given" if full else why_apart([sealed[i] for i in path])
        joined = join([sealed[i] for i in path]) if apart is None else None
        segment, waiting = _end_to_end(
            spark, pipelines, [requests[i] for i in path], [hops[i].report for i in path], joined, progress
        )
        if apart is not None and not full:
            note = f"the seals of the hops do not join: {apart}; so the first source was compared with the last sink"
            segment = replace(segment, report=replace(segment.report, notes=(*segment.report.notes, note)))
        for i, rows in zip(path, waiting, strict=False):
            hops[i] = replace(hops[i], under_way=rows)
        end_to_end.append(segment)
    return ChainReport(tuple(p.name for p in pipelines), tuple(hops), tuple(end_to_end))


def links_of(pipelines: Sequence[Definition]) -> list[Endpoint]:
    """The sink of each pipeline but the last that the next one reads. Contacts no server.

    Raises:
        UsageError: two pipelines that are not linked, or one with several sources.
    """
    for pipeline in pipelines:
        if len(pipeline.sources) > 1:
            raise UsageError("CHAIN_SOURCES", pipeline=pipeline.name, source_count=len(pipeline.sources))
    sources = [e.source().address() for p in pipelines for e in p.sources.values()]
    sinks = [[_address(e.sink()) for e in p.sinks] for p in pipelines]
    chosen = find_links([p.name for p in pipelines], sinks, sources)
    return [p.sinks[i] for p, i in zip(pipelines, chosen, strict=False)]


def _address(sink: Sink) -> Address | None:
    """Where a sink writes: where its reader reads."""
    try:
        return sink.scan().address()
    except Refused:
        return None


def _sealed(pipeline: Definition, request: AuditRequest, report: AuditReport) -> SealedHop:
    """A hop's seals, once it was audited."""
    sinks = request.decided_by or Sinks.one(request.sink, request.named_sink)
    scope = Scope(request.pipeline, sinks.decider.name, read_view(request.checkpoint).incarnation)
    try:
        with closing(open_shared_ledger(sinks, scope)) as ledger:
            texts = list(ledger.seals(request.named_sink))
    except DeliveredError as error:
        return SealedHop(pipeline.name, request.guarantee, (), reason(error))
    chain, known = read_sealed(texts), report.continuation
    doubt = chain.faults[0] if chain.faults else known.not_sealed if known is not None else ""
    if not doubt and report.verdict is Verdict.UNKNOWN:
        doubt = next(iter(report.unknowns), "its newest audit could not judge")
    seals = current([*map(Seal.parse, texts)]) if not chain.faults else []
    return SealedHop(pipeline.name, request.guarantee, seals, doubt, _reads_all(pipeline))


def _end_to_end(
    spark: SparkSession,
    pipelines: Sequence[Definition],
    requests: Sequence[AuditRequest],
    reports: Sequence[AuditReport],
    joined: Joined | None,
    progress: Progress | None,
) -> tuple[Segment, list[int]]:
    """From the first source to one sink; and what waits for each hop, as far as it is known.

    Args:
        joined: what the seals say; None: everything is compared.
    """
    guarantee, uncertain = weakest([r.guarantee for r in reports])
    empty = AuditReport(pipelines[0].name, requests[-1].named_sink, guarantee, uncertain=uncertain)
    name = f"{empty.pipeline} -> {empty.sink}, from end to end"
    waiting: list[int] = []
    try:
        with _opened(spark, pipelines, requests, reports) as hops, ExitStack() as context:
            for hop in hops:
                rows = hop.written(hop.decided, hop.newest)
                waiting.append(max(rows.count() - hop.report.counts.in_progress, 0))
            if joined is not None:
                return Segment(name, _by_seals(empty, reports, joined), sum(waiting)), waiting
            if progress is not None:
                progress(name)
            _check(hops)
            report, under_way = _compare(spark, hops, empty, context)
            return Segment(name, report, under_way), waiting
    except BadExpression:
        raise
    except Exception as error:
        return Segment(name, replace(empty, unknowns=(reason(error),)), None), waiting


def _by_seals(empty: AuditReport, reports: Sequence[AuditReport], joined: Joined) -> AuditReport:
    """The report from end to end that the seals of the hops make."""
    note = "judged from the seals of the hops; rows of a batch that nobody has sealed yet are under way"
    return replace(
        empty,
        range_from=json.dumps(plain(parsed(joined.start))),
        range_to=json.dumps(plain(parsed(joined.end))),
        counts=joined.counts,
        given_up=joined.given_up,
        samples=tuple(sample for report in reports for sample in report.samples),
        own=own_through(reports),
        foreign=reports[-1].foreign,
        id_says=reports[-1].id_says,
        unknowns=joined.unknowns,
        notes=(note, *joined.notes),
    )


@contextmanager
def _opened(
    spark: SparkSession,
    pipelines: Sequence[Definition],
    requests: Sequence[AuditRequest],
    reports: Sequence[AuditReport],
) -> Iterator[list[_Hop]]:
    with ExitStack() as context:
        hops = []
        for pipeline, request, report in zip(pipelines, requests, reports, strict=True):
            if not report.range_from or not report.range_to:
                raise _unfit(pipeline, "has no range that was compared with its sink")
            (name,) = pipeline.sources
            read = context.enter_context(closing(SentRows(spark, request)))
            # Of all batches: the report may be of those after the last seal.
            start, _ = read.sources.start()
            decided = {name: _offsets(report.range_to, name)}
            hops.append(_Hop(pipeline, request, report, read, start, decided, read.sources.newest()))
        yield hops


def _offsets(text: str, name: str) -> dict[str, object]:
    offsets = json.loads(text)
    return dict(offsets[name]) if list(offsets) == [name] else dict(offsets)


def _unfit(pipeline: Definition, why: str) -> DeliveredError:
    return DeliveredError("CHAIN_HOP", pipeline=pipeline.name, reason=why)


def _check(hops: Sequence[_Hop]) -> None:
    """Raise DeliveredError if a hop's rows do not each come from one row of its source."""
    for hop in hops:
        if hop.pipeline.dedup is not None:
            raise _unfit(hop.pipeline, "drops repeats")
        if hop.request.sink.capability().write.upserts or hop.pipeline.output_mode != "append":
            raise _unfit(hop.pipeline, "keeps one row per key")
        newest, version = hop.report.history.last, hop.request.transform_version
        if newest is not None and find_earlier(split_by_transform(newest, hop.start), version)[1] is not None:
            raise _unfit(hop.pipeline, "ran with more than one transform")
        scope = Scope(hop.pipeline.name, hop.request.named_sink, hop.report.incarnation)
        if why := written_otherwise(hop.request, scope):
            raise _unfit(hop.pipeline, f"did not always write to this sink as now ({why})")
        if beyond := beyond_rows(hop.probe()):
            raise _unfit(hop.pipeline, f"puts rows together ({', '.join(beyond)})")


def _compare(
    spark: SparkSession, hops: Sequence[_Hop], empty: AuditReport, context: ExitStack
) -> tuple[AuditReport, int]:
    """The report from end to end, and how many rows are still on their way."""
    last = hops[-1]
    request, scope = last.request, Scope(last.request.pipeline, last.request.named_sink, last.report.incarnation)
    origins, places = Slots(), Slots()
    scan, probe = request.sink.scan(), last.probe()
    columns = record_columns(request, probe, scan.schema().names).names
    context.enter_context(batches_fit_for(spark, *(h.probe().schema for h in hops)))
    context.enter_context(kept_plain(spark))

    def in_last_sink(number: int, start: Positions, end: Positions, slots: Slots) -> DataFrame:
        """What becomes of a range of a hop's source in the last sink, for `reconcile`."""
        frame = hops[number].written(start, end)
        for before, after in pairwise(hops[number:]):
            frame = _carry(before, after, frame)
        if (fewer := record_columns(request, frame, columns).names) != columns:
            raise _unfit(last.pipeline, f"writes {columns} from a row, and {fewer} without what the system adds to it")
        named = f"waits for {hops[number].pipeline.name}" if number else hops[0].pipeline.name
        canonical, seed, at = request.sink.records, fingerprint_seed(scope), _at(frame, slots, named)
        with expressions(request):
            route = request.sink.routed_by
            rows = hashed(frame, canonical, seed, at, request.id, request.key, own_sql=request.own, routed_by=route)
        return without_order(rows)

    sink = stored_rows(spark, request, scan, scan.slices(request.sink_from), scope, probe, places)
    sink.persist(StorageLevel.DISK_ONLY)
    context.callback(sink.unpersist)
    there = sink.count()
    sent = in_last_sink(0, hops[0].start, hops[0].decided, origins)
    source_end = in_last_sink(0, hops[0].decided, hops[0].newest, Slots()).count()
    coming = [in_last_sink(k, h.decided, h.newest, places) for k, h in enumerate(hops) if k and h.decided != h.newest]
    ahead = []
    for number, hop in enumerate(hops):
        planned = parsed(read_view(hop.request.checkpoint).offsets)
        if planned != hop.decided:
            ahead.append(in_last_sink(number, hop.decided, planned, origins))
    context.enter_context(shuffles_fit_for(spark, there + hops[0].report.counts.sent))
    stored, waits, foreign = without_order(sink), 0, 0
    for rows in coming:
        waits += rows.count()
        stored = stored.unionByName(rows, allowMissingColumns=True)
    if request.own is not None:
        foreign = there - sink.filter("own").count()
        stored = stored.filter("own")
    result = reconcile(sent, union(ahead), stored, origins, places, request.samples_max)
    report = replace(
        empty,
        range_from=hops[0].report.range_from,
        range_to=hops[0].report.range_to,
        counts=result.counts,
        given_up=sum(_given_up(h.report) for h in hops),
        samples=result.samples,
        partitions=result.partitions,
        own=own_through([h.report for h in hops]),
        foreign=foreign,
        id_says=last.report.id_says,
    )
    report = replace(report, unknowns=(*contradictions(report), *_unknowns(hops, report)))
    if result.counts.damaged:
        report = account_for_dead_letters(report, _open_dead_letters(hops), by_row=False)
        removes = [why for hop in hops for why in hop.request.sink.scan().compacted()]
        report = account_for_compaction(report, hops[0].read.sources.compacted(), removes)
    # Beside what the sink holds: what is still on its way to it.
    report = replace(report, counts=replace(result.counts, delivered=there - foreign))
    return report, max(source_end + waits - result.counts.in_progress, 0)


def _open_dead_letters(hops: Sequence[_Hop]) -> int:
    """Of all hops, at most."""
    still_open = 0
    for hop in hops:
        request, scope = hop.request, Scope(hop.pipeline.name, hop.request.named_sink, hop.report.incarnation)
        ledger = read_account(request, scope)
        if ledger.dead_letters and request.decided_by is not None:
            still_open += count_open(request.decided_by, scope, ledger)
    return still_open


def _given_up(report: AuditReport) -> int:
    """By all batches: the report may be of those after the last seal."""
    newest = report.continuation.newest if report.continuation is not None else None
    return report.given_up if newest is None else newest.account.given_up.count


def _at(frame: DataFrame, slots: Slots, name: str) -> Column:
    if not keeps_partitions(frame):
        return slots.unplaced(name)
    return slots.placed([name] * frame.rdd.getNumPartitions())


def _unknowns(hops: Sequence[_Hop], report: AuditReport) -> list[str]:
    counts, unknowns = report.counts, []
    if counts.unexpected and not report.all_own:
        unknowns.append(
            f"{counts.unexpected:,} rows come from none of the first source: possibly foreign, there or in between"
        )
    if counts.lost and report.uncertain:
        unknowns.append("one hop may lose rows and another one may repeat them: a loss proves nothing against either")
    for hop in hops[1:]:
        if counts.lost and not _reads_all(hop.pipeline):
            start = _start_of(hop.pipeline)
            unknowns.append(f"{hop.pipeline.name} started at {start}: what came before may be what is lost")
    return unknowns


def _start_of(pipeline: Definition) -> str:
    """Where its first batch started, as its only source says."""
    (endpoint,) = pipeline.sources.values()
    options = {k.lower(): v for k, v in endpoint.options.items()}
    return options.get("startingoffsets", "earliest" if endpoint.system == "outbox" else "latest")


def _reads_all(pipeline: Definition) -> bool:
    return _start_of(pipeline) == "earliest"


def _carry(before: _Hop, after: _Hop, frame: DataFrame) -> DataFrame:
    """What `after` writes, from what `before` writes; without offsets, times and all else that the system adds."""
    rows = _as_read(before, after, frame)
    try:
        return after.written_for(rows)
    except AnalysisException as error:
        adds = sorted({f.name for f in after.source.schema()} - set(rows.columns))
        why = f"reads what the system adds to a row ({', '.join(adds)}): {str(error).splitlines()[0]}"
        raise _unfit(after.pipeline, why) from None


def _as_read(before: _Hop, after: _Hop, frame: DataFrame) -> DataFrame:
    """Rows of a sink as the source after it reads them."""
    sink, reads, writes = before.request.sink, after.source.address(), before.request.sink.scan().address()
    by_row = writes is not None and writes.names is None and "topic" in frame.columns

    def records(batch: pa.RecordBatch) -> pa.RecordBatch:
        stored = sink.records(batch)
        return stored.append_column("topic", batch.column("topic")) if by_row else stored

    names = set(canonical_schema(frame.schema, records).names)
    schema = pa.schema([f for f in after.source.schema() if f.name in names])

    def as_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield fitted(records(batch), schema)

    rows = frame.mapInArrow(as_source, from_arrow(schema))
    if by_row and reads is not None and reads.names is not None:
        return rows.filter(F.col("topic").isin(*sorted(reads.names)))
    return rows


def find_links(
    names: Sequence[str], sinks: Sequence[Sequence[Address | None]], sources: Sequence[Address | None]
) -> list[int]:
    """Which sink of each pipeline but the last the next pipeline reads.

    A sink and a source are linked if they name the same system, share a server as it is written, and the source reads a
    topic or table that the sink writes.

    Args:
        sinks: of each pipeline; None: the connector does not say where it writes.
        sources: the only source of each pipeline.

    Raises:
        UsageError: fewer than two pipelines, two that are not linked, or one that writes there twice.
    """
    if len(names) < 2:
        raise UsageError("CHAIN_SHORT", name_count=len(names))
    chosen = []
    for at, (before, after) in enumerate(pairwise(names)):
        source = sources[at + 1]
        linked = [
            i for i, sink in enumerate(sinks[at]) if sink is not None and source is not None and sink.meets(source)
        ]
        if len(linked) != 1:
            writes = ", ".join(str(s) if s is not None else "?" for s in sinks[at])
            raise UsageError(
                "CHAIN_LINK",
                after=after,
                source=source if source is not None else "?",
                before=before,
                writes=writes,
                problem="these are not the same place." if not linked else "more than one of its sinks is this place.",
            )
        chosen += linked
    return chosen


def own_through(reports: Sequence[AuditReport]) -> str:
    """SQL that is true for rows that the first pipeline's source sent; empty: others may have sent some in between.

    Args:
        reports: of each hop to one end.
    """
    *before, last = reports
    return last.own if all(r.all_own and not r.foreign for r in before) else ""


def weakest(guarantees: Sequence[Guarantee]) -> tuple[Guarantee, tuple[Damage, ...]]:
    """What a chain promises, and which damage proves nothing because another hop allows it."""
    loses, doubles = any(g.may_lose for g in guarantees), any(g.may_duplicate for g in guarantees)
    if doubles:
        return Guarantee.AT_LEAST_ONCE, (Damage.LOST,) if loses else ()
    return Guarantee.AT_MOST_ONCE if loses else Guarantee.EXACTLY_ONCE, ()
