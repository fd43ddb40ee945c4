from __future__ import annotations

from delivered.source import spark_metrics as lag


def test_lag_is_spelled_as_sparks_kafka_source_does() -> None:
    end = '{"orders": {"0": 4, "1": 10}, "#topic ids": {"orders": "4dFvqedTQLyfQ30x7M8f1A"}}'
    latest = '{"orders": {"0": 10, "1": 10, "2": 7}, "#topic ids": {"orders": "4dFvqedTQLyfQ30x7M8f1A"}}'
    assert lag(end, latest) == {
        "minOffsetsBehindLatest": "0",
        "maxOffsetsBehindLatest": "6",
        "avgOffsetsBehindLatest": "3.0",
    }
    assert lag('{"0": 3}', '{"0": 5}')["maxOffsetsBehindLatest"] == "2"


def test_where_offsets_are_no_numbers_nothing_is_said() -> None:
    assert lag("null", '{"0": 5}') == {}
    assert lag(None, None) == {}
    assert lag("not json", "{}") == {}
    assert lag('{"0": "CAEQAQ=="}', '{"0": "CAEQBw=="}') == {}
