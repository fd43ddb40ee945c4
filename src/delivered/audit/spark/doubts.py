"""What only a job can tell of a recomputation: records dropped as late, rows that a deduplication could choose from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import StructType, TimestampType

from delivered.audit.dedup import Stretch, stretches
from delivered.audit.recompute import GONE, Doubt, Recompute, Way, doubts, operators
from delivered.audit.request import AuditRequest
from delivered.audit.sources import Positions
from delivered.audit.spark.sent import SentRange
from delivered.checkpoint.folder import batch_metadata
from delivered.model.capability import WriteMode
from delivered.model.ranges import backquoted
from delivered.model.work import Decision
from delivered.spark.frames import keeps_partitions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_COPY, _ROW, _STRETCH, _TIME = (f"__delivered_{n}" for n in ("copy", "row", "stretch", "time"))
_WATERMARK = "spark.watermarkDelayMs"
"""Spark's, in the metadata of a column: it is event time, or the window of one."""
_WINDOW_END = re.compile(r"#\d+-T\d+ms\.end AS ([^#,]+)#")
"""In Spark's plan: a column that is the end of an event-time window."""


@dataclass(frozen=True)
class Query:
    """What is recomputed.

    Attributes:
        stream: the transform over streams without rows.
        plan: its plan.
        start, end: of the source range.
        ends: (batch, its end) as far as the ledger keeps them, oldest first.
        visible: the newest decision that must be in the sink.
        left_out: rows that the table did not take, by kind, as the ledger counts them.
    """

    request: AuditRequest
    how: Recompute
    mode: WriteMode
    sent: SentRange
    stream: DataFrame
    plan: str
    start: Positions
    end: Positions
    ends: Sequence[tuple[int, Positions]]
    visible: Decision
    left_out: Mapping[str, int]

    @property
    def parts(self) -> list[Stretch]:
        return stretches(self.start, self.ends, self.end)

    def doubts(self, way: Way) -> list[Doubt]:
        return doubts(self.how, self.plan, self.mode, way)


def closed(query: Query) -> Column | None:
    """Whether the newest batch's watermark has closed a row of an aggregation; None: no column shows it."""
    times = {f.name: f for f in query.stream.schema.fields if _WATERMARK in (f.metadata or {})}
    ends = _WINDOW_END.findall(query.plan.splitlines()[0])
    logged = batch_metadata(query.request.checkpoint, query.visible.batch)
    if len({*times, *ends}) != 1 or logged is None or "Aggregate" not in operators(query.plan):
        return None
    column = F.col(backquoted([*times, *ends][0]))
    if times and isinstance(next(iter(times.values())).dataType, StructType):
        column = column["end"]
    return column <= F.timestamp_millis(F.lit(int(logged["batchWatermarkMs"])))


@dataclass(frozen=True)
class Call:
    """A call of a DataFrame's method in a transform."""

    frame: DataFrame
    arguments: dict[str, Any]


@contextmanager
def recorded(*methods: str) -> Iterator[list[Call]]:
    """Record calls of these methods of a DataFrame while the context is open: of a batch, Spark drops watermarks from
    the plan."""
    found: list[Call] = []
    with ExitStack() as undo:
        for kind in ("classic", "connect"):
            try:
                owner = import_module(f"pyspark.sql.{kind}.dataframe").DataFrame
            except ImportError:  # without grpcio
                continue
            for method in methods:
                original = getattr(owner, method)

                def noted(self: Any, *args: Any, then: Any = original, **kwargs: Any) -> Any:
                    arguments = dict(inspect.signature(then).bind(self, *args, **kwargs).arguments)
                    found.append(Call(arguments.pop("self"), arguments))
                    return then(self, *args, **kwargs)

                setattr(owner, method, noted)
                undo.callback(setattr, owner, method, original)
        yield found


def _stretch(numbers: Sequence[int]) -> Column:
    """The stretch of the source range that a row of a Spark partition comes from."""
    return F.element_at(F.array(*map(F.lit, numbers)), F.spark_partition_id() + 1).alias(_STRETCH)


def of_watermark(calls: Sequence[Call], numbers: Sequence[int], parts: Sequence[Stretch], query: Query) -> list[Doubt]:
    """Whether a record may have been dropped as late: no newer than the newest one of earlier batches, minus the delay.

    Output mode complete drops none.
    """
    if "EventTimeWatermark" not in operators(query.plan) or query.how.output_mode == "complete":
        return []
    if len(calls) != 1 or not numbers or not keeps_partitions(calls[0].frame):
        return [Doubt("records may have been dropped as late, depending on where batches ended", GONE)]
    below, column, delay = calls[0].frame, calls[0].arguments["eventTime"], calls[0].arguments["delayThreshold"]
    spans = (
        below.select(_stretch(numbers), F.col(column).cast(TimestampType()).alias(_TIME))
        .groupBy(_STRETCH)
        .agg(
            F.unix_micros(F.min(_TIME)).alias("low"),
            F.unix_micros(F.max(_TIME) - F.expr(f"INTERVAL '{delay}'")).alias("mark"),
        )
    )
    mark, late = 0, 0
    for row in sorted(spans.where("low IS NOT NULL").collect(), key=lambda r: int(r[_STRETCH])):
        after = max(mark, row["mark"])
        late += row["low"] <= (after if parts[row[_STRETCH]].several else mark)
        mark = after
    if not late:
        return []
    return [Doubt(f"{late} of {len(parts)} batches hold records that may have been dropped as late", GONE)]


def of_copies(spark: SparkSession, query: Query) -> list[Doubt]:
    """Whether a batch holds rows of one key that differ: which of them dropDuplicates keeps depends on their order."""
    slices, numbers = query.sent.cut(query.parts)
    with recorded("dropDuplicates", "dropDuplicatesWithinWatermark") as calls:
        query.sent.frame(spark, slices)
    if not calls or not all(keeps_partitions(c.frame) for c in calls):
        return [Doubt("which of several rows with one key stays depends on their order within a batch")]
    unlike = 0
    for call in calls:
        subset = call.arguments.get("subset") or call.frame.columns
        row = F.xxhash64(F.to_json(F.struct(*map(backquoted, call.frame.columns))))
        by_key = call.frame.select(_stretch(numbers), *map(backquoted, subset), row.alias(_ROW))
        grouped = by_key.groupBy(_STRETCH, *map(backquoted, subset)).agg((F.min(_ROW) != F.max(_ROW)).alias(_COPY))
        unlike += grouped.where(_COPY).count()
    if not unlike:
        return []
    return [Doubt(f"{unlike:,} keys have rows in one batch that differ: which one stays depends on their order")]
