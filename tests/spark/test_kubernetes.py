"""deploy/'s manifests on a real API server: driver and executors meet, and go on when pods die.

The manifests are as in deploy/ but for the pipeline's servers, the ports, and the image, which is this environment.
What a cluster has besides is small (`support/kubernetes.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.spark.standalone import SPARK_HOME
from tests.support.hadoop import s3a_jars, s3a_settings
from tests.support.kubernetes import Cluster, documents, missing

from delivered.machine import java_home
from delivered_lab.brokers.servers import free_ports
from delivered_lab.supervisor import kill_tree

if TYPE_CHECKING:
    from tests.support.servers import Kafka

DEPLOY = Path(__file__).parents[2] / "deploy"
RECORDS = 6_000
WAIT_S = 420.0
EXECUTORS = 2


def _manifests(
    kafka: Kafka, source: str, sink: str, s3: dict[str, str], port: int, folder: str
) -> list[dict[str, Any]]:
    found = list(documents(DEPLOY / "kubernetes.yaml", DEPLOY / "kubernetes-executors.yaml"))
    driver, blocks = free_ports(2)
    (config,) = (d for d in found if d["kind"] == "ConfigMap")
    pipeline = yaml.safe_load(config["data"]["orders.yaml"])
    servers = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    pipeline |= {
        "checkpoint": f"s3a://lake/{folder}/orders",
        "master": f"{pipeline['master']}:{port}",
        "source": {**servers, "subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 150},
        "sinks": [{**servers, "topic": sink}],
    }
    pipeline["spark"] |= {
        "spark.driver.port": driver,
        "spark.driver.blockManager.port": blocks,
        "spark.driver.memory": "512m",
        "spark.executor.instances": EXECUTORS,
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "256m",
        "spark.driver.extraClassPath": s3a_jars(),
        "spark.executor.extraClassPath": s3a_jars(),
        **{f"spark.hadoop.{k}": v for k, v in s3a_settings(s3).items()},
    }
    config["data"]["orders.yaml"] = yaml.safe_dump(pipeline)
    return found


@pytest.mark.matrix
@pytest.mark.timeout(1_800)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_driver_and_executors_in_pods(kafka: Kafka, s3: dict[str, str], tmp_path: Path) -> None:
    source, sink = kafka.topic(4), kafka.topic(4)
    values = [b"%d" % n for n in range(RECORDS)]
    produce(kafka.bootstrap, source, [(v, v) for v in values])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "SPARK", "HADOOP", "PYSPARK", "KUBE"))}
    env |= {"JAVA_HOME": str(java_home()), "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with Cluster(
        tmp_path / "k8s", [str(DEPLOY / "entrypoint.sh")], env, ("orders",), frozenset({"metrics"})
    ) as cluster:
        # The strictest of Kubernetes' levels: what does not fit is refused.
        cluster.request(
            "PATCH",
            "/api/v1/namespaces/default",
            {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
            "application/merge-patch+json",
        )
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "orders"}}
        cluster.apply({**secret, "stringData": {"kafka-password": "none"}})
        for document in _manifests(kafka, source, sink, s3, cluster.port, tmp_path.name):
            cluster.apply(document)

        def until(fact: Callable[[], bool]) -> None:
            deadline = time.monotonic() + WAIT_S
            while not fact():
                said = tmp_path / "k8s" / "orders-0.driver.log"
                assert time.monotonic() < deadline, said.read_text()[-8000:] if said.exists() else cluster.failures
                time.sleep(0.2)

        def executors() -> list[dict[str, Any]]:
            found = cluster.pods(**{"spark-role": "executor"})
            return [p for p in found if p["status"].get("phase") == "Running"]

        def delivered_more(records: int) -> Callable[[], bool]:
            return lambda: len(read_committed(kafka.bootstrap, sink)) >= records

        until(delivered_more(1))
        assert len(executors()) == EXECUTORS
        driver = next(p for p in cluster.pods(**{"app.kubernetes.io/instance": "orders"}))
        for pod in executors():
            (owner,) = pod["metadata"]["ownerReferences"]
            assert owner["uid"] == driver["metadata"]["uid"], "they go with the driver"
        done = len(read_committed(kafka.bootstrap, sink))
        # More executors die than Spark would take if none of their failures were forgotten: 2 x 2.
        for number in range(3):
            victim = executors()[0]["metadata"]["name"]
            kill_tree(cluster.process_of(victim))
            until(lambda v=victim: v not in {p["metadata"]["name"] for p in executors()})  # type: ignore[misc]
            until(delivered_more(done + 400 * (number + 1)))
        kill_tree(cluster.process_of("orders-0", "driver"))
        done = len(read_committed(kafka.bootstrap, sink))
        until(delivered_more(done + 400))
        until(lambda: Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == Counter(values))
        # The pod ends within its grace period, and takes the executors with it.
        process = cluster.process_of("orders-0", "driver")
        process.send_signal(signal.SIGTERM)
        psutil.wait_procs([process], WAIT_S)
        cluster.request("DELETE", "/api/v1/namespaces/default/pods/orders-0")
        until(lambda: not cluster.pods(**{"spark-role": "executor"}))
        assert not cluster.failures
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == Counter(values)
