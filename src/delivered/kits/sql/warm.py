"""Connections of tasks, pooled in the reused worker between shards: opening one costs the server a session."""

from __future__ import annotations

import os
from typing import Any

from delivered.kits.sql.database import C, Server

IDLE_MAX = 4

_idle: list[tuple[int, Server[Any], Any]] = []


def take(server: Server[C]) -> C:
    """Take a live connection outside any transaction, for exclusive use until `give`.

    Raises:
        DeliveredError: see `Database.connect`.
    """
    own = os.getpid()  # a forked process must not use its parent's connections
    for at, (pid, known, connection) in enumerate(_idle):
        if pid == own and known == server:
            del _idle[at]
            try:
                connection.execute("SELECT 1")
                found: C = connection
                return found
            except server.errors():  # the server was restarted
                server.discard(connection)
                break
    return server.connect("task")


def give(server: Server[C], connection: C) -> None:
    """Return a connection for the next shard; it is closed if a transaction is open on it."""
    if not server.idle(connection):
        server.discard(connection)
        return
    _idle.append((os.getpid(), server, connection))
    while len(_idle) > IDLE_MAX:
        _, former, oldest = _idle.pop(0)
        former.discard(oldest)
