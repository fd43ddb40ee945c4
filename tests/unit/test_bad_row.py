"""Rows as text in dead letters, and back."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from delivered.model.rows import as_json_text, from_json_texts, plain_rows

HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
SCHEMA = pa.schema(
    [
        ("bytes", pa.binary()), ("text", pa.string()), ("whole", pa.int32()), ("double", pa.float64()),
        ("flag", pa.bool_()), ("number", pa.decimal128(10, 2)), ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")), ("day", pa.date32()), ("hour", pa.time64("us")), ("took", pa.duration("us")),
        ("headers", pa.list_(HEADER)), ("counts", pa.map_(pa.string(), pa.int64())),
    ]
)  # fmt: skip
ROW = {
    "bytes": b"\xff\x00", "text": "\u00e4", "whole": -3, "double": float("inf"), "flag": True,
    "number": Decimal("1.20"), "at": datetime(2026, 11, 24, 1, 2, 3, 4, UTC),
    "local": datetime(1, 1, 1), "day": date(9999, 1, 1),  # noqa: DTZ001
    "hour": time(1, 2, 3), "took": timedelta(days=-1, microseconds=7),
    "headers": [{"key": "a", "value": b"\xfe"}, {"key": "b", "value": None}], "counts": [("a", 1)],
}  # fmt: skip


def test_a_row_comes_back_as_it_was() -> None:
    rows = pa.RecordBatch.from_pylist([ROW, {}], schema=SCHEMA)
    texts = [as_json_text(row) for row in rows.to_pylist()]
    assert from_json_texts(texts, SCHEMA).equals(rows)


def test_text_and_bytes_are_told_apart() -> None:
    assert as_json_text({"a": b"/w==", "b": b"\xff"}) == '{"a": "/w==", "b": {"base64": "/w=="}}'


def test_numbers_of_a_database_stand_for_themselves() -> None:
    """SQLite keeps flags and times as integers, and NaN as text."""
    schema = pa.schema([("flag", pa.bool_()), ("hour", pa.time64("us")), ("double", pa.float64())])
    (row,) = from_json_texts(['{"flag": 1, "hour": 7000000, "double": "-Infinity"}'], schema).to_pylist()
    assert row == {"flag": True, "hour": time(0, 0, 7), "double": float("-inf")}


def test_a_value_that_does_not_suit_its_column() -> None:
    with pytest.raises(ValueError, match="convert"):
        from_json_texts(['{"a": "many"}'], pa.schema([("a", pa.int64())]))


LATE = 568_971_820_800_000_000
"""20000-01-01 in microseconds."""


def test_times_that_python_has_not_are_numbers_at_any_depth() -> None:
    kind = pa.struct([("x", pa.list_(pa.timestamp("us"))), ("m", pa.map_(pa.date32(), pa.timestamp("us", "UTC")))])
    schema = pa.schema([("n", kind), ("at", pa.timestamp("us", "UTC")), ("text", pa.string())])
    rows = pa.RecordBatch.from_pylist(
        [
            {"n": {"x": [LATE, None], "m": [(2_932_897, LATE)]}, "at": 0, "text": "a"},
            {"n": {"x": [], "m": []}, "at": LATE, "text": "b"},
            {"n": None, "at": 0, "text": "c"},
        ],
        schema=schema,
    )
    texts = [as_json_text(row) for row in plain_rows(rows)]
    assert f'"x": [{LATE}, null]' in texts[0]
    assert '"at": "1970-01-01 00:00:00+00:00"' in texts[0]
    assert f'"at": {LATE}' in texts[1]
    assert texts[2] == next(as_json_text(row) for row in plain_rows(rows.slice(2)))
    assert from_json_texts(texts, schema).equals(rows)


def test_text_that_is_no_utf8_keeps_its_bytes() -> None:
    raw = pa.array([b"a\xff", b"b"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    batch = pa.record_batch([text, pa.array([1, 2])], names=["a", "b"])
    texts = [as_json_text(row) for row in plain_rows(batch)]
    assert texts == ['{"a": {"base64": "Yf8="}, "b": 1}', '{"a": "b", "b": 2}']
    with pytest.raises(ValueError, match="not UTF-8"):
        from_json_texts(texts, batch.schema)
