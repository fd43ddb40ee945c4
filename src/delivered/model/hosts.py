"""Names and addresses of hosts."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Whether a host is this machine. None, or a path: a socket file."""
    if not host or host.startswith("/") or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
