"""A standalone cluster whose worker dies in mid-batch, and Spark Connect."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tenacity
from tests.kafka_tools import produce, read_committed
from tests.spark.standalone import Standalone, kill_tree

from delivered.machine import java_home
from delivered.prefork import worker_python

if TYPE_CHECKING:
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "copy_topic.py"
RECORDS = 20_000
OVER_CONNECT = 8_000
"""Two batches of each query: one would not show that the second begins where the first ended."""


def _fill(kafka: Kafka, topic: str, records: int = RECORDS) -> Counter[bytes]:
    values = [b"%d" % n for n in range(records)]
    produce(kafka.bootstrap, topic, [(v, v) for v in values])
    return Counter(values)


def _arguments(kafka: Kafka, source: str, sink: str, checkpoint: Path) -> list[str]:
    pairs = {"bootstrap": kafka.bootstrap, "source": source, "sink": sink, "checkpoint": str(checkpoint)}
    return [part for name, value in pairs.items() for part in (f"--{name}", value)]


@pytest.mark.matrix
def test_a_cluster_worker_killed_in_mid_batch_changes_nothing(kafka: Kafka, tmp_path: Path) -> None:
    source, sink = kafka.topic(4), kafka.topic(4)
    sent = _fill(kafka, source)
    hits = tmp_path / "hits"
    hits.mkdir()
    env = {"DELIVERED_CRASH": "write.prepare:before@batch=2", "DELIVERED_CRASH_DIR": str(hits)}

    @tenacity.retry(stop=tenacity.stop_after_delay(180), wait=tenacity.wait_fixed(0.1), reraise=True)
    def hit() -> dict[str, int]:
        assert driver.poll() is None, (tmp_path / "driver.log").read_text()[-4000:]
        found: dict[str, int] = json.loads(next(iter(hits.glob("*.json")), None).read_text())  # type: ignore[union-attr]
        return found

    with Standalone(tmp_path, sys.executable, env) as cluster:
        driver = cluster.submit(APP, *_arguments(kafka, source, sink, tmp_path / "checkpoint"))
        try:
            kill_tree(cluster.worker_of(hit()["pid"]))
            assert driver.wait(240) == 0, (tmp_path / "driver.log").read_text()[-4000:]
        finally:
            if driver.poll() is None:
                kill_tree(driver)
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == sent


@pytest.mark.matrix
def test_a_master_that_forgot_the_application_ends_it_and_the_next_start_continues(
    kafka: Kafka, tmp_path: Path
) -> None:
    """Without recovery, a master that starts anew has the executors killed and tells the driver nothing."""
    source, sink = kafka.topic(4), kafka.topic(4)
    sent = _fill(kafka, source)
    file, checkpoint = tmp_path / "copy.json", tmp_path / "checkpoint"
    ends = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    limit = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 500}
    file.write_text(json.dumps({
        "pipeline": "copy", "guarantee": "exactly_once", "checkpoint": str(checkpoint),
        "source": {**ends, "subscribe": source, **limit},
        "transform": {"sql": "SELECT /*+ REPARTITION(4, key) */ key, value FROM source"},
        "sinks": [{**ends, "topic": sink}],
        "spark": {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2"},
    }))  # fmt: skip
    run = [sys.executable, "-c", "from delivered.cli.main import app; app()", "run", str(file), "--available-now"]
    batches = checkpoint / "commits"
    with Standalone(tmp_path, sys.executable, {}) as cluster:
        run += ["--master", cluster.url]
        first = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        try:
            while not (batches / "2").exists():
                assert first.poll() is None, first.communicate()
                time.sleep(0.1)
            assert cluster.master is not None
            kill_tree(cluster.master)
            cluster.start_master()
            _, told = first.communicate(timeout=400)
        finally:
            first.kill()
        assert first.returncode != 0 and "DELIVERED_EXECUTORS_LOST" in told, told
        assert not (batches / str(RECORDS // 500 - 1)).exists(), "all was delivered before"
        again = subprocess.run(run, capture_output=True, text=True, timeout=400, check=False)
        assert again.returncode == 0, again.stderr
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == sent


@pytest.mark.matrix
def test_jobs_over_spark_connect(kafka: Kafka, tmp_path: Path) -> None:
    source, sink = kafka.topic(2), kafka.topic(2)
    sent = _fill(kafka, source, OVER_CONNECT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.apps.over_connect"),
            *_arguments(kafka, source, sink, tmp_path / "c"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
        env=os.environ
        | {"PYSPARK_PYTHON": worker_python(), "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java_home())},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == sent
    for database in ("totals.db", "own.db"):
        with sqlite3.connect(tmp_path / database) as connection:
            found = sorted(connection.execute("SELECT k, n FROM totals"))
        assert found == [(k, OVER_CONNECT // 10) for k in range(10)], database
    with sqlite3.connect(tmp_path / "again.db") as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT v) FROM again").fetchone()
    assert found == (OVER_CONNECT, OVER_CONNECT), "a restart with changed code"
