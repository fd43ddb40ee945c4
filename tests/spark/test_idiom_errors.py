"""The bare idiom: a mistake is refused by the call that it belongs to, and the text begins with what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.apps.idiom import Idiom, in_thread, texts
from tests.spark.topics import send

import delivered
from delivered.machine import java_home
from delivered.spark.internals import ADMITS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CODES = {
    "load: option": "OPTION_UNKNOWN",
    "load: format": "FORMAT_UNKNOWN",
    "start: guarantee missing": "GUARANTEE_MISSING",
    "start: guarantee": "GUARANTEE_UNKNOWN",
    "start: option": "OPTION_UNKNOWN",
    "start: columns": "COLUMN_UNKNOWN",
    "start: output mode": "OUTPUT_MODE",
    "start: timeout": "TRANSACTION_TIMEOUT_TOO_LONG",
    "start: topic": "TOPIC_UNKNOWN",
    "start: new checkpoint": "CHECKPOINT_NEW",
    "start: pipeline renamed": "LEDGER_RENAMED",
    "awaitTermination: row": "TOPIC_MISSING",
}


def check(said: dict[str, str]) -> None:
    """What was said to each mistake; nothing was started and logged for any of them."""
    for mistake, code in CODES.items():
        assert said[mistake].startswith(f"[DELIVERED_{code}] "), (mistake, said[mistake])
        first = said[mistake].splitlines()[0]
        assert " Next: " in first, (mistake, first)
        assert "Traceback" not in said[mistake], mistake
    assert "no_such_column" in said["other"]
    assert "DELIVERED" not in said["other"]
    assert (said["started"], said["offsets"]) == ("False", "0,1,2")
    for lag, (description, metrics) in zip([6, 2, 0], json.loads(said["progress"]), strict=True):
        assert description.startswith("delivered_kafka[t")
        known = {
            "minOffsetsBehindLatest": str(lag),
            "maxOffsetsBehindLatest": str(lag),
            "avgOffsetsBehindLatest": f"{lag}.0",
        }
        assert metrics == (known if ADMITS else {})  # an earlier Spark does not ask how far it is behind


def test_a_mistake_is_refused_where_it_is_made(spark: SparkSession, kafka: Any, tmp_path: Path) -> None:
    source, sink = kafka.topic(1), kafka.topic(1)
    send(kafka, source, range(10))
    idiom = Idiom(kafka.bootstrap, source, sink, str(tmp_path))
    check(texts(spark, idiom))

    with pytest.raises(delivered.Refused, match="CHECKPOINT_NEW"):
        idiom.start(idiom.read(spark).select("key", "value"), checkpointLocation=f"{tmp_path}/fresh")

    # every session of the application, and every thread of it
    from pyspark.sql import SparkSession

    foreign = SparkSession(spark.sparkContext, spark._jsparkSession.newSession())  # type: ignore[arg-type]
    for batches, other in enumerate([spark, spark.newSession(), foreign], start=4):
        send(kafka, source, range(10))
        assert in_thread(lambda s=other: idiom.run(idiom.read(s).select("key", "value"))) == batches
    assert spark.newSession().sql("SELECT 1").count() == 1


@pytest.mark.matrix
def test_the_same_over_spark_connect(kafka: Any, tmp_path: Path) -> None:
    source, sink = kafka.topic(1), kafka.topic(1)
    send(kafka, source, range(10))
    given = {
        "remote": "local[2]",
        "bootstrap": kafka.bootstrap,
        "source": source,
        "sink": sink,
        "folder": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.apps.idiom", *(part for k, v in given.items() for part in (f"--{k}", v))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
        env=os.environ
        | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java_home())},
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert done.returncode == 0 and said, done.stderr[-4000:]
    found = json.loads(said[0].removeprefix("SAID "))
    check(found)
    for mistake in ("start", "write_batch"):  # the server's working directory is not the client's
        assert "[DELIVERED_CHECKPOINT_RELATIVE] The checkpoint 'checkpoints/" in found[f"relative: {mistake}"], found
    assert found["batches"] == "3"  # nothing new to read: the query of another session and thread ran, and ended
