"""Several sources in one query: each one's offsets are in the decision, and every record takes effect once."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from confluent_kafka import Consumer, TopicPartition
from tests.kafka_tools import produce
from tests.support.halted import killed

import delivered
from delivered.audit.evidence import Verdict
from delivered.connectors.log import append
from delivered.model.errors import DeliveredError, UsageError
from delivered.planner import Plan, Refusal
from delivered.spark.internals import cannot_restart
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

SPARK_42 = "DELIVERED_SPARK_42"
APP = Path(__file__).parent / "apps" / "run_file.py"
ORDERS, PAYMENTS, WAIT_S = 600, 400, 180
DECIDED = "commit.decide:after@batch=1"
BOTH = f"{DECIDED},log:before@batch=2"
UNION = """
SELECT CAST(key AS STRING) AS id, 'order' AS kind FROM orders
UNION ALL SELECT CAST(key AS STRING), 'payment' FROM payments
"""
JOIN = "SELECT CAST(o.key AS STRING) AS id, 'paid' AS kind FROM orders o JOIN payments p ON o.key = p.key"
PYTHON = """
from pyspark.sql.functions import expr


def both(payments, orders):
    paid = orders.join(payments.selectExpr("key AS paid"), expr("key = paid"))
    return paid.selectExpr("CAST(key AS STRING) AS id", "'paid' AS kind")
