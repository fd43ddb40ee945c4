"""Brokers of a running pipeline go down and return: nothing stops, nothing is lost or duplicated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, TopicPartition
from tests.kafka_tools import produce, read_committed
from tests.support.three_brokers import NODES, ThreeBrokers

from delivered_lab.supervisor import kill_tree

AWAY = "Kafka at {} does not answer, retrying ("
BACK = "Kafka at {} answers again"


class Running:
    """`delivered run` of a copy from topic to topic, batch after batch, and what it says."""

    def __init__(self, folder: Path, kafka: Any, source: str, sink: str) -> None:
        self.kafka, self.source, self.sink = kafka, source, sink
        self.sent = 0
        self.seen: set[tuple[int, int]] = set()
        self.reader = Consumer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "group.id": "judge",
                "isolation.level": "read_committed",
                # A broker may briefly report too little after a restart.
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        self.reader.assign([TopicPartition(sink, p, 0) for p in range(2)])
        self.said, self.spark_log = folder / "said", folder / "spark.log"
        servers = {"kafka.bootstrap.servers": kafka.bootstrap}
        file = folder / "pipeline.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "pipeline": "outages",
                    "guarantee": "exactly_once",
                    "checkpoint": str(folder / "checkpoint"),
                    "source": {
                        "format": "kafka", **servers, "subscribe": source, "startingOffsets": "earliest",
                        "maxOffsetsPerTrigger": 400,
                    },
                    "transform": {"sql": "SELECT key, value FROM source"},
                    "sinks": [{"format": "kafka", **servers, "topic": sink}],
                    "master": "local[2]",
                }
            )
        )  # fmt: skip
        command = [sys.executable, "-m", "delivered.cli.main", "run", str(file), "--spark-log", str(self.spark_log)]
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def send(self, count: int) -> None:
        produce(self.kafka.bootstrap, self.source, ((None, b"%d" % i) for i in range(self.sent, self.sent + count)))
        self.sent += count

    def arrived(self) -> int:
        """Records that a reader who follows the sink has seen by now."""
        found = self.reader.consume(10_000, 0.05)
        self.seen |= {(m.partition() or 0, m.offset() or 0) for m in found if m.error() is None}
        return len(self.seen)

    def until(self, fact: Callable[[], bool], what: str, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not fact():
            assert self.process.poll() is None, (what, self.said.read_text()[-3_000:])
            assert time.monotonic() < deadline, (what, self.said.read_text()[-3_000:])
            time.sleep(0.02)

    def until_idle(self) -> None:
        self.until(lambda: self.arrived() >= self.sent, "all that was sent has arrived")

    def says(self, text: str) -> int:
        return self.said.read_text().count(text.format(self.kafka.bootstrap))


@pytest.fixture
def running(new_kafka: Callable[..., Any], tmp_path: Path) -> Iterator[Running]:
    kafka = new_kafka()
    made = Running(tmp_path, kafka, kafka.topic(2), kafka.topic(2))
    yield made
    made.reader.close()
    if made.process.poll() is None:
        kill_tree(made.process)
        made.process.wait()


def away(running: Running, how: str, seconds: float = 0.0) -> None:
    """Take the broker away until the pipeline says so, and so long at least; then bring it back."""
    broker = running.kafka.broker
    before, since = running.says(AWAY), time.monotonic()
    match how:
        case "kill":
            broker.kill()
        case "stop":
            broker.stop()
        case "pause":
            os.kill(broker.pid, signal.SIGSTOP)
    try:
        running.until(lambda: running.says(AWAY) > before, f"{how}: the outage is told", 60)
        running.until(lambda: time.monotonic() - since >= seconds, f"{how}: {seconds} s")
    finally:
        if how == "pause":
            os.kill(broker.pid, signal.SIGCONT)
        else:
            broker.restart()


@pytest.mark.matrix
def test_outages_of_the_only_broker(running: Running) -> None:
    """One query bears them all, idle and busy."""
    running.send(100)
    running.until_idle()
    away(running, "kill")
    for how in ("pause", "kill"):
        busy(running)
        away(running, how)
        running.until_idle()
    ended_well(running)


@pytest.mark.matrix
@pytest.mark.parametrize("seconds", [0.0, 12.0, 50.0])
@pytest.mark.parametrize("how", ["kill", "stop", "pause"])
def test_long_outages(running: Running, how: str, seconds: float) -> None:
    for _ in range(2):
        running.send(100)
        running.until_idle()
        away(running, how, seconds)
        busy(running)
        away(running, how, seconds)
        running.until_idle()
    ended_well(running)


def busy(running: Running) -> None:
    """Batches follow one another from here on, for a while."""
    at = running.arrived()
    running.send(2_400)
    running.until(lambda: running.arrived() > at, "it is busy")


def ended_well(running: Running) -> None:
    """It stops on request; then an independent client counts."""
    assert running.says(BACK) > 0
    assert AWAY.format(running.kafka.bootstrap) in running.spark_log.read_text()
    ends_with_every_record_once(running)


def ends_with_every_record_once(running: Running) -> None:
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.process.wait(120) == 0, running.said.read_text()[-3_000:]
    found = Counter(m.value() or b"" for m in read_committed(running.kafka.bootstrap, running.sink))
    assert found == Counter(b"%d" % i for i in range(running.sent))


@pytest.fixture
def on_three(tmp_path: Path) -> Iterator[tuple[ThreeBrokers, Running]]:
    cluster = ThreeBrokers(tmp_path / "kafka")
    source, sink = (cluster.topic([1, 2, 3], [2, 3, 1]) for _ in range(2))
    made = Running(tmp_path, cluster, source, sink)
    yield cluster, made
    made.reader.close()
    if made.process.poll() is None:
        kill_tree(made.process)
        made.process.wait()
    cluster.stop()


@pytest.mark.matrix
@pytest.mark.parametrize("wait", [True, False])
def test_a_cluster_restarts_below_a_query(on_three: tuple[ThreeBrokers, Running], wait: bool) -> None:
    """
    Args:
        wait: for replicas in sync before the next broker restarts.
    """
    cluster, running = on_three
    running.send(100)
    running.until_idle()
    for node in NODES:
        busy(running)
        cluster.roll(wait, [node])
    running.until_idle()
    ends_with_every_record_once(running)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_brokers_of_a_cluster_fail_below_a_query(on_three: tuple[ThreeBrokers, Running], how: str) -> None:
    """Each of them in turn, until the others have taken over all that it led."""
    cluster, running = on_three
    running.send(100)
    running.until_idle()
    for node in NODES:
        busy(running)
        with cluster.paused(node) if how == "pause" else cluster.killed(node):
            cluster.wait_until(lambda node=node: node not in cluster.wire.nodes(), f"the cluster without {node}")
            at = running.arrived()
            running.send(100)
            running.until(lambda at=at: running.arrived() > at, f"it goes on without {node}")
        running.until_idle()
        cluster.wait_in_sync()
    ends_with_every_record_once(running)
