"""The audit of a pipeline as it is declared: its request, for Spark too; and the job, in this process, if nothing in it
is for Spark to do (`NeedsSpark`):

no transform, or one over Arrow batches
select without SQL, no where
no dedup, no upserts, no recomputation
id and key: none, or the name of a column; own: none, or 'true'
as many records as fit in `AUDIT_MEMORY_BYTES`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.audit.account import Comparison, Findings, Progress, Ranges, account, guarded
from delivered.audit.evidence import (
    ROUTE,
    ROW_BITS,
    SHOWN_LENGTH,
    Counts,
    Damage,
    PartitionLine,
    Places,
    Sample,
    locating_column,
    sink_partitions,
    source_partitions,
)
from delivered.audit.judge import Result
from delivered.audit.recheck import Rechecked, recheck
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, NeedsSpark, Positions, Recompute, Sealing, SourceSet, check_columns
from delivered.audit.seal import Seal
from delivered.audit.sealing import open_sources
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.engine import Columns as Route
from delivered.engine.shard import fingerprint_seed, validate
from delivered.engine.transform import ArrowTransform, run_isolated
from delivered.model.capability import APPEND
from delivered.model.errors import Refused, UsageError, did_you_mean
from delivered.model.fingerprint import U64, Fingerprint, lanes, record_hashes
from delivered.model.identity import Scope
from delivered.model.limits import AUDIT_MEMORY_BYTES
from delivered.model.rows import OnBadRow, Rows, fitted
from delivered.pipeline.definition import Definition, grouping_columns
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.start import as_started, sink_as_started

_KAFKA_READS = ("kafka.", "subscribe", "assign", "includeheaders")
"""How the options of Spark's Kafka source start, in lower case, that say which records it reads."""

_ISOLATION = "kafka.isolation.level"


def request_of(
    pipeline: Definition,
    chosen: Endpoint,
    samples_max: int,
    sink_from: Mapping[str, Any] | None = None,
    recompute: bool = False,
    sealing: Sealing | None = None,
) -> AuditRequest:
    """
    Args:
        sealing: None: read everything, and seal nothing. So it is with `sink_from`.

    Raises:
        UsageError: one of Spark's own sources.
        Refused: only a recompute can judge this.
    """
    if not recompute and pipeline.output_mode != "append" and chosen.sink().capability().write == APPEND:
        raise Refused("AUDIT_OUTPUT_MODE", output_mode=pipeline.output_mode)
    sinks = pipeline.spec.open()
    by = {**pipeline.audit_by, **chosen.audit}
    return AuditRequest(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        sources={n: _readable(e).source().planned() for n, e in as_started(pipeline).items()},
        sink=chosen.sink(),
        sink_name=chosen.name,
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
        sealing=sealing if sink_from is None else None,
    )


