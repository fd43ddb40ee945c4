"""Schemas of others: defaults and logical types as Avro's specification says, and what costs more than it may."""

from __future__ import annotations

import io
import json
import struct
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from delivered.kits.schemas import Format
from delivered.kits.schemas.formatted import Decoder, schema_of
from delivered.kits.schemas.registry import BadSchema, Registered, Registry
from delivered.kits.schemas.values import Unmappable

DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
FIXED = {"type": "fixed", "name": "F", "size": 2}


def record(*fields: dict[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def avro(schema: object, number: int = 1) -> Registered:
    return Registered(number, Format.AVRO, json.dumps(schema))


def decoded(planned: Registered, written: Registered, data: bytes) -> tuple[Any, str | None]:
    decoder = Decoder(planned, None, {written.id: written}.get)
    values, (why,) = decoder.column(pa.array([struct.pack(">bI", 0, written.id) + data]))
    return values[0].as_py(), why


ID = {"name": "id", "type": "int"}
INNER = record({"name": "a", "type": "int", "default": 4}, {"name": "b", "type": "bytes", "default": "ÿ"}, name="I")


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("bytes", "\u00ff\u0000", b"\xff\x00"),
        (FIXED, "\u0001\u00fe", b"\x01\xfe"),
        (DECIMAL, "\u0004\u00d2", Decimal("12.34")),
        (DECIMAL, "\u00ff", Decimal("-0.01")),
        ({**FIXED, "logicalType": "decimal", "precision": 4}, "\u0000\u0007", Decimal(7)),
        (["null", "bytes"], None, None),
        (["bytes", "null"], "\u0080", b"\x80"),
        (["null", DECIMAL], "\u0001", Decimal("0.01")),
        ({"type": "array", "items": "bytes"}, ["\u00e9", ""], [b"\xe9", b""]),
        ({"type": "map", "values": DECIMAL}, {"k": "\u0001"}, [("k", Decimal("0.01"))]),
        (INNER, {}, {"a": 4, "b": b"\xff"}),
        (INNER, {"a": 5}, {"a": 5, "b": b"\xff"}),
        ({"type": "array", "items": INNER}, [{}], [{"a": 4, "b": b"\xff"}]),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
        ("double", 3, 3.0),
    ],
)
def test_a_default_is_the_value_that_the_specification_says(kind: Any, written: Any, value: Any) -> None:
    planned = avro(record(ID, {"name": "x", "type": kind, "default": written}), 2)
    assert decoded(planned, avro(record(ID)), b"\x0a") == ({"id": 5, "x": value}, None)


def test_a_default_within_items_that_the_writer_had() -> None:
    old = record({"name": "l", "type": {"type": "array", "items": record(ID, name="I")}})
    more = record(ID, {"name": "d", "type": DECIMAL, "default": "\u0005"}, name="I")
    new = record({"name": "l", "type": {"type": "array", "items": more}})
    found, why = decoded(avro(new, 2), avro(old), b"\x04\x02\x04\x00")
    assert why is None and found == {"l": [{"id": 1, "d": Decimal("0.05")}, {"id": 2, "d": Decimal("0.05")}]}


@pytest.mark.parametrize("written", ["Ā", 7, ["x"]])
def test_a_default_of_another_type_is_refused_with_its_field(written: Any) -> None:
    with pytest.raises(Unmappable, match=r"x'? has a default|Default value"):
        schema_of(avro(record(ID, {"name": "x", "type": "bytes", "default": written})))


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ({"type": "bytes", "logicalType": "decimal"}, pa.binary()),
        ({"type": "bytes", "logicalType": "decimal", "precision": 0}, pa.binary()),
        ({"type": "bytes", "logicalType": "decimal", "precision": "4"}, pa.binary()),
        ({"type": "bytes", "logicalType": "decimal", "precision": True}, pa.binary()),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 5}, pa.binary()),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": -1}, pa.binary()),
        ({**FIXED, "logicalType": "decimal", "precision": 5}, pa.binary()),
        ({"type": "string", "logicalType": "decimal", "precision": 4}, pa.string()),
        ({"type": "long", "logicalType": "date"}, pa.int64()),
        ({"type": "int", "logicalType": ["date"]}, pa.int32()),
        ({"type": "int", "logicalType": "of a later version"}, pa.int32()),
        ({**FIXED, "logicalType": "uuid"}, pa.binary()),
    ],
)
def test_an_invalid_logical_type_is_ignored(kind: Any, column: pa.DataType) -> None:
    schema = avro(record({"name": "x", "type": kind}))
    assert schema_of(schema).arrow.field("x").type == column
    out = io.BytesIO()
    plain = "bytes" if pa.types.is_binary(column) else "string" if pa.types.is_string(column) else "long"
    value: Any = {"bytes": b"ab", "string": "ab", "long": 9}[plain]
    named = FIXED if isinstance(kind, dict) and kind["type"] == "fixed" else plain
    fastavro.schemaless_writer(out, fastavro.parse_schema(named), value)
    assert decoded(schema, schema, out.getvalue()) == ({"x": value}, None)


