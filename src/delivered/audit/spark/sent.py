"""The source side of an audit: source ranges, as they were written to the sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.audit.dedup import Stretch, cut, stretches
from delivered.audit.request import AuditRequest, BadExpression
from delivered.audit.sources import Positions, SourceSet, of_source
from delivered.audit.spark.dedup import Judged, Once
from delivered.audit.spark.reconcile import Slots, hashed
from delivered.audit.upserts import id_sql
from delivered.checkpoint import sidecar
from delivered.checkpoint.sidecar import stream_driver
from delivered.contract.source import Slice, Source
from delivered.engine.shard import fingerprint_seed
from delivered.model.capability import WriteMode
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.ranges import backquoted
from delivered.spark.frames import SliceRows, keeps_partitions, slice_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_AT, _PARTITION, _GONE, _ROW = "__delivered_at", "__delivered_partition", "__delivered_gone", "__delivered_row"

_START_UNKNOWN = (
    "the checkpoint sidecar does not record where batch 0 started, and the source may start elsewhere today"
)


def record_columns(request: AuditRequest, sent: DataFrame, stored: Sequence[str]) -> pa.Schema:
    """Rows of `sent` as a reader of the sink sees them.

    Args:
        sent: a frame with the columns that were written to the sink.
        stored: columns of the sink.
    """
    schema = to_arrow_schema(sent.schema, timezone="UTC")
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    records = request.sink.records(empty).schema
    missing = [n for n in records.names if n not in stored]
    if missing:
        raise DeliveredError(
            "AUDIT_COLUMNS",
            f"The sink {request.named_sink!r} has the columns {list(stored)}; the pipeline's {missing} are missing.",
            next_step="audit with the transform that the pipeline ran with",
        )
    return records


@contextmanager
def expressions(request: AuditRequest) -> Iterator[None]:
    """Report an invalid id, key or condition as the user's error, not as a failed audit."""
    try:
        yield
    except (AnalysisException, ParseException) as error:
        if request.id is None and request.key is None and request.own is None:
            raise
        raise BadExpression(
            "AUDIT_EXPRESSION",
            f"The audit's id is {request.id!r}, its key {request.key!r}, its own {request.own!r}. Spark reports: "
            f"{str(error).splitlines()[0]}",
            next_step="write SQL over the sink's columns, for example get_json_object(CAST(value AS STRING), '$.id')",
        ) from None