def _readable(endpoint: Endpoint) -> Endpoint:
    """Of Spark's own Kafka source, this package's with the same columns, which reads by the offsets that Spark logged.
    Options that say when a query reads, and how much, do not matter then. Spark's default reads aborted records too.

    Raises:
        UsageError: another one of Spark's own sources.
    """
    if not endpoint.is_spark_own:
        return endpoint
    if endpoint.system.lower() != "kafka":
        raise UsageError("AUDIT_SOURCE", format=endpoint.format, system=endpoint.system)
    chosen = {k: v for k, v in endpoint.options.items() if k.lower().startswith(_KAFKA_READS)}
    if not any(k.lower() == _ISOLATION for k in chosen):
        chosen[_ISOLATION] = "read_uncommitted"
    return replace(endpoint, format="kafka", options=chosen)


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
        near = did_you_mean(sink or "", endpoints)
        raise UsageError("AUDIT_SINK.UNNAMED", reason=reason, endpoints=", ".join(endpoints), hint=near)
    return endpoints[sink]


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
        columns = find_columns(records, fingerprint_seed(scope), request.id, request.key)
        self._columns = replace(columns, routed_by=request.sink.routed_by)
        self._located_by = locating_column(stored, records.names)
        self._budget, self._origins, self._places = Budget(AUDIT_MEMORY_BYTES), Places(), Places()

    def read(self, slices: Sequence[Slice], expected: int, again: int = 0) -> tuple[int, int]:
        self._budget.check(expected)
        first = self._places.add(sink_partitions(slices, self._located_by))
        columns = replace(self._columns, position=self._located_by)
        self._again, self._stored = again, self._read(slices, columns, first)
        return len(self._stored), 0

    def _read(self, slices: Sequence[Slice], columns: Columns, first: int, only: Side | None = None) -> Side:
        """Rows of the sink."""
        names = columns.records.names
        return read_slices(
            self._scan.read, slices, lambda batch: batch.select(names), columns, first, self._budget, only
        )

    def compare(self, ranges: Ranges) -> Findings:
        undecided = ranges.read.undecided
        # In the order of the source, by which the order of records is judged.
        again = self._sent(ranges.again) if ranges.again and self._again else None
        optional = [self._sent(ranges.optional)] if ranges.optional else []
        sent = self._sent(ranges.must)
        optional += [self._sent([undecided])] if undecided is not None else []
        ahead = joined(optional) if optional else None
        there, others = self._stored, list[Side]()
        if self._again:
            there, ahead, others = self._without_sealed(sent, ahead, again)
        sealed = None
        if ranges.before:
            surplus = there.where(~there.at_most(sent if ahead is None else joined([sent, ahead])))
            sealed = self._sent(ranges.before, surplus).unordered()
            if ranges.sealed is not None:
                first = joined([self._read(ranges.sealed, self._columns, 0, surplus), *others])
                late = sealed.where(~sealed.at_most(first))
                ahead = late if ahead is None else joined([ahead, late])
        samples_max = self._request.samples_max
        return Findings(reconcile(sent, ahead, there, self._origins, self._places, samples_max, sealed))

    def _without_sealed(
        self, sent: Side, ahead: Side | None, again: Side | None
    ) -> tuple[Side, Side | None, list[Side]]:
        """The sink's rows, and what may be among them, if some were compared by an earlier audit; and rows of sealed
        batches that were.

        Args:
            again: rows of sealed batches, which may be among those.
        """
        is_new = self._stored.slots >= self._again
        wanted = self._stored.shares_id(sent if ahead is None else joined([sent, ahead]))
        there = self._stored.where(is_new | wanted)
        others = replace(self._stored.where(~is_new & ~wanted), position=None)
        if again is None:
            return there, ahead, [others]
        found = again.where(again.at_most(self._stored.where(~is_new & wanted)))
        return there, found if ahead is None else joined([ahead, found]), [others, found]

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


# Both sides as hashes, in Arrow and C, by the connectors' own readers: a range must fit in memory.

Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]
Read = Callable[[Slice], Iterator[pa.RecordBatch]]

_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_LITERALS = ("true", "false", "null")
_ROW_BYTES = 64
_CHARACTER_BYTES = 4


class Budget:
    """Bytes that both sides may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self._left, self._max = bytes_max, bytes_max

    def take(self, count: int) -> None:
        """Raises NeedsSpark: there are no more."""
        self._left -= count
        if self._left < 0:
            raise NeedsSpark(f"its records need more than {self._max >> 20} MiB here")

    def check(self, records: int) -> None:
        """Raises NeedsSpark: so many records on either side certainly take more."""
        if 2 * records * _ROW_BYTES > self._left:
            raise NeedsSpark(f"{records:,} records need more than {self._max >> 20} MiB here")


@dataclass(frozen=True)
class Columns:
    """What is looked at in a record.

    Attributes:
        records: its columns and types.
        seed: of the fingerprints.
        id: column that identifies it; None: all do.
        key: column within which order is judged; None: no order.
        position: column that locates it for users, not among `records`.
        routed_by: as well; it belongs to the record's id, and not to the hash of its value.
    """

    records: pa.Schema
    seed: int
    id: str | None = None
    key: str | None = None
    position: str | None = None
    routed_by: str | None = None


def find_columns(records: pa.Schema, seed: int, id_sql: str | None, key_sql: str | None) -> Columns:
    """Raises NeedsSpark: the id or the key is more than the name of a column, or needs Spark's spelling as text."""
    named = _column(records, id_sql, "id") if id_sql is not None else None
    key = _column(records, key_sql, "key") if key_sql is not None else "key" if "key" in records.names else None
    return Columns(records, seed, named, key)


def _column(records: pa.Schema, sql: str, what: str) -> str:
    name = sql.strip()
    if not _COLUMN.fullmatch(name) or name.lower() in _LITERALS:
        raise NeedsSpark(f"the {what} {sql!r} is SQL")
    name = name.strip("`")
    found = [n for n in records.names if n.lower() == name.lower()]  # as Spark resolves it
    if len(found) != 1:
        raise NeedsSpark(f"the {what} {sql!r} is no column of its own")
    return str(found[0])


