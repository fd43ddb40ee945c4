"""Records with schemas, without a registry: wire format, types, evolution, what cannot be decoded or encoded."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from delivered.checkpoint import sidecar
from delivered.contract.sink import BoundedScan, Sink
from delivered.contract.source import Slice, Source, SourceDriver
from delivered.engine.transform import (
    RAW,
    ArrowTransform,
    Direct,
    decode,
    encode,
    join_rejected,
    pack_rejected,
    pack_slice,
    source_schema,
    unpack_rejected,
)
from delivered.kits.schemas import Format, FormatOptions
from delivered.kits.schemas import formatted as source_module
from delivered.kits.schemas.avro import Unmappable
from delivered.kits.schemas.formatted import (
    Decoder,
    Encoder,
    FormattedScan,
    FormattedSink,
    FormattedSource,
    schema_of,
    unfit,
)
from delivered.kits.schemas.protobuf import _compiled
from delivered.kits.schemas.registry import Registered
from delivered.kits.schemas.values import canonical
from delivered.model.capability import SourceCapability
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.rows import Origin, Rejection
from delivered.pipeline.registry import find_sink, find_source

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
WIDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "city", "type": "string", "default": "Ulm"}]}
PROTO = """syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto";
message Other { int32 n = 1; }
message Order {
  int64 id = 1; optional string note = 2; google.protobuf.Timestamp at = 3; map<string, int32> sizes = 4;
  repeated Item items = 5; enum Kind { NEW = 0; OLD = 1; } Kind kind = 6; uint64 big = 7; oneof pay { string card = 8; }
  message Item { bytes tag = 1; }
}"""
DOCUMENT = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "note": {"type": ["null", "string"]},
        "city": {"type": "string"},
        "items": {"type": "array", "items": {"$ref": "#/definitions/item"}},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["id"],
    "definitions": {"item": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}


def avro(number: int, schema: object) -> Registered:
    return Registered(number, Format.AVRO, json.dumps(schema))


OLD, NEW = avro(1, ORDER), avro(2, WIDER)
PROTOBUF, JSON = Registered(3, Format.PROTOBUF, PROTO), Registered(4, Format.JSON_SCHEMA, json.dumps(DOCUMENT))
KNOWN = {r.id: r for r in (OLD, NEW, PROTOBUF, JSON)}


def framed(number: int, schema: Any, value: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return struct.pack(">bI", 0, number) + stream.getvalue()


FULL = [
    (NEW, None, [{"id": 1, "city": "Bonn"}, {"id": -5, "city": ""}, None]),
    (
        PROTOBUF,
        "shop.Order",
        [
            {
                "id": 7,
                "note": "n",
                "at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
                "sizes": [("a", 1)],
                "items": [{"tag": b"\0"}],
                "kind": "OLD",
                "big": 2**64 - 1,
                "card": None,
            },
            {"id": 0, "sizes": [], "items": [], "kind": "NEW", "big": 0, "card": ""},
        ],
    ),
    (JSON, None, [{"id": 1, "note": None, "items": [{"ok": True}], "sizes": [("a", 0.5)]}, {"id": 2, "city": "Ulm"}]),
]


@pytest.mark.parametrize(("schema", "record", "values"), FULL, ids=lambda v: str(getattr(v, "kind", "")))
def test_values_come_back_as_they_were(schema: Registered, record: str | None, values: list[Any]) -> None:
    rows = pa.array(values, schema_of(schema, record).arrow)
    data, reasons = Encoder(schema, record, rows.type).column(rows)
    assert reasons == [None] * len(rows)
    assert all(d is None or d[:5] == struct.pack(">bI", 0, schema.id) for d in data.to_pylist())
    back, reasons = Decoder(schema, record, KNOWN.get).column(data)
    assert back.equals(rows) and reasons == [None] * len(rows)
    text, _ = Decoder(None, record, KNOWN.get).column(data)
    assert text.equals(canonical(rows)), "what an audit compares"


def test_protobuf_names_its_message() -> None:
    kinds = {"shop.Other": b"\x00", "shop.Order": b"\x02\x02", "shop.Order.Item": b"\x04\x02\x02"}
    for name, indexes in kinds.items():
        kind = schema_of(PROTOBUF, name).arrow
        (data,), _ = Encoder(PROTOBUF, name, kind).column(pa.array([{"n": 1, "tag": b"", "id": 1} | EMPTY], kind))
        assert data.as_py()[5:].startswith(indexes), name
        _, (why,) = Decoder(PROTOBUF, "shop.Other", KNOWN.get).column(pa.array([data.as_py()]))
        assert why == (None if name == "shop.Other" else f"it is a {name}; shop.Other is read")
    with pytest.raises(Unmappable, match=r"no message 'shop\.Nothing'; it has shop\.Other, shop\.Order"):
        schema_of(PROTOBUF, "shop.Nothing")


def test_protobuf_is_registered_as_source_or_as_a_serialized_descriptor() -> None:
    """Confluent's Python serializer registers the latter."""
    text = base64.b64encode(_compiled(PROTOBUF).serialized_pb).decode()
    serialized = Registered(5, Format.PROTOBUF, text)
    assert schema_of(serialized, "shop.Order").arrow == schema_of(PROTOBUF, "shop.Order").arrow
    importing = descriptor_pb2.FileDescriptorProto(name="b.proto", syntax="proto3", dependency=["order.proto"])
    field = descriptor_pb2.FieldDescriptorProto
    importing.message_type.add(name="B").field.add(
        name="order", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE, type_name=".shop.Order"
    )
    b = base64.b64encode(importing.SerializeToString()).decode()
    whole = Registered(6, Format.PROTOBUF, b, references=(("order.proto", text),))
    assert schema_of(whole, "B").arrow.field("order").type == schema_of(PROTOBUF, "shop.Order").arrow
    for references, why in (((), "which is not among its references"), ((("order.proto", PROTO),), "is source text")):
        with pytest.raises(Unmappable, match=why):
            schema_of(Registered(7, Format.PROTOBUF, b, references=references), "B")


