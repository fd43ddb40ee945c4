"""Pulsar schemas without a server: arbitrary bytes and JSON never give a wrong row or an unexpected error."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivered.connectors.pulsar import SourceOptions
from delivered.connectors.pulsar.client import Registered
from delivered.connectors.pulsar.columns import Messages, Values
from delivered.connectors.pulsar.source import PulsarSource
from delivered.kits.schemas.avro import Unreadable, read_json, shape_of
from delivered.model.errors import BadRecord
from delivered.model.rows import Rows

SCHEMA = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["none"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(-(1 << 63), (1 << 63) - 1),
        "name": st.none() | st.text(),
        "tags": st.lists(st.text()),
        "at": st.integers(-(1 << 50), 1 << 50),
    }
)


def column(kind: str, *values: bytes) -> pa.Array:
    planned = Registered(0, kind, json.dumps(SCHEMA))
    made = Values("test", "persistent://a/b/c", planned, lambda _: None)
    found, bad = made.column(values, [0] * len(values), [(1, n, -1) for n in range(len(values))])
    for error in bad.values():
        raise error
    return found


def plain(found: pa.Array) -> list[Any]:
    """Times in milliseconds: Python's types cannot represent all of Avro's."""
    times = found.field("at").cast(pa.int64()).to_pylist()
    parts = zip(*(found.field(n).to_pylist() for n in ("id", "name", "tags")), times, strict=True)
    return [{"id": i, "name": n, "tags": t, "at": at // 1000} for i, n, t, at in parts]


def encoded(row: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, SCHEMA, row)
    return stream.getvalue()


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_what_was_written_comes_back(rows: list[dict[str, Any]]) -> None:
    assert plain(column("AVRO", *map(encoded, rows))) == rows
    assert plain(column("JSON", *(json.dumps(r).encode() for r in rows))) == rows


@settings(deadline=None)
@given(ROWS, st.integers(0, 200), st.binary(max_size=12))
def test_bytes_that_were_changed_are_a_row_or_one_kind_of_error(row: dict[str, Any], at: int, more: bytes) -> None:
    data = encoded(row)
    changed = data[: at % (len(data) + 1)] + more + data[at % (len(data) + 1) + len(more) :]
    try:
        (found,) = plain(column("AVRO", changed))
    except BadRecord:
        return
    assert plain(column("AVRO", encoded(found))) == [found]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["id", "name", "tags", "at", "x"]), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(ANYTHING | st.fixed_dictionaries({"id": ANYTHING, "at": ANYTHING}, optional={"tags": ANYTHING}))
def test_json_is_taken_at_its_word(value: Any) -> None:
    try:
        (found,) = plain(column("JSON", json.dumps(value).encode()))
    except BadRecord:
        return
    assert type(value) is dict
    assert (value["id"], type(value["id"]), value["at"]) == (found["id"], int, found["at"])
    assert found["tags"] == value.get("tags", ["none"])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"name": "f", "type": ["int", "long"]}, "'f' is a union"),
        ({"name": "f", "type": "R"}, "'f' is of type 'R', which is recursive"),
        ({"name": "f", "type": "null"}, "'f' is null alone"),
        ({"name": "f", "type": "Nowhere"}, "not an Avro schema"),
        ({"name": "f", "type": {"type": "bytes", "logicalType": "decimal", "precision": 50}}, "50 digits"),
    ],
)
def test_what_has_no_column_names_its_field(part: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shape_of("AVRO", json.dumps({**SCHEMA, "fields": [part]}))
    for text in ("{", "[]", '"string"', '{"type": "record"}'):
        with pytest.raises(ValueError, match="it is not a"):
            shape_of("AVRO", text)


POISON = [
    b'{"id": ' + b"9" * 5_000 + b', "at": 0}',
    b'{"id": 1e400, "at": 0}',
    b'{"id": NaN, "at": 0}',
    b'{"id": 1, "at": 0, "name": "\\ud800"}',
    b'{"id": 1, "at": 9223372036854775807}',
    b"[" * 100_000,
    b"\xff",
]


class Message:
    """As the client's, of a reader with a schema."""

    def __init__(self, data: bytes) -> None:
        self.data, self.value = lambda: data, lambda: 0
        self.has_null_value, self.partition_key, self.producer_name = lambda: False, lambda: "k", lambda: "p"
        self.publish_timestamp, self.event_timestamp, self.properties = lambda: 1, lambda: 0, dict


def rows(data: list[bytes], *, rejects: bool) -> Rows:
    planned = Registered(0, "JSON", json.dumps(SCHEMA))
    values = Values("test", "persistent://a/b/c", planned, lambda _: None)
    found = Messages("persistent://a/b/c", 0, False, values, rejects)
    for n, each in enumerate(data):
        found.add(Message(each), (7, n, -1))
    return found.take()


@pytest.mark.parametrize("data", POISON, ids=lambda d: repr(d[:12]))
def test_a_poison_pill_is_a_dead_letter(data: bytes) -> None:
    good = b'{"id": 1, "name": null, "at": 0}'
    with pytest.raises(BadRecord, match="message 7:1 of"):
        rows([good, data, good], rejects=False)
    found = rows([good, data, good], rejects=True)
    (letter,) = found.rejected
    assert (letter.record, letter.offset) == ({"key": b"k", "value": data, "schemaVersion": 0}, (7 << 28) + 1)
    assert "cannot be read by it" in letter.reason and found.good.num_rows == 2
    assert found.records is not None and found.records.to_pylist() == [{"key": b"k", "value": good}] * 2


def test_a_dead_letter_is_decoded_again() -> None:
    """It does not say where its message was."""
    given = {"url": "pulsar://localhost:1", "adminUrl": "http://localhost:1", "topics": "a", "schema": "topic"}
    options = SourceOptions.parse(given)
    (topic,) = options.topics
    source = PulsarSource(options, ((topic, Registered(0, "JSON", json.dumps(SCHEMA))),))
    letters = [{"topic": topic, "key": b"k", "value": v} for v in (b'{"id": 1, "name": null, "at": 0}', b"{}")]
    raw = pa.RecordBatch.from_pylist(letters, schema=source.raw_schema())
    found = source.decoded(raw)
    assert found.good.column("value").field("id").to_pylist() == [1]
    assert found.good.num_rows == 1 and "source: a message of" in found.rejected[0].reason


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("double", b"9007199254740993", "a double cannot hold exactly"),
        ("float", b"16777217", "a float cannot hold exactly"),
        ("float", b"1e39", "a float cannot hold exactly"),
        ("double", b"1e400", "a double cannot hold exactly"),
    ],
)
def test_a_number_that_would_become_another_one_is_refused(kind: str, text: bytes, why: str) -> None:
    shape = shape_of("JSON", json.dumps({**SCHEMA, "fields": [{"name": "x", "type": kind}]}))
    with pytest.raises(Unreadable, match=why):
        read_json(b'{"x": ' + text + b"}", shape)
