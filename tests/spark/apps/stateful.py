"""A user's job: running sums by key, kept in Spark's state, each row telling the value before and the value now.

Arguments: a folder, the state store ("hdfs", "rocksdb"), its checkpoint format (1, 2), and "uuid" for a transform
that keeps and emits another value in every run.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql.functions import current_timestamp
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import delivered

STORES = {"hdfs": "HDFSBackedStateStoreProvider", "rocksdb": "RocksDBStateStoreProvider"}
STORE_PACKAGE = "org.apache.spark.sql.execution.streaming.state"
COLUMNS = "k string, before string, now string"


def following(before: str, values: Any, changing: bool) -> str:
    return uuid.uuid4().hex if changing else str(int(before or 0) + sum(map(int, values)))


class Totals(StatefulProcessor):
    def __init__(self, changing: bool) -> None:
        self.changing = changing

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "total string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        before = self.total.get()[0] if self.total.exists() else ""
        now = following(before, (r.n for r in rows), self.changing)
        self.total.update((now,))
        yield Row(k=key[0], before=before, now=now)

    def close(self) -> None:
        pass


def totals(store: str, changing: bool) -> Any:
    def by_pandas(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        before = state.get[0] if state.exists else ""
        now = following(before, (n for frame in frames for n in frame["n"]), changing)
        state.update((now,))
        yield pd.DataFrame({"k": [key[0]], "before": [before], "now": [now]})

    def transform(frame: DataFrame) -> DataFrame:
        grouped = frame.selectExpr("CAST(key AS STRING) AS k", "CAST(CAST(value AS STRING) AS INT) AS n").groupBy("k")
        if store == "rocksdb":
            made = grouped.transformWithState(Totals(changing), COLUMNS, "append", "none")
        else:
            made = grouped.applyInPandasWithState(by_pandas, COLUMNS, "total string", "append", "NoTimeout")
        return made.withColumn("at", current_timestamp().cast("string"))  # Spark logs it: a rerun has the same

    return transform


def settings(store: str, version: str) -> dict[str, str]:
    return {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass": f"{STORE_PACKAGE}.{STORES[store]}",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": version,
    }


def pipeline(folder: Path, store: str, changing: bool, **more: Any) -> delivered.Pipeline:
    return delivered.Pipeline(
        name="totals",
        guarantee="exactly_once",
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "in"), maxOffsetsPerTrigger=100),
        transform=delivered.transform(totals(store, changing), stateful=True),
        sinks=[delivered.sqlite(str(folder / "out.db"), "totals")],
        trigger="available_now",
        **more,
    )


def main() -> None:
    folder, store, version, changing = Path(sys.argv[1]), sys.argv[2], sys.argv[3], "uuid" in sys.argv[4:]
    made = pipeline(folder, store, changing, master="local[2]", conf=settings(store, version))
    made.start().awaitTermination()


if __name__ == "__main__":
    main()
