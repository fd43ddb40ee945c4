"""Records with registered schemas, through Spark: Kafka to Kafka, a real registry, independent clients at both ends."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.spark.framed import ORDER, TOTAL, framed, run, unframed
from tests.support.halted import killed

import delivered
from delivered.model.identity import Scope
from delivered.model.work import Ok
from delivered.operate.dead_letters import dead_letters, retry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka, Registry

ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "apps" / "run_file.py"
SQL = "SELECT key, named_struct('id', value.id, 'cents', value.id * 100) AS value, topic, partition, offset FROM source"


@pytest.mark.matrix
def test_a_decided_batch_written_again_has_the_same_bytes_and_letters(
    kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    """Without dead letters, a record that cannot be decoded stops it. With them, it is killed after the decision; then
    its transactions expire, and the registry gets a new version."""
    source, sink, letters = kafka.topic(2), kafka.topic(2), kafka.topic(1)
    written = registry.register(f"{sink}-value", TOTAL)
    first = registry.register(f"{source}-value", ORDER)
    vip = {**ORDER, "fields": [*ORDER["fields"], {"name": "vip", "type": "boolean", "default": False}]}
    second = registry.register(f"{source}-value", vip)
    good = [framed(first, ORDER, {"id": n, "city": "Ulm"}) for n in range(30)]
    good += [framed(second, vip, {"id": n, "city": "Ulm", "vip": True}) for n in range(30, 40)]
    bad = [b"{}", struct.pack(">bI", 0, 999_999) + b"x", framed(first, ORDER, {"id": 1, "city": "x"})[:-1]]
    produce(kafka.bootstrap, source, ((str(n).encode(), v) for n, v in enumerate([*good, *bad])))
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    avro = {"value.format": "avro", "schema.registry.url": registry.url}
    pipeline = {
        "pipeline": "again",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {**at, **avro, "subscribe": source, "startingOffsets": "earliest"},
        "transform": {"sql": SQL},
        "sinks": [{**at, **avro, "topic": sink, "name": "totals"}],
        "trigger": "available_now",
        "master": "local[2]",
    }
    file = tmp_path / "pipeline.yaml"
    # Into a topic of its own: its other task may have prepared a transaction, which blocks readers.
    strict_sink = kafka.topic(2)
    registry.register(f"{strict_sink}-value", TOTAL)
    sinks = [{**at, **avro, "topic": strict_sink, "name": "totals"}]
    own = {"pipeline": "strict", "checkpoint": str(tmp_path / "strict"), "sinks": sinks}
    file.write_text(yaml.safe_dump({**pipeline, **own}))
    strict = delivered.Pipeline.from_file(file)
    plan = " ".join(str(strict.plan(spark)).split())  # lines break elsewhere for other names of topics
    assert f"value from avro by the newest version of {source}-value" in plan
    assert f"value as avro by the newest version of {strict_sink}-value at the start" in plan
    with pytest.raises(Exception, match=rf"DELIVERED_RECORD_UNDECODABLE.*topic {source}, partition \d, offset \d+"):
        run(strict, spark)

    more = {"on_bad_row": "dead_letter", "dead_letter": {**at, "topic": letters, "name": "letters"}}
    file.write_text(yaml.safe_dump({**pipeline, **more}))
    killed([sys.executable, str(APP), str(file)], "commit.decide:after@batch=0", tmp_path)
    newer = {**TOTAL, "fields": [*TOTAL["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
    assert registry.register(f"{sink}-value", newer) != written
    whole = delivered.Pipeline.from_file(file)
    for name, endpoint in (("totals", whole.sinks[0]), ("letters", whole.dead_letter)):
        assert endpoint is not None
        with closing(endpoint.sink().committer(Scope("again", name, "any"))) as committer:
            open_ = [t.transactional_id for t in committer.open_transactions()]
            assert open_, f"{name}: its transactions are prepared"
            for transactional_id in open_:
                assert isinstance(committer.end_by_id(transactional_id, commit=False), Ok)
    assert read_committed(kafka.bootstrap, sink) == read_committed(kafka.bootstrap, letters) == []
    run(whole, spark)
    expected = {framed(written, TOTAL, {"id": n, "cents": n * 100}) for n in range(40)}
    found = [m.value() or b"" for m in read_committed(kafka.bootstrap, sink)]
    assert sorted(found) == sorted(expected), "each once, with the id that the batch was decided with"
    told = [json.loads(m.value() or b"") for m in read_committed(kafka.bootstrap, letters)]
    places = {(m.partition(), m.offset()): m.value() for m in read_committed(kafka.bootstrap, source)}
    assert sorted(places[t["partition"], t["offset"]] or b"" for t in told) == sorted(bad), "each once"
    assert {t["sink"] for t in told} == {"(source)"}

    shown = dead_letters(whole)
    assert {(n.sink, n.topic) for n in shown} == {("(source)", source)} and len(shown) == 3
    kept = retry(whole)
    assert set(kept.rejected) == {n.id for n in shown} and not kept.settled, "they stay open"

    # The next batch takes the newest version.
    produce(kafka.bootstrap, source, [(b"40", framed(first, ORDER, {"id": 40, "city": "Ulm"}))])
    run(whole, spark)
    (last,) = {m.value() for m in read_committed(kafka.bootstrap, sink)} - expected
    latest = registry.register(f"{sink}-value", newer)
    assert unframed(last or b"", newer) == (latest, {"id": 40, "cents": 4000, "note": None})
    report = whole.audit(spark, sink="totals")
    assert (report.verdict, report.counts.sent) == ("held", 41), report.unknowns


def order_message() -> Any:
    """The class of `message Order { int64 id = 1; string city = 2; }`, of protobuf's own making."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    for name, number, kind in (("id", 1, field.TYPE_INT64), ("city", 2, field.TYPE_STRING)):
        order.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def of_protobuf(client: Any) -> tuple[Any, Any, Any]:
    """Confluent's serializer and deserializer, and what turns a dictionary into what they take."""
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer

    kind = order_message()
    return ProtobufSerializer(kind, client), ProtobufDeserializer(kind, schema_registry_client=client), kind


