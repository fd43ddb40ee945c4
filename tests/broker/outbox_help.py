"""Real databases through every client; an outbox in one, and the source that reads it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pytest

from delivered.connectors.outbox import CONNECTOR
from delivered.contract.source import Offsets, Source
from delivered.model.rows import Rejection, Rows
from delivered.patterns import outbox
from delivered_lab.verify import applications

_names = itertools.count()
METHODS = ["postgres-log", "postgres-poll", "mysql-poll", "sqlite-poll"]


class Database:
    """A database, and connections of a client: the "driver" itself, or a "session" or a "connection" of SQLAlchemy."""

    def __init__(self, dialect: str, url: str, client: str = "driver") -> None:
        self.dialect, self.url, self.client = dialect, url, client

    def raw(self) -> Any:
        return applications.connect(self.dialect, self.url)

    def connect(self) -> Any:
        if self.client == "driver":
            return self.raw()
        import sqlalchemy
        from sqlalchemy.orm import Session

        dialect = {"sqlite": "sqlite", "postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}[self.dialect]
        engine = sqlalchemy.create_engine(f"{dialect}://", creator=self.raw)
        return Session(engine) if self.client == "session" else engine.connect()

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """As a transaction of its own, through a client that is not the tested one."""
        with contextlib.closing(self.raw()) as connection:
            rows = applications.execute(connection, statement)
            connection.commit()
            return rows


D = TypeVar("D", bound=Database)


def database(
    kind: Callable[[str, str, str], D],
    request: pytest.FixtureRequest,
    dialect: str,
    folder: Path,
    client: str = "driver",
) -> D:
    """In the session's server, or in a file."""
    if dialect == "sqlite":
        return kind(dialect, str(folder / "a.db"), client)
    server = request.getfixturevalue(dialect)
    return kind(dialect, server.url if dialect == "postgres" else server.broker.bootstrap, client)


class Shop:
    """A fresh outbox.

    Attributes:
        url: for the source; address: for `applications`.
    """

    def __init__(self, dialect: str, url: str, address: str, method: str = "poll") -> None:
        self.dialect, self.url, self.address, self.method = dialect, url, address, method
        self.table = f"box{next(_names)}"
        self.layout = outbox.Layout(table=self.table)
        self.execute(outbox.ddl(dialect, self.layout))

    def connect(self) -> Any:
        return applications.connect(self.dialect, self.address)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """In a transaction of their own; the rows of the last one."""
        with contextlib.closing(self.connect()) as connection:
            rows = [applications.execute(connection, s) for s in statements][-1]
            connection.commit()
            return rows

    def put(self, connection: Any, n: int, **given: Any) -> str:
        id_ = given.pop("id", None) or outbox.new_id()
        message = {"aggregate_type": "order", "aggregate_id": str(n % 3), "type": "created", "payload": {"n": n}}
        outbox.put(connection, id=id_, layout=self.layout, **message | given)
        return str(id_)

    def send(self, *numbers: int, **given: Any) -> list[str]:
        """Each message in a transaction of its own; their ids."""
        with contextlib.closing(self.connect()) as connection:
            ids = []
            for n in numbers:
                ids.append(self.put(connection, n, **given))
                connection.commit()
            return ids

    def left(self) -> int:
        return int(self.execute(f"SELECT COUNT(*) FROM {self.table}")[0][0])

    def source(self, **options: Any) -> Source:
        given = {"url": self.url, "dbtable": self.table, "method": self.method, **options}
        return CONNECTOR.source({k.lower(): str(v) for k, v in given.items() if v is not None})


def shop(request: pytest.FixtureRequest, tmp_path: Path, how: str) -> Shop:
    """Args: how: one of `METHODS`."""
    dialect, _, method = how.partition("-")
    if dialect == "sqlite":
        path = str(tmp_path / f"shop{next(_names)}.db")
        return Shop(dialect, f"sqlite://{path}", path, method)
    server = request.getfixturevalue("postgres_log" if how == "postgres-log" else dialect)
    return Shop(dialect, server.url, server.url if dialect == "postgres" else server.broker.bootstrap, method)


def read(source: Source, start: Offsets, end: Offsets, rejected: list[Rejection] | None = None) -> pa.Table:
    """Args: rejected: collects what cannot become rows; None: that fails."""
    batches = []
    with contextlib.closing(source.driver()) as driver:
        for piece in driver.slices(start, end):
            for rows in map(Rows, source.read(piece)) if rejected is None else source.read_rows(piece):
                batches.append(rows.good)
                if rejected is not None:
                    rejected += rows.rejected
    return pa.Table.from_batches(batches, schema=source.schema())


def ids(table: pa.Table) -> list[str]:
    return [h[0]["value"].decode() for h in table.column("headers").to_pylist()]


class Stream:
    """What Spark does with a source, in one process. `rejected`: what could not become rows; None: that fails."""

    def __init__(self, source: Source, at: Offsets | None = None, *, rejects: bool = False) -> None:
        self.source = source
        self.rejected: list[Rejection] | None = [] if rejects else None
        self.driver = source.driver()
        self.at = self.driver.initial() if at is None else at

    def batch(self, rows_max: int | None = None) -> pa.Table | None:
        """The next batch, logged and acknowledged; None: there is nothing."""
        end = self.driver.latest(self.at, rows_max)
        if end == self.at:
            return None
        found = read(self.source, self.at, end, self.rejected)
        self.driver.acknowledge(end)
        self.at = end
        return found

    def rest(self, rows_max: int | None = None) -> list[str]:
        """Ids of everything that is there now."""
        found: list[str] = []
        while (batch := self.batch(rows_max)) is not None:
            found += ids(batch)
        return found

    def close(self) -> None:
        self.driver.close()


class Table:
    """A fresh table as a change stream; `{}` in a statement is its name."""

    def __init__(self, postgres_log: Any, columns: str) -> None:
        self.server, self.name = postgres_log, f"changes{next(_names)}"
        self.execute(f"CREATE TABLE {{}} ({columns})")

    def execute(self, *statements: str) -> None:
        """In one transaction."""
        import psycopg

        with contextlib.closing(psycopg.connect(self.server.url)) as connection:
            for statement in statements:
                connection.execute(statement.format(self.name))
            connection.commit()

    def source(self, settings: str = "", **options: str) -> Source:
        """As it is planned now. Args: settings: of the session, as a role or a database may set them."""
        url = f"{self.server.url}?options={quote(settings)}" if settings else self.server.url
        return CONNECTOR.source(
            {"url": url, "table": self.name, **{k.lower(): v for k, v in options.items()}}
        ).planned()

    def stream(self, at: Any = None, settings: str = "", **options: str) -> Stream:
        source = self.source(settings, **options)
        assert [f for f in source.preflight() if f.refuses] == []
        return Stream(source, at)


def changed(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows of a change stream, without their positions."""
    return [tuple(row.values()) for row in table.drop_columns(["_lsn"]).to_pylist()]
