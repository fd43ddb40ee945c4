"""What a connection to a database sends unencrypted, or to a server that it does not verify: warnings of the plan."""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from delivered.model.addresses import is_loopback

_NOT_REQUIRED = ("disable", "allow", "prefer")


def postgres(url: str) -> tuple[str, ...]:
    """See `delivered.model.options.Options.in_clear`."""
    parts = urlsplit(url)
    given = parse_qs(parts.query)
    named = [urlsplit(f"//{h}").hostname or "" for h in parts.netloc.rpartition("@")[2].split(",")]
    host = given.get("host", [",".join(named) or os.environ.get("PGHOST", "")])[-1]
    mode = given.get("sslmode", [os.environ.get("PGSSLMODE", "prefer")])[-1]
    if mode not in _NOT_REQUIRED or all(is_loopback(h) for h in host.split(",")):
        return ()
    why = "the default" if "sslmode" not in given and "PGSSLMODE" not in os.environ else "as configured"
    return (
        f"the connection to PostgreSQL at {host} is not required to be encrypted (sslmode={mode}, {why}); write "
        "?sslmode=verify-full&sslrootcert=PATH",
    )


def mysql(url: str) -> tuple[str, ...]:
    """See `delivered.model.options.Options.in_clear`."""
    parts = urlsplit(url)
    if parts.query or is_loopback(parts.hostname):
        return ()
    return (
        f"the connection to MySQL at {parts.hostname} is not required to be encrypted, and the server is not verified; "
        "write ?ssl_ca=PATH",
    )
