"""The ledger's tables, versioned, in their own database.

The server commits each DDL statement implicitly: an interrupted migration is rerun from its first statement, so every
statement is idempotent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from delivered.connectors.mysql import errors
from delivered.kits.sql.database import is_newest, quoted

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session

_NAME = "varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
_SCOPE = f"pipeline {_NAME}, sink {_NAME}, incarnation {_NAME}, batch bigint NOT NULL"
_MADE = "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_GROWS = "n bigint unsigned NOT NULL AUTO_INCREMENT"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.owner (
            pipeline {_NAME}, sink {_NAME}, id varchar(255) NOT NULL, epoch bigint NOT NULL,
            host varchar(255) NOT NULL, process bigint NOT NULL, started_ms bigint NOT NULL,
            superseded longtext NOT NULL, session varchar(32) NOT NULL DEFAULT '',
            PRIMARY KEY (pipeline, sink)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.decision (
            {_SCOPE}, decision longtext NOT NULL, decided_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
            {_GROWS}, PRIMARY KEY (pipeline, sink, incarnation, batch), UNIQUE KEY (n)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.begun (
            {_SCOPE}, offsets longtext NOT NULL, begun_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
            {_GROWS}, PRIMARY KEY (pipeline, sink, incarnation), UNIQUE KEY (n)) {_MADE}""",
        # Not unique by shard: two attempts with open markers would block each other forever.
        f"""CREATE TABLE IF NOT EXISTS {{s}}.marker (
            {_SCOPE}, shard integer NOT NULL, gid varchar(191) NOT NULL, fingerprint varchar(255) NOT NULL,
            {_GROWS}, PRIMARY KEY (n), KEY of_shard (pipeline, sink, incarnation, batch, shard)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.target (
            base varchar(64) NOT NULL, name varchar(64) NOT NULL, arrow_schema longblob NOT NULL,
            PRIMARY KEY (base, name)) {_MADE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.memory (
            pipeline {_NAME}, sink {_NAME}, incarnation {_NAME}, number bigint NOT NULL,
            batch bigint NOT NULL, newest_us bigint NOT NULL, former_us bigint NOT NULL, made_ms bigint NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation), UNIQUE KEY of_number (number)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.noted (
            number bigint NOT NULL, epoch bigint NOT NULL, batch bigint NOT NULL, hash binary(16) NOT NULL,
            at_us bigint NOT NULL, until_us bigint NOT NULL,
            PRIMARY KEY (number, epoch, batch, hash, at_us)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.seen (
            number bigint NOT NULL, hash binary(16) NOT NULL, until_us bigint NOT NULL, batch bigint NOT NULL,
            PRIMARY KEY (number, hash, until_us), KEY of_time (number, until_us)) {_MADE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.archive (
            pipeline {_NAME}, sink {_NAME}, incarnation {_NAME}, entry varbinary(32) NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation)) {_MADE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.left_out (
            {_SCOPE}, kind varchar(16) NOT NULL, total bigint NOT NULL,
            {_GROWS}, PRIMARY KEY (n), KEY of_batch (pipeline, sink, incarnation, batch)) {_MADE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.dead_letter (
            {_SCOPE}, shard integer NOT NULL, reason text NOT NULL, record longtext NOT NULL,
            {_GROWS}, PRIMARY KEY (n)) {_MADE}""",
    ),
)
"""Statements that migrate from version n to n + 1. Append-only."""

ALONE_S = 30
_LOCK = "delivered.tables"


def with_values(schema: str) -> str:
    """The ledger's database, quoted for a statement with parameters."""
    return quoted(schema).replace("%", "%%")


def version_of(connection: Session, schema: str) -> int:
    """Version of the ledger's tables; 0: they do not exist. Raises MySQLError."""
    try:
        row = connection.execute(f"SELECT coalesce(max(version), 0) FROM {quoted(schema)}.migration").fetchone()
    except Exception as error:
        if errors.number_of(error) in (errors.NO_TABLE, errors.NO_DATABASE):
            return 0
        raise
    return int(row[0])


def migrate(connection: Session, schema: str) -> None:
    """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

    Raises:
        UsageError: a newer version of this package created them.
        MySQLError: the server rejected it.
    """
    if is_newest(version_of(connection, schema), len(MIGRATIONS), f"in database {schema!r}"):
        return
    s = quoted(schema)
    with alone(connection):
        # IF NOT EXISTS requires the CREATE privilege even if everything exists.
        there = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
        if connection.execute(there, [schema]).fetchone() is None:
            connection.execute(f"CREATE DATABASE IF NOT EXISTS {s} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
        if version_of(connection, schema) == 0:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {s}.migration (version integer PRIMARY KEY, "
                f"applied_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)) {_MADE}"
            )
        # Check again: another process may have been faster.
        for version in range(version_of(connection, schema), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(statement.format(s=s))
            connection.execute(
                f"INSERT IGNORE INTO {with_values(schema)}.migration (version) VALUES (%s)", [version + 1]
            )


@contextlib.contextmanager
def alone(connection: Session) -> Iterator[None]:
    """Serialize our migrations on this server; continue without the lock after 30 s, as every statement is
    idempotent."""
    held = connection.execute("SELECT GET_LOCK(%s, %s)", [_LOCK, ALONE_S]).fetchone()[0]
    try:
        yield
    finally:
        if held:
            with contextlib.suppress(Exception):
                connection.execute("SELECT RELEASE_LOCK(%s)", [_LOCK])
