"""Ten times a topic drops what was sealed, and everything stays proved: audits of a pipeline from Kafka into SQLite."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec, ResourceType

from delivered import Pipeline
from delivered.audit.evidence import Verdict
from delivered.audit.seal import Seal, chain_faults
from delivered.engine.context import open_ledger
from delivered.model.identity import Scope
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS, ROWS = 10, 40
KILLS = {3: "commit.decide:after", 7: "write.prepare:after"}
LOST_IN, COPIED_IN = 4, 8


class Orders:
    def __init__(self, kafka: Any, folder: Path) -> None:
        self.kafka, self.folder, self.sent = kafka, folder, 0
        self.topic = kafka.topic(2, retention_ms="-1")
        self.file = folder / "orders.yaml"
        pipeline = {
            "pipeline": "orders", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
            "trigger": "available_now", "master": "local[2]",
            "source": {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": self.topic,
                       "startingOffsets": "earliest"},
            "sinks": [{"format": "sqlite", "path": str(folder / "orders.db"), "table": "orders", "ifNotExists": True}],
        }  # fmt: skip
        self.file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")

    def send(self, rows: int = ROWS) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap})
        for number in range(self.sent, self.sent + rows):
            producer.produce(self.topic, key=b"k%d" % (number % 7), value=b"%d" % number, partition=number % 2)
        assert producer.flush(60) == 0
        self.sent += rows

    def run(self, crash: str) -> supervisor.Outcome:
        command = [sys.executable, "-m", "delivered.cli.main", "run", str(self.file)]
        with (self.folder / "run.log").open("ab") as log:
            return supervisor.run(command, crash, self.folder / "hits", timeout_s=180, output=log)

    def sql(self, statement: str) -> None:
        with closing(sqlite3.connect(self.folder / "orders.db")) as connection, connection:
            assert connection.execute(statement).rowcount == 1

    def first_offsets(self) -> list[int]:
        ask = {TopicPartition(self.topic, p): OffsetSpec.earliest() for p in (0, 1)}
        return [f.result().offset for f in self.kafka.admin().list_offsets(ask).values()]

    def seals(self) -> list[Seal]:
        pipeline = Pipeline.from_file(self.file)
        (endpoint,) = pipeline.sinks
        with closing(open_ledger(endpoint.sink(), Scope("orders", "orders", "-"))) as ledger:
            texts = list(ledger.seals(endpoint.name or endpoint.sink().name))
        assert list(chain_faults(texts)) == []
        return [Seal.parse(text) for text in texts]

    def retain(self, ms: int) -> None:
        entry = ConfigEntry("retention.ms", str(ms), incremental_operation=AlterConfigOpType.SET)
        topic = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        for future in self.kafka.admin().incremental_alter_configs([topic]).values():
            future.result(60)

    def expire(self) -> None:
        """Let the broker drop what was sent so far."""
        self.retain(100)
        deadline = time.monotonic() + 60
        while (first := self.first_offsets()) != [self.sent // 2] * 2:
            assert time.monotonic() < deadline, (first, self.sent)
            time.sleep(0.1)
        self.retain(-1)


@pytest.mark.matrix
def test_what_was_sealed_stays_proved_through_ten_retentions(
    spark: SparkSession, new_kafka: Any, tmp_path: Path
) -> None:
    orders = Orders(new_kafka(properties={"log.retention.check.interval.ms": "200"}), tmp_path)
    pipeline = Pipeline.from_file(orders.file)
    kills, verdicts = 0, []
    for number in range(ROUNDS):
        orders.send()
        kills += len(orders.run(f"{KILLS[number]}@batch={number}" if number in KILLS else "log:after@batch=999").kills)
        if number == LOST_IN:
            orders.sql("DELETE FROM orders WHERE rowid = (SELECT max(rowid) - 3 FROM orders)")
        if number == COPIED_IN:
            orders.sql("INSERT INTO orders SELECT * FROM orders WHERE rowid = (SELECT max(rowid) FROM orders)")
        report = pipeline.audit(spark)
        assert not report.unknowns, report
        assert report.counts.sent == ROWS, report
        verdicts.append(report.verdict)
        orders.expire()
    assert kills == len(KILLS)
    damaged = {LOST_IN, COPIED_IN}
    assert verdicts == [Verdict.BROKEN if n in damaged else Verdict.HELD for n in range(ROUNDS)]
    seals = orders.seals()
    assert [(s.number, s.first, s.last, s.audited) for s in seals] == [(n, n, n, True) for n in range(ROUNDS)]
    assert [s.sums.counts.lost for s in seals] == [int(n == LOST_IN) for n in range(ROUNDS)]
    assert [s.sums.counts.duplicated for s in seals] == [int(n == COPIED_IN) for n in range(ROUNDS)]
    assert seals[-1].total.counts.sent == ROUNDS * ROWS
    assert json.loads(seals[-1].text)["verdict"] == "held"