class SentRange:
    """Source ranges, transformed, with the names of their source partitions."""

    def __init__(self, request: AuditRequest) -> None:
        self._request = request
        at = request.checkpoint
        self.sources = SourceSet(
            {n: stream_driver(s, at, writes=False, name=n) for n, s in request.sources.items()},
            {n: sidecar.kept_first(at, n) for n in request.sources},
        )
        self.slots = Slots()

    def close(self) -> None:
        self.sources.close()

    def start(self) -> tuple[Positions, str]:
        """Where the pipeline's first batch started, and why that is uncertain; empty if it is certain."""
        return self.sources.first, _START_UNKNOWN if self.sources.unknown else ""

    def cut(self, parts: Sequence[Stretch]) -> tuple[list[Slice], list[int]]:
        """Slices of the sources, and the number of the stretch that each belongs to."""
        return cut(self.sources, parts)

    def frame(self, spark: SparkSession, slices: Sequence[Slice]) -> DataFrame:
        """Rows written to the sink for a range; no slices: only the columns matter."""
        return self.transformed(self._read(spark, slices))

    def query(self, spark: SparkSession) -> DataFrame:
        """The transform over streams with the sources' columns, for its plan: of a batch, Spark drops watermarks."""
        return self.transformed({n: _nothing(spark, s) for n, s in self._request.sources.items()})

    def _read(self, spark: SparkSession, slices: Sequence[Slice]) -> dict[str, DataFrame]:
        return {n: slice_frame(spark, s, of_source(slices, n)) for n, s in self._request.sources.items()}

    def transformed(self, read: Mapping[str, DataFrame]) -> DataFrame:
        """The transform's rows from those of each source, by name."""
        if self._request.transform is not None:
            made: DataFrame = self._request.transform(read)
            return made
        (frame,) = read.values()
        return frame

    def _of_only(self, read: DataFrame) -> DataFrame:
        (name,) = self._request.sources
        return self.transformed({name: read})

    @contextmanager
    def once(
        self,
        spark: SparkSession,
        scope: Scope,
        start: Positions,
        ends: Sequence[tuple[int, Positions]],
        end: Positions | None,
    ) -> Iterator[Once]:
        """A deduplicated range, persisted while the context is open.

        Args:
            ends: (batch, its end), as far back as the ledger keeps them.
        """
        request = self._request
        if request.dedup is None:
            raise DeliveredError(
                "AUDIT_DEDUP",
                "The pipeline has no dedup.",
                next_step="declare dedup in the pipeline, or leave it out of the audit",
            )
        upserts = request.sink.capability().write.upserts
        parts = stretches(start, ends, end) if end is not None else []
        slices, numbers = self.cut(parts)
        (read,) = self._read(spark, slices).values()
        with closing(Judged(read, numbers, parts, request.dedup, named=request.id is not None)) as judged:
            rows = self._whole_rows if upserts else lambda frame: self.as_rows(self._of_only(frame), scope, "all")
            with closing(Once(judged, rows, self._of_only)) as once:
                yield once

    def _whole_rows(self, read: DataFrame) -> DataFrame:
        """For source records: the upsert key, and a hash of the whole row."""
        frame = self._of_only(read)
        key = F.expr(id_sql(self._request.sink.capability().write)).alias("id")
        return frame.select(key, F.xxhash64(*[f"`{c}`" for c in frame.columns]).alias("low"))

    def hashed(
        self, spark: SparkSession, scope: Scope, ranges: Sequence[tuple[Positions, Positions]]
    ) -> tuple[DataFrame, bool]:
        """Rows for `reconcile`, and whether their partition and order are known.

        Args:
            ranges: consecutive source ranges, in every partition after those of an earlier call.
        """
        request = self._request
        slices = [piece for start, end in ranges for piece in self.sources.slices(start, end)]
        frame: SliceRows | DataFrame
        if request.transform is None:
            (source,) = request.sources.values()
            frame = SliceRows(spark, source, [s.data[1] for s in slices])
        else:
            frame = self.frame(spark, slices)
        ordered = not slices or isinstance(frame, SliceRows) or keeps_partitions(frame)
        names = [s.partition or f"slice {i}" for i, s in enumerate(slices)]
        at = self.slots.placed(names) if ordered else self.slots.unplaced("all")
        with expressions(request):
            hashes = hashed(
                frame,
                request.sink.records,
                fingerprint_seed(scope),
                at,
                request.id,
                request.key,
                own_sql=request.own,
            )
        # Without a known order the key is dropped, so that order is not judged.
        return (hashes if ordered else hashes.withColumn("key_hash", F.lit(None).cast("long"))), ordered

    def final(
        self, spark: SparkSession, start: Positions, end: Positions | None, planned: Positions, once: Once | None
    ) -> FinalState:
        """The rows that an upsert of a range must leave. Keys that an undecided batch touches are not judged."""
        mode = self._request.sink.capability().write
        if once is not None:
            state = final_state(once.must(), mode, None)
            unclear = state.unclear.union(once.unclear_ids())
        else:
            slices = self.sources.slices(start, end) if end is not None else []
            frame = self.frame(spark, slices)
            names = sorted({s.partition or f"slice {i}" for i, s in enumerate(slices)})
            partitions = [names.index(s.partition or f"slice {i}") for i, s in enumerate(slices)]
            state = final_state(frame, mode, partitions if slices and keeps_partitions(frame) else None)
            unclear = state.unclear
        if planned != end:
            coming = self.frame(spark, self.sources.slices(end or start, planned))
            unclear = unclear.union(coming.select(F.expr(id_sql(mode)).alias("id")))
        return FinalState(state.rows, unclear.distinct(), state.gone)

    def first(
        self,
        spark: SparkSession,
        scope: Scope,
        start: Positions,
        end: Positions | None,
        planned: Positions,
        found: DataFrame,
    ) -> tuple[DataFrame, DataFrame]:
        """Rows for `reconcile` that mode insert must leave, and the ids of keys that only an undecided batch has.

        Of a key whose rows lie in several source partitions, or were shuffled, any row may have come first: expected is
        the one that is there, if it was sent.

        Args:
            found: the sink's rows, for `reconcile`.
        """
        mode = self._request.sink.capability().write
        slices = self.sources.slices(start, end) if end is not None else []
        frame = self.frame(spark, slices)
        names = [s.partition or f"slice {i}" for i, s in enumerate(slices)]
        partition = F.monotonically_increasing_id()  # order unknown: each row its own
        if slices and keeps_partitions(frame):
            partition = F.element_at(F.array(*[F.lit(names.index(n)) for n in names]), F.spark_partition_id() + 1)
        columns = list(map(backquoted, frame.columns))
        placed = frame.select(*columns, partition.alias(_PARTITION), F.monotonically_increasing_id().alias(_AT))
        row = F.struct(*columns)
        by_partition = placed.groupBy(*map(backquoted, mode.keys), _PARTITION).agg(F.min_by(row, _AT).alias(_ROW))
        candidates = self.as_rows(by_partition.select(f"{_ROW}.*"), scope)
        there = found.select("id", "low", F.lit(1).alias("is_there")).distinct()
        best = Window.partitionBy("id").orderBy(F.col("is_there").desc_nulls_last(), "low")
        chosen = candidates.join(there, ["id", "low"], "left").withColumn("nth", F.row_number().over(best))
        sent = chosen.filter("nth = 1").select(candidates.columns)
        coming = self.frame(spark, self.sources.slices(end or start, planned) if planned != end else [])
        ids = coming.select(F.expr(id_sql(mode)).alias("id")).distinct()
        return sent, ids.join(sent.select("id"), "id", "left_anti")

    def as_rows(self, state: DataFrame, scope: Scope, partition: str = "keys") -> DataFrame:
        """Rows for `reconcile`, without partition and order."""
        request = self._request
        seed = fingerprint_seed(scope)
        with expressions(request):
            rows = hashed(state, request.sink.records, seed, self.slots.unplaced(partition), request.id)
        return rows.withColumn("key_hash", F.lit(None).cast("long"))


