"""A batch read without records gives 0 rows, whatever the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tests.broker.source_help import Transactions, produce

import delivered
from delivered.connectors.log.produce import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_batch_with_nothing_to_read_has_no_rows(spark: SparkSession, kafka: Any, tmp_path: Path) -> None:
    delivered.register(spark)

    def read(system: str, **options: str) -> int:
        return int(spark.read.format(f"delivered_{system}").options(**options).load().count())

    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    empty, full, uncommitted = kafka.topic(2), kafka.topic(1), kafka.topic(1)
    produce(kafka, full, [b"a", b"b"])
    open_one = Transactions(kafka, "nothing-to-read")
    open_one.open(uncommitted, [b"a"])
    at = json.dumps({full: {"0": 1}})
    assert read("kafka", **servers, subscribe=empty) == 0
    assert read("kafka", **servers, subscribe=full, startingOffsets=at, endingOffsets=at) == 0
    assert read("kafka", **servers, subscribePattern="no-such-topic") == 0
    assert read("kafka", **servers, subscribe=uncommitted) == 0
    assert read("kafka", **servers, subscribe=full) == 2
    open_one.end(commit=True)
    log = str(tmp_path / "log")
    append(log, pa.table({"value": [b"a"]}))
    assert read("log", path=log, startingOffsets=json.dumps({"0": 1})) == 0
    assert read("log", path=log) == 1
