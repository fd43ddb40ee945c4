"""Rows that must be in a sink and rows that are there, joined by what identifies them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import DecimalType, DoubleType, FloatType, StructType
from pyspark.sql.window import Window

from delivered.audit.evidence import Counts, Damage, Sample
from delivered.audit.request import AuditRequest, Recompute, id_sql
from delivered.audit.spark.source import expressions, record_columns
from delivered.model.capability import WriteMode
from delivered.model.ranges import backquoted
from delivered.spark.internals import from_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FLOAT_TOLERANCE = 1e-9
"""Relative: sums of floating-point numbers depend on the order of the rows. Decimals are compared exactly."""

_ID, _COPY, _MUST, _THERE = (f"__delivered_{n}" for n in ("id", "copy", "must", "there"))


def _typed(frame: DataFrame, written: StructType, like: StructType | None = None) -> DataFrame:
    """Rows in comparable form: decimals with all their digits, everything else as the sink stores it.

    Args:
        written: columns before the sink took them: a sink may store decimals as text.
        like: the other side's resulting columns; None: this is the first side.
    """
    columns = []
    for field in frame.schema.fields:
        column, kind = F.col(backquoted(field.name)), field.dataType
        before = written[field.name].dataType if field.name in written.names else None
        if isinstance(before, DecimalType):
            kind = DecimalType(38, 38 - (before.precision - before.scale))
        elif "map<" in kind.simpleString():
            column = F.to_json(F.struct(column))  # maps have no order
        elif like is not None:
            kind = like[field.name].dataType
        columns.append((column if kind == field.dataType else column.try_cast(kind)).alias(field.name))
    return frame.select(*columns)


def _identity(request: AuditRequest, how: Recompute, mode: WriteMode, columns: Sequence[str]) -> tuple[str | None, str]:
    """SQL that identifies a row, and its name in a report; None: all columns do."""
    if mode.upserts:
        return id_sql(mode), f"key ({mode.keys_text})"
    if request.id is not None:
        return request.id, f"`{request.id}`"
    if how.keys and set(how.keys) <= set(columns):
        keys = WriteMode(keys=how.keys)
        return id_sql(keys), f"key ({keys.keys_text})"
    return None, "all columns"


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        joined: rows of both sides, by id.
        schema: the columns that are compared.
        identified_by: what identifies a row, for the report.
    """

    joined: DataFrame
    schema: StructType
    identified_by: str

    def counts(self) -> tuple[Counts, list[tuple[str, int]]]:
        """Rows by what is wrong with them, and by column how many differ in it."""
        both = F.col(_MUST).isNotNull() & F.col(_THERE).isNotNull()
        (row,) = self.joined.agg(
            F.count(_MUST).alias("sent"),
            F.count(_THERE).alias("delivered"),
            *[F.count_if(condition).alias(damage.value) for damage, condition in _damage(self.schema).items()],
            *[
                F.count_if(both & _differs(name, self.schema)).alias(f"column {i}")
                for i, name in enumerate(self.schema.names)
            ],
        ).collect()
        counts = Counts(**{k: int(v) for k, v in row.asDict().items() if not k.startswith("column ")})
        columns = [(name, int(row[f"column {i}"])) for i, name in enumerate(self.schema.names)]
        return counts, [(name, count) for name, count in columns if count]

    def samples(self, counts: Counts, samples_max: int) -> tuple[Sample, ...]:
        sides = [F.col(side).isNotNull().cast("int").alias(side) for side in (_MUST, _THERE)]
        return tuple(
            Sample(damage, row[_ID], None, None, None, row[_MUST], row[_THERE])
            for damage, condition in _damage(self.schema).items()
            if counts.of(damage)
            for row in self.joined.where(condition).orderBy(_ID, _COPY).limit(samples_max).select(_ID, *sides).collect()
        )


@contextmanager
def compare(
    request: AuditRequest, how: Recompute, mode: WriteMode, expected: DataFrame, stored: DataFrame
) -> Iterator[Comparison]:
    """Both sides, joined and persisted while the context is open."""
    schema = record_columns(request, expected, stored.columns)
    records = request.sink.records

    def canonical(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield records(batch)

    must = _typed(expected.mapInArrow(canonical, from_arrow(schema)), expected.schema)
    there = _typed(stored.select(*map(backquoted, schema.names)), expected.schema, must.schema)
    identity, identified_by = _identity(request, how, mode, schema.names)
    with expressions(request):
        joined = _joined(must, there, identity).persist(StorageLevel.DISK_ONLY)
    try:
        yield Comparison(joined, must.schema, identified_by)
    finally:
        joined.unpersist()


def _joined(must: DataFrame, there: DataFrame, identity: str | None) -> DataFrame:
    """Rows of both sides by id; copies of one id are numbered."""
    content = F.to_json(F.struct(*map(backquoted, must.columns)))

    def side(frame: DataFrame, name: str) -> DataFrame:
        id_ = F.coalesce(F.expr(identity).cast("string"), content) if identity else content
        columns = [*map(backquoted, frame.columns)]
        copies = Window.partitionBy(_ID).orderBy(F.xxhash64(*columns))
        row = frame.select(id_.alias(_ID), F.struct(*columns).alias(name), *columns)
        return row.select(_ID, name, F.row_number().over(copies).alias(_COPY))

    return side(must, _MUST).join(side(there, _THERE), [_ID, _COPY], "full_outer")


def _differs(name: str, schema: StructType) -> Column:
    sent, stored = (F.col(side)[name] for side in (_MUST, _THERE))
    differs = ~sent.eqNullSafe(stored)
    if isinstance(schema[name].dataType, FloatType | DoubleType):
        near = F.abs(sent - stored) <= FLOAT_TOLERANCE * F.greatest(F.abs(sent), F.abs(stored))
        differs = differs & ~F.coalesce(near, F.lit(False))
    return differs


def _damage(schema: StructType) -> dict[Damage, Column]:
    must, there = F.col(_MUST).isNotNull(), F.col(_THERE).isNotNull()
    differs = F.lit(False)
    for name in schema.names:
        differs = differs | _differs(name, schema)
    return {
        Damage.LOST: must & ~there,
        Damage.DUPLICATED: there & ~must & (F.col(_COPY) > 1),
        Damage.ALTERED: must & there & differs,
        Damage.UNEXPECTED: there & ~must & (F.col(_COPY) == 1),
    }
