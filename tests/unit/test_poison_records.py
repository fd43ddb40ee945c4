"""Records of others: whatever decoding raises is a rejection of that record; no number becomes another one."""

from __future__ import annotations

import json
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from delivered.kits.schemas import Format
from delivered.kits.schemas.formatted import Decoder, Encoder, schema_of, unfit
from delivered.kits.schemas.json_schema import parsed
from delivered.kits.schemas.registry import Registered

DOCUMENT = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "m": {"type": "number", "multipleOf": 0.1},
        "s": {"type": "string"},
        "l": {"type": "array", "items": {"type": "number"}},
    },
}
JSON = Registered(1, Format.JSON_SCHEMA, json.dumps(DOCUMENT))
PROTO = Registered(
    2,
    Format.PROTOBUF,
    """syntax = "proto3"; import "google/protobuf/timestamp.proto";
    message R { google.protobuf.Timestamp at = 1; E e = 2; string s = 3; uint64 u = 4; }
    enum E { option allow_alias = true; ZERO = 0; ONE = 1; EINS = 1; }""",
)


def decoded(schema: Registered, *data: bytes) -> tuple[list[Any], list[str | None]]:
    values, reasons = Decoder(schema, None, {schema.id: schema}.get).column(
        pa.array([struct.pack(">bI", 0, schema.id) + d for d in data])
    )
    return values.to_pylist(), reasons


POISON = {
    "an integer of 5,000 digits": b'{"n": ' + b"9" * 5_000 + b"}",
    "the same, negative, in a list": b'{"l": [-' + b"9" * 5_000 + b"]}",
    "1e400": b'{"x": 1e400}',
    "1e400 with multipleOf": b'{"m": 1e400}',
    "an integer beyond doubles with multipleOf": b'{"m": 1' + b"0" * 400 + b"}",
    "an exponent of 20 digits": b'{"m": 1e99999999999999999999}',
    "NaN": b'{"x": NaN}',
    "-Infinity with multipleOf": b'{"m": -Infinity}',
    "half a surrogate pair": b'{"s": "\\ud800"}',
    "half a surrogate pair that does not match": b'{"n": "\\udfff"}',
    "the same in UTF-8": b'{"s": "\xed\xa0\x80"}',
    "2^63": b'{"n": 9223372036854775808}',
    "2^53 + 1 as a double": b'{"x": 9007199254740993}',
    "2^53 + 1 with a point": b'{"x": 9007199254740993.0}',
    "more digits than a double": b'{"x": 3.14159265358979323846}',
    "less than the least double": b'{"x": 1e-400}',
    "nested deeply": b'{"l": ' + b"[" * 100_000,
    "not UTF-8": b'{"s": "\xff"}',
    "nothing": b"",
}


@pytest.mark.parametrize("data", POISON.values(), ids=POISON)
def test_a_poison_pill_is_a_rejection_and_spares_its_neighbours(data: bytes) -> None:
    good = b'{"n": 1, "x": 0.5, "m": 0.3, "s": "a"}'
    values, reasons = decoded(JSON, good, data, good)
    assert values[1] is None and values[0] == values[2] == {"n": 1, "x": 0.5, "m": 0.3, "s": "a", "l": None}
    assert reasons[0] is None and reasons[2] is None and reasons[1]
    assert reasons[1].isprintable() and "Error" not in reasons[1] and len(reasons[1]) <= 300, "in words"
    pa.array(reasons, pa.string())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"0.1", 0.1), (b"0.10000000000000001", 0.1), (b"0.30000000000000004", 0.30000000000000004), (b"1e3", 1000.0),
        (b"5e-324", 5e-324), (b"1.7976931348623157e308", 1.7976931348623157e308), (b"-0.0", -0.0), (b"0e99", 0.0),
        (b"9007199254740992.0", 2.0**53), (b"0.1000000000000000055511151231257827", 0.1), (b"1.10", 1.1),
        (b"9007199254740993.0", Decimal("9007199254740993.0")), (b"1e400", Decimal("1e400")),
    ],
)  # fmt: skip
def test_a_number_is_what_it_says(text: bytes, found: Any) -> None:
    value = parsed(text)
    assert (repr(value), type(value)) == (repr(found), type(found))