"""


def records(count: int) -> list[tuple[bytes, bytes]]:
    return [(f"id-{i}".encode(), b"v") for i in range(count)]


def read(kafka: Kafka, topic: str, per_batch: int) -> dict[str, Any]:
    return {
        "format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic,
        "startingOffsets": "earliest", "maxOffsetsPerTrigger": per_batch, "commitOffsetsToGroup": f"shop-{topic}",
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


EARLIER = "from delivered.spark import internals; internals.unfit_version = lambda *_: None; "
"""Before the job: what an earlier version did not check."""


def run(folder: Path, file: Path, crash: str = "", before: str = "", **env: str) -> tuple[supervisor.Outcome, str]:
    with (folder / "output").open("wb") as output:
        job = "import delivered, sys; delivered.Pipeline.from_file(sys.argv[1]).start().awaitTermination()"
        command = [sys.executable, *(["-c", before + job] if before else [str(APP)]), str(file)]
        done = supervisor.run(command, crash, folder / "hits", timeout_s=400, output=output, env=env)
    return done, (folder / "output").read_text()


@pytest.mark.matrix  # test_kafka_arrow.py kills Kafka to Kafka, unit/test_several.py has offsets by source
@pytest.mark.parametrize(
    ("way", "second", "crash"),
    [("union", "kafka", DECIDED), ("union", "kafka", BOTH), ("join", "kafka", BOTH), ("python", "log", BOTH)],
)
def test_every_record_takes_effect_once(
    way: str, second: str, crash: str, kafka: Kafka, spark: SparkSession, tmp_path: Path
) -> None:
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
    killed([sys.executable, str(APP), str(file)], crash, tmp_path)
    assert delivered.Pipeline.from_file(file).start(spark).awaitTermination(WAIT_S)
    expected = {(f"id-{i}", "paid"): 1 for i in range(PAYMENTS)}
    if way == "union":
        expected = {(f"id-{i}", "order"): 1 for i in range(ORDERS)} | {
            (f"id-{i}", "payment"): 1 for i in range(PAYMENTS)
        }
    assert rows(tmp_path) == expected
    kept = {f.name for f in (tmp_path / "checkpoint" / "delivered").iterdir()}
    assert kept >= {"orders.source-offsets.json", "orders.offset-metadata.json", "payments.source-offsets.json"}
    assert acknowledged(kafka, orders, 2) == ORDERS
    if second == "kafka":
        assert acknowledged(kafka, payments["subscribe"], 1) == PAYMENTS


@pytest.mark.checkpoint(
    "the order of sources without names: `union` and `join` in the Spark API, or their number",
    "refused",
    "`SOURCE_ORDER`: Spark gives them their offsets by position",
)
@pytest.mark.parametrize("own", [False, True])
def test_sources_without_names_keep_their_order(own: bool, spark: SparkSession, tmp_path: Path) -> None:
    """Regression: each log was read at the offsets of the other, and rows were lost and doubled."""
    delivered.register(spark)
    for name in "abc":
        add(tmp_path, name, range(9 if name == "a" else 4))

    def start(*names: str) -> None:
        frame = None
        for name in names:
            read = spark.readStream.format("delivered_log").option("path", str(tmp_path / name)).load()
            read = read.selectExpr("CAST(key AS STRING) AS id", f"'{Path(name).name}' AS kind")
            frame = read if frame is None else frame.union(read)
        assert frame is not None
        sink = {"path": str(tmp_path / "out.db"), "table": "shop"}
        if own:
            to = delivered.sqlite(sink["path"], "shop")
            writer = frame.writeStream.foreachBatch(
                lambda df, n: delivered.write_batch(df, n, sink=to, guarantee="exactly_once", pipeline="shop")
            )
        else:
            writer = frame.writeStream.format("delivered_sqlite").options(**sink, guarantee="exactly_once")
            writer = writer.option("pipeline", "shop")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination(WAIT_S)

    start("a", "b")
    for name in "ab":
        add(tmp_path, name, range(9, 20))
    for other in [("b", "a"), ("c", "a", "b"), ("b",)]:
        with pytest.raises(delivered.Refused, match=r"SOURCE_ORDER.*Spark gives sources without names"):
            start(*other)
    (tmp_path / "link").symlink_to(tmp_path)
    start("link/a", "b")
    assert rows(tmp_path) == Counter(
        [(f"id-{i}", "a") for i in range(20)] + [(f"id-{i}", "b") for i in (*range(4), *range(9, 20))]
    )


def add(folder: Path, name: str, numbers: Iterable[int]) -> None:
    keys = [f"id-{i}".encode() for i in numbers]
    append(str(folder / name), pa.table({"key": keys, "value": keys}))


def test_spark_4_2_cannot_restart_named_sources() -> None:
    assert cannot_restart(["source"], "4.2.0") is None
    assert cannot_restart(["a", "b"], "4.3.0") is None
    refused = cannot_restart(["orders", "payments"], "4.2.1")
    assert refused is not None
    assert "Spark 4.2.1" in str(refused)
    assert "Spark 4.3 or later" in str(refused)


@pytest.mark.checkpoint("`sources`, from Spark 4.2 on", "refused", "`SOURCES_SPARK_VERSION` under 4.2; 4.3 continues")
@pytest.mark.matrix
@pytest.mark.skipif(SPARK_42 not in os.environ, reason=f"{SPARK_42} names no folder with pyspark 4.2 in it")
@pytest.mark.parametrize("anyway", [False, True], ids=["refused", "as an earlier version ran it"])
def test_named_sources_under_spark_4_2(spark: SparkSession, anyway: bool, tmp_path: Path) -> None:
    """Killed in batch 1, Spark 4.2 does not start again; 4.3 finishes the batch."""
    keys = [f"id-{i}".encode() for i in range(400)]
    for name in ("orders", "payments"):
        append(str(tmp_path / name), pa.table({"key": keys, "value": keys}))
    sources = {n: {"format": "log", "path": n, "maxOffsetsPerTrigger": 100} for n in ("orders", "payments")}
    file = pipeline(tmp_path, sources, {"sql": UNION})
    path = os.pathsep.join([os.environ[SPARK_42], *filter(None, [os.environ.get("PYTHONPATH")])])
    done, said = run(tmp_path, file, "commit.decide:after@batch=1", EARLIER if anyway else "", PYTHONPATH=path)
    assert done.exit_code != 0
    if anyway:
        assert (len(done.kills), done.runs) == (1, 2)
        assert "OfflineStateRepartitionUtils" in said
        assert sum(rows(tmp_path).values()) == 400
    else:
        assert "DELIVERED_SOURCES_SPARK_VERSION] Spark 4.2." in said
        assert not (tmp_path / "checkpoint" / "offsets").exists()
    delivered.Pipeline.from_file(file).start(spark).awaitTermination()
    assert rows(tmp_path) == Counter((f"id-{i}", kind) for i in range(400) for kind in ("order", "payment"))


def acknowledged(kafka: Kafka, topic: str, partitions: int) -> int:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": f"shop-{topic}"})
    try:
        found = consumer.committed([TopicPartition(topic, p) for p in range(partitions)], timeout=60)
        return sum(int(p.offset) for p in found)
    finally:
        consumer.close()


class Shop:
    """A pipeline over logs, whose sources change between its runs."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.count = spark, folder, Counter[str]()

    def add(self, source: str, records: int) -> None:
        first = self.count[source]
        self.count[source] += records
        keys = [f"id-{i}".encode() for i in range(first, first + records)]
        append(str(self.folder / source), pa.table({"key": keys, "value": keys}))

    def sql(self, *names: str) -> str:
        return " UNION ALL ".join(f"SELECT CAST(key AS STRING) AS id, '{n}' AS kind FROM {n}" for n in names)

    def pipeline(self, *names: str, sql: Any = "", **more: Any) -> delivered.Pipeline:
        sql = sql or self.sql(*names)
        sources = {"sources": {n: delivered.log(str(self.folder / n), maxOffsetsPerTrigger=40) for n in names}}
        sink = delivered.sqlite(str(self.folder / "out.db"), "shop", ifNotExists=True)
        return delivered.Pipeline(
            name="shop", guarantee="exactly_once", checkpoint=self.folder / "checkpoint", transform=sql, sinks=[sink],
            trigger="available_now", audit={"id": "concat(id, kind)"}, **{**sources, **more},
        )  # fmt: skip

    def change(self, statement: str) -> None:
        with sqlite3.connect(self.folder / "out.db") as connection:
            assert connection.execute(statement).rowcount == 1

    def run(self, *names: str, **more: Any) -> tuple[str, ...]:
        """What the plan warned of."""
        made = self.pipeline(*names, **more)
        plan = made.plan(self.spark)
        assert isinstance(plan, Plan), plan
        made.start(self.spark).awaitTermination()
        assert not any(self.spark.catalog.tableExists(n) for n in names), "a table of this name is hidden no longer"
        expected = {(f"id-{i}", n): 1 for n, count in self.count.items() for i in range(count)}
        assert rows(self.folder) == expected
        return plan.warnings

    def refused(self, *names: str, **more: Any) -> tuple[str, str]:
        made = self.pipeline(*names, **more)
        plan = made.plan(self.spark)
        assert isinstance(plan, Refusal), plan
        with pytest.raises(DeliveredError) as caught:
            made.start(self.spark)
        assert caught.value.code == f"DELIVERED_{plan.code}"
        return plan.code, f"{plan.reason} {plan.way_out}"


