"""The ledger's tables, versioned, in their own schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.kits.sql.database import is_newest, quoted

if TYPE_CHECKING:
    import psycopg

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE {s}.owner (
            pipeline text NOT NULL, sink text NOT NULL, id text NOT NULL, epoch bigint NOT NULL,
            host text NOT NULL, process bigint NOT NULL, started_ms bigint NOT NULL, superseded text[] NOT NULL,
            PRIMARY KEY (pipeline, sink))""",
        """CREATE TABLE {s}.decision (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            decision text NOT NULL, decided_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (pipeline, sink, incarnation, batch))""",
        """CREATE TABLE {s}.begun (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            offsets text NOT NULL, begun_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (pipeline, sink, incarnation))""",
        # Not unique by shard: two attempts with open markers would block each other forever.
        """CREATE TABLE {s}.marker (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            shard integer NOT NULL, gid text NOT NULL, fingerprint text NOT NULL)""",
        "CREATE INDEX marker_of_shard ON {s}.marker (pipeline, sink, incarnation, batch, shard)",
        "CREATE TABLE {s}.target (relation oid PRIMARY KEY, name text NOT NULL, arrow_schema bytea NOT NULL)",
    ),
    (
        """CREATE TABLE {s}.memory (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, number bigint NOT NULL UNIQUE,
            batch bigint NOT NULL, newest_us bigint NOT NULL, former_us bigint NOT NULL, made_ms bigint NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        """CREATE TABLE {s}.noted (
            number bigint NOT NULL, epoch bigint NOT NULL, batch bigint NOT NULL, hash bytea NOT NULL,
            at_us bigint NOT NULL, until_us bigint NOT NULL, PRIMARY KEY (number, epoch, batch, hash, at_us))""",
        """CREATE TABLE {s}.seen (
            number bigint NOT NULL, hash bytea NOT NULL, until_us bigint NOT NULL, batch bigint NOT NULL,
            PRIMARY KEY (number, hash, until_us))""",
        "CREATE INDEX seen_of_time ON {s}.seen (number, until_us)",
    ),
    (
        """CREATE TABLE {s}.archive (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, entry bytea NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
    ),
    (
        """CREATE TABLE {s}.left_out (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            kind text NOT NULL, total bigint NOT NULL)""",
        "CREATE INDEX left_out_of ON {s}.left_out (pipeline, sink, incarnation, batch)",
        """CREATE TABLE {s}.dead_letter (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            shard integer NOT NULL, reason text NOT NULL, record text NOT NULL)""",
    ),
)
"""Statements that migrate from version n to n + 1. Append-only."""

_LOCK = 0x64656C69
"""Key of the advisory lock for creating schemas and tables."""


def version_of(connection: psycopg.Connection[Any], schema: str) -> int:
    """Version of the ledger's tables; 0: they do not exist. Raises psycopg.Error."""
    table = f"{quoted(schema)}.migration"
    row = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()
    if row is None or row[0] is None:
        return 0
    row = connection.execute(f"SELECT coalesce(max(version), 0) FROM {table}").fetchone()  # noqa: S608
    return int(row[0]) if row else 0


def migrate(connection: psycopg.Connection[Any], schema: str) -> None:
    """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

    Raises:
        UsageError: a newer version of this package created them.
        psycopg.Error: the server rejected it.
    """
    if is_newest(version_of(connection, schema), len(MIGRATIONS), f"in schema {schema!r}"):
        return
    s = quoted(schema)
    with connection.transaction():
        alone(connection)
        # IF NOT EXISTS requires the CREATE privilege even if everything exists.
        if connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema]).fetchone() is None:
            connection.execute(f"CREATE SCHEMA {s}")
        if version_of(connection, schema) == 0:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {s}.migration "
                "(version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        # Check again: another process may have been faster.
        for version in range(version_of(connection, schema), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(statement.format(s=s))
            connection.execute(f"INSERT INTO {s}.migration (version) VALUES (%s)", [version + 1])  # noqa: S608


def alone(connection: psycopg.Connection[Any]) -> None:
    """Serialize our migrations in this database until the transaction ends."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
