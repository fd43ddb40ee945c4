"""How a session writes values as text, whatever its role, database or server set.

PostgreSQL's logical decoding, COPY and casts to text follow the settings of the session that reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from delivered.model.errors import UsageError

if TYPE_CHECKING:
    import psycopg

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