def _nothing(spark: SparkSession, source: Source) -> DataFrame:
    """A stream with the source's columns, never started."""
    columns = from_arrow_schema(source.schema())
    return spark.readStream.format("rate").load().select(*[F.lit(None).cast(c.dataType).alias(c.name) for c in columns])


@contextmanager
def sent_range(request: AuditRequest) -> Iterator[SentRange]:
    read = SentRange(request)
    try:
        yield read
    finally:
        read.close()


@dataclass(frozen=True)
class FinalState:
    """
    Attributes:
        rows: must be in the sink; without the delete column.
        unclear: ids (by `id_sql`) of keys whose final row the source alone does not determine.
        gone: ids of keys whose last row is a delete; they must not be in the sink, unless unclear.
    """

    rows: DataFrame
    unclear: DataFrame
    gone: DataFrame


def final_state(frame: DataFrame, mode: WriteMode, partitions: Sequence[int] | None) -> FinalState:
    """
    Args:
        frame: every row written to the sink.
        partitions: for each partition of `frame` the index of its source partition, rows in its order; None: rows were
            shuffled.
    """
    version = F.col(backquoted(str(mode.version)))
    gone = F.lit(False) if mode.delete is None else F.coalesce(F.col(backquoted(mode.delete)), F.lit(False))
    partition = F.lit(-1)
    if partitions:
        partition = F.element_at(F.array(*map(F.lit, partitions)), F.spark_partition_id() + 1)
    kept = [c for c in frame.columns if c != mode.delete]
    placed = frame.select(
        *map(backquoted, kept),
        gone.alias(_GONE),
        partition.alias(_PARTITION),
        F.monotonically_increasing_id().alias(_AT),
    )
    by_key = placed.groupBy(*map(backquoted, mode.keys)).agg(
        # Of equal versions the first one wins.
        F.max_by(F.struct(*map(backquoted, kept), _GONE, _AT), F.struct(version, -F.col(_AT))).alias(_ROW),
        F.max(F.when(~F.col(_GONE), F.col(_AT))).alias("newest"),
        F.min(_PARTITION).alias("first_partition"),
        F.max(_PARTITION).alias("last_partition"),
    )
    # A delete discards the key's version: a row of a later batch is inserted again, even if it is older.
    order_known = (F.col("first_partition") == F.col("last_partition")) & F.lit(partitions is not None)
    perhaps_back = F.col("newest").isNotNull() & (~order_known | (F.col("newest") > F.col(f"{_ROW}.{_AT}")))
    unclear = F.col(f"{_ROW}.{_GONE}") & perhaps_back
    rows = by_key.filter(~F.col(f"{_ROW}.{_GONE}")).select(*[F.col(f"{_ROW}.{backquoted(c)}").alias(c) for c in kept])
    key = F.expr(id_sql(mode)).alias("id")
    return FinalState(rows, by_key.filter(unclear).select(key), by_key.filter(f"{_ROW}.{_GONE}").select(key))
