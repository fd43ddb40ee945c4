"""The source side of an audit: ranges of it, as the sink was given them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.contract.source import Offsets, Slice
from delivered.engine.shard import fingerprint_seed
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.spark.audit_dedup import Judged, Once, cut, stretches
from delivered.spark.audit_spec import AuditSpec, expressions
from delivered.spark.final_state import FinalState, final_state, id_sql
from delivered.spark.frames import SliceRows, keeps_partitions, slice_frame
from delivered.spark.offset_metadata import stream_driver
from delivered.spark.reconcile import Slots, hashed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SentRange:
    """The source side: ranges of it, transformed, with the names of its partitions."""

    def __init__(self, spec: AuditSpec) -> None:
        self._spec = spec
        self._driver = stream_driver(spec.source, spec.checkpoint, writes=False)

        self.slots = Slots()

    def initial(self) -> Offsets:
        return self._driver.initial()

    def close(self) -> None:
        self._driver.close()

    def frame(self, spark: SparkSession, slices: Sequence[Slice]) -> DataFrame:
        """What the sink was given of a range; no slices: for the columns alone."""
        return self._transformed(slice_frame(spark, self._spec.source, slices))

    def _transformed(self, read: DataFrame) -> DataFrame:
        return read if self._spec.transform is None else self._spec.transform(read)

    @contextmanager
    def once(
        self,
        spark: SparkSession,
        scope: Scope,
        start: Offsets,
        ends: Sequence[tuple[int, Offsets]],
        end: Offsets | None,
    ) -> Iterator[Once]:
        """A range without its repeats, for as long as it is read.

        Args:
            ends: (batch, its end) as far as the ledger keeps them.
        """
        spec = self._spec
        if spec.dedup is None:
            raise DeliveredError("AUDIT_DEDUP", "The pipeline drops no repeats.")
        upserts = spec.sink.capability().write.upserts
        parts = stretches(start, ends, end) if end is not None else []
        slices, numbers = cut(self._driver, parts)
        read = slice_frame(spark, spec.source, slices)
        with closing(Judged(read, numbers, parts, spec.dedup, named=spec.id is not None)) as judged:
            rows = self._whole_rows if upserts else lambda frame: self.as_rows(self._transformed(frame), scope, "all")
            with closing(Once(judged, rows, self._transformed)) as once:
                yield once

    def _whole_rows(self, read: DataFrame) -> DataFrame:
        """Of records of the source: the key of an upsert, and a hash of all that it is given."""
        frame = self._transformed(read)
        key = F.expr(id_sql(self._spec.sink.capability().write)).alias("id")
        return frame.select(key, F.xxhash64(*[f"`{c}`" for c in frame.columns]).alias("low"))

    def hashed(
        self, spark: SparkSession, scope: Scope, ranges: Sequence[tuple[Offsets, Offsets]]
    ) -> tuple[DataFrame, bool]:
        """Rows for `reconcile`, and whether their partition and order are known.

        Args:
            ranges: of the source, one after the other; in every partition after those of an earlier call.
        """
        spec = self._spec
        slices = [piece for start, end in ranges for piece in self._driver.slices(start, end)]
        rows = SliceRows(spark, spec.source, slices)
        frame = rows if spec.transform is None else self.frame(spark, slices)
        ordered = not slices or isinstance(frame, SliceRows) or keeps_partitions(frame)
        names = [s.partition or f"slice {i}" for i, s in enumerate(slices)]
        at = self.slots.placed(names) if ordered else self.slots.unplaced("all")
        with expressions(spec):
            hashes = hashed(
                frame,
                spec.sink.records,
                fingerprint_seed(scope),
                at,
                spec.id,
                spec.key,
                own_sql=spec.own,
            )
        # Without a known order the key is dropped, so that none is judged.
        return (hashes if ordered else hashes.withColumn("key_hash", F.lit(None).cast("long"))), ordered

    def final(
        self, spark: SparkSession, start: Offsets, end: Offsets | None, planned: Offsets, once: Once | None
    ) -> FinalState:
        """What an upsert of a range must leave. Nothing is said of keys that a batch touches which is not decided."""
        mode = self._spec.sink.capability().write
        if once is not None:
            state = final_state(once.must(), mode, None)
            unclear = state.unclear.union(once.unclear_ids())
        else:
            slices = self._driver.slices(start, end) if end is not None else []
            frame = self.frame(spark, slices)
            names = sorted({s.partition or f"slice {i}" for i, s in enumerate(slices)})
            partitions = [names.index(s.partition or f"slice {i}") for i, s in enumerate(slices)]
            state = final_state(frame, mode, partitions if slices and keeps_partitions(frame) else None)
            unclear = state.unclear
        if planned != end:
            coming = self.frame(spark, self._driver.slices(end or start, planned))
            unclear = unclear.union(coming.select(F.expr(id_sql(mode)).alias("id")))
        return FinalState(state.rows, unclear.distinct(), state.gone)

    def as_rows(self, state: DataFrame, scope: Scope, partition: str = "keys") -> DataFrame:
        """Rows for `reconcile`, of no partition and no order."""
        spec = self._spec
        seed = fingerprint_seed(scope)
        with expressions(spec):
            rows = hashed(state, spec.sink.records, seed, self.slots.unplaced(partition), spec.id)
        return rows.withColumn("key_hash", F.lit(None).cast("long"))


@contextmanager
def sent_range(spec: AuditSpec) -> Iterator[SentRange]:
    read = SentRange(spec)
    try:
        yield read
    finally:
        read.close()
