"""A range of a delivered source as a DataFrame: one Spark partition per slice, in the order of the slices.

Bypasses the registered formats, so that any two offsets can be read and partition i of the frame is slice i: the audit
reports where records came from even if the transform dropped these columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice, Source
from delivered.model.rows import fitted
from delivered.spark.internals import Setting, from_arrow, logical_plan, physical_plan, to_arrow
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_NARROW = frozenset(
    {
        "AdaptiveSparkPlan",
        "ArrowEvalPython",
        "BatchEvalPython",
        "BatchScan",
        "ColumnarToRow",
        "DeserializeToObject",
        "Filter",
        "Generate",
        "InputAdapter",
        "MapElements",
        "MapInArrow",
        "MapInPandas",
        "MapPartitions",
        "Project",
        "PythonMapInArrow",
        "Range",
        "Scan",
        "SerializeFromObject",
        "WholeStageCodegen",
    }
)
"""Operators that keep every row in its partition, in order. Any other may move rows."""

_ROW_BY_ROW = frozenset(
    {
        *("CTERelationDef", "CTERelationRef", "DeserializeToObject", "EventTimeWatermark", "Filter", "Generate"),
        *("LocalRelation", "LogicalRDD", "MapElements", "MapInArrow", "MapInPandas", "MapPartitions", "Project"),
        *("Range", "Repartition", "RepartitionByExpression", "SerializeFromObject", "SubqueryAlias", "Union", "View"),
        "WithCTE",
    }
)
"""Logical operators whose output for a row depends on that row only."""

_SUBQUERY = re.compile(r"\b(list|exists|scalar-subquery)#")

_SHUFFLE_ROWS = 200_000
"""Rows of about 100 bytes per shuffle partition."""
_SHUFFLE_PARTITIONS_MAX = 10_000

Mapper = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]

_OPERATOR = re.compile(r"^[\s:+*|-]*(?:\(\d+\)\s*)?([A-Za-z]+)")


class SliceRows:
    """Every record of `slices`, read lazily. For classic sessions and Spark Connect."""

    def __init__(
        self, spark: SparkSession, source: Source | BoundedScan, slices: Sequence[Slice], *, rejects: bool = False
    ) -> None:
        """Args: rejects: records of which the source can make no row are skipped, instead of failing the read."""
        self._spark, self._source, self._slices = spark, source.planned(), list(slices)
        self._read = self._source.read_good if rejects and isinstance(self._source, Source) else self._source.read
        self.schema = from_arrow(self._source.schema())

    def mapInArrow(self, function: Mapper, schema: StructType) -> DataFrame:  # noqa: N802
        """As `DataFrame.mapInArrow`, in the reading process: the records never become JVM rows."""
        if not self._slices:
            return self._spark.createDataFrame([], schema)
        reading = _reader(self._read, self._slices, to_arrow(self.schema))

        def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return function(reading(numbers))

        return self._spark.range(0, len(self._slices), 1, len(self._slices)).mapInArrow(read, schema)


def slice_frame(
    spark: SparkSession, source: Source | BoundedScan, slices: Sequence[Slice], *, rejects: bool = False
) -> DataFrame:
    """Every record of `slices`, read on the executors."""
    rows = SliceRows(spark, source, slices, rejects=rejects)
    return rows.mapInArrow(lambda batches: batches, rows.schema)


def _reader(read_slice: Callable[[Slice], Iterator[pa.RecordBatch]], slices: list[Slice], schema: pa.Schema) -> Mapper:
    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for records in read_slice(slices[number]):
                    yield fitted(records, schema)

    return read


def kept_plain(spark: SparkSession) -> AbstractContextManager[None]:
    """Persist frames uncompressed, while the context is open.

    Choosing a compression per column costs an audit more than it saves: 9.8 s of CPU in the step that persists 336,776
    classified records, 6.0 s without (4.3.0, two cores).
    """
    return with_setting(spark, Setting.CACHE_COMPRESSED, "false")


def shuffles_fit_for(spark: SparkSession, rows: int) -> AbstractContextManager[None]:
    """Size shuffles for this number of small rows, while the context is open.

    Even an empty partition costs 10 to 20 ms in each of the audit's shuffles: with Spark's default of 200, that is most
    of the time of a small audit.
    """
    partitions = min(max(1, -(-rows // _SHUFFLE_ROWS)), _SHUFFLE_PARTITIONS_MAX)
    return with_setting(spark, Setting.SHUFFLE_PARTITIONS, str(partitions))


def keeps_partitions(frame: DataFrame) -> bool:
    """Whether partition i of `frame` holds rows of partition i of its input, in order."""
    operators = _operators(frame)
    return bool(operators) and operators <= _NARROW


def beyond_rows(frame: DataFrame) -> list[str]:
    """Operations of a query beyond row-by-row steps and unions of their results: ["Join"]. Runs nothing."""
    text = logical_plan(frame)
    operators = {m.group(1) for line in text.splitlines() if (m := _OPERATOR.match(line))} - _ROW_BY_ROW
    return sorted(operators | set(_SUBQUERY.findall(text)))


def _operators(frame: DataFrame) -> set[str]:
    lines = physical_plan(frame).splitlines()
    return {m.group(1) for line in lines if not line.startswith("==") and (m := _OPERATOR.match(line))}