def read_slices(
    read: Read,
    slices: Sequence[Slice],
    canonical: Canonical,
    columns: Columns,
    first_slot: int,
    budget: Budget,
    only: Side | None = None,
) -> Side:
    """All records of these slices.

    Args:
        canonical: maps rows that were read to rows as a reader of the sink sees them.
        first_slot: of the first slice.
        only: records that share an id with one of these; None: all.

    Raises:
        NeedsSpark: they do not fit, or are of a type that has another value in Spark.
    """
    columns = replace(columns, records=plain_types(columns.records))
    nothing = _empty(columns)
    sides = [nothing]
    for slot, piece in enumerate(slices, first_slot):
        at = slot << ROW_BITS
        for batch in read(piece):
            records = canonical(batch)
            side = _hashed(fitted(records, columns.records), batch, at, columns)
            at += records.num_rows
            if only is not None:
                side = side.where(side.shares_id(only))
            budget.take(len(side) * _ROW_BYTES + sum(t.nbytes for t in (side.names, side.shown) if t is not None))
            sides.append(side)
    return joined(sides)


def _empty(columns: Columns) -> Side:
    read = [(columns.position, pa.int64())] if columns.position is not None else []
    read += [(columns.routed_by, pa.string())] if columns.routed_by is not None else []
    return _hashed(empty_batch(columns.records), empty_batch(pa.schema(read)), 0, columns)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    # Not `from_pylist`, which imports pandas: 0.3 s.
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def _hashed(records: pa.RecordBatch, read: pa.RecordBatch, at: int, columns: Columns) -> Side:
    """Args: at: of the first row."""
    low, high = lanes(record_hashes(records, columns.seed))
    route = [as_text(read.column(columns.routed_by))] if columns.routed_by is not None else []
    columns_of_id = [*records.columns, *route]
    identified = pa.RecordBatch.from_arrays(columns_of_id, names=[str(n) for n in range(len(columns_of_id))])
    other = record_hashes(identified, ~columns.seed)
    more: dict[str, Any] = {}
    if columns.id is not None:
        names = as_text(records.column(columns.id))
        if route:
            names = pc.binary_join_element_wise(names, *route, pa.scalar(ROUTE.encode(), pa.large_binary()))
        nameless, text = np.asarray(names.is_null()), pa.RecordBatch.from_arrays([names], names=["id"])
        named = (record_hashes(text, seed) for seed in (columns.seed, ~columns.seed))
        ids, others = (np.where(nameless, value, name) for value, name in zip((low, other), named, strict=True))
        more.update(names=names, named=ids, other_named=others)
    if columns.key is not None:
        key = records.column(columns.key)
        more["key"] = record_hashes(pa.RecordBatch.from_arrays([key], names=["key"]), columns.seed)
        more["keyed"] = np.asarray(key.is_valid())
        more["shown"] = as_text(key, SHOWN_LENGTH * _CHARACTER_BYTES)
    if columns.position is not None:
        more["position"] = np.asarray(read.column(columns.position).cast(pa.int64()))
    return Side(low, high, other, np.arange(at, at + records.num_rows, dtype=np.int64), **more)


