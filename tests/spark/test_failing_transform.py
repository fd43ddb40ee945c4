"""Rows for which the transform raises, through Spark: in the dead letters, once, in the decision of their batch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.support.halted import killed
from tests.support.sweeps import sweep

import delivered
from delivered.pipeline.dead_letters import dead_letters

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "run_file.py"
CLEAN = """
import json
import pyarrow as pa

def clean(rows):
    orders = [json.loads(v) for v in rows.column("value").to_pylist()]
    values = [str(order["cents"] // order["count"]).encode() for order in orders]
    return pa.record_batch({"key": rows.column("key"), "value": pa.array(values, pa.binary())})
"""
GOOD = [b'{"cents": %d, "count": 2}' % (200 + n) for n in range(40)]
BAD = {
    b"{": "JSONDecodeError: Expecting property name",
    b'{"cents": 1, "count": 0}': "ZeroDivisionError: integer division or modulo by zero",
    b'{"cents": 1}': "KeyError: 'count'",
    b"\xff": "UnicodeDecodeError: ",
}
EXPRESSION = {"select": ["key", "concat(value, CAST(' cents' AS BINARY)) AS value"], "where": "length(value) = 3"}
DEDUP = {"by": ["key"], "within": "1 hour", "late": "drop"}


def described(folder: Path, kafka: Kafka, source: str, **more: Any) -> Path:
    (folder / f"{source}_clean.py").write_text(CLEAN)
    file = folder / "orders.yaml"
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    pipeline = {
        "pipeline": f"clean-{source}", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
        "source": {**at, "subscribe": source, "startingOffsets": "earliest"}, "trigger": "available_now",
        "transform": {"arrow": f"{source}_clean:clean"}, "on_bad_row": "dead_letter", "master": "local[2]", **more,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(pipeline))
    return file


def run(file: Path, spark: SparkSession) -> delivered.Pipeline:
    pipeline = delivered.Pipeline.from_file(file)
    query = pipeline.start(spark)
    assert query.awaitTermination(120)
    if query.exception() is not None:
        raise query.exception()
    return pipeline


def check_letters(kafka: Kafka, source: str, letters: str) -> None:
    """Each failing record once, with its bytes, its coordinates and the exception."""
    places = {(m.partition(), m.offset()): m.value() for m in read_committed(kafka.bootstrap, source)}
    told = [json.loads(m.value() or b"") for m in read_committed(kafka.bootstrap, letters)]
    found = {places[t["partition"], t["offset"]]: t for t in told}
    assert len(told) == len(found) == len(BAD)
    for value, reason in BAD.items():
        letter = found[value]
        assert (letter["sink"], letter["topic"]) == ("(transform)", source)
        assert letter["reason"].startswith(reason)
        kept = json.loads(letter["record"])["value"]
        assert kept == ({"base64": "/w=="} if value == b"\xff" else value.decode())


@pytest.mark.parametrize(
    ("way", "crash"),
    sweep(
        [
            ("expressions", "commit.decide:after@batch=0"),
            ("expressions", "write.prepare:after,commit.decide:after@batch=0"),
            ("direct", "write.prepare:after,commit.decide:after@batch=0"),
            ("dedup", "commit.decide:before,commit.decide:after@batch=0"),
        ],
        lambda way, crash: crash.startswith("commit.decide:after"),
    ),
)
def test_killed_before_and_after_the_decision(
    way: str, crash: str, kafka: Kafka, spark: SparkSession, tmp_path: Path
) -> None:
    """Kafka to Kafka. With expressions or a dedup, letters pass through Spark with the rows."""
    source, sink, letters = kafka.topic(2), kafka.topic(2), kafka.topic(1)
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    sinks = [{**at, "topic": sink, "name": "cents", **(EXPRESSION if way == "expressions" else {})}]
    more = {"sinks": sinks, "dead_letter": {**at, "topic": letters, "name": "letters"}}
    file = described(tmp_path, kafka, source, **more, **({"dedup": DEDUP} if way == "dedup" else {}))
    produce(kafka.bootstrap, source, ((str(n).encode(), v) for n, v in enumerate([*GOOD, *BAD])))
    killed([sys.executable, str(APP), str(file)], crash, tmp_path)
    pipeline = run(file, spark)
    tail = b" cents" if way == "expressions" else b""
    expected = Counter(b"%d%b" % ((200 + n) // 2, tail) for n in range(40))
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, sink)) == expected
    check_letters(kafka, source, letters)
    assert {n.sink for n in dead_letters(pipeline)} == {"(transform)"}
    report = pipeline.audit(spark, sink="cents")
    assert report.verdict == "held", report.unknowns
