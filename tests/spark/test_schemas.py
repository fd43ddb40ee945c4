"""Records with registered schemas, through Spark: Kafka to Kafka, a real registry, independent clients at both ends."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from tests.kafka_tools import produce, read_committed

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka, Registry

ROOT = Path(__file__).parents[2]
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "city", "type": "string"}],
}
TOTAL = {
    "type": "record",
    "name": "Total",
    "fields": [{"name": "id", "type": "long"}, {"name": "cents", "type": "long"}],
}
SQL = "SELECT key, named_struct('id', value.id, 'cents', value.id * 100) AS value, topic, partition, offset FROM source"


def framed(number: int, schema: dict[str, Any], value: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return struct.pack(">bI", 0, number) + stream.getvalue()


def unframed(data: bytes, schema: dict[str, Any]) -> tuple[int, Any]:
    return struct.unpack(">bI", data[:5])[1], fastavro.schemaless_reader(
        io.BytesIO(data[5:]), fastavro.parse_schema(schema), None
    )


def run(pipeline: delivered.Pipeline, spark: SparkSession) -> None:
    query = pipeline.start(spark)
    assert query.awaitTermination(120)
    if query.exception() is not None:
        raise query.exception()


def test_avro_in_and_out_with_dead_letters(
    kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    source, sink, letters = kafka.topic(2), kafka.topic(2), kafka.topic(1)
    first = registry.register(f"{source}-value", ORDER)
    written = registry.register(f"{sink}-value", TOTAL)
    evolved = {**ORDER, "fields": [*ORDER["fields"], {"name": "vip", "type": "boolean", "default": False}]}
    second = registry.register(f"{source}-value", evolved)
    good = [framed(first, ORDER, {"id": n, "city": "Ulm"}) for n in range(20)]
    good += [framed(second, evolved, {"id": n, "city": "Ulm", "vip": True}) for n in range(20, 30)]
    bad = [b"{}", struct.pack(">bI", 0, 999_999) + b"x", framed(first, ORDER, {"id": 1, "city": "x"})[:-1]]
    produce(kafka.bootstrap, source, ((str(n).encode(), v) for n, v in enumerate(good)))
    produce(kafka.bootstrap, source, ((b"bad", v) for v in bad))
    url = {"schema.registry.url": registry.url}

    def pipeline(**more: Any) -> delivered.Pipeline:
        return delivered.Pipeline(
            name="schemas",
            guarantee="exactly_once",
            checkpoint=tmp_path / "checkpoint",
            source=delivered.kafka(
                kafka.bootstrap, subscribe=source, startingOffsets="earliest", **{"value.format": "avro", **url}
            ),
            transform=SQL,
            sinks=[delivered.kafka(kafka.bootstrap, topic=sink, **{"value.format": "avro", **url})],
            trigger="available_now",
            **more,
        )

    plan = str(pipeline().plan(spark))
    assert f"value from avro by the newest version of {source}-value" in plan
    assert f"value as avro by the newest version of {sink}-value at the start" in plan
    with pytest.raises(Exception, match=rf"DELIVERED_RECORD_UNDECODABLE.*topic {source}, partition \d, offset \d+"):
        run(pipeline(), spark)
    assert read_committed(kafka.bootstrap, sink) == []

    whole = pipeline(
        on_bad_row="dead_letter", dead_letter=delivered.kafka(kafka.bootstrap, topic=letters, name="letters")
    )
    run(whole, spark)
    found = [unframed(m.value() or b"", TOTAL) for m in read_committed(kafka.bootstrap, sink)]
    assert sorted(v["id"] for _, v in found) == list(range(30))
    assert {(n, v["cents"] // max(v["id"], 1)) for n, v in found if v["id"]} == {(written, 100)}
    told = [json.loads(m.value() or b"") for m in read_committed(kafka.bootstrap, letters)]
    assert sorted(t["sink"] for t in told) == ["(source)"] * 3
    at = {(m.partition(), m.offset()): m.value() for m in read_committed(kafka.bootstrap, source)}
    assert {at[t["partition"], t["offset"]] for t in told} == set(bad)
    report = whole.audit(spark)
    assert report.verdict == "held", report
    assert report.counts.sent == 30


def test_the_page_begins_with_an_example_that_runs(
    kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.match(r"# \w+\n\n```python\n(.*?)```", (ROOT / "docs/schemas.md").read_text(), re.DOTALL)
    assert found
    servers = {"kafka": kafka.broker, "registry": registry.broker}
    monkeypatch.setattr(delivered.brokers, "start", servers.__getitem__)
    monkeypatch.setattr(delivered, "session", lambda: spark)
    said: list[Any] = []
    names: dict[str, Any] = {"print": said.append}
    here = {n: str(tmp_path / n) for n in ("orders.db", "checkpoint")}  # Spark's workers run elsewhere
    exec(re.sub(r'"(orders\.db|checkpoint)"', lambda m: repr(here[m[1]]), found[1]), names)
    assert said == ["held"], names["pipeline"].audit(spark).unknowns
    with closing(sqlite3.connect(here["orders.db"])) as database:
        assert sorted(database.execute("SELECT id, city FROM orders")) == [(n, f"city {n}") for n in (1, 2, 3)]