EMPTY: dict[str, Any] = {"sizes": [], "items": [], "kind": "NEW", "big": 0}


def test_the_readers_schema_decides_the_columns() -> None:
    """Evolution: a field unknown to the writer gets its default, one unknown to the reader is dropped."""
    old, new = framed(1, ORDER, {"id": 1}), framed(2, WIDER, {"id": 2, "city": "Bonn"})
    both = pa.array([old, new])
    assert Decoder(NEW, None, KNOWN.get).column(both)[0].to_pylist() == [
        {"id": 1, "city": "Ulm"},
        {"id": 2, "city": "Bonn"},
    ]
    assert Decoder(OLD, None, KNOWN.get).column(both)[0].to_pylist() == [{"id": 1}, {"id": 2}]
    assert Decoder(None, None, KNOWN.get).column(both)[0].to_pylist() == [b'{"id": 1}', b'{"city": "Bonn", "id": 2}']


def test_what_cannot_be_decoded_says_why_and_spares_the_others() -> None:
    good = framed(1, ORDER, {"id": 1})
    late = avro(
        9,
        {
            "type": "record",
            "name": "T",
            "fields": [{"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
        },
    )
    bad = {
        b"": "0 bytes", b"{}xxxxx": "first byte is 0x7b", struct.pack(">bI", 0, 77): "no schema 77",
        good + b"x": "ends after 1 of 2 bytes", struct.pack(">bI", 0, 4) + b"{}": "not written with an Avro",
    }  # fmt: skip
    values, reasons = Decoder(OLD, None, KNOWN.get).column(pa.array([good, *bad, None]))
    assert values.to_pylist() == [{"id": 1}, *[None] * len(bad), None]
    assert (reasons[0], reasons[-1]) == (None, None)
    for why, expected in zip(reasons[1:-1], bad.values(), strict=True):
        assert expected in str(why)
    times = [framed(9, json.loads(late.text), {"t": t}) for t in (0, 2**62)]
    values, reasons = Decoder(late, None, {9: late}.get).column(pa.array(times))
    assert [v is not None for v in values.to_pylist()] == [True, False] and "out of bounds" in str(reasons[1])
    _, reasons = Decoder(JSON, None, KNOWN.get).column(
        pa.array([struct.pack(">bI", 0, 4) + d for d in (b'{"id": -1}', b'{"id": "x"}', b"{", b'{"note": "x"}')])
    )
    assert [str(r).split(":")[0] for r in reasons[:3]] == ["field 'id'", "field 'id'", "it is not JSON"]
    assert "'id' is a required property" in str(reasons[3])


def test_rows_that_do_not_fit_a_schema() -> None:
    def wrong(schema: Registered, **columns: pa.DataType) -> list[str]:
        return unfit(pa.struct(list(columns.items())), schema_of(schema), "value")

    assert wrong(NEW, id=pa.int64(), city=pa.string()) == []
    assert wrong(NEW, id=pa.int32(), city=pa.string()) == [], "wider"
    assert wrong(NEW, id=pa.string(), city=pa.string()) == ["'value.id' is int64 there, and the column is string"]
    assert wrong(NEW, id=pa.int64()) == ["'value.city' may not be null, and has no column"]
    assert wrong(OLD, id=pa.int64(), x=pa.int64()) == ["'value.x' is not a field of the schema"]
    kind = pa.struct([("id", pa.int64()), ("city", pa.string())])
    data, reasons = Encoder(NEW, None, kind).column(pa.array([{"id": 1, "city": "a"}, {"id": None, "city": "b"}], kind))
    assert [d is None for d in data.to_pylist()] == [False, True] and reasons[0] is None and reasons[1]


class Inner(Source):
    """A source of two batches."""

    batches: tuple[pa.RecordBatch, ...] = ()

    def capability(self) -> SourceCapability:
        return SourceCapability("inner", replayable=True)

    def driver(self) -> SourceDriver:
        raise NotImplementedError

    def schema(self) -> pa.Schema:
        return self.batches[0].schema

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return iter(self.batches)


def test_a_source_fails_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        by_id = staticmethod(KNOWN.get)

    monkeypatch.setattr(source_module, "connected", lambda _: Known)
    inner, values = Inner(), [framed(1, ORDER, {"id": n}) for n in range(4)]
    rows = {
        "key": pa.array([b"k"] * 4), "value": pa.array([*values[:2], b"bad", values[3]]), "topic": pa.array(["t"] * 4),
        "partition": pa.array([0] * 4, pa.int32()), "offset": pa.array(range(10, 14), pa.int64()),
    }  # fmt: skip
    inner.batches = (pa.RecordBatch.from_pydict(rows),)
    options = FormatOptions.parse({"value.format": "avro", "schema.registry.url": "http://r"})
    source: Any = FormattedSource("delivered_kafka source", inner, options, (OLD,))
    piece = Slice(1)
    with pytest.raises(
        BadRecord, match=r"RECORD_UNDECODABLE.*topic t, partition 0, offset 12 .*its value: it has 3 bytes"
    ):
        list(source.read(piece))
    (found,) = source.read_rows(piece)
    assert found.good.column("offset").to_pylist() == [10, 11, 13] and found.good.schema == source.schema()
    (rejected,) = found.rejected
    assert (rejected.record, rejected.offset) == ({"value": b"bad", "key": b"k"}, 12)
    assert found.records.column("value").to_pylist() == [*values[:2], values[3]], "of each good row the bytes"
    assert source.decoded(inner.batches[0]).good.equals(found.good), "a retry of a dead letter decodes it"
    assert source.raw_schema() == inner.schema()
    assert source_schema(source, raw=True).names == [*source.schema().names, RAW.name]
    through_spark = decode(encode(found, source_schema(source, raw=True)))
    assert (through_spark.good, through_spark.records) == (found.good, found.records)
    direct = Direct(source, ArrowTransform(("offset",)), rejects=True)
    assert direct.schema().names == ["offset"]
    (rows,) = direct.rows(iter([pack_slice(piece)]))
    assert (rows.good.schema.names, rows.rejected) == (["offset"], found.rejected)


def test_rejected_records_wait_for_the_end_of_their_batch(tmp_path: Path) -> None:
    def records(*values: bytes) -> bytes:
        return pack_rejected([Rejection(Origin.SOURCE, "x", {"value": v}) for v in values])

    def found(batch: int, start: str) -> list[bytes] | None:
        data = sidecar.gather_task_files(str(tmp_path), batch, start, join_rejected)
        return None if data is None else [r.record["value"] for r in unpack_rejected(data)]

    assert found(3, "a") is None
    for _ in range(2):  # two attempts of one task
        sidecar.put_task_file(str(tmp_path), 3, "a", "s1-0", records(b"1"))
    sidecar.put_task_file(str(tmp_path), 3, "a", "s0-0", records(b"2", b"3"))
    sidecar.put_task_file(str(tmp_path), 3, "b", "s0-0", records(b"other start"))
    assert found(3, "a") == [b"2", b"3", b"1"]
    sidecar.put_task_file(str(tmp_path), 3, "a", "s2-0", records(b"too late"))
    assert found(3, "c") == [b"2", b"3", b"1"], "what was gathered stays"
    sidecar.forget_task_files(str(tmp_path), 3, decided=True)
    assert found(3, "c") == [b"2", b"3", b"1"]
    sidecar.forget_task_files(str(tmp_path), 3, decided=False)
    assert found(3, "a") is None
    sidecar.put_task_file(str(tmp_path), 3, "a", "s0-0", records(b"1"))
    sidecar.forget_task_files(str(tmp_path), 4, decided=True)
    assert found(3, "a") is None


def test_a_decided_batch_keeps_its_ids(tmp_path: Path) -> None:
    at = str(tmp_path)
    assert sidecar.read_written_schemas(at, 0) is None
    sidecar.keep_written_schemas(at, 0, {"out.value": 1})
    sidecar.keep_written_schemas(at, 5, {"out.value": 1})
    sidecar.keep_written_schemas(at, 7, {"out.value": 2})
    assert [sidecar.read_written_schemas(at, n) for n in (6, 7, 9)] == [
        {"out.value": 1},
        {"out.value": 2},
        {"out.value": 2},
    ]
    sidecar.keep_written_schemas(at, 7, {"out.value": 3})  # batch 7 was not decided, and is planned again
    assert [sidecar.read_written_schemas(at, n) for n in (6, 7)] == [{"out.value": 1}, {"out.value": 3}]


KAFKA = {"kafka.bootstrap.servers": "b:1", "subscribe": "orders", "value.format": "avro"}
AT = {"schema.registry.url": "http://r:8081"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KAFKA, "needs the option 'schema.registry.url'"),
        ({**KAFKA, **AT, "value.format": "avr"}, "must be one of: bytes, avro, protobuf, json_schema"),
        ({**KAFKA, **AT, "value.schema": "file:order.avsc"}, "the path must be absolute"),
        ({**KAFKA, **AT, "key.subject": "x"}, "key.format is bytes"),
        ({**KAFKA, **AT, "value.schema": "{}", "value.schema.version": "1"}, "both value.schema and"),
        ({**KAFKA, "schema.registry.url": "http://u:secret@r"}, "contains a password"),
        ({**KAFKA, "schema.registry.url": "r:8081"}, "must be like http"),
        ({**KAFKA, **AT, "value.format": "bytes"}, "both are bytes"),
        ({**KAFKA, **AT, "value.fromat": "avro"}, "write 'value.format'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_source("kafka", options)
    assert message in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "subject"),
    [
        ({}, "orders-value"),
        ({"value.subject.name.strategy": "record", "value.record.name": "shop.Order"}, "shop.Order"),
        ({"value.subject.name.strategy": "topic_record", "value.record.name": "shop.Order"}, "orders-shop.Order"),
        ({"value.subject": "mine"}, "mine"),
        ({"value.subject.name.strategy": "record"}, "the record's full name"),
        ({"subscribe": "orders,payments"}, "not exactly one topic"),
    ],
)
def test_subjects(more: dict[str, str], subject: str) -> None:
    try:
        told = find_source("kafka", {**KAFKA, **AT, **more}).capability().records
    except DeliveredError as error:
        told = str(error)
    assert subject in told


def test_a_plan_tells_formats_of_both_ends() -> None:
    assert (
        "value from avro by the newest version of orders-value"
        in find_source("kafka", {**KAFKA, **AT}).capability().records
    )
    sink = {"kafka.bootstrap.servers": "b:1", "topic": "out", "key.format": "protobuf", "key.schema.version": "3", **AT}
    found = find_sink("kafka", sink)
    assert "key as protobuf by version 3 of out-key" in found.capability().records
    with pytest.raises(UsageError, match=r"column 'key' is binary; with key\.format protobuf"):
        found.check_schema(pa.schema([("key", pa.binary()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    ("wrapper", "contract", "default"),
    [
        (FormattedScan, BoundedScan, set()),
        (FormattedSink, Sink, {"checked_target", "key_memory"}),
        (FormattedSource, Source, {"read_good", "row_key"}),
        (sidecar.PlainDriver, SourceDriver, {"check_initial", "waiting_since"}),
    ],
)
def test_wrappers_ask_what_they_wrap(wrapper: type, contract: type, default: set[str]) -> None:
    """Else the contract would answer that its system has nothing of the kind. `default`: of tables and changes, or made
    of other answers."""
    questions = {n for n, v in vars(contract).items() if n[0] != "_" and (callable(v) or isinstance(v, property))}
    assert questions - vars(wrapper).keys() == default
