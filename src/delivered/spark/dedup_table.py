"""Dedup of a stream by a table in the database of the sink that decides.

All records of a key meet in one task, before the transform. It asks the table which keys earlier batches delivered,
notes those that get in, and gives on their records; see `delivered.engine.repeats`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext

from delivered.contract.powers import KEY_BYTES, Remembers
from delivered.contract.sink import Sink
from delivered.engine.repeats import AT, HELPERS, KEY, TIE, TIME, without_seen
from delivered.model.dedup import Dedup
from delivered.model.errors import InvariantBroken, UsageError
from delivered.model.identity import Scope
from delivered.spark.crash import arm
from delivered.spark.dedup import TIME as WHEN
from delivered.spark.dedup import is_placed, key_columns, with_keys

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "date")


def without_seen_repeats(
    frame: DataFrame, dedup: Dedup, sink: Sink, pipeline: str, sink_name: str, shards: int
) -> DataFrame:
    """The stream without repeats; columns as before. Raises as `with_keys`.

    Args:
        sink: that decides, and under which name.
        shards: partitions into which the keys are put; for two_phase, the same when a batch runs again.
    """
    if not isinstance(sink, Remembers):
        raise InvariantBroken("DEDUP_MEMORY", f"The sink {sink_name!r} keeps no table of keys.")
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
        f"unix_micros({WHEN}) AS {TIME}",
        f"CAST({at} AS BIGINT) AS {AT}",
        f"{tie} AS {TIE}",
    )
    # Records without a key are nobody's repeat: they need not meet.
    meeting = keyed.selectExpr("*", f"coalesce({KEY}, unhex(hex({TIE}))) AS __delivered_seen_meet")
    meeting = meeting.repartition(shards, "__delivered_seen_meet").drop("__delivered_seen_meet")
    task = _Task(sink, pipeline, sink_name, dedup.within_ms * 1_000)
    return meeting.select(*columns, *HELPERS).mapInArrow(task, schema)


def _text(given: str, kind: str, column: str) -> str:
    """One text for one value, whatever the session's time zone; null stays null."""
    if kind in ("string", "binary"):
        return f"hex(`{column}`)"
    if kind in _AS_TEXT or kind.startswith("decimal"):
        return f"CAST(`{column}` AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros(`{column}`) AS STRING)"
    raise UsageError(
        "DEDUP_KEY_TYPE",
        f"dedup is by {given}, of type {kind}; a table of keys takes string, binary, whole numbers, decimal, boolean, "
        "date and timestamp.",
        next_step=f"write CAST({given} AS STRING), or to_json({given})",
    )


@dataclass(frozen=True)
class _Task:
    """What a task needs. Picklable, no connection."""

    sink: Remembers
    pipeline: str
    sink_name: str
    within_us: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arm()
        task = TaskContext.get()
        batch = task.getLocalProperty("streaming.sql.batchId") if task is not None else None
        query = task.getLocalProperty("sql.streaming.queryId") if task is not None else None
        if batch is None or query is None:
            raise InvariantBroken("NO_TASK", "Repeats are looked for outside of a streaming query's task.")
        with closing(self.sink.key_memory(Scope(self.pipeline, self.sink_name, query))) as memory:
            yield from without_seen(memory, int(batch), self.within_us, rows)
