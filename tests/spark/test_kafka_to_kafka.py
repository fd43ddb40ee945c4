"""A stream of our Kafka source into our Kafka sink as it is: no column need be selected, as with Spark's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from tests.kafka_tools import produce, read_committed

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 120.0


@pytest.mark.matrix  # test_idiom_errors.py runs the same idiom
def test_load_write_stream(kafka: Any, spark: SparkSession, tmp_path: Path) -> None:
    delivered.register(spark)
    source, sink = kafka.topic(2), kafka.topic(2)
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    produce(kafka.bootstrap, source, ((f"k{i}".encode(), str(i).encode()) for i in range(30)))

    def start(name: str, frame: Any, **options: str) -> None:
        written = frame.writeStream.format("delivered_kafka").options(**servers, **options).queryName(name)
        location = str(tmp_path / name)
        written.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination(WAIT_S)

    def read(**options: str) -> Any:
        given = {"subscribe": source, "startingOffsets": "earliest", "minOffsetsPerTrigger": "10", **options}
        return spark.readStream.format("delivered_kafka").options(**servers, **given).load()

    start("as-it-is", read(includeHeaders="true", maxOffsetsPerTrigger="12"), guarantee="exactly_once", topic=sink)
    assert sorted(int(m.value() or b"-1") for m in read_committed(kafka.bootstrap, sink)) == list(range(30))
    log = tmp_path / "as-it-is" / "offsets"
    assert sum(1 for p in log.iterdir() if p.name.isdigit()) > 1
    assert all(set(json.loads(p.read_text().splitlines()[2])) == {source} for p in log.iterdir() if p.name.isdigit()), (
        "plain offsets in the idiom too"
    )

    with pytest.raises(Exception, match=r"DELIVERED_ACKS.*at_least_once cannot hold"):
        start("acks", read(), guarantee="at_least_once", topic=sink, **{"kafka.acks": "1"})
    with pytest.raises(Exception, match=r"DELIVERED_OPTION_UNKNOWN.*kafka\.ssl\.protocol"):
        read(**{"kafka.ssl.protocol": "x"})
    headers = "array(named_struct('key', CAST(NULL AS STRING), 'value', value)) AS headers"
    with pytest.raises(StreamingQueryException, match=r"DELIVERED_HEADER_UNNAMED.*Row \d+ of a batch"):
        start("headers", read().selectExpr("value", headers), guarantee="at_least_once", topic=sink)
