"""The bridges of examples/bridges: real brokers through Spark, killed again and again; F3 and F6 from end to end."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examples.bridges.all import BRIDGES
from examples.bridges.run import Arrived, across, run

import delivered
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Postgres, Rabbitmq


def assert_each_once(arrived: Arrived) -> None:
    assert arrived.sent > 0
    assert (arrived.lost, arrived.duplicated, arrived.strange) == (0, 0, 0), arrived
    assert arrived.delivered == arrived.sent


@pytest.mark.matrix
def test_rabbitmq_to_postgres_over_a_kill_of_each(
    rabbitmq: Rabbitmq, postgres: Postgres, spark: SparkSession, tmp_path: Path
) -> None:
    servers = {"rabbitmq": rabbitmq.broker, "postgres": postgres.broker}
    arrived = across(
        BRIDGES["rabbitmq-postgres"](),
        servers,
        tmp_path,
        print,
        kills=["commit.decide:after@batch=1"],
        receiver_kills=["receive.ack:before#8"],
        random_kill=False,
    )
    assert (arrived.kills, arrived.receiver_kills) == (("commit.decide:after, batch 1",), ("receive.ack:before",))
    assert_each_once(arrived)
    report = delivered.Pipeline.from_file(arrived.file).audit(spark)
    assert report.verdict == "held"
    assert (report.counts.sent, report.counts.delivered) == (arrived.sent, arrived.sent)


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(BRIDGES))
def test_every_bridge_delivers_each_order_once(name: str, tmp_path: Path) -> None:
    result = run(BRIDGES[name](), tmp_path, print)
    assert len(result.arrived.kills) == 4
    assert_each_once(result.arrived)
    assert result.clean, result


@pytest.mark.matrix
def test_a_rabbitmq_stream_through_spark(rabbitmq: Rabbitmq, spark: SparkSession, tmp_path: Path) -> None:
    """No receiver needed; killed between a batch's decision and Spark's commit log."""
    stream = rabbitmq.queue("stream")
    rabbitmq.send(stream, [(f"id{n}", b"row %d" % n) for n in range(6_000)])
    file = tmp_path / "p.yaml"
    pipeline = {
        "pipeline": "p",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {
            "format": "rabbitmq_stream", "url": rabbitmq.url, "streams": stream, "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": 2_000, "includeHeaders": True,
        },
        "transform": {"sql": "SELECT CAST(value AS STRING) AS value, offset, size(headers) AS n FROM source"},
        "sinks": [{"format": "sqlite", "path": str(tmp_path / "out.db"), "table": "got"}],
        "trigger": "available_now",
        "master": "local[2]",
    }  # fmt: skip
    file.write_text(json.dumps(pipeline))
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(file)]
    done = supervisor.run(command, "commit.decide:after@batch=1", tmp_path / "hits", timeout_s=200)
    assert (done.exit_code, len(done.kills)) == (0, 1)
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        found = Counter(v for (v,) in database.execute("SELECT value FROM got"))
    assert found == Counter(f"row {n}" for n in range(6_000))
    report = delivered.Pipeline.from_file(file).audit(spark)
    assert (report.verdict, report.counts.sent, report.counts.delivered) == ("held", 6_000, 6_000)
