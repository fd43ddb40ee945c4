"""Flink from topic to topic, in a cluster within this process. Arguments: pipeline file, seconds that a record takes,
folder of the Kafka connector's JAR, JAVA_HOME.

A stream has no end: when all that was there at the start is through a checkpoint, the job is stopped with a savepoint,
as its operators do it. It goes on from the newest savepoint or retained checkpoint.
"""

import os
import sys
import time
from pathlib import Path

import yaml
from confluent_kafka import Consumer, TopicPartition

told = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
source, sink, record_s = told["source"], told["sinks"][0], float(sys.argv[2])
os.environ["JAVA_HOME"] = sys.argv[4]
state = Path(told["checkpoint"]).resolve()
state.mkdir(parents=True, exist_ok=True)

from pyflink.common import Configuration  # noqa: E402 - reads JAVA_HOME
from pyflink.java_gateway import get_gateway  # noqa: E402
from pyflink.table import DataTypes, EnvironmentSettings, TableEnvironment  # noqa: E402
from pyflink.table.udf import udf  # noqa: E402


def newest_state() -> str | None:
    """A checkpoint counts when its metadata is written."""
    found = sorted(state.glob("**/_metadata"), key=lambda p: p.stat().st_mtime)
    return found[-1].parent.as_uri() if found else None


def through(consumer: Consumer, ends: dict[int, int]) -> bool:
    """Whether a checkpoint holds everything before `ends`: Flink tells the group so when one is complete."""
    committed = consumer.committed([TopicPartition(source["subscribe"], p) for p in ends], timeout=30)
    return all(tp.offset >= ends[tp.partition] for tp in committed)


exactly_once = told["guarantee"] == "exactly_once"
servers = source["kafka.bootstrap.servers"]
settings = {
    "pipeline.jars": ";".join(jar.as_uri() for jar in sorted(Path(sys.argv[3]).resolve().glob("*.jar"))),
    "parallelism.default": "2",
    "execution.checkpointing.interval": "500ms",
    "execution.checkpointing.mode": "EXACTLY_ONCE" if exactly_once else "AT_LEAST_ONCE",
    "execution.checkpointing.dir": (state / "checkpoints").as_uri(),
    "execution.checkpointing.savepoint-dir": (state / "savepoints").as_uri(),
    "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "20",
    "restart-strategy.fixed-delay.delay": "1s",
    "python.executable": sys.executable,
    "python.client.executable": sys.executable,
    "python.fn-execution.bundle.size": "10",
    "taskmanager.memory.process.size": "1g",
}
if (restored := newest_state()) is not None:
    settings["execution.state-recovery.path"] = restored
configuration = Configuration()
for name, value in settings.items():
    configuration.set_string(name, value)
table = TableEnvironment.create(
    EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
)


@udf(result_type=DataTypes.BYTES())
def slowly(value):
    time.sleep(record_s)
    return value


consumer = Consumer({"bootstrap.servers": servers, "group.id": told["pipeline"], "log_level": 0})
topic = consumer.list_topics(source["subscribe"], timeout=30).topics[source["subscribe"]]
parts = [TopicPartition(source["subscribe"], p) for p in topic.partitions]
ends = {tp.partition: end for tp in parts if (end := consumer.get_watermark_offsets(tp, timeout=30)[1]) > 0}

table.create_temporary_function("slowly", slowly)
common = {
    "connector": "kafka",
    "key.format": "raw",
    "key.fields": "k",
    "value.format": "raw",
    "value.fields-include": "EXCEPT_KEY",
}
taken = {
    "topic": source["subscribe"],
    "properties.bootstrap.servers": servers,
    "properties.group.id": told["pipeline"],
    "properties.isolation.level": "read_committed",
    "scan.startup.mode": "earliest-offset",
}
given = {
    "topic": sink["topic"],
    "properties.bootstrap.servers": sink["kafka.bootstrap.servers"],
    "properties.transaction.timeout.ms": "600000",
    "sink.delivery-guarantee": "exactly-once" if exactly_once else "at-least-once",
}
if exactly_once:
    given["sink.transactional-id-prefix"] = told["pipeline"]
for name, options in (("taken", taken), ("given", given)):
    listed = ", ".join(f"'{k}' = '{v}'" for k, v in (common | options).items())
    table.execute_sql(f"CREATE TABLE {name} (k BYTES, v BYTES) WITH ({listed})")
job = table.execute_sql("INSERT INTO given SELECT k, slowly(v) FROM taken").get_job_client()
while not through(consumer, ends):
    status = str(job.get_job_status().result())
    if "FAILED" in status or "FINISHED" in status or "CANCELED" in status:
        raise SystemExit(f"the job ended: {status}")
    time.sleep(0.1)
# PyFlink's own wrapper calls a method that Java's client does not have any more (apache-flink 2.3.0).
canonical = get_gateway().jvm.org.apache.flink.core.execution.SavepointFormatType.CANONICAL
stopped = job._j_job_client.stopWithSavepoint(False, (state / "savepoints").as_uri(), canonical)
print("stopped with", stopped.get(), flush=True)
