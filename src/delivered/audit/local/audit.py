"""Audit one sink of one pipeline in this process, if nothing in it is for Spark to do.

no transform, or one over Arrow batches
select without SQL, no where
no dedup, no upserts, no recomputation
id and key: none, or the name of a column; own: none, or 'true'
as many records as fit in `AUDIT_MEMORY_BYTES`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from delivered.audit.account import Comparison, Findings, Progress, Ranges, account, guarded
from delivered.audit.local import chosen_sink, request_of
from delivered.audit.local.reconcile import Side, joined, reconcile
from delivered.audit.local.rows import Budget, empty_batch, find_columns, read_slices
from delivered.audit.places import Places, locating_column, sink_partitions, source_partitions
from delivered.audit.recheck import Rechecked, recheck
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, NeedsSpark, Positions, Sealing, SourceSet, check_columns
from delivered.audit.seal import Seal
from delivered.audit.sealing import open_sources
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.engine.shard import fingerprint_seed, validate
from delivered.engine.sinks import Columns as Route
from delivered.engine.transform import ArrowTransform, run_isolated
from delivered.model.capability import APPEND
from delivered.model.identity import Scope
from delivered.model.limits import AUDIT_MEMORY_BYTES
from delivered.model.rows import OnBadRow, Rows
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.start import sink_as_started

ALL_OWN = "true"
"""The one condition `own` that needs no SQL."""


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


# The sink compared with its source: see `delivered.audit.account.Comparison`.


@dataclass(frozen=True)
class SentRows:
    """What becomes of the source's rows on their way to one sink.

    Attributes:
        transform: the pipeline's.
        isolates: rows for which it raises are dead letters, and not sent.
        route: the columns that the sink gets; None: all.
        valid: the rows that the sink can hold; None: it gets all.
    """

    transform: ArrowTransform
    isolates: bool = False
    route: Route | None = None
    valid: Callable[[Rows], Rows] | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch], source: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Args: source: columns of `batches`."""
        columns = self.transform(empty_batch(source)).schema if self.isolates else None
        for batch in batches:
            if columns is None:
                yield self._sent(self.transform(batch))
            else:
                for rows in run_isolated(self.transform, Rows(batch), columns):
                    yield self._sent(rows.good)

    def schema(self, source: pa.Schema) -> pa.Schema:
        """Columns of what is sent."""
        return self._sent(self.transform(empty_batch(source))).schema

    def _sent(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.route is not None:
            batch = self.route(batch)
        return batch if self.valid is None else self.valid(Rows(batch)).good


@contextmanager
def in_process(rows: SentRows, request: AuditRequest, scope: Scope, scan: BoundedScan) -> Iterator[LocalComparison]:
    """A comparison that holds hashes of both sides in memory.

    Raises:
        NeedsSpark: what identifies or orders records is SQL.
    """
    with closing(open_sources(request)) as sources:
        yield LocalComparison(rows, request, scope, scan.planned(), sources)


class LocalComparison(Comparison):
    def __init__(
        self, rows: SentRows, request: AuditRequest, scope: Scope, scan: BoundedScan, sources: SourceSet
    ) -> None:
        (self._source,) = request.sources.values()
        self._rows, self._request, self._scan, self.sources = rows, request, scan, sources
        records = request.sink.records(empty_batch(rows.schema(self._source.schema()))).schema
        stored = scan.schema().names
        check_columns(request, records.names, stored)
        self._columns = find_columns(records, fingerprint_seed(scope), request.id, request.key)
        self._located_by = locating_column(stored, records.names)
        self._budget, self._origins, self._places = Budget(AUDIT_MEMORY_BYTES), Places(), Places()

    def read(self, slices: Sequence[Slice], expected: int, again: int = 0) -> tuple[int, int]:
        self._budget.check(expected)
        self._again, names = again, self._columns.records.names
        first = self._places.add(sink_partitions(slices, self._located_by))
        columns = replace(self._columns, position=self._located_by)
        self._stored = read_slices(
            self._scan.read, slices, lambda batch: batch.select(names), columns, first, self._budget
        )
        return len(self._stored), 0

    def compare(self, ranges: Ranges) -> Findings:
        undecided = ranges.read.undecided
        # In the order of the source, by which the order of records is judged.
        again = self._sent(ranges.again) if ranges.again and self._again else None
        optional = [self._sent(ranges.optional)] if ranges.optional else []
        sent = self._sent(ranges.must)
        optional += [self._sent([undecided])] if undecided is not None else []
        ahead = joined(optional) if optional else None
        there = self._stored
        if self._again:
            there, ahead = self._without_sealed(sent, ahead, again)
        sealed = None
        if ranges.before:
            known = sent if ahead is None else joined([sent, ahead])
            unexpected = there.where(~there.shares_id(known))
            sealed = self._sent(ranges.before, unexpected).unordered()
        samples_max = self._request.samples_max
        return Findings(reconcile(sent, ahead, there, self._origins, self._places, samples_max, sealed))

    def _without_sealed(self, sent: Side, ahead: Side | None, again: Side | None) -> tuple[Side, Side | None]:
        """The sink's rows, and what may be among them, if some were compared by an earlier audit.

        Args:
            again: rows of sealed batches, which may be among those.
        """
        is_new = self._stored.slots >= self._again
        wanted = self._stored.shares_id(sent if ahead is None else joined([sent, ahead]))
        there = self._stored.where(is_new | wanted)
        if again is None:
            return there, ahead
        found = again.where(again.at_most(self._stored.where(~is_new & wanted)))
        return there, found if ahead is None else joined([ahead, found])

    def _sent(self, ranges: Sequence[tuple[Positions, Positions]], only: Side | None = None) -> Side:
        """Args: only: records that share an id with one of these; None: all."""
        source, request = self._source, self._request
        pieces = [piece for start, end in ranges for piece in self.sources.slices(start, end)]
        first = self._origins.add(source_partitions(pieces))
        read = source.read_good if request.rejects else source.read
        columns = source.schema()

        def rows(piece: Slice) -> Iterator[pa.RecordBatch]:
            return self._rows(read(piece.data[1]), columns)

        return read_slices(rows, pieces, request.sink.records, self._columns, first, self._budget, only)
