"""The ledger's tables in the user's database, versioned."""

from __future__ import annotations

import sqlite3
import time

from delivered.connectors.sqlite.database import explained, writing
from delivered.kits.sql.database import is_newest
from delivered.model.limits import CONNECT_TIMEOUT_S

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE _delivered_owner (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, id TEXT NOT NULL, epoch INTEGER NOT NULL,
            host TEXT NOT NULL, process INTEGER NOT NULL, started_ms INTEGER NOT NULL, superseded TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink))""",
        """CREATE TABLE _delivered_decision (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            decision TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation, batch))""",
        """CREATE TABLE _delivered_begun (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            offsets TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        "CREATE TABLE _delivered_table (name TEXT PRIMARY KEY, arrow_schema BLOB NOT NULL)",
    ),
    (
        """CREATE TABLE _delivered_memory (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, number INTEGER NOT NULL UNIQUE,
            batch INTEGER NOT NULL, newest_us INTEGER NOT NULL, former_us INTEGER NOT NULL, made_ms INTEGER NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        """CREATE TABLE _delivered_noted (
            number INTEGER NOT NULL, epoch INTEGER NOT NULL, batch INTEGER NOT NULL, hash BLOB NOT NULL,
            at_us INTEGER NOT NULL, until_us INTEGER NOT NULL,
            PRIMARY KEY (number, epoch, batch, hash, at_us)) WITHOUT ROWID""",
        """CREATE TABLE _delivered_seen (
            number INTEGER NOT NULL, hash BLOB NOT NULL, until_us INTEGER NOT NULL, batch INTEGER NOT NULL,
            PRIMARY KEY (number, hash, until_us)) WITHOUT ROWID""",
        "CREATE INDEX _delivered_seen_of_time ON _delivered_seen (number, until_us)",
    ),
    (
        """CREATE TABLE _delivered_archive (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, entry BLOB NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation)) WITHOUT ROWID""",
    ),
)
"""Statements that lead from version n to n + 1. Only ever appended to."""


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the ledger's tables; 0: there are none."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = '_delivered_migration'").fetchone() is None:
        return 0
    row = connection.execute("SELECT coalesce(max(version), 0) FROM _delivered_migration").fetchone()
    return int(row[0])


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring the ledger's tables to the newest version; do nothing if they are there.

    Raises:
        UsageError: a newer version of this package wrote them.
        DeliveredError: the database said no.
    """
    try:
        if is_newest(version_of(connection), len(MIGRATIONS), f"in {path!r}"):
            return
    except sqlite3.Error as error:
        raise explained(error, path) from error
    with writing(connection, path, CONNECT_TIMEOUT_S):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS _delivered_migration (version INTEGER PRIMARY KEY, applied_at_ms INTEGER)"
        )
        # Looked at again: another process may have been faster.
        for version in range(version_of(connection), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO _delivered_migration VALUES (?, ?)", (version + 1, time.time_ns() // 1_000_000)
            )