def as_text(column: pa.Array, bytes_max: int | None = None) -> pa.Array:
    """As Spark's cast to a string spells it, in bytes, which need not be valid UTF-8.

    Args:
        bytes_max: of each; longer ones are cut.

    Raises:
        NeedsSpark: a type that Spark spells in a way of its own.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        column = column.cast(pa.string())
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_binary(kind)):
        raise NeedsSpark(f"an id or a key of type {kind} is written as text by Spark alone")
    column = column.cast(pa.large_binary())
    # Copies: what it was a part of can be freed.
    return pa.concat_arrays([column, column[:0]]) if bytes_max is None else pc.binary_slice(column, 0, bytes_max)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def plain_types(schema: pa.Schema) -> pa.Schema:
    """The columns in the units that Spark has for them, so that equal values have equal hashes.

    Raises:
        NeedsSpark: units within a list, a map or a structure.
    """
    return pa.schema([f.with_type(_plain_type(f.type)) for f in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if pa.types.is_time(kind):
        return pa.time64("ns")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_nested(kind):
        parts = [kind.field(i).type for i in range(kind.num_fields)]
        if any(_plain_type(p) != p for p in parts):
            raise NeedsSpark(f"a column of type {kind} has other units in Spark")
    return kind


# The records of both sides classified by sorting hashes: what `audit.spark.reconcile` does in Spark. Tests hold both to
# the definition in `tests/support/reconcile.py`.

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NOWHERE = np.int64((1 << 63) - 1)


@dataclass(frozen=True)
class Side:
    """Records of one side, one element each.

    Attributes:
        low, high: both lanes of the hash of its value.
        other: a second, independent hash of its value.
        at: its slot and row.
        named, other_named: two independent hashes of its id; None: its value identifies it.
        names: its id as text; null: it has none, and is identified by its value.
        key: hash of its key; None: no order is judged.
        keyed: whether it has one.
        shown: its key, for the report.
        position: what locates it for users; None: its row does.
    """

    low: U64
    high: U64
    other: U64
    at: I64
    named: U64 | None = None
    other_named: U64 | None = None
    names: pa.Array | None = None
    key: U64 | None = None
    keyed: Flags | None = None
    shown: pa.Array | None = None
    position: I64 | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def id(self) -> U64:
        return self.low if self.named is None else self.named

    @property
    def other_id(self) -> U64:
        return self.other if self.other_named is None else self.other_named

    @property
    def slots(self) -> I64:
        return self.at >> ROW_BITS

    def where(self, wanted: Flags) -> Side:
        """Some of the records."""
        return Side(*(_filtered(v, wanted) for v in self._columns))

    def unordered(self) -> Side:
        """The records, with an order that is not judged."""
        return self if self.keyed is None else replace(self, keyed=np.zeros_like(self.keyed))

    @property
    def _columns(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    def shares_id(self, others: Side) -> Flags:
        """Whether there is a record of the same id among others."""
        both, theirs = (_mixed(s.id, s.other_id) for s in (self, others))
        shares: Flags = np.isin(self.id, others.id) & np.isin(both, theirs)
        return shares

    def at_most(self, others: Side) -> Flags:
        """The first ones of each id and value: as many as there are of it among others."""
        own, theirs = (_mixed(_mixed(s.id, s.other_id), s.low) for s in (self, others))
        values, copies = np.unique(theirs, return_counts=True)
        if not len(values):
            return np.zeros(len(self), bool)
        order = np.lexsort((self.at, own))
        starts = np.flatnonzero(_changes(own[order]))
        nth = np.arange(len(own)) - np.repeat(starts, np.diff(np.append(starts, len(own))))
        found = np.minimum(np.searchsorted(values, own[order]), len(values) - 1)
        chosen = np.zeros(len(self), bool)
        chosen[order] = (values[found] == own[order]) & (nth < copies[found])
        return chosen


def joined(sides: Sequence[Side]) -> Side:
    """All records, one side after the other; sides of the same columns."""
    columns = zip(*(side._columns for side in sides), strict=True)
    return Side(*map(_concatenated, columns))


def _concatenated(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)


def _filtered(values: Any, wanted: Flags) -> Any:
    if values is None:
        return None
    return values.filter(pa.array(wanted)) if isinstance(values, pa.Array) else values[wanted]


def _mixed(one: U64, other: U64) -> U64:
    """Both hashes in one."""
    with np.errstate(over="ignore"):
        return one * np.uint64(0x9E3779B97F4A7C15) + other


def reconcile(
    sent: Side,
    ahead: Side | None,
    stored: Side,
    origins: Places,
    places: Places,
    samples_max: int = 20,
    sealed: Side | None = None,
) -> Result:
    """Classify every record.

    Args:
        sent: what must be in the sink.
        ahead: what may be in the sink: rows of started, undecided batches.
        stored: what is in the sink.
        origins: slots of `sent` and `ahead`.
        places: slots of `stored`.
        samples_max: damaged records collected per class.
        sealed: what was found in the sink by earlier audits: copies that were found now are duplicates.
    """
    sides = [sent, ahead or _none_of(sent), sealed or _none_of(sent), stored]
    if not sum(map(len, sides)):
        return Result(Counts())
    ids = _Ids(sides)
    with np.errstate(over="ignore"):
        classes = _classify(ids, origins, places)
        lines = _lines(ids, classes, origins)
    null_ids = sum(side.names.null_count for side in sides if side.names is not None)
    return Result.of_lines(lines, _samples(ids, classes, sides, origins, places, samples_max), null_ids)


def _none_of(side: Side) -> Side:
    return side.where(np.zeros(len(side), bool))


class _Ids:
    """All rows, sorted by id and value; and where in them each value and each id starts.

    Attributes:
        rows: indices of the sorted rows, in the sides one after the other.
        must, may, sealed, there: whether a sorted row is of that side.
        low, high: of the sorted rows.
        values: where a value starts.
        starts: where an id starts.
        value_starts: as `starts`, in `values`.
        origin, place: of each id's first row that was sent, and that is in the sink; `_NOWHERE`: none.
        key, keyed: of each id's first row that was sent; None: no order is judged.
        copies: of each value, those that must be in the sink, and those of decided batches that are.
    """

    copies: dict[str, I64]
    key: U64 | None = None
    keyed: Flags | None = None

    def __init__(self, sides: Sequence[Side]) -> None:
        def all_of(name: str) -> Any:
            return np.concatenate([getattr(side, name) for side in sides])

        self.rows, new_id, new_value = _sorted(*map(all_of, ("id", "other_id", "low")))
        self.low, self.high = (all_of(lane)[self.rows] for lane in ("low", "high"))
        number = np.repeat(np.arange(len(sides), dtype=np.int8), [len(s) for s in sides])[self.rows]
        self.must, self.may, self.sealed, self.there = (number == n for n in range(4))
        self.values, self.starts = np.flatnonzero(new_value), np.flatnonzero(new_id)
        self.value_starts = np.flatnonzero(new_id[self.values])
        at = all_of("at")[self.rows]
        self.place = np.minimum.reduceat(np.where(self.there, at, _NOWHERE), self.starts)
        at[self.there] = _NOWHERE
        self.origin = np.minimum.reduceat(at, self.starts)
        if sides[0].key is not None:
            # Of copies with other keys, the first one's counts.
            sizes = np.diff(np.append(self.starts, len(self.rows)))
            first = np.flatnonzero((at == np.repeat(self.origin, sizes)) & ~self.there)
            ids = np.searchsorted(self.starts, first, side="right") - 1
            self.key, self.keyed = np.zeros(len(self), np.uint64), np.zeros(len(self), bool)
            self.key[ids], self.keyed[ids] = (all_of(n)[self.rows[first]] for n in ("key", "keyed"))

    def __len__(self) -> int:
        return len(self.starts)

    def rows_of(self, one: int) -> npt.NDArray[np.intp]:
        """The rows of an id, in the sides one after the other."""
        end = self.starts[one + 1] if one + 1 < len(self) else len(self.rows)
        return self.rows[self.starts[one] : end]


def _sorted(ids: U64, others: U64, low: U64) -> tuple[npt.NDArray[np.intp], Flags, Flags]:
    """Indices in the order of all three; whether an id starts there; whether a value does."""

    def starts(rows: npt.NDArray[np.intp]) -> tuple[Flags, Flags]:
        new_id = _changes(ids[rows]) | _changes(others[rows])
        return new_id, new_id | _changes(low[rows])

    rows = np.argsort(ids)
    new_id, new_value = starts(rows)
    if np.count_nonzero(new_value) != np.count_nonzero(_changes(ids[rows])):
        # The first hash alone does not distinguish ids or values.
        rows = np.lexsort((low, others, ids))
        new_id, new_value = starts(rows)
    return rows, new_id, new_value


def _changes(values: U64 | I64) -> Flags:
    """Whether each differs from the one before it."""
    changes = np.ones(len(values), bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _classify(ids: _Ids, origins: Places, places: Places) -> dict[str, I64]:
    """For each id, how many of its records are in each class."""
    must, may, sealed, there = (
        np.add.reduceat(rows, ids.values, dtype=np.int64) for rows in (ids.must, ids.may, ids.sealed, ids.there)
    )
    surplus = np.maximum(there - must - may, 0)
    in_progress = np.minimum(np.maximum(there - must, 0), may)
    was_sent = must + may + sealed > 0

    def by_id(values: I64) -> I64:
        summed: I64 = np.add.reduceat(values, ids.value_starts)
        return summed

    missing = by_id(np.maximum(must - there, 0))
    known = by_id(np.where(was_sent, surplus, 0))
    foreign = by_id(np.where(was_sent, 0, there))
    altered = np.minimum(missing, foreign)
    rest = foreign - altered
    sent, ahead = by_id(must), by_id(may)
    known_id = sent + ahead + by_id(sealed) > 0
    ids.copies = {"must": must, "there": there - in_progress}
    return {
        "must": sent,
        "may": ahead,
        "there": by_id(there),
        "in_progress": by_id(in_progress),
        Damage.LOST: missing - altered,
        Damage.DUPLICATED: known + np.where(known_id, rest, 0),
        Damage.ALTERED: altered,
        Damage.UNEXPECTED: np.where(known_id, 0, rest),
        Damage.REORDERED: _late(ids, origins, places),
    }


def _late(ids: _Ids, origins: Places, places: Places) -> I64:
    """1 for each id whose first copy in the sink comes after that of one of the same key that was sent later."""
    late = np.zeros(len(ids), np.int64)
    if ids.key is None or ids.keyed is None:
        return late
    compared = np.flatnonzero(ids.keyed & (ids.origin != _NOWHERE) & (ids.place != _NOWHERE))
    if not len(compared):
        return late
    key, origin, place = ids.key[compared], ids.origin[compared], ids.place[compared]
    source = np.asarray(origins.partitions(), np.int64)[origin >> ROW_BITS]
    target = np.asarray(places.partitions(), np.int64)[place >> ROW_BITS]
    order = np.lexsort((origin, place, target, source, key))
    key, source, target, origin = key[order], source[order], target[order], origin[order]
    starts = _changes(key) | _changes(source) | _changes(target)
    # One running maximum over all groups: each group's ranks are above those of the groups before it.
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(origin)] = np.arange(len(order))
    rank += (np.cumsum(starts) - 1) * len(order)
    newest = np.maximum.accumulate(rank)
    late[compared[order[1:][newest[:-1] > rank[1:]]]] = 1
    return late


def _lines(ids: _Ids, classes: dict[str, I64], origins: Places) -> list[PartitionLine]:
    """By slot of the source. Ids that were never sent are in a line of their own."""
    slots = np.where(ids.origin == _NOWHERE, len(origins), ids.origin >> ROW_BITS).astype(np.intp)

    def by_slot(values: npt.NDArray[Any]) -> list[int]:
        summed = np.zeros(len(origins) + 1, values.dtype)
        np.add.at(summed, slots, values)
        return [int(v) for v in summed]

    def by_value(values: npt.NDArray[Any]) -> list[int]:
        return by_slot(np.add.reduceat(values, ids.value_starts))

    sums = {name: by_slot(values) for name, values in classes.items()}
    lanes = [lane[ids.values] for lane in (ids.low, ids.high)]
    prints = [
        [by_value(copies), *(by_value(copies.astype(np.uint64) * lane) for lane in lanes)]
        for copies in ids.copies.values()
    ]
    lines = []
    for slot in np.unique(slots).tolist():
        counts = Counts(
            sent=sums["must"][slot],
            delivered=sums["there"][slot],
            in_progress=sums["in_progress"][slot],
            **{d.value: sums[d][slot] for d in Damage},
        )
        both = [Fingerprint(*(part[slot] for part in parts)) for parts in prints]
        lines.append(PartitionLine(origins.name(slot if slot < len(origins) else None), counts, *both))
    return lines


def _samples(
    ids: _Ids, classes: dict[str, I64], sides: Sequence[Side], origins: Places, places: Places, samples_max: int
) -> list[Sample]:
    """Damaged records with their readable key and their position in the sink."""
    ends = np.cumsum([len(s) for s in sides])
    samples = []

    def known(at: np.int64) -> int | None:
        return None if at == _NOWHERE else int(at)

    def text(rows: npt.NDArray[np.intp]) -> str:
        number = int(np.searchsorted(ends, rows[0], side="right"))
        side, row = sides[number], int(rows[0]) - (int(ends[number - 1]) if number else 0)
        name = side.names[row].as_py() if side.names is not None else None
        return f"{int(side.low[row]):016x}{int(side.other[row]):016x}" if name is None else _decoded(name)

    for damage in Damage:
        found = np.flatnonzero(classes[damage])
        order = np.lexsort((ids.place[found], ids.origin[found]))
        for one in found[order[:samples_max]].tolist():
            rows = ids.rows_of(one)
            is_there = bool(classes["there"][one])
            own = rows[rows >= ends[-2]] - ends[-2] if is_there else rows[rows < ends[0]]
            side = sides[-1 if is_there else 0]
            position = None
            if is_there and side.position is not None:
                position = int(side.position[own[np.argmin(side.at[own])]])
            shown = side.shown.take(pa.array(own)).to_pylist() if side.shown is not None else []
            keys = [_decoded(v)[:SHOWN_LENGTH] for v in shown if v is not None]
            samples.append(
                Sample(
                    damage,
                    text(rows),
                    min(keys, default=None),
                    origins.shown(known(ids.origin[one])),
                    places.shown(known(ids.place[one]), position),
                    int(classes["must"][one] + classes["may"][one]),
                    int(classes["there"][one]),
                )
            )
    return samples


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
