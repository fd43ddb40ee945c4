"""docs/deploy.md, tried: a driver on a standalone cluster, killed, and started again by supervisord as in deploy/."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.spark.standalone import SPARK_HOME, Standalone, kill_tree

import delivered
from delivered.operate.status import not_ready

if TYPE_CHECKING:
    from tests.support.servers import Kafka

CONFIG = Path(__file__).parents[2] / "deploy" / "supervisord.conf"
BIN = Path(sys.executable).parent
RECORDS = 6_000
WAIT_S = 600


def until(fact: Callable[[], bool], supervisord: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        said = log.read_text()[-3000:] if log.exists() else ""
        assert supervisord.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.1)


def check(file: Path, *, code: int) -> None:
    done = subprocess.run([BIN / "delivered", "status", "--check", file], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.timeout(1_800)
@pytest.mark.matrix
def test_a_supervised_driver_on_a_cluster_goes_on_after_kills(kafka: Kafka, tmp_path: Path) -> None:
    """First the driver alone dies, and its JVM without it; then the JVM; then all of it at once."""
    source, sink = kafka.topic(2), kafka.topic(2)
    values = [b"%d" % n for n in range(RECORDS)]
    produce(kafka.bootstrap, source, [(v, v) for v in values])
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    for folder in ("bin", "etc", "lib", "log", "run"):
        (tmp_path / folder).mkdir()
    with Standalone(tmp_path, sys.executable, {}, workers=1) as cluster:
        file = tmp_path / "etc" / "orders.yaml"
        pipeline = {
            "pipeline": "orders",
            "guarantee": "exactly_once",
            "checkpoint": str(tmp_path / "checkpoint"),
            "master": cluster.url,
            "spark": {"spark.executor.memory": "512m", "spark.cores.max": "1", "spark.driver.host": "127.0.0.1"},
            "source": {
                "format": "kafka", **servers, "subscribe": source, "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": 200,
            },
            "sinks": [{"format": "kafka", **servers, "topic": sink}],
        }  # fmt: skip
        file.write_text(yaml.safe_dump(pipeline))
        text = CONFIG.read_text().replace("/opt/delivered/bin", str(BIN)).replace("/etc/delivered", str(file.parent))
        for place in ("lib", "log", "run"):
            text = text.replace(f"/var/{place}/delivered", str(tmp_path / place))
        (tmp_path / "etc" / "supervisord.conf").write_text(text)
        check(file, code=1)
        command = [str(BIN / "supervisord"), "-c", str(tmp_path / "etc" / "supervisord.conf")]
        supervisord = psutil.Popen(command, env=os.environ | {"PYSPARK_PYTHON": sys.executable})
        log = tmp_path / "log" / "orders.log"
        made = delivered.Pipeline.from_file(file)

        def delivers(records: int) -> Callable[[], bool]:
            """A driver works, after so many records."""

            def seen() -> bool:
                now = made.status()
                return not_ready(now) is None and sum(s.records for s in now.sinks) >= records

            return seen

        try:
            for number, kill in enumerate((_driver, _jvm, _all)):
                until(delivers(1_000 * (number + 1)), supervisord, log)
                check(file, code=0)
                kill(supervisord)
            until(delivers(RECORDS), supervisord, log)
            check(file, code=0)
            supervisord.send_signal(signal.SIGTERM)
            assert supervisord.wait(WAIT_S) == 0
        finally:
            if supervisord.poll() is None:
                kill_tree(supervisord)
    assert log.read_text().count("orders: exactly_once by") >= 4, "it was started again after each kill"
    assert "orders: " in log.read_text().splitlines()[-1] and "interrupted" not in log.read_text().splitlines()[-1]
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == Counter(values)


def _jvm_of(supervisord: psutil.Popen) -> psutil.Process:
    return next(p for p in supervisord.children(recursive=True) if p.name().startswith("java"))


def _driver(supervisord: psutil.Popen) -> None:
    """Its JVM notices, and ends a moment later; until then it is the owner."""
    jvm = _jvm_of(supervisord)
    supervisord.children()[0].kill()
    jvm.wait(WAIT_S)


def _jvm(supervisord: psutil.Popen) -> None:
    jvm = _jvm_of(supervisord)
    jvm.kill()
    psutil.wait_procs([jvm], WAIT_S)


def _all(supervisord: psutil.Popen) -> None:
    kill_tree(supervisord.children()[0])


@pytest.mark.matrix
def test_a_standalone_cluster_runs_no_python_driver(tmp_path: Path) -> None:
    """docs/deploy.md says so: the day it does, the page changes."""
    done = subprocess.run(
        [SPARK_HOME / "bin" / "spark-submit", "--master", "spark://127.0.0.1:7077", "--deploy-mode", "cluster", "x.py"],
        capture_output=True,
        text=True,
    )
    assert "Cluster deploy mode is currently not supported for python applications" in done.stderr
