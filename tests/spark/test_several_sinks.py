"""One stream through Spark into Kafka and PostgreSQL, each with rows and columns of its own, killed between the two."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import yaml
from tests.kafka_tools import read_committed

import delivered
from delivered.connectors.log import append
from delivered.model.errors import UsageError
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka, Postgres

APP = Path(__file__).parent / "apps" / "several_sinks.py"
RECORDS = 3_000
EVEN = "CAST(substr(CAST(key AS STRING), 4) AS INT) % 2 = 0"


@pytest.mark.matrix  # tests/broker/test_group_servers.py kills the same at every step, without Spark
def test_killed_between_the_two_applies_then_all_is_in_both(kafka: Kafka, postgres: Postgres, tmp_path: Path) -> None:
    """P27: the decision stands, Kafka shows a shard and PostgreSQL nothing; the next start applies the rest."""
    topic, table = kafka.topic(2), postgres.table(None)
    rows = pa.table(
        {"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v" * (i % 5) for i in range(RECORDS)]}
    )
    append(str(tmp_path / "events"), rows, partition_by=2)
    events = {
        "format": "kafka", "name": "events", "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic,
        "select": ["key", "value"], "where": EVEN, "audit": {"id": "CAST(key AS STRING)"},
    }  # fmt: skip
    sizes = {
        "format": "postgres", "name": "sizes", "url": postgres.url, "dbtable": table, "mechanism": "two_phase",
        "ifNotExists": "true", "select": ["CAST(key AS STRING) AS id", "length(value) AS size"], "audit": {"id": "id"},
    }  # fmt: skip
    pipeline = {
        "pipeline": "several", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "events", "maxOffsetsPerTrigger": 2_000},
        "sinks": [events, sizes], "master": "local[2]",
    }  # fmt: skip
    file, report = tmp_path / "several.yaml", tmp_path / "report.json"
    file.write_text(yaml.safe_dump(pipeline))
    plan = str(delivered.Pipeline.from_file(file).plan())
    assert "the ledger of events decides for all" in plan

    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file), str(report)]
        kill = "commit.apply:after@batch=0@shard=0@sink=events"
        done = supervisor.run(command, kill, tmp_path / "hits", timeout_s=300, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 1

    at_kafka = Counter((m.key() or b"").decode() for m in read_committed(kafka.bootstrap, topic))
    assert at_kafka == Counter(f"id-{i}" for i in range(0, RECORDS, 2))
    at_postgres = Counter(postgres.execute(f"SELECT id, size FROM {table}"))
    assert at_postgres == Counter((f"id-{i}", i % 5) for i in range(RECORDS))
    reports = json.loads(report.read_text())
    assert {n: (r["verdict"], r["counts"]["sent"]) for n, r in reports.items()} == {
        "events": ("held", RECORDS // 2),
        "sizes": ("held", RECORDS),
    }


def test_rows_and_columns_of_each_sink(spark: SparkSession, tmp_path: Path) -> None:
    """Expressions see only their own sink's rows; none may add rows or lose them."""
    from delivered.engine import Columns
    from delivered.pipeline.endpoint import parse_projection
    from delivered.spark.rows import projected, routed

    frame = spark.createDataFrame([("a", "1"), ("b", "x"), ("c", None)], "key string, value string")
    numbers = parse_projection(["key", "CAST(value AS INT) AS number"], "value RLIKE '^[0-9]+$'")
    everything = parse_projection([], None)
    found, routes = routed(frame, [everything, numbers])
    assert found.count() == 3
    batch = pa.RecordBatch.from_pylist([r.asDict() for r in found.collect()])
    assert all(isinstance(r, Columns) for r in routes)
    first, second = (r(batch).to_pylist() for r in routes if r is not None)
    assert [r["key"] for r in first] == ["a", "b", "c"]
    assert second == [{"key": "a", "number": 1}]  # ANSI mode would stop at CAST('x' AS INT)
    assert [tuple(r) for r in projected(frame, numbers).collect()] == [("a", 1)]
    for select, where in (
        (["explode(array(1, 2)) AS n"], None),
        (["count(1) AS n"], None),
        (["missing AS n"], None),
        (["missing"], None),
        ([], "value ||"),
        ([], "value"),
    ):
        with pytest.raises(UsageError):
            routed(frame, [everything, parse_projection(select, where)])
