"""Transforms of stateful queries, as a user writes them: from DataFrame to DataFrame with columns key and value.

oracles.py defines the expected output.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from delivered_lab.verify.oracles import (
    DELAY_S,
    JOIN_S,
    MILESTONE,
    NOBODY,
    SESSION_GAP_S,
    SPAN_S,
    TAIL,
    VISIT_GAP_S,
    WINDOW_S,
)
from delivered_lab.verify.workloads import TABLE

_EVENT = "id string, k string, at bigint, amount bigint, kind string, ref string"
_ROWS = "key string, value string"
_COUNTED, _DELAY = "n bigint, total bigint", f"{DELAY_S} seconds"


def _events(frame: DataFrame) -> DataFrame:
    read = frame.select(F.from_json(F.col("value").cast("string"), _EVENT).alias("e")).select("e.*")
    return read.withColumns({"k": F.coalesce("k", F.lit(NOBODY)), "time": F.timestamp_seconds("at")})


def _timed(frame: DataFrame) -> DataFrame:
    return _events(frame).withWatermark("time", _DELAY)


def _rows(frame: DataFrame, key: Column, *parts: str) -> DataFrame:
    return frame.select(key.alias("key"), F.concat_ws(" ", *(F.col(p).cast("string") for p in parts)).alias("value"))


def _at(start: Column, length_s: int) -> Column:
    return F.floor(F.unix_timestamp(start) / length_s).cast("string")


def totals(frame: DataFrame) -> DataFrame:
    summed = _events(frame).groupBy("k").agg(F.count("*").alias("n"), F.sum("amount").alias("s"))
    return _rows(summed, F.col("k"), "n", "s")


def _summed(frame: DataFrame, over: Column) -> DataFrame:
    grouped = _timed(frame).groupBy("k", over.alias("w"))
    # Spark moves a filter on a grouping key below the watermark, which would then stand still in the tail.
    summed = grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("s"), F.max("k").alias("who"))
    return summed.where(F.col("who") != TAIL).drop("who")


def _windows(frame: DataFrame) -> DataFrame:
    return _summed(frame, F.window("time", f"{WINDOW_S} seconds"))


def windows(frame: DataFrame) -> DataFrame:
    return _rows(_windows(frame), F.concat_ws("@", "k", _at(F.col("w.start"), WINDOW_S)), "n", "s")


def chained(frame: DataFrame) -> DataFrame:
    again = _windows(frame).groupBy(F.window(F.window_time("w"), f"{SPAN_S} seconds").alias("span"))
    longer = again.agg(F.count("*").alias("n"), F.max("s").alias("s"))
    return _rows(longer, _at(F.col("span.start"), SPAN_S), "n", "s")


def sessions(frame: DataFrame) -> DataFrame:
    # A fractional gap: records at integer seconds never lie on its border.
    found = _summed(frame, F.session_window("time", f"{SESSION_GAP_S} seconds 500 milliseconds"))
    return _rows(found, F.concat_ws("@", "k", _at(F.col("w.start"), 1)), "n", "s")


def distinct(frame: DataFrame) -> DataFrame:
    return _rows(_events(frame).dropDuplicates(["id"]), F.col("id"), "amount")


def distinct_within(frame: DataFrame) -> DataFrame:
    once = _timed(frame).dropDuplicatesWithinWatermark(["id"])
    return _rows(once.where(F.col("k") != TAIL), F.concat_ws("@", "id", F.col("at").cast("string")), "amount")


def _joined(frame: DataFrame, how: str) -> DataFrame:
    """A self-join of the stream: its orders with its payments."""
    events = _timed(frame)
    orders = events.where("kind = 'order'").select(
        "k", F.col("id").alias("order"), F.col("amount").alias("a"), F.col("time").alias("from")
    )
    payments = events.where("kind = 'payment'").select("ref", "id", F.col("amount").alias("b"), "time")
    fits = F.expr(f"`order` = ref AND time >= `from` AND time <= `from` + INTERVAL {JOIN_S} SECONDS")
    both = orders.join(payments, fits, how).where(F.coalesce("id", "k") != TAIL)
    return _rows(both, F.concat("order", F.lit("/"), F.coalesce("id", F.lit(""))), "a", "b")


def joined(frame: DataFrame) -> DataFrame:
    return _joined(frame, "inner")


def joined_outer(frame: DataFrame) -> DataFrame:
    return _joined(frame, "leftOuter")


def looked_up(frame: DataFrame) -> DataFrame:
    table = frame.sparkSession.read.schema("k string, says string").json(os.environ[TABLE])
    return _rows(_events(frame).join(table, "k", "left"), F.col("id"), "amount", "says")


class Visits(StatefulProcessor):
    """A row at every fifth record, and one when a timer reports that no more came."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.counted = handle.getValueState("counted", _COUNTED)

    def handleInputRows(  # type: ignore[override]  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        n, total = self.counted.get() or (0, 0)
        newest = max(self.handle.listTimers(), default=0)
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        for row in rows:
            n, total = n + 1, total + row.amount
            newest = max(newest, (row.at + VISIT_GAP_S) * 1_000)
            if n % MILESTONE == 0:
                yield Row(key=f"{key[0]}#{n}", value=str(n))
        self.counted.update((n, total))
        self.handle.registerTimer(newest)

    def handleExpiredTimer(self, key: Any, **_: Any) -> Iterator[Row]:  # type: ignore[override]  # noqa: N802
        n, total = self.counted.get() or (0, 0)
        self.counted.clear()
        yield Row(key=key[0], value=f"{n} {total}")

    def close(self) -> None:
        pass


def visits(frame: DataFrame) -> DataFrame:
    grouped = _timed(frame).groupBy("k")
    return grouped.transformWithState(Visits(), _ROWS, "append", "EventTime").where(F.col("key").startswith("v"))


def visits_pandas(frame: DataFrame) -> DataFrame:
    def by_visit(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        n, total, newest = state.get if state.exists else (0, 0, 0)
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"key": [key[0]], "value": [f"{n} {total}"]})
            return
        before = n
        for part in frames:
            n, total, newest = n + len(part), total + int(part["amount"].sum()), max(newest, int(part["at"].max()))
        state.update((n, total, newest))
        state.setTimeoutTimestamp((newest + VISIT_GAP_S) * 1_000)
        reached = [m for m in range(before + 1, n + 1) if m % MILESTONE == 0]
        yield pd.DataFrame({"key": [f"{key[0]}#{m}" for m in reached], "value": [str(m) for m in reached]})

    grouped = _timed(frame).groupBy("k")
    rows = grouped.applyInPandasWithState(by_visit, _ROWS, f"{_COUNTED}, newest bigint", "append", "EventTimeTimeout")
    return rows.where(F.col("key").startswith("v"))
