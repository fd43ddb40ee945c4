"""Records with registered schemas under the guarantees that need no ledger of transactions; a registry with a login."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.spark.framed import ORDER, TOTAL, framed, run, unframed
from tests.support.front import certificate, https_front
from tests.support.halted import killed

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka, Registry

APP = Path(__file__).parent / "apps" / "run_file.py"
UNREADABLE = [b"{}", struct.pack(">bI", 0, 999_999) + b"x"]
# A total without cents cannot be encoded.
SQL = (
    "SELECT key, named_struct('id', value.id, 'cents', if(value.id % 10 = 3, null, value.id * 100)) AS value, "
    "topic, partition, offset FROM source"
)
LOGIN = "ann:pass:word"


def totals(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`SQL`, in Arrow."""
    ids = [v["id"] for v in batch.column("value").to_pylist()]
    made = pa.array([{"id": n, "cents": None if n % 10 == 3 else n * 100} for n in ids], pa.struct(
        [("id", pa.int64()), ("cents", pa.int64())]
    ))  # fmt: skip
    return pa.RecordBatch.from_pydict({"key": batch.column("key"), "value": made})


def filled(kafka: Kafka, registry: Registry) -> tuple[str, str, int]:
    """A topic of thirty orders, three of whose totals cannot be encoded, and two unreadable records; a topic for
    totals; the id of their schema."""
    source, sink = kafka.topic(2), kafka.topic(2)
    number = registry.register(f"{source}-value", ORDER)
    good = [framed(number, ORDER, {"id": n, "city": "Ulm"}) for n in range(30)]
    produce(kafka.bootstrap, source, ((str(n).encode(), v) for n, v in enumerate([*good, *UNREADABLE])))
    return source, sink, registry.register(f"{sink}-value", TOTAL)


def written(kafka: Kafka, topic: str) -> Counter[tuple[int, int, int]]:
    """How often each (schema id, id, cents) is there."""
    found = [unframed(m.value() or b"", TOTAL) for m in read_committed(kafka.bootstrap, topic)]
    return Counter((number, total["id"], total["cents"]) for number, total in found)


def in_file(folder: Path, pipeline: dict[str, Any]) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"checkpoint": str(folder / "checkpoint"), "trigger": "available_now", **pipeline}))
    return file


@pytest.mark.matrix
def test_at_least_once_loses_no_record_and_no_letter_and_shows_no_password(
    kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    """Killed when all is sent and nothing recorded: everything is there twice. The registry has TLS and a login."""
    source, sink, number = filled(kafka, registry)
    letters = kafka.topic(1)
    files, login = certificate(tmp_path / "front"), tmp_path / "login"
    login.write_text("ann:guessed")
    with https_front(registry.url, files, LOGIN) as url:
        at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
        avro = {
            "value.format": "avro",
            "schema.registry.url": url,
            "schema.registry.basic.auth.user.info": f"file:{login}",
            "schema.registry.ssl.ca.location": str(files["certificate"]),
        }
        file = in_file(tmp_path, {
            "pipeline": "twice",
            "guarantee": "at_least_once",
            "source": {**at, **avro, "subscribe": source, "startingOffsets": "earliest"},
            "transform": {"sql": SQL},
            "sinks": [{**at, **avro, "topic": sink, "name": "totals"}],
            "on_bad_row": "dead_letter",
            "dead_letter": {**at, "topic": letters, "name": "letters"},
            "master": "local[2]",
        })  # fmt: skip
        pipeline = delivered.Pipeline.from_file(file)
        with pytest.raises(delivered.DeliveredError, match="SCHEMA_REGISTRY_LOGIN") as caught:
            run(pipeline, spark)
        assert "guessed" not in str(caught.value)
        login.write_text(LOGIN)
        plan = str(pipeline.plan(spark))
        killed([sys.executable, str(APP), str(file)], "commit.record:before@batch=0", tmp_path)
        once = Counter({(number, n, n * 100): 1 for n in range(30) if n % 10 != 3})
        assert written(kafka, sink) == once
        run(pipeline, spark)
        assert written(kafka, sink) == once + once
        told = [json.loads(m.value() or b"") for m in read_committed(kafka.bootstrap, letters)]
        by_sink = Counter(t["sink"] for t in told)
        assert by_sink == {"(source)": 2 * len(UNREADABLE), "totals": 2 * 3}, told
        report = pipeline.audit(spark, sink="totals")
        assert report.verdict == "held", report
    shown = [plan, repr(pipeline), str(pipeline.status()), str(report), (tmp_path / "output").read_text()]
    kept = [f.read_bytes().decode(errors="replace") for f in (tmp_path / "checkpoint").rglob("*") if f.is_file()]
    assert not [text for text in (*shown, *kept) if "pass:word" in text]


@pytest.mark.matrix  # crash/test_dead_letters.py drops rows, test_schemas.py has a registry
@pytest.mark.parametrize("transform", [pytest.param(SQL, id="sql"), pytest.param(totals, id="direct")])
def test_at_most_once_drops_and_counts(
    transform: Any, kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    source, sink, number = filled(kafka, registry)
    avro = {"value.format": "avro", "schema.registry.url": registry.url}
    given: dict[str, Any] = {
        "checkpoint": str(tmp_path / "checkpoint"),
        "trigger": "available_now",
        "transform": transform,
    }
    if transform is totals:
        given["transform"] = delivered.arrow(totals)
    ends: dict[str, Any] = {
        "source": delivered.kafka(kafka.bootstrap, subscribe=source, startingOffsets="earliest", **avro),
        "sinks": [delivered.kafka(kafka.bootstrap, topic=sink, name="totals", **avro)],
    }
    strict = delivered.Pipeline(name=sink, guarantee="at_least_once", on_bad_row="drop", **given, **ends)
    with pytest.raises(delivered.Refused, match=r"drop loses rows on purpose.*on_bad_row: dead_letter"):
        strict.start(spark)
    pipeline = delivered.Pipeline(name=sink, guarantee="at_most_once", on_bad_row="drop", **given, **ends)
    assert "a row that is invalid for totals is dropped and counted as given up" in str(pipeline.plan(spark))
    run(pipeline, spark)
    assert written(kafka, sink) == Counter({(number, n, n * 100): 1 for n in range(30) if n % 10 != 3})
    report = pipeline.audit(spark)
    assert (report.verdict, report.counts.lost, report.given_up) == ("held", 3, 3 + len(UNREADABLE)), report
