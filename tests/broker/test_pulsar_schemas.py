"""Pulsar's schemas at the source: values as structs, schema versions, errors for unreadable values."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.pulsar import read, read_all, rows, source
from tests.support.pulsar_schemas import V0, V1, avro, record, registers, send, told
from tests.support.servers import Pulsar

from delivered.model.errors import BadRecord, UsageError


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_values_are_structs_by_the_version_that_the_query_was_planned_with(pulsar: Pulsar, kind: str) -> None:
    topic = pulsar.topic(2)
    send(pulsar, f"{topic}-partition-0", V0, [{"id": 1, "name": "a"}, {"id": None, "name": None}], kind)
    src = source(pulsar, topic, schema="topic").planned()
    old = pa.struct([("id", pa.int64()), ("name", pa.string())])
    assert src.schema().field("value").type == old
    assert src.preflight() == []
    assert told(read_all(src)) == [{"id": 1, "name": "a"}, {"id": None, "name": None}]

    send(pulsar, f"{topic}-partition-1", V1, [{"id": 2, "name": "b", "paid": True}], kind)
    pulsar.send(f"{topic}-partition-1", [{"content": None}], schema=registers(V1, kind))
    was = [{"id": 1, "name": "a"}, {"id": None, "name": None}, {"id": 2, "name": "b"}, None]
    assert told(read_all(src)) == was, "a query that runs got other columns"
    assert told(read_all(source(pulsar, topic, schema="topic", schemaVersion=0))) == was
    found = read_all(source(pulsar, topic, schema="topic"))
    assert found.schema.field("value").type == pa.struct([*old, ("paid", pa.bool_())])
    assert told(found) == [
        {"id": 1, "name": "a", "paid": None},
        {"id": None, "name": None, "paid": None},
        {"id": 2, "name": "b", "paid": True},
        None,
    ]
    assert found.column("partition").to_pylist() == [0, 0, 1, 1]
    assert isinstance(read_all(source(pulsar, topic)).column("value").to_pylist()[0], bytes)


def test_every_type_of_avro_that_has_a_column(pulsar: Pulsar) -> None:
    inner = {
        "type": "record",
        "name": "Inner",
        "fields": [{"name": "at", "type": _logical("long", "timestamp-millis")}],
    }
    schema = {
        "type": "record",
        "name": "All",
        "fields": [
            {"name": "yes", "type": "boolean"},
            {"name": "small", "type": "int"},
            {"name": "real", "type": "float"},
            {"name": "double", "type": "double"},
            {"name": "raw", "type": "bytes"},
            {"name": "four", "type": {"type": "fixed", "name": "Four", "size": 4}},
            {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}},
            {"name": "day", "type": _logical("int", "date")},
            {"name": "micros", "type": _logical("long", "timestamp-micros")},
            {"name": "local", "type": _logical("long", "local-timestamp-millis")},
            {"name": "price", "type": ["null", {**_logical("bytes", "decimal"), "precision": 9, "scale": 2}]},
            {"name": "uuid", "type": _logical("string", "uuid")},
            {"name": "times", "type": {"type": "array", "items": ["null", inner]}},
            {"name": "again", "type": {"type": "map", "values": "Inner"}},
        ],
    }
    at, day, uuid = (
        datetime(2024, 2, 29, 12, 0, 0, 123000, UTC),
        date(2024, 2, 29),
        "0f8fad5b-d9cb-469f-a165-70867728950e",
    )
    value = {
        "yes": True, "small": -5, "real": 1.5, "double": 0.1, "raw": b"\x00\xff", "four": b"abcd", "color": "BLUE",
        "day": day, "micros": at, "local": at.replace(tzinfo=None), "price": Decimal("-12.34"), "uuid": uuid,
        "times": [{"at": at}, None], "again": {"k": {"at": at}},
    }  # fmt: skip
    topic = pulsar.topic()
    pulsar.send(topic, [avro(schema, value)], schema=registers(schema))
    (found,) = told(read_all(source(pulsar, topic, schema="topic")))
    assert found == {**value, "again": [("k", {"at": at})]}


def _logical(kind: str, what: str) -> dict[str, Any]:
    return {"type": kind, "logicalType": what}


def test_what_has_no_columns_is_refused_before_the_start(pulsar: Pulsar) -> None:
    union = record(("id", "long"))
    union["fields"].append({"name": "odd", "type": ["int", "string"]})
    chain = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"], "default": None}]}
    for schema, kind, said in (
        (union, "AVRO", "field 'odd' is a union of int, string"),
        (chain, "AVRO", "field 'next' is of type 'L', which is recursive"),
        (
            record(("a", {"type": "array", "items": record(("b", "bytes"), name="I")})),
            "JSON",
            r"field 'a\[\].b' is bytes",
        ),
    ):
        topic = pulsar.topic()
        pulsar.client().create_producer(topic, schema=registers(schema, kind)).close()
        (finding,) = source(pulsar, topic, schema="topic").preflight()
        assert (finding.code, finding.refuses) == ("SCHEMA_UNMAPPABLE", True)
        with pytest.raises(UsageError, match=said):
            source(pulsar, topic, schema="topic").planned()
    topic = pulsar.topic()
    with pytest.raises(UsageError, match=r"SCHEMA_MISSING.*no schema"):
        source(pulsar, topic, schema="topic").planned()
    text = pulsar.topic()
    pulsar.client().create_producer(text, schema=__import__("pulsar").schema.StringSchema()).close()
    with pytest.raises(UsageError, match=r"STRING schema.*only AVRO and JSON"):
        source(pulsar, text, schema="topic").planned()
    first, second = pulsar.topic(), pulsar.topic()
    send(pulsar, first, V0, [])
    send(pulsar, second, V1, [])
    with pytest.raises(UsageError, match="SCHEMAS_DIFFER"):
        source(pulsar, f"{first},{second}", schema="topic").schema()
    with pytest.raises(UsageError, match="no version 7"):
        source(pulsar, first, schema="topic", schemaVersion=7).planned()
    for options in ({"schemaVersion": "0"}, {"schema": "topic", "schemaVersion": "0", "topics": "a,b"}):
        with pytest.raises(UsageError, match="OPTION_CONFLICT"):
            source(pulsar, first, **options)
    for options in ({"schema": "avro"}, {"schema": "topic", "schemaVersion": "latest"}):
        with pytest.raises(UsageError, match="OPTION_VALUE"):
            source(pulsar, first, **options)


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        ("AVRO", avro(V0, {"id": 3, "name": "c"})[:-1], "version 0"),
        ("AVRO", avro(V0, {"id": 3, "name": "c"}) + b"!", "ends after 5 of 6 bytes"),
        ("JSON", b'{"id": 1', "is not JSON"),
        ("JSON", b'{"id": 1.5, "name": "x"}', "field 'id' is float 1.5; it must be long"),
        ("JSON", b'{"id": 9223372036854775808}', "must be long"),
        ("JSON", b'{"id": true}', "must be long"),
        ("JSON", b"[]", "the value is list"),
    ],
)
def test_a_message_that_does_not_follow_its_schema_stops_the_slice(
    pulsar: Pulsar, kind: str, message: bytes, said: str
) -> None:
    topic = pulsar.topic()
    send(pulsar, topic, V0, [{"id": 1, "name": "a"}], kind)
    pulsar.send(topic, [message], schema=registers(V0, kind))
    with pytest.raises(BadRecord, match=said) as caught:
        read_all(source(pulsar, topic, schema="topic"))
    assert caught.value.code == "DELIVERED_MESSAGE_UNREADABLE"
    assert f"of {topic} names version 0" in caught.value.message
    assert len(read_all(source(pulsar, topic))) == 2


def test_a_message_without_a_schema_or_of_another_meaning_is_an_error(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    pulsar.send(topic, rows(1))
    send(pulsar, topic, V0, [{"id": 1, "name": "a"}])
    with pytest.raises(BadRecord, match=r"names no version.*sent without a schema"):
        read_all(source(pulsar, topic, schema="topic"))

    topic = pulsar.topic()
    millis, micros = (record(("at", _logical("long", f"timestamp-{unit}"))) for unit in ("millis", "micros"))
    at = datetime(2024, 2, 29, tzinfo=UTC)
    send(pulsar, topic, millis, [{"at": at}])
    send(pulsar, topic, micros, [{"at": at}])  # the brokers find these compatible
    src = source(pulsar, topic, schema="topic").planned()
    with pytest.raises(BadRecord, match=r"field 'at' is timestamp-millis; in version 1.*timestamp-micros"):
        read_all(src)
    start, end = src.driver().batch()
    middle = src.driver().latest(start, 1)
    assert told(read(src, middle, end)) == [{"at": at}]