def of_json(client: Any) -> tuple[Any, Any, Any]:
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer

    fields = {"id": {"type": "integer"}, "city": {"type": "string"}}
    text = json.dumps({"title": "Order", "type": "object", "properties": fields, "required": ["id", "city"]})
    return JSONSerializer(text, client), JSONDeserializer(text, schema_registry_client=client), dict


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "theirs"), [("protobuf", of_protobuf), ("json_schema", of_json)])
def test_confluents_serializers_and_we_read_each_other(
    kind: str, theirs: Any, kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    """Keys and values."""
    from confluent_kafka.serialization import MessageField, SerializationContext

    source, sink = kafka.topic(2), kafka.topic(2)
    serialize, deserialize, made = theirs(registry.client())

    def places(topic: str) -> tuple[Any, Any]:
        return SerializationContext(topic, MessageField.KEY), SerializationContext(topic, MessageField.VALUE)

    sent = [{"id": n, "city": "Ulm" if n % 3 else ""} for n in range(30)]
    records = [tuple(serialize(made(**order), place) for place in places(source)) for order in sent]
    produce(kafka.bootstrap, source, records)
    for place in places(sink):
        serialize(made(**sent[0]), place)  # registers the sink's subjects
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "schema.registry.url": registry.url}
    at |= {"key.format": kind, "value.format": kind}
    pipeline = delivered.Pipeline.from_file(_file(tmp_path, {
        "pipeline": kind, "guarantee": "exactly_once", "checkpoint": "checkpoint", "master": "local[2]",
        "source": {**at, "subscribe": source, "startingOffsets": "earliest"}, "trigger": "available_now",
        "transform": {"sql": "SELECT key, named_struct('id', value.id, 'city', upper(value.city)) value FROM source"},
        "sinks": [{**at, "topic": sink}],
    }))  # fmt: skip
    run(pipeline, spark)
    key, value = places(sink)
    found = [(deserialize(m.key(), key), deserialize(m.value(), value)) for m in read_committed(kafka.bootstrap, sink)]
    upper = [{**order, "city": order["city"].upper()} for order in sent]
    assert sorted(
        (k.id, k.city, v.id, v.city) if kind == "protobuf" else (*k.values(), *v.values()) for k, v in found
    ) == [(*k.values(), *v.values()) for k, v in zip(sent, upper, strict=True)]
    report = pipeline.audit(spark)
    assert report.verdict.value == "held", report.unknowns


def _file(folder: Path, pipeline: dict[str, Any]) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


@pytest.mark.checkpoint(
    "SQL for columns of a newer registered schema, over an unfinished batch",
    "refused",
    "`TRANSFORM_UNFINISHED_BATCH`: the previous SQL finishes it",
)
def test_sql_for_new_columns_over_an_unfinished_batch_says_how_to_finish_it(
    kafka: Kafka, registry: Registry, spark: SparkSession, tmp_path: Path
) -> None:
    source = kafka.topic(1)
    first = registry.register(f"{source}-value", ORDER)
    produce(kafka.bootstrap, source, [(None, framed(first, ORDER, {"id": 1, "city": "Ulm"}))])
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": source}
    pipeline = {
        "pipeline": "newer",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {**at, "startingOffsets": "earliest", "value.format": "avro", "schema.registry.url": registry.url},
        "sinks": [{"format": "sqlite", "path": str(tmp_path / "out.db"), "table": "orders", "mergeSchema": "true"}],
        "trigger": "available_now",
    }

    def by(sql: str) -> delivered.Pipeline:
        return delivered.Pipeline.from_file(_file(tmp_path, {**pipeline, "transform": {"sql": sql}}))

    old = by("SELECT value.id AS id FROM source")
    run(old, spark)
    for name in ("0", ".0.crc"):  # as if killed before Spark logged it
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    vip = {**ORDER, "fields": [*ORDER["fields"], {"name": "vip", "type": "boolean", "default": False}]}
    registry.register(f"{source}-value", vip)
    new = by("SELECT value.id AS id, value.vip AS vip FROM source")
    with pytest.raises(delivered.UsageError, match=r"TRANSFORM_UNFINISHED_BATCH.*value of source in version 1.*vip"):
        new.start(spark)
    run(old, spark)
    run(new, spark)
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        assert database.execute("SELECT id FROM orders").fetchall() == [(1,)]
