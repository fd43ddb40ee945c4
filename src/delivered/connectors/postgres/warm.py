"""Connections of tasks, kept open in the reused worker between shards: a new one costs a process of the server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.client import connect, discard
from delivered.connectors.postgres.options import PostgresOptions

if TYPE_CHECKING:
    import psycopg

IDLE_MAX = 4

_idle: list[tuple[int, PostgresOptions, psycopg.Connection[Any]]] = []


def take(options: PostgresOptions) -> psycopg.Connection[Any]:
    """A connection outside of any transaction that answers now; nobody else has it until `give`.

    Raises:
        Unreachable, UsageError: see `connect`.
    """
    import psycopg

    own = os.getpid()  # a forked process must not use its parent's connections
    for at, (pid, known, connection) in enumerate(_idle):
        if pid == own and known == options:
            del _idle[at]
            try:
                connection.execute("SELECT 1")
                return connection
            except psycopg.Error:  # the server was restarted meanwhile
                discard(connection)
                break
    return connect(options)


def give(options: PostgresOptions, connection: psycopg.Connection[Any]) -> None:
    """Keep a connection for the next shard, unless something is open on it."""
    from psycopg.pq import TransactionStatus

    if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
        discard(connection)
        return
    _idle.append((os.getpid(), options, connection))
    while len(_idle) > IDLE_MAX:
        discard(_idle.pop(0)[2])
