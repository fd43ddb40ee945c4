"""A real registry: what it refuses is refused before anything is written; Confluent's serializer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from delivered.contract.schemas import WritesBySchema
from delivered.kits.schemas.codec import Decoder, Encoder
from delivered.kits.schemas.registry import connected
from delivered.kits.schemas.schema import schema_of
from delivered.model.errors import Unreachable, UsageError
from delivered.pipeline.registry import find_sink

if TYPE_CHECKING:
    from tests.support.servers import Registry

ORDER: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
NARROWER = {**ORDER, "fields": [*ORDER["fields"], {"name": "city", "type": "string"}]}
WIDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "city", "type": ["null", "string"], "default": None}]}
ID, ROWS = pa.struct([("id", pa.int64())]), pa.struct([("id", pa.int64()), ("city", pa.string())])


def sink(url: str, topic: str, **more: str) -> WritesBySchema:
    given = {f"value.{k}": v for k, v in {"format": "avro", **more}.items()}
    options = {"kafka.bootstrap.servers": "b:1", "topic": topic, "schema.registry.url": url, **given}
    made = find_sink("kafka", options)
    assert isinstance(made, WritesBySchema)
    return made


def value(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("value", kind)])


def test_a_change_that_the_registry_refuses_changes_nothing(registry: Registry) -> None:
    with pytest.raises(UsageError, match=r"SCHEMA_MISSING.*'new-value' has no schema"):
        sink(registry.url, "new").check_rows(value(ID))
    first = sink(registry.url, "new", schema=json.dumps(ORDER)).settled(value(ID))
    assert sink(registry.url, "new").settled(value(ID)).schema_ids() == first.schema_ids()
    registry.client().set_compatibility("new-value", "BACKWARD")

    refused = sink(registry.url, "new", schema=json.dumps(NARROWER))
    for attempt in (refused.check_rows, refused.settled):
        with pytest.raises(UsageError, match=r"SCHEMA_REFUSED.*'new-value'.*Nothing was registered"):
            attempt(value(ROWS))
    assert registry.client().get_versions("new-value") == [1]
    with pytest.raises(UsageError, match=r"SCHEMA_UNFIT.*'value\.city' is not a field of the schema"):
        sink(registry.url, "new").check_rows(value(ROWS))

    second = sink(registry.url, "new", schema=json.dumps(WIDER)).settled(value(ROWS))
    assert registry.client().get_versions("new-value") == [1, 2]
    assert sink(registry.url, "new").settled(value(ROWS)).schema_ids() == second.schema_ids() != first.schema_ids()
    assert sink(registry.url, "new", **{"schema.version": "1"}).settled(value(ID)).schema_ids() == first.schema_ids()
    assert sink(registry.url, "new").by_ids(first.schema_ids()).schema_ids() == first.schema_ids()
    with pytest.raises(UsageError, match=r"SCHEMA_KIND.*is avro, and value\.format is protobuf"):
        sink(registry.url, "new", format="protobuf").check_rows(value(ID))
    with pytest.raises(UsageError, match="SCHEMA_MISSING"):
        sink(registry.url, "new").by_ids({"value": 999_999})


def test_a_registry_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.kits.schemas.registry.patience_s", lambda answered: 0.2)
    with pytest.raises(Unreachable, match=r"REGISTRY_UNREACHABLE.*http://127\.0\.0\.1:1 does not answer") as caught:
        sink("http://127.0.0.1:1", "away").check_rows(value(ID))
    assert caught.value.may_come_back


def test_confluents_serializer_and_ours_read_each_other(registry: Registry) -> None:
    client, context = registry.client(), SerializationContext("interop", MessageField.VALUE)
    theirs = AvroSerializer(client, json.dumps(WIDER))({"id": 7, "city": "Ulm"}, context)
    planned = connected({"url": registry.url}).find("interop-value", None)
    assert planned is not None
    rows = pa.array([{"id": 7, "city": "Ulm"}], schema_of(planned).arrow)
    ours, _ = Encoder(planned, None, rows.type).column(rows)
    assert ours.to_pylist() == [theirs]
    assert AvroDeserializer(client)(ours[0].as_py(), context) == {"id": 7, "city": "Ulm"}
    assert Decoder(planned, None, connected({"url": registry.url}).by_id).column(pa.array([theirs]))[0].equals(rows)
