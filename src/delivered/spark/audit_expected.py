"""Compare-and-set in a replay: which rows met the version that they expect, judged in order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.audit.recompute import Doubt
from delivered.kits.sql.conditional import CONFLICT
from delivered.model.columns import backquoted
from delivered.spark.audit_doubts import Query
from delivered.spark.frames import keeps_partitions
from delivered.spark.replay import AT, BATCH

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_HELD, _MISSED, _WAS, _NOW = (f"__delivered_{n}" for n in ("held", "missed", "was", "now"))


def met(spark: SparkSession, frame: DataFrame, query: Query) -> tuple[DataFrame, list[Doubt], DataFrame | None]:
    """What a table that was empty holds after all batches.

    The ledger counts the rows that missed their version. If the recomputation counts none and neither does the ledger,
    every row was written, whatever others did to the table.

    Args:
        frame: rows with their places.

    Returns:
        the rows, doubts about them, and keys whose rows may have come in another order; None: there are none.
    """
    mode, name = query.mode, str(query.mode.expected)
    keys = [*map(backquoted, mode.keys)]
    version = F.col(backquoted(str(mode.version)))
    kind = frame.schema[str(mode.version)].dataType
    row = F.struct(BATCH, AT, F.col(backquoted(name)).cast(kind).alias(_WAS), version.alias(_NOW))
    empty = _state(F.lit(None).cast(kind), F.lit(None).cast("int"), F.lit(None).cast("bigint"), F.lit(0))
    held = F.aggregate(F.array_sort(F.collect_list(row)), empty, _after).alias(_HELD)
    by_key = frame.groupBy(*keys).agg(held).select(f"{_HELD}.*")
    missed = int(by_key.agg(F.coalesce(F.sum(_MISSED), F.lit(0))).collect()[0][0])
    rows = frame.join(by_key.where(F.col(BATCH).isNotNull()).select(BATCH, AT), [BATCH, AT]).drop(BATCH, AT, name)
    counted, found = query.left_out.get(CONFLICT, 0), []
    if counted != missed:
        found.append(
            Doubt(
                f"the ledger counts {counted:,} rows that did not find their {name} in the table, the recomputation "
                f"{missed:,}: others wrote to the table, or it held rows before",
                always=True,
            )
        )
    elif counted:
        found.append(Doubt(f"{counted:,} rows did not find their {name} in the table: others may have written to it"))
    several = frame.groupBy(*keys, BATCH).count().where("count > 1")
    slices, _ = query.sent.cut(query.parts)
    return rows, found, None if keeps_partitions(query.sent.frame(spark, slices)) else several


def _state(now: Column, batch: Column, at: Column, missed: Column) -> Column:
    """The version that stands, the place of its row (null: no row), and how many rows missed theirs."""
    return F.struct(now.alias(_NOW), batch.alias(BATCH), at.alias(AT), missed.alias(_MISSED))


def _after(held: Column, row: Column) -> Column:
    found = F.coalesce(held[_NOW] == row[_WAS], F.lit(False))
    return F.when(
        F.when(row[_WAS].isNull(), held[BATCH].isNull()).otherwise(found),
        _state(row[_NOW], row[BATCH], row[AT], held[_MISSED]),
    ).otherwise(_state(held[_NOW], held[BATCH], held[AT], held[_MISSED] + 1))
