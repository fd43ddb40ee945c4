"""A pipeline begun by an earlier version, killed after its decision, continues with the current code."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.released import FORMAT_0, checkout, cli
from tests.support.halted import killed

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

ROWS = 400
CRASHED = "commit.decide:after@batch=1"
WAIT_S = 250.0


class Sinks:
    """Each makes the sink's part of the pipeline file, and a function by which a client that is not ours counts."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder = folder
        self.request = request

    def kafka(self, kafka: Kafka) -> tuple[dict[str, Any], Callable[[], Counter[str]]]:
        topic = kafka.topic(3)
        return (
            {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic},
            lambda: Counter(r.value().decode() for r in read_committed(kafka.bootstrap, topic)),
        )

    def sqlite(self, _: Kafka) -> tuple[dict[str, Any], Callable[[], Counter[str]]]:
        path = self.folder / "out.db"

        def seen() -> Counter[str]:
            with sqlite3.connect(path) as connection:
                return Counter(v.decode() for (v,) in connection.execute("SELECT value FROM events"))

        return {"format": "sqlite", "path": str(path), "table": "events"}, seen

    def delta(self, _: Kafka) -> tuple[dict[str, Any], Callable[[], Counter[str]]]:
        from deltalake import DeltaTable

        path = self.folder / "events"
        return {"format": "delta", "path": str(path)}, lambda: Counter(
            v.decode() for v in DeltaTable(str(path)).to_pyarrow_table()["value"].to_pylist()
        )

    def postgres(self, _: Kafka) -> tuple[dict[str, Any], Callable[[], Counter[str]]]:
        server = self.request.getfixturevalue("postgres")
        table = server.table()
        return {"format": "postgres", "url": server.url, "dbtable": table, "mechanism": "two_phase"}, lambda: Counter(
            bytes(v).decode() for (v,) in server.execute(f"SELECT value FROM {table}")
        )


@pytest.mark.matrix
@pytest.mark.checkpoint("a newer version of delivered", "continues", "killed after a decision of the earlier version")
@pytest.mark.parametrize(
    "sink", ["kafka", *(pytest.param(s, marks=pytest.mark.matrix) for s in ("sqlite", "delta", "postgres"))]
)
def test_killed_after_its_decision_and_upgraded(
    kafka: Kafka, spark: SparkSession, tmp_path: Path, sink: str, request: pytest.FixtureRequest
) -> None:
    """Checkpoint, ledger and markers of the earlier version are read: the batch is finished, none is repeated."""
    source = kafka.topic(2)
    produce(kafka.bootstrap, source, [(b"k%d" % (i % 9), b"id-%d" % i) for i in range(ROWS)])
    options, seen = getattr(Sinks(tmp_path, request), sink)(kafka)
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    pipeline = {
        "pipeline": f"upgraded-{sink}",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {
            "format": "kafka", **servers, "subscribe": source, "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": 100,
        },
        "transform": {"sql": "SELECT key, value FROM source", "deterministic": True},
        "sinks": [options],
        "trigger": "available_now",
        "master": "local[2]",
    }  # fmt: skip
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))

    command, env = cli(checkout(FORMAT_0, tmp_path / "earlier"), "run", str(file))
    killed(command, CRASHED, tmp_path, env)
    assert delivered.Pipeline.from_file(file).start(spark).awaitTermination(WAIT_S)
    assert seen() == Counter(f"id-{i}" for i in range(ROWS))
