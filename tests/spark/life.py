"""A pipeline that lives on while something about it changes: for the rows of docs/checkpoint.md."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import delivered
from delivered.connectors.log import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 180
PLAIN = "SELECT CAST(key AS STRING) AS k, CAST(value AS STRING) AS v FROM source"


class Life:
    """A pipeline from a log; every start delivers 20 more records, identified by their values."""

    def __init__(self, spark: SparkSession, folder: Path, sink: Any, transform: str = PLAIN, **more: Any) -> None:
        self.spark, self.folder, self.records = spark, folder, 0
        self.given = {"sinks": [sink], "transform": transform, "checkpoint": folder / "checkpoint", **more}

    def pipeline(self, **changes: Any) -> delivered.Pipeline:
        given = {"trigger": "available_now", **self.given, **changes}
        source = delivered.log(str(self.folder / "in"), **given.pop("source", {}))
        return delivered.Pipeline(name="life", guarantee="exactly_once", source=source, **given)

    def produce(self) -> None:
        numbers = range(self.records, self.records + 20)
        rows = {"key": [f"k{i % 4}".encode() for i in numbers], "value": [str(i).encode() for i in numbers]}
        append(str(self.folder / "in"), pa.table(rows))
        self.records += 20

    def start(self, **changes: Any) -> None:
        self.produce()
        self.pipeline(**changes).start(self.spark).awaitTermination(WAIT_S)

    def refused(self, code: str, **changes: Any) -> None:
        with pytest.raises(Exception, match=f"DELIVERED_{code}"):
            self.start(**changes)


def rows(database: Path, table: str = "rows", columns: str = "v") -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute(f"SELECT {columns} FROM {table}").fetchall()
    return [r[0] if len(r) == 1 else r for r in found]


def once(values: list[str], records: int) -> bool:
    return Counter(values) == Counter(str(i) for i in range(records))
