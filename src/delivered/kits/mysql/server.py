"""A MySQL or MariaDB server: its address in a URL, and what the numbers of its errors mean."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

PORT_DEFAULT = 3306

LOGIN = frozenset({1045, 1130, 1251, 1698, 1820, 2059, 3118, 3955, 4151})
LOST = frozenset({0, 1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2002, 2003, 2006, 2013, 2014,
                  2055, 3032, 3169, 4031})  # fmt: skip
"""The connection was lost, so that the outcome of the last statement is unknown; 0: it was closed already."""
DENIED = frozenset({1044, 1142, 1143, 1227, 1370, 1401, 1410})


def address(url: str, user: str | None = None) -> dict[str, Any]:
    """PyMySQL's settings that name the server, the database and the user: this one, or the URL's."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname or "localhost",
        "port": parts.port or PORT_DEFAULT,
        "user": user or (unquote(parts.username) if parts.username else None),
        "database": unquote(parts.path.strip("/")),
    }
