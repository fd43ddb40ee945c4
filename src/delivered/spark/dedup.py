"""Dedup of a stream, by Spark's state or by a table in the database of the sink that decides.

State: helper columns hold the key and the time. Spark's `dropDuplicatesWithinWatermark` keeps one row of state per key
in the checkpoint, until the watermark has passed the first record's time by `within`. The watermark is the newest time
of the earlier batches, minus `within`.

Table: all records of a key meet in one task, before the transform. It looks up which keys earlier batches delivered,
records the new ones, and passes their records on; see `delivered.engine.keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException

from delivered.contract.sink import KEY_BYTES, Sink
from delivered.contract.source import COORDINATES
from delivered.engine.keys import AT, HELPERS, KEY, TIE, without_seen
from delivered.engine.keys import TIME as SEEN_AT
from delivered.model.dedup import Dedup
from delivered.model.errors import InvariantBroken, UsageError
from delivered.model.identity import Scope
from delivered.spark.task import arm, running_batch, running_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_BY = "__delivered_dedup_by_"
ALONE = "__delivered_dedup_alone"
TIME = "__delivered_dedup_time"
_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "date")


def key_columns(dedup: Dedup) -> list[str]:
    """The helper columns that are equal for duplicates, and only for them."""
    return [*(f"{_BY}{i}" for i in range(len(dedup.by))), ALONE]


def helper_columns(dedup: Dedup) -> list[str]:
    return [*key_columns(dedup), TIME]


def is_placed(frame: DataFrame) -> bool:
    """Whether the frame has the columns of a record's position in the source."""
    return all(c in frame.columns for c in COORDINATES)


def with_keys(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The frame with the columns `helper_columns`; rows are neither added nor moved.

    Records without a key are not duplicates of each other: each is keyed by its position in the source. If the source
    has no such columns, they fail the query.

    Raises:
        UsageError: an expression is not SQL over one row of the source, or the time is not a timestamp.
    """
    placed = is_placed(frame)
    missing = " OR ".join(f"{c} IS NULL" for c in key_columns(dedup)[:-1])
    own = "concat_ws('-', `topic`, `partition`, `offset`)" if placed else f"CAST(raise_error('{_KEY_NULL}') AS STRING)"
    # CASE rules out generators and aggregates.
    texts = {**dict(zip(key_columns(dedup), dedup.by, strict=False)), TIME: dedup.time}
    try:
        keyed = frame.selectExpr("*", *[f"CASE WHEN true THEN ({sql}) END AS `{name}`" for name, sql in texts.items()])
        keyed = keyed.selectExpr("*", f"CASE WHEN {missing} THEN {own} END AS `{ALONE}`")
        types: Mapping[str, str] = dict(keyed.dtypes)  # Spark Connect analyses the frame only here
    except (AnalysisException, ParseException) as error:
        raise UsageError(
            "DEDUP_EXPRESSION",
            f"dedup by {dedup.by_text} with time {dedup.time}: {str(error).splitlines()[0]}",
            next_step=f"write SQL over one row of the source; its columns are {', '.join(frame.columns)}",
        ) from None
    if types[TIME] != "timestamp":
        raise UsageError(
            "DEDUP_TIME",
            f"dedup.time is {dedup.time}, of type {types[TIME]}; it must be a timestamp.",
            next_step=f"write CAST({dedup.time} AS TIMESTAMP), or to_timestamp(...) with a format",
        )
    return keyed


_KEY_NULL = (
    "[DELIVERED_DEDUP_KEY_NULL] A record has no key: an expression of dedup.by is null, and this source has no columns "
    "topic, partition and offset to identify such records. Next: use coalesce(...) in dedup.by"
)


def without_repeats(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The stream without duplicates; columns unchanged. Raises as `with_keys`."""
    keyed = with_keys(frame, dedup).withWatermark(TIME, dedup.within)
    return keyed.dropDuplicatesWithinWatermark(key_columns(dedup)).drop(*helper_columns(dedup))


def without_seen_repeats(frame: DataFrame, dedup: Dedup, sink: Sink, scope: Scope, shards: int) -> DataFrame:
    """The stream without duplicates; columns unchanged. Raises as `with_keys`.

    Args:
        sink: the sink that decides.
        scope: of that sink, still without an incarnation.
        shards: number of partitions that the keys are hashed to; for two_phase, the same when a batch runs again.
    """
    schema = frame.schema
    columns = [f"`{c.replace('`', '``')}`" for c in frame.columns]
    keyed = with_keys(frame, dedup)
    types = dict(keyed.dtypes)
    parts = [f"coalesce({_text(dedup.by[i], types[n], n)}, '')" for i, n in enumerate(key_columns(dedup)[:-1])]
    missing = " OR ".join(f"`{n}` IS NULL" for n in key_columns(dedup)[:-1])
    digest = f"unhex(substr(sha2(CAST(concat_ws(',', {', '.join(parts)}) AS BINARY), 256), 1, {2 * KEY_BYTES}))"
    if is_placed(frame):
        at, tie = "`offset`", "xxhash64(`topic`, `partition`, `offset`)"
    else:
        plain = [c for c, (_, kind) in zip(columns, frame.dtypes, strict=True) if "map<" not in kind]
        at, tie = "0", f"xxhash64({', '.join(plain)})"
    keyed = keyed.selectExpr(
        *columns,
        f"CASE WHEN {missing} THEN NULL ELSE {digest} END AS {KEY}",
        f"unix_micros({TIME}) AS {SEEN_AT}",
        f"CAST({at} AS BIGINT) AS {AT}",
        f"{tie} AS {TIE}",
    )
    # Records without a key are never duplicates, so they can go to any partition.
    meeting = keyed.selectExpr("*", f"coalesce({KEY}, unhex(hex({TIE}))) AS __delivered_seen_meet")
    meeting = meeting.repartition(shards, "__delivered_seen_meet").drop("__delivered_seen_meet")
    task = _Task(sink, scope, dedup.within_ms * 1_000)
    return meeting.select(*columns, *HELPERS).mapInArrow(task, schema)


def _text(value: str, kind: str, column: str) -> str:
    """A text unique per value, whatever the session's time zone; null stays null."""
    if kind in ("string", "binary"):
        return f"hex(`{column}`)"
    if kind in _AS_TEXT or kind.startswith("decimal"):
        return f"CAST(`{column}` AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros(`{column}`) AS STRING)"
    raise UsageError(
        "DEDUP_KEY_TYPE",
        f"dedup.by has {value}, of type {kind}; a table of keys supports string, binary, integers, decimal, boolean, "
        "date and timestamp.",
        next_step=f"write CAST({value} AS STRING), or to_json({value})",
    )


@dataclass(frozen=True)
class _Task:
    """Picklable; holds no connection."""

    sink: Sink
    scope: Scope
    within_us: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arm(self.scope.pipeline)
        query, batch = running_batch(running_task())
        if batch is None or query is None:
            raise InvariantBroken("NO_TASK", "Dedup runs outside a streaming query's task.")
        with closing(self.sink.key_memory(replace(self.scope, incarnation=query))) as memory:
            yield from without_seen(memory, int(batch), self.within_us, rows)
