"""Several sources in one query: each one's offsets are in the decision, and every record takes effect once."""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from tests.kafka_tools import produce
from tests.support.sweeps import sweep

from delivered.connectors.log import append
from delivered.testing import supervisor

if TYPE_CHECKING:
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "run_file.py"
ORDERS, PAYMENTS = 600, 400
UNION = """
SELECT CAST(key AS STRING) AS id, 'order' AS kind FROM orders
UNION ALL SELECT CAST(key AS STRING), 'payment' FROM payments
"""
JOIN = "SELECT CAST(o.key AS STRING) AS id, 'paid' AS kind FROM orders o JOIN payments p ON o.key = p.key"
PYTHON = """
def both(payments, orders):
    paid = orders.join(payments.withColumnRenamed("key", "paid"), orders.key == "paid")
    return paid.selectExpr("CAST(key AS STRING) AS id", "'paid' AS kind")
"""


def records(count: int) -> list[tuple[bytes, bytes]]:
    return [(f"id-{i}".encode(), b"v") for i in range(count)]


def read(kafka: Kafka, topic: str, per_batch: int) -> dict[str, Any]:
    return {
        "format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic,
        "startingOffsets": "earliest", "maxOffsetsPerTrigger": per_batch,
    }  # fmt: skip


def pipeline(folder: Path, sources: dict[str, Any], transform: dict[str, Any], **more: Any) -> Path:
    described = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "sources": sources, "transform": transform, "master": "local[2]",
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "shop", "ifNotExists": "true"}],
        "spark": {"spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False}, "audit": {"id": "concat(id, kind)"},
        **more,
    }  # fmt: skip
    file = folder / "shop.yaml"
    file.write_text(yaml.safe_dump(described, sort_keys=False))
    return file


def rows(folder: Path) -> Counter[tuple[str, str]]:
    with sqlite3.connect(folder / "out.db") as connection:
        return Counter(connection.execute("SELECT id, kind FROM shop"))


def run(folder: Path, file: Path, crash: str = "") -> tuple[supervisor.Outcome, str]:
    with (folder / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file)]
        done = supervisor.run(command, crash, folder / "hits", timeout_s=400, output=output)
    return done, (folder / "output").read_text()


@pytest.mark.parametrize(
    ("way", "second"),
    sweep([("union", "kafka"), ("join", "kafka"), ("python", "log")], lambda way, _: way == "union"),
)
def test_every_record_takes_effect_once(way: str, second: str, kafka: Kafka, tmp_path: Path) -> None:
    orders = kafka.topic(2)
    produce(kafka.bootstrap, orders, records(ORDERS))
    if second == "kafka":
        payments = read(kafka, kafka.topic(1), 150)
        produce(kafka.bootstrap, payments["subscribe"], records(PAYMENTS))
    else:
        payments = {"format": "log", "path": "payments", "maxOffsetsPerTrigger": 150}
        keys, values = zip(*records(PAYMENTS), strict=True)
        append(str(tmp_path / "payments"), pa.table({"key": keys, "value": values}))
    (tmp_path / "both.py").write_text(PYTHON)
    transform = {"python": "both:both"} if way == "python" else {"sql": UNION if way == "union" else JOIN}
    file = pipeline(tmp_path, {"orders": read(kafka, orders, 200), "payments": payments}, transform)
    done, said = run(tmp_path, file, "commit.decide:after@batch=1,log:before@batch=2")
    assert done.exit_code == 0, said[-4000:]
    assert len(done.kills) == 2
    expected = {(f"id-{i}", "paid"): 1 for i in range(PAYMENTS)}
    if way == "union":
        expected = {(f"id-{i}", "order"): 1 for i in range(ORDERS)} | {
            (f"id-{i}", "payment"): 1 for i in range(PAYMENTS)
        }
    assert rows(tmp_path) == expected
