"""Through Spark: a host whose clock is ahead, pipelines that share a ledger topic, and a source that lost its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.broker.source_help import cut_log
from tests.kafka_tools import produce, read_committed
from tests.support.halted import killed

import delivered
from delivered.connectors.kafka import CONNECTOR
from delivered.engine.context import open_ledger, open_shared_ledger
from delivered.model.identity import Scope

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN = Path(__file__).parent / "apps" / "batch_run.py"
AHEAD = """
import time
_ns, _s = time.time_ns, time.time
time.time_ns = lambda: _ns() + 3_600_000_000_000
time.time = lambda: _s() + 3_600
"""
"""Imported by every Python process at its start."""
ROWS, WAIT_S = 200, 180


def values(kafka: Any, topic: str) -> Counter[bytes | None]:
    return Counter(m.value() for m in read_committed(kafka.bootstrap, topic))


def from_file(file: Path, **more: Any) -> delivered.Pipeline:
    """A pipeline of this name, which reads to the present end and stops."""
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": file.stem,
                "guarantee": "exactly_once",
                "checkpoint": str(file.with_suffix("")),
                "trigger": "available_now",
                **more,
            }
        )
    )
    return delivered.Pipeline.from_file(file)


@pytest.mark.matrix
@pytest.mark.parametrize("system", ["kafka", "postgres"])
def test_a_run_on_a_host_whose_clock_is_ahead_hides_no_later_one(
    spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path, system: str
) -> None:
    """The later one is killed after its decision, and its rows are made visible when it is given again (P30)."""
    server = request.getfixturevalue(system)
    if system == "kafka":
        options = {"kafka.bootstrap.servers": server.bootstrap, "topic": server.topic(2)}
        sink, columns = CONNECTOR.sink(options), ["cast(id AS string) AS value"]
    else:
        options = {"url": server.url, "dbtable": server.table("id bigint"), "mechanism": "two_phase"}
        sink, columns = server.sink(options["dbtable"]), ["id"]

    def command(run: str) -> list[str]:
        return [sys.executable, str(RUN), system, json.dumps(options), run, str(ROWS), *columns]

    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    ahead = os.pathsep.join(filter(None, (str(tmp_path / "ahead"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command("r0"), env={**os.environ, "PYTHONPATH": ahead}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    ledger = open_ledger(sink, Scope("daily", sink.name, "r0"))
    first = ledger.look().last
    ledger.close()
    assert first is not None and first.decided_at_ms / 1000 > time.time() + 1_800, "its clock is not ahead"
    killed(command("r1"), "commit.decide:after", tmp_path)
    delivered.register(spark)
    writer = (
        spark.range(ROWS).selectExpr(*columns).write.format(f"delivered_{system}").mode("append").options(**options)
    )
    writer.option("pipeline", "daily").option("guarantee", "exactly_once").option("runId", "r1").save()
    if system == "kafka":
        found = Counter(int(v or b"") for v in values(server, options["topic"]).elements())
    else:
        found = Counter(n for (n,) in server.execute(f"SELECT id FROM {options['dbtable']}"))
    assert found == Counter(dict.fromkeys(range(ROWS), 2))


@pytest.mark.matrix
def test_pipelines_whose_sinks_have_one_name_share_a_ledger_topic(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """They run at once, batch after batch, and start again: none fences the other or takes its records for its own."""
    source, ledger = kafka.topic(2), f"ledger-{time.time_ns()}"
    topics = {name: kafka.topic(2) for name in ("bills", "orders")}
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}

    def pipeline(name: str) -> delivered.Pipeline:
        return from_file(
            tmp_path / f"{name}.yaml",
            source={**at, "subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 20},
            sinks=[{**at, "topic": topics[name], "ledgerTopic": ledger, "name": "out"}],
        )

    for start in range(0, 3 * ROWS, ROWS):
        produce(kafka.bootstrap, source, [(None, b"%d" % i) for i in range(start, start + ROWS)])
        queries = [pipeline(name).start(spark) for name in topics]
        for query in queries:
            assert query.awaitTermination(WAIT_S)
        for topic in topics.values():
            assert values(kafka, topic) == Counter(b"%d" % i for i in range(start + ROWS))
    for name in topics:
        scope = pipeline(name).spec.scope(pipeline(name).spec.open(), "other")
        look = open_shared_ledger(pipeline(name).spec.open(), scope)
        state = look.look()
        look.close()
        assert [d.scope.pipeline for d in state.earlier] == [name]


@pytest.mark.matrix
def test_a_source_that_lost_its_end_stops_every_kind_of_stream(
    mortal_kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """Rows that pass through Spark, and records that never become rows, by either client (P29)."""
    kafka = mortal_kafka
    kinds = [(sql, client) for sql in ("", "SELECT key, value FROM source") for client in ("arrow", "librdkafka")]
    topics = [kafka.topic(1) for _ in kinds]
    sinks = [kafka.topic(1) for _ in kinds]
    old, new = ([b"%s %d" % (word, i) for i in range(1_000)] for word in (b"old", b"new"))

    def start(number: int) -> None:
        sql, client = kinds[number]
        at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
        query = from_file(
            tmp_path / f"lost-end-{number}.yaml",
            source={**at, "subscribe": topics[number], "startingOffsets": "earliest", "client": client},
            sinks=[{**at, "topic": sinks[number]}],
            **({"transform": {"sql": sql}} if sql else {}),
        ).start(spark)
        assert query.awaitTermination(WAIT_S)

    for number, topic in enumerate(topics):
        for part in (old[:700], old[700:]):
            produce(kafka.bootstrap, topic, [(None, v) for v in part])
        start(number)
        assert values(kafka, sinks[number]) == Counter(old)
    kafka.broker.kill()
    for topic in topics:
        cut_log(kafka, topic, 700)
    kafka.broker.restart()
    for number, topic in enumerate(topics):
        produce(kafka.bootstrap, topic, [(None, v) for v in new])
        for _ in range(2):  # the alarm does not go away by itself
            lost = rf"DATA_LOST.*{topic}-0 lost its end: at offset 700.* 300 offsets 700 to 999 "
            with pytest.raises(Exception, match=lost):
                start(number)
        assert values(kafka, sinks[number]) == Counter(old)
