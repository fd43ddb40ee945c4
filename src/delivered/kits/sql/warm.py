"""Connections of tasks, pooled in the reused worker between shards: opening one costs the server a session."""

from __future__ import annotations

from typing import Any

from delivered.kits.sql.database import C, Server
from delivered.kits.warm import WarmClients

_idle: WarmClients[Any] = WarmClients(4)


def take(server: Server[C]) -> C:
    """Take a live connection outside any transaction, for exclusive use until `give`.

    Raises:
        DeliveredError: see `Database.connect`.
    """
    connection: C | None = _idle.take(server)
    if connection is not None:
        try:
            connection.execute("SELECT 1")
            return connection
        except server.errors():  # the server was restarted
            server.discard(connection)
    return server.connect("task")


def give(server: Server[C], connection: C) -> None:
    """Return a connection for the next shard; it is closed if a transaction is open on it."""
    if server.idle(connection):
        _idle.give(server, connection)
    else:
        server.discard(connection)
