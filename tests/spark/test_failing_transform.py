"""Rows for which the transform raises, through Spark: in the dead letters, once, in the decision of their batch."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
import struct
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.support.halted import killed
from tests.support.sweeps import sweep

import delivered
from delivered.operate.dead_letters import dead_letters, drop, retry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka, Registry

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


def described(folder: Path, kafka: Kafka, topic: str, **more: Any) -> Path:
    (folder / f"{topic}_clean.py").write_text(CLEAN)
    file = folder / "orders.yaml"
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    pipeline = {
        "pipeline": f"clean-{topic}", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
        "source": {**at, "subscribe": topic, "startingOffsets": "earliest"}, "trigger": "available_now",
        "transform": {"arrow": f"{topic}_clean:clean"}, "on_bad_row": "dead_letter", "master": "local[2]", **more,
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


def framed(number: int, schema: dict[str, Any], value: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return struct.pack(">bI", 0, number) + stream.getvalue()


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


@pytest.mark.matrix
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
    if "," in crash:  # `make verify` audits, too
        report = pipeline.audit(spark, sink="cents")
        assert report.verdict == "held", report.unknowns


IDS = """
import pyarrow as pa

def ids(rows):
    orders = rows.column("value").to_pylist()
    found = [{"id": order["id"], "city": order["city"].encode(CODE).decode()} for order in orders]
    return pa.RecordBatch.from_pylist(found, schema=pa.schema([("id", pa.int64()), ("city", pa.string())]))
"""
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "city", "type": "string"}],
}


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["expressions", "direct"])
def test_of_a_decoded_record_the_bytes_are_kept_and_retried(
    way: str, kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    """Avro to SQLite: one record cannot be decoded, and the function fails for another one."""
    source, letters = kafka.topic(2), kafka.topic(1)
    number = registry.register(f"{source}-value", ORDER)
    avro = [framed(number, ORDER, {"id": n, "city": city}) for n, city in enumerate(["Ulm", "K\u00f6ln", "Bonn"])]
    produce(kafka.bootstrap, source, ((None, v) for v in [*avro, b"{}"]))
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    sink = {"format": "sqlite", "path": str(tmp_path / "out.db"), "table": "orders", "ifNotExists": True}
    read = {**at, "value.format": "avro", "schema.registry.url": registry.url, "subscribe": source}
    more = {
        "source": {**read, "startingOffsets": "earliest"},
        "sinks": [{**sink, "select": ["id", "upper(city) AS city" if way == "expressions" else "city"]}],
        "dead_letter": {**at, "topic": letters},
    }

    def made(code: str) -> Path:
        module = f"{source}_{code.replace('-', '')}"
        (tmp_path / f"{module}.py").write_text(f"CODE = {code!r}\n{IDS}")
        return described(tmp_path, kafka, source, **more, transform={"arrow": f"{module}:ids"})

    def ids() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
            return sorted(n for (n,) in connection.execute("SELECT id FROM orders"))

    found = {n.sink: n for n in dead_letters(run(made("ascii"), spark))}
    assert (set(found), ids()) == ({"(source)", "(transform)"}, [0, 2])
    kept = json.loads(found["(transform)"].record)["value"]
    assert (base64.b64decode(kept["base64"]) if isinstance(kept, dict) else kept.encode()) == avro[1]
    assert found["(transform)"].reason.startswith("UnicodeEncodeError")
    mended = delivered.Pipeline.from_file(made("utf-8"))
    done = retry(mended)
    if way == "direct":
        assert "it cannot be decoded" in done.rejected.pop(found["(source)"].id)
        assert (done.settled, done.rejected, ids()) == ({"orders": 1}, {}, [0, 1, 2])
    else:
        assert set(done.rejected) == {n.id for n in found.values()}
    drop(mended)
    assert dead_letters(mended) == []
