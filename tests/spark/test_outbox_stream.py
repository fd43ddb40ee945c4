"""An outbox through Spark: to Kafka without SQL, killed and audited; a table's changes into a table."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml
from tests.kafka_tools import read_committed
from tests.support.halted import killed

import delivered
from delivered.audit.evidence import Verdict
from delivered.patterns import outbox
from delivered.planner import Plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = Path(__file__).parent / "apps" / "run_file.py"
WAIT_S = 180
ORDERS = 60


def put(url: str, layout: outbox.Layout, numbers: range) -> list[str]:
    ids = []
    with psycopg.connect(url) as connection:
        for n in numbers:
            ids.append(str(outbox.new_id()))
            outbox.put(
                connection, id=ids[-1], aggregate_type="order", aggregate_id=str(n % 7), type="relayed",
                payload={"n": n}, layout=layout,
            )  # fmt: skip
            connection.commit()
    return ids


@pytest.mark.matrix
def test_an_outbox_reaches_kafka_once_though_the_job_is_killed_and_the_audit_says_so(
    postgres: Any, kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """Rows from before the slot and from the log; the slot moves only after Spark's commit log."""
    layout = outbox.Layout(table="spark_outbox")
    postgres.execute(outbox.ddl("postgres", layout))
    topic = f"order.{kafka.topic(2)}"
    kafka.topic(2, name=topic)
    sent = put(postgres.url, layout, range(ORDERS // 2))
    described = {
        "pipeline": "relay", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {
            "format": "outbox", "url": postgres.url, "dbtable": layout.table, "keep": True,
            "topic": topic.replace("order", "{aggregatetype}"), "maxOffsetsPerTrigger": 12,
        },
        "sinks": [{"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}],
        "master": "local[2]", "spark": {"spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False},
        "audit": {"own": "exists(headers, h -> h.key = 'type' AND CAST(h.value AS STRING) = 'relayed')"},
    }  # fmt: skip
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(described, sort_keys=False))

    pipeline = delivered.Pipeline.from_file(file)
    with closing(pipeline.sources["source"].source().driver()) as driver:  # makes the slot, and dies
        driver.latest(driver.initial(), None)
    sent += put(postgres.url, layout, range(ORDERS // 2, ORDERS))
    plan = pipeline.plan(spark)
    assert isinstance(plan, Plan), plan
    assert "MiB of WAL" in str(plan)
    # Killed when it has decided, before the slot moves.
    killed([sys.executable, str(APP), str(file)], "log:before@batch=4", tmp_path)
    assert pipeline.start(spark).awaitTermination(WAIT_S)

    found = read_committed(kafka.bootstrap, topic)
    assert Counter(dict(m.headers())["id"].decode() for m in found) == Counter(sent)
    assert {m.key() for m in found} == {str(n).encode() for n in range(7)}
    report = pipeline.audit(spark)
    assert report.verdict is Verdict.HELD, str(report)
    assert (report.counts.sent, report.counts.lost, report.counts.duplicated) == (ORDERS, 0, 0)


def test_changes_of_a_table_are_upserted(postgres: Any, spark: SparkSession, tmp_path: Path) -> None:
    delivered.register(spark)
    postgres.execute("CREATE TABLE spark_orders (id int PRIMARY KEY, name text)")
    copy = delivered.sqlite(
        str(tmp_path / "copy.db"), "orders", mode="upsert", keyColumns="id", versionColumn="version",
        deleteColumn="gone", ifNotExists=True,
    )  # fmt: skip
    pipeline = delivered.Pipeline(
        name="copy", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", trigger="available_now",
        source=delivered.endpoint("outbox", url=postgres.url, table="spark_orders"),
        transform="SELECT id, name, _lsn AS version, _deleted AS gone FROM source", sinks=[copy],
    )  # fmt: skip
    pipeline.start(spark).awaitTermination(WAIT_S)
    postgres.execute("INSERT INTO spark_orders SELECT n, 'a' FROM generate_series(1, 5) n")
    pipeline.start(spark).awaitTermination(WAIT_S)
    postgres.execute("UPDATE spark_orders SET name = 'b' WHERE id < 3")
    postgres.execute("DELETE FROM spark_orders WHERE id = 5")
    postgres.execute("UPDATE spark_orders SET id = 9 WHERE id = 4")
    pipeline.start(spark).awaitTermination(WAIT_S)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection:
        copied = connection.execute("SELECT id, name FROM orders ORDER BY id").fetchall()
    assert copied == postgres.execute("SELECT id, name FROM spark_orders ORDER BY id")
    assert copied == [(1, "b"), (2, "b"), (3, "a"), (9, "a")]


@pytest.mark.matrix
@pytest.mark.parametrize("transform", [None, "SELECT * FROM source"])
def test_a_table_that_changes_is_copied_by_the_shapes_that_it_had(
    postgres: Any, spark: SparkSession, tmp_path: Path, transform: str | None
) -> None:
    """Directly, and through Spark's plan."""
    delivered.register(spark)
    table = f"shapes_{0 if transform is None else 1}"
    postgres.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text, old text)")

    def run(file: str, **options: str) -> None:
        pipeline = delivered.Pipeline(
            name="shapes", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", trigger="available_now",
            source=delivered.endpoint("outbox", url=postgres.url, table=table, **options), transform=transform,
            sinks=[delivered.sqlite(str(tmp_path / "copy.db"), file, mergeSchema=True, ifNotExists=True)],
        )  # fmt: skip
        pipeline.start(spark).awaitTermination(WAIT_S)

    run("copy")
    postgres.execute(f"INSERT INTO {table} VALUES (1, 'a', 'x')")
    postgres.execute(f"ALTER TABLE {table} DROP old")
    postgres.execute(f"INSERT INTO {table} VALUES (2, 'b')")
    postgres.execute(f"ALTER TABLE {table} RENAME name TO title")
    postgres.execute(f"INSERT INTO {table} VALUES (3, 'c')")
    with pytest.raises(Exception, match="OUTBOX_COLUMNS"):
        run("copy")
    for _ in range(2):
        with pytest.raises(Exception, match="OUTBOX_SCHEMA") as error:
            run("copy")
    at = re.search(r'"schemaChange", "([0-9A-F/]+)"', str(error.value))
    assert at is not None
    with suppress(Exception):  # planned before the batch in front of it was acknowledged: one restart more
        run("copy", schemaChange=at[1])
    run("copy", schemaChange=at[1])
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection:
        found = connection.execute("SELECT id, name, old, title FROM copy ORDER BY id").fetchall()
    assert found == [(1, "a", "x", None), (2, "b", None, None), (3, None, None, "c")]
