"""A table of a PostgreSQL database, read with psycopg by the judge's own statements."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from delivered_lab.verify.proxy import PostgresProxy
from delivered_lab.verify.systems.base import LOCK_TIMEOUT_S, SEEN, Row, SinkKind, SqlTable, Statements, System, as_row

if TYPE_CHECKING:
    import psycopg

_JUDGE = "judge"
_TABLESPACE = "small"


class PgTable(SqlTable):
    """A typed table has an extra column that numbers its rows as they are written; a pipeline that ignored column
    defaults could not write to it. A small disk holds the table, and nothing else of the server."""

    system = "postgres"
    begin_snapshot = ("BEGIN ISOLATION LEVEL REPEATABLE READ",)
    lock = ("BEGIN", f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'", "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")

    def create(self) -> None:
        self.remove()
        with self._session("postgres") as connection:
            if self._place.small is not None:
                place = self._place.small / "tablespace"
                place.mkdir()
                owner = (self._server.folder / "data").stat()
                os.chown(place, owner.st_uid, owner.st_gid)
                connection.execute(f"CREATE TABLESPACE {_TABLESPACE} LOCATION '{place}'")
            connection.execute(f"CREATE DATABASE {self.database}")
        if self._place.typed:
            key, value = self._place.workload.kinds
            unique = " PRIMARY KEY" if self.upserted else ""
            where = f"TABLESPACE {_TABLESPACE}" if self._place.small is not None else ""
            with self._session() as connection:
                connection.execute(
                    f"CREATE TABLE {self.name} (key {key}{unique}, value {value}, {SEEN} bigserial) {where}"
                )

    def remove(self) -> None:
        with self._session("postgres") as connection:
            there = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.database]).fetchone()
        if there is not None:
            self.roll_back_prepared()
        with self._session("postgres") as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
            if self._place.small is not None:
                connection.execute(f"DROP TABLESPACE IF EXISTS {_TABLESPACE}")

    def options(self) -> dict[str, Any]:
        return {
            "format": "postgres",
            # Unencrypted, so that a proxy can parse it.
            "url": f"postgresql://delivered@{self._address}/{self.database}?sslmode=disable&gssencmode=disable",
            "dbtable": self.name,
            **({"ifNotExists": "true"} if not self._place.typed else {}),
            **self._asked,
        }

    def open_transactions(self, pipeline: str) -> list[str]:
        """Prepared transactions, which hold their locks forever, and sessions idle in a transaction that hold locks."""
        with self._session() as connection:
            prepared = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"
            ).fetchall()
            idle = connection.execute(
                "SELECT 'session ' || pid || ' of ' || application_name FROM pg_stat_activity "
                "WHERE datname = current_database() AND state LIKE 'idle in transaction%%' AND application_name <> %s",
                [_JUDGE],
            ).fetchall()
        del pipeline  # the database belongs to the case
        return [str(text) for (text,) in [*prepared, *idle]]

    def roll_back_prepared(self) -> list[str]:
        with self._session() as connection:
            found = connection.execute(
                "SELECT gid, quote_literal(gid) FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
            for _, quoted in found:
                connection.execute(f"ROLLBACK PREPARED {quoted}")
        return [str(gid) for gid, _ in found]

    def _run(self, connection: psycopg.Connection[Any], *statements: str) -> list[tuple[Any, ...]]:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []

    def _lost(self) -> tuple[type[Exception], ...]:
        import psycopg

        return (psycopg.Error,)

    def _connect_once(self, database: str) -> psycopg.Connection[Any]:
        import psycopg

        url = f"postgresql://delivered@{self._server.bootstrap}/{database}"
        return psycopg.connect(url, autocommit=True, connect_timeout=5, application_name=_JUDGE)

    def _drop(self, connection: psycopg.Connection[Any] | None) -> None:
        if connection is not None:
            connection.close()

    def _state(self, connection: psycopg.Connection[Any]) -> tuple[Any, ...]:
        if not self._there(connection):
            return ()
        row = connection.execute(f"SELECT count(*), sum({self._position}) FROM {self.name}").fetchone()  # noqa: S608
        return tuple(row or ())

    def _new(self, connection: psycopg.Connection[Any], known: set[int]) -> list[Row]:
        if not self._there(connection):
            return []
        cursor = connection.execute(
            f"SELECT * FROM (SELECT {self._position} AS {SEEN}_, * FROM {self.name}) AS e "  # noqa: S608
            f"WHERE NOT {SEEN}_ = ANY(%s) ORDER BY 1",
            [list(known)],
        )
        names = [c.name for c in cursor.description or ()]
        rows = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
        kept = [n for n in names if n not in (f"{SEEN}_", SEEN)]
        return [as_row(self.name, int(r[f"{SEEN}_"]), {n: r[n] for n in kept}) for r in rows]

    def _there(self, connection: psycopg.Connection[Any]) -> bool:
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [self.name]).fetchone()
        return row is not None and bool(row[0])

    @property
    def _position(self) -> str:
        if self._place.typed:
            return SEEN
        # For a table created by the pipeline, a row's location: its page, and the place in it.
        return "((ctid::text::point)[0]::bigint * 65536 + (ctid::text::point)[1]::bigint)"


def _sink(name: str, two_phase: bool) -> SinkKind:
    words = Statements("PREPARE TRANSACTION", "COMMIT PREPARED", "COPY")
    return SinkKind(
        name, "postgres", PgTable, "postgres", two_phase=two_phase, locks=True, statements=words, upserts=True, own=True
    )


SYSTEM = System((_sink("postgres", False), _sink("postgres-2pc", True)), proxy=PostgresProxy)