@pytest.mark.matrix
def test_sources_are_added_and_removed_on_purpose(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    shop.add("orders", 90)
    shop.add("payments", 50)
    assert not [w for w in shop.run("orders", "payments") if "source" in w]

    report = shop.pipeline("orders", "payments").audit(spark)
    assert (report.verdict, report.counts.sent, report.counts.delivered) == (Verdict.HELD, 140, 140), report
    assert set(json.loads(report.range_to)) == {"orders", "payments"}
    shop.change("DELETE FROM shop WHERE id = 'id-7' AND kind = 'payments'")
    report = shop.pipeline("orders", "payments").audit(spark, full=True)
    assert (report.verdict, report.counts.lost, [s.id for s in report.samples]) == (Verdict.BROKEN, 1, ["id-7payments"])
    shop.change("INSERT INTO shop VALUES ('id-7', 'payments')")
    joined = "SELECT CAST(o.key AS STRING) AS id, '' AS kind FROM orders o JOIN payments p ON o.key = p.key"
    report = shop.pipeline("orders", "payments", sql=joined).audit(spark, full=True)
    assert report.verdict is Verdict.UNKNOWN
    assert "rows of several sources together (Join)" in report.unknowns[0]

    code, said = shop.refused("orders", "payments", sql="SELECT id FROM orders JOIN payments JOIN refunds")
    assert code == "SQL_INVALID"
    assert "refunds" in said
    assert "the view `orders` has the columns key" in said
    with pytest.raises(UsageError, match=r"reads the source 'orders' twice"):
        shop.pipeline("orders", "payments", sql=shop.sql("orders", "payments", "orders")).start(spark)
    with pytest.raises(UsageError, match=r"does not read the source 'payments'"):
        shop.pipeline("orders", "payments", sql=lambda orders, payments: orders).start(spark)
    missing = {"orders": delivered.log(str(tmp_path / "orders")), "payments": delivered.log(str(tmp_path / "none"))}
    assert "none" in shop.refused("orders", "payments", sources=missing)[1]

    shop.add("orders", 10)
    shop.add("refunds", 70)
    new, *_ = shop.run("payments", "refunds", "orders")
    assert new.startswith("the source refunds is new to this checkpoint")
    report = shop.pipeline("payments", "refunds", "orders").audit(spark, full=True)
    assert (report.verdict, report.counts.lost, report.counts.unexpected) == (Verdict.UNKNOWN, 0, 0), report
    assert json.loads(report.range_to)["refunds"] == {"version": 1, "offsets": {"0": 70}}

    shop.add("orders", 30)
    gone, *_ = shop.run("orders", "refunds")
    assert gone.startswith("the source payments is removed")
    shop.add("refunds", 50)
    shop.run("refunds", "orders")
    code, said = shop.refused("orders", "refunds", "payments")
    assert code == "SOURCE_RETURNED"
    ended = re.search(r"startingOffsets\", '(.+?)'\)", said)
    assert ended is not None

    # Under another name, from there on: nothing twice, nothing lost.
    shop.add("payments", 20)
    later = {n: delivered.log(str(tmp_path / n)) for n in ("orders", "refunds")}
    later["paid"] = delivered.log(str(tmp_path / "payments"), startingOffsets=ended[1])
    sql = "SELECT CAST(key AS STRING) AS id, '{0}' AS kind FROM {1}"
    sql = " UNION ALL ".join(sql.format("payments" if n == "paid" else n, n) for n in later)
    shop.run(sql=sql, sources=later)

    one = {"sources": None, "source": delivered.log(str(tmp_path / "orders")), "sql": "SELECT key AS id FROM source"}
    assert shop.refused(**one)[0] == "SOURCES_UNNAMED"
