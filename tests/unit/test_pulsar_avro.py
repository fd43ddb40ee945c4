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

from delivered.connectors.pulsar.admin import Registered
from delivered.connectors.pulsar.schemas import Values
from delivered.kits.schemas.avro import shape_of
from delivered.model.errors import BadRecord

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
    return made.column(values, [0] * len(values), [(1, n, -1) for n in range(len(values))])


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
