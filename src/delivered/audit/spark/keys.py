"""Rows of one share of the keys, in Spark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    StringType,
    StructType,
)

from delivered.audit.keys import KeyShare
from delivered.audit.request import AuditRequest
from delivered.audit.spark.reconcile import canonical_schema
from delivered.model.ranges import backquoted
from delivered.spark.internals import from_arrow, physical_plan

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SHARE = "xxhash64("
_OPERATOR = re.compile(r"^[\s:+*|-]*(?:\(\d+\)\s*)?([A-Za-z]+)(.*)")
_UNSPECIFIC = frozenset(
    {
        "AdaptiveSparkPlan",
        "BatchScan",
        "ColumnarToRow",
        "Filter",
        "InputAdapter",
        "Project",
        "Range",
        "WholeStageCodegen",
    }
)
_SOURCE = ("MapInArrow", "PythonMapInArrow")
FROM_SOURCE = "from the rows of the source, before the transform combines them"
FROM_TRANSFORM = "from the rows of the transform"
FROM_RECORDS = "from the rows of the transform as the sink stores them"


def bucket(values: Sequence[Column], of: int) -> Column:
    """The number, from 1, of the share of a key.

    XXH64 with Spark's seed, over strings and bytes as they are, integers of any width as 64 bits, and so on: the same
    key has the same share in every run, and on both sides of an audit.
    """
    return F.pmod(F.xxhash64(*values), F.lit(of)).cast("int") + F.lit(1)


def _like(kind: DataType) -> str:
    """What a type is to `_value`; empty: both sides of an audit may have it in different forms."""
    match kind:
        case StringType() | BinaryType():
            return "bytes"
        case IntegralType():
            return "integer"
        case BooleanType() | DateType():
            return kind.typeName()
        case _:
            return ""


def _value(name: str, kind: DataType) -> Column:
    column = F.col(backquoted(name))
    return column.cast("bigint") if isinstance(kind, IntegralType) else column


class SharedKeys:
    """Drops rows of other shares.

    Where a key has the same form on both sides, whatever the sink makes of it, by the columns of the transform's rows:
    Spark moves such a condition below an aggregation by them, and down to the rows of the source, if that changes no
    result. Otherwise by the text that identifies a row in the audit, of both sides as the sink stores them.

    Args:
        names: the key's columns; empty: it is an expression.
        sent: columns before the sink takes them; stored: of the sink; records: of `sent`, as the sink stores them.
    """

    def __init__(
        self, share: KeyShare, names: Sequence[str], sent: StructType, records: StructType, stored: StructType
    ) -> None:
        self.share, self._names = share, names
        self.by_columns = bool(names) and all(
            n in s.names and _like(s[n].dataType) and _like(s[n].dataType) == _like(sent[n].dataType)
            for n in names
            for s in (sent, records, stored)
        )

    def rows(self, frame: DataFrame) -> DataFrame:
        """Rows of the transform or of the sink."""
        if not self.by_columns:
            return frame
        return frame.where(self.number(frame) == F.lit(self.share.number))

    def number(self, frame: DataFrame) -> Column:
        """The share of a row's key, by its columns."""
        return bucket([_value(n, frame.schema[n].dataType) for n in self._names], self.share.of)

    def identified(self, frame: DataFrame, id_column: str) -> DataFrame:
        """Rows with the text that identifies them."""
        if self.by_columns:
            return frame
        return frame.where(bucket([F.col(id_column)], self.share.of) == F.lit(self.share.number))

    def selected(self, frame: DataFrame) -> str:
        """Where Spark drops the rows of other shares, for a report."""
        if not self.by_columns:
            return FROM_RECORDS
        return FROM_SOURCE if _is_lowest(physical_plan(frame)) else FROM_TRANSFORM


def _is_lowest(plan: str) -> bool:
    """Whether the condition on the share stands right above the reading of each source."""
    lines = [m for line in plan.splitlines() if not line.startswith("==") and (m := _OPERATOR.match(line))]
    below = [m[1] for m in lines if m[1] not in _UNSPECIFIC or _SHARE in m[2]]
    at = [i for i, m in enumerate(below) if m == "Filter"]
    reads = [i for i, name in enumerate(below) if name in _SOURCE]
    return bool(at) and len(at) == len(reads) and all(r == a + 1 for a, r in zip(at, reads, strict=True))


def shared_keys(request: AuditRequest, names: Sequence[str], sent: DataFrame, stored: StructType) -> SharedKeys | None:
    """The rows that an audit compares; None: all.

    Args:
        names: the key's columns; empty: it is an expression.
        sent: a frame with the columns that are written to the sink.
    """
    share, mode = request.keys, request.write_mode
    if share is None:
        return None
    # Which rows were written depends on rows of other keys, or is counted for all keys together.
    together = bool(mode.replaces) or mode.expected is not None
    records = from_arrow(canonical_schema(sent.schema, request.sink.records))
    return SharedKeys(share, () if together else names, sent.schema, records, stored)
