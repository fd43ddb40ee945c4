"""Dates and times in PostgreSQL's text form."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.kits.sql.database import days, micros

DAY_US = 86_400_000_000
GREATEST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1970-01-01", 0), ("9999-12-31", 2_932_896), ("10000-01-01", 2_932_897), ("20000-01-01", 6_585_322),
        ("0001-01-01", -719_162), ("0001-12-31 BC", -719_163), ("0001-01-01 BC", -719_528), ("0001-02-29 BC", -719_469),
        ("4714-11-24 BC", -2_440_588), ("5874897-12-31", 2_145_042_905),
    ],
)  # fmt: skip
def test_dates(text: str, number: int) -> None:
    assert days(text) == number
    if number < 10**8:
        day, era = text.removesuffix(" BC"), " BC" * text.endswith(" BC")
        assert micros(f"{day} 00:00:00{era}", zoned=False) == number * DAY_US


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1970-01-01 00:00:00.5+00", 500_000), ("1970-01-01 02:00:00+02", 0), ("1970-01-01 05:30:00.000001+05:30", 1),
        ("1969-12-31 19:03:58-04:56:02", 0), ("0001-01-01 00:30:00+01", -719_162 * DAY_US - 30 * 60_000_000),
        ("0001-12-31 23:30:00-01 BC", -719_162 * DAY_US + 30 * 60_000_000),
        ("20000-01-01 00:00:00.000001+00", 6_585_322 * DAY_US + 1), ("294247-01-10 04:00:54.775807+00", GREATEST),
    ],
)  # fmt: skip
def test_times_with_an_offset(text: str, number: int) -> None:
    assert micros(text, zoned=True) == number


@pytest.mark.parametrize(
    "text",
    ["infinity", "-infinity", "294247-01-10 04:00:54.775808+00", "294276-12-31 23:59:59+00", "", "now", "0000-00-00"],
)
def test_what_spark_has_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"Spark|day is out|month must"):
        micros(text, zoned=True)
    with pytest.raises(ValueError, match=r"Spark|day is out|month must"):
        days("5881580-07-12" if text[:1] == "2" else text)


@given(st.datetimes())
def test_as_python_reads_them(at: dt.datetime) -> None:
    expected = (at - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)  # noqa: DTZ001
    assert micros(str(at), zoned=False) == expected
    assert days(str(at.date())) == expected // DAY_US
