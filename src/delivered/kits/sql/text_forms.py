"""How a session writes values as text, whatever its role, database or server set; and dates and times read back from
PostgreSQL's, as the numbers that Arrow stores: exact beyond Python's years.

PostgreSQL's logical decoding, COPY and casts to text follow the settings of the session that reads.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from delivered.model.errors import UsageError
from delivered.model.ranges import INT32, INT64

if TYPE_CHECKING:
    import psycopg


_DATE = r"(\d{4,})-(\d\d)-(\d\d)"
_CLOCK = r" (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
_ZONE = r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?"
_TEXT = re.compile(rf"{_DATE}(?:{_CLOCK}{_ZONE})?( BC)?")
_EPOCH, _EPOCH_LOCAL = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(1970, 1, 1)  # noqa: DTZ001
_MICROSECOND = dt.timedelta(microseconds=1)
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""The Gregorian calendar repeats itself."""


def days(text: str) -> int:
    """
    Returns:
        Days since 1970-01-01.

    Raises:
        ValueError: no date that a number of 32 bits holds, such as infinity.
    """
    return _within(_parsed(text)[0], INT32, text)


def micros(text: str, zoned: bool) -> int:
    """
    Args:
        zoned: the text ends with its offset from UTC.

    Returns:
        Microseconds since 1970-01-01, in UTC if zoned.

    Raises:
        ValueError: no time that a number of 64 bits holds, such as infinity.
    """
    try:
        found = dt.datetime.fromisoformat(text)
        return (found - (_EPOCH if zoned else _EPOCH_LOCAL)) // _MICROSECOND
    except TypeError:
        raise ValueError(f"{text!r} has an offset from UTC, or lacks it") from None
    except ValueError:  # outside the years 1 to 9999
        day, clock = _parsed(text)
        return _within(day * 86_400_000_000 + clock, INT64, text)


def _parsed(text: str) -> tuple[int, int]:
    """Days, and microseconds of the day in UTC, which may be of another day."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no date or time that Spark has")
    year, month, day, *clock, sign, hours, minutes, seconds, before = found.groups()
    number = 1 - int(year) if before else int(year)
    cycles, rest = divmod(number - 1, _CYCLE_YEARS)
    since = dt.date(rest + 1, int(month), int(day)) - _EPOCH_LOCAL.date()
    h, m, s, fraction = clock
    at = (int(h or 0) * 60 + int(m or 0)) * 60 + int(s or 0)
    offset = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    at = at + offset if sign == "-" else at - offset
    return since.days + cycles * _CYCLE_DAYS, at * 1_000_000 + int((fraction or "").ljust(6, "0"))


def _within(number: int, bounds: tuple[int, int], text: str) -> int:
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"{text!r} is later or earlier than Spark's dates and times")
    return number


POSTGRES = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
}


def pin_postgres(connection: psycopg.Connection[Any], place: str) -> None:
    """Set them, outside any transaction, and check that it took. For walsenders, too, which take no parameters.

    Raises:
        UsageError: the session keeps another value.
        psycopg.Error: the server rejected it.
    """
    connection.execute("SELECT " + ", ".join(f"set_config('{k}', '{v}', false)" for k, v in POSTGRES.items()))
    row = connection.execute("SELECT " + ", ".join(f"current_setting('{k}')" for k in POSTGRES)).fetchone()
    if not connection.autocommit:
        connection.commit()  # a rollback would set them back
    check_postgres(dict(zip(POSTGRES, map(str, row or ()), strict=True)), place)


def check_postgres(found: Mapping[str, str], place: str) -> None:
    """Raises UsageError: a session has other forms than `POSTGRES`."""
    wrong = [name for name, value in POSTGRES.items() if found[name] != value]
    if wrong:
        raise setting_refused(wrong[0], found[wrong[0]], place)


def setting_refused(name: str, value: str, place: str) -> UsageError:
    return UsageError(
        "SETTING_REFUSED",
        f"PostgreSQL at {place} keeps {name} = {value!r} in this session although it was set: commits, or values as "
        "text, would depend on it.",
        next_step="connect to the server itself, or to a pooler in session mode",
    )
