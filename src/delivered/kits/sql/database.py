"""A database as the user declared it: its SQL dialect, connections, readable errors, queries.

Statements are written once, with `:name` for values and `{table}` for the ledger's tables; a `Dialect` translates them
for the client. Tasks pool their connections in the reused worker: opening one costs the server a session.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from delivered.kits.warm import WarmClients
from delivered.model.errors import DeliveredError, UsageError

T = TypeVar("T")


class Connection(Protocol):
    """The subset of a client's connection used here."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Database(ABC, Generic[C]):
    """One database. Holds no connection; picklable."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Its location, for messages: "at host:5432/shop"."""

    @abstractmethod
    def connect(self, role: str, *, writes: bool = True) -> C:
        """Open a connection. Raises DeliveredError within 15 s.

        Args:
            role: shown in the server's list of sessions.
        """

    @abstractmethod
    def errors(self) -> type[Exception]:
        """Base class of the client's errors; imported on first use."""

    @abstractmethod
    def explained(self, error: Exception) -> DeliveredError:
        """Translate the client's error, with the next step."""

    @abstractmethod
    def is_constraint(self, error: Exception) -> bool:
        """Whether a row violated a constraint: the statement had no effect, its transaction goes on."""

    def at_once(self, connection: C) -> None:
        """Make the open transaction check deferred constraints immediately."""
        del connection

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Translate the client's errors."""
        try:
            yield
        except self.errors() as error:
            raise self.explained(error) from error

    def ask(self, question: Callable[[C], T]) -> T:
        """Run a read-only query on its own connection."""
        connection = self.connect("read", writes=False)
        try:
            with self.explaining():
                return question(connection)
        finally:
            connection.close()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def is_newest(version: int, known: int, ledger: str) -> bool:
    """Whether the ledger's tables need no migration.

    Args:
        ledger: for messages: "in schema 'delivered'".

    Raises:
        UsageError: a newer version of this package created them.
    """
    if version > known:
        raise UsageError(
            "LEDGER_NEWER",
            f"The ledger {ledger} has version {version}; this version of delivered supports up to {known}.",
            next_step="pip install --upgrade delivered",
        )
    return version == known


class Server(Database[C]):
    """One database of one server. Holds no connection; picklable; equal if declared alike."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection was lost, so that the outcome of the last statement is unknown."""

    @abstractmethod
    def is_locked(self, error: BaseException) -> bool:
        """Whether a lock wait timed out: the statement had no effect and may be retried."""

    @abstractmethod
    def idle(self, connection: C) -> bool:
        """Whether the connection is open and outside any transaction, by the client's state; no round trip."""

    @abstractmethod
    def version(self, connection: C) -> int:
        """Version of the ledger's tables; 0: they do not exist. Raises the client's error."""

    @abstractmethod
    def migrate(self, connection: C) -> None:
        """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

        Raises:
            UsageError: a newer version of this package created them.
            The client's error: the server rejected it.
        """

    def discard(self, connection: C | None) -> None:
        """Close a connection, which rolls back its open transaction. Never raises."""
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()


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


@dataclass(frozen=True)
class Dialect:
    """
    Attributes:
        tables: the ledger's table names -> the database's, quoted for SQL.
        value: ":name" in the client's notation.
        written: table -> column that increases with each insert.
        now: SQL of that column in a new row of `begun`, if the database does not number rows by itself.
        hold: suffix of a SELECT that locks the row until the transaction ends.
        pack, unpack: convert a list of names to and from the client's form.
        hash: bytes as an SQL literal.
    """

    tables: dict[str, str]
    value: Callable[[str], str]
    written: dict[str, str]
    hold: str
    pack: Callable[[Sequence[str]], Any]
    unpack: Callable[[Any], Sequence[str]]
    hash: Callable[[bytes], str]
    now: str = ""

    def __call__(self, statement: str) -> str:
        return self.value(statement).format(**self.tables)

    def known(self, keys: str, column: str | None) -> str:
        """Suffix of an INSERT that updates `column` of existing rows; None: leaves them unchanged."""
        return f"ON CONFLICT ({keys}) DO " + (f"UPDATE SET {column} = excluded.{column}" if column else "NOTHING")

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Delete rows that are committed, or that this connection wrote. Inside an open transaction, or as its own."""
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), values)

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Bulk-delete rows that no other connection uses, by an index, inside an open transaction.

        Args:
            index: on the columns of `where`.
        """
        del index
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), {})
