"""Which values each system stores, and the reasons of rows that have others."""

from __future__ import annotations

import pyarrow as pa
import pytest

from delivered.model.errors import BadRecord, UsageError
from delivered.model.rows import INT64, RANGES, Range, check_storable, of_values, unstorable

US_10000 = 253_402_300_800_000_000


def reasons(system: str, column: pa.Array) -> list[str | None]:
    found = unstorable(RANGES[system], pa.record_batch([column], names=["at"]))
    return [None] * len(column) if found is None else found.to_pylist()


def timestamps(*values: int | None, unit: str = "us") -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp(unit, "UTC"))


YEARS = "column 'at': a timestamp outside the years 1 to 9999"


@pytest.mark.parametrize("system", ["json", "csv", "sqlite", "mysql"])
def test_a_text_form_ends_with_the_year_9999(system: str) -> None:
    first = -62_135_596_800_000_000
    column = timestamps(first, US_10000 - 1, None, first - 1, US_10000, *INT64)
    assert reasons(system, column) == [None, None, None, YEARS, YEARS, YEARS, YEARS]
    days = pa.array([-719_162, 2_932_896, -719_163, 2_932_897], pa.int32()).cast(pa.date32())
    assert [r is None for r in reasons(system, days)] == [True, True, False, False]


@pytest.mark.parametrize("system", ["parquet", "delta", "iceberg"])
def test_tables_store_every_number(system: str) -> None:
    assert reasons(system, timestamps(*INT64, US_10000)) == [None] * 3
    assert reasons(system, pa.array([-(1 << 31), (1 << 31) - 1], pa.int32()).cast(pa.date32())) == [None] * 2


def test_postgres_has_bounds_of_its_own() -> None:
    """The least 64-bit number less PostgreSQL's epoch wraps around to the year 292247."""
    first = -210_866_803_200_000_000
    column = timestamps(first, INT64[1], first - 1, INT64[0])
    assert [r is None for r in reasons("postgres", column)] == [True, True, False, False]
    days = pa.array([-2_440_588, 2_145_042_905, -2_440_589, 2_145_042_906], pa.int32()).cast(pa.date32())
    assert [r is None for r in reasons("postgres", days)] == [True, True, False, False]


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_seconds_that_overflow_as_microseconds(unit: str) -> None:
    per = {"s": 1_000_000, "ms": 1_000}[unit]
    most = INT64[1] // per
    assert [r is None for r in reasons("delta", timestamps(most, most + 1, -most, -most - 2, unit=unit))] == [
        True, False, True, False,
    ]  # fmt: skip


def test_values_within_lists_structs_and_maps() -> None:
    late = US_10000
    kind = pa.struct([("x", pa.list_(pa.timestamp("us"))), ("m", pa.map_(pa.string(), pa.date32()))])
    rows = [
        {"x": [0, None], "m": [("a", 0)]},
        {"x": [0, late], "m": []},
        None,
        {"x": None, "m": [("a", 0), ("b", 2_932_897)]},
        {"x": [], "m": None},
    ]
    column = pa.array(rows, kind)
    found = reasons("json", column)
    assert found == [
        None, "column 'at.x[]': a timestamp outside the years 1 to 9999", None,
        "column 'at.m.value': a date outside the years 1 to 9999", None,
    ]  # fmt: skip
    assert reasons("json", column.slice(1)) == found[1:]
    assert reasons("json", column.slice(2, 2)) == found[2:4]


def test_a_hidden_value_of_a_null_row_does_not_count() -> None:
    values = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), timestamps(US_10000, 0), mask=pa.array([True, False])
    )
    assert reasons("json", values) == [None, None]


def text(*values: bytes) -> pa.Array:
    """As Spark passes what CAST(X'ff' AS STRING) makes."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


@pytest.mark.parametrize("system", sorted(RANGES))
def test_text_that_is_no_utf8(system: str) -> None:
    assert reasons(system, text(b"a", b"\xff", b"\xed\xa0\x80")) == [None, *["column 'at': text that is not UTF-8"] * 2]


def test_zero_bytes_and_numbers_that_are_not_finite() -> None:
    assert reasons("postgres", pa.array(["a\0b", None])) == ["column 'at': text with a zero byte", None]
    assert reasons("postgres", pa.array(["a\0b", "c", None, ""]).slice(1)) == [None] * 3
    assert reasons("postgres", pa.array(["a", "c\0"], pa.large_string())) == [
        None,
        "column 'at': text with a zero byte",
    ]
    assert reasons("mysql", pa.array(["a\0b"])) == [None]
    numbers = pa.array([float("inf"), float("nan"), -0.0, None])
    assert reasons("mysql", numbers) == [*["column 'at': NaN or infinity"] * 2, None, None]
    assert reasons("postgres", numbers) == [None] * 4


def test_the_error_names_row_and_column() -> None:
    batch = pa.record_batch([timestamps(0, US_10000)], names=["at"])
    with pytest.raises(BadRecord, match=r"Row 1 of 2 cannot be written to SQLite as it is: column 'at': a timestamp"):
        check_storable("SQLite", batch, unstorable(RANGES["sqlite"], batch))
    check_storable("Delta", batch, unstorable(RANGES["delta"], batch))


@pytest.mark.parametrize(
    "error",
    [OverflowError("date value out of range"), pa.ArrowInvalid("x"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "x")],
)
def test_an_error_of_a_library_about_a_value_is_told_as_such(error: Exception) -> None:
    with (
        pytest.raises(BadRecord, match=rf"ROW_UNWRITABLE.*its client failed.*{type(error).__name__}"),
        of_values("its client"),
    ):
        raise error


@pytest.mark.parametrize("error", [OSError("disk full"), UsageError("X", "x", "y"), TypeError("a bug"), MemoryError()])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, of_values("its client"):
        raise error
    assert caught.value is error


def test_a_row_that_is_longer_than_the_system_holds_names_its_longest_column() -> None:
    rows = pa.record_batch(
        {
            "a": pa.array(["x" * 60, "é" * 30, None, "x"]),
            "b": pa.array([b"y" * 40, b"y" * 41, b"y" * 101, b"y"], pa.large_binary()),
            "n": pa.array([1, 2, 3, 4], pa.int64()),
        }
    )
    found = unstorable(Range(row_bytes=100), rows)
    assert found is not None
    assert found.to_pylist() == [
        None,
        "column 'a': 60 bytes, and 101 with the row's other columns; a row holds 100",
        "column 'b': 101 bytes, and 101 with the row's other columns; a row holds 100",
        None,
    ]
    assert unstorable(Range(row_bytes=101), rows) is None
