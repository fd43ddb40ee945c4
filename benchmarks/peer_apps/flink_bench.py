"""Flink SQL from topic to topic, as fast as it goes, in a cluster within this process. Arguments: bootstrap servers,
topic to read, topic to write, guarantee, folder of the Kafka connector's JAR, JAVA_HOME.

Prints READY once the cluster takes jobs, starts one at a line on stdin, prints DONE when it has finished.

What Flink needs to be at its best here:
- SQL with the raw format and object reuse: operators hand rows on without a copy, and no Python runs in the job.
- A bounded scan: the job ends by itself, after a last checkpoint that commits.
- Parallelism 2, a slot for each core; checkpoints every 3 s, so that commits rarely hold it up.
- Larger fetches and producer batches than the Java client's defaults, with time to fill.
"""

import os
import sys
import tempfile
from pathlib import Path

servers, topic_in, topic_out, guarantee, jars, java = sys.argv[1:]
os.environ["JAVA_HOME"] = java

from pyflink.common import Configuration  # noqa: E402 - reads JAVA_HOME
from pyflink.table import EnvironmentSettings, TableEnvironment  # noqa: E402

exactly_once = guarantee == "exactly_once"
state = Path(tempfile.mkdtemp(prefix="bench-flink-"))
settings = {
    "pipeline.jars": ";".join(jar.as_uri() for jar in sorted(Path(jars).resolve().glob("*.jar"))),
    "pipeline.object-reuse": "true",
    "parallelism.default": "2",
    "execution.checkpointing.interval": "3s",
    "execution.checkpointing.mode": "EXACTLY_ONCE" if exactly_once else "AT_LEAST_ONCE",
    "execution.checkpointing.dir": (state / "checkpoints").as_uri(),
    "python.executable": sys.executable,
    "python.client.executable": sys.executable,
}
configuration = Configuration()
for name, value in settings.items():
    configuration.set_string(name, value)
environment = TableEnvironment.create(
    EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
)
common = {
    "connector": "kafka",
    "properties.bootstrap.servers": servers,
    "key.format": "raw",
    "key.fields": "k",
    "value.format": "raw",
    "value.fields-include": "EXCEPT_KEY",
}
taken = {
    "topic": topic_in,
    "properties.group.id": topic_out,
    "properties.isolation.level": "read_committed",
    "scan.startup.mode": "earliest-offset",
    "scan.bounded.mode": "latest-offset",
    "properties.max.poll.records": "5000",
    "properties.max.partition.fetch.bytes": str(8 << 20),
}
given = {
    "topic": topic_out,
    "properties.compression.type": "lz4",
    "properties.acks": "all",
    "properties.batch.size": str(512 << 10),
    "properties.linger.ms": "50",
    "properties.transaction.timeout.ms": "600000",
    "sink.delivery-guarantee": "exactly-once" if exactly_once else "at-least-once",
}
if exactly_once:
    given["sink.transactional-id-prefix"] = topic_out
for name, options in (("taken", taken), ("given", given)):
    listed = ", ".join(f"'{k}' = '{v}'" for k, v in (common | options).items())
    environment.execute_sql(f"CREATE TABLE {name} (k BYTES, v BYTES) WITH ({listed})")
print("READY", flush=True)
sys.stdin.readline()
environment.execute_sql("INSERT INTO given SELECT k, v FROM taken").wait()
print("DONE", flush=True)