def test_a_decimal_of_more_digits_is_rejected_and_never_rounded() -> None:
    schema = avro(record({"name": "x", "type": DECIMAL}))
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema("bytes"), (1234567).to_bytes(4, "big"))
    found, why = decoded(schema, schema, out.getvalue())
    assert found is None and why is not None and "ecimal" in why
    wider = avro(record({"name": "x", "type": {**DECIMAL, "precision": 10}}), 2)
    assert decoded(wider, schema, out.getvalue()) == ({"x": Decimal("12345.67")}, None)


# -- schemas that cost more than they may ------------------------------------------------------------------------------


def avro_fan_out(levels: int) -> dict[str, Any]:
    """Each record has two fields of the next one's type."""
    found: Any = "int"
    for n in range(levels):
        first = {"name": "a", "type": found}
        again = found["name"] if isinstance(found, dict) else found
        found = record(first, {"name": "b", "type": again}, name=f"R{n}")
    return found  # type: ignore[no-any-return]


def json_fan_out(levels: int, word: str) -> dict[str, Any]:
    parts: dict[str, Any] = {"d0": {"type": "integer" if word == "properties" else "object"}}
    for n in range(1, levels):
        inner = {"$ref": f"#/definitions/d{n - 1}"}
        parts[f"d{n}"] = (
            {"type": "object", "properties": {"a": inner, "b": inner}}
            if word == "properties"
            else {word: [inner, inner]}
        )
    if word == "properties":
        return {"$ref": f"#/definitions/d{levels - 1}", "definitions": parts}
    of = {"allOf": [{"$ref": f"#/definitions/d{levels - 1}"}]}
    return {"type": "object", "properties": {"a": {"type": "integer"}}, **of, "definitions": parts}


def proto_fan_out(levels: int) -> str:
    messages = "".join(f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }}" for n in range(levels))
    return f'syntax = "proto3"; {messages} message M{levels} {{ int32 x = 1; }}'


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (Format.AVRO, json.dumps(avro_fan_out(25)), "more than 10,000 types"),
        (Format.AVRO, json.dumps(record({"name": "r", "type": ["null", "R"]})), "recursive"),
        (Format.AVRO, "[" * 20_000, "not an Avro schema: it is nested too deeply"),
        (Format.AVRO, '{"type":' * 2_000 + '"int"' + "}" * 2_000, "nested|more than"),
        (
            Format.AVRO,
            json.dumps(record({"name": "l", "type": {"type": "array", "items": record(name="E")}})),
            "items take no bytes",
        ),
        (
            Format.AVRO,
            json.dumps(record({"name": "l", "type": {"type": "array", "items": {**FIXED, "size": 0}}})),
            "items take no bytes",
        ),
        (Format.JSON_SCHEMA, json.dumps(json_fan_out(15, "properties")), "more than 10,000 types"),
        (Format.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"$ref": "#"}}}', "recursive"),
        (Format.JSON_SCHEMA, '{"$ref": "#"}', "recursive"),
        (Format.JSON_SCHEMA, "[" * 20_000, "nested too deeply"),
        (Format.JSON_SCHEMA, "true", "may be anything"),
        (Format.JSON_SCHEMA, "[]", "not a JSON Schema"),
        (Format.JSON_SCHEMA, '{"$schema": ["x"], "type": "object"}', "not a JSON Schema"),
        (Format.PROTOBUF, proto_fan_out(25), "more than 10,000 types"),
        (Format.PROTOBUF, 'syntax = "proto3"; message A { A a = 1; }', "recursive"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_a_schema_that_costs_too_much_is_refused(kind: Format, text: str, why: str) -> None:
    with pytest.raises(Unmappable, match=why):
        schema_of(Registered(1, kind, text))


def test_a_record_of_many_checks_is_rejected() -> None:
    """A few bytes whose rules double at each level."""
    schema = Registered(1, Format.JSON_SCHEMA, json.dumps(json_fan_out(40, "allOf")))
    found, why = decoded(schema, schema, b'{"a": 1}')
    assert found is None and "more checks" in str(why)


def test_a_part_of_a_schema_cannot_leave_the_bounds() -> None:
    """A part that names its own $schema is checked by that one's validator, in jsonschema."""
    document = json_fan_out(40, "allOf")
    document["definitions"]["d39"]["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema = Registered(1, Format.JSON_SCHEMA, json.dumps(document))
    assert "more checks" in str(decoded(schema, schema, b'{"a": 1}')[1])


def patterned(pattern: str, word: str = "pattern") -> Registered:
    text: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    if word == "pattern":
        text["properties"]["a"]["pattern"] = pattern
    else:
        text |= {"patternProperties": {pattern: True}, "additionalProperties": False}
    return Registered(1, Format.JSON_SCHEMA, json.dumps(text))


@pytest.mark.parametrize("word", ["pattern", "patternProperties"])
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_no_pattern_takes_forever(pattern: str, word: str) -> None:
    schema, text = patterned(pattern, word), "a" * 5_000 + "x" * 5_000
    document = {"a": text} if word == "pattern" else {"a": "b", text: 1}
    assert decoded(schema, schema, json.dumps(document).encode())[1] is not None


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [(r"^\u0041\d{3}$", "A123", "B123"), (r"[\/\-]$", "a/", "a"), (r"^\p{L}+$", "é", "1"), ("b", "abc", "ac")],
)
def test_patterns_mean_what_they_say(pattern: str, good: str, bad: str) -> None:
    schema = patterned(pattern)
    assert decoded(schema, schema, json.dumps({"a": good}).encode())[1] is None
    assert "does not match" in str(decoded(schema, schema, json.dumps({"a": bad}).encode())[1])


@pytest.mark.parametrize("pattern", ["(?=a)a", r"(a)\1", "a{1,2000}", "(((a{100}){100}){100})"])
def test_a_pattern_without_a_bound_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(Unmappable, match=r"its pattern .* cannot be matched in linear time"):
        schema_of(patterned(pattern))


def test_items_are_compared_in_linear_time() -> None:
    """jsonschema compares objects with each other, all pairs."""
    text = {"type": "object", "properties": {"l": {"type": "array", "uniqueItems": True, "items": {"type": "object",
            "properties": {"n": {"type": "integer"}}}}}}  # fmt: skip
    schema = Registered(1, Format.JSON_SCHEMA, json.dumps(text))
    many: list[Any] = [{"n": n} for n in range(5_000)]
    assert decoded(schema, schema, json.dumps({"l": many}).encode())[1] is None
    assert "non-unique" in str(decoded(schema, schema, json.dumps({"l": [*many, {"n": 7}]}).encode())[1])
    assert "non-unique" in str(decoded(schema, schema, b'{"l": [{"n": 1}, {"n": 1.0}]}')[1])


def test_defaults_of_many_small_items_are_bounded() -> None:
    old = record({"name": "l", "type": {"type": "array", "items": record(ID, name="I")}})
    more = [{"name": f"f{n}", "type": "int", "default": n} for n in range(900)]
    new = record({"name": "l", "type": {"type": "array", "items": record(ID, *more, name="I")}})
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(old), {"l": [{"id": 1}] * 20_000})
    found, why = decoded(avro(new, 2), avro(old), out.getvalue())
    assert found is None and why == "it stands for more than 1,000,000 values"