def test_integers_in_any_form_are_exact() -> None:
    values, reasons = decoded(JSON, b'{"n": 1.0}', b'{"n": 9223372036854775807}', b'{"x": 9007199254740992}')
    assert reasons == [None] * 3
    assert [v["n"] for v in values] == [1, 2**63 - 1, None] and values[2]["x"] == 2.0**53


def test_a_fraction_is_a_multiple_as_written() -> None:
    """0.3 / 0.1 is 2.9999999999999996 in doubles."""
    assert decoded(JSON, b'{"m": 0.3}', b'{"m": 0.35}')[1] == [None, "field 'm': 0.35 is not a multiple of 0.1"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x01", "its message indexes are damaged"),
        (b"\x81\x01", "its message indexes are damaged"),
        (b"\xff" * 9, "its message indexes are damaged"),
        (b"\x02\x08", "which its schema does not have"),
        (b"", "its message indexes are damaged"),
        (b"\x00\x0a\x0c\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x10\x00", "field 'at' is a Timestamp of"),
        (b"\x00\x0a\x06\x10\x80\xa8\xd6\xb9\x07", "field 'at' is a Timestamp of"),
        (b"\x00\x1a\x01\xff", "Error"),
        (b"\x00\xff\xff", "Error"),
    ],
)
def test_protobuf_that_is_none_says_why(data: bytes, why: str) -> None:
    values, (reason, after) = decoded(PROTO, data, b"\x00")
    assert values[0] is None and why in str(reason) and after is None


def test_an_enums_alias_is_read_as_its_first_name_and_not_written() -> None:
    values, reasons = decoded(PROTO, b"\x00\x10\x01", b"\x00\x10\x07")
    assert ([v["e"] for v in values], reasons) == (["ONE", "7"], [None, None])
    kind = schema_of(PROTO, None).arrow
    rows = pa.array([{"e": e, "s": "", "u": 0} for e in ("ONE", "EINS", "7", "1", "1_0", "TWO", "9999999999")], kind)
    _, found = Encoder(PROTO, None, kind).column(rows)
    assert found[0] is None and found[2] is None
    assert "'EINS'" in str(found[1]) and "'ONE', which would be read back" in str(found[1])
    assert "'ONE', which would be read back" in str(found[3])
    assert all("which is no value of E" in str(why) for why in found[4:])


def test_times_that_protobuf_has_not_are_not_written() -> None:
    kind = schema_of(PROTO, None).arrow
    us = pa.array([253402300799_999999, 253402300800_000000, -62135596800_000000, -62135596800_000001], pa.int64())
    columns = [us.cast(pa.timestamp("us", "UTC")), *(pa.array([v] * 4, f.type) for v, f in zip(
        ["ONE", "", 0], list(kind)[1:], strict=True))]  # fmt: skip
    _, found = Encoder(PROTO, None, kind).column(pa.StructArray.from_arrays(columns, fields=list(kind)))
    assert [why is None for why in found] == [True, False, True, False]
    assert "not in the years 1 to 9999" in str(found[1])


NOT_TEXT = pa.array([b"ok", b"\xff", b"\xed\xa0\x80"], pa.binary()).view(pa.string())


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_text_that_is_not_utf8_is_a_bad_row(kind: str) -> None:
    avro = {"type": "record", "name": "R", "fields": [{"name": "v", "type": ["null", "string"]}]}
    document = {"type": "object", "properties": {"v": {"type": "string"}}}
    schema = Registered(1, Format.AVRO, json.dumps(avro))
    if kind == "json":
        schema = Registered(1, Format.JSON_SCHEMA, json.dumps(document))
    rows = pa.StructArray.from_arrays([NOT_TEXT], ["v"])
    made, reasons = Encoder(schema, None, rows.type).column(rows)
    assert made[0].is_valid and [made[n].is_valid for n in (1, 2)] == [False, False]
    assert reasons == [None, *["field v is text that is not UTF-8"] * 2]


def test_a_maps_keys_must_be_text() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "m", "type": {"type": "map", "values": "string"}}]}
    rows = pa.struct([("m", pa.map_(pa.int64(), pa.string()))])
    (why,) = unfit(rows, schema_of(Registered(1, Format.AVRO, json.dumps(schema))), "value")
    assert why == "'value.m' has keys that are int64; they must be text"