def test_empty_messages_are_bounded() -> None:
    fields = "".join(f"int32 f{n} = {n + 1};" for n in range(900))
    text = f'syntax = "proto3"; message A {{ repeated I l = 1; message I {{ {fields} }} }}'
    schema = Registered(1, Format.PROTOBUF, text)
    found, why = decoded(schema, schema, b"\x00" + b"\x0a\x00" * 2_000)
    assert found is None and why == "it stands for more than 1,000,000 values"


def test_empty_objects_are_bounded() -> None:
    fields = {f"f{n}": {"type": "integer"} for n in range(900)}
    inner = {"type": "array", "items": {"type": "object", "properties": fields}}
    schema = Registered(1, Format.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"l": inner}}))
    found, why = decoded(schema, schema, b'{"l": [' + b"{}," * 1_200 + b"{}]}")
    assert found is None and "are allowed" in str(why)


class _References:
    """What a registry's client returns: each schema imports what `of` names."""

    def __init__(self, of: dict[str, list[str]]) -> None:
        self.of, self.asked = of, 0

    def get_version(self, subject: str, version: int) -> Any:
        self.asked += 1
        return _Of(schema=_Of(references=self.references(subject), schema_str=subject))

    def references(self, subject: str) -> list[Any]:
        return [_Of(name=n, subject=n, version=1) for n in self.of[subject]]


class _Of:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def references_of(client: _References, first: str) -> tuple[tuple[str, str], ...]:
    registry = object.__new__(Registry)
    registry.url, registry._client = "http://r", client  # type: ignore[misc]
    registry._module = pytest.importorskip("confluent_kafka.schema_registry")
    return registry._references(_Of(references=client.references(first)))


def test_each_import_is_asked_for_once() -> None:
    levels = {f"{n}{side}": [f"{n + 1}a", f"{n + 1}b"] for n in range(30) for side in "ab"}
    client = _References({**levels, "30a": [], "30b": [], "main": ["0a", "0b"]})
    found = references_of(client, "main")
    assert client.asked == 62 and len(found) == 62 and found[-1][0] == "0b"


@pytest.mark.parametrize("of", [{"main": ["a"], "a": ["b"], "b": ["a"]}, {"main": ["a"], "a": ["a"]}])
def test_imports_in_a_cycle_are_refused(of: dict[str, list[str]]) -> None:
    with pytest.raises(BadSchema, match=r"SCHEMA_REFERENCES.*imports itself, by way of 'a'"):
        references_of(_References(of), "main")


def test_a_record_that_names_such_a_schema_is_rejected() -> None:
    def ask(number: int) -> Registered:
        raise BadSchema("SCHEMA_REFERENCES", "A schema imports itself.", "register another")

    _, reasons = Decoder(avro(record(ID)), None, ask).column(pa.array([struct.pack(">bI", 0, 7)] * 2))
    assert reasons == ["schema 7 cannot be used: A schema imports itself."] * 2
